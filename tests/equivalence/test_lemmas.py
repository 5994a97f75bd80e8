"""Each lemma and each rule of positions, on parts drawn at random: ranks' results, by onnxruntime,
are the parts that the rule says, and add up to onnxruntime's result on the whole."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

from onnxpar.equivalence.held import Held, Partial
from onnxpar.equivalence.lemma import LEMMAS, Case, Lemma, NotShown, Result
from onnxpar.equivalence.lemma import whole as every
from onnxpar.equivalence.moves import MOVES
from onnxpar.equivalence.program import Constants, Node, Program, read_node
from onnxpar.equivalence.ranks import RankNode, Ranks
from onnxpar.equivalence.spans import Families, Family
from onnxpar.equivalence.stored import WeightFiles
from onnxpar.equivalence.windows import group_of

Array = np.ndarray[Any, Any]
OPSET = 20


@dataclass(frozen=True)
class Op:
    """A node: its op, the values of its operands, and attributes.

    constants  the operands behind them that are sizes, axes or positions
    local      a function from the shape of a rank's first operand to the rank's constants
    stays      sizes of dimensions that ranks hold whole
    """

    name: str
    operands: Sequence[Array]
    attrs: dict[str, Any] = field(default_factory=dict)
    constants: Sequence[Array] = ()
    outputs: int = 1
    local: Any = None
    stays: tuple[int, ...] = ()


def draw(*shape: int) -> Array:
    return np.random.default_rng(list(shape)).standard_normal(shape).astype(np.float32)


def whole(*values: int) -> Array:
    return np.array(values, np.int64)


def _reshape(shape: Sequence[int], out: Sequence[int]) -> Any:
    """A rank's shape of the result: the split dimensions have the rank's sizes."""

    def local(own: Sequence[int]) -> Sequence[Array]:
        sizes = list(out)
        for axis, (n, m) in enumerate(zip(shape, own, strict=True)):
            if n != m and axis < len(out):
                if sizes[axis] % n and n % sizes[axis]:
                    raise NotShown("")
                sizes[axis] = sizes[axis] * m // n
        if np.prod(sizes) != np.prod(own):
            raise NotShown("")
        return [whole(*sizes)]

    return local


OPS = {
    "Add": Op("Add", [draw(4, 6), draw(6)]),
    "Add of columns": Op("Add", [draw(4, 6), draw(4, 1)]),
    "Mul": Op("Mul", [draw(3, 4, 6), draw(1, 6)]),
    "Div": Op("Div", [draw(4, 6), np.abs(draw(6)) + 1]),
    "Tanh": Op("Tanh", [draw(4, 6)]),
    "Where": Op("Where", [draw(4, 6) > 0, draw(4, 6), draw(6)]),
    "Cast": Op("Cast", [draw(4, 6)], {"to": 11}),
    "CastLike": Op("CastLike", [draw(4, 6), np.zeros(3, np.float64)]),
    "BitShift": Op(
        "BitShift", [np.arange(24, dtype=np.uint8).reshape(4, 6), np.ones(6, np.uint8)],
        {"direction": "LEFT"},
    ),
    "MatMul": Op("MatMul", [draw(2, 4, 6), draw(6, 5)]),
    "MatMul of batches": Op("MatMul", [draw(2, 3, 4, 6), draw(3, 6, 5)]),
    "MatMul of vectors": Op("MatMul", [draw(6), draw(6, 5)]),
    "Gemm": Op("Gemm", [draw(4, 6), draw(5, 6), draw(5)], {"transB": 1, "alpha": 0.5}),
    "Conv": Op("Conv", [draw(2, 4, 5, 5), draw(6, 4, 3, 3), draw(6)], stays=(3, 5)),
    "Conv of groups": Op(
        "Conv", [draw(2, 4, 5, 5), draw(8, 1, 3, 3)], {"group": 4}, stays=(3, 5)
    ),
    "Gather": Op("Gather", [draw(6, 4), whole(3, 0, 5)]),
    "ReduceSum": Op("ReduceSum", [draw(4, 6, 3)], constants=[whole(1)]),
    "ReduceSum without": Op("ReduceSum", [draw(4, 6)], {"keepdims": 0}, [whole(0)]),
    "ReduceMean": Op("ReduceMean", [draw(4, 6)], constants=[whole(-1)]),
    "ReduceMax": Op("ReduceMax", [draw(4, 6)], constants=[whole(1)]),
    "ReduceSumSquare": Op("ReduceSumSquare", [draw(4, 6)], constants=[whole(0)]),
    "ReduceL2": Op("ReduceL2", [draw(4, 6)], constants=[whole(0)]),
    "Softmax": Op("Softmax", [draw(4, 6)], {"axis": -1}),
    "LayerNormalization": Op("LayerNormalization", [draw(4, 6), draw(6), draw(6)], {"axis": -1}),
    "BatchNormalization": Op(
        "BatchNormalization", [draw(2, 4, 3), draw(4), draw(4), draw(4), np.abs(draw(4)) + 1]
    ),
    "MaxPool": Op("MaxPool", [draw(2, 4, 6, 6)], {"kernel_shape": [2, 2]}, stays=(6,)),
    "ArgMax": Op("ArgMax", [draw(4, 6)], {"axis": 1}),
    "TopK": Op("TopK", [draw(4, 6)], {"axis": -1}, [whole(2)], 2),
    "CumSum": Op("CumSum", [draw(4, 6)], constants=[np.array(1)]),
    "GatherElements": Op("GatherElements", [draw(4, 6), np.ones((4, 2), np.int64)], {"axis": 1}),
    "Transpose": Op("Transpose", [draw(2, 4, 6)], {"perm": [2, 0, 1]}),
    "Reshape apart": Op(
        "Reshape", [draw(4, 6)], {}, [whole(4, 2, 3)], 1, _reshape((4, 6), (4, 2, 3))
    ),
    "Reshape together": Op(
        "Reshape", [draw(4, 6, 2)], {}, [whole(24, 2)], 1,
        lambda own: [whole(own[0] * own[1], own[2])],
    ),
    "Flatten": Op("Flatten", [draw(4, 6, 2)], {"axis": 1}),
    "Squeeze": Op("Squeeze", [draw(4, 1, 6)], {}, [whole(1)]),
    "Unsqueeze": Op("Unsqueeze", [draw(4, 6)], {}, [whole(0, 2)]),
    "Slice": Op("Slice", [draw(8, 6)], {}, [whole(1), whole(6), whole(0), whole(2)]),
    "Slice back": Op("Slice", [draw(8, 6)], {}, [whole(-1), whole(-9), whole(0), whole(-2)]),
    "Split": Op("Split", [draw(8, 6)], {"axis": 1}, [whole(2, 4)], 2),
    "Concat": Op("Concat", [draw(4, 6), draw(4, 3)], {"axis": 1}),
    "Pad": Op("Pad", [draw(4, 6)], {}, [whole(0, 1, 0, 2)]),
    "Tile": Op("Tile", [draw(4, 6)], {}, [whole(2, 1)]),
    "ConvTranspose": Op(
        "ConvTranspose", [draw(2, 4, 5, 5), draw(4, 6, 3, 3), draw(6)], stays=(3, 5)
    ),
    "Resize": Op(
        "Resize", [draw(4, 6, 3)], {"mode": "linear"},
        [np.zeros(0, np.float32), np.array([1, 1, 2], np.float32)], stays=(3,),
    ),
    "Gather of places": Op("Gather", [draw(8, 6)], {"axis": 1}, [whole(4, 1, 4, 2).reshape(2, 2)]),
    "Gather of elements": Op(
        "GatherElements", [draw(4, 6)], {"axis": 1}, [np.tile(whole(4, 1, 2), (4, 1))], 1,
        lambda own: [np.tile(whole(4, 1, 2), (own[0], 1))],
    ),
    "GatherND of places": Op("GatherND", [draw(4, 6, 2)], {}, [whole(0, 5, 3, 1).reshape(2, 2)]),
    "Gather of positions": Op("Gather", [draw(8, 6)], {"axis": 1}, [whole(4, 1, 2)]),
}  # fmt: skip


def rules(op: Op) -> Iterator[Lemma]:
    is_lookup = op.name.startswith("Gather") and not op.constants
    if op.name in MOVES and not is_lookup:
        yield MOVES[op.name]
    if ("", op.name) in LEMMAS and not (op.name.startswith("Gather") and op.constants):
        yield LEMMAS["", op.name]


def partition(random: random.Random, size: int, ranks: int) -> list[Array]:
    """What ranks may hold of a dimension: all of it, a part each, or positions in any order."""
    kind = random.choice(["whole", "cut", "cut", "mixed", "pairs"])
    if kind == "whole" or size == 1:
        return [np.arange(size)] * ranks
    if kind == "pairs":
        halves = np.array_split(np.arange(size), 2)
        return [halves[rank % 2] for rank in range(ranks)]
    order = np.arange(size)
    if kind == "mixed":
        order = np.array(random.sample(range(size), size))
    ends = sorted(random.randint(0, size) for _ in range(ranks - 1))
    return np.split(order, ends)


def attrs_of(op: Op, operands: Sequence[Array]) -> dict[str, Any]:
    """The attributes for these operands: a convolution of groups has one for each channel."""
    return op.attrs | ({"group": operands[0].shape[1]} if "group" in op.attrs else {})


def run(op: Op, operands: Sequence[Array], constants: Sequence[Array]) -> list[Array]:
    names = [f"i{n}" for n in range(len(operands) + len(constants))]
    values = [*operands, *constants]
    inputs = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), None)
        for n, v in zip(names, values, strict=True)
    ]
    outputs = [f"o{n}" for n in range(op.outputs)]
    node = helper.make_node(op.name, names, outputs, **attrs_of(op, operands))
    graph = helper.make_graph([node], "g", inputs, [onnx.ValueInfoProto(name=n) for n in outputs])
    opsets = [helper.make_opsetid("", OPSET)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options)
    return list(session.run(outputs, dict(zip(names, values, strict=True))))


def program(node: Node, constants: dict[str, Array], shapes: dict[str, tuple[int, ...]]) -> Program:
    graph = onnx.GraphProto()
    graph.initializer.extend(numpy_helper.from_array(v, n) for n, v in constants.items())
    own = Constants({t.name: t for t in graph.initializer}, Path(), WeightFiles())
    return Program(None, [node], [], [*node.outputs], own, {"": OPSET}, shapes)  # type: ignore[arg-type]


def case_of(op: Op, parts: Sequence[Sequence[Family]], partial: Sequence[Any], families: Families,
            local: Sequence[Sequence[Array]]) -> Case:  # fmt: skip
    count = len(op.operands)
    names = [f"i{n}" for n in range(count + len(op.constants))]
    proto = helper.make_node(op.name, names, [f"o{n}" for n in range(op.outputs)], **op.attrs)
    node = read_node(proto)
    whole_results = run(op, op.operands, op.constants)
    shapes: dict[str, tuple[int, ...]] = {f"i{n}": v.shape for n, v in enumerate(op.operands)}
    shapes |= {f"o{n}": v.shape for n, v in enumerate(whole_results)}
    model = program(node, dict(zip(names[count:], op.constants, strict=True)), shapes)
    nodes = []
    for rank in range(families.ranks):
        own = [np.empty([f.sizes[rank] for f in dims]) for dims in parts]
        attrs = attrs_of(op, own)
        nodes.append(read_node(helper.make_node(op.name, names, [*proto.output], **attrs)))
    ranks = Ranks([
        program(each, dict(zip(names[count:], own, strict=True)), {})
        for each, own in zip(nodes, local, strict=True)
    ])  # fmt: skip
    held: list[Held | None] = [
        Held(f"i{n}", f"i{n}", tuple(dims), tuple(partial[n])) for n, dims in enumerate(parts)
    ]
    held += [None] * len(op.constants)
    operand_shapes = [v.shape for v in (*op.operands, *op.constants)]
    return Case(node, RankNode(tuple(nodes), 0), held, operand_shapes, model, ranks, families)


def reduced(part: Partial, values: Sequence[Array], group: Sequence[int]) -> Array:
    """The whole result of a reduction; of means, with as many elements as ranks have."""
    if part.op == "mean":
        sizes = [part.family.sizes[member] for member in group]
        return np.asarray(np.average(values, 0, sizes))
    kinds = {"sum": np.sum, "max": np.max, "min": np.min, "prod": np.prod}
    return np.asarray(kinds[part.op](values, axis=0))


def check(
    op: Op, result: Result, own: Sequence[Sequence[Array]], wanted: Array, ranks: int
) -> None:
    held = Held("t", "t", result.dims, result.partial)
    for rank in range(ranks):
        part = wanted[np.ix_(*(f.spans[rank] for f in result.dims))] if result.dims else wanted
        got = own[rank][result.index]
        if result.partial:
            group = group_of(held, rank, ranks)
            if group is None:
                continue  # no ranks have all parts: nothing is said
            got = reduced(result.partial[0], [own[m][result.index] for m in group], group)
        assert got.shape == part.shape
        np.testing.assert_allclose(got, part, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", OPS)
def test_ranks_hold_what_a_rule_says(name: str) -> None:
    op, shown, split = OPS[name], 0, 0
    draws = random.Random(name)
    wanted = run(op, op.operands, op.constants)
    for _ in range(300):
        ranks = draws.choice([2, 3, 4])
        families = Families(ranks)
        pool: dict[int, list[Family]] = {}
        parts: list[list[Family]] = []
        for operand in op.operands:
            dims = []
            for size in operand.shape:
                known = pool.setdefault(size, [])
                if size in op.stays:
                    known[:] = [families.whole(size)]
                elif not known or draws.random() < 0.3:
                    known.append(families.of(partition(draws, size, ranks)))
                dims.append(draws.choice(known))
            parts.append(dims)
        partial: list[list[Partial]] = [[] for _ in op.operands]
        pieces = [
            [
                value[np.ix_(*(family.spans[r] for family in dims))]
                for value, dims in zip(op.operands, parts, strict=True)
            ]
            for r in range(ranks)
        ]  # fmt: skip
        if draws.random() < 0.3 and ranks == 2:
            n = draws.randrange(len(op.operands))
            family = families.of([np.array([0]), np.array([1])])
            if op.operands[n].dtype == np.float32 and all(
                f.is_whole(s) for f, s in zip(parts[n], op.operands[n].shape, strict=True)
            ):
                partial[n] = [Partial("sum", family, 2)]
                noise = draw(*op.operands[n].shape, 1)[..., 0]
                pieces[0][n], pieces[1][n] = noise, op.operands[n] - noise
        try:
            local = [
                op.constants if op.local is None else op.local(tuple(f.sizes[r] for f in parts[0]))
                for r in range(ranks)
            ]
        except NotShown:
            continue
        for rule in rules(op):
            try:
                results = rule(case_of(op, parts, partial, families, local))
            except NotShown:
                continue
            shown += 1
            split += any(
                not f.is_whole(s)
                for d, v in zip(parts, op.operands, strict=True)
                for f, s in zip(d, v.shape, strict=True)
            )
            if op.stays and any(not piece.size for each in pieces for piece in each):
                continue  # onnxruntime has no convolution or pooling of nothing
            own = [run(op, pieces[r], local[r]) for r in range(ranks)]
            for result in results:
                assert result.shape == wanted[result.index].shape
                check(op, result, own, wanted[result.index], ranks)
    assert shown and split


REFUSED = {
    "statistics of a part": (
        Op("BatchNormalization", [draw(4, 6), *[np.abs(draw(6))] * 4], {"training_mode": 1}, (), 3),
        "sum", (2, 0),
    ),
    "sums of maxima": (Op("CumSum", [draw(4, 6)], constants=[np.array(1)]), "max", ()),
    "a convolution of maxima": (
        Op("Conv", [draw(2, 4, 5, 5), draw(4, 1, 3, 3)], {"group": 4}), "max", (),
    ),
    "a filter of a part": (Op("Resize", [draw(4, 6)], {}, [
        np.zeros(0, np.float32), np.array([2, 1], np.float32)]), "sum", (0, 0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_rule_says(name: str) -> None:
    """A dimension that is split, or parts of a reduction, for which no rule may speak."""
    op, kind, split = REFUSED[name]
    families = Families(2)
    parts = [[families.whole(size) for size in value.shape] for value in op.operands]
    if split:
        cut = families.of(np.array_split(np.arange(op.operands[0].shape[split[1]]), 2))
        parts[0][split[1]] = cut
    part = Partial(kind, families.of([np.array([0]), np.array([1])]), 2)
    partial: list[list[Partial]] = [[] for _ in op.operands]
    if not split:
        partial[0] = [part]
    case = case_of(op, parts, partial, families, [op.constants] * 2)
    for rule in rules(op):
        with pytest.raises(NotShown):
            rule(case)


def test_draws() -> None:
    """With a seed, each rank draws the same."""
    families = Families(2)
    parts = [[families.whole(4), families.whole(6)]]
    seeded = Op("RandomNormalLike", [draw(4, 6)], {"seed": 1.0})
    first, second = (run(seeded, seeded.operands, ())[0] for _ in range(2))
    assert np.array_equal(first, second)
    (result,) = every(case_of(seeded, parts, [[]], families, [()] * 2))
    assert result.dims == tuple(parts[0])
    with pytest.raises(NotShown):
        every(case_of(replace(seeded, attrs={}), parts, [[]], families, [()] * 2))
