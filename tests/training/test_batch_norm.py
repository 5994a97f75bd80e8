"""Statistics of groups of a batch: what each group would have by itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from agreement import run_ranks
from agreement import run_unsplit as run_model
from small_models import write_text
from training.models import CONV
from training.steps import run_unsplit, write_step

import onnxpar

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
