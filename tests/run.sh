#!/usr/bin/env bash
# Lint, types, and all tests, in .venv.
set -euo pipefail
cd "$(dirname "$0")/.."
.ci/install.sh test
PATH=$PWD/.venv/bin:$PATH
ruff check .
ruff format --check --quiet .
clang-format --dry-run -Werror onnxpar/native/*.cc onnxpar/native/*.h
mypy
tests/oldest.sh
tests/install.sh
pytest -q -n 2 "$@"
