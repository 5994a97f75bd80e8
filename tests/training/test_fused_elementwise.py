"""Steps whose updates run in one loop each: to the bit those of separate nodes, and close to the
unsplit step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from training.models import DROPOUT
from training.steps import (
    MLP,
    Array,
    ThreadTrainer,
    batches,
    check_training,
    shard,
    states,
    write_step,
)

from onnxpar.compiler.plan import Plan
from onnxpar.passes.lower.fuse_elementwise import FuseElementwise
from onnxpar.planner import default_passes

CHAIN = """chain (float[8,6] x, float[6,9] w1, float[9,5] w2) => (float[8,5] y)
<float c = {0.3}, float d = {2}>
{ h = MatMul(x, w1)  r = Relu(h)  a = Mul(r, c)  b = Add(a, r)  e = Mul(b, b)  f = Div(e, d)
  g = Sub(f, a)  y = MatMul(g, w2) }"""
SCAN = """scan (float[2,3,4] x, float[2,4] h, float[4,4] w1, float[4,5] w2) => (float[2,5] y)
<float c = {0.5}>
{ g, ys = Scan<num_scan_inputs = 1, scan_input_axes = [1], scan_output_axes = [1],
    body = turn (float[2,4] s, float[2,4] e) => (float[2,4] n, float[2,4] o)
    { p = MatMul(s, w1)  q = Relu(p)  r = Add(q, e)  t = Mul(r, c)  n = Sub(t, s)
      o = Mul(n, s) }>(h, x)
  y = MatMul(g, w2) }"""

# optimizer, its options and those of the step; layout: shards of 9, 6 and 5 are uneven, and of 5
# over 7 ranks two are empty
CASES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "sgd": (MLP, "sgd", "data-parallel 2", {"weight_decay": 0.1}),
    "momentum": (MLP, "momentum", "zero1 4", {"weight_decay": 0.1, "nesterov": True}),
    "adam": (MLP, "adam", "zero2 2", {"weight_decay": 0.1}),
    "adamw": (MLP, "adamw", "zero3 7", {}),
    "lamb": (MLP, "lamb", "hybrid dp=2,tp=2", {}),
    "adagrad": (MLP, "adagrad", "tensor-parallel 2", {}),
    "clipped": (MLP, "adamw", "zero1 2", {"clip_norm": 0.5, "accumulate": 2}),
    "recomputed": (CHAIN, "adam", "data-parallel 2", {"recompute": True}),
    "dropout": (DROPOUT, "adamw", "zero2 2", {}),
    "body": (SCAN, "adamw", "data-parallel 2", {}),
}


def fused_nodes(par: Path) -> int:
    """How many fused nodes rank 0 has, in bodies too."""
    text = onnx.printer.to_text(onnx.load(par / "rank_0000.onnx", load_external_data=False))
    return text.count("FusedElementwise")


def trained(par: Path, plan: Plan) -> tuple[list[dict[str, float]], dict[str, Array]]:
    """The results of three steps, and what the trainer keeps after them."""
    with ThreadTrainer(par) as trainer:
        return [trainer.step(batch, 0.05) for batch in batches(plan, 3)], states(trainer)


@pytest.mark.matrix
@pytest.mark.parametrize("name", CASES)
def test_bits_are_those_of_separate_nodes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, optimizer, layout, how = CASES[name]
    step = write_step(text, tmp_path, optimizer=optimizer, **how)
    par, plan = shard(step, layout)
    assert fused_nodes(par) > 0
    results, kept = trained(par, plan)
    check_training(step, layout, 3)
    apart = tuple(p for p in default_passes.DEFAULT_PASSES if p is not FuseElementwise)
    monkeypatch.setattr(default_passes, "DEFAULT_PASSES", apart)
    par, plan = shard(step, layout)
    assert fused_nodes(par) == 0
    separate, wanted = trained(par, plan)
    assert results == separate
    for state, array in wanted.items():
        np.testing.assert_array_equal(kept[state], array, err_msg=state)
