"""Programs written per rank, with collectives by hand: equal to what NumPy says they compute."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxpar import cli
from onnxpar.base.errors import StrategyError
from onnxpar.compiler.plan import Plan
from onnxpar.layout.mesh import Mesh
from onnxpar.planner import sharder
from onnxpar.planner.options import Options
from onnxpar.runtime.session.session import InferenceSession
from onnxpar.runtime.session.threads import ThreadSession
from onnxpar.strategy.strategy import Strategy

FLOAT = TensorProto.FLOAT
Ports = Mapping[str, Sequence[int | str]]


def op(kind: str, inputs: Sequence[str], outputs: Sequence[str], **attrs: Any) -> onnx.NodeProto:
    return helper.make_node(kind, inputs, outputs, **attrs)


def by_hand(
    kind: str, inputs: Sequence[str], outputs: Sequence[str], **attrs: Any
) -> onnx.NodeProto:
    return helper.make_node(kind, inputs, outputs, domain="onnxpar", **attrs)


def program(
    folder: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: Ports,
    outputs: Ports,
    **weights: Any,
) -> Path:
    """A model whose inputs and outputs have the shapes of one rank."""
    ports = [
        [helper.make_tensor_value_info(n, FLOAT, s) for n, s in p.items()]
        for p in (inputs, outputs)
    ]
    stored = [numpy_helper.from_array(np.asarray(w), n) for n, w in weights.items()]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("onnxpar", 1)]
    graph = helper.make_graph(nodes, "program", *ports, stored)
    path = folder / "program.onnx"
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    return path


def how(mesh: str, tensors: Mapping[str, Any] | None = None, preset: str | None = "manual") -> Any:
    strategy = Strategy.of({"tensors": tensors or {}})
    return Options(mesh=Mesh.parse(mesh), preset=preset, strategy=strategy, check_layouts=True)


def run(path: Path, options: Options, **feeds: Any) -> tuple[Plan, list[Any]]:
    par = path.parent / "model.par"
    plan = sharder.shard(path, par, options)
    with ThreadSession(par, timeout=20) as session:
        return plan, session.run(None, feeds)


def normal(*shape: int) -> Any:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def test_an_mlp_as_megatron_writes_it(tmp_path: Path) -> None:
    """Columns, then rows, then a sum over tp; the batch over dp; in threads and in processes."""
    w1, w2 = normal(6, 8), normal(8, 6)[::-1].copy()
    nodes = [
        op("MatMul", ["x", "w1"], ["h"]),
        op("Relu", ["h"], ["r"]),
        op("MatMul", ["r", "w2"], ["part"]),
        by_hand("AllReduce", ["part"], ["y"], axes=["tp"], name="sum"),
    ]
    path = program(tmp_path, nodes, {"x": [2, 6]}, {"y": [2, 6]}, w1=w1, w2=w2)
    tensors = {"x": ["dp", None], "y": ["dp", None], "w1": [None, "tp"], "w2": ["tp", None]}
    x = normal(4, 6)
    plan, (y,) = run(path, how("dp=2,tp=2", tensors), x=x)
    np.testing.assert_allclose(y, np.maximum(x @ w1, 0) @ w2, rtol=1e-5, atol=1e-5)
    (entry,) = plan.collectives
    assert (entry.kind, entry.name, entry.group, entry.groups) == ("AllReduce", "sum", (0, 1), 2)
    assert entry.bytes == 2 * 6 * 4
    assert {w.name: w.bytes_per_rank for w in plan.weights} == {"w1": 6 * 4 * 4, "w2": 4 * 6 * 4}
    with InferenceSession(tmp_path / "model.par", timeout=30) as session:
        assert session.get_inputs()[0].shape == [4, 6]
        np.testing.assert_array_equal(session.run(None, {"x": x})[0], y)


def test_each_rank_takes_its_slice(tmp_path: Path) -> None:
    """x[rank * shard : rank * shard + shard] is one graph for all ranks."""
    nodes = [
        by_hand("Rank", [], ["rank"], axes=["tp"]),
        by_hand("GroupSize", [], ["ranks"], axes=["tp"]),
        op("Shape", ["x"], ["shape"]),
        op("Gather", ["shape", "zero"], ["rows"]),
        op("Div", ["rows", "ranks"], ["shard"]),
        op("Mul", ["rank", "shard"], ["begin"]),
        op("Add", ["begin", "shard"], ["end"]),
        op("Unsqueeze", ["begin", "axes"], ["begins"]),
        op("Unsqueeze", ["end", "axes"], ["ends"]),
        op("Slice", ["x", "begins", "ends", "axes"], ["mine"]),
        op("Mul", ["mine", "mine"], ["squares"]),
        by_hand("AllGather", ["squares"], ["y"], axis=0, axes=["tp"]),
    ]
    weights = {"zero": np.array(0), "axes": np.array([0])}
    path = program(tmp_path, nodes, {"x": [6, 2]}, {"y": ["n", 2]}, **weights)
    x = normal(6, 2)
    _, (y,) = run(path, how("dp=2,tp=3"), x=x)
    np.testing.assert_array_equal(y, x * x)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_ring_of_sends(tmp_path: Path, ranks: int) -> None:
    """Every rank collects the parts of all, each passed on from neighbour to neighbour: in pairs,
    of which the even rank sends first."""
    nodes, parts, passed = [], ["x"], "x"
    for step in range(ranks - 1):
        for wave in range(3):
            senders = [r for r in range(ranks) if _wave(r, ranks) == wave]
            to = [(r + 1) % ranks if r in senders else -1 for r in range(ranks)]
            of = [(r - 1) % ranks if (r - 1) % ranks in senders else -1 for r in range(ranks)]
            got = f"got{step}_{wave}"
            nodes.append(by_hand("Send", [passed], [], peer=to, name=f"send{step}_{wave}"))
            before = passed if wave == 0 else f"got{step}_{wave - 1}"
            nodes.append(by_hand("Recv", [before], [got], peer=of, name=f"recv{step}_{wave}"))
        passed = got
        parts.append(passed)
    nodes.append(op("Concat", parts, ["y"], axis=0))
    path = program(tmp_path, nodes, {"x": [1, 3]}, {"y": [ranks, 3]})
    x = normal(ranks, 3)
    axis = {"x": ["r", None], "y": ["r", None]}
    plan, (y,) = run(path, how(f"r={ranks}", axis), x=x)
    turned = [(r - np.arange(ranks)) % ranks for r in range(ranks)]
    np.testing.assert_array_equal(y, x[np.concatenate(turned)])
    assert len([c for c in plan.collectives if c.kind == "Send"]) == 3 * (ranks - 1)


def test_a_permute_along_an_axis(tmp_path: Path) -> None:
    """Along b, each rank gets the rows of the rank before it; the first gets zeros."""
    nodes = [by_hand("CollectivePermute", ["x"], ["y"], axes=["b"], sources=[-1, 0, 1])]
    path = program(tmp_path, nodes, {"x": [2, 3]}, {"y": [2, 3]})
    x = normal(12, 3)
    axis = [["a", "b"], None]
    plan, (y,) = run(path, how("a=2,b=3", {"x": axis, "y": axis}), x=x)
    wanted = x.reshape(2, 3, 2, 3)
    wanted = np.concatenate([np.zeros_like(wanted[:, :1]), wanted[:, :-1]], 1)
    np.testing.assert_array_equal(y, wanted.reshape(12, 3))
    (found,) = plan.collectives
    assert (found.kind, found.bytes) == ("CollectivePermute", 2 * 3 * x.itemsize)


def _wave(rank: int, ranks: int) -> int:
    """Of an odd ring the last rank sends in a wave of its own."""
    return 2 if ranks % 2 and rank == ranks - 1 else rank % 2


def test_a_concatenation_is_no_state_unless_it_is_declared(tmp_path: Path) -> None:
    nodes = [by_hand("AllReduce", ["x"], ["s"]), op("Concat", ["x", "s"], ["y"], axis=0)]
    path = program(tmp_path, nodes, {"x": [2, 3]}, {"y": [4, 3]})
    x = normal(4, 3)
    plan, (y,) = run(path, how("r=2", {"x": ["r", None]}), x=x)
    np.testing.assert_array_equal(y, np.concatenate([x[:2], x[:2] + x[2:]]))
    assert not plan.states
    declared = dataclasses.replace(how("r=2", {"x": ["r", None]}), states=[("x", "y")])
    with pytest.raises(StrategyError, match="state x=y: the two have different layouts"):
        sharder.plan(path, declared)


def test_experts_exchange_tokens(tmp_path: Path) -> None:
    """Each rank has one expert and tokens for all: there, through the expert, and back."""
    nodes = [
        by_hand("AllToAll", ["x"], ["here"], split_axis=0, concat_axis=1),
        op("MatMul", ["here", "w"], ["done"]),
        by_hand("AllToAll", ["done"], ["y"], split_axis=1, concat_axis=0),
    ]
    w = normal(3, 4, 5)
    path = program(tmp_path, nodes, {"x": [3, 2, 4]}, {"y": [3, 2, 5]}, w=w)
    tensors = {"x": [None, "ep", None], "y": [None, "ep", None], "w": ["ep", None, None]}
    x = normal(3, 6, 4)
    _, (y,) = run(path, how("ep=3", tensors), x=x)
    np.testing.assert_allclose(y, x @ w, rtol=1e-5, atol=1e-5)


def test_bounds_move_between_parts(tmp_path: Path) -> None:
    """Parts of 2 and 2 become 3 and 1, and 1 and 3, in pairs of ranks."""
    sizes = [2, 0, 1, 1]
    nodes = [
        by_hand(
            "AllToAll", ["x"], ["m"], split_axis=0, concat_axis=0, split_sizes=sizes, axes=["b"]
        ),
        by_hand("AllGather", ["m"], ["y"], axis=0, axes=["b"]),
        op("Shape", ["m"], ["s"]),
        op("Slice", ["s", "zero", "one"], ["rows"]),
        op("Cast", ["rows"], ["n"], to=FLOAT),
    ]
    weights = {"zero": np.array([0]), "one": np.array([1])}
    path = program(tmp_path, nodes, {"x": [2, 3]}, {"y": [4, 3], "n": [1]}, **weights)
    x = normal(8, 3)
    tensors = {"x": [["a", "b"], None], "y": ["a", None], "n": [["a", "b"]]}
    _, (y, n) = run(path, how("a=2,b=2", tensors), x=x)
    np.testing.assert_array_equal(y, x)
    np.testing.assert_array_equal(n, [3, 1, 3, 1])


HALO = [
    by_hand("NeighborExchange", ["x"], ["wide"], axis=2, before=[0, 1, 1], after=[1, 1, 0]),
    by_hand("Rank", [], ["rank"]),
    op("Equal", ["rank", "zero"], ["first"]),
    op("Equal", ["rank", "two"], ["last"]),
    op("Where", ["first", "one", "none"], ["left"]),
    op("Where", ["last", "one", "none"], ["right"]),
    op("Concat", ["nones", "left", "nones", "right"], ["pads"], axis=0),
    op("Pad", ["wide", "pads"], ["padded"]),
    op("Conv", ["padded", "w"], ["y"]),
]
"""A convolution over three neighbours, of parts with neighbours' edges, over 3 ranks."""
HALO_NUMBERS = {
    "zero": np.array(0),
    "two": np.array(2),
    "one": np.array([1]),
    "none": np.array([0]),
    "nones": np.array([0, 0]),
}


def test_a_halo(tmp_path: Path) -> None:
    """A sum of three neighbours, over parts with their neighbours' edges."""
    weights = {**HALO_NUMBERS, "w": np.ones((1, 1, 3), np.float32)}
    path = program(tmp_path, HALO, {"x": [1, 1, 4]}, {"y": [1, 1, 4]}, **weights)
    x = normal(1, 1, 12)
    space = {"x": [None, None, "s"], "y": [None, None, "s"]}
    _, (y,) = run(path, how("s=3", space), x=x)
    wide = np.pad(x, ((0, 0), (0, 0), (1, 1)))
    np.testing.assert_allclose(y, wide[..., :-2] + x + wide[..., 2:], rtol=1e-5, atol=1e-5)


def test_reduce_scatter_and_broadcast_with_tokens_of_their_own(tmp_path: Path) -> None:
    none = numpy_helper.from_array(np.zeros(0, np.bool_))
    nodes = [
        op("Constant", [], ["t0"], value=none),
        by_hand("ReduceScatter", ["x", "t0"], ["part", "t1"], axis=0, op="max", tag=7),
        by_hand("Broadcast", ["x", "t1"], ["first", "t2"], root=0),
        op("Add", ["part", "first_rows"], ["y"]),
        op("Slice", ["first", "begin", "end"], ["first_rows"]),
    ]
    nodes[3], nodes[4] = nodes[4], nodes[3]
    weights = {"begin": np.array([0]), "end": np.array([2])}
    path = program(tmp_path, nodes, {"x": [4, 3]}, {"y": [2, 3]}, **weights)
    x = normal(8, 3)
    plan, (y,) = run(path, how("r=2", {"x": ["r", None], "y": ["r", None]}), x=x)
    top = np.maximum(x[:4], x[4:])
    np.testing.assert_array_equal(y, top + np.tile(x[:2], (2, 1)))
    rank_1 = onnx.load(tmp_path / "model.par" / "rank_0001.onnx")
    tags = [a.i for n in rank_1.graph.node for a in n.attribute if a.name == "tag"]
    assert tags == [7, 1]
    assert [c.kind for c in plan.collectives] == ["ReduceScatter", "Broadcast"]


SUM = by_hand("AllReduce", ["x"], ["y"], name="sum")


@pytest.mark.parametrize(
    "nodes, tensors, message",
    [
        ([by_hand("AllRedjuce", ["x"], ["y"], name="s")], {}, "AllRedjuce 's': no such collective"),
        ([by_hand("AllReduce", ["x"], ["y"], axes=["q"])], {}, "AllReduce 'y'.*no axis 'q'"),
        (
            [by_hand("AllReduce", ["x"], ["y"], group=[0, 2])],
            {},
            r"AllReduce 'y': \[0, 2\] has rank 2, but the mesh r=2 has ranks 0 to 1",
        ),
        ([by_hand("AllReduce", ["x"], ["y"], group=[1, 1])], {}, "rank 1 is named twice"),
        (
            [by_hand("AllReduce", ["x"], ["y"], group="pair")],
            {},
            r"no group 'pair'; the strategy has no groups; add it.*groups: \{pair: \[0, 1\]\}",
        ),
        (
            [by_hand("AllReduce", ["x"], ["y"], group=[0], axes=["r"])],
            {},
            "has both axes and group; give one of them",
        ),
        ([SUM], {"z": ["r", None]}, "'z' matches no input, weight or output"),
        ([SUM], {"x": ["r"]}, "tensor 'x' has 2 dimensions"),
        ([SUM], {"x": [{"r": [1, 3]}, None]}, "shards must have equal sizes"),
        (
            [by_hand("Send", ["x"], [], peer=[1, 0], name="s"), SUM],
            {},
            "Send 's' of rank 0 waits for rank 1, which waits in Send 's'",
        ),
        (
            [by_hand("Recv", ["x"], ["y"], peer=[1, -1], name="r")],
            {},
            "Recv 'r' of rank 0 waits for rank 1, which has ended",
        ),
        ([by_hand("Recv", ["x"], ["y"], peer=1)], {}, "list with the peer of each of the 2 ranks"),
        (
            [
                op("Cast", ["x"], ["t"], to=TensorProto.BOOL, name="cast"),
                by_hand("AllReduce", ["x", "t"], ["y"], name="s"),
            ],
            {},
            "AllReduce 's': its token 't' comes from Cast 'cast'",
        ),
        (
            [by_hand("CollectivePermute", ["x"], ["y"], sources=[1, 1])],
            {},
            r"CollectivePermute 'CollectivePermute_y': sources=\[1, 1\]: give a list",
        ),
        ([by_hand("AllGather", ["x"], ["y"], axis=5)], {}, "AllGather 'y': axis=5"),
        (
            [by_hand("AllToAll", ["x"], ["y"], split_axis=0, concat_axis=0, split_sizes=[1, 1])],
            {},
            "AllToAll 'AllToAll_y': along one axis, split_sizes must be a table of 2 x 2",
        ),
    ],
)
def test_what_is_refused(
    tmp_path: Path, nodes: list[onnx.NodeProto], tensors: dict[str, Any], message: str
) -> None:
    path = program(tmp_path, nodes, {"x": [2, 2]}, {"y": ["n", "m"]})
    with pytest.raises(StrategyError, match=message):
        sharder.plan(path, how("r=2", tensors))


def test_other_presets_refuse_collectives(tmp_path: Path) -> None:
    path = program(tmp_path, [SUM], {"x": [2, 2]}, {"y": [2, 2]})
    for preset in (None, "data-parallel", "tensor-parallel"):
        with pytest.raises(StrategyError, match=r"AllReduce 'sum' is a collective.*manual"):
            sharder.plan(path, how("r=2", preset=preset))


def test_shard_entries_are_refused(tmp_path: Path) -> None:
    path = program(tmp_path, [SUM], {"x": [2, 2]}, {"y": [2, 2]})
    strategy = Strategy.of({"shard": {"sum": [["r", None]]}})
    with pytest.raises(StrategyError, match="splits ops, which a manual program does itself"):
        sharder.plan(path, Options(devices=2, preset="manual", strategy=strategy))


def test_collectives_in_bodies_are_refused(tmp_path: Path) -> None:
    outputs = [helper.make_tensor_value_info("b", FLOAT, [2, 2])]
    body = helper.make_graph([by_hand("AllReduce", ["x"], ["b"], name="in")], "b", [], outputs)
    nodes = [op("If", ["c"], ["y"], name="if", then_branch=body, else_branch=body)]
    path = program(tmp_path, nodes, {"x": [2, 2]}, {"y": [2, 2]}, c=np.array(True))
    with pytest.raises(StrategyError, match="AllReduce 'in': is in a body of If 'if'"):
        sharder.plan(path, how("r=2"))


def test_check_compares_the_copies_of_whole_outputs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sum is equal on all ranks; what a rank adds to it itself is not."""
    nodes = [
        SUM,
        by_hand("Rank", [], ["rank"]),
        op("Cast", ["rank"], ["number"], to=FLOAT),
        op("Add", ["y", "number"], ["own"]),
    ]
    arguments = ["--preset", "manual", "--devices", "2"]
    good = program(tmp_path, nodes[:1], {"x": [2, 2]}, {"y": [2, 2]})
    assert cli.main(["check", str(good), *arguments]) == 0
    assert "all outputs agree" in capsys.readouterr().out
    bad = program(tmp_path, nodes, {"x": [2, 2]}, {"y": [2, 2], "own": [2, 2]})
    assert cli.main(["check", str(bad), *arguments]) == 1
    assert "the outputs differ; the worst is own" in capsys.readouterr().out
