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
python3 -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
browser=
if [ "$extras" = test ]; then
  have ip iproute2
  # Where services are started by systemd, installing sshd would open the machine to the network.
  [ -e /usr/sbin/sshd ] || [ -d /run/systemd/system ] || missing+=(openssh-server)
  have ssh openssh-client
  have openssl openssl
  command -v chromium chromium-browser google-chrome >/dev/null || browser=chromium
fi
if [ -n "${missing[*]}$browser" ]; then
  sudo=$([ "$(id -u)" = 0 ] || echo sudo)
  apt() { DEBIAN_FRONTEND=noninteractive $sudo apt-get "$@" >/dev/null; }
  echo "installing ${missing[*]} $browser"
  apt update -qq
  [ ${#missing[@]} = 0 ] || apt install -y -qq "${missing[@]}"
  [ -z "$browser" ] || apt install -y -qq "$browser" ||
    echo "no package $browser here: the test that opens a page in a browser is left out"
fi

echo "installing onnxpar in .venv; the first time takes a minute or two" >&2
[ -x .venv/bin/python ] || python3 -m venv .venv
.venv/bin/pip install --quiet --disable-pip-version-check ".${extras:+[$extras]}"
