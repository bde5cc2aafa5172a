"""Configs: options by name, checkpoints in both layouts, refusals by name."""

from pathlib import Path
from typing import Any

import pytest

from nanospec.config import EMBEDDED_PAIR, EngineConfig, ModelConfig, parse_adaptive
from nanospec.errors import CheckpointError, ConfigError

HF: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128,
    "rope_theta": 1e6,
}
LLAMA = HF | {"architectures": ["LlamaForCausalLM"]}


@pytest.mark.parametrize(
    ("options", "draft"),
    [
        ({}, True),
        ({"model": None, "speculator": "dspark-tree"}, True),
        ({"speculator": "none"}, False),
        ({"speculator": "ngram"}, False),
        ({"speculator": "draft"}, False),
        ({"draft": "mine"}, "mine"),
    ],
)
def test_without_a_model_it_is_the_embedded_pair(
    options: dict[str, Any], draft: bool | str
) -> None:
    config = EngineConfig.from_options(options)
    assert config.model == str(EMBEDDED_PAIR / "target")
    own = {True: str(EMBEDDED_PAIR / "drafter"), False: None}
    assert config.draft == (draft if isinstance(draft, str) else own[draft])


def test_an_empty_model_is_not_the_embedded_pair() -> None:
    assert EngineConfig.from_options({"model": ""}).model == ""


def test_an_unknown_option_is_refused_with_the_likely_one() -> None:
    with pytest.raises(ConfigError, match="page_size"):
        EngineConfig.from_options({"model": "x", "pagesize": 4})


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "int8"},
        {"device": "tpu"},
        {"attention": "flash"},
        {"acceptance": "always"},
        {"max_draft_len": 64},
        {"max_draft_len": 0},
        {"adaptive": "maybe"},
        {"adaptive": "schedule:[[1,16,8]]", "max_draft_len": 7},
        {"adaptive": "schedule:[[1,16,64]]"},
        {"adaptive": "schedule:[[5,2,1]]"},
        {"adaptive": "schedule:nonsense"},
        {"adaptive": "schedule:[[1,2.5,1]]"},
        {"adaptive": "schedule:[]"},
        {"adaptive": "threshold:1.5"},
        {"adaptive": "threshold"},
        {"adaptive": "threshold:NaN"},
        {"adaptive": "auto"},
        {"adaptive": "auto:1"},
        {"load_format": "gguf"},
        {"page_size": 0},
        {"max_num_seqs": 0},
        {"max_model_len": 0},
        {"max_num_batched_tokens": 8, "max_num_seqs": 9},
        {"kv_cache_gib": 0},
        {"kv_cache_gib": float("nan")},
        {"kv_cache_gib": float("inf")},
        {"page_size": "16"},
        {"max_num_seqs": 2.0},
        {"gpu_memory_utilization": 0},
        {"gpu_memory_utilization": 1.5},
    ],
)
def test_impossible_options_are_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as raised:
        EngineConfig(model="x", **options)
    assert next(iter(options)) in str(raised.value)


def test_by_default_a_forward_has_rows_for_prompts_beside_all_plans() -> None:
    config = EngineConfig(model="x", max_num_seqs=256)
    assert [config.forward_rows(rows) for rows in (1, 8)] == [256 + 2048, 8 * 256 + 2048]
    own = EngineConfig(model="x", max_num_seqs=256, max_num_batched_tokens=256)
    assert own.forward_rows(8) == 256  # whatever plans would like
    assert EngineConfig(model="x", max_num_seqs=5000).forward_rows(1) == 5000 + 2048


def test_wide_plans_of_many_requests_do_not_make_a_forward_ever_larger() -> None:
    config = EngineConfig(model="x", max_num_seqs=256)
    assert (config.forward_rows(64), config.graph_rows(64)) == (4096 + 2048, 4096 + 1024)


def test_adaptive_modes_are_understood() -> None:
    assert parse_adaptive("off", 7) == ("off", None)
    assert parse_adaptive("auto", 7) == ("auto", None)
    assert parse_adaptive("threshold:0.5", 7) == ("threshold", 0.5)
    rows = ((1, 16, 7), (17, 128, 5))
    assert parse_adaptive("schedule:[[1,16,7],[17,128,5]]", 7) == ("schedule", rows)


# Other engines: EAGLE 223 and 315 (head_dim derived from the hidden size).
def test_head_dim_is_read_where_given_and_derived_where_not() -> None:
    assert ModelConfig.from_hf(HF).head_dim == 32
    assert ModelConfig.from_hf(LLAMA | {"head_dim": None}).head_dim == 16


# Other engines: speculators PR 574, vllm PR 51092 (rope spread over three keys).
@pytest.mark.parametrize(
    ("keys", "kind", "theta"),
    [
        ({"rope_theta": 5e5}, "default", 5e5),
        ({"rope_theta": 5e5, "rope_scaling": None}, "default", 5e5),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}}, "linear", 5e5),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "yarn", "factor": 4}}, "yarn", 5e5),
        (
            {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 7}},
            "default",
            7,
        ),
        ({"rope_theta": 5e5, "rope_parameters": {"rope_theta": 7}}, "default", 7),
        (  # added by hand to a newer config: it wins, as in transformers
            {
                "rope_theta": None,
                "rope_parameters": {"rope_theta": 7, "rope_type": "default"},
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
            },
            "yarn",
            7,
        ),
    ],
)
def test_rope_is_read_from_every_layout(keys: dict[str, Any], kind: str, theta: float) -> None:
    rope = ModelConfig.from_hf(HF | keys).rope
    assert (rope.kind, rope.theta) == (kind, theta)


def test_only_llama_may_leave_out_theta() -> None:
    assert ModelConfig.from_hf(LLAMA | {"rope_theta": None}).rope.theta == 1e4
    with pytest.raises(CheckpointError, match="rope_theta"):
        ModelConfig.from_hf(HF | {"rope_theta": None})


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "Qwen3MoeForCausalLM"),
        ({"architectures": None}, "none"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2}}, "longrope"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2}}, "low_freq_factor"),
        ({"rope_parameters": {"rope_theta": 1, "partial_rotary_factor": 0.5}}, "partial_rotary"),
        ({"use_sliding_window": True, "sliding_window": 4096}, "sliding_window"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"layer_types": ["linear_attention"]}, "linear_attention"),
        ({"num_experts": 8}, "num_experts"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": None}, "vocab_size"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"num_key_value_heads": 3}, "multiple"),
        ({"head_dim": 13}, "even"),
        ({"rope_parameters": "yarn"}, "must be objects"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "x"}}, "factor"),
        ({"eos_token_id": "1"}, "eos_token_id"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        ModelConfig.from_hf(HF | keys)


def test_an_inert_sliding_window_is_no_reason_to_refuse() -> None:
    ModelConfig.from_hf(HF | {"use_sliding_window": False, "sliding_window": 4096})


@pytest.mark.parametrize(
    ("config", "generation", "eos"),
    [(1, None, (1,)), (1, 2, (2,)), ([1, 3], None, (1, 3)), (1, [2, 4], (2, 4)), (None, None, ())],
)
def test_generation_config_names_the_eos_tokens(config: Any, generation: Any, eos: Any) -> None:
    extra = {} if generation is None else {"eos_token_id": generation}
    assert ModelConfig.from_hf(HF | {"eos_token_id": config}, extra).eos_token_ids == eos


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        ModelConfig.from_folder(tmp_path)
