"""Convolutions and pools along dimensions of which only a run knows the size: nodes compute what a
rank reads, and ranks exchange that, whoever has it. Proved as rules are, by the oracle."""

from __future__ import annotations

import numpy as np
import pytest
from numpy import array

from onnxpar.graph.per_rank import PerRank
from onnxpar.lowering.localize import localize_node
from onnxpar.testing.case import Case
from onnxpar.testing.oracle import Oracle, Split

RNG = np.random.default_rng(0)
IMAGE = (1, 2, 7, 5)
X8, W8 = RNG.integers(0, 9, IMAGE, np.uint8), RNG.integers(0, 9, (3, 2, 3, 3), np.uint8)
POINT, ONE = array(3, np.uint8), array(1, np.float32)

CASES = {
    "padded": Case("Conv", [IMAGE, (3, 2, 3, 3), (3,)], {"pads": [1, 1, 1, 1]}),
    "padded unevenly": Case("Conv", [IMAGE, (3, 2, 3, 4)], {"pads": [0, 2, 2, 1]}),
    "wide": Case("Conv", [(1, 2, 4), (3, 2, 7), (3,)], {"pads": [3, 3]}),
    "strided": Case("Conv", [IMAGE, (3, 2, 3, 3)], {"pads": [1, 1, 1, 1], "strides": [2, 3]}),
    "strided, not padded": Case("Conv", [IMAGE, (3, 2, 3, 3)], {"strides": [2, 2]}),
    "with gaps": Case("Conv", [(1, 2, 11), (3, 2, 2)], {"strides": [3]}),
    "dilated": Case("Conv", [(1, 2, 9), (3, 2, 3)], {"dilations": [2], "pads": [2, 2]}),
    "dilated and strided": Case(
        "Conv", [(1, 2, 9), (3, 2, 3)], {"dilations": [2], "pads": [1, 2], "strides": [2]}
    ),
    "same": Case("Conv", [IMAGE, (3, 2, 3, 2)], {"auto_pad": "SAME_UPPER"}),
    "grouped": Case("Conv", [IMAGE, (4, 1, 3, 3), (4,)], {"group": 2, "pads": [1, 1, 1, 1]}),
    "integers": Case("ConvInteger", [X8, W8, POINT], {"pads": [1, 1, 1, 1]}),
    "quantized": Case(
        "QLinearConv",
        [X8, ONE, POINT, W8, ONE, POINT, array(4, np.float32), POINT],
        {"pads": [1, 1, 1, 1]},
    ),
    "largest": Case("MaxPool", [IMAGE], {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}),
    "largest, strided": Case(
        "MaxPool", [IMAGE], {"kernel_shape": [3, 2], "pads": [1, 0, 1, 1], "strides": [2, 2]}
    ),
    "largest, rounded up": Case(
        "MaxPool", [IMAGE], {"kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 1}
    ),
    "mean": Case("AveragePool", [IMAGE], {"kernel_shape": [2, 3]}),
    "mean, strided": Case("AveragePool", [IMAGE], {"kernel_shape": [2, 2], "strides": [2, 2]}),
    "mean with padding": Case(
        "AveragePool",
        [IMAGE],
        {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "count_include_pad": 1},
    ),
    "largest, channels last": Case(
        "NhwcMaxPool",
        [X8.transpose(0, 2, 3, 1).copy()],
        {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]},
        domain="com.microsoft",
    ),
    "quantized, channels last": Case(
        "QLinearConv",
        [X8.transpose(0, 2, 3, 1).copy(), ONE, POINT, W8, ONE, POINT, array(4, np.float32), POINT],
        {"pads": [1, 1, 1, 1], "channels_last": 1},
        domain="com.microsoft",
    ),
    "unfolded": Case(
        "UnfoldTensor", [(2, 9, 3)], {"dim": 1, "size": 3, "step": 2}, domain="com.microsoft"
    ),
    "norm": Case("LpPool", [IMAGE], {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "p": 2}),
}


def exchanges(oracle: Oracle, split: Split) -> bool:
    """Whether ranks tell each other in a run what they want."""
    graph, factors = oracle._analysed()
    op = factors.ops[0]
    atoms = frozenset(leaf.atom for leaf in op.leaves)
    localize_node(graph, op, oracle._layouts(op, split), split.mesh, PerRank(), atoms)
    return any(node.op == "HaloExchange" for node in graph.nodes)


@pytest.mark.matrix
@pytest.mark.parametrize("name", CASES)
def test_windows_read_what_a_run_tells(name: str) -> None:
    oracle = Oracle(CASES[name])
    splits = list(oracle._tied_splits())
    assert splits and all(exchanges(oracle, split) for split in splits)
    assert [w for split in splits if (w := oracle.wrong_while_open(split))] == []
