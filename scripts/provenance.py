"""Where a number comes from: the fields every script adds to its JSON line."""

import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "triton", "transformers", "flashinfer-python")


def provenance() -> dict[str, Any]:
    """Return commit, versions, hardware and arguments of this run."""
    on_gpu = torch.cuda.is_available()
    return {
        "commit": _commit(),
        "versions": {"python": platform.python_version()} | _versions(),
        "hardware": torch.cuda.get_device_name() if on_gpu else _cpu_name(),
        "threads": torch.get_num_threads(),
        "argv": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }


def _commit() -> str:
    """Return the checked-out commit, marked + where the tree differs from it."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} x {len(names)}" if names else platform.processor()
