"""Checks the order of passes, and inserts passes of plugins at their places."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import onnx
import onnx_graphsurgeon as gs

from onnxpar.base.errors import PassError, StrategyError
from onnxpar.compiler.pass_ import Pass, Stage
from onnxpar.graph.subgraphs import all_nodes


@dataclass(frozen=True)
class Placed:
    """A pass and its place: before, or after, the pass of this name."""

    step: Pass
    before: str | None = None
    after: str | None = None

    def __post_init__(self) -> None:
        """Raises StrategyError if both `before` and `after` are set."""
        if self.before is not None and self.after is not None:
            raise StrategyError(f"pass {self.step.name}: give before= or after=, not both")


def insert(passes: Sequence[Pass], added: Sequence[Pass | Placed]) -> list[Pass]:
    """Returns `passes` and `added`, each added pass at its place. A pass of the stage REWRITE needs
    no place: it runs after the other passes of its stage. Errors: StrategyError."""
    out = list(passes)
    for entry in added:
        placed = entry if isinstance(entry, Placed) else Placed(entry)
        out.insert(_position(out, placed), placed.step)
    check_order(out)
    return out


def _position(passes: Sequence[Pass], placed: Placed) -> int:
    """Returns the index in `passes` at which to insert a pass. Errors: StrategyError."""
    step, beside = placed.step, placed.before or placed.after
    if beside is None:
        if step.stage is not Stage.REWRITE:
            raise StrategyError(
                f"pass {step.name} is of the stage {step.stage.name}: give its place, before= or "
                "after= one of " + ", ".join(p.name for p in passes)
            )
        return sum(p.stage is Stage.REWRITE for p in passes)
    at = next((i for i, p in enumerate(passes) if p.name == beside), None)
    if at is None:
        names = ", ".join(p.name for p in passes)
        raise StrategyError(f"pass {step.name}: no pass {beside!r} runs here; there are {names}")
    return at + (placed.after is not None)


def check_order(
    passes: Sequence[Pass], facts: Sequence[str] = (), known: Iterable[type[Pass]] = ()
) -> None:
    """Checks that passes are in the order of their stages, and that earlier passes ensure what each
    pass requires.

    facts  what holds before the first pass
    known  further passes that the error may suggest

    Errors: StrategyError that names the pass, the missing fact, and passes that ensure it.
    """
    for first, second in pairwise(passes):
        if second.stage < first.stage:
            raise StrategyError(
                f"pass {second.name} is of the stage {second.stage.name} and cannot run after "
                f"{first.name}, which is of the stage {first.stage.name}"
            )
    hold = set(facts)
    for step in passes:
        for fact in step.requires:
            if fact not in hold:
                kinds: list[type[Pass]] = [*(type(p) for p in passes), *known]
                makers = {kind.name for kind in kinds if fact in kind.ensures}
                named = " or ".join(sorted(makers)) or "a pass that does"
                raise StrategyError(
                    f"pass {step.name} requires {fact}, which no pass before it ensures; run "
                    f"{named} before it (`opt --passes list` shows what passes do)"
                )
        for fact in step.excludes:
            if fact in hold:
                is_own = fact in step.ensures
                remedy = ": it runs only once, so leave it out" if is_own else "; place it earlier"
                raise StrategyError(f"pass {step.name} cannot run once there are {fact}{remedy}")
        hold.update(step.ensures)


def computed_names(graph: gs.Graph) -> set[str]:
    """Returns the names of all tensors that nodes of the graph compute."""
    return {t.name for node in all_nodes(graph) for t in node.outputs if t.name}


@dataclass(frozen=True)
class Known:
    """The names of computed tensors and the op types of a graph before a pass."""

    tensors: Collection[str]
    ops: Collection[str]


def names_in(graph: gs.Graph) -> Known:
    """Returns the names of all computed tensors, and the op types, of a graph."""
    return Known(computed_names(graph), {node.op for node in all_nodes(graph)})


def check_rewritten(step: Pass, graph: gs.Graph, known: Known) -> None:
    """Checks that a pass of the stage REWRITE has left a graph that the compiler can analyse: nodes
    with unique names, known ops, new tensors with dtype and shape. `known` is from before the pass.
    Errors: PassError that names the node or tensor."""
    names: set[str] = set()
    for node in all_nodes(graph):
        if not node.name or node.name in names:
            named = f"a second node {node.name!r}" if node.name else f"a {node.op} without a name"
            raise PassError(f"pass {step.name} left {named}; give each node a name of its own")
        names.add(node.name)
        _check_operands(step, node, graph.opset, known)
        for tensor in node.outputs:
            is_new = tensor.name and tensor.name not in known.tensors
            if is_new and (tensor.dtype is None or tensor.shape is None):
                raise PassError(
                    f"pass {step.name} left '{tensor.name}', which {node.op} '{node.name}' makes, "
                    "without a dtype or a shape; give its Variable both"
                )


def _check_operands(step: Pass, node: gs.Node, opset: int, known: Known) -> None:
    """Checks that the opset has the node's op, with this number of inputs. Ops of other domains
    pass, and ops that the opset lacks but that the graph had before. Errors: PassError."""
    if node.domain not in (None, "", "ai.onnx"):
        return
    subject = f"pass {step.name} left {node.op} '{node.name}'"
    try:
        schema = onnx.defs.get_schema(node.op, opset, "")
    except onnx.defs.SchemaError:
        if node.op in known.ops:
            return
        raise PassError(f"{subject}, an op that opset {opset} does not have") from None
    count = len(node.inputs)
    if not schema.min_input <= count <= schema.max_input:
        least, most = schema.min_input, schema.max_input
        takes = f"{least}" if least == most else f"{least} to {most}"
        takes = takes if most < 1 << 20 else f"{least} or more"
        raise PassError(f"{subject} with {count} input{'s' * (count != 1)}; it takes {takes}")
