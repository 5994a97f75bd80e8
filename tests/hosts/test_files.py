"""Hosts that share no folder: ranks fetch the files of a sharded model from the host that has it,
or each host shards the model for its own ranks."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from hosts.conftest import Cluster
from hosts.test_start import LAUNCH, MODELS, check, expected, finish  # noqa: F401  (a fixture)

PAR = "/tmp/own/model.par"
"""On each host another folder."""


@pytest.fixture(autouse=True)
def own_folders(cluster: Cluster) -> Iterator[None]:
    """Empty ones."""
    for host in cluster.hosts:
        host.run(["mkdir", "/tmp/own"])
    yield
    for host in cluster.hosts:
        host.run(["rm", "-rf", "/tmp/own"])


def launch(cluster: Cluster, hosts: str, name: str, *more: str) -> tuple[int, str, str]:
    options = ["--hosts", hosts, "--tls-dir", str(cluster.certificates)]
    run = ["run", PAR, "--inputs", "in.npz", "--outputs", name, *more]
    return finish(cluster, [*LAUNCH, *options, "--", *run])


def test_ranks_fetch_what_their_hosts_lack(
    cluster: Cluster,
    expected: np.ndarray,  # noqa: F811
) -> None:
    a, b, c = cluster.hosts
    a.run(["cp", "-r", f"{cluster.folder}/model.par", PAR])
    status, output, errors = launch(cluster, "a:2,b:1,c:1", "files.npz")
    assert (status, output) == (0, "logits: float32 4x16x512\n"), errors
    first, second, end = errors.splitlines()
    assert first.startswith(f"onnxpar: fetching 3 files of {PAR}, ")
    assert first.endswith("to rank 2 (host b) from ranks 0 and 1 (host a)")
    assert re.search(r"to rank 3 \(host c\) from ranks? [01 and]+ \(host a\)$", second)
    assert end.startswith("onnxpar: fetched ")
    check(cluster, "files.npz", expected)
    for rank, host in ((2, b), (3, c)):
        names = host.run(["ls", "-A", PAR]).split()
        own = [f"rank_{rank:04d}.onnx", f"rank_{rank:04d}.weights"]
        assert names == ["plan.json", *own, "shared.weights"]
        for name in names:
            digests = {h.run(["sha256sum", f"{PAR}/{name}"]) for h in (a, host)}
            assert len(digests) == 1
    assert launch(cluster, "a:2,b:1,c:1", "again.npz", "--verify")[2] == ""
    b.run(["sh", "-c", f"printf x | dd of={PAR}/rank_0002.weights conv=notrunc status=none"])
    status, output, errors = launch(cluster, "a:2,b:1,c:1", "damaged.npz", "--verify")
    assert (status, output) == (2, "")
    changed = f"rank 2 (host b) failed: {PAR}/rank_0002.weights has changed since it was written"
    assert changed in errors and errors.count(changed) == 1


def test_each_host_shards_for_its_own_ranks(
    cluster: Cluster,
    expected: np.ndarray,  # noqa: F811
) -> None:
    model = str(MODELS / "gpt2.dynamo.static.onnx")
    for host, ranks in zip(cluster.hosts, ("0,1", "2", "3"), strict=True):
        words = ["shard", model, "--devices", "4", "--ranks", ranks, "-o", PAR]
        host.run([sys.executable, "-m", "onnxpar", *words], cluster.environment)
    status, output, errors = launch(cluster, "a:2,b:1,c:1", "own.npz", "--verify")
    assert (status, output, errors) == (0, "logits: float32 4x16x512\n", "")
    check(cluster, "own.npz", expected)
    words = ["shard", model, "--mesh", "dp=2,tp=2", "--ranks", "2", "-o", PAR]
    cluster.hosts[1].run([sys.executable, "-m", "onnxpar", *words], cluster.environment)
    status, output, errors = launch(cluster, "a:2,b:1,c:1", "other.npz")
    assert (status, output) == (2, "")
    assert "on rank 0 (host a) and" in errors and "on rank 2 (host b)" in errors


def large(folder: Path) -> Path:
    """Two ranks with 300 MB of weights each, which no link carries at once."""
    rows = 600 << 10
    text = f"""<ir_version: 8, opset_import: ["" : 17]> m (float[4,{rows}] x) => (float[4,256] y)
    {{ y = MatMul(x, w) }}"""
    model = onnx.parser.parse_model(text)
    weight = np.zeros((rows, 256), np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    onnx.save(model, folder / "large.onnx", save_as_external_data=True)
    (folder / "large.yaml").write_text("{mesh: {tp: 2}, tensors: {w: [tp, null]}}")
    np.savez(folder / "large.npz", x=np.zeros((4, rows), np.float32))
    return folder / "large.onnx"


def test_a_host_that_is_lost_meanwhile(cluster: Cluster) -> None:
    """Both ends are named within the timeout, and nothing is left."""
    a, b, _ = cluster.hosts
    model = str(large(cluster.folder))
    strategy = ["--strategy", f"{cluster.folder}/large.yaml", "--search", "propagation"]
    shard = [
        sys.executable,
        "-m",
        "onnxpar",
        "shard",
        model,
        *strategy,
        "--for-any-host",
        "-o",
        PAR,
    ]
    a.run(shard, cluster.environment, timeout=200)
    options = ["--hosts", "a:1,b:1", "--insecure", "--"]
    run = ["run", PAR, "--inputs", f"{cluster.folder}/large.npz", "--timeout", "5"]
    job = a.start(
        [*LAUNCH, *options, *run], cluster.environment, cluster.folder, stdin=subprocess.DEVNULL
    )
    arrived = "ls /tmp/own/.onnxpar-fetch-*/rank_0001.weights"
    end = time.monotonic() + 100
    while subprocess.run(b.command(["sh", "-c", arrived]), capture_output=True).returncode:
        assert time.monotonic() < end and job.poll() is None, job.communicate()
    b.cut()
    try:
        _, errors = job.communicate(timeout=100)
    finally:
        b.mend()
    assert job.returncode and "rank 1" in errors, errors
    assert "rank_0001.weights from rank 0 (host a) to rank 1 (host b)" in errors, errors
    assert b.run(["sh", "-c", "ls /tmp/own"]) == ""
