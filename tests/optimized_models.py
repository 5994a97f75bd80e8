"""Variants of the committed models as onnxruntime's own tools make them, and how exact they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from agreement import relative_error
from committed import MODELS
from onnx import ModelProto, NodeProto, helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, quantize_dynamic, quantize_static

Array = npt.NDArray[Any]
Level = ort.GraphOptimizationLevel

SOURCES = ("bert", "gpt2", "resnet", "mobilenet")
HEADS = {"bert": (4, 32), "gpt2": (8, 48)}
"""Heads and hidden size, which the transformer optimizer asks for."""
LEVELS = {"basic": Level.ORT_ENABLE_BASIC, "extended": Level.ORT_ENABLE_EXTENDED}
STEP = 1e-7
"""By how much products are scaled to see how far rounding alone moves a model's results."""


def make_variant(source: str, variant: str, folder: Path) -> Path:
    """Writes a variant of a committed export, made by onnxruntime's own tools."""
    plain = folder / f"{source}.onnx"
    model = onnx.load(MODELS / f"{source}.dynamo.static.onnx")
    del model.graph.value_info[:]  # the quantizer trusts it, the exporter's is wrong
    onnx.save(model, plain)
    path = folder / f"{source}.{variant}.onnx"
    if variant == "dynamic":
        quantize_dynamic(plain, path)
    elif variant == "qdq":
        quantize_static(plain, path, Samples(model), per_channel=source in ("resnet", "gpt2"))
    elif variant == "transformer":
        _optimize_transformer(source, plain, path)
    else:
        options = session_options(LEVELS[variant])
        options.optimized_model_filepath = str(path)
        ort.InferenceSession(str(plain), options, providers=["CPUExecutionProvider"])
    return path


def _optimize_transformer(source: str, plain: Path, path: Path) -> None:
    from onnxruntime.transformers.optimizer import optimize_model

    heads, hidden = HEADS[source]
    optimized = optimize_model(str(plain), source, num_heads=heads, hidden_size=hidden, opt_level=0)
    optimized.save_model_to_file(str(path))


class Samples(CalibrationDataReader):
    """A few random inputs to calibrate with."""

    def __init__(self, model: ModelProto) -> None:
        self.feeds = iter([random_feeds(model, seed) for seed in range(3)])

    def get_next(self) -> dict[str, Array] | None:
        return next(self.feeds, None)


def random_feeds(model: ModelProto, seed: int = 9) -> dict[str, Array]:
    """Inputs that every table accepts; masks hide nothing but the ends of some rows."""
    rng = np.random.default_rng(seed)
    feeds: dict[str, Array] = {}
    for port in model.graph.input:
        shape = [d.dim_value for d in port.type.tensor_type.shape.dim]
        if port.type.tensor_type.elem_type == onnx.TensorProto.FLOAT:
            feeds[port.name] = rng.standard_normal(shape).astype(np.float32)
        elif "mask" in port.name:
            feeds[port.name] = np.ones(shape, np.int64)
            feeds[port.name][1::2, shape[1] // 2 :] = 0
        else:
            feeds[port.name] = rng.integers(0, 2 if "type" in port.name else 50, shape)
    return feeds


def session_options(level: Any = Level.ORT_ENABLE_ALL) -> ort.SessionOptions:
    """Options of one quiet thread."""
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return options


def run_model(model: ModelProto, feeds: Mapping[str, Array], level: Any) -> list[Array]:
    """The outputs of the unsplit model."""
    session = ort.InferenceSession(
        model.SerializeToString(), session_options(level), providers=["CPUExecutionProvider"]
    )
    return [np.asarray(out) for out in session.run(None, dict(feeds))]


def rounding_errors(model: ModelProto, feeds: Mapping[str, Array], level: Any) -> list[float]:
    """How far each output of the unsplit model moves where what its Conv and Gemm (also written
    as MatMul) nodes make is scaled by 1 + STEP or 1 - STEP: all by one, or each at random."""
    wanted = run_model(model, feeds, level)
    worst = [0.0] * len(wanted)
    for signs in _signs(sum(n.op_type in ("Conv", "Gemm", "MatMul") for n in model.graph.node)):
        moved = run_model(_scaled(model, signs), feeds, level)
        worst = [max(w, relative_error(a, b)) for w, a, b in zip(worst, moved, wanted, strict=True)]
    return worst


def _signs(count: int) -> Iterator[Sequence[float]]:
    yield [1.0] * count
    yield [-1.0] * count
    for seed in range(4):
        yield np.random.default_rng(seed).choice([-1.0, 1.0], count).tolist()


def _scaled(model: ModelProto, signs: Sequence[float]) -> ModelProto:
    scaled = ModelProto()
    scaled.CopyFrom(model)
    factors = {sign: f"scale{sign}" for sign in (1.0, -1.0)}
    for sign, name in factors.items():
        value = np.array(1 + sign * STEP, np.float32)
        scaled.graph.initializer.append(numpy_helper.from_array(value, name))
    nodes: list[NodeProto] = []
    left = list(signs)
    for node in model.graph.node:
        copy = NodeProto()
        copy.CopyFrom(node)
        nodes.append(copy)
        if node.op_type in ("Conv", "Gemm", "MatMul"):
            made = node.output[0]
            copy.output[0] = f"{made}::unscaled"
            nodes.append(helper.make_node("Mul", [copy.output[0], factors[left.pop()]], [made]))
    del scaled.graph.node[:]
    scaled.graph.node.extend(nodes)
    return scaled
