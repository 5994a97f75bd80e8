#!/usr/bin/env bash
# The main job: a real model sharded over 4 ranks, run, and compared with the unsplit model.
set -euo pipefail
cd "$(dirname "$0")/.."
.ci/install.sh serve
model=models/llama.dynamo.static.onnx
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
PATH=$PWD/.venv/bin:$PATH
cd "$scratch" # so that the installed package runs, not the checkout
onnxpar check "$OLDPWD/$model" --devices 4
onnxpar check "$OLDPWD/$model" --devices 4 --preset tensor-parallel
