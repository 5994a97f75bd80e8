"""A lookup of rows that ranks have parts of is shown where onnxruntime finds the model's rows for
all indices, and nowhere else; and so is a sum that is added to such rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from onnxpar.equivalence.evaluate import plain_session
from onnxpar.equivalence.flat_scatters import FlatScatters
from onnxpar.equivalence.held import Held, Relations
from onnxpar.equivalence.lookups import Lookups
from onnxpar.equivalence.program import Constants, Node, Program, read_node
from onnxpar.equivalence.ranks import Ranks
from onnxpar.equivalence.spans import Families
from onnxpar.equivalence.stored import WeightFiles

Array = np.ndarray[Any, Any]
TABLE = np.random.default_rng(0).standard_normal((7, 3)).astype(np.float32)
ENDS = (0, 3, 7)
"""Where the rows of the two ranks begin and end."""


PLACES = """
    wrapped = Add (ids, count)
    negative = Less (ids, zero)
    positive = Where (negative, wrapped, ids)
    place = Sub (positive, low)
    after = GreaterOrEqual (positive, low)
    before = Less (positive, high)
    has = And (after, before)
"""
"""The place of an index among the rows of a rank, and whether it has that row."""


def rank_graph(rank: int, low: int, high: int, count: int, fill: float) -> onnx.ModelProto:
    """Looks up rows from `low` to `high` of a table of `count` rows; the others are `fill`."""
    body = f"""{PLACES}    safe = Where (has, place, zero)
    column = Unsqueeze (has, last)
    rows = Gather <axis = 0> (table, safe)
    result = Where (column, rows, fill)
    """
    text = f"""<ir_version: 9, opset_import: ["": 18]> g (int64[n] ids) => (float[n, 3] result)
    {{ {body} }}"""
    model = onnx.parser.parse_model(text)
    numbers = {"low": low, "high": high, "count": count, "zero": 0}
    constants = {name: np.array(number, np.int64) for name, number in numbers.items()}
    constants |= {"last": np.array([-1]), "fill": np.array(fill, np.float32)}
    constants["table"] = TABLE[ENDS[rank] : ENDS[rank + 1]]
    model.graph.initializer.extend(numpy_helper.from_array(v, n) for n, v in constants.items())
    return model


def program(nodes: Sequence[Node], graph: onnx.GraphProto) -> Program:
    constants = Constants({t.name: t for t in graph.initializer}, Path(), WeightFiles())
    return Program(Path(), [*nodes], ["ids"], [], constants, {"": 18})


def shown(models: Sequence[onnx.ModelProto]) -> list[Held]:
    ranks = Ranks([program([*map(read_node, m.graph.node)], m.graph) for m in models])
    families, relations = Families(2), Relations()
    relations.add(Held("ids", "ids", (families.whole(5),)))
    rows = families.of([np.arange(ENDS[r], ENDS[r + 1]) for r in range(2)])
    table = Held("table", "table", (rows, families.whole(3)))
    node = read_node(helper.make_node("Gather", ["table", "ids"], ["embedding"]))
    lookups = Lookups(ranks, families, relations)
    found = lookups.relate(node, [table], [TABLE.shape, (5,)], 0)
    return [held for held in found if held.name == "result"]


def is_right(models: Sequence[onnx.ModelProto]) -> bool:
    """True if ranks' results add up to the rows, for each index, by onnxruntime."""
    ids = np.arange(-7, 7)
    try:
        parts = [plain_session(m.SerializeToString()).run(None, {"ids": ids})[0] for m in models]
    except Exception:  # an index out of bounds
        return False
    return np.array_equal(np.sum(parts, 0), TABLE[ids])


@pytest.mark.parametrize("fill", [0.0, 1.0])
def test_bounds(fill: float) -> None:
    """Bounds that are a row too low or too high, and another number of rows."""
    right = 0
    for a, b, c, count in product((2, 3, 4), (2, 3, 4), (6, 7, 8), (6, 7, 8)):
        models = [rank_graph(0, 0, a, count, fill), rank_graph(1, b, c, count, fill)]
        found = shown(models)
        whole = [
            held for held in found if held.partial and held.partial[0].family.covers([0, 1], 7)
        ]
        assert bool(whole) == is_right(models), (a, b, c, count)
        right += bool(whole)
    assert right == (fill == 0) * 2


IDS = np.tile(np.arange(-7, 7)[:, None], 3)
UPDATES = np.random.default_rng(1).standard_normal((14, 3)).astype(np.float32)


def adding(
    rank: int, low: int, high: int, other: int, more: int, kept: int, reduction: str = "add"
) -> onnx.ModelProto:
    """Adds to rows from `low` to `high` of a rank, and what belongs to others to the place `other`;
    `more` rows are added, and `kept` of all are kept."""
    body = f"""{PLACES}    safe = Where (has, place, other)
    padded = Pad (rows, pads)
    total = ScatterElements <axis = 0, reduction = "{reduction}"> (padded, safe, updates)
    result = Slice (total, start, kept, first)
    """
    text = f"""<ir_version: 9, opset_import: ["": 18]>
    g (int64[n, 3] ids, float[n, 3] updates) => (float[m, 3] result) {{ {body} }}"""
    model = onnx.parser.parse_model(text)
    numbers = {"low": low, "high": high, "count": 7, "zero": 0, "other": other}
    constants = {name: np.array(number, np.int64) for name, number in numbers.items()}
    constants |= {"pads": np.array([0, 0, more, 0]), "kept": np.array([kept])}
    constants |= {"start": np.array([0]), "first": np.array([0])}
    constants["rows"] = TABLE[ENDS[rank] : ENDS[rank + 1]]
    model.graph.initializer.extend(numpy_helper.from_array(v, n) for n, v in constants.items())
    return model


def added(models: Sequence[onnx.ModelProto]) -> list[Held]:
    ranks = Ranks([program([*map(read_node, m.graph.node)], m.graph) for m in models])
    families, relations = Families(2), Relations()
    columns = families.whole(3)
    for name in ("ids", "updates"):
        relations.add(Held(name, name, (families.whole(14), columns)))
    rows = families.of([np.arange(ENDS[r], ENDS[r + 1]) for r in range(2)])
    names = ["table", "ids", "updates"]
    node = helper.make_node("ScatterElements", names, ["sum"], axis=0, reduction="add")
    table, shapes = Held("table", "rows", (rows, columns)), [TABLE.shape, (14, 3), (14, 3)]
    return [*Lookups(ranks, families, relations).scattered(read_node(node), table, shapes)]


def adds_right(models: Sequence[onnx.ModelProto]) -> bool:
    """True if ranks have the rows of the sum, by onnxruntime."""
    total = TABLE.copy()
    np.add.at(total, IDS[:, 0], UPDATES)
    for rank, model in enumerate(models):
        own = total[ENDS[rank] : ENDS[rank + 1]]
        try:
            session = plain_session(model.SerializeToString())
            (found,) = session.run(None, {"ids": IDS, "updates": UPDATES})
        except Exception:  # an index out of bounds
            return False
        if found.shape != own.shape or not np.allclose(found, own, atol=1e-5):
            return False
    return True


def test_sums_that_are_added_to_rows() -> None:
    """Bounds that are a row too low or too high, another place for what others add, more rows."""
    right = 0
    for a, b, other, more, kept in product((2, 3, 4), (2, 3, 4), (-1, 2, 3, 4), (0, 1, 2), (2, 3)):
        models = [adding(0, 0, a, other, more, kept), adding(1, b, 7, other + 1, more, kept + 1)]
        shown = {held.name for held in added(models)} == {"result"}
        assert shown == adds_right(models), (a, b, other, more, kept)
        right += shown
    assert right == 6
    other = [adding(0, 0, 3, 3, 1, 3, "max"), adding(1, 3, 7, 4, 1, 4, "max")]
    assert not added(other) and not adds_right(other)


def flat(
    width: int, first: int, to: int, shape: tuple[int, int], other: str, count: int
) -> onnx.ModelProto:
    """Adds rows to zeros in one dimension."""
    text = f"""<ir_version: 9, opset_import: ["": 18]>
    g (int64[n, 1] row, float[n, 3] updates) => (float[a, b] result) {{
        cast = Cast <to = {to}> (row)
        column = Reshape (cast, upright)
        begin = Mul (column, width)
        places = Add (begin, steps)
        place = Reshape (places, flat)
        rows = {other}
        added = Reshape (rows, flat)
        total = ScatterElements <axis = 0, reduction = "add"> (zeros, place, added)
        result = Reshape (total, shape)
    }}"""
    model = onnx.parser.parse_model(text)
    kind = helper.tensor_dtype_to_np_dtype(to)
    constants = {"width": np.array(width, kind), "steps": np.arange(first, first + 3).astype(kind)}
    constants |= {"upright": np.array([-1, 1]), "flat": np.array([-1]), "shape": np.array(shape)}
    constants["zeros"] = np.zeros(count, np.float32)
    model.graph.initializer.extend(numpy_helper.from_array(v, n) for n, v in constants.items())
    return model


def test_sums_that_are_added_in_one_dimension() -> None:
    """Each rank has half of what is added: their results add up to the sum."""
    total = np.zeros((7, 3), np.float32)
    np.add.at(total, IDS[:, 0], UPDATES)
    node = helper.make_node("ScatterElements", ["zero", "ids", "updates"], ["sum"], reduction="add")
    families = Families(2)
    tokens = families.of([np.arange(7), np.arange(7, 14)])
    right = 0
    for width, first, to, shape, other, count in product(
        (2, 3), (0, 1), (6, 7), ((7, 3), (3, 7)), ("Identity (updates)", "Neg (updates)"), (21, 24)
    ):
        model = flat(width, first, to, shape, other, count)
        graph = program([*map(read_node, model.graph.node)], model.graph)
        ranks, relations = Ranks([graph, graph]), Relations()
        relations.add(Held("row", "row", (tokens, families.whole(1))))
        relations.add(Held("updates", "updates", (tokens, families.whole(3))))
        if other == "Identity (updates)":
            relations.add(Held("updates", "rows", (tokens, families.whole(3))))
        shapes = [(7, 3), (14, 3), (14, 3)]
        found = FlatScatters(ranks, families, relations).relate(
            read_node(node), "row", shapes, ranks.nodes
        )
        try:
            session, halves = plain_session(model.SerializeToString()), (slice(7), slice(7, 14))
            inputs = [{"row": IDS[half, :1], "updates": UPDATES[half]} for half in halves]
            parts = [session.run(None, each)[0] for each in inputs]
            is_right = parts[0].shape == (7, 3) and np.allclose(sum(parts), total, atol=1e-5)
        except Exception:  # places out of bounds, or other sizes
            is_right = False
        assert bool(found) == (is_right and to == 7), (width, first, to, shape, other, count)
        for held in found:
            (part,) = held.partial
            assert held.name == "result" and part.family is tokens
        right += bool(found)
    assert right == 1
