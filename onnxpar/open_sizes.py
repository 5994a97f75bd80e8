"""Models with open sizes: at which bindings they are inferred, and their graph at each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import onnx
import onnx_graphsurgeon as gs
from onnx import NodeProto, TensorProto, TypeProto

from onnxpar.lockstep import Lockstep
from onnxpar.shapes import keep_nodes
from onnxpar.stored import FOLD_LIMIT, copy_with_stubs
from onnxpar.symbols import ATTEMPTS, Binding, Polynomial, sample

OpenDims = Mapping[tuple[str, int], Polynomial]
"""Open dimensions of inputs, by name and axis."""


@dataclass(frozen=True)
class OpenSizes:
    """What a model leaves open. `graph(i)` is the model's graph at `bindings[i]`; the same nodes
    and tensors at each, with other sizes."""

    symbols: tuple[str, ...]
    bindings: list[Binding]
    dims: OpenDims
    graph: Callable[[int], gs.Graph]

    @property
    def flags(self) -> str:
        """What binds every symbol."""
        return " ".join(f"--dim {symbol}=N" for symbol in self.symbols)

    def variables(self) -> dict[str, list[int]]:
        """Every symbol's values."""
        return {s: [b[s] for b in self.bindings] for s in self.symbols}


def infer_open(
    proto: onnx.ModelProto,
    dims: OpenDims,
    least: int,
    prepare: Callable[[onnx.ModelProto], gs.Graph],
) -> OpenSizes:
    """Folds and infers the model at sample sizes of at least `least`, in place.

    Where symbols turn out to be one size, or one the sum of others (a mask over past and present),
    they are tied; where sizes do not fit the model at all (a table of positions, halved images),
    others are tried. `prepare` makes a graph of an inferred model.
    """
    # No sample may cut a table so that nothing is left of it, or a single row.
    taken = {d - n for weight in proto.graph.initializer for d in weight.dims for n in (0, 1)}
    best: tuple[int, Lockstep, OpenDims, list[Binding]] | None = None
    attempt = 0
    while attempt < ATTEMPTS:
        symbols = sorted({v for p in dims.values() for v in p.variables})
        bindings = sample(symbols, least, taken, attempt)
        walks = _walks(proto, dims, bindings)
        walks.run()
        conflicts = max((walk.conflicts for walk in walks.walks), key=len)
        tie = next((t for node in conflicts if (t := _tie(walks, node))), None)
        if tie:
            dims = {at: size.replace(*tie) for at, size in dims.items()}
            best = None
            continue
        if best is None or len(conflicts) < best[0]:
            best = (len(conflicts), walks, dims, bindings)
        if not conflicts:
            break
        attempt += 1
    assert best is not None
    _, walks, dims, bindings = best
    keep_nodes(proto.graph, walks.kept)
    bare = copy_with_stubs(proto, _reference_to_nowhere)

    def graph(i: int) -> gs.Graph:
        model = proto
        if i:
            model = onnx.ModelProto()
            model.CopyFrom(bare)
        walks.walks[i].declare(model.graph)
        return prepare(model)

    return OpenSizes(tuple(bindings[0]), bindings, dims, graph)


def _walks(proto: onnx.ModelProto, dims: OpenDims, bindings: list[Binding]) -> Lockstep:
    def types(binding: Binding) -> dict[str, TypeProto]:
        found = {}
        for tensor in proto.graph.input:
            type_ = TypeProto()
            type_.CopyFrom(tensor.type)
            for axis, dim in enumerate(type_.tensor_type.shape.dim):
                if (tensor.name, axis) in dims:
                    dim.dim_value = dims[tensor.name, axis].at(binding)
            found[tensor.name] = type_
        return found

    variables = {s: [b[s] for b in bindings] for s in bindings[0]}
    return Lockstep(proto, [types(b) for b in bindings], variables)


def _tie(walks: Lockstep, node: NodeProto) -> tuple[str, Polynomial] | None:
    """A symbol, and what it must be for two operands to fit each other."""
    shapes = [walks.walks[0].shape(name) for name in node.input if name]
    names = [name for name in node.input if name]
    for a, first in zip(names, shapes, strict=True):
        for b, second in zip(names, shapes, strict=True):
            for back in range(1, 1 + min(len(first or ()), len(second or ()))):
                x, y = (first or ())[-back], (second or ())[-back]
                if x == y or 1 in (x, y):
                    continue
                size = walks.size(a, len(first or ()) - back)
                other = walks.size(b, len(second or ()) - back)
                symbol = size.symbol if size else None
                if symbol and other and other.variables and symbol not in other.variables:
                    return symbol, other
    return None


def _reference_to_nowhere(weight: TensorProto) -> TensorProto | None:
    """What stands in for a large weight at the other bindings, where nobody reads it."""
    is_large = math.prod(weight.dims) > FOLD_LIMIT
    if weight.data_location == TensorProto.EXTERNAL or not is_large:
        return None
    stub = TensorProto(name=weight.name, data_type=weight.data_type, dims=weight.dims)
    stub.data_location = TensorProto.EXTERNAL
    stub.external_data.add(key="location", value="")
    return stub
