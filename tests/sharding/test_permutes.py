"""A layout change that only moves whole shards between ranks is one message per rank."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from agreement import check_outputs, options, run_ranks, run_unsplit

from onnxpar.cost.cost import Costs, bytes_sent
from onnxpar.cost.topology import Topology
from onnxpar.layout.layout import Factor, Layout
from onnxpar.layout.mesh import Axes, Mesh
from onnxpar.lowering.lower_reshard import shard_sources
from onnxpar.planner import sharder
from onnxpar.sharding import permutes
from onnxpar.sharding.factors import Leaf, TensorFactors
from onnxpar.sharding.reshard_planner import ReshardedTensor, plan_steps
from onnxpar.sharding.state import FactorSharding

HEAD = '<ir_version: 8, opset_import: ["" : 18]>\n'
SQUARE = Mesh.parse("a=2,b=2")
A, B = (SQUARE.axis("a"),), (SQUARE.axis("b"),)


def tensor(*shape: int, opened: bool = False) -> TensorFactors:
    """A tensor whose dimensions are one leaf each."""
    leaves = tuple(Leaf(i, size) for i, size in enumerate(shape))
    numbers = tuple(range(len(shape)))
    dims = tuple(map(Factor, shape))
    return TensorFactors(dims, leaves, numbers, open=frozenset({0} if opened else ()))


def kinds(
    before: tuple[Axes, ...],
    after: tuple[Axes, ...],
    mesh: Mesh = SQUARE,
    about: TensorFactors | None = None,
    partial: tuple[Axes, Axes] = ((), ()),
) -> list[str]:
    """The steps from one sharding to another, on equal links."""
    about = about or tensor(32, 16)
    start, goal = (FactorSharding(s, p) for s, p in zip((before, after), partial, strict=True))
    steps = plan_steps(start, goal, ReshardedTensor(about, Costs(Topology.default(), mesh)))
    return [step.kind for step in steps]


LINE = Mesh.parse("a=2,b=3,c=2")
X, Y, Z = ((LINE.axis(name),) for name in "abc")
ROWS = tensor(24, 12, 12)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((X, Y, ()), (Z, Y, ())),  # another axis of the same size
        ((X, Z, ()), (Z, X, ())),  # two axes change places
        ((X, Z, Y), (Z, X, Y)),
        (((*X, *Y), (), ()), ((*Y, *X), (), ())),  # the order of two axes
        (((*X, *Y), Z, ()), ((*Z, *Y), X, ())),
        (((*X, *Z), Y, ()), ((*Z, *X), Y, ())),
    ],
)
def test_one_permute_moves_whole_shards(before: Any, after: Any) -> None:
    assert kinds(before, after, LINE, ROWS) == ["CollectivePermute"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((X, (), ()), (Y, (), ())),  # parts of other sizes
        ((X, (), ()), ((), X, ())),  # another dimension
        (((*X, *Y), (), ()), ((*X, *Z), (), ())),
        (((), (), ()), (X, (), ())),
    ],
)
def test_other_changes_need_other_steps(before: Any, after: Any) -> None:
    assert kinds(before, after, LINE, ROWS) != ["CollectivePermute"]


def test_partial_sums_change_their_axis_as_shards_do() -> None:
    assert kinds((A, ()), (B, ()), partial=(B, A)) == ["CollectivePermute"]


def test_uneven_parts_in_another_order_are_other_parts() -> None:
    """Of 10 elements, 2 x 3 parts are 2,2,1,2,2,1, and 3 x 2 parts are 2,2,2,1,2,1."""
    before, after = ((*X, *Y), (), ()), ((*Y, *X), (), ())
    assert "CollectivePermute" not in kinds(before, after, LINE, tensor(10, 12, 12))
    assert kinds((X, (), ()), (Z, (), ()), LINE, tensor(7, 12, 12)) == ["CollectivePermute"]


def test_parts_of_an_open_size_are_equal_only_by_equal_axes() -> None:
    """At 24 rows the parts are equal; in another run there may be 25."""
    before, after = ((*X, *Y), (), ()), ((*Y, *X), (), ())
    opened = tensor(24, 12, 12, opened=True)
    assert "CollectivePermute" not in kinds(before, after, LINE, opened)
    assert kinds((X, (), ()), (Z, (), ()), LINE, opened) == ["CollectivePermute"]


def test_a_permute_before_a_gather_sends_least() -> None:
    """[a, b] to [b, -]: the shards change places, then b on the columns is gathered."""
    both = kinds((A, B), (B, ()))
    assert both in (["CollectivePermute", "AllGather"], ["AllGather", "CollectivePermute"])


def test_a_slow_permute_is_not_chosen() -> None:
    slow = {"CollectivePermute": {"latency": "1 s", "bandwidth": "1 MB/s"}}
    level = {"name": "host", "size": 4, "latency": "1 us", "bandwidth": "10 GB/s"}
    topology = Topology.of({"levels": [level | {"collectives": slow}]})
    about = ReshardedTensor(tensor(32, 16), Costs(topology, SQUARE))
    steps = plan_steps(FactorSharding((A, ())), FactorSharding((B, ())), about)
    assert [step.kind for step in steps] == ["AllGather", "LocalSlice"]
    assert kinds((A, ()), (B, ())) == ["CollectivePermute"]


@pytest.mark.parametrize(("before", "after"), [((A, B), (B, A)), ((A, ()), (B, ()))])
def test_ranks_that_hold_their_shard_keep_it(before: Any, after: Any) -> None:
    first, last = (Layout((Factor(8, s[0]), Factor(8, s[1]))) for s in (before, after))
    assert shard_sources(first, last, SQUARE, (*A, *B)) == [0, 2, 1, 3]


def test_a_large_graph_has_the_permutes_of_wanted_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permutes, "MOST_PAIRS", 1)
    assert kinds((X, Z, Y), (Z, X, Y), LINE, ROWS) == ["CollectivePermute"]


def write(folder: Path, text: str) -> Path:
    onnx.save(onnx.parser.parse_model(HEAD + text), folder / "m.onnx")
    return folder / "m.onnx"


SWAP = "swap (float[32,16] x) => (float[32,16] y) { h = Relu(x)  y = Sigmoid(h) }"


def test_two_axes_change_places_in_one_message_of_512_bytes(tmp_path: Path) -> None:
    shard = {"Relu_h": [["a", "b"]], "Sigmoid_y": [["b", "a"]]}
    how = options("a=2,b=2", strategy={"shard": shard})
    model = write(tmp_path, SWAP)
    plan = sharder.shard(model, tmp_path / "m.par", how)
    (found,) = plan.collectives
    assert (found.kind, found.bytes, found.groups) == ("CollectivePermute", 512, 1)
    assert bytes_sent("CollectivePermute", 4, 512.0) == 512
    feeds = {"x": np.random.default_rng(0).standard_normal((32, 16)).astype(np.float32)}
    ranks = [onnx.load(tmp_path / f"m.par/rank_000{r}.onnx").graph.node for r in range(4)]
    assert [Counter(n.op_type for n in each)["CollectivePermute"] for each in ranks] == [1] * 4
    check_outputs(run_ranks(tmp_path / "m.par", feeds), run_unsplit(model, feeds), ["y"])


@pytest.mark.parametrize("batch", [1, 4, 5, 7])
def test_a_permute_of_open_sizes(tmp_path: Path, batch: int) -> None:
    """Shards of a batch that is open: some are empty, some larger than others."""
    text = "open (float[N,6] x) => (float[N,6] y) { h = Relu(x)  y = Sigmoid(h) }"
    shard = {"Relu_h": [["a", "b"]], "Sigmoid_y": [["b", "a"]]}
    how = options("a=2,b=2", strategy={"shard": shard})
    model = write(tmp_path, text)
    plan = sharder.shard(model, tmp_path / "m.par", how)
    assert [c.kind for c in plan.collectives] == ["CollectivePermute"]
    feeds = {"x": np.random.default_rng(0).standard_normal((batch, 6)).astype(np.float32)}
    check_outputs(run_ranks(tmp_path / "m.par", feeds), run_unsplit(model, feeds), ["y"])
