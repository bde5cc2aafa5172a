"""A drafter's config and checkpoint: what is read, what is shared, and what is refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanospec.config import EngineConfig, ModelConfig
from nanospec.errors import CheckpointError, ConfigError
from nanospec.models.decoder import Decoder
from nanospec.models.dspark import DSparkConfig, DSparkDrafter
from nanospec.models.loader import load_decoder, load_drafter
from nanospec.spec.draft_model import DraftModelSpeculator
from nanospec.spec.dspark import DSparkSpeculator
from nanospec.spec.registry import create_speculator
from nanospec.spec.speculator import SpeculatorSetup
from tests import helpers

Tensors = dict[str, Tensor]
GOLDEN = Path(__file__).parent.parent / "data" / "golden" / "A"
CPU = torch.device("cpu")


def load_target(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    return load_decoder(folder, ModelConfig.from_folder(folder), dtype=dtype, device=CPU)


def load(folder: Path, target: Decoder, load_format: str = "auto") -> DSparkDrafter:
    config = DSparkConfig.from_folder(folder)
    return load_drafter(folder, config, target, load_format=load_format)


@pytest.fixture(scope="module")
def golden_target() -> Decoder:
    """The golden case's target, which ties embedding and head."""
    return load_target(GOLDEN / "target")


@pytest.fixture(scope="module")
def untied(llama: Path) -> Decoder:
    """A target whose head is not its embedding."""
    return load_target(llama)


def rewritten(to: Path, change: Callable[[Tensors], object], source: Path = GOLDEN) -> Path:
    """Copy a drafter with changed tensors."""
    (to / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors")
    return to


def configured(**changes: Any) -> dict[str, Any]:
    """Return the golden config with changed fields; None takes a field away."""
    config = json.loads((GOLDEN / "config.json").read_text()) | changes
    return {name: value for name, value in config.items() if value is not None}


def same_weights(left: DSparkDrafter, right: DSparkDrafter) -> bool:
    pairs = zip(left.named_parameters(), right.named_parameters(), strict=True)
    return all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in pairs)


def test_every_released_tensor_lands_in_its_place(golden_target: Decoder) -> None:
    tensors, drafter = load_file(GOLDEN / "model.safetensors"), load(GOLDEN, golden_target)
    layer: Any = drafter.layers[1]
    names = [f"layers.1.self_attn.{name}_proj.weight" for name in "qkv"]
    assert torch.equal(layer.self_attn.qkv_proj.weight, torch.cat([tensors[n] for n in names]))
    names = [f"layers.1.mlp.{name}_proj.weight" for name in ("gate", "up")]
    assert torch.equal(layer.mlp.gate_up_proj.weight, torch.cat([tensors[n] for n in names]))
    own = dict(drafter.named_parameters())
    plain = {name for name in tensors if name in own}
    assert all(torch.equal(own[name], tensors[name]) for name in plain)
    fused = {name for name in own if "qkv_proj" in name or "gate_up_proj" in name}
    # A tied target has one table; of the drafter's two, the second one is that table, too.
    assert set(own) - fused == plain and set(tensors) - plain == {"lm_head.weight"} | {
        f"layers.{i}.{name}.weight"
        for i in range(2)
        for name in (
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "mlp.gate_proj",
            "mlp.up_proj",
        )
    }


def test_a_prefix_model_is_optional(golden_target: Decoder, tmp_path: Path) -> None:
    def add_prefix(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[f"model.{name}"] = tensors.pop(name)

    folder = rewritten(tmp_path, add_prefix)
    assert same_weights(load(folder, golden_target), load(GOLDEN, golden_target))


def test_shards_with_an_index_load_like_one_file(golden_target: Decoder, tmp_path: Path) -> None:
    tensors = load_file(GOLDEN / "model.safetensors")
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, own in shards.items():
        save_file({name: tensors[name] for name in own}, tmp_path / file)
    weight_map = {name: file for file, own in shards.items() for name in own}
    helpers.write_json(tmp_path / "model.safetensors.index.json", {"weight_map": weight_map})
    helpers.write_json(tmp_path / "config.json", configured())
    assert same_weights(load(tmp_path, golden_target), load(GOLDEN, golden_target))


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tables_that_are_the_targets_own_are_shared(
    qwen3: Path, llama: Path, tmp_path: Path, stored: bool, dtype: torch.dtype
) -> None:
    for family in (qwen3, llama):
        target = load_target(family, dtype)
        folder = helpers.make_drafter(tmp_path / family.name, family)
        if not stored:
            tensors = load_file(folder / "model.safetensors")
            del tensors["embed_tokens.weight"], tensors["lm_head.weight"]
            save_file(tensors, folder / "model.safetensors")
        drafter = load(folder, target)
        for name in ("embed_tokens", "lm_head"):
            own, its = getattr(drafter, name).weight, getattr(target, name).weight
            assert own.data_ptr() == its.data_ptr() and own.dtype == dtype


@pytest.mark.parametrize("changed", ["embed_tokens", "lm_head"])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_table_that_differs_is_the_drafters_own(
    tmp_path: Path, request: pytest.FixtureRequest, family: str, changed: str
) -> None:
    source = request.getfixturevalue(family)
    target = load_target(source)
    before = {name: p.clone() for name, p in target.named_parameters()}
    drafter_folder = helpers.make_drafter(tmp_path / "draft", source)
    tensors = load_file(drafter_folder / "model.safetensors")
    tensors[f"{changed}.weight"][3, 5] += 1.0
    save_file(tensors, drafter_folder / "model.safetensors")
    drafter = load(drafter_folder, target)
    for name in ("embed_tokens", "lm_head"):
        own, its = getattr(drafter, name).weight, getattr(target, name).weight
        assert (own.data_ptr() == its.data_ptr()) == (name != changed)
        assert torch.equal(own, tensors[f"{name}.weight"])
    assert all(torch.equal(p, before[name]) for name, p in target.named_parameters())


GATED = {"markov_head_type": "gated"}
NO_MARKOV = {"markov_rank": 0, "confidence_head_with_markov": False}


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("fc.weight", {}),
        ("hidden_norm.weight", {}),
        ("norm.weight", {}),
        ("layers.1.self_attn.k_norm.weight", {}),
        ("layers.1.self_attn.v_proj.weight", {}),
        ("markov_head.markov_w1.weight", {}),
        ("markov_head.markov_w2.weight", {}),
        ("markov_head.gate_proj.bias", GATED),
        ("markov_head.joint_proj.weight", {"markov_head_type": "rnn"}),
        ("confidence_head.proj.bias", NO_MARKOV),
    ],
)
def test_a_missing_or_misshapen_tensor_is_named(
    llama: Path, untied: Decoder, tmp_path: Path, name: str, overrides: dict[str, Any]
) -> None:
    folder = helpers.make_drafter(tmp_path, llama, **overrides)
    load(folder, untied)
    tensors = load_file(folder / "model.safetensors")
    wrong = torch.zeros(*tensors[name].shape[:-1], tensors[name].shape[-1] + 1)
    save_file(tensors | {name: wrong}, folder / "model.safetensors")
    shapes = f"{name} has shape {list(wrong.shape)}, .*{list(tensors[name].shape)}"
    with pytest.raises(CheckpointError, match=shapes.replace("[", r"\[").replace("]", r"\]")):
        load(folder, untied)
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"lacks the tensor {name}"):
        load(folder, untied)


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("markov_head.markov_w1.weight", NO_MARKOV),
        ("markov_head.gate_proj.weight", {}),
        ("confidence_head.proj.bias", {"enable_confidence_head": False}),
        ("layers.2.mlp.up_proj.weight", {}),
        ("main_proj.weight", {}),
    ],
)
def test_an_unexpected_tensor_is_named(
    llama: Path, untied: Decoder, tmp_path: Path, name: str, overrides: dict[str, Any]
) -> None:
    folder = helpers.make_drafter(tmp_path, llama, **overrides)
    tensors = load_file(folder / "model.safetensors") | {name: torch.zeros(4, 4)}
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"unexpected tensor {name}"):
        load(folder, untied)


def test_a_table_of_another_vocabulary_is_named(
    llama: Path, untied: Decoder, tmp_path: Path
) -> None:
    folder = helpers.make_drafter(tmp_path, llama)
    tensors = load_file(folder / "model.safetensors")
    tensors["embed_tokens.weight"] = tensors["embed_tokens.weight"][:-1].clone()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"embed_tokens.*\[319, 48\].*\[320, 48\]"):
        load(folder, untied)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 151936}, "vocabulary of 151936 tokens, the target has 131"),
        ({"hidden_size": 2560}, "width 2560, the target has 64"),
        ({"num_target_layers": 36}, "36 target layers, the target has 6"),
        ({"target_layer_ids": [1, 5]}, "layer 5.*6 layers, -1 to 4"),
        ({"target_layer_ids": [-2, 1]}, "layer -2"),
        ({"mask_token_id": 131}, "mask_token_id=131 .*131 tokens"),
    ],
)
def test_a_drafter_of_another_target_is_refused_with_both_values(
    golden_target: Decoder, changes: dict[str, Any], message: str
) -> None:
    config = DSparkConfig.from_hf(configured(**changes))
    with pytest.raises(CheckpointError, match=message):
        load_drafter(GOLDEN, config, golden_target)
    with pytest.raises(CheckpointError, match=message):
        load_drafter(GOLDEN, config, golden_target, load_format="dummy")


@pytest.mark.parametrize("ids", [[-1], [-1, 0, 4], [4]])
def test_every_layer_but_the_last_and_the_embedding_can_be_tapped(
    golden_target: Decoder, ids: list[int]
) -> None:
    config = DSparkConfig.from_hf(configured(target_layer_ids=ids))
    config.check_target(golden_target.config)
    assert config.target_layer_ids == tuple(ids)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_layer_ids": [3, 2, 1]}, r"target_layer_ids=\[3, 2, 1\].*rising"),
        ({"target_layer_ids": [1, 1]}, "target_layer_ids"),
        ({"target_layer_ids": []}, "target_layer_ids"),
        ({"target_layer_ids": None}, "target_layer_ids"),
        ({"target_layer_ids": [1, "2"]}, "target_layer_ids"),
        ({"target_layer_ids": 3}, "target_layer_ids"),
        ({"markov_head_type": "mamba"}, "markov_head_type='mamba'.*vanilla, gated, rnn"),
        ({"markov_rank": 0}, "confidence_head_with_markov needs a markov_rank"),
        ({"markov_rank": -1}, "markov_rank=-1"),
        ({"markov_rank": None}, "markov_rank"),
        ({"block_size": 0}, "block_size=0"),
        ({"block_size": None}, "block_size"),
        ({"mask_token_id": None}, "mask_token_id"),
        ({"num_target_layers": None}, "num_target_layers"),
        ({"rope_parameters": None}, "rope_theta"),
        ({"sliding_window": 128, "use_sliding_window": True}, "sliding_window=128"),
        ({"architectures": ["DSparkDraftModel"]}, "DSparkDraftModel is the layout of"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "Qwen3ForCausalLM is no Qwen3DSparkModel"),
        ({"architectures": None}, "no Qwen3DSparkModel"),
        ({"sample_from_anchor": False}, "sample_from_anchor=False"),
        ({"draft_vocab_size": 64}, "draft_vocab_size=64"),
    ],
)
def test_a_config_that_cannot_work_is_refused_by_name(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        DSparkConfig.from_hf(configured(**changes))


def test_theta_is_read_from_the_nested_parameters() -> None:
    nested = {"rope_theta": 1234567, "rope_type": "default"}
    assert DSparkConfig.from_hf(configured()).layers.rope.theta == 1e6
    assert DSparkConfig.from_hf(configured(rope_parameters=nested)).layers.rope.theta == 1234567


def test_without_a_markov_head_its_fields_may_be_absent(
    llama: Path, untied: Decoder, tmp_path: Path
) -> None:
    own = {"markov_head_type": None, "enable_confidence_head": False}
    folder = helpers.make_drafter(tmp_path, llama, **NO_MARKOV, **own)
    config = json.loads((folder / "config.json").read_text())
    gone = ("markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
    helpers.write_json(
        folder / "config.json", {name: config[name] for name in config if name not in gone}
    )
    drafter = load(folder, untied)
    assert drafter.markov_head is None and drafter.confidence_head is None


@pytest.mark.parametrize(
    "wrong",
    [
        [[1.0, 0.0]] * 6,
        [[1.0, 0.0]] * 8,
        [*[[1.0, 0.0]] * 6, [0.0, 0.0]],
        [[-1.0, 0.0]] * 7,
        [["1", 0.0]] * 7,
        [[1.0]] * 7,
        [1.0] * 7,
        1.0,
        [[float("nan"), 0.0]] * 7,
        [[1.0, float("inf")]] * 7,
    ],
)
def test_a_bad_calibration_is_refused(tmp_path: Path, wrong: object) -> None:
    (tmp_path / "config.json").write_bytes((GOLDEN / "config.json").read_bytes())
    helpers.write_json(tmp_path / "confidence.json", {"sampled": wrong})
    with pytest.raises(CheckpointError, match=r"confidence\.json gives sampled=.*7 pairs"):
        DSparkConfig.from_folder(tmp_path)


def test_a_calibration_of_one_regime_leaves_the_other_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((GOLDEN / "config.json").read_bytes())
    assert DSparkConfig.from_folder(tmp_path).calibration["greedy"] == ((1.0, 0.0),) * 7
    helpers.write_json(tmp_path / "confidence.json", {"sampled": [[2, -1], *[[0.5, 0.25]] * 6]})
    found = DSparkConfig.from_folder(tmp_path).calibration
    assert found["greedy"] == ((1.0, 0.0),) * 7
    assert found["sampled"] == ((2.0, -1.0), *[(0.5, 0.25)] * 6)


def test_a_misspelt_regime_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((GOLDEN / "config.json").read_bytes())
    helpers.write_json(tmp_path / "confidence.json", {"gredy": [[1.0, 0.0]] * 7})
    with pytest.raises(CheckpointError, match="gredy"):
        DSparkConfig.from_folder(tmp_path)


def test_dummy_weights_need_a_config_alone_and_leave_the_target_alone(
    untied: Decoder, llama: Path, tmp_path: Path
) -> None:
    before = {name: p.clone() for name, p in untied.named_parameters()}
    folder = helpers.make_drafter(tmp_path, llama, **GATED)
    (folder / "model.safetensors").unlink()
    drafter = load(folder, untied, "dummy")
    assert 0.015 < float(drafter.fc.weight.std()) < 0.025
    assert torch.equal(drafter.norm.weight, torch.ones(48))
    assert drafter.markov_head is not None
    assert not bool(drafter.markov_head.gate_proj.bias.any())
    assert drafter.lm_head.weight.data_ptr() == untied.lm_head.weight.data_ptr()
    assert all(torch.equal(p, before[name]) for name, p in untied.named_parameters())
    llm = helpers.make_llm(llama, draft=str(folder), load_format="dummy")
    llm.generate([[5, 6, 7]], helpers.greedy(8))
    assert llm.stats.drafted > 0


def setup_of(target: Decoder, folder: Path, speculator: str = "auto") -> SpeculatorSetup:
    config = EngineConfig(model="none", draft=str(folder), speculator=speculator)
    return SpeculatorSetup(config, target.config, torch.float32, CPU, target)


def test_auto_goes_by_what_the_drafter_is(golden_target: Decoder, tmp_path: Path) -> None:
    assert type(create_speculator(setup_of(golden_target, GOLDEN))) is DSparkSpeculator
    plain = create_speculator(setup_of(golden_target, GOLDEN / "target"))
    assert type(plain) is DraftModelSpeculator
    helpers.write_json(tmp_path / "config.json", configured(architectures=["DSparkDraftModel"]))
    with pytest.raises(CheckpointError, match="DSparkDraftModel is the layout"):
        create_speculator(setup_of(golden_target, tmp_path))


@pytest.mark.parametrize("name", ["dspark", "dspark-tree"])
def test_a_speculator_that_is_named_needs_a_drafter_of_its_kind(
    golden_target: Decoder, name: str
) -> None:
    config = EngineConfig(model="none", speculator=name)
    with pytest.raises(ConfigError, match="--draft"):
        create_speculator(
            SpeculatorSetup(config, golden_target.config, torch.float32, CPU, golden_target)
        )
    with pytest.raises(CheckpointError, match="Qwen3ForCausalLM is no Qwen3DSparkModel"):
        create_speculator(setup_of(golden_target, GOLDEN / "target", name))
    with pytest.raises(CheckpointError, match="Qwen3DSparkModel is not supported"):
        create_speculator(setup_of(golden_target, GOLDEN, "draft"))
