"""Collectives of manual programs over lists of ranks and over named groups, against NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from onnxpar.base.errors import StrategyError
from onnxpar.compiler.plan import Plan
from onnxpar.layout.mesh import Mesh
from onnxpar.planner import sharder
from onnxpar.planner.options import Options
from onnxpar.runtime.session.threads import ThreadSession
from onnxpar.strategy.strategy import Strategy

X = np.random.default_rng(0).standard_normal((8, 3)).astype(np.float32)
"""Two rows for each of four ranks."""
ROWS = {"x": ["r", None], "y": ["r", None]}
PARTS = np.split(X, 4)


def run(
    folder: Path, *nodes: Any, groups: Any = None, width: int = 3, rows: int = 2
) -> tuple[Plan, list[Any]]:
    """The plan, and each rank's y, of a program for 4 ranks with these nodes."""
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("onnxpar", 1)]
    x, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in (("x", [2, 3]), ("y", [rows, width]))
    )
    graph = helper.make_graph([*nodes], "program", [x], [y])
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), folder / "m.onnx")
    strategy = Strategy.of({"tensors": ROWS, **({"groups": groups} if groups else {})})
    how = Options(mesh=Mesh.parse("r=4"), preset="manual", strategy=strategy, check_layouts=True)
    plan = sharder.shard(folder / "m.onnx", folder / "m.par", how)
    with ThreadSession(folder / "m.par", timeout=20) as session:
        (found,) = session.run(None, {"x": X})
    return plan, np.split(np.asarray(found), 4)


def by_hand(kind: str, out: str = "y", **attrs: Any) -> Any:
    return helper.make_node(kind, ["x"], [out], domain="onnxpar", **attrs)


def check(found: list[Any], wanted: list[Any]) -> None:
    for mine, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("how", ["ranks", "name"])
def test_a_sum_of_two_of_four_ranks(tmp_path: Path, how: str) -> None:
    group = [0, 3] if how == "ranks" else "ends"
    plan, ys = run(tmp_path, by_hand("AllReduce", group=group), groups={"ends": [0, 3]})
    both = PARTS[0] + PARTS[3]
    check(ys, [both, PARTS[1], PARTS[2], both])
    (found,) = plan.collectives
    assert (found.group, found.groups, found.bytes) == ((0, 3), 1, 24)


def test_two_groups_of_one_name(tmp_path: Path) -> None:
    pairs = {"pairs": [[3, 0], [1, 2]]}
    plan, ys = run(tmp_path, by_hand("Broadcast", group="pairs", root=0), groups=pairs)
    check(ys, [PARTS[3], PARTS[1], PARTS[1], PARTS[3]])
    (found,) = plan.collectives
    assert (found.group, found.groups) == ((3, 0), 2)


def test_the_root_of_a_group_is_none_of_a_rank_alone(tmp_path: Path) -> None:
    _, ys = run(tmp_path, by_hand("Broadcast", group=[1, 2], root=1))
    check(ys, [PARTS[0], PARTS[2], PARTS[2], PARTS[3]])


def test_a_plan_names_a_group_without_rank_0(tmp_path: Path) -> None:
    plan, _ = run(tmp_path, by_hand("AllReduce", group=[2, 1]))
    (found,) = plan.collectives
    assert (found.group, found.groups, found.bytes) == ((2, 1), 1, 24)


@pytest.mark.parametrize("sizes", [{}, {"sizes": [1, 1]}])
def test_scatter_and_gather(tmp_path: Path, sizes: dict[str, Any]) -> None:
    """On ranks 1 and 3, the sum; the others scatter and gather alone."""
    scatter = by_hand("ReduceScatter", "s", axis=0, group=[3, 1], **sizes)
    gather = by_hand("AllGather", axis=0, group=[3, 1], **sizes)
    gather.input[0] = "s"
    _, ys = run(tmp_path, scatter, gather)
    both = PARTS[1] + PARTS[3]
    check(ys, [PARTS[0], both, PARTS[2], both])


@pytest.mark.parametrize("sizes", [{}, {"split_sizes": [1, 1], "concat_sizes": [3, 3]}])
def test_all_to_all(tmp_path: Path, sizes: dict[str, Any]) -> None:
    there = by_hand("AllToAll", "t", split_axis=0, concat_axis=1, group=[0, 3], **sizes)
    shape = helper.make_node("Constant", [], ["s"], value_ints=[2, 3])
    flat = helper.make_node("Reshape", ["t", "s"], ["y"])
    _, ys = run(tmp_path, there, shape, flat)
    rows = [np.stack([PARTS[0][i], PARTS[3][i]]) for i in (0, 1)]
    check(ys, [rows[0], PARTS[1], PARTS[2], rows[1]])


def test_bounds_within_a_group(tmp_path: Path) -> None:
    """Rank 0 gives its last row to rank 3; the sums of rows show who has which."""
    move = by_hand(
        "AllToAll", "m", split_axis=0, concat_axis=0, group=[0, 3], split_sizes=[1, 1, 0, 2]
    )
    rows = helper.make_node("Constant", [], ["axes"], value_ints=[0])
    add = helper.make_node("ReduceSum", ["m", "axes"], ["y"])
    _, ys = run(tmp_path, move, rows, add, rows=1)
    check(
        ys,
        [
            PARTS[0][:1],
            PARTS[1].sum(0, keepdims=True),
            PARTS[2].sum(0, keepdims=True),
            PARTS[3].sum(0, keepdims=True) + PARTS[0][1:],
        ],
    )


def test_permute_halo_and_number_of_a_group(tmp_path: Path) -> None:
    permute = by_hand("CollectivePermute", "p", group=[0, 3], sources=[-1, 0])
    halo = by_hand("NeighborExchange", "h", axis=0, before=[0, 1], after=[0, 0], group=[0, 3])
    axes = helper.make_node("Constant", [], ["axes"], value_ints=[0])
    add = helper.make_node("ReduceSum", ["h", "axes"], ["s"])
    place = [
        helper.make_node(kind, [], [kind], domain="onnxpar", group=[0, 3])
        for kind in ("Rank", "GroupSize")
    ]
    cast = [helper.make_node("Cast", [n.op_type], [n.op_type + "f"], to=1) for n in place]
    end = [
        helper.make_node("Add", ["p", "s"], ["a"]),
        helper.make_node("Add", ["a", "Rankf"], ["b"]),
        helper.make_node("Mul", ["b", "GroupSizef"], ["y"]),
    ]
    _, ys = run(tmp_path, permute, halo, axes, add, *place, *cast, *end)
    own = [part.sum(0) for part in PARTS]
    check(
        ys,
        [
            own[0] * 2 + 0 * PARTS[0],
            PARTS[1] + own[1],
            PARTS[2] + own[2],
            (PARTS[0] + own[3] + PARTS[0][1] + 1) * 2,
        ],
    )


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"pair": [0, "1"]}, r"group 'pair' is \[0, '1'\]; give a list of ranks"),
        ({"pair": []}, r"group 'pair' is \[\]"),
        ({"pair": [[0, 1], 2]}, "group 'pair' is"),
        ({"pair": [0, 4]}, r"AllReduce 'n': group 'pair': \[0, 4\] has rank 4"),
        ({"pair": [[0, 1], [1, 2]]}, "AllReduce 'n': group 'pair': rank 1 is named twice"),
        ({"other": [0, 1]}, "there is no group 'pair'; the groups are other; add it"),
    ],
)
def test_bad_groups(tmp_path: Path, groups: Any, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        run(tmp_path, by_hand("AllReduce", group="pair", name="n"), groups=groups)


@pytest.mark.parametrize(
    ("groups", "sizes", "message"),
    [
        ([[0, 1, 3]], [1, 1], r"sizes=\[1, 1\] must have an entry for each of the 3 members"),
        ([[0, 1], [2]], [1], r"sizes=\[1\] must have an entry for each of the 2 members"),
        ([[0, 1, 3], [2]], [1, 1, 0], None),
    ],
)
def test_lists_have_an_entry_for_each_member(
    tmp_path: Path, groups: Any, sizes: list[int], message: str | None
) -> None:
    gather = by_hand("AllGather", axis=0, group="some", sizes=sizes)
    gather.input[0] = "s"
    nodes = [by_hand("ReduceScatter", "s", axis=0, group="some", sizes=sizes), gather]
    if message is None:
        _, ys = run(tmp_path, *nodes, groups={"some": groups})
        three = PARTS[0] + PARTS[1] + PARTS[3]
        check(ys, [three, three, PARTS[2], three])
        return
    with pytest.raises(StrategyError, match=message):
        run(tmp_path, *nodes, groups={"some": groups})


def test_lists_for_members_need_groups_of_one_size(tmp_path: Path) -> None:
    scatter = by_hand("ReduceScatter", axis=0, group="uneven", sizes=[1, 1])
    graph = helper.make_graph(
        [scatter],
        "program",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3])],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("onnxpar", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), tmp_path / "m.onnx")
    strategy = Strategy.of({"groups": {"uneven": [[0, 1], [2, 3, 4]]}})
    how = Options(mesh=Mesh.parse("r=5"), preset="manual", strategy=strategy)
    with pytest.raises(StrategyError, match="but the groups have 2 and 3 members; give groups of"):
        sharder.plan(tmp_path / "m.onnx", how)


def test_groups_of_other_presets_are_refused(tmp_path: Path) -> None:
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, 4])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=8)
    onnx.save(model, tmp_path / "m.onnx")
    strategy = Strategy.of({"groups": {"pair": [0, 1]}})
    with pytest.raises(StrategyError, match="groups are for --preset manual"):
        sharder.plan(tmp_path / "m.onnx", Options(devices=2, strategy=strategy))
