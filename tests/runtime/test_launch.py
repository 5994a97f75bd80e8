"""Processes that are ranks already: under mpirun, or by the environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from agreement import options
from decoders import Decoder, build, empty_caches, feeds_of, pairs_of
from free_ports import server_before_a_free_port
from onnx import TensorProto, helper
from runtime.bad_requests import STRATEGIES, decoder
from runtime.bundles import Tensor, all_reduce, write_par

import onnxpar
from onnxpar.base.errors import RankError
from onnxpar.planner import sharder
from onnxpar.runtime.launch import launched_rank as launched
from onnxpar.runtime.launch.launch import Launched, bind_address, launched_rank
from onnxpar.runtime.session.threads import ThreadSession

TESTS = Path(__file__).parent.parent

SCRIPT = """
import os, sys
import numpy as np
from onnxpar.base.errors import RankError
from onnxpar.runtime.session.session import InferenceSession
x = np.load(sys.argv[2])
try:
    for _ in range(2):
        with InferenceSession(sys.argv[1], timeout=20, log_dir=(sys.argv[3:] or [None])[0]) as s:
            for _ in range(3):
                outputs = s.run(None, {"x": x, "x2": x})
    from onnxpar.runtime.launch.launch import launched_rank
    rank = str(launched_rank().rank)
    np.savez(f"{sys.argv[2]}.{rank}.npz", *outputs)
    print("done", rank)
    os.system("echo from a child of rank " + rank)
except RankError as error:
    print("RankError:", error)
"""


@pytest.fixture
def four(tmp_path: Path) -> Path:
    return spread(tmp_path / "model.par", 4)


def spread(folder: Path, ranks: int) -> Path:
    """-x split by rows, x split by columns in float64, and their whole sum over the ranks."""
    rows, columns = ("tp", None), (None, "tp")
    return write_par(
        folder,
        f"tp={ranks}",
        [Tensor("x", (4, 7), rows), Tensor("x2", (4, 7), columns)],
        [
            Tensor("a", (4, 7), rows),
            Tensor("b", (4, 7), columns, "float64"),
            Tensor("sum", (1, 1)),
        ],
        lambda rank: [
            helper.make_node("Neg", ["x"], ["a"]),
            helper.make_node("Cast", ["x2"], ["b"], to=TensorProto.DOUBLE),
            helper.make_node("ReduceSum", ["x"], ["part"]),
            *all_reduce("part", "sum"),
        ],
    )


def save(x: np.ndarray, folder: Path) -> Path:
    np.save(folder / "x.npy", x)
    (folder / "script.py").write_text(SCRIPT)
    return folder / "x.npy"


def check_results(file: Path, x: np.ndarray, ranks: int) -> None:
    for rank in range(ranks):
        with np.load(f"{file}.{rank}.npz") as found:
            np.testing.assert_array_equal(found["arr_0"], -x)
            np.testing.assert_array_equal(found["arr_1"], x.astype(np.float64))
            np.testing.assert_allclose(found["arr_2"], [[x.sum()]], rtol=1e-5)


def mpirun(n: int, *arguments: object) -> str:
    command = shutil.which("mpirun")
    if command is None:
        pytest.skip("there is no mpirun")
    options = ["--allow-run-as-root", "--oversubscribe", "-n", str(n), sys.executable]
    done = subprocess.run(
        [command, *options, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


@pytest.mark.slow
def test_mpirun(four: Path, tmp_path: Path, x: np.ndarray) -> None:
    file = save(x, tmp_path)
    out = mpirun(4, tmp_path / "script.py", four, file, tmp_path / "log")
    check_results(file, x, 4)
    assert out == ""
    for rank in range(4):
        log = (tmp_path / "log" / f"rank.{rank}" / "stdout.log").read_text()
        assert sorted(log.splitlines()) == [f"done {rank}", f"from a child of rank {rank}"]


DECODE = """
import sys
import numpy as np
from onnxpar.runtime.session.session import InferenceSession
request = dict(np.load(sys.argv[2]))
caches = {n: a for n, a in request.items() if n.startswith("past")}
found = []
with InferenceSession(sys.argv[1], timeout=20) as s:
    for _ in range(2):
        s.states.reset()
        ids, before, fed = request["ids"], 0, caches
        for step in range(32):
            total = before + ids.shape[1]
            feeds = {"input_ids": ids, "attention_mask": np.ones((1, total), int), **fed}
            (logits,) = s.run(["logits"], feeds, keep_states=True)
            found.append(logits[:, -1])
            ids, before, fed = logits[:, -1:].argmax(-1), total, {}
from onnxpar.runtime.launch.launch import launched_rank
np.save(f"{sys.argv[2]}.{launched_rank().rank}.npy", np.stack(found))
"""


@pytest.mark.slow
def test_a_decoder_under_mpirun(tmp_path: Path) -> None:
    """Two requests of 32 tokens each; the caches stay on the ranks, and the second starts anew."""
    model = build(Decoder("GroupQueryAttention"))
    onnx.save(model, tmp_path / "decoder.onnx")
    caches = empty_caches(Decoder("GroupQueryAttention"), model, 1)
    ids = np.array([[3, 1, 4, 1, 5]])
    np.savez(tmp_path / "request.npz", ids=ids, **caches)
    (tmp_path / "decode.py").write_text(DECODE)
    sharder.shard(tmp_path / "decoder.onnx", tmp_path / "m.par", options("tensor-parallel 3"))
    mpirun(3, tmp_path / "decode.py", tmp_path / "m.par", tmp_path / "request.npz")
    whole = ort.InferenceSession(str(tmp_path / "decoder.onnx"), None, ["CPUExecutionProvider"])
    names = ["logits", *pairs_of(model).values()]
    wanted: list[np.ndarray] = []
    before = 0
    for _ in range(32):
        feeds = feeds_of(Decoder("GroupQueryAttention"), model, ids, before)
        logits, *after = whole.run(names, feeds | caches)
        wanted.append(logits[:, -1])
        caches = dict(zip(pairs_of(model), after, strict=True))
        ids, before = logits[:, -1:].argmax(-1), before + ids.shape[1]
    for rank in range(3):
        have = np.load(tmp_path / f"request.npz.{rank}.npy")
        np.testing.assert_allclose(have, np.stack(wanted * 2), atol=1e-5 * np.abs(wanted).max())


@pytest.mark.slow
def test_mpirun_with_another_number_of_processes(four: Path, tmp_path: Path, x: np.ndarray) -> None:
    out = mpirun(3, tmp_path / "script.py", four, save(x, tmp_path))
    assert out.count("has 4 ranks, but 3 processes were started; start 4, as with mpirun -n") == 3


@pytest.mark.slow
def test_ranks_by_the_environment(tmp_path: Path, x: np.ndarray) -> None:
    par, file = spread(tmp_path / "model.par", 2), save(x, tmp_path)
    environment = {
        **os.environ,
        "ONNXPAR_WORLD_SIZE": "2",
        "ONNXPAR_STORE": f"file:{tmp_path}/store",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, tmp_path / "script.py", par, file],
            env={**environment, "ONNXPAR_RANK": str(rank)},
            stdout=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        with rank:
            assert rank.wait(60) == 0
    check_results(file, x, 2)


BAD_REQUESTS = """
import os, sys
import numpy as np
from onnxpar.base.errors import OnnxparError
from onnxpar.runtime.session.session import InferenceSession
rank = os.environ["ONNXPAR_RANK"]
with InferenceSession(sys.argv[1], timeout=30) as session:
    session.states.write("s", np.zeros((4, 1, 8), np.float32))
    for number, row in enumerate((None, 3, None, 0, None)):
        ids = np.arange(4)[:, None] + number
        if row is None:
            y = session.run(["y"], {"ids": ids}, keep_states=True)[0]
            print(rank, number, float(np.abs(y).sum()))
            continue
        ids[row] = 1000
        try:
            session.run(None, {"ids": ids}, keep_states=True)
        except OnnxparError as error:
            print(rank, number, type(error).__name__, error)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("medium")
@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_bad_requests(tmp_path: Path, strategy: str) -> None:
    """All processes get the same error, also those whose part has been computed, and go on."""
    (tmp_path / "s.yaml").write_text(STRATEGIES[strategy])
    par, script = tmp_path / "m.par", tmp_path / "script.py"
    states = [("s", "next")]
    onnxpar.shard(decoder(tmp_path), par, strategy=tmp_path / "s.yaml", states=states)
    script.write_text(BAD_REQUESTS)
    common = {"ONNXPAR_WORLD_SIZE": "2", "ONNXPAR_STORE": f"file:{tmp_path}/store"}
    ranks = [
        subprocess.Popen(
            [sys.executable, script, par],
            env={**os.environ, **common, "ONNXPAR_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    told = [rank.communicate(timeout=60)[0].splitlines() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert [line.partition(" ")[2] for line in told[0]] == [
        line.partition(" ")[2] for line in told[1]
    ]
    assert len(told[0]) == 5
    assert told[0][1].startswith("0 1 InputError input 'ids': index 1000 at [3, 0] is out of")
    assert told[0][3].startswith("0 3 InputError input 'ids': index 1000 at [0, 0] is out of")
    with ThreadSession(par) as session:
        session.states.write("s", np.zeros((4, 1, 8), np.float32))
        for number in (0, 2, 4):
            ids = np.arange(4)[:, None] + number
            y = session.run(["y"], {"ids": ids}, keep_states=True)[0]
            assert told[0][number] == f"0 {number} {float(np.abs(y).sum())}"


def start(par: Path, file: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """A rank of these variables alone."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "SLURM_"))}
    script = file.parent / "script.py"
    return subprocess.Popen([sys.executable, script, par, file], env={**kept, **environment})


def slurm(rank: int, job: int, size: int = 2) -> dict[str, str]:
    """What srun sets on one host."""
    return {
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_NUM_NODES": "1",
    }


def torchrun(rank: int, port: int, size: int = 2) -> dict[str, str]:
    """What torchrun sets on one host."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [slurm, torchrun])
def test_ranks_of_other_launchers(
    tmp_path: Path, x: np.ndarray, launcher: Callable[[int, int], dict[str, str]]
) -> None:
    """While a store of torch's own listens at its port."""
    par, file = spread(tmp_path / "model.par", 2), save(x, tmp_path)
    with server_before_a_free_port() as taken:
        port = taken.getsockname()[1]
        ranks = [start(par, file, launcher(rank, port)) for rank in range(2)]
        assert [rank.wait(60) for rank in ranks] == [0, 0]
    check_results(file, x, 2)


def test_what_other_launchers_say() -> None:
    assert launched_rank(slurm(1, 7)) == Launched(1, 2, 2, "job:slurm-7.0")
    assert launched_rank(torchrun(0, 29500)) == Launched(0, 2, 2, "job:torchrun-29500")
    both = {**slurm(1, 7), **torchrun(1, 29500)}
    assert launched_rank(both) == Launched(1, 2, 2, "job:torchrun-29500")
    tasks = {**slurm(1, 7), "SLURM_STEP_NUM_TASKS": "", "SLURM_NTASKS": "2"}
    assert launched_rank(tasks) == launched_rank(slurm(1, 7))
    batch_script = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
    assert launched_rank(batch_script) is None
    assert launched_rank(slurm(0, 7, size=1)) is None
    assert launched_rank({"RANK": "1"}) is None
    two_hosts = {**slurm(0, 7, size=4), "SLURM_STEP_NUM_NODES": "2"}
    with pytest.raises(RankError, match="set ONNXPAR_STORE"):
        launched_rank(two_hosts)
    found = launched_rank({**two_hosts, "ONNXPAR_STORE": "tcp://node1:5000"})
    assert found == Launched(0, 4, 2, "tcp://node1:5000", "")


def test_torchrun_over_several_hosts() -> None:
    many = {**torchrun(1, 29500, size=4), "MASTER_ADDR": "node1", "LOCAL_WORLD_SIZE": "2"}
    assert launched_rank(many) == Launched(1, 4, 2, "tcp://node1:29501#29500", "")
    one = {**many, "LOCAL_WORLD_SIZE": "4"}
    assert launched_rank(one) == Launched(1, 4, 4, "job:torchrun-29500")
    by_hand = {k: v for k, v in many.items() if k != "LOCAL_WORLD_SIZE"}
    assert launched_rank(by_hand) == Launched(1, 4, 4, "tcp://node1:29501#29500", "")


def test_launchers_that_contradict_each_other() -> None:
    both = {**slurm(0, 7), **torchrun(1, 29500, size=4)}
    message = (
        "SLURM_PROCID=0, SLURM_STEP_NUM_TASKS=2 and RANK=1, WORLD_SIZE=4 contradict each other"
    )
    with pytest.raises(RankError, match=message):
        launched_rank(both)
    own = {"ONNXPAR_RANK": "3", "ONNXPAR_WORLD_SIZE": "4"}
    assert launched_rank({**both, **own}) == Launched(3, 4, 4, "job:torchrun-29500")


def test_what_the_environment_says() -> None:
    assert launched_rank({}) is None
    ours = {"ONNXPAR_RANK": "1", "ONNXPAR_WORLD_SIZE": "2", "ONNXPAR_STORE": "tcp://h:1"}
    assert launched_rank(ours) == Launched(1, 2, 2, "tcp://h:1", "")
    mpi = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}
    one_host = {**mpi, "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_SERVER_TMPDIR": "/job"}
    assert launched_rank(one_host) == Launched(0, 4, 4, "file:/job/onnxpar")
    assert launched_rank({**one_host, **ours}) == Launched(1, 2, 4, "tcp://h:1", "")
    two_hosts = {**one_host, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    found = launched_rank({**two_hosts, "PMIX_NAMESPACE": "12"})
    assert found == Launched(0, 4, 2, "pmix:", "")
    near = launched_rank({**two_hosts, "PMIX_NAMESPACE": "12", "ONNXPAR_BIND": "eth1"})
    assert near == Launched(0, 4, 2, "pmix:", "eth1")
    with pytest.raises(RankError, match="set ONNXPAR_STORE"):
        launched_rank(two_hosts)
    with pytest.raises(RankError, match="rank 3 of an unknown number; set ONNXPAR_WORLD_SIZE"):
        launched_rank({"ONNXPAR_RANK": "3"})
    with pytest.raises(RankError, match="ONNXPAR_RANK='x' in the environment is not a number"):
        launched_rank({"ONNXPAR_RANK": "x"})


def test_where_ranks_listen() -> None:
    assert bind_address({}) == "127.0.0.1"
    assert bind_address({"ONNXPAR_BIND": "10.0.0.7"}) == "10.0.0.7"


@pytest.mark.slow
def test_an_error_reaches_the_terminal(four: Path, tmp_path: Path) -> None:
    """Though all that the ranks write goes to their logs."""
    command = shutil.which("mpirun")
    if command is None:
        pytest.skip("there is no mpirun")
    run = ["-m", "onnxpar", "run", str(four), "--inputs", "none.npz"]
    done = subprocess.run(
        [command, "--allow-run-as-root", "--oversubscribe", "-n", "4", sys.executable, *run],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert done.stderr.count("onnxpar: error: there is no file none.npz") == 1
    logs = [log.read_text() for log in (tmp_path / "log").glob("rank.*/stderr.log")]
    written = [log for log in logs if log]  # mpirun ends the others once the first has failed
    assert written
    assert all("there is no file none.npz" in log.splitlines()[0] for log in written)
    assert "Traceback" not in "".join(written)


@pytest.mark.parametrize("packed", [b"x", zlib.compress(b"[]")[:-1], zlib.compress(bytes(2000))])
def test_a_record_of_another_rank_is_bounded(
    packed: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launched, "_LONGEST_RECORD", 1000)
    assert launched._unpacked(zlib.compress(b"[]")) == b"[]"
    with pytest.raises(RankError, match="the record of a rank"):
        launched._unpacked(packed)
