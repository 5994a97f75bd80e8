"""Shapes behind the collectives, as onnxruntime infers them when it loads a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from native.ranks import model, node, session
from onnx import TensorProto, helper

from onnxpar.runtime.ranks.groups import World

Worlds = Callable[[int], list[World]]

SIZES = {"axis": 1, "sizes": [2, 1]}
HALO = {"axis": 1, "before": [0, 1], "after": [2, 0]}


def inferred(
    world: World, kind: str, shape: Sequence[int | str | None], **attributes: Any
) -> list[Any]:
    """The shape of Y behind `kind` and a Neg that only its inferred shape can tell."""
    nodes = [
        node(kind, ["X", "t"], ["y", "s"], tag=1, **attributes),
        helper.make_node("Neg", ["y"], ["Y"]),
    ]
    proto = model(nodes, [("X", TensorProto.FLOAT, shape)], [("Y", TensorProto.FLOAT, None)])
    return session(world, proto).get_outputs()[0].shape


@pytest.mark.parametrize(
    "kind, attributes, shape, on_rank_0, on_rank_1",
    [
        ("AllReduce", {}, [2, 3], [2, 3], [2, 3]),
        ("AllReduce", {}, ["batch", 3], ["batch", 3], ["batch", 3]),
        ("Broadcast", {"root": 0}, ["batch", 3], ["batch", 3], ["batch", 3]),
        ("Recv", {}, ["batch", 3], ["batch", 3], ["batch", 3]),
        ("AllGather", SIZES, ["batch", "n"], ["batch", 3], ["batch", 3]),
        ("AllGather", SIZES | {"axis": -1}, [4, "n"], [4, 3], [4, 3]),
        ("AllGather", {"axis": 1}, ["batch", 2], ["batch", "?"], ["batch", "?"]),
        ("ReduceScatter", SIZES, ["batch", 3], ["batch", 2], ["batch", 1]),
        ("ReduceScatter", SIZES | {"group": [1, 0]}, [5, 3], [5, 1], [5, 2]),
        ("ReduceScatter", {"axis": 1}, ["batch", 3], ["batch", "?"], ["batch", "?"]),
        (
            "AllToAll",
            {"split_axis": 0, "concat_axis": 1, "split_sizes": [3, 2], "concat_sizes": [4, 4]},
            [5, 4, "c"],
            [3, 8, "c"],
            [2, 8, "c"],
        ),
        (
            "CollectivePermute",
            {"sources": [1, 0], "shapes": [3, -1, 2, -1]},
            ["n", "c"],
            [2, "c"],
            [3, "c"],
        ),
        ("CollectivePermute", {"sources": [1, 0], "shapes": [-1]}, ["n"], ["n"], ["n"]),
        ("CollectivePermute", {"sources": [1, 0]}, ["n"], ["?"], ["?"]),
        ("NeighborExchange", HALO, ["batch", 5], ["batch", 7], ["batch", 6]),
        ("NeighborExchange", HALO, ["batch", "n"], ["batch", "?"], ["batch", "?"]),
    ],
)
def test_shapes_behind_a_collective(
    worlds_of: Worlds,
    kind: str,
    attributes: dict[str, Any],
    shape: list[int | str | None],
    on_rank_0: list[int | str],
    on_rank_1: list[int | str],
) -> None:
    for world, expected in zip(worlds_of(2), [on_rank_0, on_rank_1], strict=True):
        extra = {"peer": 1 - world.rank} if kind == "Recv" else {}
        result = inferred(world, kind, shape, **attributes, **extra)
        generated = ["?" if str(dim).startswith("onnxpar_dim_") else dim for dim in result]
        assert generated == expected


def test_a_tensor_of_unknown_rank_stays_so(worlds_of: Worlds) -> None:
    """Were it called a scalar, the MatMul behind it would not load."""
    nodes = [
        helper.make_node("Reshape", ["X", "shape"], ["x"]),
        node("AllReduce", ["x", "t"], ["y", "s"], tag=1),
        helper.make_node("MatMul", ["y", "y"], ["Y"]),
    ]
    proto = model(
        nodes,
        [("X", TensorProto.FLOAT, [4]), ("shape", TensorProto.INT64, None)],
        [("Y", TensorProto.FLOAT, None)],
    )
    session(worlds_of(2)[0], proto)


def test_constants_are_scalars(worlds_of: Worlds) -> None:
    proto = model([node("Rank", [], ["Y"])], [], [("Y", TensorProto.INT64, None)])
    assert session(worlds_of(2)[0], proto).get_outputs()[0].shape == []
