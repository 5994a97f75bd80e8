"""Dimensions are refined to the atoms that no op cuts, over the whole graph."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx.parser

from onnxpar.layout.layout import Concat, Dim, Factor, Product
from onnxpar.load.load import load
from onnxpar.rules.notation import Prod, Var
from onnxpar.sharding.analysis import analyse
from onnxpar.sharding.factors import TensorFactors
from onnxpar.sharding.graph_factors import GraphFactors
from onnxpar.sharding.unify import IndexVar, compose, flat, unify

HEAD = '<ir_version: 8, opset_import: ["" : 18]>\n'


def factors(text: str, folder: Path) -> GraphFactors:
    """The factors of a model of ONNX text."""
    path = folder / "m.onnx"
    onnx.save(onnx.parser.parse_model(HEAD + text), path)
    return analyse(load(path).graph)


def spelled(dim: Dim) -> str:
    """`(2 3) + 4` for a concatenation of a product and a factor."""
    if isinstance(dim, Factor):
        return str(dim.size)
    joint = " " if isinstance(dim, Product) else " + "
    return "(" + joint.join(map(spelled, dim.children)) + ")"


def dims(tensor: TensorFactors) -> list[str]:
    """Every dimension of a tensor."""
    return [spelled(d) for d in tensor.dims]


def test_heads_are_seen_through_a_fused_weight(tmp_path: Path) -> None:
    found = factors(
        """qkv (float[2,5,12] x, float[12,36] w) => (float[2,3,5,4] q, float[2,5,24] rest)
        <int64[3] cut = {12, 12, 12}, int64[4] heads = {2, 5, 3, 4}>
        { h = MatMul(x, w)  a, b, c = Split<axis = 2>(h, cut)  r = Reshape(a, heads)
          q = Transpose<perm = [0, 2, 1, 3]>(r)  rest = Concat<axis = 2>(b, c) }""",
        tmp_path,
    )
    assert dims(found.tensors["w"]) == ["12", "((3 4) + 12 + 12)"]
    assert dims(found.tensors["rest"]) == ["2", "5", "(12 + 12)"]
    heads = found.tensors["q"].leaves[1]
    assert heads == found.tensors["w"].leaves[1] and heads.size == 3


def test_what_two_ops_cut_differently_stays_whole(tmp_path: Path) -> None:
    found = factors(
        """cut (float[12] x) => (float[3,4] y, float[2,6] z)
        <int64[2] a = {3, 4}, int64[2] b = {2, 6}>
        { h = Relu(x)  y = Reshape(h, a)  z = Reshape(h, b) }""",
        tmp_path,
    )
    by_name = {op.node.name: op for op in found.ops}
    one, other = (by_name[n] for n in ("Reshape_y", "Reshape_z"))
    assert bool(one.whole) != bool(other.whole)


def test_segments_may_share_an_axis_and_factors_may_not(tmp_path: Path) -> None:
    found = factors(
        """join (float[2,4] a, float[2,6] b) => (float[2,10] y) { y = Concat<axis = 1>(a, b) }""",
        tmp_path,
    )
    y = found.tensors["y"]
    assert dims(y) == ["2", "(4 + 6)"]
    assert y.apart == {(1, 2), (2, 1)}


def test_atoms_of_equal_size_are_not_the_same(tmp_path: Path) -> None:
    found = factors(
        "square (float[4,4] x, float[4,4] w) => (float[4,4] y) { y = MatMul(x, w) }", tmp_path
    )
    m, k = found.tensors["x"].leaves
    assert found.tensors["w"].leaves[0] == k
    assert found.tensors["y"].leaves == (m, found.tensors["w"].leaves[1])
    assert len({m.atom, k.atom, found.tensors["w"].leaves[1].atom}) == 3


def test_a_sum_with_a_transpose_joins_its_dimensions(tmp_path: Path) -> None:
    found = factors(
        """sym (float[4,4] x) => (float[4,4] y)
        { t = Transpose<perm = [1, 0]>(x)  y = Add(x, t) }""",
        tmp_path,
    )
    first, second = found.tensors["x"].leaves
    assert first == second


def test_slices_cut_what_they_keep_from_the_rest(tmp_path: Path) -> None:
    found = factors(
        """part (float[10] x) => (float[4] y)
        <int64[1] start = {3}, int64[1] end = {7}> { h = Relu(x)  y = Slice(h, start, end) }""",
        tmp_path,
    )
    assert dims(found.tensors["x"]) == ["(3 + 4 + 3)"]
    x = found.tensors["x"].dims[0]
    assert isinstance(x, Concat)
    assert found.tensors["y"].leaves[0] == found.tensors["x"].leaves[1]


def test_a_dimension_that_is_read_twice_with_a_factor_of_one_element() -> None:
    """As in a ConvTranspose with a channel in each group, whose operands both have heads: the
    product of groups and channels has the heads as its first factor."""
    heads = compose(Prod((Var("h"), Var("d"))), {"h": IndexVar(4), "d": IndexVar(6)})
    groups = {"g": IndexVar(24), "c": IndexVar(1)}
    read = Prod((Var("g"), Var("c")))
    for _ in range(3):
        assert unify(heads, compose(read, groups))
    assert [part.size for part in flat(heads, "product")] == [4, 6]
    assert [part.size for part in flat(groups["g"], "product")] == [4, 6]
