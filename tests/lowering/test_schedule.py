"""The order of nodes and reshards: reductions early, gathers late."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_graphsurgeon as gs
import pytest

from onnxpar.graph.reshards import Reshard, reshard_node
from onnxpar.lowering.order_nodes import schedule

RESHARDS = {
    "gather": "AllGather",
    "broadcast": "Broadcast",
    "reduce": "AllReduce",
    "scatter": "ReduceScatter",
    "exchange": "AllToAll",
    "cut": "LocalSlice",
}


class Tensors(dict[str, gs.Variable]):
    """Tensors by name, made when they are asked for."""

    def __missing__(self, name: str) -> gs.Variable:
        self[name] = gs.Variable(name, np.float32, [2])
        return self[name]


def node(line: str, tensors: Tensors, attrs: Mapping[str, gs.Graph] | None = None) -> gs.Node:
    """`y = gather p` is an AllGather, `y = mul a b` a node of the model; named by its result."""
    result, _, right = line.partition(" = ")
    op, *operands = right.split()
    inputs = [tensors[o] for o in operands]
    outputs = [tensors[r] for r in result.split(",")]
    if op in RESHARDS:
        return reshard_node(result, Reshard(RESHARDS[op], (), ()), inputs, outputs)
    return gs.Node(op.capitalize(), result, dict(attrs or {}), inputs, outputs)


def graph(
    lines: Sequence[str], inputs: str = "", outputs: str = "", tensors: Tensors | None = None
) -> gs.Graph:
    tensors = Tensors() if tensors is None else tensors
    made = gs.Graph([node(line, tensors) for line in lines])
    made.inputs = [tensors[n] for n in inputs.split()]
    made.outputs = [tensors[n] for n in outputs.split()]
    return made


def order(lines: Sequence[str]) -> str:
    """The results in the order in which a schedule has them made."""
    made = graph(lines)
    schedule(made)
    return " ".join(n.name for n in made.nodes)


def test_nodes_of_the_model_keep_their_order() -> None:
    lines = ["b = relu x", "a = relu x", "d = add a b", "c = add b a"]
    assert order(lines) == "b a d c"


@pytest.mark.parametrize("kind", ["gather", "broadcast"])
def test_gathers_stand_right_before_their_first_reader(kind: str) -> None:
    lines = [
        f"p@ = {kind} p",
        f"q@ = {kind} q",
        "a = mul x p@",
        "b = relu a",
        "c = mul b q@",
        "d = mul c p@",
    ]
    assert order(lines) == "p@ a b q@ c d"
    assert order(lines[2:4] + lines[4:] + lines[:2]) == "p@ a b q@ c d"


@pytest.mark.parametrize("kind", ["reduce", "scatter", "exchange", "cut"])
def test_what_shrinks_stands_right_behind_what_it_reads(kind: str) -> None:
    """Wherever it was put, and though it is read at the end only."""
    lines = ["a = matmul x w", "b = relu x", "c = relu b", "d = sub c a@"]
    for at in (1, 2, 3):
        assert order([*lines[:at], f"a@ = {kind} a", *lines[at:]]) == "a a@ b c d"
    assert order([*lines, f"a@ = {kind} a"]) == "a a@ b c d"


def test_of_inputs_what_shrinks_comes_first() -> None:
    assert order(["a = relu x", "b = add a y@", "y@ = reduce y"]) == "y@ a b"


def test_chains_of_reshards() -> None:
    """Of two sums one after the other, of gathers, and of a gather that is cut again."""
    reduced = ["a = matmul x w", "b = relu x", "a1 = scatter a", "a2 = reduce a1", "c = add b a2"]
    assert order(reduced) == "a a1 a2 b c"
    gathered = ["p1 = gather p", "p2 = gather p1", "a = relu x", "b = mul a p2"]
    assert order(gathered) == "a p1 p2 b"
    moved = ["a = relu x", "b = relu a", "a1 = gather a", "a2 = cut a1", "c = add b a2"]
    assert order(moved) == "a a1 a2 b c"
    both = ["a = relu x", "b = relu a", "a1 = gather a", "a2 = reduce a1", "c = add a1 b",
            "d = add c a2"]  # fmt: skip
    assert order(both) == "a a1 a2 b c d"
    last = ["a = matmul x w", "b = relu x", "a1 = scatter a", "a2 = gather a1", "c = add b a2"]
    assert order(last) == "a a1 b a2 c"


def test_what_nobody_reads_stays() -> None:
    """Outputs of the graph that are gathered."""
    assert order(["a = relu x", "b = relu a", "a@ = gather a"]) in ("a a@ b", "a b a@")


def test_reductions_of_many_go_where_the_last_is_made() -> None:
    lines = ["a = relu x", "b = relu a", "c = relu b", "d = relu c", "a@,c@ = reduce a c",
             "e = add a@ d"]  # fmt: skip
    assert order(lines) == "a b c a@,c@ d e"


def test_bodies_are_scheduled_too_and_read_what_is_around_them() -> None:
    tensors = Tensors()
    inner = graph(
        ["h = relu i", "s@ = reduce m", "m = matmul h p@", "q@ = gather q", "r = add s@ q@"],
        "i",
        "r",
        tensors,
    )
    made = graph(["p@ = gather p", "a = relu x", "b = relu a"], tensors=tensors)
    made.nodes.append(node("y = loop b", tensors, {"body": inner}))
    schedule(made)
    assert [n.name for n in made.nodes] == ["a", "b", "p@", "y"]
    assert [n.name for n in inner.nodes] == ["h", "m", "s@", "q@", "r"]


def test_nodes_that_wait_for_each_other_are_our_own_fault() -> None:
    with pytest.raises(AssertionError, match="wait for each other"):
        order(["a = relu b", "b = relu a"])
