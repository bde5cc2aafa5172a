"""RoPE frequencies equal transformers' for every supported kind."""

from pathlib import Path
from typing import Any

import pytest
import torch

from nanospec.config import ModelConfig, RopeConfig
from nanospec.models.layers import (
    Attention,
    RotaryEmbedding,
    StackedKeysValues,
    add_rms_norm,
    inverse_frequencies,
    rope_tables,
    swiglu,
)
from tests import helpers
from tests.test_config import LLAMA

SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "attention_factor": 1.25,
    },
    {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.7,
        "mscale_all_dim": 0.9,
        "truncate": False,
    },
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: f"{s['rope_type']}-{len(s)}")
@pytest.mark.parametrize("theta", [1e4, 1e6])
def test_rope_equals_transformers(scaling: dict[str, Any], theta: float) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = scaling | {"rope_theta": theta}
    reference = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=128,
            num_attention_heads=4,
            max_position_embeddings=512,
            rope_parameters=parameters,
        )
    )
    rope = ModelConfig.from_hf(
        LLAMA | {"rope_parameters": parameters, "max_position_embeddings": 512}
    ).rope
    positions = torch.tensor([0, 1, 5, 63, 64, 500])
    cos, sin = RotaryEmbedding(rope, 32, torch.device("cpu")).tables(positions, torch.float32)
    want_cos, want_sin = reference(torch.zeros(1), positions[None])
    torch.testing.assert_close(cos[:, 0], want_cos[0], rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(sin[:, 0], want_sin[0], rtol=1e-5, atol=2e-5)


# Other engines: vllm-ascend 6612 (one cos-sin cache for models with different theta).
def test_different_thetas_give_different_frequencies() -> None:
    slow, fast = (
        inverse_frequencies(ModelConfig.from_hf(LLAMA | {"rope_theta": theta}).rope, 32)[0]
        for theta in (1e6, 1e4)
    )
    assert not torch.equal(slow, fast)


@pytest.mark.parametrize("shape", [(1, 48), (5, 64), (3, 100)])
@pytest.mark.parametrize("has_delta", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_norm_kernel_adds_and_normalises_as_the_reference(
    shape: tuple[int, int], has_delta: bool, dtype: torch.dtype, device: torch.device
) -> None:
    from nanospec.models import layers_triton

    generator = torch.Generator().manual_seed(shape[1])
    x, delta, weight = (
        torch.randn(size, generator=generator).to(device, dtype)
        for size in (shape, shape, shape[1:])
    )
    case = (x, delta if has_delta else None, weight, 1e-6)
    want, got = add_rms_norm(*case), layers_triton.add_rms_norm(*case)
    tolerance = 1e-5 if dtype is torch.float32 else 4e-3
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
    assert torch.equal(got[0], want[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [16, 96, 128])
def test_the_rope_kernel_is_the_reference(
    head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    from nanospec.models import layers_triton

    rope = RopeConfig(kind="default", theta=1e6, parameters={})
    frequencies = inverse_frequencies(rope, head_dim)[0].to(device)
    positions = torch.tensor([99, 0, 1, 40_959, 131_071, 1_000_000], device=device)[1:]
    case = (positions, frequencies, 1.25, dtype)
    want, got = rope_tables(*case), layers_triton.rope_tables(*case)
    # Where a rounding to 16 bits turns, the last bit may differ.
    tolerance = 1e-6 if dtype is torch.float32 else 4e-3
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    assert layers_triton.rope_tables(positions[:0], *case[1:])[0].shape == (0, 1, head_dim)


@pytest.mark.parametrize("shape", [(1, 32), (7, 2600)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_swiglu_kernel_is_the_reference(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    from nanospec.models import layers_triton

    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator).to(device, dtype)
    with torch.enable_grad():  # the dispatching function takes the reference then
        want = swiglu(x)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-3
    torch.testing.assert_close(layers_triton.swiglu(x), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("num_rows", [1, 40])
@torch.inference_mode()
def test_stacked_layers_store_what_each_makes_of_weights_that_come_later(
    qwen3: Path, num_rows: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelConfig.from_folder(qwen3)
    layers = [Attention(config, layer, torch.float32, device) for layer in range(3)]
    stacked = StackedKeysValues(layers)
    generator = torch.Generator().manual_seed(0)
    for layer in layers:  # as a loader fills them
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    shape = {"num_layers": 3, "num_kv_heads": config.num_kv_heads, "head_dim": config.head_dim}
    cache = helpers.new_cache(16, 4, device=device, **shape)
    x = torch.randn(num_rows, config.hidden_size, generator=generator).to(device)
    rope = RotaryEmbedding(config.rope, config.head_dim, device)
    tables = rope.tables(torch.arange(7, 7 + num_rows, device=device), x.dtype)
    slots = torch.arange(num_rows, device=device) + 3
    with monkeypatch.context() as patch:
        patch.setattr("nanospec.models.layers._has_kernels", lambda x: True)
        stacked.store(x, tables, cache, slots)
    for index, layer in enumerate(layers):
        keys, values = layer.keys_values(x, tables)
        torch.testing.assert_close(cache.k[index, slots], keys, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(cache.v[index, slots], values, rtol=1e-4, atol=1e-4)
