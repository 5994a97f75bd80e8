"""Sums and losses of rows whose number is known only when a model runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from agreement import check_outputs, run_ranks, run_unsplit
from small_models import HEAD, write_text

import onnxpar

FEEDS = {
    "x": np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32),
    "keep": np.array([True, False, True, True, False, True]),
}
CASES = {
    "two sums": (
        "(float[?,6] y, float[?,6] z)",
        "y = MatMul(r, w)  z = MatMul(r, w2)",
        {"w": ["tp", None], "w2": ["tp", None]},
    ),
    "one of two sums": (
        "(float[?,6] y, float[6,6] z)",
        "y = MatMul(r, w)  z = MatMul(x, w2)",
        {"w": ["tp", None], "w2": ["tp", None]},
    ),
    "losses": (
        "(float[?] y)",
        'h = MatMul(r, w)  y = SoftmaxCrossEntropyLoss<reduction = "none">(h, i)',
        {"h": [None, "tp"]},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_ranks_agree(case: str, tmp_path: Path) -> None:
    outputs, rest, tensors = CASES[case]
    text = f"""rows (float[6,4] x, bool[6] keep, float[4,6] w, float[4,6] w2) => {outputs}
        <int64[1] a = {{0}}>
        {{ n = NonZero(keep)  i = Squeeze(n, a)  r = Gather(x, i)  {rest} }}"""
    model, par = write_text(HEAD + text, tmp_path / "m.onnx"), tmp_path / "m.par"
    strategy = {"tensors": tensors}
    onnxpar.shard(model, par, mesh="tp=2", strategy=strategy, fusion="size")
    wanted = run_unsplit(model, FEEDS)
    check_outputs(run_ranks(par, FEEDS), wanted, ["y", "z"][: len(wanted)])
