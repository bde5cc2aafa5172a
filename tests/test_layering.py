"""Imports point down, siblings do not know each other, and starting up stays light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import nanospec

ROOT = Path(nanospec.__file__).parent
LAYERS = [
    "errors",
    "params",
    "stats",
    "device",
    "pdl",
    "template",
    "text",
    "types",
    "calibration",
    "config",
    "attention",
    "models",
    "cudagraph",
    "spec",
    "engine",
    "llm",
    "prompts",
    "trace",
    "generate",
]
SIBLINGS = {"models": "cudagraph", "cudagraph": "models"}
FILES = sorted(ROOT.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    here = path.relative_to(ROOT).parts[0].removesuffix(".py")
    if here == "__init__":
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("nanospec"):
            continue
        parts = node.module.split(".")
        targets = parts[1:2] or [alias.name for alias in node.names]
        for target in targets:
            assert LAYERS.index(target) <= LAYERS.index(here), f"{here} imports {target}"
            assert SIBLINGS.get(here) != target, f"{here} imports its sibling {target}"


def test_importing_nanospec_leaves_heavy_modules_alone() -> None:
    code = (
        "import sys, nanospec, nanospec.generate\n"
        "heavy = {'transformers', 'flashinfer', 'triton', 'huggingface_hub', 'jinja2'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # torch itself imports these in some versions; nanospec must not be the reason.
    torch_only = subprocess.run(
        [sys.executable, "-c", code.replace("nanospec, nanospec.generate", "torch")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == torch_only.stdout


def test_no_library_file_is_too_long_to_read() -> None:
    assert max(len(path.read_text().splitlines()) for path in FILES) <= 400
