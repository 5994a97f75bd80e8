"""Whatever happens to an actor or a node: an error that names the rank, and nothing left."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from on_ray.conftest import NODE
from on_ray.on_nodes import TIMEOUT, actors, groups, pids
from onnx import helper
from runtime.bundles import Tensor, all_reduce, is_alive, k_split, wait_until, write_par

from onnxpar.base.errors import RankError, RunError

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.usefixtures("cluster")
X = np.ones((4, 7), np.float32)


def opened(par: Path, strategy: str = "SPREAD", timeout: float = TIMEOUT) -> Any:
    from onnxpar.ray import InferenceSession

    return InferenceSession(par, actors=actors(strategy), timeout=timeout)


def check_nothing_is_left(session: Any, processes: list[int]) -> None:
    """No process of a rank, no placement group, and no further run."""
    assert wait_until(lambda: not any(map(is_alive, processes)), 30)
    assert groups() == []
    with pytest.raises(RankError, match=r"this session is closed: run 2 of .*rank 1 on host"):
        session.run(None, {"x": X})
    session.close()


def test_an_actor_that_is_killed(tmp_path: Path) -> None:
    session = opened(k_split(tmp_path / "model.par"))
    session.run(None, {"x": X})
    processes = pids(session)
    os.kill(processes[1], signal.SIGKILL)
    with pytest.raises(RankError, match=r"run 2 of .*: rank 1 on host .* died: The actor") as error:
        session.run(None, {"x": X})
    assert not isinstance(error.value, RunError)
    assert isinstance(error.value.__cause__, ray.exceptions.RayActorError)
    check_nothing_is_left(session, processes)


def test_an_actor_that_is_killed_between_runs(tmp_path: Path) -> None:
    session = opened(k_split(tmp_path / "model.par"))
    session.check_alive()
    os.kill(pids(session)[0], signal.SIGKILL)
    with pytest.raises(RankError, match=r"a check of .*: rank 0 on host .* died"):
        session.check_alive()
    assert groups() == []


def test_an_actor_that_does_not_respond(tmp_path: Path) -> None:
    session = opened(k_split(tmp_path / "model.par"), timeout=8)
    session.run(None, {"x": X})
    processes = pids(session)
    os.kill(processes[1], signal.SIGSTOP)
    with pytest.raises(RankError, match=r"run 2 of .*: rank [01] on host"):
        session.run(None, {"x": X})
    assert wait_until(lambda: not any(map(is_alive, processes)), 30)
    assert groups() == []


def test_a_node_that_is_removed(cluster: Any, tmp_path: Path) -> None:
    node = cluster.add_node(**NODE)
    cluster.wait_for_nodes()
    session = opened(k_split(tmp_path / "three.par", ranks=3), "STRICT_SPREAD")
    session.run(None, {"x": X})
    processes = pids(session)
    (group,) = groups()
    assert node.node_id in group["bundles_to_node_id"].values()
    cluster.remove_node(node, allow_graceful=False)

    def fails() -> bool:
        session.run(None, {"x": X})  # the node's processes end a moment later
        return False

    with pytest.raises(RankError, match=r"run \d+ of .*: rank \d on host .* died") as error:
        wait_until(fails, TIMEOUT)
    assert isinstance(error.value.__cause__, ray.exceptions.RayActorError)
    assert wait_until(lambda: not any(map(is_alive, processes)), 30)
    assert groups() == []
    with opened(k_split(tmp_path / "two.par"), "STRICT_SPREAD") as session:
        assert session.run(["d"], {"x": X})[0][0, 0] == 2


def test_causes_are_told_from_consequences() -> None:
    from onnxpar.ray.calls import culprit

    def failed(cause: Exception) -> Any:
        return ray.exceptions.RayTaskError("answer", "", cause)

    waited, own = failed(RankError("rank 1 died")), failed(ValueError("no"))
    died = ray.exceptions.ActorDiedError()
    assert culprit({0: waited, 2: waited}) == 0
    assert culprit({0: waited, 1: died}) == culprit({0: own, 1: died}) == 1
    assert culprit({0: waited, 1: own, 2: own}) == 1


def test_a_rank_that_does_not_start(tmp_path: Path) -> None:
    par = k_split(tmp_path / "model.par")
    (file,) = par.glob("rank_0001*.onnx")
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(RankError, match=r"the start of .*: rank 1 on host .* failed: .*rank_0001"):
        opened(par)
    assert groups() == []


def test_a_run_that_fails_on_one_rank(tmp_path: Path) -> None:
    """Rank 1 looks an index up, which fails for 9; the others wait for its sum."""

    def nodes(rank: int) -> list[Any]:
        gather = [
            helper.make_node("Constant", [], ["table"], value_floats=[1.0, 2.0]),
            helper.make_node("Gather", ["table", "at"], ["found"], name="look_up"),
            helper.make_node("Add", ["x", "found"], ["z"]),
        ]
        local = gather if rank == 1 else [helper.make_node("Identity", ["x"], ["z"])]
        return [*local, *all_reduce("z", "y")]

    inputs = [Tensor("x", (1,)), Tensor("at", (1,), None, "int64")]
    par = write_par(tmp_path / "model.par", "tp=3", inputs, [Tensor("y", (1,))], nodes)
    good, bad = ({"x": np.ones(1, np.float32), "at": np.array([at])} for at in (1, 9))
    with opened(par) as session:
        for _ in range(2):
            assert session.run(None, good)[0] == 5
            with pytest.raises(RunError, match=r"rank 1 failed: Gather 'look_up': .*out of data"):
                session.run(None, bad)
        assert session.run(None, good)[0] == 5


def test_the_secret_is_on_no_command_line(tmp_path: Path) -> None:
    with opened(k_split(tmp_path / "model.par"), "STRICT_SPREAD") as session:
        for pid in pids(session):
            line = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
            assert not re.search(r"tcp://\S+#", line)
