"""Fixtures every test may use, and the rule that skips GPU tests where there is no GPU."""

import os
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # must precede the first import of triton

from tests import helpers

torch.set_num_threads(
    1
)  # tiny models: threads cost more than they bring, above all on a busy machine
ROOT = Path(__file__).resolve().parent.parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels run: a GPU, or else the CPU through Triton's interpreter."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen3 with a byte-level tokenizer, as `save_pretrained` writes it."""
    return helpers.make_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3")


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama, untied, head_dim apart from hidden/heads, 3 query heads per KV head."""
    return helpers.make_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, where it has been made (scripts/get_smollm2.py)."""
    folder = Path(os.environ.get("NANOSPEC_SMOLLM2", ROOT / "models" / "smollm2"))
    if not (folder / "config.json").exists():
        pytest.skip("no SmolLM2: python scripts/get_smollm2.py --out models/smollm2")
    return folder
