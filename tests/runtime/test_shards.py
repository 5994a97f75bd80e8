"""Parts cut and assembled by prepared indices are those of Layout.take and Layout.assemble."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxpar.layout.layout import Concat, Dim, Factor, Layout, Product
from onnxpar.layout.mesh import Axis, Mesh
from onnxpar.runtime.session import shards as parts_module
from onnxpar.runtime.session.shards import Shards

MESH = Mesh.parse("a=2,b=3")
A, B = Axis("a", 2), Axis("b", 3)


def dims(axes: tuple[Axis, ...]) -> st.SearchStrategy[Dim]:
    factor = st.builds(Factor, st.integers(0, 5), st.just(axes))
    whole = st.builds(Factor, st.integers(1, 4))
    either = st.one_of(factor, whole)
    return st.one_of(
        either,
        st.builds(lambda *c: Concat(c), either, either, factor),
        st.builds(lambda *c: Product(c), whole, factor, whole),
    )


LAYOUTS = st.one_of(
    st.builds(lambda x, y: Layout((x, y)), dims((A,)), dims((B,))),
    st.builds(lambda x, y: Layout((x, y)), dims((B, A)), dims(())),
    st.builds(lambda x, y: Layout((x, y), (B,)), dims((A,)), dims(())),
    st.builds(lambda x, y: Layout((x, y), (B,), "max"), dims(()), dims((A,))),
)


@given(LAYOUTS, st.sampled_from([1, 64]))
def test_parts_are_those_of_the_layout(layout: Layout, many: int) -> None:
    parts_module.MANY_BLOCKS, before = many, parts_module.MANY_BLOCKS
    try:
        parts = Shards(layout, MESH)
        whole = np.arange(np.prod(layout.shape), dtype=np.float32).reshape(layout.shape)
        cut = [parts.take(whole, rank) for rank in range(MESH.size)]
        for rank, part in enumerate(cut):
            np.testing.assert_array_equal(part, layout.take(whole, MESH, rank))
            assert part.flags.c_contiguous
            assert parts.local_shape(rank) == part.shape
            written = np.empty_like(part)
            parts.write(whole, rank, written)
            np.testing.assert_array_equal(written, part)
            np.testing.assert_array_equal(cut[parts.origins[rank]], part)
        given = {rank: cut[rank] for rank in parts.sources}
        np.testing.assert_array_equal(parts.assemble(given), whole)
        assert all((parts.rows(r) is None) == bool(layout.partial) for r in parts.sources)
        placed = np.full_like(whole, -1)
        for rank, part in given.items() if not layout.partial else ():
            for start in range(0, len(part), 2):
                parts.place(placed, rank, start, part[start : start + 2])
        if not layout.partial:
            np.testing.assert_array_equal(placed, whole)
        np.testing.assert_array_equal(layout.assemble(cut, MESH), whole)
    finally:
        parts_module.MANY_BLOCKS = before


@pytest.mark.parametrize(
    ("layout", "sources"),
    [
        (Layout((Factor(4),)), (0,)),
        (Layout((Factor(4, (A,)),)), (0, 3)),
        (Layout((Factor(4, (B,)),)), (0, 1, 2)),
        (Layout((Factor(4, (A,)), Factor(3, (B,)))), (0, 1, 2, 3, 4, 5)),
        (Layout((Factor(4, (A,)),), (B,)), (0, 1, 2, 3, 4, 5)),
        (None, (0,)),
    ],
)
def test_only_different_parts_are_moved(layout: Layout | None, sources: tuple[int, ...]) -> None:
    assert Shards(layout, MESH).sources == sources


def test_rows_are_views_and_columns_are_copied() -> None:
    whole = np.arange(12.0).reshape(4, 3)
    rows = Shards(Layout((Factor(4, (A,)), Factor(3))), MESH)
    columns = Shards(Layout((Factor(4), Factor(3, (B,)))), MESH)
    assert np.shares_memory(rows.take(whole, 0), whole)
    assert not np.shares_memory(columns.take(whole, 0), whole)
    np.testing.assert_array_equal(columns.take(whole, 1), whole[:, 1:2])


def test_whole_outputs_are_copied() -> None:
    """What is assembled must survive the next run, which reuses the parts' memory."""
    part = np.ones(3)
    assert not np.shares_memory(Shards(None, MESH).assemble({0: part}), part)
