"""split-ranks: write a folder with a graph and the shards of weights for each rank."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import TensorProto, numpy_helper
from onnx.helper import make_tensor_value_info, np_dtype_to_tensor_dtype

from onnxpar.base.bundle_names import rank_name, suffix_of
from onnxpar.base.write_digested import DigestedFolder
from onnxpar.compiler.pass_ import LOCAL, Pass, PassContext, Stage
from onnxpar.compiler.whole_ranks import are_whole, write_whole_ranks
from onnxpar.graph.collectives import DOMAIN
from onnxpar.graph.interchange import default_of, export_graph
from onnxpar.graph.lazy_values import stacked_parts, stored_proto
from onnxpar.graph.metadata import note_layouts
from onnxpar.graph.stored import nodes_of, subgraphs_of
from onnxpar.graph.subgraphs import constants
from onnxpar.load.load import Model
from onnxpar.lowering.flat_scatters import flatten_scatters
from onnxpar.lowering.fuse_again import fuse_again
from onnxpar.lowering.open_constants import Lowered, OpenConstants
from onnxpar.lowering.open_shapes import OpenShapes
from onnxpar.lowering.size_graph import SizeGraph, add_size_input, check_size_names
from onnxpar.lowering.stored_parts import store_parts
from onnxpar.lowering.weights import WeightStore, whole_layout


@dataclass(frozen=True)
class SplitRanks(Pass):
    """Instantiate the coordinates of every rank and write its files to `output`.

    Requires a localized and ordered graph. Ensures `rank_0000.onnx` and so on with their weights,
    and `rank_0000.states.onnx` and so on with the first values of states, for all ranks whose files
    `output` writes.

    output    the folder to write to
    progress  called with the number of bytes of each part of weights that is read
    program   the name of a further program, after another run of this pass: file names contain
              it, and first values of states are not written again
    names     the names of weight files from that other run

    Example: shard(mesh="tp=2", strategy={"tensors": {"w": ["tp"]}})

        scale (float[4] x) => (float[4] y) <float[4] w = {1, 2, 3, 4}> { y = Mul(x, w) }

    Before:

        mesh tp=2
        input  x: float32 2 [tp]
        const  w: float32 4 [tp]
        y: float32 2 [tp] = Mul(x, w)
        output y: float32 2 [tp]

    After:

        // rank_0000.onnx
        mesh tp=2
        input  x: float32 2 [tp]
        const  w: float32 2 [tp] = [1.0, 2.0]
        y: float32 2 [tp] = Mul(x, w)
        output y: float32 2 [tp]

        // rank_0001.onnx
        mesh tp=2
        input  x: float32 2 [tp]
        const  w: float32 2 [tp] = [3.0, 4.0]
        y: float32 2 [tp] = Mul(x, w)
        output y: float32 2 [tp]
    """

    name: ClassVar[str] = "split-ranks"
    stage = Stage.WRITE
    requires = (LOCAL,)
    output: DigestedFolder
    progress: Callable[[int], None] = lambda n: None
    program: str = ""
    names: dict[tuple[int, ...], str] = field(default_factory=dict)

    def run(self, graph: gs.Graph, ctx: PassContext) -> bool:
        folder, mesh = ctx.model.folder, ctx.sharding.mesh
        store = WeightStore(self.output, folder, mesh, self.progress, self.names)
        if ctx.model.original is not None and are_whole(ctx):
            write_whole_ranks(self.output, ctx.model.original, ctx, store, self.program)
        else:
            self._write_split_ranks(graph, ctx, store)
        return False

    def _write_split_ranks(self, graph: gs.Graph, ctx: PassContext, store: WeightStore) -> None:
        """Writes the files of ranks whose graphs differ: a template is exported once, and
        instantiated for each rank."""
        mesh = ctx.sharding.mesh
        opened = open_constants(graph, ctx)
        apart = {*ctx.lowered.per_rank.constants, *(opened.varying if opened else ())}
        weights = _cut_constants([graph, *ctx.lowered.programs.values()], apart, ctx, store)
        template = _export(graph, ctx.model)
        states = dict(ctx.model.states)
        defaults = _cut_defaults([t for t in graph.inputs if t.name not in states], ctx, store)
        weights |= defaults
        _add_defaults(template.graph, defaults)
        # first values of states are in separate files: they are not needed after the first run
        inputs = [] if self.program else [t for t in graph.inputs if t.name in states]
        first = _cut_defaults(inputs, ctx, store).values()
        store.cut_inner(template.graph, weights)
        templates = {suffix_of(self.program): template}
        for name, program in ctx.lowered.programs.items():
            suffix = suffix_of(self.program, name)
            templates[suffix] = _export(program, ctx.model)
            _drop_unread(templates[suffix].graph)
            _add_defaults(templates[suffix].graph, defaults)
        _note_layouts([model.graph for model in templates.values()], ctx)
        shapes = OpenShapes(opened) if opened else None
        for rank in range(mesh.size):
            for suffix, template in templates.items():
                model = onnx.ModelProto()
                model.CopyFrom(template)
                _instantiate(model, ctx, weights, rank)
                if opened and shapes:
                    _open(model.graph, ctx, opened, rank)
                    shapes.declare(model.graph, rank)
                store_parts(model.graph)
                flatten_scatters(model.graph)
                self.output.put(rank_name(rank, suffix), model.SerializeToString(), [rank])
            if first:
                values = onnx.GraphProto(initializer=[parts[rank] for parts in first])
                data = onnx.ModelProto(graph=values).SerializeToString()
                self.output.put(rank_name(rank, "states.onnx"), data, [rank])


def _drop_unread(graph: onnx.GraphProto) -> None:
    """Removes the inputs of a graph that none of its nodes reads."""
    read = {name for node in nodes_of(graph) for name in node.input}
    ports = [port for port in graph.input if port.name in read]
    del graph.input[:]
    graph.input.extend(ports)


def open_constants(graph: gs.Graph, ctx: PassContext) -> OpenConstants | None:
    """Returns the constants of the lowered graph that depend on open sizes (known only at run
    time); None if no size is open."""
    if ctx.model.sizes is None:
        return None
    others = [Lowered(g, c.lowered.per_rank, c.layouts) for g, c in ctx.lowered.replays]
    base = Lowered(graph, ctx.lowered.per_rank, ctx.layouts)
    return OpenConstants(base, others, ctx.model.sizes, ctx.sharding.mesh)


def check_open(graph: gs.Graph, ctx: PassContext) -> None:
    """Checks that each rank's shards are a function of the open sizes (known only at run time).
    Errors: OpenSizesError."""
    opened = open_constants(graph, ctx)
    if opened is not None:
        check_size_names(ctx.model.names)
        opened.check()


def _open(graph: onnx.GraphProto, ctx: PassContext, opened: OpenConstants, rank: int) -> None:
    """Rewrites a rank's graph so that it runs at all values of the open sizes (known only at run
    time): constants that depend on them are computed from an input with the sizes.@
    onnxpar/sharding/atoms.py Atoms.leaves Yields the leaves of which a dimension consists, in
    order: the number and size of each atom (a part of a dimension), without atoms of one element. A
    dimension `heads * 64` has two: heads, and 64."""
    operands = opened.operands(rank)
    parts = {name: part for _, extents in operands.values() for name, part in extents.items()}
    sizes = SizeGraph(graph, opened.sizes.symbols, {**opened.parts(rank), **parts})
    for name, array in opened.arrays(rank).items():
        sizes.tensor(name, array)
    left_out = set(opened.attributes(rank))
    for node in graph.node:
        if node.name in operands:
            node.input.append(f"{node.name}::sizes")  # behind the token
            sizes.tensor(node.input[-1], operands[node.name][0])
        attributes = [a for a in node.attribute if (node.name, a.name) not in left_out]
        if len(attributes) < len(node.attribute):
            del node.attribute[:]
            node.attribute.extend(attributes)
    for port in [*graph.input, *graph.output]:
        for axis, dim in enumerate(port.type.tensor_type.shape.dim):
            if opened.is_open(port.name, axis):
                dim.dim_param = f"{port.name}.{axis}"
    add_size_input(graph, opened.sizes.symbols)
    sizes.finish()


def _add_defaults(graph: onnx.GraphProto, defaults: Mapping[str, list[TensorProto]]) -> None:
    """Gives inputs of a graph default values, as initializers without data; `_instantiate` fills
    them in."""
    named = [port.name for port in graph.input if port.name in defaults]
    graph.initializer.extend(_stub(defaults[name][0], name) for name in named)


def _cut_constants(
    graphs: Iterable[gs.Graph], apart: Collection[str], ctx: PassContext, store: WeightStore
) -> dict[str, list[TensorProto]]:
    """Cuts constants that have a layout into shards, except the constants named in `apart`, and
    drops their data from the graphs. Returns the shards of each constant, by name: one for each
    rank."""
    weights = {}
    for tensor in {t.name: t for graph in graphs for t in constants(graph)}.values():
        if tensor.name in ctx.layouts and tensor.name not in apart:
            proto = weight_proto(tensor)
            parts = stacked_parts(tensor)
            weights[tensor.name] = store.cut(tensor.name, proto, ctx.layouts[tensor.name], parts)
            tensor._values = gs.ir.tensor.LazyValues(_stub(proto))
    return weights


def _cut_defaults(
    inputs: Iterable[gs.Tensor], ctx: PassContext, store: WeightStore
) -> dict[str, list[TensorProto]]:
    """Cuts the default values of inputs into shards. Returns the shards of each input, by name: one
    for each rank."""
    defaults = {t.name: default for t in inputs if (default := default_of(t)) is not None}
    return {
        name: store.cut(name, default, ctx.layouts.get(name) or whole_layout(default))
        for name, default in defaults.items()
    }


def weight_proto(tensor: gs.Constant) -> TensorProto:
    """Returns the initializer of a constant, without reading data from files."""
    return stored_proto(tensor) or numpy_helper.from_array(tensor.values, tensor.name)


def _stub(proto: TensorProto, name: str = "") -> TensorProto:
    """Returns an initializer without data, which `_instantiate` replaces by each rank's shard."""
    return TensorProto(name=name, data_type=proto.data_type, dims=[0], raw_data=b"")


def _export(graph: gs.Graph, source: Model) -> onnx.ModelProto:
    """Returns the graph as a model, with the header of the source model; it is the template of all
    ranks."""
    model = export_graph(graph, source.header)
    fuse_again(model.graph, source.fused)
    _declare_scalars(graph, model.graph)
    model.producer_name = model.producer_name or "onnxpar"
    return model


def _declare_scalars(graph: gs.Graph, proto: onnx.GraphProto) -> None:
    """Declares in `proto` the scalars that collectives return. onnxruntime does not tell the plugin
    scalars from tensors of unknown rank, and providers that compile refuse the latter."""
    results = (t for node in graph.nodes if node.domain == DOMAIN for t in node.outputs)
    ports = {port.name for port in proto.output}
    for t in results:
        is_scalar = t.shape is not None and len(t.shape) == 0
        if is_scalar and t.dtype is not None and t.name not in ports:
            element = np_dtype_to_tensor_dtype(np.dtype(t.dtype))
            proto.value_info.append(make_tensor_value_info(t.name, element, ()))


def _note_layouts(graphs: Iterable[onnx.GraphProto], ctx: PassContext) -> None:
    """Writes the layouts of split and partial tensors into the metadata of nodes, inputs and
    outputs, for human readers."""
    mesh = ctx.sharding.mesh
    split = {name: x.text(mesh) for name, x in ctx.layouts.items() if not x.is_whole}
    for graph in graphs:
        for holder in (*nodes_of(graph), *graph.input, *graph.output):
            note_layouts(holder, split)


def _instantiate(
    model: onnx.ModelProto, ctx: PassContext, weights: dict[str, list[TensorProto]], rank: int
) -> None:
    """Turns a copy of the template into a rank's model: fills in the rank's shards of weights, its
    constants and attributes, and the shapes of its inputs and outputs."""
    for tensor in model.graph.initializer:
        if tensor.name in weights:
            tensor.CopyFrom(weights[tensor.name][rank])
        elif tensor.name in ctx.lowered.per_rank.constants:
            value = ctx.lowered.per_rank.constants[tensor.name](rank)
            tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))
    by_node: dict[str, dict[str, Callable[[int], Any]]] = {}
    for (name, attribute), function in ctx.lowered.per_rank.attributes.items():
        by_node.setdefault(name, {})[attribute] = function
    for node in nodes_of(model.graph):
        varying = by_node.get(node.name, {})
        attributes = [a for a in node.attribute if a.name not in varying]
        if varying:
            del node.attribute[:]
            node.attribute.extend(attributes)
            values = {key: function(rank) for key, function in varying.items()}
            node.attribute.extend(_attribute(k, v) for k, v in values.items() if v is not None)
    for port in _ports(model.graph, ctx):
        layout = ctx.layouts.get(port.name)
        if layout is not None:
            shape = layout.local_shape(ctx.sharding.mesh, rank)
            for dim, size in zip(port.type.tensor_type.shape.dim, shape, strict=True):
                if size < 0:
                    dim.Clear()
                else:
                    dim.dim_value = size


def _attribute(name: str, value: Any) -> onnx.AttributeProto:
    """Returns an attribute of a rank's node."""
    if isinstance(value, gs.Constant):
        value = numpy_helper.from_array(value.values, value.name)
    return onnx.helper.make_attribute(name, value)


def _ports(graph: onnx.GraphProto, ctx: PassContext) -> Iterator[onnx.ValueInfoProto]:
    """Yields the inputs and outputs of a graph, and of bodies whose dimensions are split."""
    yield from (*graph.input, *graph.output)
    split = [body.graph for op in ctx.sharding.factors.ops for body in op.bodies]
    names = {t.name for body in split for t in (*body.inputs, *body.outputs)}
    for node in nodes_of(graph) if names else ():
        for body in subgraphs_of(node):
            yield from (port for port in (*body.input, *body.output) if port.name in names)
