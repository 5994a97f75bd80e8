#!/usr/bin/env bash
# The oldest versions that the metadata allows, in a virtual environment of their own: smoke tests.
# Called by tests/run.sh, from the root of the repository; needs what .ci/install.sh makes for tests.
set -euo pipefail
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
uv=.venv/bin/uv
python=${1:-.venv/bin/python}
$uv pip compile --quiet --no-build --no-header --python "$python" --resolution lowest-direct \
  pyproject.toml --output-file "$scratch/oldest.txt"
$uv venv --quiet --python "$python" "$scratch/venv"
export VIRTUAL_ENV=$scratch/venv
$uv pip install --quiet --no-build --requirement "$scratch/oldest.txt" \
  'pytest>=8' pytest-xdist pytest-timeout 'hypothesis>=6'
$uv pip install --quiet --no-deps build/dist/onnxpar-*.whl
grep -E '^(onnx|onnxruntime|numpy)==' "$scratch/oldest.txt"
"$scratch/venv/bin/pytest" -q -n 2 -p no:cacheprovider tests/runtime/test_states.py \
  tests/passes/test_golden.py tests/whole_models/test_small_models.py tests/trainer/test_trainer.py \
  tests/llm/test_paged_attention.py
