"""Gradients of ops that move elements and compute nothing."""

import numpy as np
import pytest
from numpy import array
from opsets import since

from onnxpar.base.errors import ModelError
from onnxpar.testing.case import Case
from onnxpar.testing.gradient_proof import prove_gradient

SINCE_28 = since(28)

FAR = np.iinfo(np.int64).max
PERMUTATION = array([2, 0, 3, 1])


def ints(*values):
    return array(values, np.int64)


def sliced(shape, starts, stops, axes=None, steps=None, fed=()):
    given = [None if g is None else ints(*g) for g in (starts, stops, axes, steps)]
    while given[-1] is None:
        given.pop()
    return Case("Slice", [shape, *given], fed=fed)


def padded(shape, pads, mode="constant", value=None, axes=None):
    value = None if value is None else array(value)
    operands = [shape, ints(*pads), value, None if axes is None else ints(*axes)]
    return Case("Pad", operands, {"mode": mode}, fed=[2] if value is not None else [])


CASES = [
    Case("Reshape", [(2, 3, 4), ints(0, -1)]),
    Case("Reshape", [(0, 3), ints(3, 0)], {"allowzero": 1}),
    Case("Reshape", [(1, 1), ints()]),
    Case("Flatten", [(2, 3, 4)], {"axis": -1}),
    Case("Flatten", [()], {"axis": 0}),
    Case("Squeeze", [(1, 3, 1), ints(-1)]),
    Case("Squeeze", [(1, 3, 1)]),
    Case("Unsqueeze", [(2, 3), ints(-1, 0)]),
    Case("Transpose", [(2, 3, 4)]),
    Case("Transpose", [(2, 3, 1, 4)], {"perm": PERMUTATION.tolist()}),
    Case("Transpose", [()]),
    Case("Transpose", [(0, 3)]),
    Case("Expand", [(3, 1), ints(2, 1, 4)]),
    Case("Expand", [(), ints(2, 3)]),
    Case("Expand", [(1, 3), ints(0, 3)]),
    Case("Concat", [(2, 3), (2, 1), (2, 0)], {"axis": -1}),
    Case("Concat", [(2, 3)], {"axis": 0}),
    Case("Split", [(2, 6), ints(1, 3, 2)], {"axis": -1}, outputs=3),
    Case("Split", [(5, 2)], {"num_outputs": 2}, outputs=2),
    Case("Split", [(2, 2), ints(2, 0)], {"axis": 1}, outputs=2),
    sliced((5, 6), [1], [4]),
    sliced((5, 6), [-4, 0], [-1, FAR], [1, -2]),
    sliced((7,), [0], [FAR], [0], [3]),
    sliced((7, 3), [5], [1], [-2], [-2]),
    sliced((7,), [-1], [-FAR], [0], [-1]),
    sliced((5,), [-100], [-FAR], [0], [-1]),
    sliced((2, 7, 8), [1, 100], [100, 0], [1, 2], [2, -3]),
    sliced((5, 2), [3], [2], [0]),
    sliced((0, 2), [0], [3], [1]),
    sliced((5, 6), [1, -5], [4, -2], [0, 1], fed=[1]),
    sliced((2, 7), [-2], [0], [1], [-2], fed=[1, 4]),
    sliced((7, 2), [-100], [4], fed=[1, 2]),
    padded((2, 3), [1, 0, 2, 1]),
    padded((2, 3), [0, 1, 1, 2], value=0.5),
    padded((3, 4), [-1, 2, 1, -2], value=0.5),
    padded((2, 3), [0, 0, 0, 0], value=0.5),
    padded((2, 3, 4), [1, 2, 0, 1], value=-1.0, axes=[-1, 0]),
    padded((0, 3), [1, 0, 1, 0], value=0.5),
    *(padded((3, 4), [2, 1, 1, 3], mode) for mode in ("reflect", "edge", "wrap")),
    *(padded((2, 5), [2, -1], mode, axes=[-1]) for mode in ("reflect", "edge", "wrap")),
    padded((3,), [4, 5], "wrap"),
    Case("Tile", [(2, 3), ints(3, 2)]),
    Case("Tile", [(2, 3), ints(1, 1)]),
    Case("Tile", [(2, 3), ints(2, 0)]),
    Case("Tile", [(0, 3), ints(2, 2)]),
    Case("Tile", [(2, 1), ints(2, 2)], fed=[1]),
    *(Case("DepthToSpace", [(2, 8, 2, 3)], {"blocksize": 2, "mode": m}) for m in ("DCR", "CRD")),
    Case("DepthToSpace", [(1, 18, 1, 2)], {"blocksize": 3, "mode": "CRD"}),
    Case("SpaceToDepth", [(2, 2, 4, 6)], {"blocksize": 2}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.op)
def test_gradient(prove, case):
    prove(case, results=case.outputs)


@SINCE_28
def test_gradient_of_space_to_depth_with_a_mode(prove):
    prove(Case("SpaceToDepth", [(2, 2, 4, 6)], {"blocksize": 2, "mode": "CRD"}, opset=28))


@pytest.mark.parametrize("results", [1, 2])
def test_split_of_which_some_parts_are_used(prove, results):
    prove(Case("Split", [(2, 6), ints(1, 3, 2)], {"axis": 1}, outputs=3), results=results)


def test_concat_of_which_one_part_is_wanted(prove):
    prove(Case("Concat", [(2, 3), (2, 1), (2, 2)], {"axis": 1}), wrt=[1])


@pytest.mark.parametrize("case", [padded((2, 3), [1, 0, 2, 1]), sliced((5,), [0], [3], [0])])
def test_what_only_a_run_can_tell(case):
    at = {"Pad": 1, "Slice": 3}[case.op]
    fed = Case(case.op, case.operands, case.attrs, fed=[1, at])
    with pytest.raises(ModelError, match=r"are not constant; make 'x[1-3]'"):
        prove_gradient(fed)
