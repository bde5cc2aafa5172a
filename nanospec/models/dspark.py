"""DSpark's drafter: logits of a whole block in one forward, then a correction token by token.

The block is the root and G - 1 mask tokens; slot k says what follows the k-th token after the root.
Its layers see, besides the block, what the target thought at every earlier token: *features*, the
residual stream after some of the target's layers.

Source: the DSpark paper (arXiv:2607.05147) and the checkpoints released with it. Without a Markov
head the same network is DFlash.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanospec.attention.backend import AttentionBackend
from nanospec.attention.kv_cache import PagedKVCache
from nanospec.config import ModelConfig
from nanospec.errors import CheckpointError
from nanospec.models.decoder import DecoderLayer
from nanospec.models.layers import Attention, Linear, RMSNorm, RotaryEmbedding, StackedKeysValues
from nanospec.text import read_json

ARCHITECTURE = "Qwen3DSparkModel"
MARKOV_HEADS = ("vanilla", "gated", "rnn")
CALIBRATION = "confidence.json"
# Requests without and with a temperature are calibrated apart: a temperature and an offset for each
# slot make a confidence logit l into l / temperature + offset.
REGIMES = ("greedy", "sampled")


@dataclass(frozen=True, slots=True)
class DSparkConfig:
    """The shape of a drafter, and what it expects of its target."""

    layers: ModelConfig  # its own layers; vocabulary and width are the target's
    num_target_layers: int
    target_layer_ids: tuple[int, ...]  # T of them; features are taken after these; -1: before all
    block_size: int  # G
    mask_token_id: int
    markov_rank: int  # r; 0: no Markov head
    markov_head: str
    has_confidence: bool
    confidence_with_markov: bool
    calibration: Mapping[str, tuple[tuple[float, float], ...]]  # per regime [G, 2], see REGIMES

    @classmethod
    def from_folder(cls, folder: Path) -> "DSparkConfig":
        """Read `config.json` and, where there is one, the calibration beside it.

        Raises:
            CheckpointError: a file is missing or broken, or asks for what is not supported.
        """
        config = read_json(folder / "config.json")
        path = folder / CALIBRATION
        return cls.from_hf(config, read_json(path) if path.exists() else {})

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], calibration: Mapping[str, Any] | None = None
    ) -> "DSparkConfig":
        """Translate a released config.

        Args:
            config: contents of `config.json`.
            calibration: for each regime G pairs (temperature, offset); others are left alone.

        Raises:
            CheckpointError: a field is missing, or names something that is not supported.
        """
        _refuse_other_layouts(config)
        rank = _count(config, "markov_rank", least=0)
        has_confidence = bool(config.get("enable_confidence_head", False))
        with_markov = has_confidence and bool(config.get("confidence_head_with_markov", False))
        head = str(config.get("markov_head_type") or "vanilla").lower()
        if rank and head not in MARKOV_HEADS:
            known = ", ".join(MARKOV_HEADS)
            raise CheckpointError(f"markov_head_type={head!r} is not supported; known are {known}")
        if with_markov and not rank:
            raise CheckpointError("confidence_head_with_markov needs a markov_rank above 0")
        block_size = _count(config, "block_size", least=1)
        return cls(
            layers=ModelConfig.from_hf({**config, "architectures": ["Qwen3ForCausalLM"]}),
            num_target_layers=_count(config, "num_target_layers", least=1),
            target_layer_ids=_rising(config.get("target_layer_ids")),
            block_size=block_size,
            mask_token_id=_count(config, "mask_token_id", least=0),
            markov_rank=rank,
            markov_head=head,
            has_confidence=has_confidence,
            confidence_with_markov=with_markov,
            calibration=_calibration(calibration or {}, block_size),
        )

    def check_target(self, target: ModelConfig) -> None:
        """Refuse a target that this drafter was not made for.

        Raises:
            CheckpointError: both values are named.
        """
        own = self.layers
        for what, mine, its in (
            ("a vocabulary of {} tokens", own.vocab_size, target.vocab_size),
            ("hidden states of width {}", own.hidden_size, target.hidden_size),
            ("{} target layers", self.num_target_layers, target.num_layers),
        ):
            if mine != its:
                raise CheckpointError(
                    f"the drafter was made for {what.format(mine)}, the target has {its}; "
                    f"pass the drafter of this target"
                )
        wrong = [tap for tap in self.target_layer_ids if not -1 <= tap < target.num_layers - 1]
        if wrong:
            # What follows the last layer is normed in some implementations and not in others.
            raise CheckpointError(
                f"target_layer_ids name layer {wrong[0]}; of a target with {target.num_layers} "
                f"layers, -1 to {target.num_layers - 2} can be taken"
            )
        if self.mask_token_id >= target.vocab_size:
            raise CheckpointError(
                f"mask_token_id={self.mask_token_id} is not in the vocabulary of "
                f"{target.vocab_size} tokens"
            )


def _refuse_other_layouts(config: Mapping[str, Any]) -> None:
    architecture = (config.get("architectures") or ["(none)"])[0]
    if architecture == "DSparkDraftModel":
        raise CheckpointError(
            "DSparkDraftModel is the layout of the speculators library (aux_hidden_state_layer_ids,"
            f" draft_vocab_size); it is not supported, pass a drafter saved as {ARCHITECTURE}"
        )
    if architecture != ARCHITECTURE:
        raise CheckpointError(f"architecture {architecture} is no {ARCHITECTURE} drafter")
    for name, only in (
        ("sample_from_anchor", True),
        ("draft_vocab_size", None),
        ("tie_word_embeddings", False),
    ):
        if config.get(name, only) != only:
            raise CheckpointError(f"{name}={config[name]!r} of a drafter is not supported")


def _rising(taps: Any) -> tuple[int, ...]:
    ok = isinstance(taps, list) and all(type(tap) is int for tap in taps)
    if not ok or not taps or taps != sorted(set(taps)):
        raise CheckpointError(f"target_layer_ids={taps!r} must be layer numbers, rising")
    return tuple(taps)


def _count(config: Mapping[str, Any], name: str, least: int) -> int:
    value = config.get(name)
    if type(value) is not int or value < least:
        raise CheckpointError(f"config.json gives {name}={value!r}; it must be {least} or more")
    return value


def _calibration(
    stored: Mapping[str, Any], block_size: int
) -> Mapping[str, tuple[tuple[float, float], ...]]:
    found = dict.fromkeys(REGIMES, ((1.0, 0.0),) * block_size)
    for regime, given in stored.items():
        ok = regime in REGIMES and isinstance(given, list) and len(given) == block_size
        if not ok or not all(_is_scaling(pair) for pair in given):
            raise CheckpointError(
                f"{CALIBRATION} gives {regime}={given!r}; known are {' and '.join(REGIMES)}, "
                f"{block_size} pairs each of a temperature above 0 and an offset"
            )
        found[regime] = tuple((float(pair[0]), float(pair[1])) for pair in given)
    return found


def _is_scaling(pair: Any) -> bool:
    is_pair = isinstance(pair, list) and [type(each) in (int, float) for each in pair] == [True] * 2
    return is_pair and 0 < pair[0] < math.inf and math.isfinite(pair[1])


class MarkovHead(nn.Module):
    """Adds to a slot's logits what the token before it suggests; low rank r, three kinds."""

    def __init__(self, config: DSparkConfig, dtype: torch.dtype, device: torch.device):
        super().__init__()
        rank, width = config.markov_rank, config.layers.hidden_size
        vocab_size = config.layers.vocab_size
        self.kind = config.markov_head
        self.markov_w1 = Linear(rank, vocab_size, dtype, device)  # a table, like an embedding
        self.markov_w2 = Linear(rank, vocab_size, dtype, device)
        if self.kind == "gated":
            self.gate_proj = Linear(width + rank, rank, dtype, device, bias=True)
        if self.kind == "rnn":
            self.joint_proj = Linear(2 * rank + width, 3 * rank, dtype, device, bias=True)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return [.., r] for tokens [..]."""
        return F.embedding(tokens, self.markov_w1.weight)

    def forward(self, hidden: Tensor, previous: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the correction [N, V] and the next state [N, r].

        Args:
            hidden: [N, H] of the slots.
            previous: [N, r], the token before each slot, embedded.
            state: [N, r], 0 at the start of a block; only the kind `rnn` changes it.
        """
        vector, state = self._advance(hidden, previous, state)
        return self.markov_w2(vector), state

    def _advance(self, hidden: Tensor, previous: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return what is multiplied with `markov_w2`, [N, r], and the next state [N, r]."""
        if self.kind == "gated":
            gate = self.gate_proj(torch.cat((hidden, previous), dim=-1)).sigmoid()
            return gate * previous, state
        if self.kind == "rnn":
            joint = self.joint_proj(torch.cat((state, previous, hidden), dim=-1))
            gate, candidate, out = joint.chunk(3, dim=-1)
            gate = gate.sigmoid()
            return out.tanh(), gate * state + (1 - gate) * candidate.tanh()
        return previous, state

    def can_fuse(self) -> bool:
        """Return whether `fused_greedy_token` can be called, with tensors of a GPU."""
        # Imported here: Triton takes long to import and a CPU needs none.
        from nanospec.models import markov_triton

        return markov_triton.fits(self.markov_w2.weight)

    def fused_greedy_token(
        self, base: Tensor, hidden: Tensor, previous: Tensor, state: Tensor, out: Tensor
    ) -> Tensor:
        """See `DSparkDrafter.greedy_token`; the correction is never stored."""
        from nanospec.models import markov_triton

        vectors: Tensor = self.markov_w1.weight
        index: Tensor | None = previous
        if self.kind != "vanilla":
            (vectors, state), index = self._advance(hidden, self.embed(previous), state), None
        markov_triton.greedy_tokens(base, vectors, index, self.markov_w2.weight, out)
        return state


class ConfidenceHead(nn.Module):
    """Says how probably the token drawn at a slot is accepted, if those before it are."""

    def __init__(self, config: DSparkConfig, dtype: torch.dtype, device: torch.device):
        super().__init__()
        width = config.layers.hidden_size + config.confidence_with_markov * config.markov_rank
        self.proj = Linear(width, 1, dtype, device, bias=True)

    def forward(self, seen: Tensor) -> Tensor:
        """Return logits [..] fp32 from what is seen of slots, [.., H] or [.., H + r]."""
        logits: Tensor = self.proj(seen)
        return logits[..., 0].float()


class DSparkDrafter(nn.Module):
    """The network. Parameters are named as in the checkpoint, but for the fused ones.

    Embedding and head are given: mostly they are the target's own.
    """

    def __init__(
        self,
        config: DSparkConfig,
        dtype: torch.dtype,
        device: torch.device,
        *,
        embed_tokens: Linear,
        lm_head: Linear,
    ):
        super().__init__()
        self.config = config
        shape = config.layers
        width, eps = shape.hidden_size, shape.rms_norm_eps
        self.embed_tokens = embed_tokens
        self.lm_head = lm_head
        self.fc = Linear(len(config.target_layer_ids) * width, width, dtype, device)
        self.hidden_norm = RMSNorm(width, eps, dtype, device)
        self.layers = nn.ModuleList(
            DecoderLayer(shape, layer, dtype, device) for layer in range(shape.num_layers)
        )
        self._keys_values = StackedKeysValues([_attention_of(layer) for layer in self.layers])
        self.norm = RMSNorm(width, eps, dtype, device)
        self.markov_head = MarkovHead(config, dtype, device) if config.markov_rank else None
        self.confidence_head = (
            ConfidenceHead(config, dtype, device) if config.has_confidence else None
        )
        self._rope = RotaryEmbedding(shape.rope, shape.head_dim, device)

    def context(self, features: Sequence[Tensor], positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return each layer's keys and values [C, Hkv, D] for tokens the target has processed.

        Args:
            features: T tensors [C, H], in the order of `target_layer_ids`.
            positions: [C] int64.
        """
        fused, rope = self._fused(features, positions)
        return [_attention_of(layer).keys_values(fused, rope) for layer in self.layers]

    def _fused(
        self, features: Sequence[Tensor], positions: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return what the layers make keys and values of, [C, H], and its rotation."""
        fused = self.hidden_norm(self.fc(torch.cat(tuple(features), dim=-1)))
        return fused, self._rope.tables(positions, fused.dtype)

    def store_context(
        self, features: Sequence[Tensor], positions: Tensor, cache: PagedKVCache, slots: Tensor
    ) -> None:
        """Store what `context` returns in slots [C] of the drafter's own cache."""
        fused, rope = self._fused(features, positions)
        self._keys_values.store(fused, rope, cache, slots)

    def forward(self, token_ids: Tensor, positions: Tensor, attention: AttentionBackend) -> Tensor:
        """Run the rows of blocks; return final hidden states [T, H], normed.

        Args:
            token_ids: [T] int64: of each block the root, then mask tokens.
            positions: [T] int64: the root's own, then the ones after it.
            attention: shows each row the context and all rows of its block.
        """
        x = F.embedding(token_ids, self.embed_tokens.weight)
        rope = self._rope.tables(positions, x.dtype)
        delta: Tensor | None = None
        for layer in self.layers:
            x, delta, _ = layer(x, delta, rope, attention)
        return self.norm.add(x, delta)[1]

    def base_logits(self, hidden: Tensor) -> Tensor:
        """Return [.., V] for hidden states [.., H]."""
        return F.linear(hidden, self.lm_head.weight)

    def first_state(self, count: int) -> Tensor:
        """Return the Markov head's state [count, r] at the start of a block."""
        return self.fc.weight.new_zeros(count, self.config.markov_rank)

    def correct(
        self, base: Tensor, hidden: Tensor, previous: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Correct one slot of N blocks by the tokens before it.

        Args:
            base: [N, V] logits of the slot.
            hidden: [N, H] of the slot.
            previous: [N] int64, the token before the one that the slot is about.
            state: [N, r], from the slot before, or `first_state`.

        Returns:
            Logits [N, V] fp32; the next state.
        """
        logits = base.float()
        if self.markov_head is not None:
            bias, state = self.markov_head(hidden, self.markov_head.embed(previous), state)
            logits = logits + bias.float()
        return logits, state

    def greedy_token(
        self, base: Tensor, hidden: Tensor, previous: Tensor, state: Tensor, out: Tensor
    ) -> Tensor:
        """Write the best token of what `correct` returns, the first one among equals, to `out` [N].

        Returns:
            The next state.
        """
        head = self.markov_head
        if head is None:
            out.copy_(base.argmax(dim=-1))
            return state
        if base.is_cuda and head.can_fuse():
            return head.fused_greedy_token(base, hidden, previous, state, out)
        logits, state = self.correct(base, hidden, previous, state)
        out.copy_(logits.argmax(dim=-1))
        return state

    def confidences(self, hidden: Tensor, previous: Tensor) -> Tensor | None:
        """Return confidence logits [..] fp32 of slots, without a confidence head None.

        Args:
            hidden: [.., H] of the slots.
            previous: [..] int64, the token before each.
        """
        if self.confidence_head is None:
            return None
        seen = hidden
        if self.config.confidence_with_markov:
            assert self.markov_head is not None, "the config was checked"
            seen = torch.cat((hidden, self.markov_head.embed(previous)), dim=-1)
        logits: Tensor = self.confidence_head(seen)
        return logits


def _attention_of(layer: nn.Module) -> Attention:
    assert isinstance(layer, DecoderLayer)
    return layer.self_attn
