"""The rule of PagedAttention: heads of keys and values may be split, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_graphsurgeon as gs
import pytest
from llm.test_paged_attention import Case, Paged, arrays, tables

from onnxpar.ir.paged_attention import COMPUTE, too_old
from onnxpar.rules.rule import rule_of


def test_heads_alone_may_be_split() -> None:
    shapes = {"q": (1, 5, 96), "k": (1, 5, 48), "v": (1, 5, 48), "kc": (8, 3, 4, 16)}
    shapes |= {"vc": (8, 3, 4, 16), "t": (2, 4), "r": (5,), "p": (5,)}
    inputs = [gs.Variable(n, np.float32, shape) for n, shape in shapes.items()]
    outputs = [gs.Variable(n, np.float32, shapes[m]) for n, m in zip("xyz", ("q", "kc", "vc"))]  # noqa: B905
    attrs = {"num_heads": 6, "kv_num_heads": 3}
    rule = rule_of(gs.Node("PagedAttention", "n", attrs, inputs, outputs, domain=COMPUTE))
    assert rule.sizes["k"] == 3 and rule.sizes["g"] == 2
    assert rule.whole.keys() >= {"s", "n", "p", "r", "m", "d", "e"}
    assert not {"k"} & rule.whole.keys() and not rule.reduce


@pytest.mark.skipif(too_old() is not None, reason=str(too_old()))
def test_heads_apart_are_those_together() -> None:
    case, rng = Case(heads=6, shared=3, sink=True), np.random.default_rng(0)
    text, stored = arrays(case, 9, rng), tables(case, rng)
    places = [0] * 9, list(range(9))
    whole = Paged(case, 1, rng).run(text, *places, **stored)
    for begin, end in ((0, 2), (2, 3)):
        own = replace(case, heads=2 * (end - begin), shared=end - begin)
        part = {n: a[:, 16 * begin : 16 * end] for n, a in text.items()}
        part["query"] = text["query"][:, 32 * begin : 32 * end]
        sinks = {**stored, "sink": stored["sink"][2 * begin : 2 * end]}
        found = Paged(own, 1, rng).run(part, *places, **sinks)
        np.testing.assert_array_equal(found, whole[:, 32 * begin : 32 * end])
