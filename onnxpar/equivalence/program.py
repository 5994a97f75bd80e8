"""Reads a model, or the file of a rank, for a proof: nodes with plain attributes, and constants."""

from __future__ import annotations

import json
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper
from onnx.defs import OpSchema, SchemaError, get_schema
from onnx.inliner import inline_local_functions

from onnxpar.base.arrays import Array
from onnxpar.base.errors import ModelError
from onnxpar.equivalence.stored import WeightFiles

Shape = tuple[int, ...]
MOST_FOLDED = 1 << 24
"""The most bytes of a value that is computed from constants."""
RANDOM = frozenset(
    ["RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Multinomial",
     "Bernoulli", "Dropout"]
)  # fmt: skip
"""Ops of ONNX that may draw; two nodes draw the same if they have the same seed."""
MOST_SIZE = 1 << 48
"""More than the size of any dimension."""
MOST_FOLLOWED = 1 << 20
"""The most elements of a vector whose values shape inference follows."""
MOST_BYTES = 1 << 31
"""The most bytes of a file with a graph, as of any message of Protobuf."""


@dataclass(frozen=True, eq=False)
class Node:
    """A node. `attrs` has numbers, strings, lists and arrays; a graph is its serialized bytes.
    `origin` is the name of the node of the model from which a rank's node comes, as far as the file
    tells."""

    op: str
    domain: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: Mapping[str, Any]
    origin: str
    proto: NodeProto

    @property
    def kind(self) -> tuple[str, str]:
        """The domain and the op."""
        return self.domain, self.op

    @cached_property
    def bodies(self) -> dict[str, Body]:
        """The graphs that an If, a Loop or a Scan runs, by attribute."""
        graphs = ((a.name, a.g) for a in self.proto.attribute if a.type == AttributeProto.GRAPH)
        return {name: read_body(graph) for name, graph in graphs}

    @property
    def has_body(self) -> bool:
        """True for a node with graphs inside."""
        return any(isinstance(value, bytes) for value in self.attrs.values())

    @property
    def key(self) -> str:
        """The name of the first result; of a node without results, its own name."""
        return next((name for name in self.outputs if name), self.name)


@dataclass(frozen=True, eq=False)
class Body:
    """A graph inside of a node."""

    nodes: tuple[Node, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    stored: Mapping[str, TensorProto]

    @cached_property
    def constants(self) -> dict[str, Array]:
        """The values of its initializers. Errors: ModelError."""
        return {name: read_tensor(tensor, name) for name, tensor in self.stored.items()}

    @cached_property
    def own(self) -> set[str]:
        """The names of its tensors."""
        return {*self.inputs, *self.stored, *(n for node in self.nodes for n in node.outputs if n)}


def read_body(graph: GraphProto) -> Body:
    """Reads a graph inside of a node."""
    return Body(
        tuple(read_node(each) for node in graph.node for each in _apart(node)),
        tuple(port.name for port in graph.input),
        tuple(port.name for port in graph.output),
        {t.name: t for t in graph.initializer},
    )


@dataclass(eq=False)
class Program:
    """A graph with all functions inlined.

    constants  the values of initializers, and of what is computed from them alone, by name;
               initializers in other files are read when they are needed
    defaults   the values of inputs that have one, where a run may give another
    shapes     the shapes that are known, by tensor; those of ranks' tensors are not
    metadata   the texts of the file's properties
    """

    path: Path
    nodes: list[Node]
    inputs: list[str]
    outputs: list[str]
    constants: Constants
    opsets: Mapping[str, int]
    shapes: dict[str, Shape] = field(default_factory=dict)
    types: dict[str, int] = field(default_factory=dict)
    defaults: Constants = field(default_factory=lambda: Constants({}, Path(), WeightFiles()))
    metadata: Mapping[str, str] = field(default_factory=dict)


class Constants:
    """Values that a graph has, by name: those of `fed` are left out, or of these alone."""

    def __init__(self, stored: Mapping[str, TensorProto], folder: Path, files: WeightFiles) -> None:
        self._stored = stored
        self._values: dict[str, Array] = {}
        self._rounded: set[str] = set()
        self._folder, self._files = folder, files

    def __contains__(self, name: str) -> bool:
        return name in self._stored or name in self._values

    def __getitem__(self, name: str) -> Array:
        """Errors: KeyError; ModelError if a file of weights cannot be read."""
        if name not in self._values:
            self._values[name] = self._read(self._stored[name])
        return self._values[name]

    def get(self, name: str) -> Array | None:
        """The value of a constant; None if the tensor is none."""
        known = name in self
        return self[name] if known else None

    def shape(self, name: str) -> Shape:
        """The shape of a constant."""
        if name in self._stored:
            return tuple(self._stored[name].dims)
        return self._values[name].shape

    def add(self, name: str, value: Array, is_rounded: bool = False) -> None:
        """Adds a value that is computed from other constants; see `is_rounded`."""
        self._values[name] = value
        if is_rounded:
            self._rounded.add(name)

    def is_in_file(self, name: str) -> bool:
        """True for a weight in another file than the graph."""
        tensor = self._stored.get(name)
        return tensor is not None and tensor.data_location == TensorProto.EXTERNAL

    def is_rounded(self, name: str) -> bool:
        """True for a value that is computed by ops whose last bits may depend on the shapes of what
        they read."""
        return name in self._rounded

    def kind(self, name: str) -> int:
        """The element type of an initializer."""
        return int(self._stored[name].data_type)

    def names(self) -> Iterator[str]:
        """The names of all constants."""
        yield from self._stored.keys() | self._values.keys()

    def inside(self, body: Body) -> Constants:
        """The constants in a body: its own, and those outside whose names it does not use."""
        stored = {name: t for name, t in self._stored.items() if name not in body.own}
        found = Constants({**stored, **body.stored}, self._folder, self._files)
        found._values = {name: v for name, v in self._values.items() if name not in body.own}
        found._rounded = self._rounded - body.own
        return found

    def rename(self, names: Mapping[str, str]) -> None:
        """Gives constants other names, no two the same."""
        self._stored = {names.get(name, name): t for name, t in self._stored.items()}
        self._values = {names.get(name, name): value for name, value in self._values.items()}
        self._rounded = {names.get(name, name) for name in self._rounded}

    def _read(self, tensor: TensorProto) -> Array:
        if tensor.data_location != TensorProto.EXTERNAL:
            return read_tensor(tensor, tensor.name)
        return self._files.read(tensor, self._folder)


def read_tensor(tensor: TensorProto, name: str) -> Array:
    """The value of a tensor in a file. Errors: ModelError if it has not the elements that its
    dimensions say."""
    try:
        if tensor.data_location == TensorProto.EXTERNAL:
            raise ValueError("it is in another file")
        return np.asarray(numpy_helper.to_array(tensor))
    except (ValueError, TypeError, KeyError, RuntimeError, MemoryError, OverflowError) as error:
        raise ModelError(f"the tensor {name!r:.80} cannot be read: {error!s:.120}") from None


def load(path: Path) -> ModelProto:
    """Reads a model, without weights in other files. Errors: ModelError."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ModelError(f"{path} cannot be read as a model: it is not a file")
        if status.st_size > MOST_BYTES:
            raise ModelError(f"{path} cannot be read as a model: it has {status.st_size:,} bytes")
        proto = onnx.load(path, load_external_data=False)
        return inline_local_functions(proto) if proto.functions else proto
    except OSError as error:
        text = error.strerror or str(error)
        raise ModelError(f"{path} cannot be read as a model: {text}") from None
    except ModelError:
        raise
    except Exception as error:  # protobuf, and the inliner, raise types of their own
        raise ModelError(f"{path} cannot be read as a model: {error!s:.200}") from None


def read_program(
    path: Path, files: WeightFiles, fed: Collection[str] = (),
    shapes: Mapping[str, Shape] | None = None, graph: Path | None = None,
) -> Program:  # fmt: skip
    """Reads a model; weights in other files stay there, and are read by `files`. Inputs that have
    default values are constants, unless they are among `fed`. `shapes` has shapes of inputs, in
    place of those of the file. `graph` is a file with other nodes and ports for the model's
    weights, which are inputs there. Errors: ModelError."""
    proto = load(path) if graph is None else _with_weights(load(graph), graph, path, fed)
    if shapes:
        _set_shapes(proto.graph, shapes)
    program = _program(proto, path, files, fed, Pool())
    _infer(proto, program)
    return program


def _with_weights(graph: ModelProto, file: Path, path: Path, fed: Collection[str]) -> ModelProto:
    """A graph whose inputs that no run gets are weights of a model, and of other files beside it
    that the graph names. Errors: ModelError if they have no such weights."""
    stored = {
        prefix: {t.name: t for t in load(path.parent / name).graph.initializer}
        for prefix, name in _weight_files(graph, file, path).items()
    }
    ports = [*graph.graph.input]
    del graph.graph.input[:]
    for port in ports:
        if port.name in fed:
            graph.graph.input.append(port)
            continue
        prefix = max((p for p in stored if port.name.startswith(p)), key=len)
        tensor, own = stored[prefix].get(port.name[len(prefix) :]), port.type.tensor_type
        shape = [dim.dim_value for dim in own.shape.dim]
        if tensor is None or ([*tensor.dims], tensor.data_type) != (shape, own.elem_type):
            raise ModelError(
                f"{file} was not made from {path}: it reads a weight {port.name!r:.80}"
            )
        graph.graph.initializer.add().CopyFrom(tensor)
        graph.graph.initializer[-1].name = port.name
    return graph


def _weight_files(graph: ModelProto, file: Path, path: Path) -> dict[str, str]:
    """The names of the files beside a model with the weights of a graph, by the prefix that their
    names have in it. Errors: ModelError."""
    text = {entry.key: entry.value for entry in graph.metadata_props}.get("onnxpar.weights", "{}")
    try:
        found = {str(prefix): str(name) for prefix, name in json.loads(text).items()}
    except (ValueError, RecursionError, AttributeError):
        found = {"": "/"}
    if any(Path(name).name != name for name in found.values()):
        raise ModelError(f"{file} names files of weights that are none")
    return found | {"": path.name}


def read_rank(path: Path, files: WeightFiles, fed: Collection[str], pool: Pool) -> Program:
    """Reads the file of a rank. Shapes that it declares are not believed: it has none. Errors:
    ModelError."""
    return _program(load(path), path, files, fed, pool)


def read_values(path: Path, files: WeightFiles) -> Constants:
    """Reads the initializers of a graph. Errors: ModelError."""
    try:
        stored = {tensor.name: tensor for tensor in load(path).graph.initializer}
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is not a valid model: {error}") from None
    return Constants(stored, path.parent, files)


class Pool:
    """Nodes and tensors of ranks; equal ones are one object."""

    def __init__(self) -> None:
        self._nodes: dict[bytes, list[Node]] = {}
        self._tensors: dict[bytes, TensorProto] = {}

    def nodes(self, proto: NodeProto) -> list[Node]:
        """Reads a node; several, if it computes what several do."""
        data = proto.SerializeToString()
        if data not in self._nodes:
            own = NodeProto.FromString(data)
            self._nodes[data] = [read_node(each) for each in _apart(own)]
        return self._nodes[data]

    def tensor(self, proto: TensorProto) -> TensorProto:
        """A tensor, apart from the graph that has it."""
        data = proto.SerializeToString()
        if data not in self._tensors:
            self._tensors[data] = TensorProto.FromString(data)
        return self._tensors[data]


def _program(
    proto: ModelProto, path: Path, files: WeightFiles, fed: Collection[str], pool: Pool
) -> Program:
    try:
        return _checked(proto, path, files, fed, pool)
    except (_Wrong, UnicodeDecodeError) as error:
        raise ModelError(f"{path} is not a valid model: {error}") from None


def _checked(
    proto: ModelProto, path: Path, files: WeightFiles, fed: Collection[str], pool: Pool
) -> Program:
    graph = proto.graph
    stored = {t.name: pool.tensor(t) for t in graph.initializer if t.name not in fed}
    inputs = [port.name for port in graph.input if port.name not in stored]
    opsets = {entry.domain or "": entry.version for entry in proto.opset_import}
    for node in graph.node:
        _check_types(node, opsets)
    nodes = [node for each in graph.node for node in pool.nodes(each)]
    _check_names(graph, nodes)
    program = Program(
        path, nodes, inputs, [port.name for port in graph.output],
        Constants(stored, path.parent, files), opsets,
    )  # fmt: skip
    defaults = {t.name: pool.tensor(t) for t in graph.initializer if t.name in fed}
    program.defaults = Constants(defaults, path.parent, files)
    program.metadata = {entry.key: entry.value for entry in proto.metadata_props}
    return program


class _Wrong(Exception):
    """What is wrong with a graph."""


def _check_names(graph: GraphProto, nodes: Sequence[Node]) -> None:
    """Each tensor is made once, before it is read. Errors: _Wrong."""
    known = {port.name for port in graph.input} | {t.name for t in graph.initializer} | {""}
    known |= {sparse.values.name for sparse in graph.sparse_initializer}
    if len({t.name for t in graph.initializer}) != len(graph.initializer):
        raise _Wrong("two initializers have one name")
    for node in nodes:
        for name in (*node.inputs, *sorted(captured(node.proto))):
            if name not in known:
                raise _Wrong(f"{node.op} {node.name!r:.80} reads {name!r:.80} before it is made")
        for name in node.outputs:
            if name and name in known:
                raise _Wrong(f"{name!r:.80} is made twice")
            known.add(name)
        for body in node.bodies.values():
            _check_body(body, known)
    for port in graph.output:
        if port.name not in known:
            raise _Wrong(f"nothing makes the output {port.name!r:.80}")


def _check_body(body: Body, outside: Collection[str]) -> None:
    """Each tensor of a body is made once, before it is read. Errors: _Wrong."""
    own, read = {*body.inputs, *body.stored}, set[str]()
    for node in body.nodes:
        names = {*node.inputs, *captured(node.proto)} - own
        for name in sorted(names - {*outside}):
            raise _Wrong(f"{node.op} {node.name!r:.80} reads {name!r:.80} before it is made")
        read |= names
        for name in filter(None, node.outputs):
            if name in own or name in read:
                raise _Wrong(f"{name!r:.80} is made twice")
            own.add(name)
        for inner in node.bodies.values():
            _check_body(inner, {*outside, *own})
    for name in body.outputs:
        if name not in own and name not in outside:
            raise _Wrong(f"nothing makes the output {name!r:.80} of a body")


def _check_types(node: NodeProto, opsets: Mapping[str, int]) -> None:
    """Attributes have the types that their op says. Errors: _Wrong."""
    domain = "" if node.domain == "ai.onnx" else node.domain
    known = _types(node.op_type, opsets.get(domain, 1), domain)
    for attribute in node.attribute:
        if attribute.ref_attr_name:
            raise _Wrong(f"{node.op_type} {node.name!r:.80} has an attribute of a function")
        wanted = known.get(attribute.name)
        if wanted is not None and attribute.type != wanted:
            names = AttributeProto.AttributeType.Name
            own = names(attribute.type)
            raise _Wrong(
                f"{attribute.name!r} of {node.op_type} {node.name!r:.80} is {own}, "
                f"not {names(wanted)}"
            )


@cache
def _types(op: str, version: int, domain: str) -> Mapping[str, int]:
    """The types of an op's attributes, as far as they are known."""
    if domain == "onnxpar":
        return _PLUGIN_TYPES
    try:
        schema = get_schema(op, version, domain)
    except (SchemaError, TypeError, OverflowError):
        return {}
    attributes: Any = schema.attributes
    return {name: int(a.type.value) for name, a in attributes.items()}


_PLUGIN_TYPES: Mapping[str, int] = {
    **dict.fromkeys(
        ("group", "sizes", "split_sizes", "sources", "before", "after", "results"),
        AttributeProto.INTS,
    ),
    **dict.fromkeys(
        ("tag", "stream", "axis", "split_axis", "concat_axis", "root"), AttributeProto.INT
    ),
    **dict.fromkeys(("op", "program"), AttributeProto.STRING),
}
"""The types of the attributes of the plugin's ops that a proof reads."""


def _set_shapes(graph: GraphProto, shapes: Mapping[str, Shape]) -> None:
    """Gives inputs their shapes, and drops all other shapes."""
    del graph.value_info[:]
    for port in graph.output:
        port.type.tensor_type.ClearField("shape")
    for port in graph.input:
        if port.name in shapes:
            port.type.tensor_type.ClearField("shape")
            port.type.tensor_type.shape.SetInParent()  # that of a scalar, too
            for size in shapes[port.name]:
                port.type.tensor_type.shape.dim.add(dim_value=size)


def _apart(node: NodeProto) -> Iterator[NodeProto]:
    """Yields the elementwise nodes that a FusedElementwise of the plugin computes; other nodes as
    they are."""
    if node.op_type != "FusedElementwise" or node.domain != "onnxpar":
        yield node
        return
    try:
        yield from list(_steps(node))
    except (KeyError, ValueError, IndexError, AttributeError):
        raise _Wrong(f"FusedElementwise {node.name!r:.80} has a program that is none") from None


def _steps(node: NodeProto) -> Iterator[NodeProto]:
    values = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    steps = [step.split() for step in values["program"].decode().split(";")]
    wide = {int(name[1:]) for _, *names in steps for name in names if name[0] == "x"}
    first = max(wide, default=-1) + 1
    names = {f"x{i}": name for i, name in enumerate(node.input)}
    names |= {f"s{i}": name for i, name in enumerate(node.input[first:])}
    results: dict[int, list[str]] = {}
    for name, step in zip(node.output, values["results"], strict=True):
        results.setdefault(int(step), []).append(name)
    for number, (op, *operands) in enumerate(steps):
        own = results.get(number) or [f"{node.output[0]}::v{number}"]
        names[f"v{number}"] = own[0]
        yield _part(node, op, [names[operand] for operand in operands], own[0])
        for name in own[1:]:
            yield _part(node, "Identity", own[:1], name)


def _part(node: NodeProto, op: str, inputs: Sequence[str], output: str) -> NodeProto:
    part = onnx.helper.make_node(op, inputs, [output], f"{node.name}::{output}")
    part.metadata_props.extend(node.metadata_props)
    return part


def read_node(node: NodeProto) -> Node:
    """Reads a node's attributes."""
    domain = "" if node.domain == "ai.onnx" else node.domain
    metadata = {entry.key: entry.value for entry in node.metadata_props}
    origin = metadata.get("onnxpar.name") or metadata.get("onnxpar.node") or node.name
    name = node.name or next((name for name in node.output if name), "")
    attrs = {a.name: _attribute(a) for a in node.attribute}
    inputs = tuple(node.input)
    while inputs and not inputs[-1]:
        inputs = inputs[:-1]
    outputs = tuple(node.output)
    return Node(node.op_type, domain, name, inputs, outputs, attrs, origin or name, node)


def rewired(node: Node, inputs: Sequence[str], outputs: Sequence[str]) -> Node:
    """A node that reads and makes other tensors."""
    if (node.inputs, node.outputs) == (tuple(inputs), tuple(outputs)):
        return node
    proto = NodeProto()
    proto.CopyFrom(node.proto)
    proto.input[:], proto.output[:] = inputs, outputs
    return replace(node, inputs=tuple(inputs), outputs=tuple(outputs), proto=proto)


def _attribute(attribute: AttributeProto) -> Any:
    if attribute.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS):
        return attribute.SerializeToString(deterministic=True)
    value = onnx.helper.get_attribute_value(attribute)
    if isinstance(value, TensorProto):
        return read_tensor(value, attribute.name)
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


def _infer(proto: ModelProto, program: Program) -> None:
    """Infers shapes and types. Those that a model declares for other tensors than inputs are
    believed only where nothing can be inferred."""
    declared = [*proto.graph.output, *proto.graph.value_info]
    shapes = [
        [dim.dim_value for dim in port.type.tensor_type.shape.dim]
        for port in (*proto.graph.input, *declared)
    ]
    if any(not 0 <= size < MOST_SIZE for shape in shapes for size in shape):
        raise ModelError(f"{program.path} is not a valid model: it declares a size that is none")
    # values of a vector are followed one by one
    follows = all(len(shape) != 1 or shape[0] <= MOST_FOLLOWED for shape in shapes)
    bare = ModelProto()
    bare.CopyFrom(proto)
    del bare.graph.value_info[:]
    for port in bare.graph.output:
        port.type.tensor_type.ClearField("shape")
    with suppress(Exception):  # of types of its own, and of C++
        bare = onnx.shape_inference.infer_shapes(bare, data_prop=follows)
    graph = bare.graph
    for port in (*declared, *graph.input, *graph.output, *graph.value_info):
        tensor = port.type.tensor_type
        program.types[port.name] = tensor.elem_type or program.types.get(port.name, 0)
        dims = tensor.shape.dim
        if tensor.HasField("shape") and all(dim.HasField("dim_value") for dim in dims):
            program.shapes[port.name] = tuple(dim.dim_value for dim in dims)
    for stored in graph.initializer:
        program.shapes[stored.name] = tuple(stored.dims)
        program.types[stored.name] = stored.data_type


def infer(node: Node, program: Program, free: int | None = None) -> None:
    """Infers the shapes of a node's results from those of its operands. Sizes that data decide are
    `free`; without it, such a shape stays unknown."""
    types, data = {}, {}
    for name in node.inputs:
        shape = program.shapes.get(name)
        if program.constants.is_in_file(name):
            shape, kind = program.constants.shape(name), program.constants.kind(name)
            types[name] = onnx.helper.make_tensor_type_proto(kind, shape)
        elif name in program.constants:
            value = program.constants[name]
            kind = int(onnx.helper.np_dtype_to_tensor_dtype(value.dtype))
            types[name] = onnx.helper.make_tensor_type_proto(kind, value.shape)
            if value.nbytes <= 4096:
                data[name] = numpy_helper.from_array(np.asarray(value), name)
        elif name:
            kind = program.types.get(name, TensorProto.FLOAT)
            types[name] = onnx.helper.make_tensor_type_proto(kind, shape)
    try:
        schema = get_schema(node.op, program.opsets.get(node.domain, 1), node.domain)
        found = onnx.shape_inference.infer_node_outputs(schema, node.proto, types, data)
    except Exception:  # an op without inference, or operands that do not fit
        return
    for name, proto in found.items():
        dims = proto.tensor_type.shape.dim
        program.types.setdefault(name, proto.tensor_type.elem_type)
        sizes = [dim.dim_value if dim.HasField("dim_value") else free for dim in dims]
        known = tuple(size for size in sizes if size is not None)
        if proto.tensor_type.HasField("shape") and len(known) == len(sizes):
            program.shapes[name] = known


def captured(node: NodeProto) -> set[str]:
    """The names that the bodies of a node read from outside."""
    names: set[str] = set()
    for attribute in node.attribute:
        for graph in [attribute.g] if attribute.type == AttributeProto.GRAPH else attribute.graphs:
            own = {port.name for port in graph.input} | {t.name for t in graph.initializer}
            own |= {name for inner in graph.node for name in inner.output}
            for inner in graph.node:
                names |= ({*inner.input} | captured(inner)) - own - {""}
    return names


def default(node: Node, name: str, opsets: Mapping[str, int]) -> Any:
    """The value of an attribute: the node's, or the default of its op. None if it has none."""
    if name in node.attrs:
        return node.attrs[name]
    schema = schema_of(node, opsets)
    attribute = None if schema is None else schema.attributes.get(name)
    if attribute is None or not attribute.default_value.name:
        return None
    return _attribute(attribute.default_value)


def schema_of(node: Node, opsets: Mapping[str, int]) -> OpSchema | None:
    """What ONNX says of a node's op; None if it does not know it."""
    try:
        return get_schema(node.op, opsets.get(node.domain, 1), node.domain)
    except SchemaError:
        return None
