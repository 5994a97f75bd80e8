#!/usr/bin/env bash
# Ranks on OpenVINO's execution provider, in a virtual environment of their own, because its package
# replaces onnxruntime. Needs what .ci/install.sh makes for tests.
set -euo pipefail
cd "$(dirname "$0")/.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
uv=.venv/bin/uv
$uv venv --quiet --python .venv/bin/python "$scratch/venv"
export VIRTUAL_ENV=$scratch/venv
$uv pip install --quiet '.[llm,openvino]' 'pytest>=8' pytest-timeout 'hypothesis>=6'
$uv pip uninstall --quiet onnxruntime
$uv pip install --quiet --reinstall --no-deps onnxruntime-openvino
"$scratch/venv/bin/python" -c "
import onnxruntime as ort
assert 'OpenVINOExecutionProvider' in ort.get_available_providers(), ort.__version__"
"$scratch/venv/bin/pytest" -q -p no:cacheprovider tests/runtime/test_openvino.py
