"""Statistics of groups of a batch: what each group would have by itself."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
from agreement import run_ranks
from agreement import run_unsplit as run_model
from small_models import write_text
from training.models import CONV
from training.steps import Array, ThreadTrainer, run_unsplit, shard, write_step

import onnxpar
from onnxpar.base.errors import StrategyError

DRAW = np.random.default_rng(12)


def test_groups_are_batches_of_their_own(tmp_path: Path) -> None:
    """Loss and gradients are means over them, and so are the running statistics."""
    (tmp_path / "own").mkdir()
    grouped = write_step(CONV, tmp_path, optimizer="none", batch_norm="local", groups=2)
    small = CONV.replace("[8,", "[4,")
    own = write_step(small, tmp_path / "own", optimizer="none", batch_norm="global")
    x = DRAW.standard_normal((8, 2, 6, 6)).astype(np.float32)
    x[4:] = 3 * x[4:] + 1  # statistics that are far apart
    labels = DRAW.integers(0, 3, 8)
    (found,), _ = run_unsplit(grouped, [{"x": x, "labels": labels}], [0.0])
    halves = [
        run_unsplit(own, [{"x": x[at], "labels": labels[at]}], [0.0])[0][0]
        for at in (slice(4), slice(4, 8))
    ]
    assert found.keys() == halves[0].keys() >= {"loss", "w1.grad", "w3.grad", "mean.next"}
    for name, value in found.items():
        mean = np.mean([half[name] for half in halves], axis=0)
        np.testing.assert_allclose(value, mean, rtol=1e-5, atol=1e-6, err_msg=name)


def test_running_statistics_in_double_precision(tmp_path: Path) -> None:
    """Ranks move them by the default momentum as onnxruntime's kernel has it: in float32."""
    text = """<ir_version: 10, opset_import: ["" : 18]>
    norm (double[4,3] x, double[3] w1, double[3] w2, double[3] mean, double[3] variance)
    => (double[4,3] y, double[3] m, double[3] v)
    { y, m, v = BatchNormalization<training_mode = 1>(x, w1, w2, mean, variance) }"""
    model, par = write_text(text, tmp_path / "m.onnx"), tmp_path / "m.par"
    onnxpar.shard(model, par, mesh="dp=2", strategy={"tensors": {"x": ["dp", None]}})
    names = {"x": (4, 3), "mean": (3,), "variance": (3,)}
    feeds = {name: DRAW.random(shape) for name, shape in names.items()}
    for got, wanted in zip(run_ranks(par, feeds), run_model(model, feeds), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-12)


NORM = """norm (float[7,3] x, float[3] w1, float[3] w2) => (float[7,3] y)
<float[3] mean = {0, 1, 2}, float[3] variance = {1, 2, 3}>
{ y = BatchNormalization<momentum = 0.8>(x, w1, w2, mean, variance) }"""
IMAGES = """norm (float[6,3,2,2] x, float[3] w1, float[3] w2) => (float[6,3,2,2] y)
<float[3] mean = {0, 1, 2}, float[3] variance = {1, 2, 3}>
{ y = BatchNormalization<momentum = 0.8>(x, w1, w2, mean, variance) }"""
START = np.array([1.0, 2.0, 3.0])


def moved(x: Array, groups: int = 1) -> Array:
    """PyTorch's running variance after a batch: `running_var` in the docs of BatchNorm1d. The mean
    of those of groups."""
    parts = [np.moveaxis(part, 1, 0).reshape(3, -1) for part in np.split(x, groups)]
    return 0.8 * START + 0.2 * np.mean([part.var(1, ddof=1) for part in parts], axis=0)


@pytest.mark.parametrize("text", [NORM, IMAGES])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_unbiased_running_variances(text: str, ranks: int, tmp_path: Path) -> None:
    """Over all samples of a batch, in shards that are uneven."""
    how = {"batch_norm": "global,unbiased"}
    step = write_step(text, tmp_path, "mse", "sgd", **how)
    x = DRAW.standard_normal((7, 3) if text is NORM else (6, 3, 2, 2)).astype(np.float32)
    par, _ = shard(step, f"data-parallel {ranks}")
    with ThreadTrainer(par) as trainer:
        trainer.step({"x": x, "target": x}, 0.1)
        found = trainer.session.states.read("variance")
    np.testing.assert_allclose(found, moved(x), rtol=1e-5)


def test_unbiased_variances_of_groups_and_parts(tmp_path: Path) -> None:
    """Of each group; and, of micro-batches, one after the other."""
    x = DRAW.standard_normal((6, 3, 2, 2)).astype(np.float32)
    x[3:] = 3 * x[3:] + 1
    how = {"batch_norm": "local,unbiased", "groups": 2}
    step = write_step(IMAGES, tmp_path, "mse", "sgd", **how)
    (found,), _ = run_unsplit(step, [{"x": x, "target": x}], [0.0])
    np.testing.assert_allclose(found["variance.next"], moved(x, groups=2), rtol=1e-5)
    how = {"batch_norm": "global,unbiased", "accumulate": 2}
    step = write_step(IMAGES.replace("[6,", "[3,"), tmp_path, "mse", "sgd", **how)
    (found,), _ = run_unsplit(step, [{"x": x, "target": x}], [0.0])
    second = np.moveaxis(x[3:], 1, 0).reshape(3, -1).var(1, ddof=1)
    wanted = 0.8 * moved(x[:3]) + 0.2 * second
    np.testing.assert_allclose(found["variance.next"], wanted, rtol=1e-5)


def test_unbiased_variances_of_the_ranks_of_a_manual_program(tmp_path: Path) -> None:
    """Each over its own samples; then their mean."""
    how = {"batch_norm": "local,unbiased", "groups": 1}
    tensors = {name: ["ranks", None] for name in ("x", "target")}
    manual = {"preset": "manual", "devices": 2, "strategy": {"tensors": tensors}}
    text = NORM.replace("[7,", "[3,")
    step = write_step(text, tmp_path, "mse", "sgd", **how, **manual)
    par = tmp_path / "m.par"
    onnxpar.shard(step, par, preset="manual")
    x = DRAW.standard_normal((6, 3)).astype(np.float32)
    with ThreadTrainer(par) as trainer:
        trainer.step({"x": x, "target": x}, 0.0)
        found = trainer.session.states.read("variance")
    np.testing.assert_allclose(found, moved(x, groups=2), rtol=1e-5)


def test_torch_agrees_on_running_variances() -> None:
    torch = pytest.importorskip("torch")
    for layer, shape in ((torch.nn.BatchNorm1d, (7, 3)), (torch.nn.BatchNorm2d, (6, 3, 2, 2))):
        x = DRAW.standard_normal(shape).astype(np.float32)
        norm = layer(3, momentum=0.2)
        norm.running_var.copy_(torch.tensor(START))
        norm(torch.tensor(x))
        np.testing.assert_allclose(norm.running_var.numpy(), moved(x), rtol=1e-5)


def test_what_has_no_unbiased_variance(tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match="statistics over a single number"):
        write_step(NORM.replace("7", "1"), tmp_path, "mse", batch_norm="global,unbiased")
    with pytest.raises(StrategyError, match="no BatchNormalization updates a running variance"):
        write_step(NORM, tmp_path, "mse", batch_norm="unbiased")
    with pytest.raises(StrategyError, match="'global,most': give one of global, node, local, one"):
        write_step(NORM, tmp_path, "mse", batch_norm="global,most")


def test_few_numbers_are_told_of(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="takes 7/6 of it; --batch-norm unbiased"):
        write_step(NORM, tmp_path, "mse", batch_norm="global")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_step(NORM, tmp_path, "mse", batch_norm="global,biased")
        large = NORM.replace("7", "120")
        write_step(large, tmp_path, "mse", batch_norm="global")
