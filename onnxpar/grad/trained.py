"""The weights of a model that are trained: those that torch would train.

Torch trains each parameter that the loss depends on. An ONNX file does not say which of its
initializers are parameters, unless torch.export has left its signature in it. So all initializers
of floating-point numbers that the loss depends on are trained, but those that are proved to be
constants: by the signature, by the operand that they are (running statistics, scales of a Resize),
or by their values (masks, tables of sines and cosines, frequencies, grids, numbers).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.errors import StrategyError
from onnxpar.grad.constant_values import (
    Array,
    are_frequencies,
    are_whole,
    first_values,
    is_choice,
    is_mask,
    is_scale_factor,
    is_sinusoid,
)
from onnxpar.grad.vjp import carries, entry_of, is_message, is_trainable_type, operands_of
from onnxpar.ir.exported import PARAMETER
from onnxpar.ir.subgraphs import all_nodes, bodies, nodes_within
from onnxpar.load.load import Model

_MOVES = (
    *("Transpose", "Reshape", "Unsqueeze", "Squeeze", "Flatten", "Cast", "Identity", "Expand"),
    *("Slice", "Split"),
)
_SHIFTS = ("Add", "Sub", "Mul", "Div")
_JOINS = ("Concat", "Where")
_TABLES = ("Gather", "GatherND", "GatherElements")
FROZEN = "named by --frozen"
UNNAMED = "not named by --params"
HELD = "made of Constant nodes"
_STATISTICS = "running statistics of a BatchNormalization"
_SETTINGS: Mapping[str, Mapping[int, str]] = {
    "BatchNormalization": {3: _STATISTICS, 4: _STATISTICS},
    **{op: {1: f"a setting of {op}"} for op in ("Dropout", "Upsample", "ConstantOfShape")},
    **{op: {1: f"a setting of {op}", 2: f"a setting of {op}"} for op in ("Clip", "Resize")},
    "Pad": {2: "a setting of Pad"},
    **{
        op: {1: "a scale of a quantized tensor", 2: "a zero point of a quantized tensor"}
        for op in ("QuantizeLinear", "DequantizeLinear")
    },
}
"""Operands that no gradient reaches, by op, and what they are."""
_GENERATED = re.compile(
    r"onnx::|/|.*_output_\d+$|\d+$|val_\d+|.*(C|c)onstant|.*lifted_tensor|scalar_tensor"
)
"""Names that torch's exporters make up; a parameter has the name of its module."""


@dataclass(frozen=True)
class Trained:
    """A weight that is trained, and the node and operand that read it first."""

    tensor: gs.Constant
    node: gs.Node
    operand: int

    @property
    def name(self) -> str:
        """The weight's name in the model."""
        return str(self.tensor.name)


@dataclass(frozen=True)
class Left:
    """A tensor of floating-point numbers that is not trained, and why; `in_role`: a node reads it
    where layers have a weight."""

    tensor: gs.Constant
    reason: str
    in_role: bool = False

    @property
    def name(self) -> str:
        """The tensor's name in the model."""
        return str(self.tensor.name)


@dataclass(frozen=True)
class Weights:
    """The weights that are trained, and those that are not, each in the order in which nodes read
    them. `asked` are those that the user named."""

    trained: list[Trained]
    left: list[Left]
    asked: frozenset[str] = frozenset()


def find_trained(
    model: Model,
    params: Sequence[str] = (),
    frozen: Sequence[str] = (),
    outputs: Collection[str] | None = None,
) -> Weights:
    """Finds the weights of a model that are trained, and says why the others are not.

    params   globs of names: these instead of those that are found
    frozen   globs of names that are left out
    outputs  names of outputs that the loss is of; all by default
    Errors: StrategyError for a glob that matches nothing, or where nothing is left.
    """
    readers = _readers(model.graph)
    asked = {n for glob in params for n in _matching(glob, readers, "--params")}
    kept_out = {n for glob in frozen for n in _matching(glob, readers, "--frozen")}
    judge = _Judge(model, outputs)
    found = Weights([], [], frozenset(asked))
    for name, (tensor, node, index) in readers.items():
        if name in kept_out:
            reason: str | None = FROZEN
        elif asked:
            reason = None if name in asked else UNNAMED
        else:
            reason = judge.reason(tensor)
        if reason is None:
            found.trained.append(Trained(tensor, node, index))
        else:
            in_role = any(is_role(n, i) for n, i in uses_of(tensor))
            found.left.append(Left(tensor, reason, in_role))
    if not found.trained:
        raise StrategyError("no weight is left to train; name some with --params")
    return found


def _matching(glob: str, names: Collection[str], option: str) -> list[str]:
    matching = [n for n in names if n == glob or fnmatchcase(n, glob)]
    if not matching:
        some = ", ".join(list(names)[:5])
        raise StrategyError(f"{option} {glob}: matches no weight; there are {some} ...")
    return matching


def _readers(graph: gs.Graph) -> dict[str, tuple[gs.Constant, gs.Node, int]]:
    """Every constant of floating-point numbers, and where it is read first: behind nodes that only
    move its elements."""
    found: dict[str, tuple[gs.Constant, gs.Node, int]] = {}
    for node in all_nodes(graph):
        for i, tensor in enumerate(node.inputs):
            if not isinstance(tensor, gs.Constant) or not is_trainable_type(tensor):
                continue
            if tensor.name not in found:
                found[tensor.name] = (tensor, *next(uses_of(tensor), (node, i)))
    return found


def uses_of(tensor: gs.Tensor) -> Iterator[tuple[gs.Node, int]]:
    """The nodes and operands that read a tensor, behind those that only move its elements, join
    it with other constants, or scale it by a number (RMSNorm's 1 + weight)."""
    for node in {id(n): n for n in tensor.outputs}.values():
        for i, operand in enumerate(node.inputs):
            if operand is not tensor:
                continue
            if _passes(node, i):
                for result in node.outputs:
                    yield from uses_of(result)
            else:
                yield node, i


def _passes(node: gs.Node, index: int) -> bool:
    if node.op in _MOVES:
        return index == 0
    others = [t for i, t in enumerate(node.inputs) if i != index]
    if node.op == "Concat":
        return all(_is_stored(t) for t in others)
    return node.op in _SHIFTS and all(_is_number(t) for t in others)


def _is_stored(tensor: gs.Tensor) -> bool:
    """Whether a tensor consists of constants, moved."""
    if isinstance(tensor, gs.Constant):
        return True
    node = _maker(tensor)
    return node is not None and node.op in (*_MOVES, "Concat") and all(map(_is_stored, node.inputs))


def _maker(tensor: gs.Tensor) -> gs.Node | None:
    return tensor.inputs[0] if tensor.inputs else None


def _is_number(tensor: gs.Tensor) -> bool:
    return isinstance(tensor, gs.Constant) and int(np.prod(tensor.shape)) == 1


class _Judge:
    """Says of each constant of a model why it is not trained."""

    def __init__(self, model: Model, outputs: Collection[str] | None) -> None:
        self.model = model
        self.leading = _leading(model.graph, outputs)
        kinds = model.exported
        self.parameters = {n for n, kind in kinds.items() if kind == PARAMETER}
        self.all_named = bool(kinds) and self.parameters <= model.stored
        self.fed = {t.name for t in model.graph.inputs}
        self.by_torch = model.header.producer_name == "pytorch"

    def reason(self, tensor: gs.Constant) -> str | None:
        """Why a constant is not trained, None where it is."""
        name = str(tensor.name)
        uses = list(uses_of(tensor))
        settings = [_SETTINGS.get(n.op, {}).get(i) for n, i in uses if not n.domain]
        if uses and len(settings) == len(uses) and all(settings):
            return settings[0]
        if name not in self.model.stored:
            return HELD
        if name not in self.leading:
            return "the loss does not depend on it"
        kind = self.model.exported.get(name)
        if kind not in (None, PARAMETER):
            return "a buffer: torch.export lists it as no parameter"
        if kind is None and self.all_named:
            return "made by the exporter: all parameters have names of their own"
        values = first_values(tensor, self.model.folder)
        if is_sinusoid(values):
            return "a table of sines and cosines"
        if kind == PARAMETER:
            return None
        if int(np.prod(tensor.shape)) == 1:
            return self._reason_of_number(tensor, uses, float(values.flat[0]))
        return self._reason_of_values(values, uses) or self._reason_of_place(tensor, uses)

    def _reason_of_number(
        self, tensor: gs.Constant, uses: Sequence[tuple[gs.Node, int]], value: float
    ) -> str | None:
        """A tensor of one element is a parameter in the role of one (the bias of one class), and
        where torch has named it."""
        if any(is_role(n, i) or _is_bias_of_one(n, i) for n, i in uses):
            return None
        if not self.by_torch or self.model.exported or _GENERATED.match(tensor.name):
            return "a number; --params trains it"
        if is_scale_factor(value):
            return "a scale factor: the root of a whole number"
        return None

    @staticmethod
    def _reason_of_values(values: Array, uses: Sequence[tuple[gs.Node, int]]) -> str | None:
        if is_mask(values):
            return "a mask"
        is_angle = all(_becomes_angle(n) for n, _ in uses)
        if are_frequencies(values, is_angle):
            return "frequencies: a geometric sequence"
        if any(is_role(n, i) for n, i in uses):
            return None
        if is_choice(values):
            return "a mask of zeros and ones"
        return "a grid of whole numbers" if are_whole(values) else None

    def _reason_of_place(
        self, tensor: gs.Constant, uses: Sequence[tuple[gs.Node, int]]
    ) -> str | None:
        """What the nodes that read a constant prove of it."""
        values = first_values(tensor, self.model.folder)
        for node, index in uses:
            if node.op == "InstanceNormalization" and _is_of_groups(node, index, values):
                return "made by the exporter for a normalization of groups"
            if node.op in _JOINS and _is_of_samples(node, tensor):
                return "has a row for each sample of the batch"
            if node.op == "Add" and not values.any() and values.ndim > 1 and _feeds_softmax(node):
                return "a mask that hides nothing"
            if node.op in ("Sub", "Div") and index == 1 and self._normalizes_input(node):
                return "normalizes an input"
        return None

    def _normalizes_input(self, node: gs.Node) -> bool:
        """Whether a node only shifts and scales what is fed, by a few numbers."""
        tensor: gs.Tensor = node.inputs[0]
        few = int(np.prod(node.inputs[1].shape)) <= 4
        while few and (maker := _maker(tensor)) is not None and maker.op in (*_SHIFTS, *_MOVES):
            tensor = maker.inputs[0]
        return few and tensor.name in self.fed


def _leading(graph: gs.Graph, outputs: Collection[str] | None) -> set[str]:
    """The names of tensors of floating-point numbers from which some path leads to the outputs."""
    ends = [t for t in graph.outputs if outputs is None or t.name in outputs]
    found = {str(t.name) for t in ends}
    for node in reversed(graph.nodes):
        if not is_message(node) and not any(t.name in found for t in node.outputs):
            continue
        inner = [n for n in nodes_within([node]) if n is not node] if bodies(node) else []
        for each in (node, *inner):
            settings = _SETTINGS.get(each.op, {}) if not each.domain else {}
            for i, tensor in enumerate(operands_of(each)):
                if i not in settings and _may_carry(tensor):
                    found.add(str(tensor.name))
    return found


def _may_carry(tensor: gs.Tensor) -> bool:
    """Whether a gradient may reach a tensor, for all that is known of its type."""
    maker = _maker(tensor)
    is_unknown = bool(tensor.name) and tensor.dtype is None
    return is_unknown or is_trainable_type(tensor) or (maker is not None and carries(maker))


def is_role(node: gs.Node, index: int) -> bool:
    """Whether an operand stands where layers have their weight, bias, scale or table."""
    entry = entry_of(node)
    return entry is not None and index in entry.trained


def _is_bias_of_one(node: gs.Node, index: int) -> bool:
    shape, result = list(node.inputs[index].shape or ()), list(node.outputs[0].shape or ())
    return node.op == "Add" and shape[-1:] == [1] == result[-1:]


def _becomes_angle(node: gs.Node) -> bool:
    """Whether what a node computes is only read for its sine and cosine."""
    readers = [r for t in node.outputs for r in t.outputs]
    moves = (*_MOVES, "Concat")
    return bool(readers) and all(
        r.op in ("Sin", "Cos") or (r.op in moves and _becomes_angle(r)) for r in readers
    )


def _is_of_groups(node: gs.Node, index: int, values: Array) -> bool:
    """Whether an InstanceNormalization is what exporters make of one over groups of channels: its
    scale is 1, and what is scaled by channel stands behind it."""
    made = _maker(node.inputs[0])
    return made is not None and made.op == "Reshape" and bool((values == (index == 1)).all())


def _is_of_samples(node: gs.Node, tensor: gs.Constant) -> bool:
    """Whether a constant that joins what is computed has a row for each sample."""
    shape, result = list(tensor.shape), list(node.outputs[0].shape or ())
    if node.op == "Concat" and node.attrs.get("axis", 0) % len(result or (1,)) == 0:
        return False
    return len(shape) == len(result) > 1 and shape[0] == result[0] != 1


def _feeds_softmax(node: gs.Node) -> bool:
    """Whether what a node computes are scores, which a Softmax reads."""
    readers = [r for t in node.outputs for r in t.outputs]
    passing = (*_MOVES, *_SHIFTS, "Where", "Max", "Clip")
    return any(r.op == "Softmax" or (r.op in passing and _feeds_softmax(r)) for r in readers)
