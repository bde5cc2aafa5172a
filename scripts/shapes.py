"""Shapes of public models, for runs with random weights where nothing can be downloaded."""

import json
from pathlib import Path
from typing import Any

# Qwen/Qwen3-8B, config.json
QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",  # by which transformers knows the architecture
    "dtype": "bfloat16",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
# deepseek-ai/dspark_qwen3_8b_block7, config.json
DSPARK_8B = QWEN3_8B | {
    "architectures": ["Qwen3DSparkModel"],
    "num_hidden_layers": 5,
    "num_target_layers": 36,
    "block_size": 7,
    "mask_token_id": 151669,
    "target_layer_ids": [1, 9, 17, 25, 33],
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
SHAPES = {"qwen3-8b": (QWEN3_8B, DSPARK_8B)}


def write_shapes(name: str, folder: Path) -> tuple[Path, Path]:
    """Write the configs of a target and its drafter; return their folders."""
    target, drafter = folder / "target", folder / "drafter"
    for own, config in zip((target, drafter), SHAPES[name], strict=True):
        own.mkdir(parents=True, exist_ok=True)
        (own / "config.json").write_text(json.dumps(config))
    return target, drafter
