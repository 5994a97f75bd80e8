"""Which nodes become one, in which order, and that results keep their bits."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_graphsurgeon as gs
import onnxruntime as ort
import pytest
from agreement import options
from small_models import write_text

from onnxpar.graph.elementwise_groups import FEWEST, ONE, OPERATIONS, elementwise_units
from onnxpar.graph.origin import origins_of
from onnxpar.planner import sharder
from onnxpar.runtime.session.threads import ThreadSession

HEAD = '<ir_version: 8, opset_import: ["" : 18, "onnxpar" : 1, "com.microsoft" : 1]>\n'


def kind(tensor: gs.Tensor) -> object:
    return ONE if tensor.shape in ((), []) else tuple(tensor.shape or (4,))


def units_of(text: str) -> list[list[str]]:
    """The first results of the nodes of each unit; all tensors that the text does not declare have
    the shape [4]."""
    graph = gs.import_onnx(onnx.parser.parse_model(HEAD + text))
    return [[node.outputs[0].name for node in unit] for unit in elementwise_units(graph, kind)]


def groups_of(text: str) -> list[list[str]]:
    return [unit for unit in units_of(text) if len(unit) >= FEWEST]


def test_no_group_waits_for_itself() -> None:
    # c reads a through m: a and c cannot be in one loop; a and d can, behind nothing
    text = """g (float[4] x) => (float[4] e, float[4] h)
        { a = Mul(x, x)  b = Neg(a)  m = Exp(b)  c = Add(m, a)  d = Abs(c)  e = Neg(d)
          f = Sub(a, x)  h = Exp(f) }"""
    assert units_of(text) == [["a", "b", "f"], ["m"], ["c", "d", "e"], ["h"]]


def test_no_collective_waits_for_a_group() -> None:
    text = """g (float[4] x, float[4] z) => (float[4] d, float[4] s)
        { a = Mul(x, x)  s = onnxpar.AllReduce(a)  y = Exp(z)  b = Add(a, y)  c = Neg(b)
          d = Abs(c) }"""
    assert units_of(text) == [["a"], ["s"], ["y"], ["b", "c", "d"]]
    assert groups_of(text.replace("onnxpar.AllReduce", "Exp")) == [["a", "b", "c", "d"]]


@pytest.mark.parametrize(
    "text",
    [
        # Gelu, also by Tanh
        """g (float[4] x) => (float[4] y) <float c = {1.4}, float o = {1}, float h = {0.5}>
        { a = Div(x, c)  b = Erf(a)  d = Add(b, o)  e = Mul(x, d)  y = Mul(e, h) }""",
        """g (float[4] x) => (float[4] y) <float c = {0.04}, float o = {1}, float h = {0.5}>
        { a = Mul(x, x)  b = Mul(a, x)  d = Mul(b, c)  e = Add(x, d)  f = Mul(e, o)  t = Tanh(f)
          i = Add(t, o)  j = Mul(x, i)  y = Mul(j, h) }""",
        # between integers
        """g (float[4] x, float s, uint8 z) => (uint8[4] y)
        { a = Mul(x, x)  b = Add(a, x)  c = Neg(b)  y = QuantizeLinear(c, s, z) }""",
        # what a product takes in: its scale, and a sum
        """g (float[4] x, float[4,4] w) => (float[4] y) <float c = {3}>
        { a = MatMul(x, w)  b = Mul(a, c)  d = Neg(b)  y = Neg(d) }""",
        """g (float[4] x, float[4,4] w) => (float[4] y)
        { a = MatMul(x, w)  b = Add(a, x)  d = Neg(b)  y = Neg(d) }""",
        # other shapes, other types, too few
        """g (float[4] x, float[1] o) => (float[4] y)
        { a = Mul(x, o)  b = Mul(a, o)  y = Mul(b, o) }""",
        """g (float[4] x) => (float[4] y) { a = Neg(x)  y = Neg(a) }""",
    ],
)
def test_stays_apart(text: str) -> None:
    assert groups_of(text) == []


def test_a_product_with_other_readers_takes_in_nothing() -> None:
    text = """g (float[4] x, float[4,4] w) => (float[4] y, float[4] z) <float c = {3}>
        { a = MatMul(x, w)  b = Mul(a, c)  d = Neg(b)  y = Neg(d)  z = Exp(a) }"""
    assert groups_of(text) == [["b", "d", "y"]]


def test_an_activation_with_other_readers_is_not_fused() -> None:
    # the gradient of a Tanh reads it twice
    text = """g (float[4] x, float[4] u) => (float[4] y) <float o = {1}>
        { t = Tanh(x)  a = Mul(t, t)  b = Sub(o, a)  d = Mul(u, b)  e = Add(t, o)
          y = Mul(d, e) }"""
    assert groups_of(text) == [["a", "b", "d", "e", "y"]]


def test_a_body_that_reads_a_group_follows_it() -> None:
    text = """g (float[4] x, bool c) => (float[4] y, float[4] d)
        { a = Neg(x)  y = If (c) <
            then_branch = t () => (float[4] p) { p = Exp(a) },
            else_branch = e () => (float[4] q) { q = Log(a) }>
          b = Abs(a)  d = Neg(b) }"""
    assert units_of(text) == [["a", "b", "d"], ["y"]]


@pytest.mark.parametrize("seed", range(40))
def test_random_orders(seed: int) -> None:
    """Each unit follows its operands; the units have all nodes, each once."""
    draw = random.Random(seed)
    names = ["x"]
    lines = []
    for i in range(draw.randint(5, 60)):
        op = draw.choice([*sorted(OPERATIONS), "Exp", "Log", "Exp"])
        unary = op in ("Sqrt", "Neg", "Abs", "Identity", "Exp", "Log")
        near = names[-6:] if draw.random() < 0.7 else names
        lines.append(f"v{i} = {op}({', '.join(draw.choices(near, k=1 if unary else 2))})")
        names.append(f"v{i}")
    units = units_of(f"g (float[4] x) => (float[4] {names[-1]}) {{ {'  '.join(lines)} }}")
    reads = {line.split()[0]: set(line[line.index("(") + 1 : -1].split(", ")) for line in lines}
    assert sorted(name for unit in units for name in unit) == sorted(reads)
    done = {"x"}
    for unit in units:
        assert all(reads[name] <= done | set(unit) for name in unit)
        done |= set(unit)


def test_open_sizes_keep_their_bits(tmp_path: Path) -> None:
    # p and q have the same size only by chance: their sum is not broadcast, and proves it
    text = """g (float[N,3] x, float[N,3] z, float[M,3] u) => (float[N,3] y, float[M,3] v)
        <float c = {0.7}>
        { a = Mul(x, c)  b = Add(a, z)  d = Mul(b, b)  e = Sqrt(d)  y = Div(e, x)
          f = Mul(u, c)  g = Neg(f)  h = Abs(g)  v = Sub(h, c) }"""
    path = write_text(HEAD + text, tmp_path / "model.onnx")
    par = tmp_path / "par"
    sharder.shard(path, par, options("data-parallel 2"))
    fused = [
        origins_of(node)
        for node in onnx.load(par / "rank_0000.onnx").graph.node
        if node.op_type == "FusedElementwise"
    ]
    assert fused == [
        ["Mul_a", "Add_b", "Mul_d", "Sqrt_e", "Div_y"],
        ["Mul_f", "Neg_g", "Abs_h", "Sub_v"],
    ]
    unsplit = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    draw = np.random.default_rng(0)
    with ThreadSession(par) as session:
        for n, m in ((4, 4), (7, 2), (1, 5), (700, 3)):
            feeds = {
                name: draw.standard_normal([size, 3], "f4")
                for name, size in (("x", n), ("z", n), ("u", m))
            }
            for found, wanted in zip(
                session.run(None, feeds), unsplit.run(None, feeds), strict=True
            ):
                np.testing.assert_array_equal(found, wanted)
