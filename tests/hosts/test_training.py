"""Training on several hosts, and on others from its checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hosts.conftest import Cluster
from hosts.test_start import LAUNCH, finish

import onnxpar
import onnxpar.training

MODELS = Path(__file__).parents[2] / "models"
TRAIN = ["--data", "train.npz", "--lr", "1e-3", "--epochs"]


@pytest.fixture(scope="module")
def step(cluster: Cluster) -> None:
    """A training step over 4 ranks, and its data, in the shared folder."""
    ids = np.random.default_rng(0).integers(0, 48, (32, 16))
    np.savez(
        cluster.folder / "train.npz", input_ids=ids, attention_mask=np.ones_like(ids), labels=ids
    )
    model = MODELS / "gpt2.legacy.training.onnx"
    onnxpar.training.grad(
        model, cluster.folder / "step.onnx", loss="softmax-cross-entropy", optimizer="adamw"
    )
    onnxpar.shard(
        cluster.folder / "step.onnx", cluster.folder / "step.par", devices=4, preset="zero3"
    )


def losses(log: Path) -> dict[int, float]:
    """The loss of each step of a run with this folder for logs."""
    lines = (log / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return {each["step"]: each["loss"] for each in found if "loss" in each}


@pytest.fixture(scope="module")
def expected(cluster: Cluster, step: None) -> dict[int, float]:
    """The losses of two epochs on one host."""
    command = ["onnxpar", "train", "step.par", *TRAIN, "2", "--checkpoint", "local"]
    status, _, errors = finish(cluster, command)
    assert status == 0, errors
    found = losses(cluster.folder / "log")
    assert len(found) == 16
    return found


def same(found: dict[int, float], expected: dict[int, float]) -> None:
    assert found.keys() == expected.keys()
    for each, loss in expected.items():
        assert found[each] == pytest.approx(loss, rel=1e-6), each


def test_training_and_its_resumption(cluster: Cluster, expected: dict[int, float]) -> None:
    """Two epochs on hosts of which one is then replaced are those of one host."""
    tls = ["--tls-dir", str(cluster.certificates)]
    found: dict[int, float] = {}
    for epochs, hosts in [("1", "a:2,b:2"), ("2", "c:1,a:3")]:
        train = ["train", "step.par", *TRAIN, epochs, "--checkpoint", "shared", "--resume"]
        status, _, errors = finish(cluster, [*LAUNCH, "--hosts", hosts, *tls, "--", *train])
        assert status == 0, errors
        found |= losses(cluster.folder / "log")
    same(found, expected)


def test_an_elastic_run_fetches_its_step(cluster: Cluster, expected: dict[int, float]) -> None:
    """From the host that has it."""
    cluster.hosts[0].run(["cp", "-r", str(cluster.folder / "step.par"), "/tmp/only.par"])
    train = [
        "train",
        "/tmp/only.par",
        *TRAIN,
        "2",
        "--checkpoint",
        "elastic",
        "--elastic",
        "--every",
        "4",
    ]
    more = ["--hosts", "a:2,b:2", "--tls-dir", str(cluster.certificates), "--min-ranks", "2"]
    status, _, errors = finish(cluster, [*LAUNCH, *more, "--", *train, "--step", "step.onnx"])
    assert status == 0, errors
    same(losses(cluster.folder / "log"), expected)


def test_a_folder_of_checkpoints_that_hosts_do_not_share(
    cluster: Cluster, expected: dict[int, float]
) -> None:
    """The run ends before its first step."""
    train = ["train", "step.par", *TRAIN, "2", "--checkpoint", "/tmp/own", "--log-dir", "unshared"]
    more = ["--hosts", "a:2,b:2", "--tls-dir", str(cluster.certificates)]
    status, output, errors = finish(cluster, [*LAUNCH, *more, "--", *train])
    assert status == 2 and "step: 1" not in output
    assert "rank 2: it does not see /tmp/own/.onnxpar.lock, which rank 0 sees; give" in errors
