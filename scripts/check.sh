#!/usr/bin/env bash
# All checks of the project: lint, format, types, tests on two cores (arguments go to pytest).
set -euo pipefail
cd "$(dirname "$0")/.."
ruff check .
ruff format --check .
mypy
pytest -n 2 "$@"
