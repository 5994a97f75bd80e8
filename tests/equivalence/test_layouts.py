"""verify reads a layout of plan.json as the session does that cuts arrays by it."""

from __future__ import annotations

import random

import numpy as np
import pytest

from onnxpar.base.errors import DamagedError
from onnxpar.equivalence.layouts import MeshReader, families_of
from onnxpar.equivalence.spans import Families, covers
from onnxpar.layout.dims import Concat, Dim, Factor, Product
from onnxpar.layout.layout import Layout, indices
from onnxpar.layout.mesh import Axis, Mesh

MESH = Mesh.parse("dp=2,tp=6")
AXES = [
    (),
    (Axis("dp", 2),),
    (Axis("tp", 6),),
    (Axis("dp", 2), Axis("tp", 6)),
    (Axis("tp", 6), Axis("dp", 2)),
    (Axis("tp", 2),),
    (Axis("tp", 3, 2),),
    (Axis("tp", 6, 1, 4),),
]


def factor(draw: random.Random) -> Factor:
    size, axes = draw.randint(1, 20), draw.choice(AXES)
    count = int(np.prod([axis.size for axis in axes if axis.at is None], dtype=int))
    if axes and axes[0].at is None and draw.random() < 0.3:
        ends = sorted(draw.randint(0, size) for _ in range(count - 1))
        return Factor(size, axes, tuple(np.diff([0, *ends, size]).tolist()))
    return Factor(size, axes)


def dim(draw: random.Random) -> Dim:
    kind = draw.random()
    if kind < 0.2:
        return Product((factor(draw), factor(draw)))
    if kind < 0.3:
        axes = draw.choice(AXES[:4])
        return Concat((Factor(draw.randint(1, 9), axes), Factor(draw.randint(1, 9), axes)))
    return factor(draw)


def test_layouts_mean_the_same() -> None:
    draw, seen = random.Random(3), 0
    for _ in range(400):
        layout = Layout((dim(draw), dim(draw)))
        mesh = MeshReader([[name, size] for name, size in MESH.sizes.items()])
        families = families_of(layout.to_json(), mesh, Families(MESH.size), int)
        for rank in range(MESH.size):
            wanted = [np.asarray(indices(d, MESH, rank)).reshape(-1) for d in layout.dims]
            got = [family.spans[rank] for family in families]
            for a, b in zip(got, wanted, strict=True):
                np.testing.assert_array_equal(a, b)
                seen += 1
    assert seen


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"dims": [{"size": -1}]},
        {"dims": [{"size": 2**40}]},
        {"dims": [{"size": 4, "axes": [["no", 2, 1]]}]},
        {"dims": [{"size": 4, "axes": [["tp", 6, 1]], "parts": [4]}]},
        {"dims": [{"size": 4, "axes": [["tp", 0, 1]]}]},
        {"dims": 5},
    ],
)
def test_layouts_that_are_none(layout: dict[str, object]) -> None:
    mesh = MeshReader([["dp", 2], ["tp", 6]])
    with pytest.raises(DamagedError):
        families_of(layout, mesh, Families(12), int)


def test_all_elements_must_be_held() -> None:
    families = Families(2)
    first, all_ = np.arange(3), families.whole(5)
    assert covers([families.of([first, np.arange(3, 5)]), all_], (5, 5), 2)
    assert not covers([families.of([first, np.arange(4, 5)]), all_], (5, 5), 2)
    crossed = families.of([first, np.arange(3, 5)]), families.of([first, np.arange(3, 5)])
    assert not covers(crossed, (5, 5), 2)
