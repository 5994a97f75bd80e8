"""Elastic training: ranks that fail, die and are replaced end where undisturbed ones do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxpar import hvd
from onnxpar.base.errors import RankError

pytestmark = pytest.mark.usefixtures("medium")

SCRIPT = """
import json, os, signal, sys
import numpy as np
import onnxpar.hvd as hvd

folder, victim, how = sys.argv[1], int(sys.argv[2]), sys.argv[3]
hvd.init(process_sets=[hvd.ProcessSet([0])], timeout=60)
rank = hvd.rank()
random = np.random.default_rng([9, rank])  # every process begins elsewhere
params = {"w": random.standard_normal(3)}
optimizer = hvd.DistributedOptimizer(hvd.SGD(lr=0.1, momentum=0.9))
sampler = hvd.elastic.ElasticSampler(60, seed=3)
state = hvd.elastic.ArrayState(params, optimizer, sampler=sampler, step=0, calls=[])
resets = []
state.register_reset_callbacks([lambda: resets.append(hvd.size())])
fresh = len(sys.argv) == 4

@hvd.elastic.run
def train(state):
    state.calls.append(state.step)  # not committed before the next commit
    while state.step < 12:
        if fresh and rank == victim and state.step == 7 and not resets:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            hvd.allreduce(np.ones(2), name="another name")
        index = list(state.sampler)[0]
        grad = np.full(3, 1.0 + index % 7) * state.params["w"]
        state.optimizer.step(state.params, {"w": grad})
        state.sampler.record_batch(0, 1)
        state.sampler.reset()
        state.step += 1
        if state.step % 3 == 0:
            state.commit()
    return "done"

result = train(state)
with open(f"{folder}/{rank}.json", "w") as file:
    found = {"w": params["w"].tolist(), "resets": resets, "step": state.step, "result": result}
    json.dump({**found, "calls": state.calls, "left": len(sampler.remaining_indices)}, file)
hvd.shutdown()
"""


def start(folder: Path, rank: int, ranks: int, *arguments: object) -> subprocess.Popen[bytes]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "SLURM_", "PMIX_"))}
    variables = {
        "ONNXPAR_RANK": str(rank),
        "ONNXPAR_WORLD_SIZE": str(ranks),
        "ONNXPAR_STORE": f"file:{folder}/store",
    }
    command = [sys.executable, str(folder / "script.py"), str(folder), *map(str, arguments)]
    return subprocess.Popen(command, env={**kept, **variables})


def run(folder: Path, victim: int, how: str, ranks: int = 2) -> list[dict[str, Any]]:
    folder.mkdir()
    (folder / "script.py").write_text(SCRIPT)
    processes = [start(folder, rank, ranks, victim, how) for rank in range(ranks)]
    if how == "kill":
        assert processes[victim].wait(100) == -9
        processes[victim] = start(folder, victim, ranks, victim, how, "again")
    try:
        assert [process.wait(150) for process in processes] == [0] * ranks
    finally:
        for process in processes:
            process.kill()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(tmp_path_factory.mktemp("elastic") / "run", -1, "none")


@pytest.mark.slow
def test_an_undisturbed_run(undisturbed: list[dict[str, Any]]) -> None:
    for found in undisturbed:
        assert found["resets"] == [] and found["step"] == 12 and found["result"] == "done"
        assert found["w"] == undisturbed[0]["w"] and found["left"] == 36


@pytest.mark.matrix
@pytest.mark.parametrize("how,victim", [("disagree", 1), ("kill", 0), ("kill", 1)])
def test_ranks_go_on_from_the_last_commit(
    undisturbed: list[dict[str, Any]], how: str, victim: int, tmp_path: Path
) -> None:
    found = run(tmp_path / "run", victim, how)
    for rank, each in enumerate(found):
        assert each["w"] == undisturbed[0]["w"] and each["step"] == 12 and each["left"] == 36
        assert each["resets"] == ([] if how == "kill" and rank == victim else [2])
        assert each["calls"] == [0, 6]  # the call before the failure was committed, this one is not


def test_a_state_restores_what_was_committed() -> None:
    def body() -> None:
        params, optimizer = {"w": np.ones(2)}, hvd.SGD(0.5, momentum=0.5)
        state = hvd.elastic.ArrayState(params, optimizer, batch=0, seen=[])
        optimizer.step(params, {"w": np.ones(2)})
        state.batch, state.seen = 3, [1]
        state.commit()
        optimizer.step(params, {"w": np.ones(2)})
        state.batch = 4
        state.seen.append(2)
        state.restore()
        assert params["w"].tolist() == [0.5, 0.5] and state.batch == 3 and state.seen == [1]
        assert optimizer.state["w"]["momentum_buffer"].tolist() == [1.0, 1.0]
        state.seen.append(2)
        state.restore()
        assert state.seen == [1]

    hvd.run_on_threads(body, 1)


def test_hosts_that_change_interrupt_all_ranks() -> None:
    def body() -> list[bool]:
        state, skipped = hvd.elastic.ArrayState(batch=hvd.rank()), []
        resets: list[int] = []

        def train(state: hvd.elastic.ArrayState) -> None:
            if len(skipped) < 2:
                if hvd.rank() == 0:
                    state.on_hosts_updated(time.time(), 2 if skipped else 1)
                try:
                    state.commit()
                except hvd.elastic.HostsUpdatedInterrupt as interrupt:
                    skipped.append(interrupt.skip_sync)
                    raise
            state.commit()

        state.register_reset_callbacks([lambda: resets.append(1)])
        hvd.elastic.run_fn(train, lambda: None)(state)
        assert len(resets) == 2 and state.batch == 0
        return skipped

    assert hvd.run_on_threads(body, 2) == [[False, True]] * 2


def test_threads_cannot_connect_again() -> None:
    def body() -> None:
        @hvd.elastic.run
        def train(state: hvd.elastic.State) -> None:
            hvd.allreduce(np.ones(1 + hvd.rank()))

        with pytest.raises(RankError, match="threads cannot connect again"):
            train(hvd.elastic.ArrayState(batch=0))

    hvd.run_on_threads(body, 2)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_ranks_have_equally_many_of_few_samples(count: int) -> None:
    """So that they make equally many calls, also where the samples are used more than twice."""

    def body() -> tuple[list[int], int]:
        sampler = hvd.elastic.ElasticSampler(count, shuffle=False)
        return list(sampler), len(sampler)

    found = hvd.run_on_threads(body, 8)
    each = min(count, 1)
    assert found == [([rank % count] * each if count else [], each) for rank in range(8)]


def test_the_sampler_divides_what_is_left() -> None:
    """The indices are those of Horovod's ElasticSampler, which shuffles with random.Random."""
    import random

    def body() -> list[list[int]]:
        sampler = hvd.elastic.ElasticSampler(range(10), seed=5)
        sampler.set_epoch(1)
        first = list(sampler)
        sampler.record_batch(0, 2)
        kept = sampler.state_dict()
        other = hvd.elastic.ElasticSampler(10, seed=5)
        other.load_state_dict(kept)
        assert len(other) == 2
        return [first, list(other)]

    order = list(range(10))
    random.Random(6).shuffle(order)
    found = hvd.run_on_threads(body, 3)
    for rank, (first, rest) in enumerate(found):
        assert first == (order + order[:2])[rank::3]
        assert rest == (order[6:] + order[6:8])[rank::3]
