"""Open sizes that only a Reshape relates, as the batches of an encoder's result and of tokens."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from agreement import TIMEOUT, check_outputs, options, run_unsplit
from small_models import HEAD, write_text

from onnxpar.base.errors import InputError, StrategyError
from onnxpar.graph.reshape_sizes import is_possible, proportion
from onnxpar.layout.symbols import Polynomial
from onnxpar.planner import sharder
from onnxpar.planner.options import Options
from onnxpar.runtime.session.threads import ThreadSession
from onnxpar.strategy.strategy import Strategy

CROSS = (
    HEAD
    + """m (float[a,3,8] memory, float[b,l,8] x, float[8,8] w) => (float[b,l,n] y)
<int64[1] rest = {-1}, int64[1] width = {8}>
{ s = Shape<start = 0, end = 1>(x)  t = Concat<axis = 0>(s, rest, width)
  h = MatMul(memory, w)  keys = Reshape(h, t)
  turned = Transpose<perm = [0, 2, 1]>(keys)  y = MatMul(x, turned) }"""
)


def _feeds(a: int, b: int, length: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(a)
    shapes = {"memory": (a, 3, 8), "x": (b, length, 8)}
    return {n: draw.standard_normal(shape).astype(np.float32) for n, shape in shapes.items()}


@pytest.mark.parametrize("layout", ["tensor-parallel 2", "data-parallel 3", "context-parallel 2"])
def test_the_batches_of_encoder_and_decoder_are_one(layout: str, tmp_path: Path) -> None:
    model = write_text(CROSS, tmp_path / "m.onnx")
    plan = sharder.shard(model, tmp_path / "m.par", options(layout))
    with ThreadSession(tmp_path / "m.par", timeout=TIMEOUT) as session:
        for batch, length in (1, 1), (1, 5), (2, 3), (5, 4):
            feeds = _feeds(batch, batch, length)
            found = session.run(None, feeds)
            check_outputs(found, run_unsplit(model, feeds), [p.name for p in plan.outputs])
        with pytest.raises(InputError, match=r"'x' has 3 at dimension 0, .* 'memory' has 4"):
            session.run(None, _feeds(4, 3, 2))


@pytest.mark.parametrize("layout", ["3", "tensor-parallel 2"])
def test_a_length_that_is_twice_another(layout: str, tmp_path: Path) -> None:
    text = f"""{HEAD}m (float[b,n,8] x, float[b,l,8] y) => (float[b,n,16] z)
        <int64[1] width = {{16}}>
        {{ s = Shape<start = 0, end = 2>(x) t = Concat<axis = 0>(s, width) z = Reshape(y, t) }}"""
    model = write_text(text, tmp_path / "m.onnx")
    sharder.shard(model, tmp_path / "m.par", options(layout))
    with ThreadSession(tmp_path / "m.par", timeout=TIMEOUT) as session:
        for n in (1, 2, 33):
            y = np.random.default_rng(n).standard_normal((2, 2 * n, 8)).astype(np.float32)
            feeds = {"x": np.zeros((2, n, 8), np.float32), "y": y}
            check_outputs(session.run(None, feeds), run_unsplit(model, feeds), ["z"])


def test_sizes_that_a_reshape_relates_in_an_unknown_way_are_an_error(tmp_path: Path) -> None:
    model = write_text(CROSS.replace("a,3,8", "3,a,c,8"), tmp_path / "m.onnx")
    wanted = r"Reshape 'keys' is not possible .* such as a=\d+, c=\d+, b=\d+, l=\d+; relate"
    with pytest.raises(StrategyError, match=wanted):
        sharder.plan(model, options("tensor-parallel 2"))


@pytest.mark.parametrize(
    ("shape", "target", "wanted"),
    [
        ((7, 20, 32), (7, -1, 4, 8), True),
        ((7, 20, 32), (11, -1, 4, 8), False),
        ((7, 20, 32), (0, -1, 8), True),
        ((7, 32), (7, 4, 8), True),
        ((7, 32), (8, 4, 8), False),
        ((0, 32), (0, 4, 8), True),
        ((), (1, 1), True),
        ((3, 0), (-1, 4), True),
        ((3, 2), (0, 0, 1), True),
    ],
)
def test_is_possible(shape: tuple[int, ...], target: tuple[int, ...], wanted: bool) -> None:
    assert is_possible(shape, target) == wanted


@pytest.mark.parametrize(
    ("shape", "target", "wanted"),
    [
        ("a 20 32", "b ? 4 8", ("a", "b", 1)),
        ("a s 32", "b ? 4 8", ("a", "b", 1)),
        ("20*a 32", "b ? 4 8", ("a", "b", 1)),  # positions of all samples in one dimension
        ("a s 32", "b s 4 8", ("a", "b", 1)),
        ("s a 32", "a b 32", ("s", "b", 1)),
        ("3 a c 8", "b ? 8", None),
        ("a s 32", "b t 32", None),
        ("a+1 32", "b ? 4 8", None),
        ("a*s 32", "b ? 4 8", None),
        ("a 32", "a 4 8", None),
        ("b a 8", "b s 16", ("a", "s", 2)),
        ("b a 8", "b s 2", ("a", "s", Fraction(1, 4))),
    ],
)
def test_proportion(shape: str, target: str, wanted: tuple[str, str, Fraction] | None) -> None:
    own, new = (
        [None if size == "?" else Polynomial.parse(size) for size in text.split()]
        for text in (shape, target)
    )
    assert proportion(own, new) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("width", [8, 37 * 41 * 43 * 47])
def test_a_rest_that_no_size_changes(width: int, tmp_path: Path) -> None:
    """Also where a longer x and the same target would leave a whole number, as for a width that the
    sample sizes divide."""
    text = (
        HEAD
        + """m (float[1,t,2,W] x, float[N,4] w) => (float[1,t,n] y)
<int64[1] rest = {-1}>
{ s = Shape<start = 0, end = 2>(x)  target = Concat<axis = 0>(s, rest)
  f = Reshape(x, target)  y = MatMul(f, w) }""".replace("W", str(width)).replace(
            "N", str(2 * width)
        )
    )
    split = {"x": [None, "sp", None, None], "y": [None, "sp", None]}
    strategy = Strategy.of({"mesh": {"sp": 2}, "tensors": split})
    plan, _ = sharder.plan(write_text(text, tmp_path / "m.onnx"), Options(strategy=strategy))
    assert not plan.collectives, "the sequence is split from the beginning to the end"
