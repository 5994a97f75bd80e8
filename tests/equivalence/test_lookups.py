"""A lookup of rows that ranks have parts of is shown where onnxruntime finds the model's rows for
all indices, and nowhere else."""

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


def rank_graph(rank: int, low: int, high: int, count: int, fill: float) -> onnx.ModelProto:
    """Looks up rows from `low` to `high` of a table of `count` rows; the others are `fill`."""
    body = """
    wrapped = Add (ids, count)
    negative = Less (ids, zero)
    positive = Where (negative, wrapped, ids)
    place = Sub (positive, low)
    after = GreaterOrEqual (positive, low)
    before = Less (positive, high)
    has = And (after, before)
    safe = Where (has, place, zero)
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
