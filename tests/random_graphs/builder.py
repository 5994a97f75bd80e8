"""Builds a random ONNX graph node by node, and keeps account of how exact each value is.

Numbers start as small integers, so that sums and products are exact in any order and comparisons,
roundings and positions can be held to equality. What is not exact any more carries a bound on how
far two correct programs may differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

Array = npt.NDArray[Any]
Shape = tuple[int, ...]

OPSET = 23
LIMIT = 4096.0
"""Magnitude that no value exceeds: far below 2**24, up to which float32 holds every integer."""
ROUNDING = 1e-6
"""How far two orders of a few operations may differ, as a share of the largest value."""
MOST_ELEMENTS = 600
SIZES = (2, 3, 4, 5, 6, 8, 1)

ELEMENTS = {
    "float": (TensorProto.FLOAT, np.float32),
    "double": (TensorProto.DOUBLE, np.float64),
    "int": (TensorProto.INT64, np.int64),
    "bool": (TensorProto.BOOL, np.bool_),
    "int8": (TensorProto.INT8, np.int8),
    "uint8": (TensorProto.UINT8, np.uint8),
    "int32": (TensorProto.INT32, np.int32),
}


class NotHere(Exception):
    """No value in the graph suits the op that was drawn; another one is."""


@dataclass(frozen=True)
class Value:
    """A tensor of the graph: no element exceeds `bound`, none is off by more than `noise`."""

    name: str
    shape: Shape
    kind: str
    bound: float
    noise: float = 0.0

    @property
    def is_exact(self) -> bool:
        """Whether it holds integers that every correct program computes alike."""
        return not self.noise


@dataclass
class Builder:
    """A graph under construction; `draw` takes every decision: an integer of [low, high].

    `hints` are dimensions of values of which a split would be telling.
    """

    draw: Callable[[int, int], int]
    seed: int
    values: list[Value] = field(default_factory=list)
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: list[TensorProto] = field(default_factory=list)
    feeds: dict[str, Array] = field(default_factory=dict)
    arrays: dict[str, Array] = field(default_factory=dict)
    hints: list[tuple[str, int]] = field(default_factory=list)

    def choose(self, options: Sequence[Any]) -> Any:
        """One of them; the first where a failure is shrunk."""
        return options[self.draw(0, len(options) - 1)]

    def number(self, low: int, high: int) -> int:
        """An integer of [low, high]."""
        return self.draw(low, high)

    def coin(self) -> bool:
        """Heads or tails."""
        return bool(self.draw(0, 1))

    def shape(self, low: int = 1, high: int = 4) -> Shape:
        """A random shape of low to high dimensions."""
        dims: list[int] = []
        for _ in range(self.number(low, high)):
            room = MOST_ELEMENTS // math.prod(dims)
            dims.append(self.choose([s for s in SIZES if s <= max(room, 1)]))
        return tuple(dims)

    def fresh(
        self, shape: Shape, kind: str = "float", low: int = -3, high: int = 4, fed: bool = False
    ) -> Value:
        """A new input, or unless `fed` a weight, with integers from [low, high)."""
        name = f"x{len(self.feeds) + len(self.weights)}"
        source = np.random.default_rng([self.seed, len(self.feeds) + len(self.weights)])
        low, high = (0, 2) if kind == "bool" else (low, high)
        array = source.integers(low, high, shape).astype(ELEMENTS[kind][1])
        if fed or self.coin():
            self.feeds[name] = array
        else:
            self.weights.append(numpy_helper.from_array(array, name))
        value = Value(name, tuple(shape), kind, float(max(abs(low), abs(high - 1))))
        self.values.append(value)
        self.arrays[name] = array
        return value

    def constant(self, array: Array) -> str:
        """The name of a new initializer: a shape, axes, bounds or indices."""
        name = f"c{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(array), name))
        self.arrays[name] = np.asarray(array)
        return name

    def int64(self, *numbers: int) -> str:
        """A new initializer of these numbers."""
        return self.constant(np.array(numbers, np.int64))

    def pick(
        self,
        kind: str = "float",
        rank: int | tuple[int, int] = (1, 4),
        bound: float = LIMIT,
        exact: bool = False,
        where: Callable[[Value], bool] = lambda v: True,
    ) -> Value:
        """A value of the graph, half the time the last that nothing reads yet.

        Errors: NotHere where none suits.
        """
        low, high = (rank, rank) if isinstance(rank, int) else rank
        found = [
            v
            for v in reversed(self.values)
            if v.kind == kind
            and low <= len(v.shape) <= high
            and v.bound <= bound
            and (v.is_exact or not exact)
            and where(v)
        ]
        if not found:
            raise NotHere
        read = {name for node in self.nodes for name in node.input}
        unread = [v for v in found if v.name not in read]
        return unread[0] if unread and self.coin() else self.choose(found)

    def partner(self, value: Value, bound: float = LIMIT, exact: bool = False) -> Value:
        """A value that is broadcast with this one: one that is there, or a new one."""

        def fits(other: Value) -> bool:
            return _broadcasts(value.shape, other.shape)

        found = [
            v
            for v in reversed(self.values)
            if v.kind == value.kind and v.bound <= bound and fits(v) and (v.is_exact or not exact)
        ]
        if found and self.number(0, 3):
            return self.choose(found)
        kept = value.shape[self.number(0, max(len(value.shape) - 1, 0)) :]
        return self.fresh(tuple(1 if not self.number(0, 4) else s for s in kept), value.kind)

    def add(
        self,
        op: str,
        inputs: Sequence[Value | str],
        bound: float,
        *,
        gain: float = 1.0,
        rounds: bool = False,
        times: float = 1.0,
        kind: str | None = None,
        outputs: int = 1,
        domain: str = "",
        **attrs: Any,
    ) -> list[Value]:
        """Adds a node. Errors of its operands grow by `gain`; `rounds` says that it is inexact, by
        so many `times` a rounding of the bound."""
        operands = [i for i in inputs if isinstance(i, Value)]
        noise = gain * sum(i.noise for i in operands)
        if rounds or noise:
            noise += ROUNDING * max(bound, 1.0) * times
        if bound > LIMIT or noise > 1e-2:
            raise NotHere
        kind = kind or operands[0].kind
        if kind not in ("float", "double"):
            assert not noise, f"{op} makes whole numbers of inexact ones"
        names = [f"t{len(self.nodes)}_{i}" for i in range(outputs)]
        spelled = [i.name if isinstance(i, Value) else i for i in inputs]
        node = helper.make_node(
            op, spelled, names, f"{op}_{len(self.nodes)}", domain=domain, **attrs
        )
        made = [Value(n, s, kind, bound, noise) for n, s in self._shapes(node, operands).items()]
        if any(math.prod(v.shape) > MOST_ELEMENTS for v in made):
            raise NotHere
        self.nodes.append(node)
        self.values += [v for v in made if math.prod(v.shape)]
        return made

    def note(self, op: str, inputs: Sequence[str], value: Value) -> None:
        """Adds a node whose result inference cannot tell."""
        self.nodes.append(helper.make_node(op, inputs, [value.name], f"{op}_{len(self.nodes)}"))

    def _shapes(self, node: onnx.NodeProto, operands: Sequence[Value]) -> dict[str, Shape]:
        types = {
            v.name: helper.make_tensor_type_proto(ELEMENTS[v.kind][0], v.shape) for v in operands
        }
        data = {w.name: w for w in self.weights if w.name in node.input}
        for name, weight in data.items():
            types[name] = helper.make_tensor_type_proto(weight.data_type, list(weight.dims))
        found = onnx.shape_inference.infer_node_outputs(
            onnx.defs.get_schema(node.op_type, OPSET, node.domain),
            node,
            types,
            data,
            opset_imports=[helper.make_opsetid("", OPSET)],
            ir_version=11,
        )
        # onnx does not infer the body of a function here, and these have the shape of an operand
        same = {
            n: operands[0].shape for n, t in found.items() if not t.tensor_type.HasField("shape")
        }
        assert not same or node.op_type in ("GroupNormalization", "MeanVarianceNormalization")
        return {
            name: same.get(name, tuple(d.dim_value for d in found[name].tensor_type.shape.dim))
            for name in node.output
        }

    def model(self) -> tuple[onnx.ModelProto, list[Value]]:
        """The model, and its outputs: what nothing reads, and some of what something does."""
        read = {name for node in self.nodes for name in node.input}
        made = [v for v in self.values if v.name.startswith("t")]
        outputs = [v for v in made if v.name not in read]
        between = [v for v in made if v.name in read]
        if between and self.coin():
            outputs.append(self.choose(between))
        ports = [_info(v) for v in outputs]
        used = {i for n in self.nodes for i in n.input}
        inputs = [_info(v) for v in self.values if v.name in self.feeds and v.name in used]
        weights = [w for w in self.weights if w.name in used]
        graph = helper.make_graph(self.nodes, "random", inputs, ports, weights)
        opset = [helper.make_opsetid("", OPSET)]
        model = helper.make_model(graph, opset_imports=opset, ir_version=11)
        self.feeds = {i.name: self.feeds[i.name] for i in inputs}
        return model, outputs


def _info(value: Value) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(value.name, ELEMENTS[value.kind][0], value.shape)


def _broadcasts(a: Shape, b: Shape) -> bool:
    pairs = list(zip(a[::-1], b[::-1], strict=False))
    grows = (
        math.prod(np.broadcast_shapes(a, b))
        if all(x == y or 1 in (x, y) for x, y in pairs)
        else MOST_ELEMENTS + 1
    )
    return grows <= MOST_ELEMENTS


Maker = Callable[[Builder, str], object]
MAKERS: dict[str, Maker] = {}


def makes(ops: str) -> Callable[[Maker], Maker]:
    """Registers a function that adds one of these ops (named by its second argument) to a graph."""

    def register(function: Maker) -> Maker:
        for op in ops.split():
            assert op not in MAKERS, op
            MAKERS[op] = function
        return function

    return register
