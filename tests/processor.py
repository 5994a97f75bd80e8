"""What the processor of this machine can do, where onnxruntime's kernels depend on it."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

_CPUINFO = Path("/proc/cpuinfo")
_FLAGS = frozenset(_CPUINFO.read_text().split()) if _CPUINFO.exists() else frozenset()
IS_X86 = platform.machine() in ("x86_64", "AMD64")

blocks_of_16 = pytest.mark.skipif(
    IS_X86 and "avx512f" not in _FLAGS,
    reason="without AVX-512, onnxruntime's blocks have 8 channels, not 16",
)
four_bit_floats = pytest.mark.skipif(
    IS_X86 and "avx512f" not in _FLAGS,
    reason="onnxruntime has kernels for products of 4-bit floats for AVX-512 alone",
)
exact_int8 = pytest.mark.skipif(
    IS_X86 and not _FLAGS & {"avx512_vnni", "avx_vnni"},
    reason="without VNNI, sums of int8 products saturate in onnxruntime, and order matters",
)
