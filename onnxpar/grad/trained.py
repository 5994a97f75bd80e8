"""Which weights of a model are trained: those whose place in the graph is that of a parameter.

An initializer is trained where it is read, straight or through ops that only move elements or join
it with others, as an operand in the role of weight, bias, scale or table (`vjp(trained=...)`),
together with something that depends on what is fed or trained. What is added to or multiplied with
that is a bias, a scale or a table of positions; numbers, masks, frequencies and tables of sines and
cosines are not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_graphsurgeon as gs
from onnx import numpy_helper

from onnxpar.errors import StrategyError
from onnxpar.grad.vjp import carries, entry_of, is_trainable_type
from onnxpar.model import Model
from onnxpar.stored import stored_proto
from onnxpar.subgraphs import all_nodes, bodies
from onnxpar.weights import read_blocks

Array = npt.NDArray[Any]

_MOVES = (
    *("Transpose", "Reshape", "Unsqueeze", "Squeeze", "Flatten", "Cast", "Identity", "Expand"),
    *("Slice", "Split"),
)
_SHIFTS = ("Add", "Sub", "Mul", "Div")
_TABLES = ("Gather", "GatherND", "GatherElements")
_HIDES = -1e4
"""What a mask adds where it hides something, at most."""


@dataclass(frozen=True)
class Trained:
    """A weight that is trained, and the node and operand that make it one."""

    tensor: gs.Constant
    node: gs.Node
    operand: int

    @property
    def name(self) -> str:
        """The weight's name in the model."""
        return str(self.tensor.name)


def find_trained(
    model: Model, params: Sequence[str] = (), frozen: Sequence[str] = ()
) -> list[Trained]:
    """The weights of a model that are trained, in the order in which they are first read.

    params  globs of names: these instead of those that are found
    frozen  globs of names that are left out
    Errors: StrategyError for a glob that matches nothing, or where nothing is left.
    """
    readers = _readers(model.graph)
    in_role = _in_role(model)
    found = {t.name: t for t in in_role if t.name in model.stored}
    if params:
        names = [n for glob in params for n in _matching(glob, readers, "--params")]
        found = {n: found.get(n, Trained(*readers[n])) for n in readers if n in names}
    for glob in frozen:
        for name in _matching(glob, readers, "--frozen"):
            found.pop(name, None)
    if not found:
        raise StrategyError("no weight is left to train; name some with --params")
    return list(found.values())


def _matching(glob: str, names: Sequence[str] | dict[str, Any], option: str) -> list[str]:
    matching = [n for n in names if n == glob or fnmatchcase(n, glob)]
    if not matching:
        some = ", ".join(list(names)[:5])
        raise StrategyError(f"{option} {glob}: matches no weight; there are {some} ...")
    return matching


def _readers(graph: gs.Graph) -> dict[str, tuple[gs.Constant, gs.Node, int]]:
    """Every stored tensor of floating-point numbers, and where it is read first."""
    found: dict[str, tuple[gs.Constant, gs.Node, int]] = {}
    for node in all_nodes(graph):
        for i, tensor in enumerate(node.inputs):
            if isinstance(tensor, gs.Constant) and is_trainable_type(tensor):
                found.setdefault(tensor.name, (tensor, node, i))
    return found


def _in_role(model: Model) -> Iterator[Trained]:
    """The weights that stand where parameters do: beside what depends on inputs or on others, or
    beside weights alone (latents that a model starts from)."""
    graph = model.graph
    live = {t.name for t in graph.inputs if is_trainable_type(t)}
    seen: set[str] = set()
    for node in all_nodes(graph):
        for body in bodies(node):
            live |= {t.name for t in body.inputs if is_trainable_type(t)}
        is_live = [t.name in live or _is_known(t, seen) for t in node.inputs]
        for i in range(len(node.inputs)):
            for constant in _origins(node.inputs[i]):
                if constant.name in seen or not _is_role(node, i, is_live, constant, model):
                    continue
                seen.add(constant.name)
                is_live[i] = True
                yield Trained(constant, node, i)
        if any(is_live) and node.op not in ("Shape", "Size"):
            live |= {t.name for t in node.outputs if carries(node) or is_trainable_type(t)}


def _is_known(tensor: gs.Tensor, seen: set[str]) -> bool:
    return any(origin.name in seen for origin in _origins(tensor))


def _origins(tensor: gs.Tensor) -> list[gs.Constant]:
    """The stored tensors of floating-point numbers that this one consists of, but for the order and
    the shape of their elements, and numbers (RMSNorm's 1 + weight); none where it has others too.
    """
    if isinstance(tensor, gs.Constant):
        return [tensor] if is_trainable_type(tensor) else []
    node = tensor.inputs[0] if tensor.inputs else None
    if node is None or node.op not in (*_MOVES, *_SHIFTS, "Concat"):
        return []
    parts = list(node.inputs if node.op == "Concat" else node.inputs[:1])
    if node.op in _SHIFTS:
        parts = [t for t in node.inputs if not _is_number(t)]
        if len(parts) != 1:
            return []
    found: dict[str, gs.Constant] = {}
    for part in parts:
        origins = _origins(part)
        if not origins:
            return []
        found |= {t.name: t for t in origins}
    return list(found.values())


def _is_number(tensor: gs.Tensor) -> bool:
    return isinstance(tensor, gs.Constant) and int(np.prod(tensor.shape)) == 1


def _shape(tensor: gs.Tensor) -> list[int]:
    """The shape of a tensor, with 1 for what it repeats."""
    shape = list(tensor.shape or ())
    node = tensor.inputs[0] if tensor.inputs else None
    if node is None or node.op != "Expand":
        return shape
    before = _shape(node.inputs[0])
    return [1] * (len(shape) - len(before)) + before


def _becomes_angle(node: gs.Node) -> bool:
    """Whether what a node computes is only read for its sine and cosine."""
    readers = [r for t in node.outputs for r in t.outputs]
    moves = (*_MOVES, "Concat")
    return bool(readers) and all(
        r.op in ("Sin", "Cos") or (r.op in moves and _becomes_angle(r)) for r in readers
    )


def _is_role(
    node: gs.Node,
    index: int,
    is_live: Sequence[bool],
    constant: gs.Constant,
    model: Model,
) -> bool:
    folder = model.folder
    beside = any(live for i, live in enumerate(is_live) if i != index)
    shape = _shape(node.inputs[index])
    if _becomes_angle(node):
        return False
    if node.op in ("Add", "Mul", "Concat", "Where"):
        return beside and _joins(node, index, shape, constant, folder)
    entry = entry_of(node)
    if entry is None or index not in entry.trained:
        return False
    if node.op == "InstanceNormalization" and _is_of_groups(node, index, _values(constant, folder)):
        return False
    if node.op in _TABLES:
        return not _is_sinusoid(_rows(constant, folder))
    others = [t for i, t in enumerate(node.inputs) if i != index and t.name]
    return beside or all({o.name for o in _origins(t)} & model.stored for t in others)


def _is_of_groups(node: gs.Node, index: int, values: Array | None) -> bool:
    """Whether an InstanceNormalization is what exporters make of one over groups of channels: its
    scale is 1, and what is scaled by channel stands behind it."""
    made = node.inputs[0].inputs[0] if node.inputs[0].inputs else None
    if made is None or made.op != "Reshape" or values is None:
        return False
    return bool((values == (index == 1)).all())


def _joins(
    node: gs.Node, index: int, shape: list[int], constant: gs.Constant, folder: Path
) -> bool:
    """Whether a weight that joins with what is computed is a bias, a scale, or a table."""
    wide = [s for s in shape if s != 1]
    result = list(node.outputs[0].shape or ())
    if not wide:  # a bias of one class, but not a number
        return node.op == "Add" and shape[-1:] == [1] == result[-1:]
    if node.op in ("Add", "Mul") and len(wide) == 1:
        return not _is_mask(_values(constant, folder))
    is_batch = node.op in ("Concat", "Where") and shape[:1] != [1] and len(shape) == len(result)
    if node.op == "Mul" or is_batch:
        return False
    values = _values(constant, folder)
    rows = None if values is None else values.reshape(-1, values.shape[-1])
    if values is not None and not values.any() and _feeds_softmax(node):
        return False  # a mask that hides nothing
    return not (_is_mask(values) or _is_sinusoid(rows))


def _feeds_softmax(node: gs.Node) -> bool:
    """Whether what a node computes are scores, which a Softmax reads."""
    readers = [r for t in node.outputs for r in t.outputs]
    passing = (*_MOVES, *_SHIFTS, "Where", "Max", "Clip")
    return any(r.op == "Softmax" or (r.op in passing and _feeds_softmax(r)) for r in readers)


def _is_mask(values: Array | None) -> bool:
    """Whether they hide something: large negative numbers, or some zeros and some ones."""
    if values is None or not values.size:
        return False
    return bool(values.min() <= _HIDES or {*np.unique(values[:1000])} == {0, 1})


def _is_sinusoid(rows: Array | None) -> bool:
    """Whether the rows are sines and cosines of their number times frequencies: the second follows
    from the first."""
    if rows is None or len(rows) < 3:
        return False
    if not np.isin(rows[0], (0, 1)).all() or not rows[1].any():
        return False
    a, b = rows[1].astype(np.float64), rows[2].astype(np.float64)
    is_cosine = np.abs(b - (2 * a * a - 1)) < 1e-3
    is_sine = np.abs(b * b - 4 * a * a * (1 - a * a)) < 1e-3
    return bool((np.abs(a) <= 1.0001).all() and np.where(rows[0] == 1, is_cosine, is_sine).all())


_MOST = 1 << 24
"""Bytes of a weight that are looked at."""


def _values(constant: gs.Constant, folder: Path) -> Array | None:
    """A weight's values, None where it is too large to be looked at."""
    if constant.dtype is None or np.prod(constant.shape, dtype=np.int64) * 4 > _MOST:
        return None
    proto = stored_proto(constant)
    return constant.values if proto is None else numpy_helper.to_array(proto, str(folder))


def _rows(constant: gs.Constant, folder: Path) -> Array | None:
    """The first rows of a table; None where it has other dimensions."""
    if len(constant.shape) != 2 or constant.shape[0] < 3:
        return None
    proto = stored_proto(constant)
    if proto is None:
        return np.asarray(constant.values[:3])
    _, _, block = next(read_blocks(proto, folder))
    return block[:3]
