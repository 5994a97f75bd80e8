"""What two inputs of 64 MB add to a run, against their memcpy: python tests/bench/bench_inputs.py

`bound` is what they add in memory of the session, bound once: nothing, unless shards are not
contiguous. Measured in pairs, a run with the large inputs next to one with small ones, so that what
else the machine does falls on both. Each case prints its ratio, and the worst must be below 2.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from onnx import helper

sys.path.insert(0, str(Path(__file__).parent.parent))
from runtime.bundles import Tensor, write_par

from onnxpar.runtime.session.session import InferenceSession

ROWS, COLUMNS = 4096, 4096
LIMIT = 2.0
CASES = {"whole": (None, None), "split by rows": ("tp", None), "split by columns": (None, "tp")}


def seconds(action: Callable[[], object]) -> float:
    """How long it takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def bound(session: InferenceSession, arrays: dict[str, np.ndarray]) -> Callable[[], object]:
    """A run with these arrays in memory of the session."""
    binding = session.io_binding()
    for name, array in arrays.items():
        value = session.create_ortvalue_from_shape_and_type(array.shape, np.float32, "cpu")
        value.update_inplace(array)
        binding.bind_ortvalue_input(name, value)
    for port in session.get_outputs():
        binding.bind_output(port.name)
    return lambda: session.run_with_iobinding(binding)


def measure(
    layout: tuple[str | None, str | None], ranks: int, pairs: int
) -> tuple[float, float, float]:
    """Median seconds that the inputs add to a run, that they add if they are bound, and that their
    memcpy takes."""

    def write(folder: Path, shape: tuple[int, int]) -> Path:
        """Shape reads nothing of its input, so that only the handing over is timed."""
        nodes = [helper.make_node("Shape", [name], [f"{name}_shape"]) for name in ("a", "b")]
        inputs = [Tensor(name, shape, layout) for name in ("a", "b")]
        outputs = [Tensor(f"{name}_shape", (2,), None, "int64") for name in ("a", "b")]
        return write_par(folder, f"tp={ranks}", inputs, outputs, lambda rank: nodes)

    large = {name: np.random.default_rng(0).random((ROWS, COLUMNS), np.float32) for name in "ab"}
    small = {name: array[:8, :8].copy() for name, array in large.items()}
    target = [np.empty_like(array) for array in large.values()]

    def memcpy() -> None:
        for to, array in zip(target, large.values(), strict=True):
            np.copyto(to, array)

    with tempfile.TemporaryDirectory() as folder:
        big_par = write(Path(folder, "large"), (ROWS, COLUMNS))
        small_par = write(Path(folder, "small"), (8, 8))
        with InferenceSession(big_par) as big, InferenceSession(small_par) as little:
            in_place = bound(big, large)
            added, kept, copied = [], [], []
            for _ in range(pairs + 3):
                with_inputs = seconds(lambda: big.run(None, large))
                for _ in range(3):  # after the run before, the second one binds it anew
                    with_bound = seconds(in_place)
                without = seconds(lambda: little.run(None, small))
                copied.append(seconds(memcpy))
                added.append(with_inputs - without)
                kept.append(with_bound - without)
    medians = [statistics.median(each[3:]) for each in (added, kept, copied)]
    return medians[0], medians[1], medians[2]


def main() -> int:
    """Prints a line per case; fails if one adds more than its limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=15)
    options = parser.parse_args()
    worst = 0.0
    for name, layout in CASES.items():
        added, kept, copied = measure(layout, options.ranks, options.pairs)
        worst = max(worst, added / copied)
        print(
            f"{name:18} adds {added * 1e3:6.1f} ms, bound {kept * 1e3:6.1f} ms, memcpy takes "
            f"{copied * 1e3:6.1f} ms: ratio {added / copied:.2f}"
        )
    return int(worst >= LIMIT)


if __name__ == "__main__":
    sys.exit(main())
