"""Sizes that a model computes from open sizes: runs far from the sample sizes, at odd ones, and on
both sides of each number with which the model compares them, give onnxruntime's results or refuse
the sizes by name."""

from __future__ import annotations

import random
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_graphsurgeon as gs
import onnxruntime as ort
import pytest
from agreement import TIMEOUT, check_outputs, options
from graph.random_sizes import random_sizes
from graph.size_models import ALONE, WITH_PAST, size_model
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

import onnxpar
from onnxpar.base.errors import InputError
from onnxpar.graph.lockstep import Lockstep
from onnxpar.graph.open_sizes import OpenSizes
from onnxpar.layout.fits import DOMAINS, sample
from onnxpar.layout.symbols import Polynomial, minimum
from onnxpar.planner import sharder
from onnxpar.runtime.session.threads import ThreadSession

WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "data-parallel": ("data-parallel 2", {}),
    "search": ("3", {}),
    "sequence 2": ("tp=2", {"strategy": {"tensors": {"x": [None, "tp", None]}}}),
    "sequence 3": ("tp=3", {"strategy": {"tensors": {"x": [None, "tp", None]}}}),
    "batch": ("tp=4", {"strategy": {"tensors": {"x": ["tp", None, None]}}}),
    "features": ("tp=2", {"strategy": {"tensors": {"x": [None, None, "tp"]}}}),
}
SIZES = [
    (2, 1),
    (1, 2),
    (5, 5),
    (3, 7),
    (4, 8),
    (2, 9),
    (2, 33),
    (3, 64),
    (2, 101),
    (3, 600),
    (1, 2501),
]
LIMITED = {"through 32 bits": range(512)}
LIMITED |= dict.fromkeys(
    [
        *("rolled", "shifted", "up after down", "cropped to what went down"),
        "convolved, flattened and restored",
    ],
    range(3, 1 << 20),
)
"""Models that may refuse sizes, with those that they may not: below 3, segments would overlap or
windows reach over; from 512 on, a product of int32 overflows."""


def _is_default(what: str, way: str) -> bool:
    """One way for each model."""
    return list(WAYS)[zlib.crc32(what.encode()) % len(WAYS)] == way


@pytest.mark.matrix(2)
@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    ("what", "way"),
    [
        pytest.param(what, way, marks=[] if _is_default(what, way) else [pytest.mark.slow])
        for what in ALONE | WITH_PAST
        for way in WAYS
    ],
)
def test_runs_at_any_size(what: str, way: str, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(size_model(what), path)
    unsplit = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    layout, how = WAYS[way]
    sharder.shard(path, tmp_path / "m.par", options(layout, **how))
    with ThreadSession(tmp_path / "m.par", timeout=TIMEOUT) as session:
        for batch, length in SIZES:
            for past in (3, 40) if what in WITH_PAST else (0,):
                source = np.random.default_rng(length)
                feeds = {
                    port.name: source.standard_normal(
                        (batch, length if port.name == "x" else past, 6)
                    ).astype(np.float32)
                    for port in unsplit.get_inputs()
                }
                try:
                    wanted = unsplit.run(None, feeds)
                except (ort_errors.Fail, ort_errors.InvalidArgument):
                    continue
                try:
                    found = session.run(None, feeds)
                except InputError as error:
                    assert length not in LIMITED.get(what, (length,)), error
                    assert "this sharded model needs" in str(error)
                    continue
                check_outputs(found, wanted, ["y"])


SHIFTS = {
    "shift": "s = Slice (x, z, m1, o) l = Pad (s, p) y = Add (x, l)",
    "first apart": "f = Slice (x, z, o, o) r = Slice (x, o, w, o) g = Relu (r)"
    " c = Concat <axis = 1> (f, g) y = Add (x, c)",
}


@pytest.mark.parametrize("what", SHIFTS)
def test_sizes_that_are_equal_in_all_runs_refuse_none(what: str, tmp_path: Path) -> None:
    """n - min(n, 1) + 1 is n, and an input of n columns has the size that can be solved."""
    text = f"""<ir_version: 9, opset_import: ["" : 18]> m (float[b,n] x) => (float[b,q] y)
        <int64[1] z = {{0}}, int64[1] o = {{1}}, int64[1] m1 = {{-1}},
        int64[1] w = {{9223372036854775807}}, int64[4] p = {{0, 1, 0, 0}}> {{ {SHIFTS[what]} }}"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    unsplit = ort.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    sharder.shard(tmp_path / "m.onnx", tmp_path / "m.par", options("data-parallel 2"))
    with ThreadSession(tmp_path / "m.par", timeout=TIMEOUT) as session:
        for batch, length in SIZES:
            x = np.random.default_rng(length).standard_normal((batch, length), np.float32)
            check_outputs(session.run(None, {"x": x}), unsplit.run(None, {"x": x}), ["y"])


@pytest.mark.parametrize("seed", range(40))
def test_closed_forms_have_the_values_of_onnxruntime(seed: int) -> None:
    """At sizes from 0 to far beyond the samples."""
    body = random_sizes(random.Random(seed))
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 21]>
        sizes (float[n, m] x) => (int64[1] t11) {{
            one = Constant <value_ints = [1]> ()
            big = Constant <value_int = 1000000> ()
            {body}
        }}"""
    )
    names = [f"t{i}" for i in range(2, 12)]
    dims = {("x", 0): Polynomial.variable("n"), ("x", 1): Polynomial.variable("m")}
    bindings = sample(dict.fromkeys("nm", DOMAINS[0]), 2, ())
    types = []
    for binding in bindings:
        sizes = [dim.at(binding) for dim in dims.values()]
        types.append({"x": onnx.helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, sizes)})
    walks = Lockstep(model, types, bindings, ["n", "m"], dims=dims)
    walks.run()
    forms = {name: form for name in names if (form := walks.value(name)) is not None}
    assert forms
    del model.graph.output[:]
    model.graph.output.extend(
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.INT64, [1]) for name in forms
    )
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    for n in (0, 1, 2, 3, 7, 8, 9, 20, 21, 63, 64, 65, 513):
        for m in (0, 1, 5, 19, 20, 64, 1000):
            found = session.run(None, {"x": np.zeros((n, m), np.float32)})
            wanted = [form.at({"n": n, "m": m}) for form in forms.values()]
            assert [int(value[0]) for value in found] == wanted, (n, m)


def test_a_minimum_is_a_formula_only_if_the_model_computes_it() -> None:
    """min(N, 9) has these values, and may have them by chance: few samples are below 9."""
    bindings = [{"N": n} for n in (40, 41, 42, 43, 44, 45, 177, 9, 2, 3)]
    values = [min(b["N"], 9) for b in bindings]
    least = minimum(Polynomial.variable("N"), Polynomial.constant(9))
    sizes = OpenSizes(("N",), bindings, {}, lambda i: gs.Graph())
    assert sizes.formula(values) is None
    assert replace(sizes, atoms=least.atoms).formula(values) == least


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sizes_of_which_some_are_open_are_split(ranks: int, tmp_path: Path) -> None:
    """A rank whose piece has no open size has no size of a sample either."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]>
        boxes (float[B, 3, 480, W] x, float[N, 4] boxes) => (float[N, 1] y) {
            sizes = Shape (x) i = Constant <value = int64[4] {3, 2, 3, 2}> ()
            s = Gather <axis = 0> (sizes, i) f = Cast <to = 1> (s) z = Div (boxes, f)
            a = Constant <value = int64[1] {1}> () y = ReduceSum (z, a)
        }"""
    )
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    strategy = {"tensors": {"boxes": [None, "tp"]}}
    sharder.shard(path, tmp_path / "m.par", options(f"tp={ranks}", strategy=strategy))
    unsplit = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    with ThreadSession(tmp_path / "m.par", timeout=TIMEOUT) as session:
        for width in (1, 64, 333):
            source = np.random.default_rng(width)
            feeds = {
                "x": np.zeros((1, 3, 480, width), np.float32),
                "boxes": source.uniform(0, 60, (3, 4)).astype(np.float32),
            }
            check_outputs(session.run(None, feeds), unsplit.run(None, feeds), ["y"])


def test_a_check_looks_at_both_sides_of_what_sizes_are_compared_with(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(size_model("a minimum"), path)
    found = onnxpar.check(path, devices=2)
    lengths = [sizes["N"] for sizes in found.plan.samples]
    assert min(lengths) < 20 < max(lengths)
    assert {length % 2 for length in lengths} == {0, 1}
    assert (
        found.ok and f"also agree at {len(lengths) + 1} other combinations of sizes" in found.text()
    )


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_ranks_without_any_of_the_sizes(ranks: int, tmp_path: Path) -> None:
    """A model that returns its three sizes, which more ranks than sizes share."""
    text = """<ir_version: 10, opset_import: ["" : 21]> m (float[b,n,m] x) => (float[3] y) {
        s = Shape (x) y = Cast <to = 1> (s) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    strategy = {"tensors": {"y": ["tp"]}}
    sharder.shard(
        tmp_path / "m.onnx", tmp_path / "m.par", options(f"tp={ranks}", strategy=strategy)
    )
    with ThreadSession(tmp_path / "m.par", timeout=TIMEOUT) as session:
        for shape in ((1, 1, 1), (2, 7, 64), (3, 2501, 5)):
            (found,) = session.run(None, {"x": np.zeros(shape, np.float32)})
            np.testing.assert_array_equal(found, np.array(shape, np.float32))
