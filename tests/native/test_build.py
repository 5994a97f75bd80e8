"""The plugin as a file: what it exports, and which instructions it takes."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from onnxpar.runtime.ranks.library import library, library_path

LEVELS = {
    3: {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"},
    4: {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
}
"""What levels of x86-64 need beyond the level before, as Linux writes it; abm is LZCNT."""


def test_it_exports_what_onnxruntime_and_python_call() -> None:
    """Gloo, and the C++ library where it is linked in, stay hidden from other libraries."""
    if shutil.which("nm") is None:
        pytest.skip("there is no nm (on Debian and Ubuntu: apt install binutils)")
    command = ["nm", "-D", "--defined-only", str(library_path())]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    names = {line.split()[-1] for line in lines}
    assert {"RegisterCustomOps", "onnxpar_world_create"} <= names
    others = {n for n in names if n != "RegisterCustomOps" and not n.startswith("onnxpar_")}
    assert not others


def test_loops_take_the_instructions_of_this_cpu() -> None:
    flags: set[str] = set()
    if platform.machine() == "x86_64":
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        flags = set(next(line for line in lines if line.startswith("flags")).split())
    level = 1
    for better, needed in LEVELS.items():
        if not needed <= flags:
            break
        level = better
    assert library().onnxpar_cpu_level() == level
