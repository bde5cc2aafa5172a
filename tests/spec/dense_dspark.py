"""DSpark's drafter written from the equations of its paper and its released files, densely.

No cache, no pages, no batch: every call starts from token ids and the target's features. It is in
float64 and shares no code with `nanospec.models`, so that the two can be compared.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


@dataclass(frozen=True)
class DenseDrafter:
    """A released drafter: its config and its tensors in float64."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]

    @classmethod
    def load(cls, folder: Path) -> "DenseDrafter":
        """Read a folder that stores every tensor, embedding and head included."""
        tensors = load_file(folder / "model.safetensors")
        return cls(
            json.loads((folder / "config.json").read_text()),
            {name: tensor.double() for name, tensor in tensors.items()},
        )

    def context(self, features: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return keys and values [S, Hkv, D] of each layer for features [S, T * H]."""
        fused = self._norm(features.double() @ self.tensors["fc.weight"].T, "hidden_norm")
        positions = torch.arange(len(features))
        layers = range(self.config["num_hidden_layers"])
        return [self._keys_values(layer, fused, positions) for layer in layers]

    def block(self, root: int, length: int, features: Tensor) -> Tensor:
        """Return hidden states [length, H] of the root, which follows the features, and masks."""
        positions = torch.arange(len(features), len(features) + length)
        ids = [root] + [self.config["mask_token_id"]] * (length - 1)
        x = self.tensors["embed_tokens.weight"][ids]
        for layer, (keys, values) in enumerate(self.context(features)):
            x = x + self._attention(layer, x, positions, keys, values)
            y = self._norm(x, f"layers.{layer}.post_attention_layernorm")
            gate = self._linear(y, f"layers.{layer}.mlp.gate_proj")
            up = self._linear(y, f"layers.{layer}.mlp.up_proj")
            x = x + self._linear(gate * gate.sigmoid() * up, f"layers.{layer}.mlp.down_proj")
        return self._norm(x, "norm")

    def base_logits(self, hidden: Tensor) -> Tensor:
        """Return [.., V] for hidden states [.., H]."""
        return hidden.double() @ self.tensors["lm_head.weight"].T

    def first_state(self) -> Tensor:
        """Return the state [1, r] of the Markov head at the start of a block."""
        return torch.zeros(1, self.config["markov_rank"], dtype=torch.float64)

    def correct(self, hidden: Tensor, previous: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [N, V] of one slot [H] after the tokens [N], and the next states [N, r]."""
        base = self.base_logits(hidden)
        if not self.config["markov_rank"]:
            return base.expand(len(previous), -1), state
        embedded = self.tensors["markov_head.markov_w1.weight"][previous]
        slot = hidden.double().expand(len(previous), -1)
        out = embedded
        kind = self.config["markov_head_type"].lower()
        if kind == "gated":
            seen = torch.cat((slot, embedded), dim=1)
            out = embedded * self._linear(seen, "markov_head.gate_proj").sigmoid()
        if kind == "rnn":
            seen = torch.cat((state, embedded, slot), dim=1)
            joint = self._linear(seen, "markov_head.joint_proj")
            gate, candidate, out = joint.split(self.config["markov_rank"], dim=1)
            keep = gate.sigmoid()
            state, out = keep * state + (1 - keep) * candidate.tanh(), out.tanh()
        return base + out @ self.tensors["markov_head.markov_w2.weight"].T, state

    def chain(self, hidden: Tensor, before: list[int]) -> Tensor:
        """Return corrected logits [n, V] of slots [n, H], given the token before each one."""
        rows, state = [], self.first_state()
        for slot, previous in zip(hidden, before, strict=True):
            logits, state = self.correct(slot, torch.tensor([previous]), state)
            rows.append(logits)
        return torch.cat(rows)

    def confidence(self, hidden: Tensor, before: list[int]) -> Tensor:
        """Return confidence logits [n] of slots [n, H], given the token before each one."""
        seen = hidden.double()
        if self.config["confidence_head_with_markov"]:
            embedded = self.tensors["markov_head.markov_w1.weight"][before]
            seen = torch.cat((seen, embedded), dim=1)
        return self._linear(seen, "confidence_head.proj")[:, 0]

    def paths(
        self, hidden: Tensor, root: int, temperature: float = 1.0
    ) -> list[dict[tuple[int, ...], float]]:
        """Return, by depth, the probability of every path of tokens below the root."""
        found: list[dict[tuple[int, ...], float]] = []
        paths: list[tuple[int, ...]] = [()]
        alive = torch.ones(1, dtype=torch.float64)
        previous, state = torch.tensor([root]), self.first_state()
        for slot in hidden:
            logits, state = self.correct(slot, previous, state)
            law = alive[:, None] * (logits / temperature).softmax(dim=1)  # [N, V]
            vocab_size = law.shape[1]
            paths = [(*path, token) for path in paths for token in range(vocab_size)]
            previous = torch.arange(vocab_size).repeat(len(law))
            state = state.repeat_interleave(vocab_size, dim=0)
            alive = law.flatten()
            found.append(dict(zip(paths, alive.tolist(), strict=True)))
        return found

    def _attention(
        self, layer: int, x: Tensor, positions: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Let rows [n, H] see the context and each other."""
        y = self._norm(x, f"layers.{layer}.input_layernorm")
        name = f"layers.{layer}.self_attn"
        q = self._linear(y, f"{name}.q_proj").unflatten(1, (-1, self.config["head_dim"]))
        q = self._rotate(self._norm(q, f"{name}.q_norm"), positions)
        own_keys, own_values = self._keys_values(layer, y, positions)
        group = self.config["num_attention_heads"] // self.config["num_key_value_heads"]
        k = torch.cat((keys, own_keys)).repeat_interleave(group, dim=1)
        v = torch.cat((values, own_values)).repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.config["head_dim"] ** -0.5
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), v)
        return self._linear(mixed.flatten(1), f"{name}.o_proj")

    def _keys_values(self, layer: int, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        name = f"layers.{layer}.self_attn"
        k = self._linear(x, f"{name}.k_proj").unflatten(1, (-1, self.config["head_dim"]))
        v = self._linear(x, f"{name}.v_proj").unflatten(1, (-1, self.config["head_dim"]))
        return self._rotate(self._norm(k, f"{name}.k_norm"), positions), v

    def _linear(self, x: Tensor, name: str) -> Tensor:
        y = x @ self.tensors[f"{name}.weight"].T
        bias = self.tensors.get(f"{name}.bias")
        return y if bias is None else y + bias

    def _norm(self, x: Tensor, name: str) -> Tensor:
        mean = x.square().mean(dim=-1, keepdim=True)
        scaled = x / (mean + self.config["rms_norm_eps"]).sqrt()
        return scaled * self.tensors[f"{name}.weight"]

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Turn the pairs (i, i + D / 2) of heads [n, h, D] by position * theta ** (-2 i / D)."""
        half = self.config["head_dim"] // 2
        theta = float(self.config["rope_parameters"]["rope_theta"])
        frequency = theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = positions[:, None, None] * frequency
        left, right = x[..., :half], x[..., half:]
        cos, sin = angle.cos(), angle.sin()
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
