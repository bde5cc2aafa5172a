"""The dense decoder: Qwen3 (with QK-norm) and the Llama family (without) are one network."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanospec.attention.backend import AttentionBackend
from nanospec.config import ModelConfig
from nanospec.models.layers import MLP, Attention, Linear, RMSNorm, RotaryEmbedding


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP around a residual stream."""

    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype, device: torch.device):
        super().__init__()
        eps = config.rms_norm_eps
        self.input_layernorm = RMSNorm(config.hidden_size, eps, dtype, device)
        self.self_attn = Attention(config, layer, dtype, device)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps, dtype, device)
        self.mlp = MLP(config, dtype, device)

    def forward(
        self,
        x: Tensor,
        delta: Tensor | None,
        rope: tuple[Tensor, Tensor],
        attention: AttentionBackend,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Map the residual stream [T, H] to the next layer's.

        It comes and goes as a sum that is not added yet, x + delta, as the norm that follows does
        that on its way.

        Returns:
            x and delta of the next layer's stream; and the stream that came, added.
        """
        stream, normed = self.input_layernorm.add(x, delta)
        attended = self.self_attn(normed, rope, attention)
        x, normed = self.post_attention_layernorm.add(stream, attended)
        return x, self.mlp(normed), stream


class Decoder(nn.Module):
    """A decoder over packed rows. It keeps no cache: attention does, behind `AttentionBackend`.

    Parameters are named as in the checkpoint, but for the fused `qkv_proj` and `gate_up_proj`.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.config = config
        self.embed_tokens = Linear(config.hidden_size, config.vocab_size, dtype, device)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, dtype, device) for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)
        self.lm_head = (
            self.embed_tokens
            if config.tie_word_embeddings
            else Linear(config.hidden_size, config.vocab_size, dtype, device)
        )
        self._rope = RotaryEmbedding(config.rope, config.head_dim, device)

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations."""
        return self.embed_tokens.weight.dtype

    @property
    def device(self) -> torch.device:
        """Of weights and activations."""
        return self.embed_tokens.weight.device

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: AttentionBackend,
        taps: Sequence[int] = (),
    ) -> tuple[Tensor, list[Tensor]]:
        """Run all layers; `attention` has begun with the batch these rows belong to.

        Args:
            token_ids: [T] int64.
            positions: [T] int64.
            attention: stores and reads keys and values.
            taps: layers, from 0, after which the residual stream is wanted; -1 is before them.

        Returns:
            [T, H] final hidden states, normed; and for each tap, in order, [T, H], not normed.
        """
        x = F.embedding(token_ids, self.embed_tokens.weight)
        rope = self._rope.tables(positions, x.dtype)
        streams = {}
        delta: Tensor | None = None
        for index, layer in enumerate(self.layers):
            x, delta, stream = layer(x, delta, rope, attention)
            if index - 1 in taps:
                streams[index - 1] = stream
        streams[len(self.layers) - 1], hidden = self.norm.add(x, delta)
        return hidden, [streams[tap] for tap in taps]

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return [.., V] for final hidden states [.., H]; or write to `out` [N, V] for [N, H]."""
        if out is not None:
            return torch.mm(hidden, self.lm_head.weight.T, out=out)
        return F.linear(hidden, self.lm_head.weight)  # the library's, as above
