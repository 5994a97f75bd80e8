"""Tokens of a mixture travel in two ops, while a shared expert computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from agreement import check_outputs, run_ranks, run_unsplit
from lowering.mixtures import (
    DEVICE,
    HOST,
    NETWORK,
    beside_shared_expert,
    between_hosts,
    feeds_of,
    mixture,
)

from onnxpar.compiler.plan import Plan
from onnxpar.cost.topology import Topology
from onnxpar.graph.typical import Typical
from onnxpar.planner import sharder
from onnxpar.planner.options import Options

pytestmark = pytest.mark.usefixtures("medium")

CHOICES: dict[str, Any] = {
    "balanced": [[0, 1], [2, 3], [4, 5], [1, 0], [3, 2], [5, 4]],
    "one expert": [[3, 3]] * 6,
    "one rank's experts": [[0, 1], [1, 0], [0, 0], [1, 1], [0, 1], [1, 0]],
    "no expert": [[6, 6]] * 6,
    "some have one": [[0, 6], [6, 6], [2, 5], [6, 3], [5, 5], [6, 1]],
}


def written(
    folder: Path, rows: int | str, dtype: str = "float", first: bool = False, slots: int = 2
) -> Path:
    path = folder / f"{rows}.{dtype}.{first}.{slots}.onnx"
    onnx.save(beside_shared_expert(mixture(6, slots, rows, dtype), first), path)
    return path


def ops_of(par: Path, rank: int = 0) -> list[str]:
    model = onnx.load(par / f"rank_{rank:04d}.onnx", load_external_data=False)
    return [node.op_type for node in model.graph.node]


def names_of(par: Path, rank: int = 0) -> list[str]:
    model = onnx.load(par / f"rank_{rank:04d}.onnx", load_external_data=False)
    return [node.name for node in model.graph.node]


def shard(path: Path, folder: Path, how: Options) -> tuple[Path, Plan]:
    par = folder / f"{len(list(folder.iterdir()))}.par"
    return par, sharder.shard(path, par, how)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("first", [False, True], ids=["shared last", "shared first"])
@pytest.mark.parametrize("dtype", ["float", "float16"])
def test_results_are_those_of_one_op(ranks: int, first: bool, dtype: str, tmp_path: Path) -> None:
    """And those of the unsplit model, whatever a router chooses: all rows for one rank, none."""
    path = written(tmp_path, 6, dtype, first)
    layout = f"expert-parallel {ranks}"
    two, plan = shard(path, tmp_path, between_hosts(layout))
    one, _ = shard(path, tmp_path, between_hosts(layout, "off"))
    assert Counter(c.kind for c in plan.collectives)["AllToAllV"] == 2
    for rank in range(ranks):
        assert ops_of(two, rank).count("StartAllToAllV") >= 1
    assert "Complete" not in ops_of(one)
    for ids in CHOICES.values():
        feeds = feeds_of(ids, dtype)
        got = run_ranks(two, feeds)
        check_outputs(got, run_unsplit(path, feeds), ["z"])
        assert got[0].tobytes() == run_ranks(one, feeds)[0].tobytes()


def order(names: Sequence[str], *wanted: str) -> list[str]:
    """Of the nodes of these names, their order."""
    return [name for name in names if name in wanted]


@pytest.mark.parametrize("first", [False, True], ids=["shared last", "shared first"])
def test_the_shared_expert_computes_while_tokens_travel(first: bool, tmp_path: Path) -> None:
    """A half on their way there, a half on their way back, wherever the model has it."""
    par, plan = shard(
        written(tmp_path, 64, first=first), tmp_path, between_hosts("expert-parallel 2")
    )
    there, back = (c.name for c in plan.collectives if c.kind == "AllToAllV")
    wanted = [
        *(there, "shared.up", f"{there}::after", f"{there}::complete"),
        *(back, "shared.down", f"{back}::after", f"{back}::complete"),
    ]
    for rank in (0, 1):
        assert order(names_of(par, rank), *wanted) == wanted
    model = onnx.load(par / "rank_0000.onnx", load_external_data=False)
    (up,) = (node for node in model.graph.node if node.name == "shared.up")
    assert up.input[0].endswith("::held"), "onnxruntime may compute it before the start"


def test_what_is_hidden_counts_exchanges(tmp_path: Path) -> None:
    """Their estimated bytes, less what starts and completions take."""
    path = written(tmp_path, 64)
    _, two = shard(path, tmp_path, between_hosts("expert-parallel 2"))
    _, one = shard(path, tmp_path, between_hosts("expert-parallel 2", "off"))
    assert two.predicted is not None and one.predicted is not None
    sent = sum(c.bytes for c in two.collectives if c.kind == "AllToAllV") / 20e3
    assert 0.8 * sent < two.hidden < sent
    shown = one.predicted.communication - two.hidden
    assert two.predicted.communication == pytest.approx(shown)
    assert one.hidden == 0


def test_on_one_host_tokens_travel_in_one_op(tmp_path: Path) -> None:
    path = written(tmp_path, 64, first=True)
    one_host = Topology.of({"levels": [{**NETWORK, "name": "host"}], "device": DEVICE})
    how = replace(between_hosts("expert-parallel 2"), topology=one_host)
    par, plan = shard(path, tmp_path, how)
    assert Counter(c.kind for c in plan.collectives)["AllToAllV"] == 2
    assert not {"Complete", "StartAllToAllV", "Gate"} & set(ops_of(par))


def test_a_short_exchange_stays_in_one_op(tmp_path: Path) -> None:
    """A copy takes longer than what could be hidden."""
    fast = {**NETWORK, "bandwidth": "100 MB/s"}
    how = replace(
        between_hosts("expert-parallel 2"),
        topology=Topology.of({"levels": [HOST, fast], "device": DEVICE}),
    )
    par, _ = shard(written(tmp_path, 64), tmp_path, how)
    assert "Complete" not in ops_of(par)


def groups_of(par: Path, rank: int) -> list[list[int]]:
    """The groups of the exchanges that a rank starts."""
    model = onnx.load(par / f"rank_{rank:04d}.onnx", load_external_data=False)
    started = [node for node in model.graph.node if node.op_type == "StartAllToAllV"]
    return [list(a.ints) for node in started for a in node.attribute if a.name == "group"]


@pytest.mark.slow
@pytest.mark.parametrize("mesh, slots", [("dp=2,ep=2", 1), ("dp=2,ep=3", 2)])
def test_each_replica_exchanges_its_own_rows(mesh: str, slots: int, tmp_path: Path) -> None:
    """The mixture has replicas, whose ranks exchange among themselves. Over two ranks, a sum costs
    less than an exchange if each token has two experts."""
    path, layout = written(tmp_path, 96, slots=slots), f"expert-parallel {mesh}"
    half = int(mesh[-1])
    two, _ = shard(path, tmp_path, between_hosts(layout))
    one, _ = shard(path, tmp_path, between_hosts(layout, "off"))
    for rank in range(2 * half):
        first = rank // half * half
        assert groups_of(two, rank) == 2 * [[*range(first, first + half)]]
    random = np.random.default_rng(3)
    left, right = (random.integers(0, 6, (48, slots)) for _ in range(2))
    for ids in ([*left, *right], [*left, *np.full((48, slots), 6)], [*np.zeros_like(left), *right]):
        feeds = feeds_of(ids)
        got = run_ranks(two, feeds)
        check_outputs(got, run_unsplit(path, feeds), ["z"])
        assert got[0].tobytes() == run_ranks(one, feeds)[0].tobytes()


@pytest.mark.matrix
@pytest.mark.parametrize("mesh, slots", [("ep=3", 2), ("dp=2,ep=2", 1), ("dp=2,ep=3", 2)])
def test_open_rows(mesh: str, slots: int, tmp_path: Path) -> None:
    """The same nodes move at all sizes, also where ranks have no row."""
    path = written(tmp_path, "rows", slots=slots)
    how = replace(
        between_hosts(f"expert-parallel {mesh}"), typical=Typical.from_argument({"rows": 256})
    )
    par, _ = shard(path, tmp_path, how)
    assert ops_of(par).count("StartAllToAllV") >= 1
    random = np.random.default_rng(3)
    for rows in (1, 3, 4, 19):
        feeds = feeds_of(random.integers(0, 6, (rows, slots)))
        check_outputs(run_ranks(par, feeds), run_unsplit(path, feeds), ["z"])
