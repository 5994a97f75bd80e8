"""What the presets decide: data parallel without collectives, and where they do not apply."""

from __future__ import annotations

import pytest
from agreement import options
from committed import DYNAMIC, MODELS, ODD, STATIC, dims_of

from onnxpar import pipeline
from onnxpar.errors import StrategyError
from onnxpar.pipeline import Options


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("model", STATIC)
def test_data_parallel_inference_has_no_collective(model: str, ranks: int) -> None:
    plan, _ = pipeline.plan(MODELS / model, options(f"data-parallel {ranks}"))
    assert plan.collectives == []
    for port in plan.outputs:
        assert port.layout is not None
        assert port.layout.text(plan.mesh).startswith("[dp")


@pytest.mark.parametrize("model", DYNAMIC)
def test_uneven_batch_has_no_collective(model: str) -> None:
    plan, _ = pipeline.plan(MODELS / model, options("data-parallel 2", dims=dims_of(model, ODD)))
    assert plan.collectives == []
    layout = plan.outputs[0].layout
    assert layout is not None
    assert [layout.local_shape(plan.mesh, r)[0] for r in range(2)] == [3, 2]


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("tensor-parallel 0", "--devices 0: at least 1 rank, and at most 1,048,576"),
        ("hybrid 3", "give --mesh dp=..,tp=.."),
        ("hybrid tp=4", "hybrid needs an axis dp and another"),
        ("pipeline-parallel 2", "there are data-parallel, tensor-parallel, hybrid"),
    ],
)
def test_presets_that_do_not_apply(layout: str, message: str) -> None:
    with pytest.raises(StrategyError, match=message.replace(".", r"\.")):
        pipeline.plan(MODELS / "gpt2.dynamo.static.onnx", options(layout))


def test_devices_and_mesh_must_agree() -> None:
    how = Options(devices=3, mesh=options("dp=2,tp=2").mesh)
    with pytest.raises(StrategyError, match="has 4 ranks, --devices says 3"):
        pipeline.plan(MODELS / "gpt2.dynamo.static.onnx", how)
    with pytest.raises(StrategyError, match="how many ranks"):
        pipeline.plan(MODELS / "gpt2.dynamo.static.onnx", Options())
