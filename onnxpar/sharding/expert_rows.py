"""The nodes of a mixture of experts that compute rows [expert, row, column], and the role of each
node. A router chooses rows for each expert; all other rows are zeros."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

import onnx_graphsurgeon as gs

from onnxpar.graph.subgraphs import all_nodes
from onnxpar.graph.tensors import tensor_shape
from onnxpar.load.row_program import BINARY, UNARY

Shapes = Mapping[str, tuple[int, ...]]
"""The global shapes of tensors, by name."""
RANK = 3
"""The number of dimensions of a tensor of rows: expert, row, column."""
_LOGIC = frozenset(
    ["And", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Not", "Or", "Xor"]
)
ELEMENTWISE = UNARY | BINARY | _LOGIC | frozenset(["IsInf", "IsNaN", "Sign", "Sum", "Where"])


class Role(Enum):
    """What a node does with the rows [expert, row, column] of a mixture of experts.

    MASK      chooses rows: Where(chosen, x, 0)
    FLIP      transposes each expert's rows, for products that sum over rows
    ROWS      computes each row from the same row
    REDUCED   adds up rows over ranks that choose the same rows (all-reduce)
    CROSSING  takes rows to the ranks of their experts, or back (all-to-all)
    PRODUCT   multiplies each expert's rows by the expert's own matrix
    MATRICES  sums products of rows, to a matrix for each expert (gradients of weights)
    VECTORS   sums rows, to a vector for each expert (gradients of biases)
    TOTAL     sums over experts
    """

    MASK = auto()
    FLIP = auto()
    ROWS = auto()
    REDUCED = auto()
    CROSSING = auto()
    PRODUCT = auto()
    MATRICES = auto()
    VECTORS = auto()
    TOTAL = auto()


MEETINGS = {"AllReduce": Role.REDUCED, "AllToAll": Role.CROSSING}
"""The roles of collectives between nodes of a mixture. Such a collective may send the chosen rows
alone."""
INSIDE = (Role.ROWS, Role.PRODUCT, Role.REDUCED, Role.CROSSING)
"""The roles of nodes whose results are rows behind a mask: they compute or exchange rows."""


@dataclass
class ExpertRows:
    """The nodes of one mixture of experts; in a training step, with the nodes of its backward pass.

    chosen   [expert, row, 1], bool: the rows that the router chooses for each expert
    nodes    the nodes, in graph order
    roles    the role of each node, by id
    zeros    for each tensor [expert, row, ...], by id: True if rows that are not chosen are zeros
    flipped  the tensor that a FLIP transposes, by id of the FLIP's result
    leaving  tensors that nodes outside the mixture read; rows that are not chosen are zeros
    """

    chosen: gs.Tensor
    nodes: list[gs.Node] = field(default_factory=list)
    roles: dict[int, Role] = field(default_factory=dict)
    zeros: dict[int, bool] = field(default_factory=dict)
    flipped: dict[int, gs.Tensor] = field(default_factory=dict)
    leaving: list[gs.Tensor] = field(default_factory=list)

    def of(self, *roles: Role) -> list[gs.Node]:
        """Returns the nodes with these roles, in graph order."""
        return [node for node in self.nodes if self.roles[id(node)] in roles]

    @property
    def enter(self) -> list[gs.Node]:
        """The masks through which rows of tokens come to the experts."""
        return [node for node in self.of(Role.MASK) if id(node.inputs[1]) not in self.zeros]

    @property
    def inside(self) -> list[gs.Node]:
        """The nodes that compute or exchange rows."""
        return self.of(*INSIDE)

    @property
    def computing(self) -> list[gs.Node]:
        """All nodes of the mixture, and the nodes that transpose experts' matrices for them: an
        expert without chosen rows needs neither."""
        matrices = [node.inputs[1] for node in self.of(Role.PRODUCT)]
        makers = {id(maker): maker for tensor in matrices for maker in tensor.inputs}
        return [*self.nodes, *(maker for maker in makers.values() if flips(maker))]

    @property
    def total(self) -> gs.Node:
        """The first sum over experts."""
        return self.of(Role.TOTAL)[0]

    @property
    def leave(self) -> gs.Node | None:
        """The mask before the sum over experts, if all results of experts leave the mixture through
        it; else None. A mixture with a backward pass has none."""
        masks = [node for node in self.of(Role.MASK) if id(node.inputs[1]) in self.zeros]
        if len(masks) != 1 or self.leaving or len(self.of(Role.TOTAL)) != 1:
            return None
        is_last = self.total.inputs[0] is masks[0].outputs[0]
        return masks[0] if is_last and not self.of(Role.MATRICES, Role.VECTORS) else None


def known_shapes(graph: gs.Graph) -> Shapes:
    """Returns the shapes of all tensors of a graph and its bodies, by name; a tensor with an
    unknown or open size (known only at run time) is left out."""
    shapes = {}
    for node in all_nodes(graph):
        for tensor in (*node.inputs, *node.outputs):
            shape = tensor_shape(tensor) if tensor.name else None
            sizes = tuple(size for size in shape or () if isinstance(size, int))
            if shape is not None and len(sizes) == len(shape):
                shapes[tensor.name] = sizes
    return shapes


def flips(node: gs.Node) -> bool:
    """True if a node transposes the matrix of each expert: [expert, m, n] to [expert, n, m]."""
    return node.op == "Transpose" and list(node.attrs.get("perm") or ()) == [0, 2, 1]


def expert_matrix(tensor: gs.Tensor) -> tuple[gs.Tensor, bool]:
    """Returns (the experts' matrices before all transpositions, True if `tensor` is their
    transpose)."""
    is_flipped = False
    while tensor.inputs and flips(tensor.inputs[0]):
        tensor, is_flipped = tensor.inputs[0].inputs[0], not is_flipped
    return tensor, is_flipped


def before_experts(tensor: gs.Tensor, shapes: Shapes) -> gs.Tensor:
    """Returns the tensor of rows that an Expand repeats for each expert: [row, column] or [1,
    row, column], if `tensor` is the Expand's result [expert, row, column]. Else returns `tensor`
    itself."""
    if not tensor.inputs or tensor.inputs[0].op != "Expand":
        return tensor
    source = tensor.inputs[0].inputs[0]
    shape, wide = shapes.get(source.name, ()), shapes.get(tensor.name, ())
    repeats = shape[-2:] == wide[-2:] and len(wide) == RANK and shape[:-2] in ((), (1,))
    return source if repeats and len(shape) >= RANK - 1 else tensor
