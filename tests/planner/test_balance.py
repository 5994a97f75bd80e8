"""Devices that differ: predictions, limits per rank, and parts in proportion to speed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from agreement import check_agrees
from committed import MODELS
from planner.unequal import options, topology
from training.steps import CROSS_ENTROPY, MLP, ThreadTrainer, batches, write_step

import onnxpar
from onnxpar.base.errors import StrategyError
from onnxpar.cli.command_line import main
from onnxpar.compiler.plan import Plan
from onnxpar.cost.topology import Topology
from onnxpar.layout.mesh import Mesh
from onnxpar.planner import sharder
from onnxpar.planner.balance import cap_shares
from onnxpar.planner.options import Options
from onnxpar.report.compare_training import compare_training
from onnxpar.search.objective import Objective
from onnxpar.training import grad

GPT2 = MODELS / "gpt2.dynamo.static.onnx"


def layouts(plan: Plan) -> dict[str, str]:
    ports = [*plan.inputs, *plan.outputs]
    found = {p.name: p.layout.text(plan.mesh) for p in ports if p.layout is not None}
    return found | {weight.name: weight.layout_text for weight in plan.weights}


QKV = "transformer.h.0.attn.c_attn.weight"
MLP_IN = "transformer.h.0.mlp.c_fc.weight"


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "mesh", "preset", "speeds", "wanted"),
    [
        # 8 heads of 6 columns each, which stay whole
        ("gpt2.dynamo", "tp=2", "tensor-parallel", (3, 1), {QKV: "36,12", MLP_IN: "144,48"}),
        ("gpt2.dynamo", "tp=3", "tensor-parallel", (3, 1, 2), {QKV: "24,6,18", MLP_IN: "96,32,64"}),
        ("gpt2.dynamo", "tp=4", "tensor-parallel", (3, 1, 2, 2), {QKV: "18,6,12,12"}),
        ("gpt2.dynamo", "dp=2", "data-parallel", (1, 3), {"logits": "dp{1,3}"}),
        ("gpt2.dynamo", "dp=2,tp=2", "hybrid", (6, 2, 3, 1), {"logits": "tp{384,128}"}),
        ("llama.legacy", "tp=3", "tensor-parallel", (3, 1, 2), {"logits": "tp{256,85,171}"}),
        ("resnet.legacy", "tp=3", "tensor-parallel", (3, 1, 2), {"logits": "tp{6,1,3}"}),
        ("resnet.legacy", "tp=4", None, (3, 1, 2, 2), {}),
        ("mixtral.dynamo", "tp=4", None, (3, 1, 2, 2), {"logits": "tp{6,2,4,4}"}),
        ("unet.legacy", "tp=3", "tensor-parallel", (3, 1, 2), {}),
        ("dlrm.dynamo", "dp=2,tp=2", "hybrid", (3, 2, 1.5, 1), {}),
    ],
)
def test_ranks_agree_with_the_unsplit_model(
    name: str,
    mesh: str,
    preset: str | None,
    speeds: tuple[float, ...],
    wanted: dict[str, str],
    tmp_path: Path,
) -> None:
    model = MODELS / f"{name}.static.onnx"
    plan = check_agrees(model, tmp_path, options(mesh, preset, topology(*speeds)))
    found = layouts(plan)
    assert any("{" in text for text in found.values())
    for tensor, parts in wanted.items():
        assert parts in found[tensor], found[tensor]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("model", "mesh", "preset", "speeds", "parts"),
    [
        ("mlp", "dp=3", "data-parallel", (3, 1, 2), {"x": "[dp{4,1,3}, -]"}),
        ("mlp", "dp=2", "zero1", (3, 1), {"x": "[dp{6,2}, -]", "w2": "[-]"}),
        ("mlp", "dp=2", "zero3", (1, 3), {"x": "[dp{2,6}, -]", "w2": "[dp{2,7}]"}),
        ("mlp", "tp=3", "tensor-parallel", (3, 1, 2), {"w2": "[tp{5,1,3}]"}),
        ("gpt2", "dp=2,tp=2", "zero3", (3, 2, 1.5, 1), {}),
        ("gpt2", "tp=4", None, (3, 1, 2, 2), {}),
    ],
)
def test_training_steps_agree_with_one_rank(
    model: str,
    mesh: str,
    preset: str | None,
    speeds: tuple[float, ...],
    parts: dict[str, str],
    tmp_path: Path,
) -> None:
    if model == "mlp":
        step = write_step(MLP, tmp_path, optimizer="adam")
    else:
        step = tmp_path / "step.onnx"
        grad(GPT2, step, loss=CROSS_ENTROPY, optimizer="adamw", clip_norm=1.0)
    par = tmp_path / "step.par"
    plan = sharder.shard(step, par, options(mesh, preset, topology(*speeds)))
    found = layouts(plan)
    assert {name: found[name] for name in parts} == parts
    assert any("{" in text for text in found.values())
    with ThreadTrainer(par) as trainer:
        report = compare_training(step, trainer, list(batches(plan, 4)), 0.01)
    assert report.ok, report.text()


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "preset"), [("tp=2", "tensor-parallel"), ("tp=2", None)])
def test_balanced_parts_are_faster(mesh: str, preset: str | None) -> None:
    devices = topology(3, 1)
    equal, balanced = (
        sharder.plan(GPT2, options(mesh, preset, devices, balance=b))[0] for b in (False, True)
    )
    assert equal.predicted is not None and balanced.predicted is not None
    assert balanced.predicted.total < 0.85 * equal.predicted.total
    assert len({weight.layout_text for weight in equal.weights if "{" in weight.layout_text}) == 0


@pytest.mark.slow
def test_equal_parts_take_as_long_as_the_slowest_rank() -> None:
    """By hand: the time of ranks that all have the slow device."""
    mixed, slow = topology(3, 1), topology(1, 1)
    assert not slow.devices  # equal after all
    plans = [
        sharder.plan(GPT2, options("tp=2", "tensor-parallel", t, balance=False))[0]
        for t in (mixed, slow)
    ]
    assert plans[0].predicted and plans[1].predicted
    assert plans[0].predicted.compute == pytest.approx(plans[1].predicted.compute)
    fast, slowest = plans[0].loads
    assert fast.flops == slowest.flops and fast.compute < slowest.compute
    assert slowest.compute == pytest.approx(plans[0].predicted.compute)
    assert not plans[1].loads
    one = sharder.plan(GPT2, options("tp=1", "tensor-parallel", topology(3), balance=False))[0]
    assert one.predicted is not None  # the fastest device alone
    assert plans[0].predicted.one_rank == pytest.approx(one.predicted.one_rank)


def test_what_each_rank_holds() -> None:
    """Compared with the weights in the layouts of the plan."""
    plan, ctx = sharder.plan(GPT2, options("tp=2", "tensor-parallel", topology(3, 1)))
    held = [0, 0]
    for weight in plan.weights:
        first, second = _parts(weight.layout_text) if "{" in weight.layout_text else (1, 1)
        whole = first + second if "{" in weight.layout_text else 1
        for rank, part in enumerate((first, second)):
            held[rank] += weight.bytes * part // whole
    assert [load.weights for load in plan.loads] == held
    assert plan.memory["weights_per_rank"] == max(held)
    assert sum(load.flops for load in plan.loads) == plan.flops["model"]
    assert ctx.sharding.costs.topology.shares == pytest.approx((0.75, 0.25))


def _parts(text: str) -> tuple[int, int]:
    first, second = text.partition("{")[2].partition("}")[0].split(",")
    return int(first), int(second)


def memories(*sizes: str) -> Topology:
    """Equally fast devices with memory of these sizes."""
    device = {"flops": 1e10, "memory_bandwidth": 5e9, "launch": 1e-6}
    return Topology.of({"device": [{**device, "memory": size} for size in sizes]})


@pytest.mark.slow
def test_a_rank_gets_no_more_than_fits() -> None:
    """Both compute equally fast, so only memory can make the parts differ."""
    equal = sharder.plan(GPT2, options("tp=2", "tensor-parallel", memories("9 MB", "8 MB")))[0]
    assert all("{" not in text for text in layouts(equal).values())
    need = [load.held for load in equal.loads]
    assert need[0] == need[1] > 250_000
    small = memories("9 MB", "250 kB")
    tight = sharder.plan(GPT2, options("tp=2", "tensor-parallel", small, balance=False))[0]
    assert any("rank 1 needs" in note and "250 kB" in note for note in tight.notes)
    fits = sharder.plan(GPT2, options("tp=2", "tensor-parallel", small))[0]
    assert fits.loads[1].held <= 250_000 < fits.loads[0].held
    assert not any("needs" in note for note in fits.notes)


@pytest.mark.slow
@pytest.mark.parametrize("balance", [False, True])
def test_a_search_keeps_to_the_memory_of_each_rank(balance: bool, tmp_path: Path) -> None:
    """The fastest strategy splits nothing but the batch, for which neither rank has room."""
    small = memories("460 kB", "300 kB")
    plan = check_agrees(GPT2, tmp_path, options("tp=2", None, small, balance))
    assert plan.loads[0].held <= 460_000 and plan.loads[1].held <= 300_000


@pytest.mark.slow
def test_a_limit_that_is_given_holds_for_every_rank() -> None:
    """The fast rank would take three quarters; it takes what the limit lets it."""
    how = options("tp=2", None, topology(3, 1))
    free = sharder.plan(GPT2, how)[0]
    objective = Objective(memory=330_000.0)
    plan = sharder.plan(GPT2, replace(how, objective=objective))[0]
    assert max(load.held for load in plan.loads) <= 330_000
    assert max(load.held for load in free.loads) > 330_000


@pytest.mark.slow
def test_a_topology_with_devices_has_no_further_ranks() -> None:
    how = replace(
        options("tp=2", None, topology(3, 1)), mesh=None, devices=2, objective=Objective(memory=2e5)
    )
    with pytest.raises(StrategyError, match="raise the limit, or give a mesh of more ranks"):
        sharder.plan(GPT2, how)


@pytest.mark.slow
def test_only_unequal_parts_fit() -> None:
    """Together the devices have room for the model, but half of it fits only into one."""
    small = memories("460 kB", "200 kB")
    equal = sharder.plan(GPT2, options("tp=2", None, small, balance=False))[0]
    assert any("found no strategy that fits" in note for note in equal.notes)
    plan = sharder.plan(GPT2, options("tp=2", None, small))[0]
    assert plan.loads[0].held <= 460_000 and plan.loads[1].held <= 200_000


def test_caps_that_leave_too_little() -> None:
    assert cap_shares([1.0, 1.0], [0.3, 0.3]) == (0.5, 0.5)
    assert cap_shares([3.0, 1.0], [0.5, 0.6]) == (0.5, 0.5)
    assert cap_shares([1.0, 1.0, 2.0], [1.0, 0.1, 0.4]) == (0.5, 0.1, 0.4)


@pytest.mark.slow
def test_a_saved_strategy_and_annotations_give_the_same_parts(tmp_path: Path) -> None:
    how = options("tp=2", None, topology(3, 1))
    made = sharder.annotate(GPT2, tmp_path / "m.onnx", how)
    again, _ = sharder.plan(tmp_path / "m.onnx", Options(devices=2, topology=how.topology))
    assert layouts(again) == layouts(made)
    assert any("{" in text for text in layouts(again).values())


@pytest.mark.slow
def test_the_command_and_python(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mixed.yaml"
    file.write_text(topology(3, 1).text())
    how = ["--mesh", "tp=2", "--preset", "tensor-parallel", "--topology", str(file), "--balance"]
    assert main(["plan", str(GPT2), *how]) == 0
    text = capsys.readouterr().out
    assert "tp{384,128}" in text and "on the fastest rank alone" in text
    assert "\n0     249.0 kB" in text and "\n1     87.9 kB" in text
    assert main(["plan", str(GPT2), *how, "--json"]) == 0
    loads = json.loads(capsys.readouterr().out)["loads"]
    assert [load["ranks"] for load in loads] == [[0, 0], [1, 1]]
    plan = onnxpar.plan(
        GPT2, mesh="tp=2", preset="tensor-parallel", topology=str(file), balance=True
    )
    assert plan.to_json()["loads"] == loads
    assert main(["plan", str(GPT2), *how, "--html", str(tmp_path / "page.html")]) == 0
    assert "one run on the fastest rank" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("given", [None, topology(2, 2)])
def test_nothing_to_balance(given: Topology | None) -> None:
    how = Options(mesh=Mesh.parse("tp=2"), topology=given, balance=True)
    with pytest.raises(StrategyError, match=r"--balance: .* give devices that differ"):
        sharder.plan(GPT2, how)


def test_more_ranks_than_devices() -> None:
    with pytest.raises(StrategyError, match="devices for 3 ranks, but the mesh has 4"):
        sharder.plan(GPT2, options("tp=4", None, topology(1, 2, 3)))
