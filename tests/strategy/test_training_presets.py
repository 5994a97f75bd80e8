"""What ranks say to each other in a training step, by preset: collectives of plans, counted."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from math import prod
from pathlib import Path

import pytest
from committed import MODELS
from training.models import BLOCKS, CONV, HEAD, MOE
from training.steps import CROSS_ENTROPY, MLP, check_training, plan_of, write_model, write_step

from onnxpar.base.errors import StrategyError
from onnxpar.compiler.plan import Plan
from onnxpar.layout.mesh import Mesh
from onnxpar.planner import sharder
from onnxpar.planner.options import Options
from onnxpar.sharding.planned_collectives import Collective
from onnxpar.training import grad

SMALL = 64
"""Bytes of what is no tensor of the network: losses and counts."""
WIDE = """mlp (float[8,64] x, float[64,48] w1, float[48] w2, float[48,32] w3, float[32] w4)
=> (float[8,32] y) { h = Gemm(x, w1, w2)  r = Relu(h)  y = Gemm(r, w3, w4) }"""
BYTES = {"w1": 64 * 48 * 4, "w2": 48 * 4, "w3": 48 * 32 * 4, "w4": 32 * 4}


def large(plan: Plan, more_than: int = SMALL) -> list[Collective]:
    return [c for c in plan.collectives if c.bytes > more_than]


def layouts(plan: Plan) -> dict[str, str]:
    ports = [*plan.inputs, *plan.outputs]
    return {p.name: p.layout.text(plan.mesh) for p in ports if p.layout is not None}


def kinds(found: Sequence[Collective]) -> Counter[str]:
    return Counter(c.kind for c in found)


def made_in(found: Sequence[Collective], forward: bool) -> list[Collective]:
    return [c for c in found if (".grad/" not in c.tensor) == forward]


def gpt2(folder: Path) -> Path:
    grad(
        MODELS / "gpt2.dynamo.static.onnx",
        folder / "step.onnx",
        loss=CROSS_ENTROPY,
        optimizer="adam",
    )
    return folder / "step.onnx"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_data_parallel_is_one_all_reduce_of_all_gradients(ranks: int, tmp_path: Path) -> None:
    plan = plan_of(gpt2(tmp_path), f"data-parallel {ranks}")
    (one,) = large(plan)
    assert one.kind == "AllReduce" and one.group == tuple(range(ranks))
    assert plan.step is not None
    parameters = [s.input for s in plan.step.parameters]
    shapes = [p.shape or () for p in plan.inputs if p.name in parameters]
    total = 4 * sum(prod(shape) for shape in shapes)
    assert one.bytes == int(2 * total * (ranks - 1) / ranks)
    for name in parameters:
        assert "dp" not in layouts(plan)[name]


def test_buckets_cut_the_all_reduce(tmp_path: Path) -> None:
    """Of the size that is asked for; none by name."""
    step = write_step(WIDE, tmp_path, "mse")
    fused = large(plan_of(step, "data-parallel 2"))
    assert [len(c.tensor.split()) for c in fused] == [4]
    how = Options(devices=2, preset="data-parallel", bucket_bytes=BYTES["w1"] + BYTES["w2"])
    by_size, _ = sharder.plan(step, how)
    assert [len(c.tensor.split()) for c in large(by_size)] == [2, 2]
    none, _ = sharder.plan(step, Options(devices=2, preset="data-parallel", fusion="none"))
    assert [c.bytes for c in large(none)] == [BYTES[n] for n in ("w3", "w4", "w1", "w2")]


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["zero1", "zero2"])
def test_zero_scatters_each_gradient_and_gathers_each_parameter(
    preset: str, tmp_path: Path
) -> None:
    step = write_step(WIDE, tmp_path, "mse", "adam")
    fused = large(plan_of(step, f"{preset} 4"))
    assert {c.kind: len(c.tensor.split()) for c in fused} == {"ReduceScatter": 4, "AllGather": 4}
    plan, _ = sharder.plan(step, Options(devices=4, preset=preset, fusion="none"))
    found = large(plan)
    assert kinds(found) == {"ReduceScatter": 4, "AllGather": 4}
    for kind in ("ReduceScatter", "AllGather"):
        sent = sorted(c.bytes for c in found if c.kind == kind)
        assert sent == sorted(b * 3 // 4 for b in BYTES.values())
    for name in BYTES:
        assert "dp" not in layouts(plan)[name]
        for state in ("exp_avg", "exp_avg_sq"):
            assert "dp" in layouts(plan)[f"{name}.{state}"]
            assert "dp" in layouts(plan)[f"{name}.{state}.next"]


def test_zero3_gathers_before_use_and_again_in_the_backward_pass(tmp_path: Path) -> None:
    plan = plan_of(write_step(WIDE, tmp_path, "mse", "adam"), "zero3 4")
    found = large(plan)
    assert kinds(found) == {"ReduceScatter": 1, "AllGather": 3}
    gathered = [c.tensor for c in found if c.kind == "AllGather"]  # together for each node
    assert gathered == ["w1 w2", "w3 w4", "w3.again"]  # w1's own input needs no gradient
    for name in BYTES:
        for port in (name, f"{name}.next", f"{name}.exp_avg", f"{name}.exp_avg_sq.next"):
            assert "dp" in layouts(plan)[port], port


def test_what_zero3_gathers_is_split_otherwise_by_its_readers(tmp_path: Path) -> None:
    """A convolution computes its part of the batch, though its windows are whole."""
    plan = plan_of(write_step(CONV, tmp_path), "zero3 2")
    assert "dp" in layouts(plan)["w1"]
    assert not [w.node for w in plan.whole if w.is_lack]


def test_zero_of_dp_and_tp(tmp_path: Path) -> None:
    """State is split over both, each rank's own part of what tensor parallelism leaves it."""
    step = write_step(WIDE, tmp_path, "mse", "adam")
    how = Options(mesh=Mesh.parse("dp=2,tp=2"), preset="zero2", fusion="none")
    plan, _ = sharder.plan(step, how)
    texts = layouts(plan)
    assert (texts["w1"], texts["w3"]) == ("[-, tp]", "[tp, -]")
    assert (texts["w1.exp_avg"], texts["w3.exp_avg"]) == ("[dp, tp]", "[tp, dp]")
    scattered = [c for c in large(plan) if c.kind == "ReduceScatter"]
    assert {c.group for c in scattered} == {(0, 2)} and {c.groups for c in scattered} == {2}
    assert sorted(c.bytes for c in scattered)[-2:] == [BYTES["w3"] // 4, BYTES["w1"] // 4]
    assert {c.group for c in large(plan) if c.tensor == "y"} == {(0, 1)}
    texts = layouts(plan_of(step, "zero3 dp=2,tp=2"))
    assert (texts["w1"], texts["w3"], texts["w3.next"]) == ("[dp, tp]", "[tp, dp]", "[tp, dp]")


def test_zero_of_sizes_that_do_not_divide(tmp_path: Path) -> None:
    """9 rows over 2 ranks; what is shorter than the ranks are many stays whole."""
    plan = plan_of(write_step(MLP, tmp_path, "mse", "momentum"), "zero3 2")
    texts = layouts(plan)
    assert (texts["w1"], texts["w2"], texts["w4"]) == ("[dp, -]", "[dp]", "[dp]")
    port = next(p for p in plan.inputs if p.name == "w2.momentum_buffer")
    assert port.layout is not None
    assert [port.layout.local_shape(plan.mesh, r) for r in range(2)] == [(5,), (4,)]
    plan = plan_of(write_step(MLP, tmp_path, "mse", "momentum"), "zero3 6")
    texts = layouts(plan)
    assert (texts["w1"], texts["w4"], texts["w4.momentum_buffer"]) == ("[dp, -]", "[-]", "[-]")


@pytest.mark.parametrize(("preset", "ranks"), [("zero1", 2), ("zero3", 4)])
def test_zero_leaves_inference_to_other_presets(preset: str, ranks: int, tmp_path: Path) -> None:
    model = write_model(MLP, tmp_path)
    with pytest.raises(StrategyError, match=f"preset {preset} applies only to a training step"):
        plan_of(model, f"{preset} {ranks}")


def test_zero_needs_an_axis_dp(tmp_path: Path) -> None:
    step = write_step(MLP, tmp_path, "mse")
    with pytest.raises(StrategyError, match="zero2 needs a mesh with an axis dp, not tp=2"):
        plan_of(step, "zero2 tp=2")


ACTIVATION = 4 * 6 * 32 * 4
"""Bytes of an activation of BLOCKS."""


def test_a_tensor_parallel_layer_has_two_all_reduces_each_way(tmp_path: Path) -> None:
    """One for each half of the layer; the embedding's is before them."""
    plan = plan_of(write_step(BLOCKS, tmp_path), "tensor-parallel 2")
    found = large(plan)
    assert kinds(found) == {"AllReduce": 5}
    assert [c.tensor for c in made_in(found, True)] == ["x", "c", "f"]
    assert len(made_in(found, False)) == 2
    assert {c.bytes for c in found} == {ACTIVATION}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_a_transformer_layer_has_two_all_reduces_each_way(model: str, tmp_path: Path) -> None:
    """Two layers; an embedding, and a head that is split by the vocabulary."""
    step = tmp_path / "step.onnx"
    grad(MODELS / f"{model}.dynamo.static.onnx", step, loss=CROSS_ENTROPY, optimizer="sgd")
    found = large(plan_of(step, "tensor-parallel 2"), 1024)
    assert kinds(found) == {"AllReduce": 10}
    assert len(made_in(found, True)) == 1 + 4 and len(made_in(found, False)) == 1 + 4
    assert {c.bytes for c in found} == {4 * 16 * 48 * 4}


def test_sequence_parallel_gathers_and_scatters_instead(tmp_path: Path) -> None:
    """No activation is all-reduced, in either pass."""
    plan = plan_of(write_step(BLOCKS, tmp_path), "sequence-parallel 2")
    found = [c for c in large(plan) if c.bytes == ACTIVATION // 2]
    forward = [(c.kind, c.tensor) for c in made_in(found, True)]
    assert forward == [
        ("ReduceScatter", "x"),
        ("AllGather", "n"),
        ("ReduceScatter", "c"),
        ("AllGather", "m"),
        ("ReduceScatter", "f"),
    ]
    backward = made_in(found, False)
    assert kinds(backward)["ReduceScatter"] == 2 and kinds(backward)["AllReduce"] == 0
    (rest,) = [c for c in large(plan) if c not in found]  # scales, and the head that stays whole
    assert rest.kind == "AllReduce" and rest.bytes == (32 * 5 + 32 + 32) * 4
    layer_norm = [c for c in found if c.tensor == "n"]
    assert layer_norm[0].before == "[-, tp, -]" and layer_norm[0].after == "[-, -, -]"


def test_a_sequence_that_the_inputs_lack(tmp_path: Path) -> None:
    """Patches of an image are made by a convolution, tables' rows are summed at once."""
    for model, loss in (("vit", CROSS_ENTROPY), ("dlrm", "bce")):
        step = tmp_path / f"{model}.onnx"
        grad(MODELS / f"{model}.legacy.training.onnx", step, loss=loss, optimizer="sgd")
        with pytest.raises(StrategyError, match="tensor-parallel sums up no activation that has"):
            plan_of(step, "sequence-parallel 2")


@pytest.mark.parametrize("ranks", [2, 4])
def test_an_expert_layer_has_two_all_to_alls_each_way(ranks: int, tmp_path: Path) -> None:
    plan = plan_of(write_step(MOE, tmp_path), f"expert-parallel {ranks}")
    found = large(plan)
    exchanged = [c for c in found if c.kind == "AllToAll"]
    assert [c.tensor for c in made_in(exchanged, True)] == ["given", "made"]
    assert len(made_in(exchanged, False)) == 2
    part = 4 * 4 * 3 * 8 * 4 // ranks
    assert {c.bytes for c in exchanged} == {part * (ranks - 1) // ranks}
    (gradients,) = [c for c in found if c.kind != "AllToAll"]
    shared = (20 * 8 + 8 * 4 + 8 * 3) * 4
    assert gradients.kind == "AllReduce"
    assert gradients.bytes == int(2 * shared * (ranks - 1) / ranks)
    texts = layouts(plan)
    assert (texts["i"], texts["labels"], texts["w2"]) == ("[ep, -]", "[ep, -]", "[-, -]")
    assert [texts[w] for w in ("w3", "w4", "w5")] == ["[ep, -, -]", "[ep, -, -, -]", "[ep, -, -]"]
    assert texts["w4.next"] == "[ep, -, -, -]"


@pytest.mark.slow
def test_fewer_experts_than_ranks(tmp_path: Path) -> None:
    check_training(write_step(MOE, tmp_path), "expert-parallel 5", 2)
    with pytest.raises(StrategyError, match="no weight with a matrix for each expert"):
        plan_of(write_step(MLP, tmp_path, "mse"), "expert-parallel 2")


ROWS = 8
FEATURES = 8 * 32 * 4


def test_a_softmax_over_split_classes_exchanges_scalars_of_rows(tmp_path: Path) -> None:
    """The largest score of each row and the sum of its exponentials; beside that there are the
    features' gradient and the loss."""
    classes = {"mesh": {"tp": 4}, "shard": {"MatMul_y": [[None, None], [None, "tp"]]}}
    plan = plan_of(write_step(HEAD, tmp_path), "tp=4", strategy=classes)
    *rows, features = [c for c in plan.collectives if c.bytes > 8]
    assert [c.bytes for c in rows] == [2 * 4 * ROWS * 3 // 4] * 2
    assert {c.kind for c in rows} == {"AllReduce"}
    of_weight = 4  # the sum of what the split weight becomes
    assert (features.kind, features.bytes) == ("AllReduce", 2 * (FEATURES + of_weight) * 3 // 4)
    assert layouts(plan)["w2"] == layouts(plan)["w2.next"] == "[-, tp]"


def test_classes_split_on_the_axis_of_the_batch(tmp_path: Path) -> None:
    """As InsightFace trains: features come from all ranks, logits stay where they are."""
    classes = {"mesh": {"dp": 4}, "shard": {"MatMul_y": [[None, None], [None, "dp"]]}}
    plan = plan_of(write_step(HEAD, tmp_path), "data-parallel 4", strategy=classes)
    texts = layouts(plan)
    assert (texts["x"], texts["w2"], texts["w2.next"]) == ("[dp, -]", "[-, dp]", "[-, dp]")
    found = large(plan, 2 * 4 * ROWS)
    (gradient,) = [c for c in found if c.kind == "AllReduce"]
    # of w1, which all ranks have, and the sum of what w2 becomes
    assert gradient.bytes == 2 * (64 * 32 + 1) * 4 * 3 // 4
    assert {c.bytes for c in found if c is not gradient} == {FEATURES * 3 // 4}


def in_norm(plan: Plan) -> list[Collective]:
    return [c for c in plan.collectives if "BatchNormalization_n" in c.tensor]


def test_batch_norm_of_all_samples_sums_twice(tmp_path: Path) -> None:
    """Means, then squares of distances; 4 channels."""
    plan = plan_of(write_step(CONV, tmp_path, batch_norm="global"), "data-parallel 4")
    forward = made_in(in_norm(plan), True)
    assert [(c.kind, c.bytes) for c in forward] == [("AllReduce", 2 * 4 * 4 * 3 // 4)] * 2
    assert {c.group for c in forward} == {(0, 1, 2, 3)}


def test_batch_norm_of_a_host_sums_within_it(tmp_path: Path) -> None:
    """4 ranks on 2 hosts."""
    step = write_step(CONV, tmp_path, batch_norm="node", groups=2)
    plan = plan_of(step, "data-parallel 4")
    within = [c for c in in_norm(plan) if c.group == (0, 1)]
    assert {c.groups for c in within} == {2}
    assert len(made_in(within, True)) == 2 and len(made_in(within, False)) >= 2
    assert layouts(plan)["x"] == "[dp:(1)2*dp:(2)2, -, -, -]"
    running = [c for c in in_norm(plan) if c.group == (0, 2)]
    assert [len(c.tensor.split()) for c in running] == [2]  # the mean of the hosts' statistics


def test_batch_norm_of_a_rank_says_nothing_before_its_end(tmp_path: Path) -> None:
    """The running statistics are the mean of all ranks', and then there are the gradients."""
    step = write_step(CONV, tmp_path, batch_norm="local", groups=4)
    plan = plan_of(step, "data-parallel 4")
    assert [len(c.tensor.split()) for c in large(plan, 30)] == [3, 6]
    assert layouts(plan)["x"] == "[dp, -, -, -]"


def test_frozen_statistics_say_nothing(tmp_path: Path) -> None:
    plan = plan_of(write_step(CONV, tmp_path), "data-parallel 4")
    assert [len(c.tensor.split()) for c in large(plan, 30)] == [6]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"batch_norm": "all"}, "--batch-norm 'all': give one of global, node, local"),
        ({"batch_norm": "node"}, "--batch-norm node needs --groups with the number of hosts"),
        ({"batch_norm": "global", "groups": 2}, "--batch-norm global takes no --groups"),
        ({"groups": 2}, "--groups needs --batch-norm node or --batch-norm local"),
        ({"batch_norm": "local", "groups": 3}, "a batch of 8 cannot be divided into 3 equal"),
        ({"batch_norm": "local", "groups": 0}, "--groups 0: must be at least 1"),
    ],
)
def test_statistics_that_do_not_fit(how: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match=message):
        write_step(CONV, tmp_path, **how)


def test_a_model_without_batch_norm_says_how_to_export_it(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"TrainingMode\.TRAINING, do_constant_folding=False"):
        write_step(MLP, tmp_path, batch_norm="global")


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["expert-parallel 2", "expert-parallel dp=2,ep=2"])
def test_exported_mixtures_train(layout: str, tmp_path: Path) -> None:
    step = tmp_path / "step.onnx"
    model = MODELS / "experts/qwen3_moe.eager.legacy.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # norms of ones are stored once
        grad(model, step, loss=CROSS_ENTROPY, optimizer="sgd")
    plan = check_training(step, layout, 2)
    texts = {name: text for name, text in layouts(plan).items() if "experts" in name}
    assert texts and {text.split(",")[0] for text in texts.values()} == {"[ep"}


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["tensor-parallel 2", "tensor-parallel 3", "zero1 dp=2,tp=2"])
def test_a_parameter_that_no_split_of_activations_reaches_is_split_alone(
    layout: str, tmp_path: Path
) -> None:
    """The classifier: its classes would be summed inside the loss."""
    step = tmp_path / "step.onnx"
    model = MODELS / "llama.legacy.training.onnx"
    grad(model, step, loss=CROSS_ENTROPY, optimizer="adam")
    plan = check_training(step, layout, 2)
    found = layouts(plan)
    for kind in ("", ".exp_avg", ".exp_avg_sq"):
        assert "tp" in found[f"network.lm_head.weight{kind}"]
    tensors = [c.tensor for c in plan.collectives if c.kind == "AllGather"]
    assert len([name for name in tensors if name.startswith("/network/lm_head/")]) == 1
