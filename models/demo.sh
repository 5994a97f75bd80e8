#!/usr/bin/env bash
# The main job: a real model sharded over 4 ranks, run, and compared with the unsplit model; then 2
# ranks write with it.
set -euo pipefail
cd "$(dirname "$0")/.."
.ci/install.sh serve
model=$PWD/models/llm/docs_llama
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
PATH=$PWD/.venv/bin:$PATH
cd "$scratch" # so that the installed package runs, not the checkout
onnxpar check "$model" --devices 4
onnxpar check "$model" --devices 4 --preset tensor-parallel
onnxpar shard "$model" --devices 2 --preset tensor-parallel -o llm.par >/dev/null
echo "2 ranks continue \"A sharded model\":"
onnxpar generate llm.par "A sharded model"
