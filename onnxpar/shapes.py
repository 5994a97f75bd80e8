"""Shape inference and constant folding in one walk over a graph with static inputs.

ONNX's own inference stops at the first shape that is computed by nodes. Here each node is either
evaluated (all its operands are known and small) or inferred with what is known so far, so that
targets computed from Shape are constants by the time they are needed. Declared shapes are
not trusted, but for results of ops that ONNX does not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import AttributeProto, NodeProto, TensorProto, TypeProto, numpy_helper
from onnx.reference import ReferenceEvaluator

from onnxpar.runtime_shapes import RuntimeShapes

FOLD_LIMIT = 1 << 16
"""Elements of a result up to which it is folded; larger ones are computed in each run."""
SMALL_WEIGHT = 256
"""Elements of a floating-point initializer up to which it takes part in folding."""

_NEVER = frozenset(
    (
        "RandomNormal",
        "RandomNormalLike",
        "RandomUniform",
        "RandomUniformLike",
        "Bernoulli",
        "Multinomial",
        "If",
        "Loop",
        "Scan",
        "SequenceEmpty",
        "Optional",
        "Dropout",
        "LRN",  # onnx's reference counts its channels by the size of the batch
    )
)


def infer(model: onnx.ModelProto) -> None:
    """Folds what is constant and declares the type of every tensor it can tell, in place."""
    _Walk(model).run()


class _Walk:
    def __init__(self, model: onnx.ModelProto) -> None:
        self.model = model
        self.graph = model.graph
        self.opsets = {o.domain or "": o.version for o in model.opset_import}
        self.types: dict[str, TypeProto] = {}
        self.values: dict[str, np.ndarray[Any, Any]] = {}
        self.protos: dict[str, TensorProto] = {}
        self.folded: set[str] = set()
        self.runtime = RuntimeShapes(model.opset_import, model.ir_version)
        self.declared = {
            v.name: v.type for v in model.graph.value_info if _static_shape(v.type) is not None
        }

    def run(self) -> None:
        for tensor in self.graph.input:
            self.types[tensor.name] = tensor.type
        for weight in self.graph.initializer:
            self.types[weight.name] = onnx.helper.make_tensor_type_proto(
                weight.data_type, list(weight.dims)
            )
            if _is_small(weight):
                self.values[weight.name] = numpy_helper.to_array(weight)
                self.protos[weight.name] = weight
        kept = [node for node in self.graph.node if not self._fold(node) and self._infer(node)]
        del self.graph.node[:]
        self.graph.node.extend(kept)
        self._declare()

    def _fold(self, node: NodeProto) -> bool:
        """Whether the node's results are constants from here on."""
        values = self._evaluate(node)
        if values is None or len(values) != len(node.output):
            return False
        for name, value in zip(node.output, values, strict=True):
            array = np.asarray(value)
            self.values[name] = array
            self.protos[name] = numpy_helper.from_array(array, name)
            self.types[name] = onnx.helper.make_tensor_type_proto(
                self.protos[name].data_type, list(array.shape)
            )
            self.folded.add(name)
        return True

    def _evaluate(self, node: NodeProto) -> list[Any] | None:
        if node.domain not in ("", "ai.onnx") or node.op_type in _NEVER:
            return None
        if node.op_type == "Constant":
            return _constant(node)
        if node.op_type in ("Shape", "Size"):
            return self._shape(node)
        if not all(name in self.values for name in node.input if name):
            return None
        if any(a.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS) for a in node.attribute):
            return None
        if not self._fits(node):
            return None
        feeds = {name: self.values[name] for name in node.input if name}
        try:
            results = ReferenceEvaluator(self._one_node(node)).run(None, feeds)
        except (NotImplementedError, RuntimeError, TypeError, ValueError, IndexError):
            return None  # left to the runtime, which has every op
        if any(not isinstance(r, (np.ndarray, np.generic)) for r in results):
            return None
        return list(results)

    def _fits(self, node: NodeProto) -> bool:
        """Whether the results are small enough to be stored."""
        types = self._inferred(node)
        shapes = [_static_shape(types.get(o)) for o in node.output if o]
        if any(shape is None for shape in shapes):
            return node.op_type in ("Range", "NonZero", "ConstantOfShape", "Tile", "Expand")
        return all(np.prod(shape or (), dtype=np.int64) <= FOLD_LIMIT for shape in shapes)

    def _one_node(self, node: NodeProto) -> onnx.ModelProto:
        inputs = [
            onnx.helper.make_value_info(n, self.types[n]) for n in dict.fromkeys(node.input) if n
        ]
        outputs = [onnx.helper.make_empty_tensor_value_info(n) for n in node.output if n]
        graph = onnx.helper.make_graph([node], "fold", inputs, outputs)
        return onnx.helper.make_model(
            graph, opset_imports=self.model.opset_import, ir_version=self.model.ir_version
        )

    def _shape(self, node: NodeProto) -> list[Any] | None:
        shape = _static_shape(self.types.get(node.input[0]))
        if shape is None:
            return None
        if node.op_type == "Size":
            return [np.array(np.prod(shape, dtype=np.int64))]
        bounds = {a.name: a.i for a in node.attribute}
        return [np.array(shape[bounds.get("start", 0) : bounds.get("end", len(shape))], np.int64)]

    def _infer(self, node: NodeProto) -> bool:
        """Records the types of the results that inference can tell; always true: the node stays."""
        self.types.update(self._inferred(node))
        return True

    def _inferred(self, node: NodeProto) -> dict[str, TypeProto]:
        domain = "" if node.domain == "ai.onnx" else node.domain
        try:
            schema = onnx.defs.get_schema(node.op_type, self.opsets.get(domain, 1), domain)
        except onnx.defs.SchemaError:
            found = self.runtime.infer(node, self.types, self.protos)
            open_ = [o for o in node.output if _static_shape(found.get(o)) is None]
            return found | {o: self.declared[o] for o in open_ if o in self.declared}
        names = [n for n in node.input if n]
        if any(a.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS) for a in node.attribute):
            names = list(self.types)
        if any(n and n not in self.types for n in node.input):
            return {}
        try:
            found = onnx.shape_inference.infer_node_outputs(
                schema,
                node,
                {n: self.types[n] for n in names},
                {n: self.protos[n] for n in node.input if n in self.protos},
                opset_imports=list(self.model.opset_import),
                ir_version=self.model.ir_version,
            )
        except (onnx.shape_inference.InferenceError, KeyError, RuntimeError):
            return {}
        return {name: type_ for name, type_ in found.items() if name}

    def _declare(self) -> None:
        """Writes value_info, and the folded constants that some node still reads."""
        used = {name for node in self.graph.node for name in _reads(node)}
        outputs = {o.name for o in self.graph.output}
        for name in sorted(self.folded & (used | outputs)):
            self.graph.initializer.append(self.protos[name])
        kept = [w for w in self.graph.initializer if w.name in used | outputs]
        del self.graph.initializer[:]
        self.graph.initializer.extend(kept)
        del self.graph.value_info[:]
        for node in self.graph.node:
            for name in node.output:
                if name in self.types and name not in outputs:
                    self.graph.value_info.append(
                        onnx.helper.make_value_info(name, self.types[name])
                    )
        for output in self.graph.output:
            if output.name in self.types:
                output.type.CopyFrom(self.types[output.name])


def infer_result(
    node: gs.Node, shapes: Sequence[Sequence[int] | None], opset: int
) -> tuple[Any, list[int]]:
    """The dtype and shape of a node's only result, for operands of these shapes."""
    types = {}
    constants = {}
    for tensor, shape in zip(node.inputs, shapes, strict=True):
        if shape is not None:
            dtype = gs.exporters.onnx_exporter.dtype_to_onnx(tensor.dtype)
            types[tensor.name] = onnx.helper.make_tensor_type_proto(dtype, shape)
        if isinstance(tensor, gs.Constant):
            constants[tensor.name] = numpy_helper.from_array(tensor.values, tensor.name)
    proto = gs.exporters.onnx_exporter.OnnxExporter.export_node(node)
    known = [a for a in proto.attribute if not a.name.startswith("onnxpar.")]
    del proto.attribute[:]
    proto.attribute.extend(known)
    schema = onnx.defs.get_schema(node.op, opset, "")
    found = onnx.shape_inference.infer_node_outputs(
        schema, proto, types, constants, opset_imports=[onnx.helper.make_opsetid("", opset)]
    )[node.outputs[0].name]
    shape = _static_shape(found)
    assert shape is not None, f"{node.op} '{node.name}': no shape from {shapes}"
    return onnx.helper.tensor_dtype_to_np_dtype(found.tensor_type.elem_type), list(shape)


def _is_small(weight: TensorProto) -> bool:
    if weight.data_location == TensorProto.EXTERNAL:
        return False
    size = int(np.prod(weight.dims, dtype=np.int64))
    whole_number = weight.data_type in (TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL)
    return size <= (FOLD_LIMIT if whole_number else SMALL_WEIGHT)


def _constant(node: NodeProto) -> list[Any] | None:
    attribute = node.attribute[0]
    if attribute.name == "value":
        return [numpy_helper.to_array(attribute.t)]
    dtypes = {"value_float": "f4", "value_floats": "f4", "value_int": "i8", "value_ints": "i8"}
    if attribute.name not in dtypes:
        return None
    return [np.array(onnx.helper.get_attribute_value(attribute), dtypes[attribute.name])]


def _static_shape(type_: TypeProto | None) -> tuple[int, ...] | None:
    if type_ is None or not type_.HasField("tensor_type"):
        return None
    if not type_.tensor_type.HasField("shape"):
        return None
    dims = type_.tensor_type.shape.dim
    if any(not d.HasField("dim_value") for d in dims):
        return None
    return tuple(d.dim_value for d in dims)


def _reads(node: NodeProto) -> list[str]:
    """Every name that a node reads, those that its subgraphs capture included."""
    names = list(node.input)
    for attribute in node.attribute:
        for graph in [attribute.g, *attribute.graphs]:
            for inner in graph.node:
                names += _reads(inner)
            names += [o.name for o in graph.output]
    return names
