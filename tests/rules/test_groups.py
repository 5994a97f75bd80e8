"""No group of a quantization is ever cut: a rank that holds a part of one has all of it, and its
scale and zero point, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy import array

from onnxpar.base.arrays import Array
from onnxpar.layout.layout import Layout, nested_parts
from onnxpar.layout.mesh import Mesh
from onnxpar.sharding.factors import OpLeaf, with_axes
from onnxpar.testing.case import Case
from onnxpar.testing.oracle import Oracle, Split

MICROSOFT = "com.microsoft"
RANKS = (2, 3, 4, 5)
RANDOM = np.random.default_rng(0)


@dataclass(frozen=True)
class Groups:
    """A node, and for each operand or result that has groups the group of each element; `splits`
    are the factors that may be split, so that a rule that splits nothing does not pass."""

    case: Case
    groups: Mapping[str, Array]
    splits: str


def codes(*shape: int, below: int = 256) -> Array:
    return RANDOM.integers(0, below, shape).astype(np.uint8)


def scales(*shape: int) -> Array:
    return RANDOM.uniform(0.01, 0.05, shape).astype(np.float32)


def along(shape: tuple[int, ...], axis: int, length: int) -> Array:
    """Groups of `length` consecutive elements of one dimension."""
    of_axis = np.arange(shape[axis]) // length
    ends = [1] * len(shape)
    ends[axis] = -1
    return np.array(np.broadcast_to(of_axis.reshape(ends), shape))


def product(
    width: int, block: int, points: str = "", bits: int = 4, level: int = 0, flat: bool = False
) -> Groups:
    """x [5, width] times a weight of 7 columns in blocks; `points` are packed in bytes, floats, or
    none. A byte of zero points belongs to `shared` blocks, which then are one group."""
    columns, blocks = 7, -(-width // block)
    shared = 8 // bits if points == "packed" else 1
    per_row = -(-blocks // shared)
    stored = codes(columns, blocks, block * bits // 8), scales(columns, blocks)
    found = {
        "x0": along((5, width), 1, block * shared),
        "x1": along(stored[0].shape, 1, shared),
        "x2": along(stored[1].shape, 1, shared),
    }
    operands: list[Any] = [(5, width), *stored]
    if points:
        operands.append(codes(columns, per_row) if points == "packed" else scales(columns, blocks))
        found["x3"] = along(operands[3].shape, 1, 1 if points == "packed" else shared)
    if flat:
        operands[2:] = [v.reshape(-1) for v in operands[2:]]
        found |= {name: found[name].reshape(-1) for name in ("x2", "x3") if name in found}
    attrs = {"K": width, "N": columns, "bits": bits, "block_size": block, "accuracy_level": level}
    is_whole = width % (block * shared) != 0
    splits = "m0 n" if is_whole or width == block * shared else "k m0 n"
    return Groups(Case("MatMulNBits", operands, attrs, domain=MICROSOFT), found, splits)


def linear(op: str, shape: tuple[int, ...], axis: int, block: int, splits: str) -> Groups:
    """QuantizeLinear or DequantizeLinear with blocks along an axis, or a scale for each index."""
    of_scales = list(shape) if block else [shape[axis]]
    if block:
        of_scales[axis] = -(-shape[axis] // block)
    operand = shape if op == "QuantizeLinear" else codes(*shape)
    attrs = {"axis": axis} | ({"block_size": block} if block else {})
    points = codes(*of_scales, below=9)
    case = Case(op, [operand, scales(*of_scales), points], attrs, fed=[0], opset=21)
    data = along(shape, axis, block or 1)
    small = along(tuple(of_scales), axis if block else 0, 1)
    return Groups(case, {"x0": data, "x1": small, "x2": small, "y0": data}, splits)


def channels() -> Iterator[Groups]:
    """Products of 8-bit integers whose second operand has a scale and a point for each channel."""
    x, y = (
        (array(0.02, np.float32), array(9, np.uint8)),
        (array(0.5, np.float32), array(7, np.uint8)),
    )
    per = scales(6), codes(6, below=9)
    column = {"x4": along((6,), 0, 1), "x5": along((6,), 0, 1), "y0": along((5, 6), 1, 1)}
    matrix = [codes(5, 8), *x, codes(8, 6), *per]
    weight = {"x3": along((8, 6), 1, 1)}
    yield Groups(Case("QLinearMatMul", [*matrix, *y], fed=[0, 3]), weight | column, "k m n")
    gemm = Case("QGemm", [*matrix, None, *y], fed=[0, 3], domain=MICROSOFT)
    yield Groups(gemm, weight | column, "k m n")
    filters = codes(6, 4, 3, 3)
    image = [codes(2, 4, 6, 6), *x, filters, scales(6), np.zeros(6, np.uint8)]
    found = column | {"x3": along(filters.shape, 0, 1), "y0": along((2, 6, 4, 4), 1, 1)}
    yield Groups(Case("QLinearConv", [*image, *y], fed=[0, 3]), found, "c n o")


def tables() -> Iterator[Groups]:
    """Rows that are looked up: groups along a row are whole."""
    rows = {"block_size": 16, "bits": 4, "gather_axis": 0, "quantize_axis": 1}
    table = [codes(7, 32), array([[1, 4, 6], [0, 2, 5]]), scales(7, 4)]
    found = {"x0": along((7, 32), 1, 8), "x2": along((7, 4), 1, 1)}
    case = Case("GatherBlockQuantized", table, rows, fed=[1], domain=MICROSOFT)
    yield Groups(case, found | {"y0": along((2, 3, 64), 2, 16)}, "i0 i1 k v")


def experts(block: int, points: bool, bits: int = 4, fused: int = 0) -> Groups:
    """Three experts with 64 columns; those of a block, and those that share a byte of weights or of
    zero points, are one group."""
    per_byte, z = 8 // bits, 1 + fused
    unit = per_byte
    of = (3, 64 * z), (3, 32)
    if block:
        unit = block * (max(2, per_byte) if points else 1)
        of = (3, 64 * z, 32 // block), (3, 32, 64 // block)
    first, second = codes(3, 64 * z, 32 // per_byte), codes(3, 32, 64 // per_byte)
    operands: list[Any] = [(6, 32), (6, 3), first, scales(*of[0]), None, second, scales(*of[1])]
    found = {"x2": along(first.shape, 1, unit * z), "x5": along(second.shape, 2, unit // per_byte)}
    found["x3"] = along(of[0], 1, unit * z)
    if block:
        found["x6"] = along(of[1], 2, unit // block)
    if points:
        packed = [(*shape[:-1], shape[-1] // per_byte or 1) for shape in of]
        operands += [None] * 4 + [codes(*shape) for shape in packed]
        found["x11"] = along(packed[0], 1, unit * z if block else unit * z // per_byte)
        if block:
            found["x12"] = along(packed[1], 2, unit // block // per_byte)
    attrs = {"k": 2, "activation_type": "swiglu" if fused else "relu", "swiglu_fusion": fused}
    attrs |= {"expert_weight_bits": bits} | ({"block_size": block} if block else {})
    splits = "e f t" if unit < 64 else "e t"
    return Groups(Case("QMoE", operands, attrs, domain=MICROSOFT), found, splits)


CASES = [
    *(
        product(6 * block, block, points)
        for block in (16, 32, 64, 128)
        for points in ("", "packed")
    ),
    *(product(width, 16, "packed") for width in (16, 32, 80, 112, 160, 104, 30)),
    *(product(width, 16) for width in (16, 80, 112, 104, 30)),
    *(product(96, 16, "floats", level=level) for level in (0, 4)),
    *(product(160, 32, "packed", bits=bits) for bits in (2, 8)),
    *(product(192, 32, points, flat=True) for points in ("", "packed")),
    *(linear(op, (4, 12), 1, 4, "d0 n") for op in ("QuantizeLinear", "DequantizeLinear")),
    *(linear(op, (20, 3), -2, 4, "d1 n") for op in ("QuantizeLinear", "DequantizeLinear")),
    *(linear(op, (4, 10), 1, 4, "d0") for op in ("QuantizeLinear", "DequantizeLinear")),
    *(linear(op, (4, 7), 1, 0, "d0 d1") for op in ("QuantizeLinear", "DequantizeLinear")),
    *channels(),
    *tables(),
    *(experts(block, points) for block in (0, 16, 32) for points in (False, True)),
    *(experts(block, points, 8) for block in (0, 16) for points in (False, True)),
    *(experts(block, points, fused=1) for block in (0, 16) for points in (False, True)),
]
IDS = [
    f"{c.case.op}-{'-'.join(str(v) for k, v in c.case.attrs.items() if k != 'N')}" for c in CASES
]


def free_leaves(oracle: Oracle) -> dict[int, OpLeaf]:
    """What may be split alone: rows of a convolution are split with those of its result."""
    tied = {i for group in oracle.op.co_sharded for i in group}
    return {i: leaf for i, leaf in enumerate(oracle.op.leaves) if i not in tied}


def splits_of(oracle: Oracle) -> Iterator[Split]:
    """Each leaf alone, over each number of ranks, in even and in uneven parts."""
    for i, leaf in free_leaves(oracle).items():
        for n in RANKS:
            mesh = Mesh.of([("x", n)])
            even = nested_parts(leaf.size, (n,))
            for parts in {even, even[::-1], (*[0] * (n - 1), leaf.size)}:
                yield Split(mesh, {i: ((mesh.axis("x"),), None if parts == even else parts)})


def layouts_of(oracle: Oracle, split: Split) -> dict[str, Layout]:
    """The layout of each operand and result."""
    found = {}
    for tensor, links in oracle.op.operands():
        if tensor.name:
            given = iter([split.leaves.get(-1 if k is None else k, ((), None)) for k in links])
            dims = oracle.factors.tensors[tensor.name].dims
            found[tensor.name] = Layout(tuple(with_axes(dim, given) for dim in dims))
    return found


def held_groups(groups: Array, part: Array) -> set[int]:
    """The groups in a part. An AssertionError where it has more of one than of another."""
    whole, here = (np.bincount(g.ravel(), minlength=groups.max() + 1) for g in (groups, part))
    found = np.flatnonzero(here)
    shares = here[found] / whole[found]
    assert len(set(shares)) <= 1, f"parts of groups: {dict(zip(found, shares, strict=True))}"
    return set(found.tolist())


@pytest.mark.matrix(4)
@pytest.mark.parametrize("given", CASES, ids=IDS)
def test_no_group_is_cut(given: Groups) -> None:
    """A rank has the same groups in all operands, and of each the same share: that of its rows."""
    oracle = Oracle(given.case)
    assert sorted({leaf.factor for leaf in free_leaves(oracle).values()}) == given.splits.split()
    for split in splits_of(oracle):
        layouts = layouts_of(oracle, split)
        for rank in range(split.mesh.size):
            held = {}
            for name, groups in given.groups.items():
                layout = layouts.get(name)
                part = groups if layout is None else layout.take(groups, split.mesh, rank)
                if part.size:
                    held[name] = held_groups(groups, part)
            assert all(h == g for h in held.values() for g in held.values()), (split, rank, held)


@pytest.mark.matrix
@pytest.mark.parametrize("given", CASES, ids=IDS)
def test_parts_are_those_of_the_whole(given: Groups) -> None:
    oracle = Oracle(given.case)
    assert not list(filter(None, map(oracle.wrong, splits_of(oracle))))
