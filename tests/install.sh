#!/usr/bin/env bash
# install.sh WHEEL: installs a wheel where there is no compiler, no Gloo and no copy of this
# repository, and runs a model over ranks there. Shows before that a source archive, where one lies
# beside the wheel, says what it needs where that is missing. Needs .venv with the test extra.
set -euo pipefail
cd "$(dirname "$0")/.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
hidden=tests/without_compiler.sh
if ! $hidden true; then
  echo "this machine does not allow namespaces for mounts: no wheel is installed without a compiler"
  exit 0
fi
cp models/llama.dynamo.static.onnx "$scratch/model.onnx"
cp "$(dirname "$1")"/onnxpar-* "$scratch"
cp .venv/bin/uv "$scratch"
"$scratch/uv" venv --quiet --python .venv/bin/python "$scratch/venv"
export VIRTUAL_ENV=$scratch/venv

source=$(find "$scratch" -maxdepth 1 -name '*.tar.gz')
if [ -n "$source" ]; then
  if $hidden "$scratch/uv" pip install --no-deps "$source" >"$scratch/log" 2>&1; then
    echo "the source was built without a compiler" >&2
    exit 1
  fi
  grep -F 'apt install g++' "$scratch/log"
fi

$hidden "$scratch/uv" pip install --quiet --no-build "$scratch/$(basename "$1")"
for transport in shared-memory gloo; do
  $hidden env ONNXPAR_TRANSPORT=$transport PYTHONPATH= \
    "$scratch/venv/bin/onnxpar" check "$scratch/model.onnx" --devices 2 --preset tensor-parallel --for-any-host |
    grep '^all outputs agree'
done
