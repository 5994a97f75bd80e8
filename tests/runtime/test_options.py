"""Session and run options, logs and shares of cores reach every rank's own session."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper
from runtime.bundles import Tensor, pids, write_par

from onnxpar.base.errors import InputError, RankError
from onnxpar.runtime.ranks import ranks
from onnxpar.runtime.ranks.cores import Share, own_cores
from onnxpar.runtime.session.options import SessionSpec, run_options, run_spec
from onnxpar.runtime.session.session import InferenceSession
from onnxpar.runtime.session.threads import ThreadSession

pytestmark = pytest.mark.processes


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


@pytest.mark.slow
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
    [
        ({"threads": 0}, "threads 0: give a whole number"),
        ({"bind": "core"}, "'core': give cores,"),
        ({"ranks_per_numa": 0}, "ranks_per_numa 0: give a whole number"),
        ({"ranks_per_numa": 2, "bind": "none"}, "bind 'none' binds no rank to a node"),
    ],
)
def test_wrong_cores(doubling: Path, given: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        InferenceSession(doubling, **given)


def test_ranks_are_bound_to_their_share(doubling: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, last = own_cores()[0].threads[0], own_cores()[-1].threads[-1]
    bound = [Share((first,), 1, True), Share((last,), 1, True)]
    monkeypatch.setattr(ranks, "shares_of_replica", lambda *given: bound)
    with InferenceSession(doubling) as session:
        assert [os.sched_getaffinity(pid) for pid in pids(session)] == [{first}, {last}]
