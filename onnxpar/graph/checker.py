"""Checks a model against the ONNX standard, without reading its weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
from onnx import GraphProto, TensorProto, helper

from onnxpar.base.custom_ops import quiet_options
from onnxpar.base.errors import ModelError, PassError, StrategyError
from onnxpar.graph.shapes_by_onnxruntime import REFUSED, is_known, is_own_domain
from onnxpar.graph.stored import (
    copy_with_stubs,
    element_bits,
    graphs_of,
    nodes_of,
    stored_tensors,
    subgraphs_of,
)

MIN_IR = 4
"""The first IR version in which initializers need not be inputs."""
MIN_OPSET = 13
"""An opset that every supported onnxruntime loads."""
_READ_AT_MOST = 1 << 16
"""Initializers with more bytes are replaced by stubs before ONNX's checker reads a model."""
_LENT = "com.microsoft"
"""The domain to which onnxruntime's own ops are moved for the time of a check, because the checker
skips it."""


@cache
def newest_opset() -> int:
    """Returns the newest opset that both the installed onnx and onnxruntime know."""
    newest = onnx.defs.onnx_opset_version()
    return next(v for v in range(newest, 0, -1) if loads(_IDENTITY, v))


@cache
def newest_ir() -> int:
    """Returns the newest IR version that both the installed onnx and onnxruntime know."""
    return next(v for v in range(onnx.IR_VERSION, 0, -1) if loads(_IDENTITY, MIN_OPSET, v))


_IDENTITY = helper.make_node("Identity", ["x"], ["y"])


def loads(node: onnx.NodeProto, opset: int, ir_version: int = MIN_IR) -> bool:
    """True if onnxruntime loads a model of `node` alone with this opset and IR version. The node
    must compute y from x, both float32 [1]."""
    value, result = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [1]) for n in "xy")
    opsets = [helper.make_opsetid("", opset)]
    graph = helper.make_graph([node], "version", [value], [result])
    model = helper.make_model(graph, opset_imports=opsets, ir_version=ir_version)
    return _refusal(model.SerializeToString()) is None


@dataclass(frozen=True)
class Refusal:
    """The reason why onnxruntime does not load a model. `certain` is False if only a kernel, or an
    option of one, may be missing: another execution provider may have it."""

    reason: str
    certain: bool = True

    def error(self, path: Path) -> ModelError:
        """Returns the error for the user, about the model in `path`."""
        return ModelError(f"{path}: onnxruntime cannot load this model: {self.reason}")


def check_functions(model: onnx.ModelProto, path: Path) -> None:
    """Checks a model with functions before they are inlined. Errors: ModelError if onnxruntime does
    not load it."""
    if _has_unknown(model) or _refusal(_outline(model)) is None:
        return
    refusal = _refusal(str(path))
    if refusal is not None and refusal.certain:
        raise refusal.error(path)


def check_references(graph: GraphProto, path: Path) -> None:
    """Checks that no node of the graph refers to an attribute of a function, which only nodes in
    functions may. Errors: ModelError."""
    for node in nodes_of(graph):
        name = next((a.name for a in node.attribute if a.ref_attr_name), None)
        if name is not None:
            raise ModelError(
                f"{path}: attribute {name!r} of {node.op_type} {node.name!r} refers to an "
                "attribute of a function, but the node is in no function; export the model again"
            )


def check_standard(model: onnx.ModelProto, path: Path) -> Refusal | None:
    """Returns why onnxruntime does not load a model; None if it does. To be called after functions
    have been inlined and stored tensors checked.

    Errors: ModelError if the model violates the standard and onnxruntime does not load it either.
    """
    opset = max((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), default=0)
    if opset > newest_opset() or model.ir_version > newest_ir():
        raise ModelError(
            f"{path}: the model has opset {opset}, IR {model.ir_version}; onnx {onnx.__version__} "
            f"and onnxruntime {ort.__version__} load up to opset {newest_opset()}, IR "
            f"{newest_ir()}; convert it with onnx.version_converter, or install newer ones"
        )
    if opset < 1 and any(n.domain in ("", "ai.onnx") for n in nodes_of(model.graph)):
        raise ModelError(
            f"{path}: the model imports no opset for ONNX's own ops; export the model again"
        )
    _check_types(model.graph, path)
    broken: str | None = None
    try:
        onnx.checker.check_model(_bare(model))
    except UnicodeDecodeError:  # the message quotes the model
        broken = "a text in the model is not UTF-8"
    except onnx.checker.ValidationError as error:
        broken = str(error).splitlines()[0]
    # An outline without weights loads much faster than the model.
    if broken is None and (_has_unknown(model) or _refusal(_outline(model)) is None):
        return None
    refusal = _refusal(str(path))
    if refusal is not None and refusal.certain and broken is not None:
        raise ModelError(f"{path}: the model violates the ONNX standard: {broken}")
    return refusal


def check_bound(model: onnx.ModelProto, dims: Mapping[str, int | str], path: Path) -> None:
    """Checks a model in which the user's `dims` gave numbers to open sizes, and which onnxruntime
    loads with open sizes.

    Errors: StrategyError if onnxruntime does not load it with these sizes, because a branch for
    other sizes does not fit them. Constant folding is on, because only folding may find the misfit.
    """
    if dims and not _has_unknown(model):
        refusal = _refusal(_outline(model), ort.GraphOptimizationLevel.ORT_ENABLE_ALL)
        if refusal is not None and refusal.certain:
            flags = " ".join(f"--dim {name}={size}" for name, size in dims.items())
            raise StrategyError(
                f"{path}: onnxruntime cannot load this model with {flags}: {refusal.reason}; leave "
                "the sizes open, and give the usual ones with --typical"
            )


_OF_KERNELS = ("NOT_IMPLEMENTED", "Exception during initialization")
"""In onnxruntime's messages: signs of a valid model whose kernel is missing, or cannot be created
(such as an LSTM whose first dimension is the batch)."""
_FAULTS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


@contextmanager
def blaming(refusal: Refusal | None, path: Path) -> Iterator[None]:
    """A block that reads on in a model that onnxruntime refuses, because a later error may name the
    faulty node.

    A ModelError in the block passes through; a rewrite that fails becomes a ModelError with
    onnxruntime's reason. If the block succeeds, that error is raised if the refusal is certain.
    Without a refusal, the block changes nothing.
    """
    if refusal is None:
        yield
        return
    try:
        yield
    except PassError as error:
        if isinstance(error.__cause__, _FAULTS):
            raise refusal.error(path) from None
        raise
    if refusal.certain:
        raise refusal.error(path)


def _check_types(graph: GraphProto, path: Path) -> None:
    """Checks that each input has a type that ONNX knows. Errors: ModelError."""
    known = TensorProto.DataType.values()
    for port in graph.input:
        kind = port.type.WhichOneof("value")
        element = port.type.tensor_type.elem_type
        if kind is None or (kind == "tensor_type" and not element):
            raise ModelError(f"{path}: input {port.name!r} has no type; export the model again")
        if kind == "tensor_type" and element not in known:
            raise ModelError(
                f"{path}: input {port.name!r} has data type {element}, which is not valid; export "
                "the model again"
            )


def _bare(model: onnx.ModelProto) -> onnx.ModelProto:
    """Returns the model for ONNX's checker: without large data, which the checker would copy, and
    without violations that onnxruntime tolerates."""
    bare = copy_with_stubs(model, _stub_of_large)
    for tensor in stored_tensors(bare.graph):
        if tensor.data_location == TensorProto.EXTERNAL:
            tensor.CopyFrom(_inline_stub(tensor))
    bare.ir_version = max(bare.ir_version, MIN_IR)
    bare.graph.name = bare.graph.name or "graph"
    del bare.metadata_props[:]
    for graph in graphs_of(bare.graph):
        for port in (*graph.input, *graph.output):
            kind = port.type.WhichOneof("value")
            if kind == "tensor_type":
                port.type.tensor_type.shape.SetInParent()
            elif kind is None and graph is bare.graph:
                port.type.CopyFrom(helper.make_tensor_type_proto(TensorProto.FLOAT, []))
    _lend_domain(bare.graph, bare.opset_import)
    return bare


def _has_unknown(model: onnx.ModelProto) -> bool:
    """True if the model has ops that onnxruntime does not know on its own, such as custom ops or
    collectives."""
    called = {(f.domain, f.name) for f in model.functions}
    nodes = [*nodes_of(model.graph)]
    for function in model.functions:
        for node in function.node:
            nodes += [node, *(n for inner in subgraphs_of(node) for n in nodes_of(inner))]
    return any(
        not is_own_domain(node.domain) and (node.domain, node.op_type) not in called
        for node in nodes
    )


def _outline(model: onnx.ModelProto) -> bytes:
    """Returns the model as bytes, with inputs in place of large initializers of the main graph, so
    that onnxruntime can try to load it quickly."""
    large = [t for t in model.graph.initializer if _is_large(t)]
    outline = copy_with_stubs(model, lambda t: TensorProto() if _is_large(t) else None)
    graph = outline.graph
    kept = [t for t in graph.initializer if t.data_type]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    known = {port.name for port in graph.input}
    graph.input.extend(
        helper.make_tensor_value_info(t.name, t.data_type, list(t.dims))
        for t in large
        if t.name not in known
    )
    return bytes(outline.SerializeToString())


def _is_large(tensor: TensorProto) -> bool:
    return tensor.data_location == TensorProto.EXTERNAL or len(tensor.raw_data) > _READ_AT_MOST


def _refusal(
    model: str | bytes,
    level: ort.GraphOptimizationLevel = ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
) -> Refusal | None:
    """Returns why onnxruntime does not load a model (a path or bytes) at this level of
    optimization; None if it loads it."""
    options = quiet_options(1)
    options.graph_optimization_level = level
    try:
        ort.InferenceSession(model, options, ["CPUExecutionProvider"])
    except UnicodeDecodeError:  # the message quotes the model
        return Refusal("a name in the model is not UTF-8")
    except REFUSED as error:
        text = str(error).splitlines()[0]
        return Refusal(text, not any(lack in text for lack in _OF_KERNELS))
    return None


def _lend_domain(graph: GraphProto, opsets: Any) -> None:
    """Moves ops that onnxruntime adds to ONNX's own domain (SimplifiedLayerNormalization) to the
    domain _LENT, which the checker skips."""
    opset = next((o.version for o in opsets if o.domain in ("", "ai.onnx")), 1)
    for node in nodes_of(graph):
        is_standard = node.domain in ("", "ai.onnx") and onnx.defs.has(node.op_type, opset)
        if not is_standard and is_known(node.op_type, node.domain):
            node.domain = _LENT
            if all(o.domain != _LENT for o in opsets):
                opsets.append(helper.make_opsetid(_LENT, 1))


def _stub_of_large(tensor: TensorProto) -> TensorProto | None:
    return _inline_stub(tensor) if len(tensor.raw_data) > _READ_AT_MOST else None


def _inline_stub(tensor: TensorProto) -> TensorProto:
    """Returns an empty tensor, or a zero scalar, to stand in for a tensor whose data ONNX's checker
    would copy, or look for in the working directory."""
    dims, dtype = tensor.dims, tensor.data_type
    data = b"" if dims else bytes(16)[: -(-element_bits(dtype) // 8)]
    return TensorProto(name=tensor.name, data_type=dtype, dims=[0] if dims else [], raw_data=data)
