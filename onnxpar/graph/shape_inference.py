"""Shape inference and constant folding, node by node, for a graph whose inputs have fixed sizes.

ONNX's own inference stops at the first shape that nodes compute. Here each node is either evaluated
(if all its operands are known and small) or inferred from what is known so far, so that shapes
computed from a Shape node are constants when they are needed. Declared shapes are ignored, except
those of results of ops that ONNX does not know.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import AttributeProto, NodeProto, TensorProto, TypeProto, numpy_helper
from onnx.reference import ReferenceEvaluator

from onnxpar.base.arrays import Array
from onnxpar.graph.attribute_weights import ML
from onnxpar.graph.custom_shapes import custom_shapes
from onnxpar.graph.kernel_sizes import correct_sizes, known_sizes
from onnxpar.graph.picked_sizes import compressed, part_of
from onnxpar.graph.shapes_by_onnxruntime import RuntimeShapes
from onnxpar.graph.stored import FOLD_LIMIT, SMALL_WEIGHT, is_folded, reads_of
from onnxpar.graph.table_reads import reads_beyond

_TRAINED = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)
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
        "DequantizeLinear",  # the runtime computes with integers if an op's operands come from it
        "LRN",  # onnx's reference confuses the number of channels with the batch size
    )
)
"""Ops that are never folded: random ones, those with bodies, sequences, and some for the reasons
beside them."""


_OF_SIZES = frozenset(
    (
        *("Add", "Sub", "Mul", "Max", "Min", "Neg", "Abs", "Equal", "Less", "Greater", "And", "Or"),
        *("Not", "Where", "Gather", "Concat", "Unsqueeze", "Squeeze", "Reshape", "Transpose"),
        *("Slice", "Expand", "ConstantOfShape", "Cast", "Identity"),
    )
)
"""Ops that onnx's reference computes on sizes exactly as onnxruntime does, so that no session is
needed."""
_SIZE_TYPES = ("int64", "int32", "bool")
_SIZE_ELEMENTS = (TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL, TensorProto.FLOAT)
_UNKNOWN_DEFAULTS = {"STFT": {"onesided": 1}}
"""The standard's defaults of attributes without which ONNX infers wrong shapes, by op."""


def _with_defaults(node: NodeProto) -> NodeProto:
    """Returns the node with attributes from _UNKNOWN_DEFAULTS where it lacks them."""
    have = {attribute.name for attribute in node.attribute}
    defaults = _UNKNOWN_DEFAULTS.get(node.op_type, {})
    missing = {name: value for name, value in defaults.items() if name not in have}
    if not missing or node.domain not in ("", "ai.onnx"):
        return node
    whole = NodeProto()
    whole.CopyFrom(node)
    whole.attribute.extend(onnx.helper.make_attribute(*each) for each in missing.items())
    return whole


def _schema(op: str, opset: int, domain: str) -> onnx.defs.OpSchema:
    """Returns the schema that infers an op's results; for PRelu that of Mul, because onnxruntime
    broadcasts both operands. Errors: SchemaError for an unknown op."""
    return onnx.defs.get_schema("Mul" if (op, domain) == ("PRelu", "") else op, opset, domain)


def keep_nodes(graph: onnx.GraphProto, kept: Sequence[NodeProto], others: bool = False) -> None:
    """Makes `kept` the nodes of the graph, in place. `others` is True if some of them are not in
    the graph yet."""
    if others or len(kept) < len(graph.node):
        nodes = list(kept)
        del graph.node[:]
        graph.node.extend(nodes)


def _is_of_sizes(node: NodeProto, operands: Mapping[str, Array]) -> bool:
    """True if onnx's reference may compute the node: it computes sizes, and gives what onnxruntime
    gives. A Slice with negative steps does not, because onnxruntime clamps its start."""
    are_sizes = all(str(array.dtype) in _SIZE_TYPES for array in operands.values())
    if node.op_type not in _OF_SIZES or not are_sizes:
        return False
    if node.op_type == "Cast":
        return next(a.i for a in node.attribute if a.name == "to") in _SIZE_ELEMENTS
    steps = operands.get(node.input[4]) if node.op_type == "Slice" and len(node.input) > 4 else None
    return steps is None or not (steps < 0).any()


class Walk:
    """Types and values of a graph's tensors, as far as they are known; the caller goes through the
    nodes in graph order and calls `evaluate` and `fold`, or `infer`, for each.

    inputs  the types of the graph's inputs; None: as the model declares them
    keep    weights that may be trained are not folded into other constants: floating-point arrays,
            and the floating-point scalars with these names; None: all small weights are folded
    limit   folds all results of at most this many elements; None: FOLD_LIMIT
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        inputs: Mapping[str, TypeProto] | None = None,
        keep: Collection[str] | None = None,
        limit: int | None = None,
    ) -> None:
        self.model = model
        self.keep = keep
        self.limit, self.equal_limit = limit or FOLD_LIMIT, limit or SMALL_WEIGHT
        self.opsets = {o.domain or "": o.version for o in model.opset_import}
        self.runtime = RuntimeShapes(model.opset_import, model.ir_version)
        self.types: dict[str, TypeProto] = {}
        self.values: dict[str, np.ndarray[Any, Any]] = {}
        self.protos: dict[str, TensorProto] = {}
        self.folded: set[str] = set()
        self.kept: set[str] = set()
        self.conflicts: list[NodeProto] = []
        self.splits: dict[str, NodeProto] = {}
        ports = [*model.graph.value_info, *model.graph.output]
        self.declared = {p.name: p.type for p in ports if _static_shape(p.type) is not None}
        self.dtypes = {p.name: p.type.tensor_type.elem_type for p in ports}
        for tensor in model.graph.input:
            self.types[tensor.name] = (inputs or {}).get(tensor.name, tensor.type)
        self.add_weights(model.graph.initializer)

    def add_weights(self, weights: Iterable[TensorProto]) -> None:
        """Records the types of initializers, and the values of small ones."""
        for weight in weights:
            self.types[weight.name] = onnx.helper.make_tensor_type_proto(
                weight.data_type, list(weight.dims)
            )
            if is_folded(weight):
                if (
                    self.keep is not None
                    and weight.data_type in _TRAINED
                    and (weight.dims or weight.name in self.keep)
                ):
                    self.kept.add(weight.name)
                self.values[weight.name] = numpy_helper.to_array(weight)
                self.protos[weight.name] = weight

    def suppose(self, values: Mapping[str, Any]) -> None:
        """Records these values of tensors, by name, such as assumed values of inputs."""
        for name, value in values.items():
            self._know(name, value)

    def fold(self, node: NodeProto, values: Sequence[Any]) -> None:
        """Records a node's results as constants that take the place of the node in the graph."""
        for name, value in zip(node.output, values, strict=True):
            self._know(name, value)
            self.folded.add(name)

    def know(self, node: NodeProto, values: Sequence[Any]) -> None:
        """Records the values of a node's results; the node stays in the graph."""
        for name, value in zip(node.output, values, strict=True):
            self._know(name, value)

    def _know(self, name: str, value: Any) -> None:
        array = np.asarray(value)
        self.values[name] = array
        self.protos[name] = numpy_helper.from_array(array, name)
        self.types[name] = onnx.helper.make_tensor_type_proto(
            self.protos[name].data_type, list(array.shape)
        )

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Returns the shape of a tensor; None unless all sizes are known."""
        return _static_shape(self.types.get(name))

    def sizes(self, name: str) -> tuple[int | None, ...] | None:
        """Returns the shape of a tensor, with None for unknown sizes; None if the number of
        dimensions is unknown."""
        return known_sizes(self.types.get(name))

    def evaluate(self, node: NodeProto) -> list[Any] | None:
        """Returns the values of the node's results if its operands are known and the results small;
        else None."""
        values = self._evaluate(node)
        return values if values is not None and len(values) == len(node.output) else None

    def _evaluate(self, node: NodeProto) -> list[Any] | None:
        """Returns the values of the node's results, maybe fewer than it has; None if they are
        unknown or too large."""
        if node.domain not in ("", "ai.onnx") or node.op_type in _NEVER:
            return None
        if node.op_type == "Constant":
            return _constant(node)
        if node.op_type in ("Shape", "Size"):
            return self._shape(node)
        if not all(name in self.values for name in node.input if name):
            return None
        if not self.kept.isdisjoint(node.input):
            return None
        if any(a.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS) for a in node.attribute):
            return None
        if not self._fits(node):
            return None
        results = self._computed(node)
        if results is None or any(not isinstance(r, (np.ndarray, np.generic)) for r in results):
            return None
        return results

    def _computed(self, node: NodeProto) -> list[Any] | None:
        """Returns the results of a node with known operands as onnxruntime computes them; None if
        they cannot be known before a run."""
        feeds = {name: self.values[name] for name in node.input if name}
        if not _is_of_sizes(node, feeds):
            results = self.runtime.evaluate(node, self.types, self.protos)
            if results is not None:
                return results or None
        try:
            return list(ReferenceEvaluator(self._one_node(node)).run(None, feeds))
        except (NotImplementedError, RuntimeError, TypeError, ValueError, IndexError):
            return None

    def _fits(self, node: NodeProto) -> bool:
        """True if the node's results are small enough to be stored. A large ConstantOfShape of
        floats is not: storing many equal values would only take space."""
        if node.op_type == "ConstantOfShape":
            value = next((numpy_helper.to_array(a.t) for a in node.attribute), np.zeros(1, "f4"))
            size = np.prod(self.values[node.input[0]], dtype=np.int64)
            if value.dtype.kind == "f" and size > self.equal_limit:
                return False
        types = self._inferred(node)
        shapes = [_static_shape(types.get(o)) for o in node.output if o]
        if any(shape is None for shape in shapes):
            return node.op_type in ("Range", "NonZero", "ConstantOfShape", "Tile", "Expand")
        return all(np.prod(shape or (), dtype=np.int64) <= self.limit for shape in shapes)

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

    def infer(self, node: NodeProto) -> None:
        """Infers and records the types of the node's results; adds the node to `conflicts` if it is
        not valid for its operands."""
        self.types.update(self._inferred(node))
        if reads_beyond(node, self.values, self.sizes) and self.conflicts[-1:] != [node]:
            self.conflicts.append(node)

    def probe(self, node: NodeProto, sizes: Mapping[tuple[str, int], int]) -> dict[str, TypeProto]:
        """Returns the types that the node's results would have, by name, if operands had these
        sizes, by (operand, axis). Nothing is recorded."""
        own = {operand: self.types[operand] for operand, _ in sizes}
        for operand, kept in own.items():
            self.types[operand] = TypeProto()
            self.types[operand].CopyFrom(kept)
        for (operand, axis), size in sizes.items():
            self.types[operand].tensor_type.shape.dim[axis].dim_value = size
        types = self._types_of(node)
        self.types.update(own)
        return types

    def types_without(self, node: NodeProto, names: Collection[str]) -> dict[str, TypeProto]:
        """Returns the types of the node's results, by name, if the values of these operands were
        unknown. Nothing is recorded."""
        protos = {name: self.protos.pop(name) for name in names if name in self.protos}
        values = {name: self.values.pop(name) for name in names if name in self.values}
        types = self._types_of(node)
        self.protos.update(protos)
        self.values.update(values)
        return types

    def _types_of(self, node: NodeProto) -> dict[str, TypeProto]:
        conflicts = len(self.conflicts)
        types = self._inferred(node)
        del self.conflicts[conflicts:]
        return types

    def forget(self, name: str) -> None:
        """Removes the recorded shape and value of a tensor."""
        if name in self.types and self.types[name].HasField("tensor_type"):
            self.types[name].tensor_type.ClearField("shape")
        self.values.pop(name, None)
        self.protos.pop(name, None)

    def forget_size(self, name: str, axis: int) -> None:
        """Removes the recorded size of one dimension of a tensor, and the tensor's value."""
        self.types[name].tensor_type.shape.dim[axis].Clear()
        self.values.pop(name, None)
        self.protos.pop(name, None)

    def _inferred(self, node: NodeProto) -> dict[str, TypeProto]:
        """Returns the types of a node's results, by name; records the node in `conflicts` if
        inference rejects it."""
        domain = "" if node.domain == "ai.onnx" else node.domain
        try:
            schema = _schema(node.op_type, self.opsets.get(domain, 1), domain)
        except onnx.defs.SchemaError:
            schema = None
        if schema is None or not schema.has_type_and_shape_inference_function:
            return self._given(node, self.runtime.infer(node, self.types, self.protos))
        names = [n for n in node.input if n]
        if any(a.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS) for a in node.attribute):
            names = list(self.types)
        if any(n and n not in self.types for n in node.input):
            return {}
        try:
            found = onnx.shape_inference.infer_node_outputs(
                schema,
                _with_defaults(node),
                {n: self.types[n] for n in names},
                {n: self.protos[n] for n in node.input if n in self.protos},
                opset_imports=list(self.model.opset_import),
                ir_version=self.model.ir_version,
            )
        except (
            onnx.shape_inference.InferenceError,
            onnx.checker.ValidationError,
            KeyError,
            RuntimeError,
        ):
            self.conflicts.append(node)
            return {}
        correct_sizes(node, self.opsets.get("", 1), self.types, self.protos, found)
        sizes = (size for type_ in found.values() for size in known_sizes(type_) or ())
        if any(size is not None and size < 0 for size in sizes):
            self.conflicts.append(node)  # inference of its readers might end the process
            return {}
        if node.domain == ML and any(_static_shape(found.get(o)) is None for o in node.output if o):
            # for many of these ops, ONNX infers no shape, or no number of columns
            found |= self.runtime.infer(node, self.types, self.protos)
        return {name: type_ for name, type_ in (found | self._picked(node, found)).items() if name}

    def _given(self, node: NodeProto, found: Mapping[str, TypeProto]) -> dict[str, TypeProto]:
        """Returns the types of a node's results, each from the first of these sources that has it:
        `found` (ONNX's inference), the model's declarations, the sharding rule of a custom op."""
        types = dict(found)
        for name in node.output:
            if _static_shape(found.get(name)) is None and name in self.declared:
                types[name] = self.declared[name]
        if all(_static_shape(types.get(name)) is not None for name in node.output if name):
            return types
        shapes = custom_shapes(node, self.types, self.protos, self.opsets.get("", 1))
        for name, shape in shapes:
            dtype = types[name].tensor_type.elem_type if name in types else self.dtypes.get(name)
            if dtype and shape is not None and _static_shape(types.get(name)) is None:
                types[name] = onnx.helper.make_tensor_type_proto(dtype, shape)
        return types

    def _picked(self, node: NodeProto, found: Mapping[str, TypeProto]) -> dict[str, TypeProto]:
        """Returns the types of results that constants select (Compress, SequenceAt), by name; ONNX
        leaves them open."""
        if node.op_type == "SplitToSequence":
            self.splits[node.output[0]] = node
        if len(node.input) < 2 or node.input[1] not in self.values:
            return {}
        chosen, (result, *_) = self.values[node.input[1]], node.output
        if node.op_type == "Compress" and result in found:
            sizes = self.sizes(node.input[0])
            return {} if sizes is None else {result: compressed(node, found[result], sizes, chosen)}
        split = self.splits.get(node.input[0]) if node.op_type == "SequenceAt" else None
        if split is None or not split.input[1:] or split.input[1] not in self.values or chosen.ndim:
            return {}
        whole, by = self.types[split.input[0]], self.values[split.input[1]]
        part = part_of(split, whole, by, int(chosen))
        return {} if part is None else {result: part}

    def declare(self, graph: onnx.GraphProto) -> None:
        """Writes the known types into a graph as value_info, and adds the folded constants that it
        reads as initializers."""
        used = {name for node in graph.node for name in reads_of(node)}
        outputs = {o.name for o in graph.output}
        for name in sorted(self.folded & (used | outputs)):
            graph.initializer.append(self.protos[name])
        kept = [w for w in graph.initializer if w.name in used | outputs]
        del graph.initializer[:]
        graph.initializer.extend(kept)
        del graph.value_info[:]
        for node in graph.node:
            for name in node.output:
                if name in self.types and name not in outputs:
                    graph.value_info.append(onnx.helper.make_value_info(name, self.types[name]))
        for port in [*graph.input, *graph.output]:
            if port.name in self.types:
                port.type.CopyFrom(self.types[port.name])


def infer_results(
    node: gs.Node, shapes: Sequence[Sequence[int] | None], opset: int
) -> list[tuple[Any, list[int]]]:
    """Returns (dtype, shape) of each result of a node, if its operands had these shapes; None for
    an operand that is left out."""
    types = {}
    constants = {}
    for tensor, shape in zip(node.inputs, shapes, strict=True):
        if shape is not None:
            dtype = gs.exporters.onnx_exporter.dtype_to_onnx(tensor.dtype)
            types[tensor.name] = onnx.helper.make_tensor_type_proto(dtype, shape)
        if isinstance(tensor, gs.Constant) and _is_at_hand(tensor):
            constants[tensor.name] = numpy_helper.from_array(tensor.values, tensor.name)
    proto = gs.exporters.onnx_exporter.OnnxExporter.export_node(node)
    known = [a for a in proto.attribute if not a.name.startswith("onnxpar.")]
    del proto.attribute[:]
    proto.attribute.extend(known)
    schema = _schema(node.op, opset, "")
    inferred = onnx.shape_inference.infer_node_outputs(
        schema, proto, types, constants, opset_imports=[onnx.helper.make_opsetid("", opset)]
    )
    correct_sizes(proto, opset, types, constants, inferred)
    results = []
    for tensor in node.outputs:
        shape = _static_shape(inferred[tensor.name])
        assert shape is not None, f"{node.op} '{node.name}': no shape from {shapes}"
        dtype = onnx.helper.tensor_dtype_to_np_dtype(inferred[tensor.name].tensor_type.elem_type)
        results.append((dtype, list(shape)))
    return results


def _is_at_hand(tensor: gs.Constant) -> bool:
    """True if a constant's value is in memory, or small and in the model file, so that inference
    may use it."""
    values = tensor._values
    return not isinstance(values, gs.ir.tensor.LazyValues) or is_folded(values.tensor)


def _constant(node: NodeProto) -> list[Any] | None:
    attribute = node.attribute[0]
    if attribute.name == "value":
        return [numpy_helper.to_array(attribute.t)]
    dtypes = {"value_float": "f4", "value_floats": "f4", "value_int": "i8", "value_ints": "i8"}
    if attribute.name not in dtypes:
        return None
    return [np.array(onnx.helper.get_attribute_value(attribute), dtypes[attribute.name])]


def _static_shape(type_: TypeProto | None) -> tuple[int, ...] | None:
    sizes = known_sizes(type_)
    if sizes is None or None in sizes:
        return None
    return tuple(size for size in sizes if size is not None)
