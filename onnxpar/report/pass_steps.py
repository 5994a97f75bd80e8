"""Records what each pass changes: the nodes that it adds, removes and changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx
import onnx_graphsurgeon as gs

from onnxpar.compiler.graph_text import annotation_lines, attributes_text, layout_of
from onnxpar.compiler.pass_ import Pass, PassContext
from onnxpar.graph.reshards import is_reshard, operands_of
from onnxpar.graph.stored import nodes_of
from onnxpar.graph.subgraphs import nodes_within
from onnxpar.layout.layout import Layout
from onnxpar.load.load import Model
from onnxpar.planner.observer import Observer
from onnxpar.report.explain import Operand

ADDED, REMOVED, CHANGED, KEPT = "added", "removed", "changed", "unchanged"


@dataclass(frozen=True)
class NodeText:
    """A node between two passes, as text. Operands have no shapes, and only split ones have a
    layout; `attributes` are in braces."""

    name: str
    op: str
    operands: tuple[Operand, ...]
    results: tuple[Operand, ...]
    attributes: str


@dataclass(frozen=True)
class Change:
    """A node before and after a pass; None before if it was added, None after if it was removed."""

    before: NodeText | None
    after: NodeText | None

    @property
    def kind(self) -> str:
        """The effect of the pass on the node: ADDED, REMOVED, CHANGED or KEPT."""
        if self.before is None or self.after is None:
            return ADDED if self.before is None else REMOVED
        return KEPT if self.before == self.after else CHANGED


@dataclass(frozen=True)
class PassStep:
    """The changes that a pass made.

    changes    the nodes in the order of the graph, also unchanged ones
    asked      new requests of layouts (annotations), one line each
    reordered  True if older nodes are in another order
    """

    name: str
    changes: tuple[Change, ...]
    asked: tuple[str, ...] = ()
    reordered: bool = False

    def count(self, kind: str) -> int:
        """Returns the number of nodes of a kind, such as ADDED."""
        return sum(change.kind == kind for change in self.changes)

    @property
    def is_idle(self) -> bool:
        """True if the pass changed nothing."""
        return not (self.reordered or self.asked or self.count(KEPT) < len(self.changes))


class PassSteps(Observer):
    """An observer that collects what each rewrite of the loader and each pass changes. `makers`
    has, by tensor, the node that computes it in the loaded graph."""

    takes_time = True

    def __init__(self) -> None:
        self.makers: dict[str, str] = {}
        self.steps: list[PassStep] = []
        self._nodes: dict[str, NodeText] = {}
        self._asked: set[str] = set()
        self._layouts: dict[Layout, str] = {}

    def loading(self, name: str, graph: onnx.ModelProto | gs.Graph) -> None:
        if isinstance(graph, gs.Graph):
            self._add(name, _Texts(None, {}).nodes(graph))
            self.makers = {t.name: node.name for node in graph.nodes for t in node.outputs}
            return
        if name == "read":
            self.steps, self._nodes, self._asked, self._layouts = [], {}, set(), {}
        self._add(name, map(_of_proto, nodes_of(graph.graph)))

    def passed(self, step: Pass, model: Model, ctx: PassContext) -> None:
        asked = [line for line in annotation_lines(ctx) if line not in self._asked]
        self._asked = {*self._asked, *asked}
        self._add(step.name, _Texts(ctx, self._layouts).nodes(model.graph), tuple(asked))

    def _add(self, name: str, nodes: Iterable[NodeText], asked: tuple[str, ...] = ()) -> None:
        before, self._nodes = self._nodes, {node.name: node for node in nodes}
        if name != "read":
            changes = list(_changes(before, self._nodes))
            step = PassStep(name, tuple(changes), asked, _moved(before, changes))
            self.steps = [*self.steps, step]


def _changes(before: Mapping[str, NodeText], after: Mapping[str, NodeText]) -> Iterator[Change]:
    """Yields a change for each node, in the order of the graph after a pass; removed nodes come
    behind the node that they followed."""
    was = _same(before, after)
    stay = {old.name for old in was.values()}
    behind: dict[str, list[NodeText]] = {"": []}
    last = ""
    for node in before.values():
        if node.name in stay:
            behind[last := node.name] = []
        else:
            behind[last].append(node)
    yield from (Change(node, None) for node in behind[""])
    for node in after.values():
        old = was.get(node.name)
        yield Change(old, node)
        if old is not None:
            yield from (Change(follower, None) for follower in behind[old.name])


def _same(before: Mapping[str, NodeText], after: Mapping[str, NodeText]) -> dict[str, NodeText]:
    """Returns, by the name of each node after a pass, the same node before: the one of that name,
    else with the same first result, else, if the pass renamed both, in the same place."""
    was = {name: before[name] for name in after if name in before}
    gone = {n.results[0].name: n for n in before.values() if n.name not in was and n.results}
    new = [n for n in after.values() if n.name not in was and n.results]
    renamed = {n.name: gone.pop(n.results[0].name) for n in new if n.results[0].name in gone}
    rest = [n for n in new if n.name not in renamed]
    if [n.op for n in rest] == [n.op for n in gone.values()]:
        renamed |= {n.name: old for n, old in zip(rest, gone.values(), strict=True)}
    return was | renamed


def _moved(before: Mapping[str, NodeText], changes: Iterable[Change]) -> bool:
    """True if the pass changed the order of the nodes that it kept."""
    places = {name: place for place, name in enumerate(before)}
    kept = [places[c.before.name] for c in changes if c.before is not None and c.after is not None]
    return kept != sorted(kept)


class _Texts:
    """Makes the texts of a graph's nodes after a pass; without a context, all tensors count as
    whole. The text of each tensor, and of each layout (in `layouts`), is computed only once."""

    def __init__(self, ctx: PassContext | None, layouts: dict[Layout, str]) -> None:
        self._ctx, self._layouts = ctx, layouts
        self._tensors: dict[str, Operand] = {}

    def nodes(self, graph: gs.Graph) -> Iterator[NodeText]:
        """Yields the texts of the nodes of the graph and its subgraphs."""
        return map(self._node, nodes_within(graph.nodes))

    def _node(self, node: gs.Node) -> NodeText:
        if is_reshard(node):
            operands = [Operand(t.name, "", self._text(a)) for t, a, _ in operands_of(node)]
        else:
            operands = self._named(node.inputs)
        attributes, results = attributes_text(node, self._ctx), tuple(self._named(node.outputs))
        return NodeText(node.name, node.op, tuple(operands), results, attributes)

    def _named(self, tensors: Iterable[gs.Tensor]) -> list[Operand]:
        names = [tensor.name for tensor in tensors if tensor.name]
        for name in names:
            if name not in self._tensors:
                layout = None if self._ctx is None else layout_of(name, self._ctx)
                self._tensors[name] = Operand(name, "", self._text(layout))
        return [self._tensors[name] for name in names]

    def _text(self, layout: Layout | None) -> str:
        if layout is None or self._ctx is None or layout.is_whole:
            return ""
        if layout not in self._layouts:
            self._layouts[layout] = layout.text(self._ctx.sharding.mesh)
        return self._layouts[layout]


def _of_proto(node: onnx.NodeProto) -> NodeText:
    """Returns the text of a node of a model; a node without a name is called by its first
    result."""
    operands, results = (
        tuple(Operand(n, "", "") for n in p if n) for p in (node.input, node.output)
    )
    listed = sorted(node.attribute, key=lambda a: a.name)
    attributes = ", ".join(f"{a.name}={_value(a)}" for a in listed)
    name = node.name or next((n for n in node.output if n), "")
    return NodeText(name, node.op_type, operands, results, f" {{{attributes}}}" if listed else "")


def _value(attribute: onnx.AttributeProto) -> str:
    if attribute.ref_attr_name:
        return f"@{attribute.ref_attr_name}"
    value = onnx.helper.get_attribute_value(attribute)
    if isinstance(value, (onnx.TensorProto, onnx.GraphProto)):
        return f"<{value.name}>"
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return str(list(value) if isinstance(value, Sequence) else value)
