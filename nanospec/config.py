"""What the user configures (`EngineConfig`) and what a checkpoint says of itself (`ModelConfig`).

Both are frozen and refuse what cannot work; neither knows tensors.
"""

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from nanospec.errors import CheckpointError, ConfigError
from nanospec.text import read_json

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
LOAD_FORMATS = ("auto", "dummy")
ATTENTION_BACKENDS = ("auto", "triton", "flashinfer", "flash3", "torch")
CAPTURED = ("auto", "triton", "flash3")  # on a GPU, where these take lengths from the device
RUN_AHEADS = ("auto", "on", "off")
ACCEPTANCES = ("auto", "rejection", "shared-noise")
EMBEDDED_PAIR = Path(__file__).parent / "models" / "tiny"  # a toy target and its drafter
# Of prompts that CUDA graphs hold beside all plans: a short one, and those of requests that follow
# each other after some 50 rounds, 100 to 200 tokens each.
GRAPH_PROMPT_ROWS = 256
GRAPH_PROMPT_ROWS_PER_REQUEST = 4
PROMPT_ROWS = 2048  # of prompts that a forward holds beside all plans
# Of plans, that a forward holds beside prompts: so many keep any GPU's arithmetic busy, so that
# more only take longer. Where no prompt is, plans may have its rows.
MOST_PLAN_ROWS = 4096
MAX_DRAFT_LEN = 63  # with the root, the rows that one 64-bit word can speak of


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of an engine; the command line has a flag of the same name for each.

    Raises:
        ConfigError: a value cannot work.
    """

    model: str  # a folder, or a Hugging Face id
    draft: str | None = None  # a drafter's folder or id
    speculator: str = "auto"  # none, ngram, trie, draft, dspark, dspark-tree or module:Class
    max_draft_len: int | None = None  # draft rows of one request; None: what suits the speculator
    acceptance: str = "auto"  # auto: shared-noise for requests with a seed, rejection for others
    adaptive: str = "off"  # auto, schedule:[[from, to, drafts], ..] by requests, threshold:P
    cost_table: str | None = None  # JSON file of measured costs, for adaptive auto
    dtype: str = "auto"  # auto: the checkpoint's, but bfloat16 for a float32 one on a GPU
    device: str = "auto"  # auto: cuda where there is one
    load_format: str = "auto"  # dummy: random weights from config.json alone
    attention: str = "auto"  # auto: triton on cuda, torch on cpu
    run_ahead: str = "auto"  # launch a round before the last is read; auto: on cuda, where it can
    max_graph_rows: int | None = None  # None: plans, short prompts, full forwards; 0: no graphs
    page_size: int = 16  # tokens per KV page
    max_model_len: int | None = None  # tokens, prompt and output; None: what the model allows
    max_num_seqs: int = 256  # requests that may run at once
    max_num_batched_tokens: int | None = None  # rows of one forward; None: plans and prompts
    kv_cache_gib: float | None = None  # GiB; None: what is free (on a CPU at most 4 GiB)
    gpu_memory_utilization: float = 0.9  # share of GPU memory that weights, step and cache may use
    prefix_caching: bool = True
    seed: int = 0  # of the seeds of requests that bring none

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("device", self.device, DEVICES)
        _one_of("load_format", self.load_format, LOAD_FORMATS)
        _one_of("attention", self.attention, ATTENTION_BACKENDS)
        _one_of("run_ahead", self.run_ahead, RUN_AHEADS)
        _one_of("acceptance", self.acceptance, ACCEPTANCES)
        if self.max_draft_len is not None and not 1 <= self.max_draft_len <= MAX_DRAFT_LEN:
            given = f"max_draft_len={self.max_draft_len}"
            raise ConfigError(f"{given} is out of range; pass 1 to {MAX_DRAFT_LEN}")
        parse_adaptive(self.adaptive, self.max_draft_len or MAX_DRAFT_LEN)
        if self.adaptive == "auto" and self.cost_table is None:
            raise ConfigError(
                "adaptive=auto needs measured costs; make a table by scripts/profile_costs.py and "
                "pass it as cost_table"
            )
        for name in ("page_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"{name}={value!r} is out of range; pass an integer, 1 or more")
        if self.max_graph_rows is not None and self.max_graph_rows < 0:
            raise ConfigError(
                f"max_graph_rows={self.max_graph_rows} is out of range; pass 0 or more"
            )
        given_rows = self.max_num_batched_tokens
        if given_rows is not None and given_rows < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={given_rows} is below "
                f"max_num_seqs={self.max_num_seqs}, so a step could not advance every request; "
                f"raise the first or lower the second"
            )
        if self.kv_cache_gib is not None and not 0 < self.kv_cache_gib < math.inf:
            raise ConfigError(f"kv_cache_gib={self.kv_cache_gib} is out of range; pass more than 0")
        if not 0 < self.gpu_memory_utilization <= 1:
            given = f"gpu_memory_utilization={self.gpu_memory_utilization}"
            raise ConfigError(f"{given} is out of range; pass more than 0 and at most 1")

    def forward_rows(self, plan_rows: int) -> int:
        """Return how many rows one forward may have.

        Without an option all plans fit beside prompts: a fixed number would leave plans without
        drafts where many requests run.

        Args:
            plan_rows: of a request's plan at most.
        """
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return self._rows_of_plans(plan_rows) + PROMPT_ROWS

    def graph_rows(self, plan_rows: int) -> int:
        """Return how many rows the largest CUDA graph has.

        Without an option they suffice for the plans of all requests and short prompts beside them:
        while requests come and go, most rounds have some.

        Args:
            plan_rows: of a request's plan at most.
        """
        if self.max_graph_rows is not None:
            return self.max_graph_rows
        prompts = max(GRAPH_PROMPT_ROWS, GRAPH_PROMPT_ROWS_PER_REQUEST * self.max_num_seqs)
        most = self._rows_of_plans(plan_rows) + prompts
        return min(most, self.forward_rows(plan_rows))

    def _rows_of_plans(self, plan_rows: int) -> int:
        most = self.max_num_seqs * plan_rows
        return max(min(most, MOST_PLAN_ROWS), self.max_num_seqs)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> "EngineConfig":
        """Build a config from keyword options; without a model it is that of the embedded pair.

        Raises:
            ConfigError: an option is unknown, or a value cannot work.
        """
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}"
                raise ConfigError(f"unknown option {name!r}; {hint}")
        return cls(**(_with_embedded_pair(options) if options.get("model") is None else options))


def _with_embedded_pair(options: Mapping[str, Any]) -> dict[str, Any]:
    """Name the target that comes with the package, and its drafter where one can be used."""
    pair = dict(options) | {"model": str(EMBEDDED_PAIR / "target")}
    takes_drafter = options.get("speculator", "auto") in ("auto", "dspark", "dspark-tree")
    if options.get("draft") is None and takes_drafter:
        pair["draft"] = str(EMBEDDED_PAIR / "drafter")
    return pair


def parse_adaptive(adaptive: str, most: int) -> tuple[str, Any]:
    """Return (kind, value) of an option `adaptive`.

    Args:
        adaptive: off, auto, schedule:[[1,16,7],[17,128,5]] or threshold:0.5.
        most: drafts of one request.

    Raises:
        ConfigError: it is none of these.
    """
    kind, _, text = adaptive.partition(":")
    try:
        value: Any = json.loads(text) if text else None
        if kind == "schedule":
            value = tuple((low, high, mean) for low, high, mean in value)
            ok = bool(value) and all(type(each) is int for row in value for each in row)
            ok = ok and all(1 <= a <= b and 0 <= mean <= most for a, b, mean in value)
        elif kind == "threshold":
            value = float(value)
            ok = 0 <= value <= 1
        else:
            ok = adaptive in ("off", "auto")
    except (TypeError, ValueError):
        ok = False
    if not ok:
        raise ConfigError(
            f"adaptive={adaptive!r} is not understood; pass off, auto, threshold:P with P from 0 "
            f"to 1, or schedule:[[1,16,7],[17,128,5]] (from, to, drafts a request on average, at "
            f"most {most})"
        )
    return kind, value


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name}={value!r} is unknown; pass one of {', '.join(allowed)}")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding of a checkpoint."""

    kind: str  # default, linear, llama3 or yarn
    theta: float
    parameters: Mapping[str, float]  # the kind's own numbers, as the checkpoint names them


# What each kind of RoPE must state; any other kind is refused.
_ROPE_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": ("factor",),
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a dense decoder: Qwen3, or the Llama family."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int  # tokens
    tie_word_embeddings: bool
    qk_norm: bool  # RMSNorm over each query and key head, before RoPE
    rope: RopeConfig
    dtype: str  # of the checkpoint
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_folder(cls, folder: Path) -> "ModelConfig":
        """Read `config.json` and, for the end-of-sequence tokens, `generation_config.json`.

        Raises:
            CheckpointError: a file is missing or broken, or the architecture is not supported.
        """
        config = read_json(folder / "config.json")
        generation = folder / "generation_config.json"
        return cls.from_hf(config, read_json(generation) if generation.exists() else {})

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None
    ) -> "ModelConfig":
        """Translate a Hugging Face config.

        Args:
            config: contents of `config.json`.
            generation: contents of `generation_config.json`.

        Raises:
            CheckpointError: a field is missing, or names something that is not supported.
        """
        architecture = (config.get("architectures") or ["(none)"])[0]
        if architecture not in ("Qwen3ForCausalLM", "LlamaForCausalLM"):
            raise CheckpointError(
                f"architecture {architecture} is not supported; "
                f"supported are Qwen3ForCausalLM and LlamaForCausalLM"
            )
        _refuse_unsupported(config)
        num_heads = _get(config, "num_attention_heads")
        hidden_size = _get(config, "hidden_size")
        num_kv_heads, head_dim = num_heads, hidden_size // num_heads
        if config.get("num_key_value_heads") is not None:
            num_kv_heads = _get(config, "num_key_value_heads")
        if config.get("head_dim") is not None:
            head_dim = _get(config, "head_dim")
        _check_heads(num_heads, num_kv_heads, head_dim)
        eos = (generation or {}).get("eos_token_id", config.get("eos_token_id"))
        return cls(
            architecture=architecture,
            vocab_size=_get(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_get(config, "intermediate_size"),
            num_layers=_get(config, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=_get(config, "rms_norm_eps"),
            max_position_embeddings=_get(config, "max_position_embeddings"),
            tie_word_embeddings=config.get("tie_word_embeddings", False),
            qk_norm=architecture == "Qwen3ForCausalLM",
            rope=_rope(config, architecture),
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
            eos_token_ids=_token_ids(eos),
        )


def _get(config: Mapping[str, Any], name: str) -> Any:
    """Return a positive number of a config."""
    value = config.get(name)
    if value is None:
        raise CheckpointError(f"config.json gives no {name}")
    if not _is_number(value) or value <= 0:
        raise CheckpointError(f"config.json gives {name}={value!r}; it must be a positive number")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _token_ids(value: Any) -> tuple[int, ...]:
    """Return one token id, a list of them, or none, as a tuple."""
    ids = [] if value is None else value if isinstance(value, list | tuple) else [value]
    if not all(type(token) is int for token in ids):
        raise CheckpointError(f"eos_token_id={value!r} is neither a token id nor a list of them")
    return tuple(ids)


def _check_heads(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    if num_heads % num_kv_heads != 0 or head_dim % 2 != 0:
        raise CheckpointError(
            f"config.json gives {num_heads} query heads for {num_kv_heads} key heads of width "
            f"{head_dim}; the first must be a multiple of the second, and the width even"
        )


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    """Refuse by name what this decoder would silently compute wrongly."""
    refused = {
        f"{name}={config[name]!r}"
        for name in (
            "attention_bias",
            "mlp_bias",
            "quantization_config",
            "num_experts",
            "num_local_experts",
        )
        if config.get(name)
    }
    if config.get("hidden_act", "silu") != "silu":
        refused.add(f"hidden_act={config['hidden_act']!r}")
    has_window = config.get("use_sliding_window", True) and config.get("sliding_window")
    if has_window:
        refused.add(f"sliding_window={config['sliding_window']}")
    layer_types = set(config.get("layer_types") or []) - {"full_attention"}
    refused |= {f"layer type {name!r}" for name in layer_types}
    if refused:
        raise CheckpointError(
            f"config.json asks for {', '.join(sorted(refused))}, which nanospec does not support: "
            f"it runs dense decoders with full attention in every layer"
        )


def _rope(config: Mapping[str, Any], architecture: str) -> RopeConfig:
    """Read RoPE from `rope_parameters` (newer) or `rope_theta` and `rope_scaling` (older)."""
    newer, older = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    if not isinstance(newer, Mapping) or not isinstance(older, Mapping):
        raise CheckpointError("rope_parameters and rope_scaling of config.json must be objects")
    # rope_scaling wins, as in transformers: people add it by hand to a newer config.
    parameters = dict(older or newer)
    kind = parameters.pop("rope_type", None) or parameters.pop("type", None) or "default"
    parameters.pop("type", None)
    thetas = (parameters.pop("rope_theta", None), newer.get("rope_theta"), config.get("rope_theta"))
    theta = next((each for each in thetas if each is not None), None)
    if theta is None and architecture == "LlamaForCausalLM":
        theta = 10000.0  # the first Llama configs leave it out
    if theta is None:
        raise CheckpointError("config.json gives no rope_theta, at the top or in rope_parameters")
    if kind not in _ROPE_NEEDS:
        known = ", ".join(_ROPE_NEEDS)
        raise CheckpointError(f"RoPE of kind {kind!r} is not supported; supported are {known}")
    missing = [name for name in _ROPE_NEEDS[kind] if not _is_number(parameters.get(name))]
    if missing:
        raise CheckpointError(
            f"RoPE of kind {kind!r} needs the numbers {', '.join(missing)} in config.json"
        )
    if parameters.pop("partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointError("config.json asks for a partial_rotary_factor; it is not supported")
    if kind == "yarn":
        parameters.setdefault(
            "original_max_position_embeddings", _get(config, "max_position_embeddings")
        )
    numbers = {name: value for name, value in parameters.items() if value is not None}
    return RopeConfig(kind=kind, theta=float(theta), parameters=numbers)
