"""Checkpoints: fused, sharded, tied; and every way one can be wrong is named."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanospec.config import ModelConfig
from nanospec.errors import CheckpointError
from nanospec.models.decoder import Decoder
from nanospec.models.loader import load_decoder, resolve_model

Tensors = dict[str, Tensor]


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    config = ModelConfig.from_folder(folder)
    return load_decoder(folder, config, dtype=dtype, device=torch.device("cpu"))


def changed(folder: Path, to: Path, change: Callable[[Tensors], object]) -> Path:
    """Copy a checkpoint with changed tensors."""
    (to / "config.json").write_bytes((folder / "config.json").read_bytes())
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors")
    return to


def same_weights(left: Decoder, right: Decoder) -> bool:
    pairs = zip(left.parameters(), right.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_fused_weights_are_the_checkpoints_rows(llama: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    layer = load(llama).layers[1]
    names = [f"model.layers.1.self_attn.{name}_proj.weight" for name in "qkv"]
    want = torch.cat([tensors[name] for name in names])
    assert torch.equal(layer.self_attn.qkv_proj.weight, want)
    names = [f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up")]
    want = torch.cat([tensors[name] for name in names])
    assert torch.equal(layer.mlp.gate_up_proj.weight, want)


def test_shards_with_an_index_load_like_one_file(llama: Path, tmp_path: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, own in shards.items():
        save_file({name: tensors[name] for name in own}, tmp_path / file)
    weight_map = {name: file for file, own in shards.items() for name in own}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    assert same_weights(load(tmp_path), load(llama))
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"b\.safetensors"):
        load(tmp_path)


def test_weights_are_converted_to_the_dtype_asked_for(llama: Path) -> None:
    assert {p.dtype for p in load(llama, torch.bfloat16).parameters()} == {torch.bfloat16}


def test_a_missing_tensor_is_named(llama: Path, tmp_path: Path) -> None:
    name = "model.layers.2.mlp.up_proj.weight"
    folder = changed(llama, tmp_path, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=r"layers\.2\.mlp\.up_proj"):
        load(folder)


def test_an_unexpected_tensor_is_named(llama: Path, tmp_path: Path) -> None:
    extra = {"model.layers.0.self_attn.q_norm.weight": torch.ones(12)}
    folder = changed(llama, tmp_path, lambda tensors: tensors.update(extra))
    with pytest.raises(CheckpointError, match=r"unexpected tensor.*q_norm"):
        load(folder)


def test_a_misshaped_tensor_is_named_with_both_shapes(llama: Path, tmp_path: Path) -> None:
    wrong = {"model.layers.0.self_attn.k_proj.weight": torch.ones(23, 48)}
    folder = changed(llama, tmp_path, lambda tensors: tensors.update(wrong))
    with pytest.raises(CheckpointError, match=r"k_proj.*\[23, 48\].*\[24, 48\]"):
        load(folder)


def test_stored_rope_frequencies_are_ignored(llama: Path, tmp_path: Path) -> None:
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)}
    load(changed(llama, tmp_path, lambda tensors: tensors.update(old)))


def test_a_tied_head_may_be_stored_if_it_is_the_embedding(qwen3: Path, tmp_path: Path) -> None:
    def add_head(tensors: Tensors, scale: float = 1.0) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * scale

    assert same_weights(load(changed(qwen3, tmp_path, add_head)), load(qwen3))
    with pytest.raises(CheckpointError, match="tie_word_embeddings"):
        load(changed(qwen3, tmp_path, lambda tensors: add_head(tensors, 2.0)))


@pytest.mark.parametrize("content", [None, b"not safetensors"])
def test_unreadable_weights_are_named(llama: Path, tmp_path: Path, content: bytes | None) -> None:
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    if content is not None:
        (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load(tmp_path)


def test_dummy_weights_need_a_config_alone(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    config = ModelConfig.from_folder(tmp_path)
    options = {"dtype": torch.float32, "device": torch.device("cpu"), "load_format": "dummy"}
    decoder = load_decoder(tmp_path, config, **options)  # type: ignore[arg-type]
    weights = decoder.layers[0].mlp.down_proj.weight
    assert 0.015 < float(weights.std()) < 0.025
    assert torch.equal(decoder.norm.weight, torch.ones(48))
    assert same_weights(decoder, load_decoder(tmp_path, config, **options))  # type: ignore[arg-type]


def test_a_folder_is_its_own_model(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("weight_map", [None, [], {}])
def test_an_index_without_a_map_is_refused(llama: Path, tmp_path: Path, weight_map: object) -> None:
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match="no weight_map"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["~no-such-user/x", "x" * 5000])
def test_a_name_that_cannot_be_a_path_is_one_clear_error(name: str) -> None:
    with pytest.raises(CheckpointError, match="no usable name"):
        resolve_model(name)


@pytest.mark.parametrize("name", ["./no/such/folder", "a/b/c", "no-such-user/no-such-model"])
def test_a_model_that_cannot_be_found_is_one_clear_error(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match="folder") as raised:
        resolve_model(name)
    assert "\n" not in str(raised.value) and name in str(raised.value)


def test_a_file_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        resolve_model(str(path))
