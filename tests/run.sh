#!/usr/bin/env bash
# Set-up, lint, types, wheels and all tests that run by default, in .venv; says how long each part
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
types_and_wheel() { # mypy has one core; the other compiles the tests, which each worker would do for itself
  {
    pytest -q --collect-only >/dev/null 2>&1 || true
    tests/install.sh build/dist/*.whl
    tests/oldest.sh
  } &
  mypy
  wait $!
}
part 1 set-up .ci/install.sh test
PATH=$PWD/.venv/bin:$PATH
part 2 lint lint
part 3 "types, wheel and oldest versions" types_and_wheel
echo "[4 of 4] tests ..."
ONNXPAR_PARTS=$times pytest -q -n 3 --dist worksteal "$@"
