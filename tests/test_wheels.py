"""The wheels that .ci/wheels.sh makes: their names, what is in them, what they need, and that one
runs where no compiler is. They take minutes, and tools from the package index."""

from __future__ import annotations

import platform
import re
import subprocess
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GLIBC = (2, 28)
"""The oldest that wheels must run on."""
SYSTEM = {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2"}
LOADERS = {"x86_64": "ld-linux-x86-64.so.2", "aarch64": "ld-linux-aarch64.so.1"}
PLUGIN = "onnxpar/native/libonnxpar_ops.so"


@pytest.mark.slow
def test_wheels(tmp_path: Path) -> None:
    subprocess.run([ROOT / ".ci/wheels.sh"], check=True, timeout=3000)
    for arch, loader in LOADERS.items():
        (wheel,) = ROOT.glob(f"dist/onnxpar-*_{arch}.whl")
        name_is_for_any_python_and_an_old_glibc(wheel.name, arch)
        with zipfile.ZipFile(wheel) as archive:
            has_the_package_alone(archive.namelist())
            plugin = Path(archive.extract(PLUGIN, tmp_path / arch))
        needs_the_c_library_alone(plugin, SYSTEM | {loader})
        takes_what_is_fast_from_the_c_library(plugin)
        if arch == platform.machine():
            has_the_instructions_of_each_level(plugin)
            subprocess.run([ROOT / "tests/install.sh", wheel], check=True, timeout=1200)


def name_is_for_any_python_and_an_old_glibc(name: str, arch: str) -> None:
    found = re.fullmatch(rf"onnxpar-[\d.]+-py3-none-manylinux_2_(\d+)_{arch}\.whl", name)
    assert found is not None, name
    assert (2, int(found[1])) <= GLIBC


def has_the_package_alone(names: list[str]) -> None:
    assert PLUGIN in names and "onnxpar/passes/lower/insert_collectives.py" in names
    for licence in ("licenses/LICENSE", "licenses/onnxpar/native/gloo/LICENSE"):
        assert sum(name.endswith(licence) for name in names) == 1
    assert [n for n in names if n.startswith("onnxpar/native/") and n[-1] != "/"] == [PLUGIN]
    assert {n.split("/")[0] for n in names if ".dist-info" not in n} == {"onnxpar"}


def needs_the_c_library_alone(plugin: Path, libraries: set[str]) -> None:
    needed = set(re.findall(r"NEEDED.*\[(\S+)\]", output("readelf", "--dynamic", plugin)))
    assert needed <= libraries
    symbols = output("readelf", "--wide", "--dyn-syms", plugin)
    versions = {(int(a), int(b)) for a, b in re.findall(r"@GLIBC_(\d+)\.(\d+)", symbols)}
    assert max(versions) <= GLIBC


def takes_what_is_fast_from_the_c_library(plugin: Path) -> None:
    """Zig has a memcpy and an expf of its own, which are slower and give other bits."""
    symbols = output("readelf", "--wide", "--dyn-syms", plugin)
    assert {"memcpy", "memmove", "memset", "expf"} <= set(re.findall(r"UND (\w+)@GLIBC", symbols))


def has_the_instructions_of_each_level(plugin: Path) -> None:
    if platform.machine() == "x86_64":
        code = output("objdump", "-d", plugin)
        for registers in ("xmm", "ymm", "zmm"):
            assert re.search(rf"mulps .*%{registers}", code), registers


def output(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
