"""What the training scripts share: attention without a cache, checkpoints, the learning rate."""

import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from nanospec.config import ModelConfig
from nanospec.models.loader import checkpoint_tensors


class CausalAttention:
    """An `AttentionBackend` without a cache: [B, S] rows, each sees its sequence up to itself."""

    def __init__(self, batch: int, length: int):
        self._shape = (batch, length)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend [B * S, h, D] rows; see `AttentionBackend.attend`."""
        del layer
        q, k, v = (_heads_first(rows, self._shape) for rows in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)


class BlockAttention:
    """An `AttentionBackend` for many draft blocks at once: the context, and the block's own rows.

    Args:
        context: per layer keys and values, [B * S, Hkv, D] each.
        shape: (B, S).
        anchors: [B, N] where each block of G rows starts; it sees the context before.
        block_size: G.
    """

    def __init__(
        self,
        context: list[tuple[Tensor, Tensor]],
        shape: tuple[int, int],
        anchors: Tensor,
        block_size: int,
    ):
        self._context, self._shape = context, shape
        batch, num_blocks = anchors.shape
        self._rows = (batch, num_blocks * block_size)
        device = anchors.device
        starts = anchors.repeat_interleave(block_size, dim=1)  # [B, N * G]
        sees_context = torch.arange(shape[1], device=device) < starts[..., None]
        block = torch.arange(num_blocks, device=device).repeat_interleave(block_size)
        sees_block = (block[:, None] == block).expand(batch, -1, -1)
        self._visible = torch.cat((sees_context, sees_block), dim=-1)[:, None]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend [B * N * G, h, D] rows; see `AttentionBackend.attend`."""
        group = q.shape[1] // k.shape[1]
        keys, values = (
            torch.cat((_heads_first(old, self._shape), _heads_first(new, self._rows)), dim=2)
            .repeat_interleave(group, dim=1)  # the kernels that take a mask want equal heads
            .to(v.dtype)
            for old, new in zip(self._context[layer], (k, v), strict=True)
        )
        q = _heads_first(q, self._rows).to(v.dtype)
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=self._visible)
        return out.transpose(1, 2).flatten(0, 1)


def _heads_first(rows: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return rows [B * S, h, D] as [B, h, S, D]."""
    return rows.unflatten(0, shape).transpose(1, 2)


def cosine(step: int, total: int, warmup: int) -> float:
    """Return the learning rate's factor: up linearly, then down to 0 along a cosine."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * min((step - warmup) / max(total - warmup, 1), 1.0)))


def save_checkpoint(
    folder: Path,
    module: nn.Module,
    config: ModelConfig,
    *,
    prefix: str = "",
    dtype: torch.dtype = torch.bfloat16,
    shard_mb: float | None = None,
) -> None:
    """Write a module's weights as safetensors under a checkpoint's names.

    Args:
        folder: where to; it exists.
        module: what `checkpoint_tensors` takes.
        config: likewise.
        prefix: of every name but that of `lm_head`; `model.` for a causal language model.
        dtype: of the stored tensors.
        shard_mb: no file becomes larger, in units of 10**6 bytes, but for a single larger tensor.
    """
    tensors = {
        name if name.startswith("lm_head") else prefix + name: tensor.to("cpu", dtype).contiguous()
        for name, tensor in checkpoint_tensors(module, config).items()
    }
    shards: list[dict[str, Tensor]] = [{}]
    size = 0.0
    for name, tensor in tensors.items():
        size += tensor.nbytes / 1e6
        if shard_mb is not None and size > shard_mb and shards[-1]:
            shards.append({})
            size = tensor.nbytes / 1e6
        shards[-1][name] = tensor
    for old in folder.glob("model*.safetensors*"):
        old.unlink()
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", metadata={"format": "pt"})
        return
    files = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    for file, shard in zip(files, shards, strict=True):
        save_file(shard, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, own in zip(files, shards, strict=True) for name in own}
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
