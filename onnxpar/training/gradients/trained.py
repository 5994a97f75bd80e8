"""Finds the weights of a model that PyTorch would train.

PyTorch trains each parameter on which the loss depends. An ONNX file does not say which of its
initializers are parameters, unless it has the signature of torch.export. So all floating-point
initializers on which the loss depends are trained, except certain constants. An initializer counts
as a constant because of the signature, because of the operand's role (running statistics, scales of
a Resize), or because of its values (masks, tables of sines and cosines, frequencies, grids, single
numbers).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.base.errors import StrategyError
from onnxpar.base.near_names import there_are
from onnxpar.graph.exported import PARAMETER
from onnxpar.graph.stop_gradient import is_stop
from onnxpar.graph.subgraphs import all_nodes, bodies, nodes_within
from onnxpar.load.load import Model
from onnxpar.training.gradients.constant_values import (
    Array,
    are_frequencies,
    are_whole,
    first_values,
    is_choice,
    is_mask,
    is_scale_factor,
    is_sinusoid,
)
from onnxpar.training.gradients.vjp import (
    carries,
    entry_of,
    is_message,
    is_trainable_type,
    operands_of,
)

_MOVES = (
    *("Transpose", "Reshape", "Unsqueeze", "Squeeze", "Flatten", "Cast", "Identity", "Expand"),
    *("Slice", "Split"),
)
_SHIFTS = ("Add", "Sub", "Mul", "Div")
_JOINS = ("Concat", "Where")
_TABLES = ("Gather", "GatherND", "GatherElements")
FROZEN = "named by --frozen"
UNNAMED = "not named by --params"
STOPPED = "its gradient is stopped (detach, --stop-gradient)"
HELD = "made of Constant nodes"
CUT = (
    "the loss depends on it only through numbers without a gradient (comparisons, indices, whole "
    "numbers); a straight-through estimator adds a way around them"
)
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
"""The reason why operands are never trained, by op and index of the operand."""
_GENERATED = re.compile(
    r"onnx::|/|.*_output_\d+$|\d+$|val_\d+|.*(C|c)onstant|.*lifted_tensor|scalar_tensor"
)
"""Matches names that PyTorch's exporters generate; a parameter has the name of its module
instead."""


@dataclass(frozen=True)
class Trained:
    """A weight to train.

    node     the first node that reads the weight
    operand  the index of the weight among the node's operands
    """

    tensor: gs.Constant
    node: gs.Node
    operand: int

    @property
    def name(self) -> str:
        """The weight's name in the model."""
        return str(self.tensor.name)


@dataclass(frozen=True)
class Left:
    """A floating-point constant that is not trained.

    reason        why it is not trained
    in_role       True if a node reads it as an operand that is usually a weight
    is_trainable  True if only the user's choice keeps it from being trained
    """

    tensor: gs.Constant
    reason: str
    in_role: bool = False
    is_trainable: bool = False

    @property
    def name(self) -> str:
        """The tensor's name in the model."""
        return str(self.tensor.name)


@dataclass(frozen=True)
class Weights:
    """The weights of a model, in the order in which nodes read them.

    trained  the weights to train
    left     the other floating-point constants, each with the reason
    asked    names of weights that the user's `params` match
    """

    trained: list[Trained]
    left: list[Left]
    asked: frozenset[str] = frozenset()

    def frozen(self, in_role: bool) -> list[gs.Constant]:
        """Returns the weights that only the user's choice keeps from being trained. With `in_role`,
        only those that a node reads as an operand which is usually a weight."""
        frozen = [left for left in self.left if left.is_trainable]
        return [left.tensor for left in frozen if left.in_role or not in_role]


def find_trained(
    model: Model,
    params: Sequence[str] = (),
    frozen: Sequence[str] = (),
    outputs: Collection[str] | None = None,
) -> Weights:
    """Returns the weights of a model to train, and the other floating-point constants with the
    reasons why they are not trained.

    params   globs of the weights to train; if empty, weights that PyTorch would train
    frozen   globs of weights not to train
    outputs  names of the outputs from which the loss is computed; None for all

    Errors: StrategyError for a glob that matches no weight, or if no weight is left.
    """
    readers = _readers(model.graph)
    asked = {n for glob in params for n in matching(glob, readers, "--params")}
    kept_out = {n for glob in frozen for n in matching(glob, readers, "--frozen")}
    judge = _Judge(model, outputs)
    weights = Weights([], [], frozenset(asked))
    for name, (tensor, node, index) in readers.items():
        if name in kept_out:
            reason: str | None = FROZEN
        elif asked:
            reason = None if name in asked else UNNAMED
        else:
            reason = judge.reason(tensor)
        if reason is None:
            weights.trained.append(Trained(tensor, node, index))
        else:
            in_role = any(is_role(n, i) for n, i in uses_of(tensor))
            by_choice = reason in (FROZEN, UNNAMED) and judge.reason(tensor) is None
            weights.left.append(Left(tensor, reason, in_role, by_choice))
    if not weights.trained:
        why = "".join(f"; {left.tensor.name!r}: {left.reason}" for left in weights.left[:5])
        raise StrategyError(f"no weight is left to train; name weights with --params{why}")
    return weights


def matching(glob: str, names: Collection[str], option: str, kind: str = "weight") -> list[str]:
    """Returns the names that match `glob`. Errors: StrategyError if none does; `option` is the
    option that has the glob, and `kind` what the names stand for."""
    matching = [n for n in names if n == glob or fnmatchcase(n, glob)]
    if not matching:
        raise StrategyError(f"{option} {glob} matches no {kind}{there_are(glob, names)}")
    return matching


def _readers(graph: gs.Graph) -> dict[str, tuple[gs.Constant, gs.Node, int]]:
    """Returns every floating-point constant, by name, with the node and the operand index of its
    first use (see `uses_of`)."""
    readers: dict[str, tuple[gs.Constant, gs.Node, int]] = {}
    for node in all_nodes(graph):
        for i, tensor in enumerate(node.inputs):
            if not isinstance(tensor, gs.Constant) or not is_trainable_type(tensor):
                continue
            if tensor.name not in readers:
                readers[tensor.name] = (tensor, *next(uses_of(tensor), (node, i)))
    return readers


def uses_of(tensor: gs.Tensor) -> Iterator[tuple[gs.Node, int]]:
    """Yields (node, index of the operand) for each use of a tensor. A node that only moves the
    tensor's elements, joins it with other constants, or scales or shifts it by a number (RMSNorm's
    1 + weight) is no use; the uses of its results count instead."""
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
    """True if a node only moves, joins, scales or shifts operand `index`, as `uses_of` says."""
    if node.op in _MOVES:
        return index == 0
    others = [t for i, t in enumerate(node.inputs) if i != index]
    if node.op == "Concat":
        return all(_is_stored(t) for t in others)
    return node.op in _SHIFTS and all(_is_number(t) for t in others)


def _is_stored(tensor: gs.Tensor) -> bool:
    """True if a tensor is a constant, or consists of constants that were only moved."""
    if isinstance(tensor, gs.Constant):
        return True
    node = _maker(tensor)
    return node is not None and node.op in (*_MOVES, "Concat") and all(map(_is_stored, node.inputs))


def _maker(tensor: gs.Tensor) -> gs.Node | None:
    return tensor.inputs[0] if tensor.inputs else None


def _is_number(tensor: gs.Tensor) -> bool:
    return isinstance(tensor, gs.Constant) and int(np.prod(tensor.shape)) == 1


class _Judge:
    """Decides which constants of a model are not trained, and why.

    leading    the names of floating-point tensors on which the loss depends
    stopped    further such names, if stops (detach) are ignored
    needed     the names of all tensors on which the loss depends
    all_named  True if the file names all parameters
    by_torch   True if PyTorch exported the file
    """

    def __init__(self, model: Model, outputs: Collection[str] | None) -> None:
        self.model = model
        self.leading = leading(model.graph, outputs)
        self.stopped = leading(model.graph, outputs, lambda node: False) - self.leading
        self.needed = leading(model.graph, outputs, lambda node: False, of_any_type=True)
        kinds = model.exported
        self.parameters = {n for n, kind in kinds.items() if kind == PARAMETER}
        self.all_named = bool(kinds) and self.parameters <= model.stored
        self.fed = {t.name for t in model.graph.inputs}
        self.by_torch = model.header.producer_name == "pytorch"

    def reason(self, tensor: gs.Constant) -> str | None:
        """Returns the reason why a constant is not trained; None if it is trained."""
        name = str(tensor.name)
        uses = list(uses_of(tensor))
        settings = [_SETTINGS.get(n.op, {}).get(i) for n, i in uses if not n.domain]
        if uses and len(settings) == len(uses) and all(settings):
            return settings[0]
        if name not in self.model.stored:
            return HELD
        if name in self.stopped:
            return STOPPED
        if name not in self.leading and name in self.needed:
            return CUT
        if name not in self.leading:
            return "the loss does not depend on it"
        kind = self.model.exported.get(name)
        if kind not in (None, PARAMETER):
            return "a buffer: torch.export does not list it as a parameter"
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
        """Returns the reason why a constant of one element, `value`, is not trained; None if it is
        trained. It is a parameter if nodes use it like one (the bias of a single class), or if
        PyTorch has named it."""
        if any(is_role(n, i) or _is_bias_of_one(n, i) for n, i in uses):
            return None
        if not self.by_torch or self.model.exported or _GENERATED.match(tensor.name):
            return "a number; --params trains it"
        if is_scale_factor(value):
            return "a scale factor: the root of a whole number"
        return None

    @staticmethod
    def _reason_of_values(values: Array, uses: Sequence[tuple[gs.Node, int]]) -> str | None:
        """Returns the reason, by its values, why a constant is not trained, such as "a mask"; None
        if there is none."""
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
        """Returns the reason, by the nodes that use it, why a constant is not trained; None if
        there is none."""
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
        """True if a node shifts or scales an input of the model by at most 4 numbers."""
        tensor: gs.Tensor = node.inputs[0]
        few = int(np.prod(node.inputs[1].shape)) <= 4
        while few and (maker := _maker(tensor)) is not None and maker.op in (*_SHIFTS, *_MOVES):
            tensor = maker.inputs[0]
        return few and tensor.name in self.fed


def leading(
    graph: gs.Graph,
    outputs: Collection[str] | None,
    ends: Callable[[gs.Node], bool] = is_stop,
    of_any_type: bool = False,
) -> set[str]:
    """Returns the names of the tensors on which outputs depend: of floating-point tensors or, with
    `of_any_type`, of all tensors.

    outputs  names of outputs; None for all
    ends     a path ends at a node for which this function is true
    """
    named = [t for t in graph.outputs if outputs is None or t.name in outputs]
    names = {str(t.name) for t in named}
    for node in reversed(graph.nodes):
        if not is_message(node) and not any(t.name in names for t in node.outputs):
            continue
        inner = [n for n in nodes_within([node]) if n is not node] if bodies(node) else []
        for reader in (node, *inner):
            if ends(reader):
                continue
            settings = _SETTINGS.get(reader.op, {}) if not reader.domain else {}
            for i, tensor in enumerate(operands_of(reader)):
                if i not in settings and (of_any_type or _may_carry(tensor)):
                    names.add(str(tensor.name))
    return names


def _may_carry(tensor: gs.Tensor) -> bool:
    """True if a tensor may have a gradient: its type allows this, or is unknown."""
    maker = _maker(tensor)
    is_unknown = bool(tensor.name) and tensor.dtype is None
    return is_unknown or is_trainable_type(tensor) or (maker is not None and carries(maker))


def is_role(node: gs.Node, index: int) -> bool:
    """True if operand number `index` of a node is usually a weight, bias, scale or table of a
    layer."""
    entry = entry_of(node)
    return entry is not None and index in entry.trained


def _is_bias_of_one(node: gs.Node, index: int) -> bool:
    """True if operand `index` of an Add is a bias with one element, for a single class."""
    shape, result = list(node.inputs[index].shape or ()), list(node.outputs[0].shape or ())
    return node.op == "Add" and shape[-1:] == [1] == result[-1:]


def _becomes_angle(node: gs.Node) -> bool:
    """True if a node's results are used only as angles of sines and cosines."""
    readers = [r for t in node.outputs for r in t.outputs]
    moves = (*_MOVES, "Concat")
    return bool(readers) and all(
        r.op in ("Sin", "Cos") or (r.op in moves and _becomes_angle(r)) for r in readers
    )


def _is_of_groups(node: gs.Node, index: int, values: Array) -> bool:
    """True if operand `index` of an InstanceNormalization is a trivial scale (1) or bias (0) that
    the exporter made for a group normalization: it is behind a Reshape, and a later node scales by
    channel."""
    maker = _maker(node.inputs[0])
    return maker is not None and maker.op == "Reshape" and bool((values == (index == 1)).all())


def _is_of_samples(node: gs.Node, tensor: gs.Constant) -> bool:
    """True if a constant operand of a Concat or Where has an element along dimension 0 for each
    sample of the batch."""
    shape, result = list(tensor.shape), list(node.outputs[0].shape or ())
    if node.op == "Concat" and node.attrs.get("axis", 0) % len(result or (1,)) == 0:
        return False
    return len(shape) == len(result) > 1 and shape[0] == result[0] != 1


def _feeds_softmax(node: gs.Node) -> bool:
    """True if a Softmax reads a node's results as scores."""
    readers = [r for t in node.outputs for r in t.outputs]
    passing = (*_MOVES, *_SHIFTS, "Where", "Max", "Clip")
    return any(r.op == "Softmax" or (r.op in passing and _feeds_softmax(r)) for r in readers)
