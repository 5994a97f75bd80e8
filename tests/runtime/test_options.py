"""Session and run options, logs and shares of cores reach every rank's own session."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper
from runtime.bundles import Tensor, pids, write_par

from onnxpar.errors import InputError, RankError
from onnxpar.runtime import ranks
from onnxpar.runtime.cores import BINDINGS, Core, Share, own_cores, shares
from onnxpar.runtime.options import SessionSpec, run_options, run_spec
from onnxpar.runtime.session import InferenceSession
from onnxpar.runtime.threads import ThreadSession


@pytest.fixture
def doubling(tmp_path: Path) -> Path:
    """y = -(-x), which an optimizer removes."""
    return write_par(
        tmp_path / "model.par",
        "tp=2",
        [Tensor("x", (4,), ("tp",))],
        [Tensor("y", (4,), ("tp",))],
        lambda rank: [
            helper.make_node("Neg", ["x"], ["m"]),
            helper.make_node("Identity", ["m"], ["n"]),
            helper.make_node("Neg", ["n"], ["y"]),
        ],
    )


def ops(file: Path) -> list[str]:
    return [node.op_type for node in onnx.load(file).graph.node]


def test_session_options_reach_every_rank(doubling: Path, tmp_path: Path) -> None:
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "seen.onnx")
    options.enable_profiling = True
    options.profile_file_prefix = str(tmp_path / "profile")
    options.add_session_config_entry(
        "optimization.disable_specified_optimizers", "EliminateIdentity"
    )
    with InferenceSession(doubling, options, ["CPUExecutionProvider"]) as session:
        session.run(None, {"x": np.ones(4, np.float32)})
    for rank in range(2):
        assert ops(tmp_path / f"seen.rank{rank}.onnx") == ["Neg", "Identity", "Neg"]
        assert list(tmp_path.glob(f"profilerank{rank}_*.json"))


def test_optimization_level(doubling: Path, tmp_path: Path) -> None:
    for level, kept in (("ORT_DISABLE_ALL", True), ("ORT_ENABLE_ALL", False)):
        options = ort.SessionOptions()
        options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
        options.optimized_model_filepath = str(tmp_path / f"{level}.onnx")
        ThreadSession(doubling, options).close()
        assert ("Identity" in ops(tmp_path / f"{level}.rank1.onnx")) is kept


def test_config_may_name_any_key(doubling: Path) -> None:
    with pytest.raises(RankError, match=r"rank [01] failed"):
        InferenceSession(doubling, config={"session.load_model_format": "ORT"})


def test_every_settable_field_is_carried() -> None:
    options = ort.SessionOptions()
    options.enable_mem_pattern = False
    options.execution_mode = ort.ExecutionMode.ORT_PARALLEL
    options.inter_op_num_threads = 3
    options.log_severity_level = 3
    options.logid = "mine"
    options.use_deterministic_compute = True
    spec = SessionSpec.of(options, providers=[("CPUExecutionProvider", {"a": "1"})])
    again = SessionSpec.from_json(asdict(spec))
    assert again == spec
    target = ort.SessionOptions()
    again.apply(target, 0, 2, True)
    assert target.intra_op_num_threads == 2
    for name in dir(options):
        expected = getattr(options, name)
        if name.startswith("_") or callable(expected) or name == "intra_op_num_threads":
            continue
        if name == "profile_file_prefix":
            expected += "rank0_"
        assert getattr(target, name) == expected, name


def test_a_chosen_number_of_threads_stays() -> None:
    options, target = ort.SessionOptions(), ort.SessionOptions()
    options.intra_op_num_threads = 5
    SessionSpec.of(options).apply(target, 0, 2, False)
    assert target.intra_op_num_threads == 5
    assert target.get_session_config_entry("session.intra_op.allow_spinning") == "0"


def test_run_options_reach_every_rank(doubling: Path, tmp_path: Path) -> None:
    verbose = ort.SessionOptions()
    verbose.log_severity_level = 1
    options = ort.RunOptions()
    options.logid = "the-tag-of-this-run"
    with InferenceSession(doubling, verbose, log_dir=tmp_path / "log") as session:
        session.run(None, {"x": np.ones(4, np.float32)}, options)
    for rank in range(2):
        logs = (tmp_path / "log" / f"rank.{rank}").glob("*.log")
        assert "the-tag-of-this-run" in "".join(log.read_text() for log in logs)


def test_run_options_are_carried() -> None:
    options = ort.RunOptions()
    options.only_execute_path_to_fetches = True
    options.log_verbosity_level = 2
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    again = run_options(run_spec(options))
    assert again is not None
    assert again.only_execute_path_to_fetches
    assert again.log_verbosity_level == 2
    assert again.get_run_config_entry("memory.enable_memory_arena_shrinkage") == "cpu:0"
    default = run_options(run_spec(None))
    assert not default.only_execute_path_to_fetches and default.log_verbosity_level == 0


def machine(folder: Path, nodes: int, cores: int, hyperthreads: int) -> Path:
    """What Linux tells of a machine: so many nodes of so many cores; the second hardware threads of
    all cores follow the first ones."""
    total = nodes * cores
    for node in range(nodes):
        first = [f"{node * cores + total * i}-{(node + 1) * cores + total * i - 1}" for i in (0, 1)]
        at = folder / f"node/node{node}"
        at.mkdir(parents=True)
        (at / "cpulist").write_text(",".join(first[:hyperthreads]) + "\n")
    for thread in range(total * hyperthreads):
        at = folder / f"cpu/cpu{thread}/topology"
        at.mkdir(parents=True)
        siblings = [str(thread % total + total * i) for i in range(hyperthreads)]
        (at / "thread_siblings_list").write_text(",".join(siblings) + "\n")
    return folder


def plain(threads: Iterable[int]) -> list[Core]:
    return [Core(0, (thread,)) for thread in threads]


def test_shares_of_cores() -> None:
    assert shares(2, cores=plain(range(8))) == [
        Share((0, 1, 2, 3), 4, True),
        Share((4, 5, 6, 7), 4, True),
    ]
    assert shares(3, cores=plain(range(8))) == [
        Share((0, 1, 2), 3, True),
        Share((3, 4, 5), 3, True),
        Share((6, 7), 2, True),
    ]
    assert shares(2, cores=plain([4, 9])) == [Share((), 1, True)] * 2
    assert shares(3, cores=plain([4, 9])) == [Share((), 1, False)] * 3


def test_cores_of_linux(tmp_path: Path) -> None:
    system = machine(tmp_path, nodes=2, cores=2, hyperthreads=2)
    both = [Core(0, (0, 4)), Core(0, (1, 5)), Core(1, (2, 6)), Core(1, (3, 7))]
    assert own_cores(system, range(8)) == both
    assert own_cores(system, [1, 6, 7]) == [Core(0, (1,)), Core(1, (6,)), Core(1, (7,))]
    assert own_cores(tmp_path / "elsewhere", [3, 5]) == [Core(0, (3,)), Core(0, (5,))]


def test_ranks_stay_on_a_node(tmp_path: Path) -> None:
    """A thread for each core, and memory of one node."""
    cores = own_cores(machine(tmp_path, nodes=2, cores=2, hyperthreads=2), range(8))
    first, second = (0, 1, 4, 5), (2, 3, 6, 7)
    assert shares(2, cores=cores) == [Share(first, 2, True), Share(second, 2, True)]
    assert shares(4, cores=cores) == [Share(first, 1, True)] * 2 + [Share(second, 1, True)] * 2
    assert shares(8, cores=cores) == [Share(first, 1, True)] * 4 + [Share(second, 1, True)] * 4
    assert shares(9, cores=cores) == [Share((), 1, False)] * 9


def test_what_ranks_are_bound_to(tmp_path: Path) -> None:
    cores = own_cores(machine(tmp_path, nodes=2, cores=2, hyperthreads=1), range(4))
    bound = {bind: [s.cores for s in shares(2, bind, cores)] for bind in BINDINGS}
    assert bound == {"cores": [(0, 1), (2, 3)], "numa": [(0, 1), (2, 3)], "none": [(), ()]}
    bound = {bind: [s.cores for s in shares(3, bind, cores)] for bind in BINDINGS}
    assert bound["cores"] == [(0, 1), (2, 3), (2, 3)]
    assert bound["numa"] == [(0, 1), (2, 3), (2, 3)]
    bound = {bind: [s.cores for s in shares(2, bind, plain(range(4)))] for bind in BINDINGS}
    assert bound == {"cores": [(0, 1), (2, 3)], "numa": [(), ()], "none": [(), ()]}
    assert [s.threads for s in shares(2, "none", cores)] == [2, 2]


def test_threads_of_ranks(doubling: Path) -> None:
    """A pool of N threads has N - 1 of its own; all may use every core."""
    tasks = {}
    for threads in (1, 4):
        with InferenceSession(doubling, threads=threads, bind="none") as session:
            tasks[threads] = [len(os.listdir(f"/proc/{pid}/task")) for pid in pids(session)]
            for pid in pids(session):
                assert os.sched_getaffinity(pid) == os.sched_getaffinity(0)
    assert [b - a for a, b in zip(tasks[1], tasks[4], strict=True)] == [3, 3]


@pytest.mark.parametrize(
    ("given", "says"),
    [({"threads": 0}, "threads 0: give a whole number"), ({"bind": "core"}, "'core': give cores,")],
)
def test_wrong_cores(doubling: Path, given: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        InferenceSession(doubling, **given)


def test_ranks_are_bound_to_their_share(doubling: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, last = own_cores()[0].threads[0], own_cores()[-1].threads[-1]
    bound = [Share((first,), 1, True), Share((last,), 1, True)]
    monkeypatch.setattr(ranks, "shares", lambda size, bind: bound)
    with InferenceSession(doubling) as session:
        assert [os.sched_getaffinity(pid) for pid in pids(session)] == [{first}, {last}]
