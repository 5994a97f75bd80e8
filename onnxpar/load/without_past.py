"""Removes from a decoder what it computes from the attention mask and the length of its caches,
once its caches are in pages.

Only sizes of new tokens, and their positions, are left. A tensor that depends on the mask is
replaced if its value, at all samples, is a constant, a multiple of the number of new tokens, or
their positions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

from onnxpar.base.arrays import Array
from onnxpar.graph.paged_attention import PAGED_ATTENTION, UnpagedError
from onnxpar.load.decoder_samples import Sample

_Made = tuple[list[NodeProto], dict[str, Array]]
"""Nodes that make a tensor, and the constants that they read."""


class WithoutPast:
    """Removes the tensors `gone`, such as an attention mask and caches, from a graph. Nodes that
    read them are replaced by nodes that read other inputs: `tokens`, (1, tokens), and `positions`,
    (tokens,)."""

    def __init__(
        self, graph: GraphProto, gone: Collection[str], tokens: str, positions: str
    ) -> None:
        self.graph, self.gone = graph, gone
        self.tokens, self.positions = tokens, positions
        self.depending = set(gone)
        for node in graph.node:
            if node.op_type != PAGED_ATTENTION and not self.depending.isdisjoint(node.input):
                self.depending |= set(node.output)

    def run(self, samples: Sequence[Sample]) -> list[str]:
        """Rewrites the graph in place; returns the names of the tensors that new nodes compute.
        `samples` have the values of tensors at several sizes. Errors: ModelError if a node that
        stays needs a tensor in `gone`."""
        needed = {o.name for o in self.graph.output}
        kept: list[NodeProto] = []
        rewritten: list[str] = []
        reader: dict[str, NodeProto] = {}
        for node in reversed(self.graph.node):
            wanted = [name for name in node.output if name in needed]
            instead = self._instead(wanted, samples)
            if instead is not None:
                nodes, constants = instead
                rewritten += wanted
                weights = [numpy_helper.from_array(a, n) for n, a in constants.items()]
                self.graph.initializer.extend(weights)
            else:
                nodes = [node] if wanted else []
            kept += reversed(nodes)
            for each in nodes:
                needed |= set(each.input)
                if each.op_type != PAGED_ATTENTION:
                    reader |= dict.fromkeys(each.input, each)
        for name in sorted(reader.keys() & set(self.gone)):
            raise UnpagedError(
                f"{reader[name].op_type} {reader[name].name!r} reads {name!r}, which pages do not "
                "have, for more than sizes and the positions of tokens"
            )
        del self.graph.node[:]
        self.graph.node.extend(reversed(kept))
        return rewritten

    def check(self, names: Collection[str], samples: Sequence[Sample]) -> None:
        """Errors: ModelError unless each of the tensors `names`, which new nodes compute, can be
        computed from the tokens or positions at all `samples` too."""
        for name in names:
            if self._instead([name], samples) is None:
                raise UnpagedError(f"{name!r} depends in another way on the length of long texts")

    def check_order(self, positions: Collection[str], samples: Sequence[Sample]) -> None:
        """Errors: ModelError if a node that stays reads numbers that differ between the new tokens,
        but are not computed from `positions`. In a run with pages, neighbouring tokens may be of
        different texts."""
        known = set(positions)
        for node in self.graph.node:
            if not known.isdisjoint(node.input):
                known |= set(node.output)
        for node in self.graph.node:
            if samples[-1].value(node.output[0]) is not None:
                continue
            for name in set(node.input) - known:
                if _differs_by_token([s.value(name) for s in samples], [s.new for s in samples]):
                    raise UnpagedError(
                        f"{node.op_type} {node.name!r} reads {name!r}, which depends on the order "
                        "of new tokens, and not on their positions"
                    )

    def _instead(self, names: Sequence[str], samples: Sequence[Sample]) -> _Made | None:
        """Returns nodes and constants that compute the tensor in `names` from `tokens` or
        `positions`, with the same integers at all samples; None if there is no such computation."""
        if len(names) != 1 or names[0] not in self.depending:
            return None
        (name,) = names
        values = {(s.past, s.new): s.value(name) for s in samples}
        known = {sizes: v for sizes, v in values.items() if v is not None}
        if len(known) < len(values) or any(v.dtype.kind not in "iu" for v in known.values()):
            return None
        return _sizes(name, known, self.tokens) or _positions(name, known, self.positions)


def _sizes(name: str, values: Mapping[tuple[int, int], Array], tokens: str) -> _Made | None:
    """Returns nodes for the tensor `name` if its elements are each a * new + b, where new is the
    number of new tokens; None for any other tensor. `values` has its value at each (past, new);
    `tokens` is the input."""
    arrays = list(values.values())
    if len({a.shape for a in arrays}) > 1 or arrays[0].ndim > 1:
        return None
    flat = np.array([a.ravel() for a in arrays], np.float64)
    new = np.array([[new, 1] for _, new in values], np.float64)
    (factors, added), *_ = np.linalg.lstsq(new, flat, rcond=None)
    factors, added = np.rint(factors).astype(np.int64), np.rint(added).astype(np.int64)
    if not np.array_equal(new[:, :1] * factors + added, flat):
        return None
    dtype = arrays[0].dtype
    if not factors.any():
        return [], {name: added.reshape(arrays[0].shape).astype(dtype)}
    one, times, plus = (f"{name}/{part}" for part in ("one", "factors", "added"))
    shape, size, scaled, total = (f"{name}/{part}" for part in ("shape", "new", "scaled", "sum"))
    nodes = [
        helper.make_node("Shape", [tokens], [shape], shape),
        helper.make_node("Gather", [shape, one], [size], size),
        helper.make_node("Mul", [size, times], [scaled], scaled),
        helper.make_node("Add", [scaled, plus], [total], total),
    ]
    # A Gather of a scalar index gives a scalar, which stays one if the factors are scalars.
    is_scalar = not arrays[0].ndim
    rank = () if is_scalar else (-1,)
    constants = {
        one: np.array(1) if is_scalar else np.array([1]),
        times: factors.reshape(rank),
        plus: added.reshape(rank),
    }
    return [*nodes, _cast(total, name, dtype)], constants


def _positions(name: str, values: Mapping[tuple[int, int], Array], positions: str) -> _Made | None:
    """Returns nodes for the tensor `name` if it has the positions of the new tokens, plus a
    constant, along one axis; None for any other tensor. `values` has its value at each (past, new);
    `positions` is the input."""
    (past, new), array = max(values.items(), key=lambda item: item[0][1])
    axes = [axis for axis, size in enumerate(array.shape) if size == new]
    if len(axes) != 1 or array.size != new:
        return None
    shape = [1] * array.ndim
    shape[axes[0]] = -1
    added = int(array.ravel()[0]) - past
    for (before, count), each in values.items():
        wanted = (before + added + np.arange(count)).reshape(shape)
        if not np.array_equal(each, wanted):
            return None
    to, plus, shaped, total = (f"{name}/{part}" for part in ("to", "added", "shaped", "sum"))
    nodes = [
        helper.make_node("Reshape", [positions, to], [shaped], shaped),
        helper.make_node("Add", [shaped, plus], [total], total),
        _cast(total, name, array.dtype),
    ]
    return nodes, {to: np.array(shape), plus: np.array(added)}


def _differs_by_token(values: Sequence[Array | None], new: Sequence[int]) -> bool:
    """True if a tensor has an axis of new tokens along which its elements differ. `values` has its
    value at each sample, `new` the number of new tokens there."""
    known = [value for value in values if value is not None]
    if len(known) < len(values) or len({value.ndim for value in known}) > 1:
        return False
    return any(
        all(value.shape[axis] == count for value, count in zip(known, new, strict=True))
        and any((value != value.take([0], axis)).any() for value in known)
        for axis in range(known[0].ndim)
    )


def _cast(source: str, name: str, dtype: np.dtype[np.generic]) -> NodeProto:
    to = helper.np_dtype_to_tensor_dtype(dtype)
    if to == TensorProto.INT64:
        return helper.make_node("Identity", [source], [name], name)
    return helper.make_node("Cast", [source], [name], name, to=to)
