"""A mixture whose loss has a term that balances experts trains as in PyTorch, over any mesh.

The term is a product of two means over all tokens, so that ranks must add up each mean before they
multiply.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from training.steps import Array, ThreadTrainer, shard
from training.trajectories import (
    Trajectory,
    descend,
    descend_unsplit,
    gradient_error,
    loss_error,
)

from onnxpar.compiler.plan import Plan
from onnxpar.training import grad

SOURCE = Path(__file__).parents[2] / "models" / "experts" / "mixtral.balanced.training.onnx"
WITHIN = 1e-5
"""The largest error of a loss, relative to it, and of a gradient, relative to its largest value."""


def told() -> dict[str, Array]:
    """What the script that exported the model has written down of torch, in float64."""
    with np.load(SOURCE.with_suffix(".npz")) as stored:
        return dict(stored)


def under(prefix: str, values: Mapping[str, Array]) -> dict[str, Array]:
    return {k.removeprefix(prefix): v for k, v in values.items() if k.startswith(prefix)}


def check(found: Trajectory) -> None:
    assert loss_error(found.losses, told()["losses"]) < WITHIN
    assert gradient_error(found.gradients, under("gradient.", told())) < WITHIN


def trained(step: Path, layout: str) -> tuple[Trajectory, Plan]:
    known = told()
    par, plan = shard(step, layout)
    batch = under("feed.", known)
    return descend(par, batch, float(known["rate"]), len(known["losses"])), plan


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("balanced") / "step.onnx"
    grad(SOURCE, path, loss="loss", optimizer="sgd")
    return path


@pytest.mark.slow
def test_one_rank(step: Path) -> None:
    known = told()
    with ThreadTrainer(shard(step, "data-parallel 1")[0]) as trainer:
        spec = trainer.spec
    batch, rate = under("feed.", known), float(known["rate"])
    check(descend_unsplit(step, spec, batch, rate, len(known["losses"])))


@pytest.mark.matrix
@pytest.mark.parametrize(
    "layout",
    [
        "expert-parallel 2",
        "expert-parallel 3",
        "expert-parallel 4",
        "4",
        "expert-parallel dp=2,ep=2",
        "expert-parallel dp=3,ep=2",
        "expert-parallel ep=2,tp=2",
        "data-parallel 1",
        "data-parallel 3",
    ],
)
def test_ranks(layout: str, step: Path) -> None:
    found, plan = trained(step, layout)
    check(found)
    experts = [p.layout for p in plan.inputs if "experts" in p.name and p.layout]
    over = plan.mesh.sizes.get("ep", 1)
    assert len(experts) == 4
    assert all(e.local_shape(plan.mesh, 0)[0] == -(-4 // over) for e in experts)


@pytest.mark.slow
def test_the_term_reaches_the_router(step: Path, tmp_path: Path) -> None:
    """Without it, the router's gradient is another one."""
    model = onnx.load(SOURCE)
    makers = {name: node for node in model.graph.node for name in node.output}
    scaled = next(m for name in makers["loss"].input if (m := makers[name]).op_type == "Mul")
    weight = next(m for n in scaled.input if (m := makers[n]).op_type == "Constant")
    weight.attribute[0].t.CopyFrom(numpy_helper.from_array(np.float32(0)))
    onnx.save(model, tmp_path / "model.onnx")
    grad(tmp_path / "model.onnx", tmp_path / "step.onnx", loss="loss", optimizer="sgd")
    (without, _), (found, _) = (
        trained(path, "expert-parallel 2") for path in (tmp_path / "step.onnx", step)
    )
    for name, value in found.gradients.items():
        if name.endswith("gate.weight"):
            assert np.abs(without.gradients[name] - value).max() > 0.05 * np.abs(value).max()
