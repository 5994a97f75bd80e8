"""Models of stored integers: what onnxruntime fuses in the whole model, it fuses on the ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from agreement import TIMEOUT, check_outputs, options
from quantized_models import (
    int4_gemm,
    int4_mlp,
    int4_shared,
    int4_table,
    optimizing,
    qdq_convolutions,
    qdq_mlp,
    qdq_residual,
    quantized_ops,
)

from onnxpar.base.errors import StrategyError
from onnxpar.planner import sharder
from onnxpar.runtime.session.feeds import make_feeds
from onnxpar.runtime.session.threads import ThreadSession

MODELS: dict[str, Callable[[], onnx.ModelProto]] = {
    "int4 mlp, wide": lambda: int4_mlp(1, 256, 1024),
    "int4 mlp, open": lambda: int4_mlp("n"),
    "int4 gemm": int4_gemm,
    "int4 shared": int4_shared,
    "int4 table": int4_table,
    "qdq mlp, wide": lambda: qdq_mlp(1, 256, 1024),
    "qdq mlp, open": lambda: qdq_mlp("n"),
    "qdq residual": qdq_residual,
    "qdq mlp, int8": lambda: qdq_mlp(1, 256, 1024, signed=True),
    "qdq gemm, int8": lambda: qdq_mlp(1, 256, 1024, op="Gemm", signed=True),
    "qdq residual, int8": lambda: qdq_residual(signed=True),
    "qdq convolutions, int8": lambda: qdq_convolutions(signed=True),
}
STRATEGIES = ["", "tensor-parallel ", "data-parallel "]


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.strip() or "search")
@pytest.mark.parametrize("name", MODELS)
def test_what_onnxruntime_fuses_is_fused_on_the_ranks(
    name: str, strategy: str, ranks: int, tmp_path: Path
) -> None:
    file = tmp_path / "model.onnx"
    onnx.save(MODELS[name](), file)
    seen = optimizing(tmp_path / "whole.onnx")
    whole = ort.InferenceSession(str(file), seen, ["CPUExecutionProvider"])
    feeds = feeds_of(whole)
    plan = sharder.shard(file, tmp_path / "m.par", options(f"{strategy}{ranks}"))
    seen = optimizing(tmp_path / "part.onnx")
    with ThreadSession(tmp_path / "m.par", seen, timeout=TIMEOUT) as session:
        have = session.run(None, feeds)
    check_outputs(have, whole.run(None, feeds), [p.name for p in plan.outputs])
    wanted = quantized_ops(tmp_path / "whole.onnx")
    for rank in range(ranks):
        part = onnx.load(tmp_path / "m.par" / f"rank_{rank:04d}.onnx", load_external_data=False)
        is_shared = name == "int4 shared"  # which onnxruntime leaves in floats
        assert is_shared or readers(part) <= readers(onnx.load(file)), "something stands between"
        assert quantized_ops(tmp_path / f"part.rank{rank}.onnx") == wanted


def readers(model: onnx.ModelProto) -> set[str]:
    """The ops that read what DequantizeLinear makes."""
    nodes = model.graph.node
    made = {name for node in nodes if node.op_type == "DequantizeLinear" for name in node.output}
    return {node.op_type for node in nodes if not made.isdisjoint(node.input)}


def feeds_of(session: ort.InferenceSession) -> dict[str, np.ndarray]:
    """Random feeds; a size that is open is 5."""
    ports = [
        (port.name, "int64" if "int64" in port.type else "float32", shape_of(port.shape))
        for port in session.get_inputs()
    ]
    return make_feeds(ports, {name: (0, 256) for name, dtype, _ in ports if dtype == "int64"})


def shape_of(shape: list[int | str]) -> tuple[int, ...]:
    return tuple(5 if isinstance(size, str) else size for size in shape)


def test_nodes_that_become_one_cannot_be_asked_to_differ(tmp_path: Path) -> None:
    onnx.save(int4_mlp(), tmp_path / "model.onnx")
    asked = {"MatMul_1": [[1, 1, 1], [1, 2]], "DequantizeLinear_0": [[1, 1], [1, 1]]}
    how = options("tp=2", strategy={"shard": asked})
    with pytest.raises(StrategyError, match="onnxruntime fuses the node with Dequantize"):
        sharder.plan(tmp_path / "model.onnx", how)


def test_what_is_asked_of_a_product_holds_for_its_weight(tmp_path: Path) -> None:
    onnx.save(int4_mlp(), tmp_path / "model.onnx")
    how = options("tp=2", strategy={"shard": {"MatMul_5": [[1, 1, 2], [2, 1]]}})
    plan, _ = sharder.plan(tmp_path / "model.onnx", how)
    assert [w.layout_text for w in plan.weights] == ["[-, tp]", "[-, tp]", "[tp, -]", "[tp, -]"]
