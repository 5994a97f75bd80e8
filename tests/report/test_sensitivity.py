"""Models that amplify what they round are judged by how far their own results move."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from agreement import TIMEOUT, options
from decoders import Decoder, build, empty_caches, feeds_of, with_options
from onnx import numpy_helper

from onnxpar.planner import sharder
from onnxpar.report.compare import MOVED, TOLERANCES, Report, compare
from onnxpar.report.compare_each import compare_each, inner_tensors
from onnxpar.report.sensitivity import LARGE
from onnxpar.runtime.session.threads import ThreadSession

INT4 = Decoder("GroupQueryAttention", "int4")
USUAL = TOLERANCES["float32"]


def checked(decoder: Decoder, other: Decoder, folder: Path, ranks: int = 3) -> Report:
    """One decoder on ranks against another one unsplit, on a prompt of two sequences."""
    for name, each in (("whole", decoder), ("split", other)):
        onnx.save(build(each), folder / f"{name}.onnx")
    sharder.shard(folder / "split.onnx", folder / "m.par", options(f"tensor-parallel {ranks}"))
    model = build(decoder)
    ids = np.random.default_rng(0).integers(0, 48, (2, 9))
    feeds = feeds_of(decoder, model, ids, 0) | empty_caches(decoder, model, 2)
    with ThreadSession(folder / "m.par", timeout=TIMEOUT) as session:
        return compare(folder / "whole.onnx", session, feeds)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_what_quantizes_as_it_runs(ranks: int, tmp_path: Path) -> None:
    report = checked(INT4, INT4, tmp_path, ranks)
    assert report.ok, report.text()
    for row in report.rows:
        is_close = row.error <= USUAL
        assert row.tolerance == (USUAL if is_close else 2 * report.moved[row.name])
    assert bool(report.moved) == (MOVED[0] in report.text())


@pytest.mark.slow
@pytest.mark.parametrize(
    "decoder", [Decoder("GroupQueryAttention"), with_options(INT4, level=0)], ids=str
)
def test_others_are_held_to_the_usual_tolerance(decoder: Decoder, tmp_path: Path) -> None:
    report = checked(decoder, decoder, tmp_path)
    assert report.ok and not report.moved, report.text()
    assert {row.tolerance for row in report.rows} == {USUAL}


def test_what_leaves_a_quantization_out_is_found(tmp_path: Path) -> None:
    """Ranks that compute with activations as they are."""
    report = checked(INT4, with_options(INT4, level=0), tmp_path)
    assert not report.ok and not report.rows[1].ok, report.text()


AMPLIFIERS = {
    "a difference of like numbers": """
      q = MatMul(x, w3)
      y = Sub(z, q)""",
    "a sigmoid near 0": """
      q = MatMul(x, w3)
      d = Sub(z, q)
      s = Constant<value_float = 200.0>()
      t = Constant<value_float = -9.0>()
      u = Mul(d, s)
      v = Add(u, t)
      y = Sigmoid(v)""",
    "a spread near 0": """
      q = MatMul(x, w3)
      d = Sub(z, q)
      p = Mul(d, d)
      a = Constant<value_ints = [1]>()
      m = ReduceMean(p, a)
      r = Sqrt(m)
      y = Div(d, r)""",
}
"""Of z = x w1 w2, whose sum over ranks is rounded otherwise than the whole one."""


def amplifier(nodes: str, change: Callable[[np.ndarray], np.ndarray], file: Path) -> Path:
    """Writes such a model, with a change to the rows of the second weight."""
    random = np.random.default_rng(3)
    w1 = random.standard_normal((24, 48))
    w2 = random.standard_normal((48, 24)) / 7
    text = (
        '<ir_version: 8, opset_import: ["": 18]> amplifier (float[16, 24] x) => (float[16, 24] y) '
        f"{{ h = MatMul(x, w1) z = MatMul(h, w2) {nodes} }}"
    )
    model = onnx.parser.parse_model(text)
    stored = {
        "w1": w1,
        "w2": change(w2.copy()),
        "w3": w1 @ w2 * 0.9995,
    }
    for key, value in stored.items():
        tensor = numpy_helper.from_array(np.asarray(value, np.float32), key)
        model.graph.initializer.append(tensor)
    onnx.save(model, file)
    return file


SPLIT = options(
    "tp=4",
    strategy={"shard": {"MatMul_h": [[None, None], [None, "tp"]], "MatMul_z": [[None, "tp"]]}},
)


def fed() -> np.ndarray:
    return np.random.default_rng(5).standard_normal((16, 24)).astype(np.float32)


def same(weight: np.ndarray) -> np.ndarray:
    return weight


def without_a_part(weight: np.ndarray) -> np.ndarray:
    """What a sum lacks to which one of 4 ranks adds nothing."""
    weight[-12:] = 0
    return weight


def amplified(nodes: str, change: Callable[[np.ndarray], np.ndarray], folder: Path) -> Report:
    whole = amplifier(nodes, same, folder / "whole.onnx")
    split = amplifier(nodes, change, folder / "split.onnx")
    sharder.shard(split, folder / "m.par", SPLIT)
    with ThreadSession(folder / "m.par", timeout=TIMEOUT) as session:
        return compare(whole, session, {"x": fed()})


@pytest.mark.parametrize("is_whole", [True, False])
def test_tensors_inside_are_judged_alike(is_whole: bool, tmp_path: Path) -> None:
    nodes = AMPLIFIERS["a spread near 0"]
    whole = amplifier(nodes, same, tmp_path / "whole.onnx")
    split = amplifier(nodes, same if is_whole else without_a_part, tmp_path / "split.onnx")
    how = replace(SPLIT, exposed=inner_tensors(split))
    sharder.shard(split, tmp_path / "m.par", how)
    with ThreadSession(tmp_path / "m.par", timeout=TIMEOUT) as session:
        report = compare_each(whole, session, {"x": fed()})
    assert {"d", "m", "y"} <= report.moved.keys()
    assert report.ok == is_whole, report.text()
    assert report.first is None or report.first.name == "z"


@pytest.mark.matrix
@pytest.mark.parametrize("name", AMPLIFIERS)
def test_what_amplifies_rounding_agrees(name: str, tmp_path: Path) -> None:
    report = amplified(AMPLIFIERS[name], same, tmp_path)
    (row,) = report.rows
    assert report.ok and USUAL < row.error <= row.tolerance < 0.05, report.text()
    assert MOVED[0] in report.text()


@pytest.mark.parametrize("name", AMPLIFIERS)
def test_a_part_of_a_sum_is_found_there_too(name: str, tmp_path: Path) -> None:
    report = amplified(AMPLIFIERS[name], without_a_part, tmp_path)
    (row,) = report.rows
    assert not report.ok and row.error > 2 * LARGE, report.text()
    assert f"y: error {row.error:.1e}; the unsplit model changes by" in report.text()


def test_results_that_are_rounding_alone_are_told(tmp_path: Path) -> None:
    """The kernel of Sigmoid has steps of 3e-8: near 0 its results are a few of them."""
    near_0 = AMPLIFIERS["a sigmoid near 0"].replace("-9.0", "-18.0")
    report = amplified(near_0, same, tmp_path)
    (row,) = report.rows
    assert report.ok and 0 < row.largest < 1e-6 and report.moved["y"] > LARGE, report.text()
    assert "warning: rounding alone changes y by" in report.text()


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ("n = Neg(z) m = Abs(z) a = Neg(m) y = Sqrt(a)", "y: all of it is NaN"),
        ("y = Sqrt(z)", r"y: \d\d\.\d% of it is NaN"),
    ],
)
def test_nan_on_both_sides_is_told(nodes: str, said: str, tmp_path: Path) -> None:
    report = amplified(nodes, same, tmp_path)
    assert report.ok and re.search(
        f"warning: {said} both on the ranks and in the unsplit", report.text()
    )
