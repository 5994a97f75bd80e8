#!/usr/bin/env bash
# install.sh [WHEEL]: installs a wheel where there is no compiler, no Gloo and no copy of this
# repository, and runs a model over ranks there. Without a wheel, makes one from a source archive, of
# which it shows that it says what it needs where that is missing. Called by tests/run.sh; needs .venv
# with the test extra.
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
.venv/bin/python -m venv "$scratch/venv"
bin=$scratch/venv/bin
export PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONPATH=

if [ $# = 1 ]; then
  cp "$1" "$scratch"
else
  .venv/bin/uv build --quiet --python .venv/bin/python --out-dir "$scratch" .
  if $hidden "$bin/pip" install --no-deps "$scratch"/onnxpar-*.tar.gz >"$scratch/log" 2>&1; then
    echo "the source was built without a compiler" >&2
    exit 1
  fi
  tail -n 9 "$scratch/log" | grep -F 'apt install g++'
fi

$hidden "$bin/pip" install --quiet --only-binary :all: "$scratch"/onnxpar-*.whl
for transport in shared-memory gloo; do
  $hidden env ONNXPAR_TRANSPORT=$transport \
    "$bin/onnxpar" check "$scratch/model.onnx" --devices 2 --preset tensor-parallel --no-measure |
    grep '^all outputs agree'
done
