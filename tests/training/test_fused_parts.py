"""Reduce-scatters and all-gathers in buckets: fewer of them, and the same bits."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agreement import options
from training.steps import ThreadTrainer, batches, check_training, write_step

from onnxpar.compiler.plan import Plan
from onnxpar.planner import sharder

NET = """net (float[8,6] x, float[6,8] w1, float[8] w2, float[8] w3, float[8,24] w4, float[24] w5,
float[8,9] w6, float[9] w7, float[9,4] w8) => (float[8,4] y)
{ h = Gemm(x, w1, w2)  n = LayerNormalization(h, w3)  p = Gemm(n, w4, w5)
  q, k, v = Split<axis = 1, num_outputs = 3>(p)  s = Mul(q, k)  t = Tanh(s)  a = Add(t, v)
  u = Gemm(a, w6, w7)  r = Relu(u)  y = MatMul(r, w8) }"""
"""Three segments of columns that are split alike, and 9 units, which fall into uneven parts."""


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_step(NET, tmp_path_factory.mktemp("step"), optimizer="adam")


def kinds(plan: Plan) -> Counter[str]:
    return Counter(c.kind for c in plan.collectives)


def plan_of(step: Path, layout: str, **how: Any) -> Plan:
    return sharder.plan(step, replace(options(layout), **how))[0]


@functools.cache
def sharded(step: Path, layout: str, fusion: str) -> tuple[Path, Plan]:
    """The sharded step, once for all media. Buckets are cut by cost only where ranks communicate
    while they compute."""
    par = step.with_name(f"{layout}.{fusion}.par")
    overlap = "on" if fusion == "cost" else None
    return par, sharder.shard(step, par, replace(options(layout), fusion=fusion, overlap=overlap))


def trained(step: Path, layout: str, fusion: str) -> dict[str, np.ndarray]:
    """What three steps make of every state."""
    par, plan = sharded(step, layout, fusion)
    with ThreadTrainer(par) as trainer:
        for seed, batch in enumerate(batches(plan, 3)):
            trainer.step(batch, 0.05, seed)
        slots = trainer.spec.slots
        return {slot.input: trainer.session.states.read(slot.input) for slot in slots}


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.usefixtures("medium")
@pytest.mark.parametrize(
    "layout", ["zero1 2", "zero1 4", "zero2 4", "zero3 4", "zero1 dp=2,tp=2", "zero3 dp=2,tp=2"]
)
def test_buckets_leave_every_bit_as_it_is(layout: str, step: Path) -> None:
    found = {by: trained(step, layout, by) for by in ("none", "size", "cost")}
    for by in ("size", "cost"):
        for name, value in found["none"].items():
            np.testing.assert_array_equal(found[by][name], value, err_msg=f"{by} {name}")


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["zero1 4", "zero3 4", "hybrid dp=2,tp=2"])
def test_ranks_agree_with_one(layout: str, step: Path) -> None:
    check_training(step, layout, 4)


@pytest.mark.slow
def test_zero_sends_its_parts_together(step: Path) -> None:
    """In two ranks all parts are equal but those of nine units; in one of zero3, what a layer reads
    is gathered for that layer."""
    apart, together = (kinds(plan_of(step, "zero1 2", fusion=by)) for by in ("none", "size"))
    assert apart["ReduceScatter"] >= 6 and apart["AllGather"] >= 6
    assert together["ReduceScatter"] <= 2 and together["AllGather"] <= 2
    sent = {
        sum(c.bytes for c in plan_of(step, "zero1 2", fusion=f).collectives)
        for f in ("none", "size")
    }
    assert len(sent) == 1
    plan = plan_of(step, "zero3 2")
    gathered = [set(c.tensor.split()) for c in plan.collectives if c.kind == "AllGather"]
    assert {"w1", "w2"} <= set.union(*gathered)
    assert all(not {"w1", "w4"} <= names for names in gathered)


@pytest.mark.slow
def test_a_small_bucket_holds_few(step: Path) -> None:
    """`--bucket-mb` counts for parts, too."""
    counts = [
        kinds(plan_of(step, "zero1 2", fusion="size", bucket_bytes=size))["ReduceScatter"]
        for size in (1, 400, 1 << 20)
    ]
    assert counts[0] > counts[1] > counts[2]
