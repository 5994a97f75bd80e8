"""Training where ranks hold nothing of a batch: each part of a step agrees with the unsplit one."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from agreement import options
from training.models import BLOCKS, CONV, DROPOUT, MOE
from training.steps import (
    CROSS_ENTROPY,
    MLP,
    Array,
    ThreadTrainer,
    batches,
    run_unsplit,
    write_step,
)

from onnxpar.compiler.plan import Plan
from onnxpar.planner import sharder
from onnxpar.report.compare_training import UnsplitStep
from onnxpar.trainer.checkpoint import Checkpoint, Progress
from onnxpar.trainer.merge import merge

SHARE = {"double": 1e-9, "float": 2e-5, "float16": 5e-3, "bfloat16": 2e-2}
"""By what a step computes in, the largest difference as a share of a tensor's largest value."""


def of(text: str, count: int, kind: str = "double") -> str:
    """A model with a batch of so many, of float64 where onnxruntime has the kernels."""
    head, rest = text.split("=>", 1)
    size = head[head.index("[") : head.index(",") + 1]
    both = (part.replace(size, f"[{count},", 1) for part in (head, rest))
    return "=>".join(both).replace("float[", f"{kind}[")


TRAINED = CONV.replace(
    "n = BatchNormalization(", "n, u, v = BatchNormalization<training_mode = 1>("
)
SCAN = """scan (float[2,3,4] x, float[2,4] h, float[4,4] w1, float[4] w2, float[4,5] w3)
=> (float[2,5] y)
{ g, ys = Scan<num_scan_inputs = 1, scan_input_axes = [1], scan_output_axes = [1],
    body = turn (float[2,4] s, float[2,4] e) => (float[2,4] n, float[2,4] o)
    { p = MatMul(s, w1)  q = Add(p, e)  r = Add(q, w2)  n = Tanh(r)  o = Mul(n, s) }>(h, x)
  a = ReduceSum<keepdims = 0>(ys, axis)  b = Add(a, g)  y = MatMul(b, w3) }""".replace(
    "(float[2,5] y)\n", "(float[2,5] y)\n<int64[1] axis = {1}>\n"
)
LOOP = """loop (float[2,4] x, float[4,4] w1, float[4,5] w2) => (float[2,5] y)
<int64 n = {3}, bool go = {1}>
{ h = Loop<body = turn (int64 i, bool c, float[2,4] s) => (bool d, float[2,4] t)
    { d = Identity(c)  m = MatMul(s, w1)  t = Tanh(m) }>(n, go, x)
  y = MatMul(h, w2) }"""


SQUARES = """squares (float[2,40] x, float[2,26] t, float[40,26] w1) => (float[] total)
{ a = MatMul(x, w1)  d = Sub(a, t)  q = Mul(d, d)  total = ReduceSum<keepdims = 0>(q) }"""


@dataclass(frozen=True)
class Case:
    """A step on a batch of `rows`, and how it is split; `kind` is what it computes in."""

    text: str
    layout: str
    step: dict[str, Any] = field(default_factory=dict)
    shard: dict[str, Any] = field(default_factory=dict)
    kind: str = "double"
    rows: int = 2
    loss: str = CROSS_ENTROPY

    def write(self, folder: Path) -> Path:
        """Saves the step, and returns its path."""
        text = of(self.text, self.rows, "double" if self.kind == "double" else "float")
        return write_step(text, folder, self.loss, **{"optimizer": "sgd", **self.step})


CLIPPED = {"clip_norm": 0.1}
HALF = {"precision": "float16", "loss_scale": "256"}
"""A factor with which nothing overflows: ranks may overflow in other steps than one does."""
AGAIN = DROPOUT.replace("y = MatMul(d, w2)", "e = Tanh(d)  f = Tanh(e)  y = MatMul(f, w2)")
CASES = {
    "accumulate": Case(MLP, "data-parallel 4", {"accumulate": 3, **CLIPPED}),
    "accumulate zero3": Case(MLP, "zero3 3", {"accumulate": 2, "optimizer": "adam"}),
    "dropout": Case(DROPOUT, "data-parallel 3"),
    "dropout zero3": Case(DROPOUT, "zero3 dp=3,tp=2"),
    "dropout accumulate": Case(DROPOUT, "data-parallel 3", {"accumulate": 2}),
    "batch norm used": Case(CONV, "data-parallel 3", kind="float"),
    "batch norm trained": Case(TRAINED, "data-parallel 4", kind="float"),
    "batch norm global": Case(CONV, "data-parallel 3", {"batch_norm": "global"}, kind="float"),
    "batch norm of hosts": Case(
        CONV, "data-parallel 4", {"batch_norm": "node", "groups": 2}, kind="float"
    ),
    "batch norm of ranks": Case(
        CONV, "data-parallel 4", {"batch_norm": "local", "groups": 2}, kind="float"
    ),
    "clip": Case(MLP, "zero2 3", {**CLIPPED, "optimizer": "adam"}),
    "buckets": Case(MLP, "zero2 8", {**CLIPPED, "optimizer": "momentum"}, rows=3),
    "buckets by cost": Case(MLP, "zero1 8", shard={"fusion": "cost"}, rows=3),
    "no buckets": Case(MLP, "zero3 3", shard={"fusion": "none"}),
    "hybrid": Case(BLOCKS, "hybrid dp=3,tp=2", CLIPPED),
    "tensor": Case(MLP, "tensor-parallel dp=3,tp=2", CLIPPED),
    "sequence": Case(BLOCKS, "sequence-parallel dp=3,tp=2"),
    "sequence of 6": Case(BLOCKS, "sequence-parallel 8", rows=1),
    "experts": Case(MOE, "expert-parallel 4", CLIPPED, kind="float", rows=3),
    "few to experts": Case(MOE, "expert-parallel 4", kind="float"),
    "scan": Case(SCAN, "data-parallel 3", CLIPPED),
    "loop": Case(LOOP, "zero3 3"),
    "recompute": Case(BLOCKS, "zero3 3", {"recompute": True}),
    "recompute dropout": Case(AGAIN, "data-parallel 3", {"recompute": True}),
    "float16": Case(MLP, "zero2 3", {**HALF, **CLIPPED}, kind="float16"),
    "float16 accumulate": Case(MLP, "data-parallel 3", {**HALF, "accumulate": 2}, kind="float16"),
    "float16 conv": Case(CONV, "data-parallel 3", {**HALF, "batch_norm": "global"}, kind="float16"),
    "bfloat16": Case(MLP, "zero3 3", {"precision": "bfloat16"}, kind="bfloat16"),
    "bfloat16 conv": Case(CONV, "data-parallel 3", {"precision": "bfloat16"}, kind="bfloat16"),
    "squares": Case(MLP, "data-parallel 3", loss="mse"),
    "yes and no": Case(MLP, "data-parallel 3", loss="bce"),
}


def near(found: Any, wanted: Any, share: float, name: str) -> None:
    scale = np.abs(np.asarray(wanted, np.float64)).max(initial=0.0)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=share * scale, err_msg=name)


def shard(step: Path, layout: str, **how: Any) -> tuple[Path, Plan]:
    """Shards a step so that a rank has nothing of an input or a state."""
    par = step.with_name(f"{layout.replace(' ', '_')}.par")
    strategy = how.pop("strategy", None)
    plan = sharder.shard(step, par, replace(options(layout, strategy=strategy), **how))
    ports, ranks = [p for p in plan.inputs if p.layout is not None], range(plan.mesh.size)
    assert any(0 in p.layout.local_shape(plan.mesh, r) for p in ports for r in ranks if p.layout)
    return par, plan


def states(trainer: ThreadTrainer) -> dict[str, Array]:
    return {slot.input: trainer.session.states.read(slot.input) for slot in trainer.spec.slots}


@pytest.mark.matrix
@pytest.mark.parametrize("name", CASES)
def test_agrees(name: str, tmp_path: Path) -> None:
    """Losses, metrics, evaluations and all states, in each of three steps."""
    case = CASES[name]
    step = case.write(tmp_path)
    par, plan = shard(step, case.layout, **case.shard)
    feeds = list(batches(plan, 3))
    assert plan.step is not None
    seeds = [{"seed": np.array(7 + i)} if plan.step.seed else {} for i in range(3)]
    told, spec = run_unsplit(step, [a | b for a, b in zip(feeds, seeds, strict=True)], [0.05] * 3)
    share = SHARE[case.kind]
    with ThreadTrainer(par) as trainer:
        for i, (batch, wanted) in enumerate(zip(feeds, told, strict=True)):
            for metric, value in trainer.evaluate(batch).items():
                least = 1e-6 if metric == "accuracy" else 0.0  # which is float32
                near(value, wanted[f"evaluation.{metric}"], max(share, least), f"{i}: {metric}")
            found = trainer.step(batch, 0.05, 7 + i)
            assert found.keys() == {"loss", *spec.metrics}
            for metric, value in found.items():
                near(value, wanted[metric], share, f"{i}: {metric}")
            left = states(trainer)
            for slot in spec.slots:
                near(left[slot.input], wanted[slot.output], share, f"{i}: {slot.input}")


@pytest.mark.slow
@pytest.mark.usefixtures("medium")
def test_a_step_is_skipped_by_all(tmp_path: Path) -> None:
    """Where one rank's gradient is no number, and another has no samples."""
    case = Case(MLP, "zero2 3", {"precision": "float16", "optimizer": "adam"}, kind="float16")
    step = case.write(tmp_path)
    par, plan = shard(step, case.layout)
    good = next(batches(plan, 1))
    bad = {**good, "x": np.full((2, 6), np.inf, np.float32)}
    with ThreadTrainer(par) as trainer:
        trainer.session.states.write("loss_scale", np.array(256, np.float32))
        one = UnsplitStep(step, trainer.spec)
        one.states["loss_scale"] = np.array(256, np.float32)
        skipped = []
        for batch in (good, bad, good):
            skipped.append(trainer.step(batch, 0.05)["skipped"])
            one.step(batch, 0.05)
            left = states(trainer)
            assert all(np.isfinite(a).all() for a in left.values())
            for name in ("loss_scale", "loss_scale.good_steps", "step"):
                np.testing.assert_array_equal(left[name], one.states[name], name)
            for name in ("w1.exp_avg", "w4.exp_avg"):
                near(left[name], one.states[name], SHARE["float16"], name)
    assert skipped == [0, 1, 0]


@pytest.mark.matrix
@pytest.mark.parametrize("wire", ["float16", "bfloat16"])
@pytest.mark.parametrize("layout", ["data-parallel 3", "zero2 3"])
def test_16_bits_on_the_wire(layout: str, wire: str, tmp_path: Path) -> None:
    """Gradients are rounded, by no more than these bits."""
    wide = MLP.replace("9]", "90]").replace("[9,", "[90,")
    step = Case(wide, layout).write(tmp_path)
    par, plan = shard(step, layout, compression=wire)
    feeds = list(batches(plan, 3))
    told, spec = run_unsplit(step, feeds, [0.05] * 3)
    with ThreadTrainer(par) as trainer:
        for i, batch in enumerate(feeds):
            loss = trainer.step(batch, 0.05)["loss"]
            near(loss, told[i]["loss"], SHARE[wire] if i else SHARE["double"], f"{i}: loss")
        left = states(trainer)
    for slot in spec.slots:
        near(left[slot.input], told[-1][slot.output], SHARE[wire], slot.input)
    assert np.abs(left["w1"] - told[-1]["w1.next"]).max() > 1e-7


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["data-parallel 5", "zero2 3", "hybrid dp=3,tp=2"])
def test_codes(layout: str, tmp_path: Path) -> None:
    """A rank without samples sends and keeps nothing: the others go on as if they were alone."""
    step = Case(SQUARES, layout, loss="total").write(tmp_path)
    par, plan = shard(step, layout, compression="2bit:1.0")
    other = step.with_name("two.par")
    sharder.shard(step, other, replace(options("data-parallel 2"), compression="2bit:1.0"))
    with ThreadTrainer(par) as trainer, ThreadTrainer(other) as two:
        for batch in batches(plan, 4):
            found, wanted = trainer.step(batch, 0.001)["loss"], two.step(batch, 0.001)["loss"]
            near(found, wanted, SHARE["double"], "loss")
        alone, left = states(two), states(trainer)
    assert np.abs(alone["w1.residual"]).max() > 0
    for name, wanted in alone.items():
        near(left[name], wanted, SHARE["double"], name)


WEIGHTS = {"tensors": {"w3": [None, "tp"], "w4": ["tp"]}}
"""Five columns, over eight ranks."""


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("before", "strategy", "after"),
    [
        ("tp=8", WEIGHTS, "zero2 3"),
        ("zero2 3", None, "tensor-parallel 2"),
        ("zero3 dp=3,tp=2", None, "data-parallel 1"),
    ],
)
def test_checkpoints(before: str, strategy: Any, after: str, tmp_path: Path) -> None:
    """Of states of which ranks have nothing, too: the same and other ranks go on from them, and a
    model is made of them."""
    step = Case(MLP, before, {"optimizer": "adamw"}).write(tmp_path)
    par, plan = shard(step, before, strategy=strategy)
    other = step.with_name("other.par")
    sharder.shard(step, other, options(after))
    feeds = list(batches(plan, 4))
    with ThreadTrainer(par) as trainer:
        for batch in feeds[:2]:
            trainer.step(batch, 0.05)
        trainer.save(tmp_path / "c", Progress(2))
        half = states(trainer)
        for batch in feeds[2:]:
            trainer.step(batch, 0.05)
        wanted = states(trainer)
    told, spec = run_unsplit(step, feeds, [0.05] * 4)
    for slot in spec.slots:
        near(wanted[slot.input], told[-1][slot.output], SHARE["double"], slot.input)
    for path, share in ((par, 0.0), (other, SHARE["double"])):
        with ThreadTrainer(path) as trainer:
            trainer.load(Checkpoint.load(tmp_path / "c"))
            for name, value in states(trainer).items():
                np.testing.assert_array_equal(value, half[name], name)
            for batch in feeds[2:]:
                trainer.step(batch, 0.05)
            for name, value in states(trainer).items():
                near(value, wanted[name], share, name)
    merge(tmp_path / "c", tmp_path / "model.onnx", tmp_path / "trained.onnx")
    stored = onnx.load(tmp_path / "trained.onnx").graph.initializer
    for tensor in stored:
        np.testing.assert_array_equal(onnx.numpy_helper.to_array(tensor), half[tensor.name])
    assert {"w1", "w2", "w3", "w4"} <= {t.name for t in stored}


def test_labels_that_do_not_count(tmp_path: Path) -> None:
    """One rank has no sample, one no sample that counts."""
    step = Case(MLP, "data-parallel 3", CLIPPED).write(tmp_path)
    par, plan = shard(step, "data-parallel 3")
    batch = {**next(batches(plan, 1)), "labels": np.array([-100, 2])}
    (wanted,), spec = run_unsplit(step, [batch], [0.05])
    with ThreadTrainer(par) as trainer:
        for metric, value in trainer.evaluate(batch).items():
            near(value, wanted[f"evaluation.{metric}"], 1e-6, metric)
        near(trainer.step(batch, 0.05)["loss"], wanted["loss"], SHARE["double"], "loss")
        for slot in spec.slots:
            found = trainer.session.states.read(slot.input)
            near(found, wanted[slot.output], SHARE["double"], slot.input)
