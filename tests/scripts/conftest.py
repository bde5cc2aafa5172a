"""Fixtures of several scripts' tests."""

import json
from pathlib import Path

import pytest

from tests import helpers

GOLDEN = Path(__file__).resolve().parents[1] / "data" / "golden" / "A"


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    """The golden drafter in a folder of its own."""
    folder = tmp_path / "drafter"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((GOLDEN / name).read_bytes())
    return folder


@pytest.fixture
def dflash(qwen3: Path, tmp_path: Path) -> Path:
    """A drafter for `qwen3` without confidences."""
    options = {"markov_rank": 0, "enable_confidence_head": False}
    return helpers.make_drafter(tmp_path / "dflash", qwen3, **options)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """A file of token ids."""
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": list(range(start, start + 9)), "answer": "#### 1"} for start in range(3, 13)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path
