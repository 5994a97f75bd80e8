"""Inputs in memory that ranks read in place, against NumPy."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from onnx import helper
from runtime.bundles import Tensor, write_par

from onnxpar.base.errors import RankError
from onnxpar.runtime.session.session import InferenceSession

pytestmark = pytest.mark.processes

SHAPE = (8, 32)


def sharded(folder: Path, layout: Sequence[str | None] | None) -> Path:
    """y = x + x."""
    return write_par(
        folder,
        "tp=2",
        [Tensor("x", SHAPE, layout)],
        [Tensor("y", SHAPE, layout)],
        lambda rank: [helper.make_node("Add", ["x", "x"], ["y"])],
    )


def value(session: InferenceSession, filled: float) -> ort.OrtValue:
    """An input in memory of the session."""
    made = session.create_ortvalue_from_shape_and_type(list(SHAPE), np.float32, "cpu")
    made.update_inplace(np.full(SHAPE, filled, np.float32))
    return made


def check(session: InferenceSession, x: ort.OrtValue | np.ndarray, filled: float) -> None:
    (y,) = session.run(["y"], {"x": x})
    np.testing.assert_array_equal(y, np.full(SHAPE, 2 * filled, np.float32))


def copied(session: InferenceSession) -> int:
    """The number of shards that the last run copied."""
    return len(session._ranks._last.pieces)  # type: ignore[attr-defined, union-attr]


@pytest.mark.matrix
@pytest.mark.parametrize(
    "layout,copies",
    [(None, 0), (("tp", None), 0), ((None, "tp"), 2)],
    ids=["whole", "rows", "columns"],
)
def test_what_is_copied(tmp_path: Path, layout: Sequence[str | None] | None, copies: int) -> None:
    """Nothing, unless a shard is not contiguous; the values may change between runs."""
    with InferenceSession(sharded(tmp_path, layout)) as session:
        x = value(session, 0)
        binding = session.io_binding()
        binding.bind_ortvalue_input("x", x)
        binding.bind_output("y")
        for k in range(5):
            x.update_inplace(np.arange(256, dtype=np.float32).reshape(SHAPE) * k)
            session.run_with_iobinding(binding)
            (y,) = binding.copy_outputs_to_cpu()
            np.testing.assert_array_equal(y, 2 * x.numpy())
            assert copied(session) == copies


def test_other_memory_each_run(tmp_path: Path) -> None:
    """Memory of the session, in any order, and of the caller between."""
    with InferenceSession(sharded(tmp_path, ("tp", None))) as session:
        one, two = value(session, 1), value(session, 2)
        mine = np.full(SHAPE, 3, np.float32)
        for x, filled in ((one, 1), (two, 2), (one, 1), (one, 1), (mine, 3), (mine, 3), (two, 2)):
            check(session, x, filled)
        one.update_inplace(np.full(SHAPE, 4, np.float32))
        check(session, one, 4)
        check(session, mine, 3)


@pytest.mark.slow
def test_memory_is_taken_again(tmp_path: Path) -> None:
    """But not while a view of it is in use."""
    with InferenceSession(sharded(tmp_path, ("tp", None))) as session:
        memory = session._ranks._processes.lasting  # type: ignore[attr-defined, union-attr]
        for k in range(20):
            check(session, value(session, k), k)
            gc.collect()
        assert memory.size <= 2 * 4096
        row = memory.array(np.dtype(np.float32), SHAPE)[3]
        row[...] = 7
        others = [value(session, 1) for _ in range(3)]
        for other in others:
            check(session, other, 1)
        np.testing.assert_array_equal(row, np.full(32, 7))


def test_after_the_end(tmp_path: Path) -> None:
    """What was made can still be read."""
    with InferenceSession(sharded(tmp_path, None)) as session:
        x = value(session, 5)
        check(session, x, 5)
    np.testing.assert_array_equal(x.numpy(), np.full(SHAPE, 5))
    with pytest.raises(RankError, match="this session is closed"):
        value(session, 1)
