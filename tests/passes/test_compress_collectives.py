"""compress-collectives: which sums are sent in fewer bits, and how many bytes that saves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from agreement import options
from pass_texts import compare_golden, texts_after
from training.steps import write_step

from onnxpar.base.errors import StrategyError
from onnxpar.cli.command_line import main
from onnxpar.compiler.plan import Plan
from onnxpar.layout.mesh import Mesh
from onnxpar.lowering.compression import THRESHOLD, Compression
from onnxpar.planner import sharder
from onnxpar.planner.context import load_model, make_context
from onnxpar.planner.options import Options
from onnxpar.sharding.planned_collectives import Collective

PRODUCT = "product (float[4,3] x, float[3,5] w) => (float[4,5] y) { y = MatMul(x, w) }"
WIDE = """wide (float[8,20] x, float[20,64] w1, float[64] w2, float[64,32] w3)
=> (float[8,32] y) { h = Gemm(x, w1, w2)  r = Relu(h)  y = MatMul(r, w3) }"""
WEIGHTS = (20 * 64 + 64 * 32) * 4
"""Bytes of the gradients that are compressed; that of w2 has 256."""
SLICED = """sliced (float[8,20] x, float[20,32] w1, float[20,32] w2) => (float[8,64] y)
{ w = Concat<axis = 1>(w1, w2)  y = MatMul(x, w) }"""
POSITIONS = """positions (float[8,64] x, float[64,64] w1, float[8,64] w2, float[64,64] w3,
float[64,64] w4) => (float[8,64] y)
{ h = MatMul(x, w1)  p = Add(h, w2)  q = MatMul(p, w3)  r = Relu(q)  y = MatMul(r, w4) }"""
LAYERS = """layers (float[8,64] x, float[64,64] w1, float[64,64] w3, float[64,64] w4)
=> (float[8,64] y)
{ h = MatMul(x, w1)  p = Relu(h)  q = MatMul(p, w3)  r = Relu(q)  y = MatMul(r, w4) }"""
COLUMNS_THEN_ROWS = {
    "shard": {"MatMul_q": [[None, None], [None, "tp"]], "MatMul_y": [[None, "tp"], ["tp", None]]}
}
NORMED = """normed (float[8,4,2,2] x, float[300,4,1,1] w1, float[300] ws, float[300] wb,
float[300] wm, float[300] wv) => (float[8,300,2,2] y)
{ h = Conv(x, w1)  y, m, v = BatchNormalization<training_mode = 1>(h, ws, wb, wm, wv) }"""


def planned(step: Path, layout: str, to: str | None, **how: Any) -> Plan:
    """A plan whose layouts were verified after every pass."""
    return sharder.plan(step, replace(options(layout), compression=to, **how))[0]


def sums(plan: Plan) -> list[Collective]:
    """The collectives that add something up, codes included, but for small ones."""
    return [c for c in plan.collectives if "sum" in c.before or "::codes" in c.tensor]


@pytest.mark.parametrize("to", ["float16", "2bit:0.25"])
def test_golden(to: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    passes = (
        "annotate-strategy,propagate-layouts,insert-collectives,"
        f"compress-collectives{{to={to} least-bytes=0}}"
    )
    given = Options(mesh=Mesh.parse("dp=2"), preset="data-parallel")
    model = load_model(write_step(PRODUCT, tmp_path, "mse"), given)
    shown = texts_after(passes, model, make_context(model, given))
    compare_golden(f"compress-{to.partition(':')[0]}", shown[-1], request)


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    return write_step(WIDE, tmp_path, "mse")


@pytest.mark.matrix
@pytest.mark.parametrize("to", ["float16", "bfloat16"])
@pytest.mark.parametrize("preset", ["data-parallel", "zero1", "zero3"])
def test_half_the_bytes(to: str, preset: str, wide: Path) -> None:
    before, after = (
        sum(c.bytes for c in sums(planned(wide, f"{preset} 2", k))) for k in (None, to)
    )
    saved = WEIGHTS / 2 if preset == "data-parallel" else WEIGHTS / 4
    assert before - after == saved


def test_compressed_gradients_are_fused_by_their_type(wide: Path) -> None:
    plan = planned(wide, "data-parallel 2", "float16")
    (fused,) = [c for c in sums(plan) if c.bytes == WEIGHTS / 2]
    assert len(fused.tensor.split()) == 2
    assert plan.step is not None and plan.step.compression == "float16"


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_two_bits_an_element(ranks: int, wide: Path) -> None:
    (codes,) = [
        c
        for c in planned(wide, f"data-parallel {ranks}", "2bit").collectives
        if "codes" in c.tensor
    ]
    assert codes.kind == "AllGather"
    assert codes.bytes == (ranks - 1) * (WEIGHTS // 16 + 1)


def test_codes_of_parts(tmp_path: Path) -> None:
    """Ranks that hold other elements have other codes, and maybe more of them."""
    model = "uneven (float[8,40] x, float[40,26] w) => (float[8,26] y) { y = MatMul(x, w) }"
    given = replace(
        options("dp=2,tp=3", strategy={"shard": {"MatMul_y": [["dp", None], [None, "tp"]]}}),
        compression="2bit",
    )
    plan, _ = sharder.plan(write_step(model, tmp_path, "mse"), given)
    (codes,) = [c for c in plan.collectives if "codes" in c.tensor]
    assert codes.before == "[dp, tp{91,91,81}]" and codes.after == "[-, tp{91,91,81}]"


def test_what_is_not_sent_is_a_state_of_each_rank(wide: Path) -> None:
    plan = planned(wide, "data-parallel 2", "2bit")
    kept = {p.name: p.layout.text(plan.mesh) for p in plan.inputs if p.layout and "resid" in p.name}
    assert kept == {f"{w}.residual": "[-, -] sum(dp)" for w in ("w1", "w3")}
    assert plan.step is not None
    slots = [s for s in plan.step.slots if s.kind == "residual"]
    assert {(s.input, s.output, s.of) for s in slots} == {
        (f"{w}.residual", f"{w}.residual.next", w) for w in ("w1", "w3")
    }
    assert all(plan.initial[s.input] == "zero" for s in slots)
    assert {s.input for s in slots} <= {source for source, _ in plan.states}


def test_codes_travel_together_up_to_the_size_of_a_bucket(wide: Path) -> None:
    def count(**how: Any) -> int:
        found = planned(wide, "data-parallel 2", "2bit", **how).collectives
        return sum("codes" in c.tensor for c in found)

    assert count() == 1
    assert count(bucket_bytes=WEIGHTS) == 1
    assert count(bucket_bytes=WEIGHTS - 1) == 2
    assert count(fusion="none") == 2


def test_only_gradients_are_compressed(wide: Path) -> None:
    """Activations are summed over tp, in the forward pass and in the backward pass."""
    plain = planned(wide, "hybrid dp=2,tp=2", None)
    for to in ("float16", "2bit"):
        plan = planned(wide, "hybrid dp=2,tp=2", to)
        over_tp = [c for c in sums(plan) if "sum(tp)" in c.before]
        assert over_tp == [c for c in sums(plain) if "sum(tp)" in c.before]
        assert sum(c.bytes for c in sums(plan)) < sum(c.bytes for c in sums(plain))


@pytest.mark.parametrize("text", [POSITIONS, LAYERS], ids=["itself", "on the way"])
def test_gradients_of_activations_are_none(text: str, tmp_path: Path) -> None:
    """Not even where they are that of a parameter too (what is added to every row), or only lead to
    one."""
    step = write_step(text, tmp_path, "mse")
    given = options("tp=2", strategy=COLUMNS_THEN_ROWS)
    plans = [
        sharder.plan(step, replace(given, compression=to))[0] for to in (None, "float16", "2bit")
    ]
    assert [c.tensor for c in sums(plans[0])].count("MatMul_q.grad/MatMul.2") == 1
    assert sums(plans[1]) == sums(plans[2]) == sums(plans[0])


def test_a_gradient_that_the_backward_pass_goes_on_with_is_none(tmp_path: Path) -> None:
    """Those of a normalization's scale and bias are parts of its own gradient."""
    step = write_step(NORMED, tmp_path, "mse")
    plain, compressed = (sums(planned(step, "data-parallel 2", to)) for to in (None, "float16"))
    changed = {c.tensor for c in plain if c not in compressed}
    assert changed == {"Conv_h.grad/MatMul.8"}
    assert sum("Normalization_y.grad" in c.tensor and c.bytes >= 1200 for c in plain) == 3


def test_a_sum_may_stand_before_what_parts_a_gradient(tmp_path: Path) -> None:
    plan = planned(write_step(SLICED, tmp_path, "mse"), "data-parallel 2", "2bit")
    assert [c.bytes for c in plan.collectives if "codes" in c.tensor] == [20 * 64 // 4 + 1]


@pytest.mark.parametrize("preset", ["data-parallel", "zero2"])
def test_sums_of_several_turns(preset: str, tmp_path: Path) -> None:
    step = write_step(WIDE, tmp_path, "mse", accumulate=2, clip_norm=1.0)
    sent = [
        sum(c.bytes for c in sums(planned(step, f"{preset} 2", to))) for to in (None, "float16")
    ]
    turns = {"data-parallel": 1, "zero2": 2}[preset]  # of the loop, in which parts are reduced
    all_reduced = {"data-parallel": 2, "zero2": 1}[preset]
    assert sent[0] - sent[1] == WEIGHTS / 4 * turns * all_reduced
    if preset == "zero2":
        with pytest.raises(StrategyError, match="'w1' in each iteration of the loop"):
            planned(step, "zero2 2", "2bit")


def test_one_rank_has_nothing_to_send(wide: Path) -> None:
    plan = planned(wide, "data-parallel 1", "2bit")
    assert plan.step is not None and not plan.step.compression
    assert not [s for s in plan.step.slots if s.kind == "residual"]


def test_parsed() -> None:
    assert Compression.parse("none") is None
    assert Compression.parse("2bit") == Compression("2bit", THRESHOLD)
    assert Compression.parse("2bit:0.5") == Compression("2bit", 0.5)
    assert Compression.parse("bfloat16") == Compression("bfloat16")


@pytest.mark.parametrize(
    "kind,text",
    [
        ("3bit", "choose none, float16, bfloat16, 2bit or 2bit:THRESHOLD"),
        ("float16:2", "choose none, float16"),
        ("2bit:0", "the threshold must be a positive number"),
        ("2bit:-1", "the threshold must be a positive number"),
        ("2bit:nan", "the threshold must be a positive number"),
        ("2bit:much", "the threshold must be a positive number"),
        ("2bit:", "the threshold must be a positive number"),
    ],
)
def test_kinds_that_there_are_not(
    kind: str, text: str, wide: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(wide), "--devices", "2", "--compression", kind]) == 2
    assert text in capsys.readouterr().err


def test_only_training_steps_have_gradients(wide: Path, tmp_path: Path) -> None:
    with pytest.raises(
        StrategyError, match="applies only to a training step; write one with `onnxpar grad`"
    ):
        planned(tmp_path / "model.onnx", "data-parallel 2", "float16")
    with pytest.raises(StrategyError, match="collectives stay as they are"):
        sharder.plan(wide, Options(devices=2, preset="manual", compression="float16"))


def test_a_loss_scale_that_changes_is_refused(tmp_path: Path) -> None:
    step = write_step(WIDE, tmp_path, "mse", precision="float16")
    with pytest.raises(StrategyError, match="changes the scale of its gradients"):
        planned(step, "data-parallel 2", "2bit")
