"""From a model's name to a decoder with weights."""

import logging
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from nanospec.config import ModelConfig
from nanospec.errors import CheckpointError
from nanospec.models.decoder import Decoder
from nanospec.text import read_json

logger = logging.getLogger(__name__)

# What is fetched from the hub: weights, configs, tokenizer, chat template.
_WANTED_FILES = ["*.json", "*.safetensors", "*.jinja"]
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def resolve_model(name: str) -> Path:
    """Return the folder of a model: a local one, or that of a Hugging Face id, fetched if needed.

    Raises:
        CheckpointError: there is no such folder, and the id cannot be fetched.
    """
    try:
        path = Path(name).expanduser()
        is_folder, exists = path.is_dir(), path.exists()
    except (OSError, RuntimeError) as error:  # too long a name, no such user
        raise CheckpointError(f"model {name[:80]!r} is no usable name: {error}") from error
    if is_folder:
        return path
    if exists:
        raise CheckpointError(f"model {name!r} is a file; pass the folder that holds config.json")
    # Imported here: a local folder needs no hub client, which takes a while to import.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=_WANTED_FILES))
    except HFValidationError:
        raise CheckpointError(
            f"model {name!r} is neither an existing folder nor a Hugging Face id"
        ) from None
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(
            f"model {name!r} is no local folder, and fetching it from the Hugging Face hub failed "
            f"with nothing usable in its cache ({reason}); check the name and the network, or pass "
            f"a local folder"
        ) from error


def load_decoder(
    folder: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str = "auto",
) -> Decoder:
    """Build a decoder and fill its weights.

    Each tensor is copied from the mapped file straight into its place in the (fused) parameter, so
    no second copy of the weights ever exists.

    Args:
        folder: holds `model.safetensors`, or its shards with an index; unused for `dummy`.
        config: of the checkpoint.
        dtype: of the weights in memory.
        device: where they go.
        load_format: auto, or dummy for random weights.

    Raises:
        CheckpointError: a tensor is missing, unexpected or of another shape; it is named.
    """
    decoder = Decoder(config, dtype, device)
    if load_format == "dummy":
        fill_random(decoder)
        return decoder
    places = _places(decoder)
    missing = set(places)
    tied_head: Tensor | None = None
    for name, tensor in _tensors(folder):
        if name.endswith("rotary_emb.inv_freq"):
            continue  # old checkpoints store what RoPE computes
        if name == "lm_head.weight" and config.tie_word_embeddings:
            tied_head = tensor  # compared below: the embedding may come later
            continue
        if name not in places:
            raise CheckpointError(f"{folder} holds an unexpected tensor {name}")
        _copy(tensor, places[name], name)
        missing.discard(name)
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(f"{folder} lacks the tensor {min(missing)}{more}")
    embedding = decoder.embed_tokens.weight
    if tied_head is not None and not torch.equal(tied_head.to(embedding), embedding):
        raise CheckpointError(
            f"{folder} holds a lm_head.weight that is not the embedding, though its config ties "
            f"the two; set tie_word_embeddings to false in config.json if the head is meant"
        )
    return decoder


def fill_random(module: nn.Module, seed: int = 0) -> None:
    """Fill weights as an untrained model has them: matrices with deviation 0.02, norms with 1."""
    for parameter in module.parameters():
        if parameter.dim() == 1:
            parameter.fill_(1.0)
        else:
            generator = torch.Generator(parameter.device).manual_seed(seed)
            parameter.normal_(0.0, 0.02, generator=generator)
            seed += 1


def _places(decoder: Decoder) -> dict[str, Tensor]:
    """Map each tensor of a checkpoint to its place: a parameter, or rows of a fused one."""
    config = decoder.config
    q_rows = config.num_heads * config.head_dim
    kv_rows = config.num_kv_heads * config.head_dim
    fused = {
        "qkv_proj": {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows},
        "gate_up_proj": dict.fromkeys(("gate_proj", "up_proj"), config.intermediate_size),
    }
    places: dict[str, Tensor] = {}
    for name, parameter in decoder.named_parameters():
        full = name if name.startswith("lm_head") else f"model.{name}"
        part = full.split(".")[-2]
        if part not in fused:
            places[full] = parameter.data
            continue
        pieces = torch.split(parameter.data, list(fused[part].values()))
        for own, piece in zip(fused[part], pieces, strict=True):
            places[full.replace(part, own)] = piece
    return places


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a checkpoint, mapped from disk one by one."""
    for path in _files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - a safetensors file is no dict
                    yield name, file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error


def _files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index} has no weight_map")
        names = sorted({str(file) for file in weight_map.values()})
    else:
        names = [_SINGLE]
    for name in names:
        if not (folder / name).exists():
            raise CheckpointError(f"{folder} holds no {name}; nanospec reads safetensors only")
    return [folder / name for name in names]


def _copy(tensor: Tensor, place: Tensor, name: str) -> None:
    if tensor.shape != place.shape:
        raise CheckpointError(
            f"tensor {name} has shape {list(tensor.shape)}, the config makes it {list(place.shape)}"
        )
    place.copy_(tensor)
