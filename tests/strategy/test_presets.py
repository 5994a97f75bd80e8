"""What the presets decide: data parallel without collectives, and where they do not apply."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from agreement import options
from committed import DYNAMIC, MODELS, ODD, STATIC, dims_of

import onnxpar
from onnxpar.base.errors import StrategyError
from onnxpar.planner import sharder
from onnxpar.planner.options import Options


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("model", STATIC)
def test_data_parallel_inference_has_no_collective(model: str, ranks: int) -> None:
    plan, _ = sharder.plan(MODELS / model, options(f"data-parallel {ranks}"))
    assert plan.collectives == []
    for port in plan.outputs:
        assert port.layout is not None
        assert port.layout.text(plan.mesh).startswith("[dp")


@pytest.mark.matrix
@pytest.mark.parametrize("model", DYNAMIC)
def test_uneven_batch_has_no_collective(model: str) -> None:
    plan, _ = sharder.plan(MODELS / model, options("data-parallel 2", dims=dims_of(model, ODD)))
    assert plan.collectives == []
    layout = plan.outputs[0].layout
    assert layout is not None
    assert [layout.local_shape(plan.mesh, r)[0] for r in range(2)] == [3, 2]


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("tensor-parallel 0", "--devices 0: give a number from 1 to 1,048,576"),
        ("hybrid 3", "give --mesh dp=..,tp=.."),
        ("hybrid tp=4", "hybrid needs a mesh with an axis dp and another axis"),
        ("pipeline-parallel 2", "use one of data-parallel, tensor-parallel, hybrid"),
    ],
)
def test_presets_that_do_not_apply(layout: str, message: str) -> None:
    with pytest.raises(StrategyError, match=message.replace(".", r"\.")):
        sharder.plan(MODELS / "gpt2.dynamo.static.onnx", options(layout))


def test_devices_and_mesh_must_agree() -> None:
    how = Options(devices=3, mesh=options("dp=2,tp=2").mesh)
    with pytest.raises(StrategyError, match="has 4 ranks, but --devices is 3; leave"):
        sharder.plan(MODELS / "gpt2.dynamo.static.onnx", how)
    with pytest.raises(StrategyError, match="how many ranks"):
        sharder.plan(MODELS / "gpt2.dynamo.static.onnx", Options())
    asked = {"mesh": {"dp": 2, "ep": 2}, "tensors": {"logits": ["dp", None, None]}}
    with pytest.raises(StrategyError, match="the mesh of strategy, dp=2,ep=2, has 4 ranks, but"):
        onnxpar.plan(MODELS / "gpt2.dynamo.static.onnx", devices=8, strategy=asked)


HEAD = '<ir_version: 9, opset_import: ["" : 20]> '
EXPERTS = """m (float[6,8] x, float[6,2] gate) => (float[6,8] y) {
  zero = Constant<value = int64[1] {0}>()  two = Constant<value = int64[1] {2}>()
  g = Transpose<perm = [1, 0]>(gate)  s = Unsqueeze(g, two)  u = Unsqueeze(x, zero)
  wide = Mul(u, s)  h = MatMul(wide, w1)  r = Relu(h)  e = MatMul(r, w2)
  y = ReduceSum<keepdims = 0>(e, zero) }"""


@pytest.mark.matrix
@pytest.mark.parametrize("devices", [2, 3, 4])
def test_fewer_experts_than_ranks(devices: int, tmp_path: Path) -> None:
    """Ranks that have no expert add nothing, and results are those of the unsplit model."""
    proto = onnx.parser.parse_model(HEAD + EXPERTS)
    random = np.random.default_rng(0)
    for name, shape in (("w1", (2, 8, 16)), ("w2", (2, 16, 8))):
        weight = random.standard_normal(shape).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, name))
    path = tmp_path / "m.onnx"
    onnx.save(proto, path)
    found = onnxpar.check(path, devices=devices, preset="expert-parallel", check_layouts=True)
    assert found.ok
    weights = {w.name: w.layout_text for w in found.plan.weights}
    assert weights["w1"] == weights["w2"] == "[ep, -, -]"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("m (string[n,4] x) => (string[n,4] y) { y = StringConcat(x, x) }", "'x' holds no numbers"),
        ("m (float x) => (float y) { y = Tanh(x) }", "no input has a dimension"),
        ("m () => (float[4] y) { y = RandomNormal<shape = [4]>() }", "the model has no input"),
    ],
)
def test_models_without_a_batch(text: str, says: str, tmp_path: Path) -> None:
    onnx.save(onnx.parser.parse_model(HEAD + text), tmp_path / "m.onnx")
    with pytest.raises(StrategyError, match=says) as raised:
        onnxpar.plan(tmp_path / "m.onnx", devices=4, preset="data-parallel")
    assert "open sizes" not in str(raised.value)


def test_an_input_without_a_shape(tmp_path: Path) -> None:
    proto = onnx.parser.parse_model(HEAD + "m (float[4] x) => (float[4] y) { y = Tanh(x) }")
    proto.graph.input[0].type.tensor_type.ClearField("shape")
    onnx.save(proto, tmp_path / "m.onnx")
    with pytest.raises(StrategyError, match="'x' declares no shape; export the model with one"):
        onnxpar.plan(tmp_path / "m.onnx", devices=4, preset="data-parallel")


OPEN = "m (float[n,4] x) => (float[n,4] y) { y = Tanh(x) }"


def test_the_hint_to_fix_sizes_is_for_sizes(tmp_path: Path) -> None:
    onnx.save(onnx.parser.parse_model(HEAD + OPEN), tmp_path / "m.onnx")
    for preset in ("zero1", "expert-parallel"):
        with pytest.raises(StrategyError) as raised:
            onnxpar.plan(tmp_path / "m.onnx", devices=2, preset=preset)
        assert "open sizes" not in str(raised.value)
    by_hand = {"mesh": {"dp": 2}, "tensors": {"x": [{"dp": [3, 5]}, None]}}
    with pytest.raises(StrategyError, match=r"sizes are open .*: fix them with --dim n=N"):
        onnxpar.plan(tmp_path / "m.onnx", strategy=by_hand)


@pytest.mark.slow
def test_a_batch_of_one_is_whole_and_the_plan_says_so(tmp_path: Path) -> None:
    onnx.save(onnx.parser.parse_model(HEAD + OPEN.replace("[n", "[1")), tmp_path / "m.onnx")
    found = onnxpar.check(tmp_path / "m.onnx", devices=4, preset="data-parallel")
    assert found.ok
    assert "nothing is split: each of the 4 ranks runs the whole model" in found.plan.notes
    entry = {"mesh": {"dp": 4}, "shard": {"Tanh_y": [["dp", None]]}}
    asked = onnxpar.check(tmp_path / "m.onnx", strategy=entry)
    assert asked.ok
    split = onnxpar.plan(tmp_path / "m.onnx", devices=4)
    assert not split.notes
