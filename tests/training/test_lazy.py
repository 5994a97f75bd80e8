"""Tables of which a step updates only the rows that it looks up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from committed import MODELS
from onnx import numpy_helper
from training.steps import (
    Array,
    ThreadTrainer,
    batches,
    plan_of,
    run_unsplit,
    shard,
    write_step,
)

from onnxpar.base.errors import StrategyError
from onnxpar.cli.command_line import main
from onnxpar.report.compare_training import compare_training
from onnxpar.training.adam_optimizers import Adam

ONE = """lookup (int64[3] ids) => (double[3,2] y)
<double[5,2] w = {0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9}> { y = Gather(w, ids) }"""
TARGET = np.array([[1.0, 0], [0, 1], [1, 1]])
STEPS = [([0, 3, 3], 0.1), ([3, -4, 0], 0.05), ([1, 1, 1], 0.2)]
"""Indices and the learning rate of each step; -4 is row 1."""
OF_SPARSE_ADAM = {
    "w": [
        *(0.14581312347855235, 0.05561248283745903, 0.2764757991282176, 0.5016789704575577),
        *(0.4, 0.5, 0.5335365664025824, 0.7859884563399369, 0.8, 0.9),
    ],
    "w.exp_avg": [
        *(-0.060097087378640765, -0.02956410256410255, -0.04389475270320346),
        *(-0.054106927955143186, 0, 0, -0.010231884057971014, 0.008507936507936503, 0, 0),
    ],
    "w.exp_avg_sq": [
        *(0.0020058346686775393, 0.0010714207758053917, 0.002533486347313833),
        *(0.0016350686786270434, 0, 0, 0.00030747406007141384, 0.0010986706979087938, 0, 0),
    ],
}
"""Results of torch.optim.SparseAdam (betas 0.9 and 0.99, eps 1e-3) in PyTorch 2.13, for
torch.nn.Embedding(5, 2, sparse=True) and the mean squared error."""


def run(folder: Path, optimizer: str, **how: Any) -> list[dict[str, Array]]:
    step = write_step(ONE, folder, "mse", optimizer, params=["w"], **how)
    feeds = [{"ids": np.array(ids), "target": TARGET} for ids, _ in STEPS]
    return run_unsplit(step, feeds, [rate for _, rate in STEPS])[0]


def test_sparse_adam(tmp_path: Path) -> None:
    told = run(tmp_path, "adam", lazy=["w"], beta1=0.9, beta2=0.99, epsilon=1e-3)
    for name, expected in OF_SPARSE_ADAM.items():
        np.testing.assert_allclose(told[-1][f"{name}.next"].reshape(-1), expected, rtol=1e-12)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_equal_to_the_dense_step(optimizer: str, tmp_path: Path) -> None:
    """Each of these leaves rows without gradients as they are."""
    for clip in (None, 0.3):
        dense = run(tmp_path, optimizer, clip_norm=clip)
        lazy = run(tmp_path, optimizer, lazy=["w"], clip_norm=clip)
        for a, b in zip(dense, lazy, strict=True):
            assert a.keys() == b.keys()
            np.testing.assert_allclose(a["magnitudes"], np.abs(a["w.next"]).sum(), rtol=1e-14)
            for name in a.keys() - {"magnitudes"}:  # which a lazy step has of rows alone
                np.testing.assert_allclose(b[name], a[name], rtol=1e-14, err_msg=name)


MODEL = """lookups (int64[BATCH,2] ids, int64[BATCH,3] more, float[40,6] w, float[6,4] w2)
=> (float[BATCH,4] y)
{ a = Gather(w, ids)  b = Gather(w, more)  rows = Concat<axis=1>(a, b)
  axis = Constant<value_ints=[1]>()  s = ReduceSum<keepdims=0>(rows, axis)  y = MatMul(s, w2) }"""


def rows(draw: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Indices of the first 7 of 40 rows, some of them counted from the end."""
    return draw.integers(0, 7, shape) - 40 * draw.integers(0, 2, shape)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "how", [{}, {"clip_norm": 0.1}, {"precision": "float16", "loss_scale": "8"}]
)
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adagrad"])
@pytest.mark.parametrize(
    "layout",
    ["data-parallel 2", "data-parallel 3", "tensor-parallel 3", "zero1 4", "zero3 2", "dp=2,tp=2"],
)
def test_training(layout: str, optimizer: str, how: dict[str, Any], tmp_path: Path) -> None:
    """Over a batch of 5, so that shards differ; indices repeat, also between the two inputs."""
    step = write_step(MODEL.replace("BATCH", "5"), tmp_path, "mse", optimizer, lazy=["w"], **how)
    par, plan = shard(step, layout)
    draw = np.random.default_rng(3)
    feeds = [
        batch | {name: rows(draw, batch[name].shape) for name in ("ids", "more")}
        for batch in batches(plan, 3)
    ]
    with ThreadTrainer(par) as trainer:
        report = compare_training(step, trainer, feeds, 0.05)
        after = trainer.session.states.read("w")
    assert report.ok, report.text()
    before = next(
        numpy_helper.to_array(t) for t in onnx.load(step).graph.initializer if t.name == "w"
    )
    np.testing.assert_array_equal(after[7:], before[7:])
    assert (after[:7] != before[:7]).any(axis=1).all()


def test_ranks_exchange_rows(tmp_path: Path) -> None:
    """Indices and rows, in place of a table of 20,000 rows."""
    text = MODEL.replace("BATCH", "8").replace("40", "20000")
    plan = plan_of(write_step(text, tmp_path, "mse", "adam", lazy=["w"]), "data-parallel 4")
    assert sum(c.bytes for c in plan.collectives) < 8 * 5 * (6 * 4 * 2 + 8)


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(MODELS / "dlrm.legacy.training.onnx")
    step = str(tmp_path / "step.onnx")
    how = ["--loss", "bce", "--optimizer", "adam", "--lazy", "*tables.[01]*", "-o", step]
    assert main(["grad", model, *how]) == 0
    told = "only looked-up rows are updated: network.tables.0.weight, network.tables.1.weight\n"
    assert told in capsys.readouterr().out
    assert main(["check", step, "--train", "--devices", "3", "--steps", "2"]) == 0


class OwnAdam(Adam):
    """May have an update of its own, of which no lazy form is known."""


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"optimizer": "momentum"}, "momentum changes rows that a step does not look up"),
        ({"optimizer": "adamw"}, "adamw changes rows that a step does not look up"),
        ({"optimizer": "lamb"}, "lamb changes rows"),
        ({"optimizer": OwnAdam()}, "ownadam changes rows"),
        ({"optimizer": "none"}, "--lazy is for steps that update"),
        ({"optimizer": "adam", "weight_decay": 0.1}, "a weight decay of 0.1 changes rows"),
        ({"accumulate": 2}, "--lazy and --accumulate"),
        ({"lazy": ["v*"]}, "--lazy v[*] matches no weight; there are 'w', 'w2'"),
        ({"lazy": ["w2"]}, "MatMul '.*' reads the whole table"),
        ({"preset": "manual", "devices": 2}, "look up different rows"),
    ],
)
def test_errors(how: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match=message):
        write_step(
            MODEL.replace("BATCH", "4"),
            tmp_path,
            "mse",
            **{"optimizer": "sgd", "lazy": ["w"], **how},
        )
    assert not (tmp_path / "step.onnx").exists()
