"""Ranks on several hosts, started by `onnxpar launch` and by mpirun."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from hosts.conftest import Cluster

import onnxpar

MODELS = Path(__file__).parents[2] / "models"
LAUNCH = ["onnxpar", "launch"]
RUN = ["run", "model.par", "--inputs", "in.npz", "--outputs"]


@pytest.fixture(scope="module")
def expected(cluster: Cluster) -> np.ndarray:
    """What the unsplit model computes. Leaves it, split over 4 ranks, in the shared folder."""
    model = MODELS / "gpt2.dynamo.static.onnx"
    feeds = {
        "input_ids": np.arange(64).reshape(4, 16) % 50,
        "attention_mask": np.ones((4, 16), np.int64),
    }
    np.savez(cluster.folder / "in.npz", **feeds)
    onnxpar.shard(model, cluster.folder / "model.par", devices=4, preset="tensor-parallel")
    session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    (logits,) = session.run(["logits"], feeds)
    return np.asarray(logits)


def finish(cluster: Cluster, words: list[str], timeout: float = 240) -> tuple[int, str, str]:
    """The status, output and errors of a command on host a, in the shared folder."""
    process = cluster.hosts[0].start(
        words, cluster.environment, cluster.folder, stdin=subprocess.DEVNULL
    )
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, output, errors


def check(cluster: Cluster, name: str, expected: np.ndarray) -> None:
    logits = np.load(cluster.folder / name)["logits"]
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("hosts", ["a:2,b:2", "b:1,a:3", "b:2,c:2", "a:1,b:2,c:1"])
def test_launch(cluster: Cluster, expected: np.ndarray, hosts: str) -> None:
    """Rank 0 may be on another host than the launcher."""
    words = [*LAUNCH, "--hosts", hosts, "--tls-dir", str(cluster.certificates), "--", *RUN, "l.npz"]
    assert finish(cluster, words) == (0, "logits: float32 4x16x512\n", "")
    check(cluster, "l.npz", expected)


def test_mpirun(cluster: Cluster, expected: np.ndarray) -> None:
    """Plain, with a host file, and nothing else."""
    if shutil.which("mpirun") is None:
        pytest.skip("there is no mpirun")
    (cluster.folder / "hosts").write_text("a slots=2\nb slots=2\n")
    words = ["mpirun", "--allow-run-as-root", "-hostfile", "hosts", "-n", "4", "onnxpar", *RUN]
    for option in (["--insecure"], ["--tls-dir", str(cluster.certificates)]):
        assert finish(cluster, [*words, "m.npz", *option]) == (0, "logits: float32 4x16x512\n", "")
        check(cluster, "m.npz", expected)
    status, _, errors = finish(cluster, [*words, "m.npz"])
    assert status != 0
    assert "other hosts can reach 0.0.0.0, and connections would not be encrypted" in errors


SESSIONS = """
import numpy as np, onnxpar
feeds = dict(np.load("in.npz"))
def session():
    return onnxpar.InferenceSession("model.par", timeout=20)
found = []
for _ in range(3):
    with session() as one:
        found += one.run(None, feeds)
with session() as one:
    for _ in range(2):
        with session() as other:
            found += one.run(None, feeds) + other.run(None, feeds)
assert all((each == found[0]).all() for each in found) and len(found) == 7
np.savez("s.npz", logits=found[0])
"""


@pytest.mark.parametrize("launcher", ["launch", "mpirun"])
def test_sessions_one_after_another(
    cluster: Cluster, expected: np.ndarray, launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each finds its own ranks, and so do those that are open together."""
    if shutil.which("mpirun") is None:
        pytest.skip("there is no mpirun")
    (cluster.folder / "hosts").write_text("a slots=2\nb slots=2\n")
    words = [*LAUNCH, "--hostfile", "hosts", "--insecure", "--"]
    if launcher == "mpirun":
        words = ["mpirun", "--allow-run-as-root", "-hostfile", "hosts", "-n", "4"]
        words += ["-x", "ONNXPAR_INSECURE=1", "-x", "PYTHONPATH"]
        monkeypatch.setitem(cluster.environment, "PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    assert finish(cluster, [*words, sys.executable, "-c", SESSIONS]) == (0, "", "")
    check(cluster, "s.npz", expected)


def test_a_host_file(cluster: Cluster, expected: np.ndarray) -> None:
    (cluster.folder / "hosts").write_text("a slots=2\nb slots=2\n")
    words = [*LAUNCH, "--hostfile", "hosts", "--insecure", "--", *RUN, "f.npz"]
    assert finish(cluster, words)[0] == 0
    check(cluster, "f.npz", expected)


def test_programs_and_their_status(cluster: Cluster) -> None:
    """`python` is that of onnxpar."""
    program = (
        "import onnxpar, os, sys; print(os.uname().nodename);"
        "sys.exit(3 * int(os.environ['ONNXPAR_RANK']))"
    )
    words = [*LAUNCH, "--hosts", "a:1,b:1", "--", "python", "-c", program]
    status, output, errors = finish(cluster, words)
    assert (status, sorted(output.split())) == (3, ["a", "b"])
    assert errors == "onnxpar: rank 1 on host b ended first, with status 3\n"


def test_a_common_cause_is_told_once(cluster: Cluster, expected: np.ndarray) -> None:
    """With the rank and the host that it comes from."""
    damaged = cluster.folder / "damaged.par"
    shutil.copytree(cluster.folder / "model.par", damaged)
    file = damaged / "rank_0003.onnx"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    words = [*LAUNCH, "--hosts", "a:2,b:2", "--insecure", "--", "run", "damaged.par", *RUN[2:]]
    status, output, errors = finish(cluster, [*words, "x.npz"])
    assert (status, output) == (2, "")
    first, last = errors.splitlines()
    where = "the start of damaged.par: rank 3 (host b) failed: damaged.par/rank_0003.onnx"
    assert first.startswith(f"onnxpar: error: {where} has changed since it was written"), errors
    assert last == "onnxpar: rank 0 on host a ended first, with status 2"


def test_a_cause_of_one_host_names_it(cluster: Cluster, expected: np.ndarray) -> None:
    a, _, _ = cluster.hosts
    a.run(["cp", f"{cluster.folder}/in.npz", "/tmp/own.npz"])
    words = [*LAUNCH, "--hosts", "a:2,b:2", "--insecure", "--", "run", "model.par", "--inputs"]
    status, output, errors = finish(cluster, [*words, "/tmp/own.npz"])
    assert (status, output) == (2, "")
    for rank in (2, 3):
        assert f"onnxpar: error on rank {rank} (host b): there is no file /tmp/own.npz" in errors


def test_a_host_that_is_not_there(cluster: Cluster) -> None:
    words = [*LAUNCH, "--hosts", "a:2,nowhere:2", "--insecure", "--", *RUN, "x.npz"]
    status, output, errors = finish(cluster, words)
    assert (status, output) == (2, "")
    assert "host nowhere, for ranks 2 and 3, cannot be reached: " in errors
    assert not (cluster.folder / "x.npz").exists()


def test_the_secret_is_on_no_command_line(cluster: Cluster) -> None:
    """Nor do ranks of two launches have the same one."""
    program = (
        "import os, pathlib; key = os.environ['ONNXPAR_KEY'];"
        "lines = pathlib.Path('/proc').glob('[0-9]*/cmdline');"
        "print(key, any(key.encode() in line.read_bytes() for line in lines))"
    )
    words = [*LAUNCH, "--hosts", "a:1,b:1", "--", sys.executable, "-c", program]
    seen = set()
    for _ in range(2):
        status, output, _ = finish(cluster, words)
        assert status == 0
        keys, found = zip(*(line.split() for line in output.splitlines()), strict=True)
        assert found == ("False", "False")
        assert keys[0] == keys[1]
        assert len(keys[0]) == 32
        seen.add(keys[0])
    assert len(seen) == 2


@pytest.fixture
def sleeping(cluster: Cluster) -> Iterator[subprocess.Popen[str]]:
    """A launch whose ranks do nothing for a long time."""
    words = [*LAUNCH, "--hosts", "a:1,b:1", "--", "sh", "-c", "echo up; exec sleep 1234567"]
    process = cluster.hosts[0].start(
        words, cluster.environment, cluster.folder, stdin=subprocess.DEVNULL
    )
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["up\n"] * 2
    yield process
    process.kill()
    process.wait()


def asleep(cluster: Cluster) -> bool:
    found = subprocess.run(["pgrep", "-f", "sleep 1234567"], capture_output=True)
    return found.returncode == 0


def test_the_end_of_a_launcher_ends_all_ranks(
    cluster: Cluster, sleeping: subprocess.Popen[str]
) -> None:
    sleeping.kill()  # of nsenter's child, which is the launcher itself
    sleeping.wait()
    for _ in range(100):
        if not asleep(cluster):
            return
        subprocess.run(["sleep", "0.2"], check=True)
    raise AssertionError("ranks go on")


def test_an_interrupt_ends_all_ranks(cluster: Cluster, sleeping: subprocess.Popen[str]) -> None:
    sleeping.send_signal(2)
    assert sleeping.wait(30) == 130
    assert not asleep(cluster)
