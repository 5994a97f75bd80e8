#!/usr/bin/env bash
# Makes .venv with onnxpar in it; installs the system packages that are missing. Run by the two
# commands of the README, from the root of the repository. For tests, onnxpar is installed from a wheel
# that is made from a source archive, and both stay in build/dist. `install.sh test COMMAND` also runs a
# command of .venv while the plugin is built, and fails if it does.
set -euo pipefail
cd "$(dirname "$0")/.."
extras=${1:-} meanwhile=${2:-true}

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
export PIP_DISABLE_PIP_VERSION_CHECK=1
[ -x .venv/bin/uv ] || .venv/bin/pip install --quiet uv
install() { # uv takes a tenth of pip's time, but does not read pip's settings
  VIRTUAL_ENV=$PWD/.venv .venv/bin/uv pip install --quiet "$1" ||
    .venv/bin/pip install --quiet "$1"
}
if [ "$extras" != test ]; then
  install ".${extras:+[$extras]}"
  exit
fi
# uv reads what the wheel will need from pyproject.toml, and installs it while the plugin is built.
{
  VIRTUAL_ENV=$PWD/.venv .venv/bin/uv pip install --quiet -r pyproject.toml --extra test || exit 3
  PATH=$PWD/.venv/bin:$PATH "$meanwhile"
} &
beside=$!
wheel() { find build/dist -name 'onnxpar-*.whl' 2>/dev/null; }
sources=(onnxpar passes CMakeLists.txt pyproject.toml)
if [ -z "$(wheel)" ] || [ -n "$(find "${sources[@]}" -newer "$(wheel)" -type f -not -name '*.pyc')" ]; then
  rm -rf build/dist
  .venv/bin/uv build --quiet --python .venv/bin/python --out-dir build/dist .
fi
status=0
wait $beside || status=$?
[ $status = 0 ] || [ $status = 3 ] || exit $status
VIRTUAL_ENV=$PWD/.venv .venv/bin/uv pip uninstall --quiet onnxpar 2>/dev/null || true
install "$(wheel)[test]"
[ $status = 0 ] || PATH=$PWD/.venv/bin:$PATH "$meanwhile"
