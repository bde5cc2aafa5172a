"""From a model's name to a decoder with weights."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from nanospec.config import ModelConfig
from nanospec.errors import CheckpointError
from nanospec.models.decoder import Decoder
from nanospec.models.dspark import DSparkConfig, DSparkDrafter
from nanospec.models.layers import Linear
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
    skip = {"lm_head.weight"} if config.tie_word_embeddings else set()
    _fill(folder, checkpoint_tensors(decoder, config), skip)
    embedding = decoder.embed_tokens.weight
    if skip and not _is_table(folder, "lm_head.weight", embedding):
        raise CheckpointError(
            f"{folder} holds a lm_head.weight that is not the embedding, though its config ties "
            f"the two; set tie_word_embeddings to false in config.json if the head is meant"
        )
    return decoder


def load_drafter(
    folder: Path, config: DSparkConfig, target: Decoder, *, load_format: str = "auto"
) -> DSparkDrafter:
    """Build a DSpark drafter beside its target, in the target's dtype, and fill its weights.

    Embedding and head are the target's own where the checkpoint stores none, or the same ones.

    Args:
        folder: of the drafter; unused for `dummy`.
        config: of the drafter.
        target: loaded before.
        load_format: auto, or dummy for random weights.

    Raises:
        CheckpointError: the two do not fit, or a tensor is missing, unexpected or misshaped.
    """
    config.check_target(target.config)
    tables = {"embed_tokens": target.embed_tokens, "lm_head": target.lm_head}
    aliased = set(tables)
    if load_format != "dummy":
        aliased = {
            name
            for name, table in tables.items()
            if _is_table(folder, f"{name}.weight", table.weight)
        }
    for name in set(tables) - aliased:
        vocab_size, width = tables[name].weight.shape
        tables[name] = Linear(width, vocab_size, target.dtype, target.device)
    drafter = DSparkDrafter(config, target.dtype, target.device, **tables)
    if load_format == "dummy":
        fill_random(drafter, frozen=tables.values())
        return drafter
    skip = {f"{name}.weight" for name in aliased}
    places = checkpoint_tensors(drafter, config.layers)
    _fill(folder, {name: place for name, place in places.items() if name not in skip}, skip)
    return drafter


def fill_random(module: nn.Module, seed: int = 0, frozen: Iterable[nn.Module] = ()) -> None:
    """Fill weights as untrained: matrices with deviation 0.02, biases with 0, norms with 1.

    Args:
        module: to fill.
        seed: of the first matrix; the next ones follow.
        frozen: parts of it to leave as they are.
    """
    kept = {id(parameter) for part in frozen for parameter in part.parameters()}
    for name, parameter in module.named_parameters():
        if id(parameter) in kept:
            continue
        if parameter.dim() == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            generator = torch.Generator(parameter.device).manual_seed(seed)
            parameter.normal_(0.0, 0.02, generator=generator)
            seed += 1


def checkpoint_tensors(module: nn.Module, config: ModelConfig) -> dict[str, Tensor]:
    """Map a checkpoint's names, without the prefix `model.`, to parameters or rows of fused ones.

    Args:
        module: has decoder layers of the shape of `config`.
        config: says how fused parameters are divided.
    """
    q_rows = config.num_heads * config.head_dim
    kv_rows = config.num_kv_heads * config.head_dim
    fused = {
        "qkv_proj": {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows},
        "gate_up_proj": dict.fromkeys(("gate_proj", "up_proj"), config.intermediate_size),
    }
    tensors: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        part = name.split(".")[-2]
        if part not in fused:
            tensors[name] = parameter.data
            continue
        pieces = torch.split(parameter.data, list(fused[part].values()))
        for own, piece in zip(fused[part], pieces, strict=True):
            tensors[name.replace(part, own)] = piece
    return tensors


def _fill(folder: Path, places: Mapping[str, Tensor], skip: Set[str]) -> None:
    """Copy every tensor of a checkpoint to its place; all places must be filled.

    Args:
        folder: of the checkpoint.
        places: by name, see `checkpoint_tensors`.
        skip: names that may be stored without having a place.
    """
    missing = set(places)
    for name, tensor in _tensors(folder):
        if name in skip or name.endswith("rotary_emb.inv_freq"):
            continue  # old checkpoints store what RoPE computes
        if name not in places:
            raise CheckpointError(f"{folder} holds an unexpected tensor {name}")
        _copy(tensor, places[name], name)
        missing.discard(name)
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(f"{folder} lacks the tensor {min(missing)}{more}")


def _is_table(folder: Path, wanted: str, table: Tensor) -> bool:
    """Say whether a checkpoint's tensor is a table already in memory, or not stored at all."""
    stored = next((tensor for _, tensor in _tensors(folder, only=wanted)), None)
    if stored is None:
        return True
    return stored.shape == table.shape and torch.equal(stored.to(table), table)


def _tensors(folder: Path, only: str | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a checkpoint, or one, mapped from disk one by one."""
    for path in _files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for stored in file.keys():  # noqa: SIM118 - a safetensors file is no dict
                    name = stored.removeprefix("model.")
                    if only in (None, name):
                        yield name, file.get_tensor(stored)
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
