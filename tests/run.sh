#!/usr/bin/env bash
# Set-up, types, lint, wheels and all tests that run by default, in .venv; says how long each part
# takes. Arguments go to pytest. tests/nightly.sh runs what takes longer, tests/changed.sh what a change
# needs.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONDONTWRITEBYTECODE=
times=
part() { # part NUMBER NAME COMMAND...
  local began=$SECONDS
  echo "[$1 of 4] $2 ..."
  "${@:3}"
  times+="$2 $((SECONDS - began)) s, "
  echo "[$1 of 4] $2: $((SECONDS - began)) s"
}
lint() {
  ruff check .
  ruff format --check --quiet .
  clang-format --dry-run -Werror onnxpar/native/*.cc onnxpar/native/*.h
}
wheel_and_oldest() { # and compiles the tests, which each worker would do for itself
  pytest -q --collect-only >/dev/null 2>&1 &
  tests/install.sh build/dist/*.whl
  tests/oldest.sh
  wait $! || true
}
part 1 "set-up and types" .ci/install.sh test mypy
PATH=$PWD/.venv/bin:$PATH
part 2 lint lint
part 3 "wheel and oldest versions" wheel_and_oldest
echo "[4 of 4] tests ..."
ONNXPAR_PARTS=$times pytest -q -n 3 --dist worksteal "$@"
