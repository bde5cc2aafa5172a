"""RoPE frequencies equal transformers' for every supported kind."""

from typing import Any

import pytest
import torch

from nanospec.config import ModelConfig
from nanospec.models.layers import RotaryEmbedding, inverse_frequencies
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
