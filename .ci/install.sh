#!/usr/bin/env bash
# Makes .venv with onnxpar in it; installs the system packages that are missing. Run by the two
# commands of the README, from the root of the repository.
set -euo pipefail
cd "$(dirname "$0")/.."
extras=${1:-}

missing=()
have() { command -v "$1" >/dev/null || missing+=("$2"); }
have g++ g++
have mpirun openmpi-bin
[ -e /usr/include/gloo/context.h ] || missing+=(libgloo-dev)
python3 -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
if [ ${#missing[@]} -gt 0 ]; then
  sudo=$([ "$(id -u)" = 0 ] || echo sudo)
  echo "installing ${missing[*]}"
  $sudo apt-get update -qq
  DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq "${missing[@]}" >/dev/null
fi

[ -x .venv/bin/python ] || python3 -m venv .venv
.venv/bin/pip install --quiet --disable-pip-version-check ".${extras:+[$extras]}"
