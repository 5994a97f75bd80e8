"""Gradients of collectives by hand, against differences of the sum over all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from gradient_programs import ERROR, difference, differentiated, random
from onnx import TensorProto, helper, numpy_helper

from onnxpar.layout.mesh import Mesh
from onnxpar.planner import sharder
from onnxpar.planner.context import load_model
from onnxpar.planner.options import Options
from onnxpar.runtime.session.threads import ThreadSession
from onnxpar.strategy.strategy import Strategy

DOUBLE = TensorProto.DOUBLE
Ports = Mapping[str, Sequence[int]]
OPEN: list[ThreadSession] = []
op = helper.make_node


def by_hand(kind: str, inputs: Sequence[str], outputs: Sequence[str], **attrs: Any) -> Any:
    return helper.make_node(kind, inputs, outputs, domain="onnxpar", **attrs)


class Ranks:
    """A program per rank, whose inputs and results are parts of arrays along their first dimension,
    so that every rank has its own."""

    def __init__(
        self,
        folder: Path,
        mesh: str,
        nodes: Sequence[Any],
        inputs: Ports,
        outputs: Ports,
        groups: Mapping[str, Any] | None = None,
    ) -> None:
        self.groups = dict(groups or {})
        ports = [
            [helper.make_tensor_value_info(n, DOUBLE, s) for n, s in p.items()]
            for p in (inputs, outputs)
        ]
        opsets = [helper.make_opsetid("", 20), helper.make_opsetid("onnxpar", 1)]
        graph = helper.make_graph(nodes, "program", *ports)
        model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
        self.mesh = Mesh.parse(mesh)
        self.inputs, self.outputs = inputs, outputs
        loaded = load_model(self._saved(model, folder / "source.onnx"), self._how(model))
        self.model = differentiated(loaded)
        self.forward, self.gradient = (
            self._sharded(m, folder / name) for m, name in ((model, "y"), (self.model, "dx"))
        )

    def check(self) -> dict[str, Any]:
        """Holds gradients against differences, and returns them."""
        fed = {k: random(*self._whole(s), seed=i) for i, (k, s) in enumerate(self.inputs.items())}
        seeds = {f"seed.{k}": random(*self._whole(s)) for k, s in self.outputs.items()}
        found = self._run(self.gradient, fed | seeds)

        def total(name: str, moved: Any) -> float:
            results = self._run(self.forward, {**fed, name: moved})
            return sum(float((y * seeds[f"seed.{k}"]).sum()) for k, y in results.items())

        for name, value in fed.items():
            wanted = difference(lambda x, name=name: total(name, x), value)
            gradient = found.get(f"grad.{name}", np.zeros_like(value))
            np.testing.assert_allclose(gradient, wanted, rtol=0, atol=10 * ERROR, err_msg=name)
        return found

    def collectives(self) -> list[str]:
        """The collectives of the gradient, in order."""
        nodes = [n.op_type for n in self.model.graph.node if n.domain == "onnxpar"]
        return [kind for kind in nodes if kind != "Rank"]

    def _run(self, session: ThreadSession, feeds: Mapping[str, Any]) -> dict[str, Any]:
        names = [o.name for o in session.get_outputs()]
        given = {i.name: feeds[i.name] for i in session.get_inputs()}
        return dict(zip(names, session.run(None, given), strict=True))

    def _whole(self, local: Sequence[int]) -> list[int]:
        return [local[0] * self.mesh.size, *local[1:]]

    def _saved(self, model: onnx.ModelProto, path: Path) -> Path:
        onnx.save(model, path)
        return path

    def _how(self, model: onnx.ModelProto) -> Options:
        axes = [name for name, _ in self.mesh.shape]
        ports = [*model.graph.input, *model.graph.output]
        ranks = {p.name: len(p.type.tensor_type.shape.dim) for p in ports}
        tensors = {name: [axes, *[None] * (rank - 1)] for name, rank in ranks.items()}
        strategy = Strategy.of({"tensors": tensors, "groups": self.groups})
        return Options(mesh=self.mesh, preset="manual", strategy=strategy, check_layouts=True)

    def _sharded(self, model: onnx.ModelProto, path: Path) -> ThreadSession:
        par = path.with_suffix(".par")
        source = self._saved(model, path.with_suffix(".onnx"))
        sharder.shard(source, par, self._how(model))
        session = ThreadSession(par, timeout=20)
        OPEN.append(session)
        return session


@pytest.fixture(autouse=True)
def close() -> Iterator[None]:
    """Ends the sessions of a test."""
    yield
    while OPEN:
        OPEN.pop().close()


@pytest.mark.parametrize("kind", ["sum", "max", "min", "prod"])
def test_all_reduce(tmp_path: Path, kind: str) -> None:
    """In a group, each rank making something else of the result."""
    nodes = [
        op("Sin", ["x"], ["s"]),
        by_hand("AllReduce", ["s"], ["r"], op=kind, axes=["b"], tag=4),
        op("Mul", ["r", "x"], ["y"]),
    ]
    Ranks(tmp_path, "a=2,b=2", nodes, {"x": [2, 3]}, {"y": [2, 3]}).check()


def test_ties_share_the_gradient_of_an_extreme(tmp_path: Path) -> None:
    nodes = [by_hand("AllReduce", ["x"], ["y"], op="max")]
    ranks = Ranks(tmp_path, "r=2", nodes, {"x": [3]}, {"y": [3]})
    fed = {"x": np.array([1.0, 2, 3, 1, 3, 2]), "seed.y": np.array([1.0, 2, 4, 1, 2, 4])}
    found = ranks._run(ranks.gradient, fed)["grad.x"]
    np.testing.assert_array_equal(found, [1, 0, 8, 1, 4, 0])


@pytest.mark.parametrize("zeros", [1, 2])
def test_zeros_in_a_product(tmp_path: Path, zeros: int) -> None:
    nodes = [by_hand("AllReduce", ["x"], ["y"], op="prod")]
    ranks = Ranks(tmp_path, "r=3", nodes, {"x": [1]}, {"y": [1]})
    x = np.array([0.0, 2, 3]) if zeros == 1 else np.array([0.0, 0, 3])
    found = ranks._run(ranks.gradient, {"x": x, "seed.y": np.ones(3)})["grad.x"]
    np.testing.assert_array_equal(found, [18, 0, 0] if zeros == 1 else [0, 0, 0])


GROUPED: dict[str, tuple[list[int], dict[str, Any]]] = {
    "AllReduce": ([3, 3], {"op": "prod"}),
    "ReduceScatter": ([1, 2], {"axis": 1, "sizes": [1, 2]}),
    "AllGather": ([6, 6], {"axis": 1, "sizes": [3, 3]}),
    "AllToAll": ([4, 2], {"split_axis": 1, "concat_axis": 1, "split_sizes": [2, 1, 2, 1]}),
    "Broadcast": ([3, 3], {"root": 1}),
    "CollectivePermute": ([3, 3], {"sources": [-1, 0]}),
    "NeighborExchange": ([4, 5], {"axis": 1, "before": [0, 2], "after": [1, 0]}),
}
"""Collectives of two ranks that hold 3 columns each: the columns that both hold then, and
attributes for each member where there are any."""


@pytest.mark.matrix
@pytest.mark.parametrize("kind", GROUPED)
@pytest.mark.parametrize("group", ["ends", [2, 0]])
def test_ranks_outside_a_group(tmp_path: Path, kind: str, group: Any) -> None:
    """Two of three ranks run it together; the third keeps what it has."""
    (first, last), attrs = GROUPED[kind]
    sizes = [first, 3, last] if group == "ends" else [last, 3, first]
    nodes = [
        op("Sin", ["x"], ["s"]),
        by_hand(kind, ["s"], ["c"], group=group, **attrs),
        by_hand("AllGather", ["c"], ["g"], axis=1, sizes=sizes),
        op("Mul", ["g", "w"], ["y"]),
    ]
    ports = {"x": [2, 3], "w": [1, sum(sizes)]}, {"y": [2, sum(sizes)]}
    Ranks(tmp_path, "r=3", nodes, *ports, groups={"ends": [0, 2]}).check()


@pytest.mark.parametrize("sources", [[1, 2, 0], [0, 2, 1], [-1, 0, 1], [2, -1, -1]])
def test_collective_permute(tmp_path: Path, sources: list[int]) -> None:
    """Each rank weighs what it gets in its own way; some get nothing, some give nothing."""
    nodes = [
        op("Sin", ["x"], ["s"]),
        by_hand("CollectivePermute", ["s"], ["p"], sources=sources),
        op("Mul", ["p", "x"], ["y"]),
    ]
    ranks = Ranks(tmp_path, "r=3", nodes, {"x": [2, 3]}, {"y": [2, 3]})
    ranks.check()
    assert ranks.collectives() == ["CollectivePermute"] * 2


@pytest.mark.parametrize("kind", ["sum", "min", "prod"])
def test_reduce_scatter(tmp_path: Path, kind: str) -> None:
    nodes = [
        by_hand("ReduceScatter", ["x"], ["r"], axis=-1, op=kind, axes=["b"]),
        op("Mul", ["r", "r"], ["y"]),
    ]
    Ranks(tmp_path, "a=2,b=2", nodes, {"x": [2, 4]}, {"y": [2, 2]}).check()


@pytest.mark.parametrize("group", [{}, {"group": [2, 0, 1]}])
def test_parts_of_unequal_sizes(tmp_path: Path, group: dict[str, Any]) -> None:
    nodes = [
        by_hand("ReduceScatter", ["x"], ["r"], axis=1, sizes=[3, 0, 1], **group),
        by_hand("AllGather", ["r"], ["g"], axis=1, sizes=[3, 0, 1], **group),
        op("Mul", ["g", "x"], ["y"]),
    ]
    ranks = Ranks(tmp_path, "r=3", nodes, {"x": [2, 4]}, {"y": [2, 4]})
    ranks.check()
    assert ranks.collectives()[2:] == ["ReduceScatter", "AllGather"]


def test_all_gather(tmp_path: Path) -> None:
    """Each rank weighs what it has of the others in its own way."""
    nodes = [
        by_hand("AllGather", ["x"], ["g"], axis=0),
        op("Mul", ["g", "w"], ["y"]),
    ]
    Ranks(tmp_path, "r=3", nodes, {"x": [2, 2], "w": [6, 2]}, {"y": [6, 2]}).check()


def test_all_to_all(tmp_path: Path) -> None:
    nodes = [
        by_hand("AllToAll", ["x"], ["m"], split_axis=1, concat_axis=0),
        op("Tanh", ["m"], ["y"]),
    ]
    Ranks(tmp_path, "r=3", nodes, {"x": [2, 6]}, {"y": [6, 2]}).check()


def test_all_to_all_of_unequal_parts(tmp_path: Path) -> None:
    nodes = [
        by_hand("AllToAll", ["x"], ["m"], split_axis=0, concat_axis=1, split_sizes=[3, 1]),
        by_hand("AllGather", ["m"], ["g"], axis=0, sizes=[3, 1]),
        op("Mul", ["g", "w"], ["y"]),
    ]
    ports = {"x": [4, 2], "w": [4, 4]}
    Ranks(tmp_path, "r=2", nodes, ports, {"y": [4, 4]}).check()


def test_all_to_all_that_joins_unequal_parts(tmp_path: Path) -> None:
    nodes = [
        by_hand("ReduceScatter", ["x"], ["r"], axis=1, sizes=[3, 1]),
        by_hand("AllToAll", ["r"], ["m"], split_axis=0, concat_axis=1, concat_sizes=[3, 1]),
        op("Sin", ["m"], ["y"]),
    ]
    Ranks(tmp_path, "r=2", nodes, {"x": [4, 4]}, {"y": [2, 4]}).check()


def test_bounds_that_move(tmp_path: Path) -> None:
    sizes = [2, 0, 1, 0, 1, 2, 1, 0, 2]
    nodes = [
        by_hand("AllToAll", ["x"], ["m"], split_axis=0, concat_axis=0, split_sizes=sizes),
        by_hand("AllGather", ["m"], ["g"], axis=0, sizes=[3, 1, 5]),
        op("Mul", ["g", "w"], ["y"]),
    ]
    Ranks(tmp_path, "r=3", nodes, {"x": [3, 2], "w": [9, 2]}, {"y": [9, 2]}).check()


@pytest.mark.parametrize("group", [{}, {"group": [1, 2, 0]}])
def test_broadcast(tmp_path: Path, group: dict[str, Any]) -> None:
    nodes = [
        by_hand("Broadcast", ["x"], ["b"], root=1, **group),
        op("Mul", ["b", "x"], ["y"]),
    ]
    Ranks(tmp_path, "r=3", nodes, {"x": [2, 2]}, {"y": [2, 2]}).check()


def test_neighbor_exchange(tmp_path: Path) -> None:
    """Halos of a width by rank."""
    nodes = [
        by_hand("NeighborExchange", ["x"], ["n"], axis=-1, before=[0, 1, 2], after=[3, 1, 0]),
        by_hand("AllGather", ["n"], ["g"], axis=-1, sizes=[6, 5, 5]),
        op("Mul", ["g", "w"], ["y"]),
    ]
    Ranks(tmp_path, "r=3", nodes, {"x": [2, 3], "w": [1, 16]}, {"y": [2, 16]}).check()


def test_neighbor_exchange_of_lists(tmp_path: Path) -> None:
    """Rank 0 sends both to rank 2, rank 1 one to itself, rank 2 one to rank 0."""
    lists = {"send_rank_ids": [2, 2, 1, -1, -1, 0], "recv_rank_ids": [-1, 2, -1, 1, 0, 0]}
    nodes = [
        by_hand("NeighborExchange", ["x", "w"], ["a", "b"], **lists),
        op("Mul", ["a", "x"], ["c"]),
        op("Mul", ["b", "c"], ["d"]),
        op("Add", ["d", "b"], ["y"]),
    ]
    Ranks(tmp_path, "r=3", nodes, {"x": [2, 3], "w": [2, 3]}, {"y": [2, 3]}).check()


@pytest.mark.parametrize("cut", [False, True])
def test_neighbor_exchange_of_a_grid(tmp_path: Path, cut: bool) -> None:
    """Two ranks one below the other, and round: the neighbours above and below are one rank. With
    `cut`, each has its own widths."""
    ids = [1, -1, -1, -1, 1, -1, -1, -1, 0, -1, -1, -1, 0, -1, -1, -1]
    if cut:
        ids = [-1, -1, -1, -1, 1, -1, -1, -1, 0, *[-1] * 7]
    lens = [0, 1, 0, 0, 1, 0, 0, 0] if cut else [1, 1, 0, 0]
    given = {"send_rank_ids": ids, "recv_rank_ids": ids, "send_lens": lens, "recv_lens": lens}
    nodes = [
        by_hand("NeighborExchangeV2", ["x"], ["f"], **given),
        op("Mul", ["f", "w"], ["y"]),
    ]
    rows = 3 if cut else 4
    ports = {"x": [1, 1, 2, 3], "w": [1, 1, rows, 3]}, {"y": [1, 1, rows, 3]}
    Ranks(tmp_path, "r=2", nodes, *ports).check()


def test_even_halos(tmp_path: Path) -> None:
    nodes = [
        by_hand("NeighborExchange", ["x"], ["n"], axis=0, before=[0, 1], after=[1, 0]),
        op("Sin", ["n"], ["y"]),
    ]
    Ranks(tmp_path, "r=2", nodes, {"x": [3, 2]}, {"y": [4, 2]}).check()


def test_messages(tmp_path: Path) -> None:
    """A ring of two stages: what is received stands before what is sent, as in a pipeline."""
    nodes = [
        op("Sin", ["x"], ["h"]),
        by_hand("Recv", ["h"], ["z"], peer=[-1, 0, 1]),
        op("Mul", ["z", "w"], ["y"]),
        by_hand("Send", ["y"], [], peer=[1, 2, -1]),
    ]
    ranks = Ranks(tmp_path, "r=3", nodes, {"x": [2], "w": [2]}, {"y": [2]})
    ranks.check()
    assert ranks.collectives() == ["Recv", "Send", "Recv", "Send"]


def test_messages_whose_results_only_some_read(tmp_path: Path) -> None:
    """The receiver's operand depends on nothing, and one message is of no use: all ranks do their
    part all the same."""
    zero = numpy_helper.from_array(np.zeros(2))
    nodes = [
        op("Constant", [], ["none"], value=zero),
        op("Sin", ["x"], ["s"]),
        by_hand("Send", ["s"], [], peer=[1, -1], tag=9),
        by_hand("Recv", ["none"], ["z"], peer=[-1, 0], tag=9),
        by_hand("Send", ["x"], [], peer=[-1, 0]),
        by_hand("Recv", ["none"], ["unread"], peer=[1, -1]),
        op("Mul", ["z", "z"], ["y"]),
    ]
    Ranks(tmp_path, "r=2", nodes, {"x": [2]}, {"y": [2]}).check()


def test_messages_that_carry_no_gradient(tmp_path: Path) -> None:
    """Of whole numbers, or of what is not differentiated by, nothing goes back."""
    nodes = [
        op("Cast", ["x"], ["i"], to=TensorProto.INT64),
        by_hand("Send", ["i"], [], peer=[1, -1]),
        by_hand("Recv", ["i"], ["j"], peer=[-1, 0]),
        op("Cast", ["j"], ["f"], to=DOUBLE),
        op("Mul", ["f", "x"], ["y"]),
    ]
    ranks = Ranks(tmp_path, "r=2", nodes, {"x": [2]}, {"y": [2]})
    assert ranks.collectives() == ["Send", "Recv"]


def test_the_rank_is_no_function_of_anything(tmp_path: Path) -> None:
    nodes = [
        by_hand("Rank", [], ["rank"]),
        op("Cast", ["rank"], ["number"], to=DOUBLE),
        op("Mul", ["x", "number"], ["part"]),
        by_hand("AllReduce", ["part"], ["y"]),
    ]
    Ranks(tmp_path, "r=2", nodes, {"x": [2]}, {"y": [2]}).check()
