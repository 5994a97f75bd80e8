#!/usr/bin/env bash
# changed.sh [REVISION] [pytest arguments]: lint, types and the tests of the rooms whose files differ
# from a revision (default: HEAD, or the commit before it where nothing does), in the Python that is
# active. A room takes up to a minute; tests/run.sh runs all.
set -euo pipefail
cd "$(dirname "$0")/.."
since=HEAD
if [ $# -gt 0 ] && git rev-parse --quiet --verify "$1^{commit}" >/dev/null; then
  since=$1
  shift
elif [ -z "$(git status --porcelain)" ]; then
  since=HEAD~1
fi
changed=$({ git diff --name-only --diff-filter=d "$since"; git ls-files --others --exclude-standard; } | sort -u)
rooms=() files=()
for file in $changed; do
  case $file in
    tests/*/test_*.py | tests/test_*.py) rooms+=("$file") ;;
    onnxpar/*/*) room=${file#onnxpar/} && rooms+=("tests/${room%%/*}") ;;
    passes/*) rooms+=(tests/passes) ;;
    onnxpar/api.py) rooms+=(tests/test_api.py) ;;
  esac
  case $file in *.py) files+=("$file") ;; esac
done
[ ${#files[@]} = 0 ] || ruff check --quiet "${files[@]}"
[ ${#files[@]} = 0 ] || ruff format --check --quiet "${files[@]}"
mypy
tests=()
for room in "${rooms[@]}"; do
  [ ! -e "$room" ] || [[ " ${tests[*]} " == *" $room "* ]] || tests+=("$room")
done
echo "files that differ from $since: $(wc -w <<<"$changed"); tests: ${tests[*]:-tests/test_imports.py}"
pytest -q -n 2 --dist loadscope "${tests[@]:-tests/test_imports.py}" "$@"
