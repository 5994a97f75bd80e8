"""Evaluates a decoder at several sizes: the values of all tensors that depend only on sizes,
positions and the mask, and the shapes of the others. `proved_attention.py` compares attentions on
them.

A sample has a number of past tokens and a number of new tokens, in one text without padding.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import GraphProto, NodeProto, TensorProto, TypeProto, helper, numpy_helper

from onnxpar.base.arrays import Array
from onnxpar.graph.shape_inference import Walk
from onnxpar.graph.stored import nodes_before

SMALL = ((0, 1), (0, 7), (3, 4), (5, 1), (64, 3))
"""Past and new tokens of the samples at which whole attentions are compared."""
_LIMIT = 1 << 21
"""The largest constant that may be a bound of positions, and the most elements of known tensors."""
_COVERED, _NUMBERS = 16, 8
"""Bounds of positions below the first number show in small samples. A constant of at most the
second number of elements is a number or a shape, a larger one a table."""
SIZES = frozenset(("Shape", "Size"))
"""Ops that read the shape of their operand alone."""


@dataclass(frozen=True)
class Ports:
    """The names of a decoder's inputs, by role; `past` are its caches."""

    tokens: str
    mask: str | None
    positions: str | None
    past: tuple[str, ...]


@dataclass
class Sample:
    """A decoder evaluated with `past` tokens in its caches and `new` ones. `walk` has the types and
    values of its tensors."""

    past: int
    new: int
    walk: Walk

    @property
    def total(self) -> int:
        """The number of keys of attention: past and new tokens."""
        return self.past + self.new

    def value(self, name: str) -> Array | None:
        """Returns the value of a tensor; None if it depends on more than sizes, positions and the
        mask."""
        return self.walk.values.get(name)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Returns the shape of a tensor; None if it is unknown."""
        return self.walk.shape(name)


class Sampler:
    """Evaluates a decoder at several sizes, with the nodes that it has when the Sampler is made: a
    caller may rewrite the model meanwhile."""

    def __init__(self, model: onnx.ModelProto, ports: Ports) -> None:
        self.model, self.ports = model, ports
        self.nodes = list(model.graph.node)
        self.makers = {name: node for node in self.nodes for name in node.output}
        self.tables = {
            w.name: numpy_helper.to_array(w) for w in model.graph.initializer if _is_table(w)
        }
        self.constants = self._constants()

    def small(self) -> list[Sample]:
        """Returns the samples at the sizes SMALL, but for sizes at which the decoder cannot run."""
        samples = (self._sample(past, new, self.nodes) for past, new in SMALL)
        return [sample for sample in samples if sample is not None]

    def large(self, names: Collection[str]) -> list[Sample]:
        """Returns samples at longer texts, in which only the tensors `names` are evaluated.
        Positions reach and exceed each constant that may bound them, such as a window or the length
        of a table. Leaves out sizes at which the decoder cannot run."""
        nodes = nodes_before(self.nodes, names)
        constants, lengths = self._bounds(nodes)
        ends = {(length - 6, 6) for length in lengths}
        sizes = {((length >> i) - 1, 3) for length in lengths for i in range(1, 12)} | ends
        sizes |= {(max(constant - 3, 0), 6) for constant in constants}
        sizes |= {(2 * max(constants), 2)} if constants else set()
        sizes = {(past, new) for past, new in sizes if past > SMALL[-1][0] or new > SMALL[-1][1]}
        samples = (self._sample(past, new, nodes) for past, new in sorted(sizes))
        return [sample for sample in samples if sample is not None]

    def _sample(self, past: int, new: int, nodes: Iterable[NodeProto]) -> Sample | None:
        """Returns the sample of these nodes with `past` and `new` tokens; None if a node cannot run
        at these sizes."""
        ports = self.ports
        walk = Walk(self.model, _types(self.model.graph, ports, past, new), limit=_LIMIT)
        walk.suppose(self.tables)
        walk.values |= self.constants.values
        walk.protos |= self.constants.protos
        walk.types |= {name: self.constants.types[name] for name in self.constants.values}
        positions = np.arange(past, past + new)[None]
        for name, value in ((ports.mask, np.ones((1, past + new))), (ports.positions, positions)):
            if name is not None:
                walk.suppose({name: value.astype(_dtype(walk.types[name]))})
        for node in nodes:
            if node.output[0] not in self.constants.values:
                _evaluate(walk, node)
        return None if walk.conflicts else Sample(past, new, walk)

    def _constants(self) -> Walk:
        """Returns the values and types of the nodes that depend on no input."""
        walk = Walk(self.model, limit=_LIMIT)
        depending = {port.name for port in self.model.graph.input}
        for node in self.nodes:
            if depending.isdisjoint(node.input) and all(n in walk.values for n in node.input if n):
                _evaluate(walk, node)
            else:
                depending |= set(node.output)
        return walk

    def _bounds(self, nodes: Iterable[NodeProto]) -> tuple[set[int], set[int]]:
        """Returns two sets of numbers that may bound positions, from the constant operands of
        nodes: whole numbers that are larger than the positions in SMALL, and lengths of tables."""
        numbers, lengths = set[int](), set[int]()
        for name in {name for node in nodes for name in node.input}:
            value = self.tables.get(name, self.constants.values.get(name))
            if value is not None and value.size > _NUMBERS:
                lengths |= {size for size in value.shape if size >= _COVERED}
            elif value is not None:
                numbers |= _whole(value)
        return numbers, lengths


def _evaluate(walk: Walk, node: NodeProto) -> None:
    """Records the values of a node's results in `walk`, or, where they cannot be computed, the
    types."""
    values = walk.evaluate(node)
    if values is None:
        walk.infer(node)
    else:
        walk.know(node, values)


def _whole(value: Array) -> set[int]:
    """Returns the whole numbers in a constant that may bound positions."""
    if value.dtype.kind not in "iuf":
        return set()
    numbers = [float(v) for v in np.abs(value).ravel() if np.isfinite(v)]
    return {int(v) for v in numbers if _COVERED <= v < _LIMIT / 8 and v == int(v)}


def _is_table(weight: onnx.TensorProto) -> bool:
    """True for a stored tensor of booleans, or of bytes with 4 dimensions, that may be a mask; such
    a tensor may be too large for constant folding."""
    has_data = weight.data_location != TensorProto.EXTERNAL
    is_byte = weight.data_type in (TensorProto.UINT8, TensorProto.INT8) and len(weight.dims) == 4
    size = int(np.prod(weight.dims, dtype=np.int64))
    return has_data and (is_byte or weight.data_type == TensorProto.BOOL) and size < 1 << 26


def _dtype(type_: TypeProto) -> np.dtype[np.generic]:
    return helper.tensor_dtype_to_np_dtype(type_.tensor_type.elem_type)


def _types(graph: GraphProto, ports: Ports, past: int, new: int) -> dict[str, TypeProto]:
    """Returns the types of a decoder's inputs, by name, for a batch of one text with `past` cached
    and `new` tokens."""
    lengths = {ports.tokens: new, ports.mask: past + new, ports.positions: new}
    types = {}
    for port in graph.input:
        sizes: Sequence[int] | None = None
        if port.name in ports.past:
            dims = [d.dim_value for d in port.type.tensor_type.shape.dim]
            sizes = [1, dims[1], past, *dims[3:]]
        elif port.name in lengths:
            sizes = [1, lengths[port.name]]
        if sizes is not None:
            elem = port.type.tensor_type.elem_type
            types[port.name] = helper.make_tensor_type_proto(elem, sizes)
    return types
