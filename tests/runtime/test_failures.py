"""Whatever happens to a rank or the session's process: an error that names it, and nobody left."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper
from runtime.bundles import Tensor, all_reduce, is_alive, k_split, pids, wait_until, write_par

from onnxpar.base.errors import RankError, RunError
from onnxpar.compiler.plan import write_plan
from onnxpar.load import rewrites as model
from onnxpar.planner import sharder
from onnxpar.planner.options import Options
from onnxpar.runtime.ranks import rank_process
from onnxpar.runtime.ranks.processes import Processes
from onnxpar.runtime.ranks.rank_failure import is_damaged, load_text
from onnxpar.runtime.session.bundle import Bundle
from onnxpar.runtime.session.session import InferenceSession, Session
from onnxpar.runtime.session.threads import ThreadSession

pytestmark = [pytest.mark.usefixtures("medium"), pytest.mark.processes]
TESTS = Path(__file__).parent.parent


@pytest.fixture
def session(tmp_path: Path, x: np.ndarray) -> Iterator[InferenceSession]:
    """Three ranks that have run once."""
    par = k_split(tmp_path / "model.par", ranks=3)
    with InferenceSession(par) as session:
        session.run(None, {"x": x})
        yield session


def failure(session: Session, x: np.ndarray) -> tuple[str, float]:
    """The text of the RankError that a run raises, and after how many seconds."""
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        session.run(None, {"x": x})
    return str(caught.value), time.monotonic() - start


@pytest.mark.matrix
@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_killed_between_runs(session: InferenceSession, x: np.ndarray, rank: int) -> None:
    ranks = pids(session)
    os.kill(ranks[rank], signal.SIGKILL)
    text, seconds = failure(session, x)
    assert re.match(rf"run 2 of .*: rank {rank} was killed by SIGKILL \(signal 9\)", text)
    assert seconds < 5
    assert not any(map(is_alive, ranks))
    text, _ = failure(session, x)
    assert re.match(rf"this session is closed: run 2 of .*: rank {rank} was killed", text)


@pytest.mark.slow
def test_a_rank_killed_in_a_collective(session: InferenceSession, x: np.ndarray) -> None:
    victim = pids(session)[1]
    os.kill(victim, signal.SIGSTOP)  # so that the others are in the collective when it dies
    timer = threading.Timer(0.3, os.kill, (victim, signal.SIGKILL))
    timer.start()
    text, seconds = failure(session, x)
    timer.join()
    assert "rank 1 was killed by SIGKILL" in text
    assert re.search(r"\n  rank 0: AllReduce 'y' .*rank 1", text)
    assert re.search(r"\n  rank 2: AllReduce 'y' .*rank 1", text)
    assert seconds < 5


ANSWERS_AND_ENDS = """
import os, socket, sys, time
_, work, control = map(int, sys.argv[1:4])
wire = Wire(socket.socket(fileno=work))
message = wire.receive()
if message["answers"]:
    wire.send({})
    wire.close()
    os.close(control)
    time.sleep(1.5)
    os.kill(os.getpid(), 9)
time.sleep(60)
"""


@pytest.mark.slow
def test_a_rank_killed_after_its_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While another one still computes; and its exit code is there long after its sockets close."""
    boot = f"from onnxpar.runtime.ranks.wire import Wire\n{ANSWERS_AND_ENDS}"
    monkeypatch.setattr(rank_process, "BOOT", boot)
    ranks = Processes(tmp_path, 2, 60.0, None)
    with pytest.raises(RankError, match=r"rank 1 was killed by SIGKILL \(signal 9\)"):
        ranks.call([{"answers": False}, {"answers": True}], "run 1")


@pytest.mark.slow
def test_a_stopped_rank(session: InferenceSession, x: np.ndarray) -> None:
    ranks = pids(session)
    session._ranks._processes._timeout = 3
    os.kill(ranks[2], signal.SIGSTOP)
    text, seconds = failure(session, x)
    assert "rank 2 is stopped by a signal" in text
    assert re.search(r"\n  rank 0: AllReduce 'y' ", text)
    assert seconds < 3
    assert not any(map(is_alive, ranks))


@pytest.mark.slow
def test_a_rank_stopped_for_a_moment(session: InferenceSession, x: np.ndarray) -> None:
    victim = pids(session)[2]
    os.kill(victim, signal.SIGSTOP)
    threading.Timer(0.5, os.kill, (victim, signal.SIGCONT)).start()
    session.run(None, {"x": x})


@pytest.mark.slow
def test_a_rank_that_stops_answering(session: InferenceSession, x: np.ndarray) -> None:
    """Its process runs, but nothing in it does: here because its messages go elsewhere."""
    processes = session._ranks._processes
    processes._timeout, processes._tick = 1, 0.1
    rank = processes.ranks[1]
    rank.control.send = lambda message: None
    rank.work.send = lambda message: None
    session._ranks._last = None  # a run again would have no message
    text, seconds = failure(session, x)
    assert "rank 1 has not answered for 1." in text
    assert re.search(r"\n  rank 0: AllReduce 'y' ", text)
    assert seconds < 5


@pytest.mark.slow
def test_a_rank_that_computes_for_long(tmp_path: Path) -> None:
    """It is busy for longer than the timeout, and answers pings meanwhile."""
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["on"]), helper.make_node("Sin", ["a"], ["b"])],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("a", TensorProto.FLOAT, [1]),
        ],
        [
            helper.make_tensor_value_info("on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("b", TensorProto.FLOAT, [1]),
        ],
    )
    par = write_par(
        tmp_path,
        "tp=2",
        [Tensor("n", (), None, "int64"), Tensor("x", (1,))],
        [Tensor("y", (1,))],
        lambda rank: [helper.make_node("Loop", ["n", "", "x"], ["y"], body=body)],
    )
    x = np.ones(1, np.float32)
    with InferenceSession(par) as session:
        start = time.monotonic()
        session.run(None, {"n": np.array(20_000), "x": x})
        seconds = (time.monotonic() - start) / 20_000
        session._ranks._processes._timeout = 1
        session._ranks._processes._tick = 0.1
        turns, busy = int(2 / seconds), 0.0
        while busy <= 1:  # the first runs may have been slower than the machine is now
            start = time.monotonic()
            session.run(None, {"n": np.array(turns), "x": x})
            turns, busy = 2 * turns, time.monotonic() - start


def test_a_rank_that_exits(session: InferenceSession, x: np.ndarray) -> None:
    os.kill(pids(session)[0], signal.SIGABRT)
    text, _ = failure(session, x)
    assert "rank 0 was killed by SIGABRT" in text


@pytest.mark.slow
def test_a_new_session_after_a_failure(session: InferenceSession, x: np.ndarray) -> None:
    os.kill(pids(session)[0], signal.SIGKILL)
    failure(session, x)
    with InferenceSession(session._bundle.path) as again:
        np.testing.assert_array_equal(again.run(["d"], {"x": x})[0], x + x)


def out_of_bounds(folder: Path) -> Path:
    """Ranks 0 and 2 sum x; rank 1 looks an index up first, which fails for 9."""

    def nodes(rank: int) -> list:
        gather = [
            helper.make_node("Constant", [], ["table"], value_floats=[1.0, 2.0]),
            helper.make_node("Gather", ["table", "at"], ["found"], name="look_up"),
            helper.make_node("Add", ["x", "found"], ["z"]),
        ]
        local = gather if rank == 1 else [helper.make_node("Identity", ["x"], ["z"])]
        return [*local, *all_reduce("z", "y")]

    inputs = [Tensor("x", (1,)), Tensor("at", (1,), None, "int64")]
    return write_par(folder, "tp=3", inputs, [Tensor("y", (1,))], nodes)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", [ThreadSession, InferenceSession])
def test_a_run_that_fails_on_one_rank(kind: Callable[..., Session], tmp_path: Path) -> None:
    session = kind(out_of_bounds(tmp_path), timeout=30)
    x, good, bad = np.ones(1, np.float32), np.array([1]), np.array([9])
    assert session.run(None, {"x": x, "at": good})[0] == 5
    start = time.monotonic()
    for _ in range(3):
        with pytest.raises(RunError, match=r"rank 1 failed: Gather 'look_up': .*out of data bound"):
            session.run(None, {"x": x, "at": bad})
        assert session.run(None, {"x": x, "at": good})[0] == 5
    assert time.monotonic() - start < 5


@pytest.mark.matrix
@pytest.mark.parametrize("kind", [ThreadSession, InferenceSession])
def test_a_rank_that_does_not_load(kind: Callable[..., Session], par: Path) -> None:
    (par / "rank_0001.onnx").write_bytes(b"no model")
    write_plan(par, Bundle.load(par).data)
    start = time.monotonic()
    with pytest.raises(
        RankError, match=r"(?s)the start.*rank 1 failed: .*(?i:protobuf).*is damaged"
    ):
        kind(par, timeout=30)
    assert time.monotonic() - start < 10


BRANCHES = """<ir_version: 8, opset_import: ["" : 17]>
m (float[n,4] x, bool c) => (float[p,q] y) { y = If(c) <
  then_branch = a () => (float[p,q] u) { t = Transpose(x)  [product] u = MatMul(t, t) },
  else_branch = b () => (float[p,q] v) { v = Relu(x) }> }"""


def test_a_node_that_onnxruntime_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operands inside of a branch that do not fit are no damage of the folder."""
    monkeypatch.setattr(model, "check_bound", lambda *_: None)  # would refuse it before
    onnx.save(onnx.parser.parse_model(BRANCHES), tmp_path / "m.onnx")
    sharder.shard(tmp_path / "m.onnx", tmp_path / "m.par", Options(devices=2, dims={"n": 3}))
    with pytest.raises(RankError) as caught:
        ThreadSession(tmp_path / "m.par", timeout=30)
    text = str(caught.value)
    assert "onnxruntime does not load MatMul 'product': [ShapeInferenceError] Incompat" in text
    assert "damaged" not in text


@pytest.mark.parametrize("size", [None, 0, 100])
def test_weights_that_are_missing_or_cut_off(size: int | None, tmp_path: Path) -> None:
    file = tmp_path / "rank_0000.onnx"
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        m (float[2,64] x) => (float[2,64] y) { y = Add(x, w) }"""
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(64, np.float32), "w"))
    onnx.save(model, file, save_as_external_data=True, location="w.bin", size_threshold=0)
    assert not is_damaged(file)
    if size is None:
        (tmp_path / "w.bin").unlink()
    else:
        os.truncate(tmp_path / "w.bin", size)
    with pytest.raises(Exception, match=r"w\.bin|w ") as caught:
        ort.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    assert "the folder is damaged: write it again" in load_text(caught.value, file)


def test_errors_quote_the_log(par: Path, tmp_path: Path, x: np.ndarray) -> None:
    with InferenceSession(par, log_dir=tmp_path / "log") as session:
        session.run(None, {"x": x})
        with (tmp_path / "log" / "rank.1" / "stderr.log").open("a") as log:
            log.write("its last words\n")
        os.kill(pids(session)[1], signal.SIGKILL)
        text, _ = failure(session, x)
    assert re.search(r"its log \(.*/log/rank\.1\) ends with:\n(.*\n)*its last words", text)


def test_an_interrupted_run_closes_the_session(
    session: InferenceSession, x: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    ranks = pids(session)
    monkeypatch.setattr(session._ranks._processes._bell, "wait_for_answers", interrupt)
    with pytest.raises(KeyboardInterrupt):
        session.run(None, {"x": x})
    assert not any(map(is_alive, ranks))
    text, _ = failure(session, x)
    assert "this session is closed: run 2 failed" in text


OWNER = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from runtime.bundles import pids
from onnxpar.runtime.session.session import InferenceSession
session = InferenceSession(sys.argv[1])
print(*pids(session), flush=True)
{end}
"""


def start_owner(par: Path, end: str) -> tuple[subprocess.Popen[str], list[int]]:
    """Another process with a session; and that session's ranks."""
    script = OWNER.format(end=end)
    owner = subprocess.Popen(
        [sys.executable, "-c", script, str(par), str(TESTS)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=par.parent,  # not the checkout, which Python would import from
    )
    assert owner.stdout is not None
    return owner, [int(pid) for pid in owner.stdout.readline().split()]


@pytest.mark.matrix
@pytest.mark.parametrize("end", ["kill", "kill while a rank is stopped", "terminate", "exit"])
def test_ranks_end_with_the_session_process(par: Path, end: str) -> None:
    leave = "time.sleep(60)" if end != "exit" else "import os; os._exit(3)"
    owner, ranks = start_owner(par, leave)
    with owner:
        assert len(ranks) == 2
        if "stopped" in end:
            os.kill(ranks[0], signal.SIGSTOP)
        if end.startswith("kill"):
            owner.kill()
        elif end == "terminate":
            owner.terminate()
        owner.wait(10)
        assert wait_until(lambda: not any(map(is_alive, ranks)))


@pytest.mark.slow
def test_the_end_of_a_script_is_quiet(par: Path) -> None:
    """No traceback, no warning of a resource tracker, no rank that is left."""
    script = OWNER.format(end="")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-X", "dev", "-c", script, str(par), str(TESTS)],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
        cwd=par.parent,
    )
    assert done.stderr == ""
    assert not any(is_alive(int(pid)) for pid in done.stdout.split())


@pytest.mark.slow
def test_a_forked_process_cannot_use_the_session(session: InferenceSession, x: np.ndarray) -> None:
    child = os.fork()
    if not child:
        try:
            session.run(None, {"x": x})
        except RankError as error:
            session.close()
            os._exit(0 if "make one in process" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    session.run(None, {"x": x})


@pytest.mark.slow
def test_nothing_is_left(par: Path, x: np.ndarray) -> None:
    """No process, not even a zombie, no descriptor, no shared memory, no thread."""

    def held() -> tuple[set[str], int, int]:
        me = Path("/proc/self")
        children = (me / f"task/{os.getpid()}/children").read_text().split()
        return set(children), len(list((me / "fd").iterdir())), threading.active_count()

    def in_shared_memory() -> set[str]:
        """What is there but for other tests, which may run beside this one."""
        return {name for name in os.listdir("/dev/shm") if not name.startswith("peer-")}

    def is_left() -> bool:
        """True if there is more than before; what earlier tests had may end meanwhile."""
        return any(not now <= then for now, then in zip(held(), before, strict=True))

    gc.collect()
    idle = threading.active_count()
    with InferenceSession(par) as session:
        session.run(None, {"x": x})
    assert wait_until(lambda: threading.active_count() <= idle)
    before, shared = held(), in_shared_memory()
    for kill in (False, True):
        session = InferenceSession(par)
        session.run(None, {"x": x})
        if kill:
            os.kill(pids(session)[1], signal.SIGKILL)
            failure(session, x)
        session.close()
    assert wait_until(lambda: not is_left(), 20), (before, held())
    assert in_shared_memory() == shared
