"""Stops gradients where a file says that torch does, and where users ask for it.

torch's dynamo exporter writes `detach()` as an Identity, and `padding_idx` as the argument of a
lookup, into the metadata of nodes. With `optimize=True`, it removes that Identity, but the metadata
of the node that reads the result still have the `detach()`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import onnx_graphsurgeon as gs

from onnxpar.base.errors import StrategyError
from onnxpar.graph.exported import Call, call_of
from onnxpar.graph.metadata import node_names
from onnxpar.graph.stop_gradient import is_stop, mark_padding, mark_stop
from onnxpar.graph.subgraphs import constants, replace_reads, scopes
from onnxpar.training.gradients.trained import matching


def stop_gradients(graph: gs.Graph, globs: Sequence[str], padding: Mapping[str, int]) -> list[str]:
    """Marks the nodes through which no gradient flows back, in place. Returns sentences about
    gradients that torch stops and the graph does not.

    globs    names of tensors or nodes; no gradient flows back through these tensors or the nodes'
             results
    padding  by glob of tables, the row that lookups do not train; -1 is the last

    Errors: StrategyError for a glob that matches nothing, or a row that a table does not have.
    """
    stops = _Stops(graph)
    cautions = [text for call, nodes in stops.calls() for text in stops.follow(call, nodes)]
    named, tables = stops.named(), _tables(graph)
    for glob in globs:
        for name in matching(glob, named, "--stop-gradient", "tensor or node"):
            for tensor in named[name]:
                stops.behind(tensor)
    for glob, row in padding.items():
        for name in matching(glob, tables, "--padding-idx", "table that a Gather looks up"):
            for gather in tables[name]:
                mark_padding(gather, _row(name, row, int(gather.inputs[0].shape[0])))
    return cautions


def _tables(graph: gs.Graph) -> dict[str, list[gs.Node]]:
    """Returns the Gathers that look up rows of a table, by the name of the table."""
    tables: dict[str, list[gs.Node]] = defaultdict(list)
    for node in (n for scope in scopes(graph) for n in scope.nodes):
        looks_up = node.op == "Gather" and node.attrs.get("axis", 0) == 0
        if looks_up and isinstance(node.inputs[0], gs.Constant):
            tables[node.inputs[0].name].append(node)
    return tables


def _row(table: str, row: int, height: int) -> int:
    """Returns the index of a table's row, from 0; -1 is the last row. Errors: StrategyError."""
    if not -height <= row < height:
        raise StrategyError(
            f"--padding-idx {table}={row}: the table has {height} rows; give a number from "
            f"{-height} to {height - 1}"
        )
    return row % height


class _Stops:
    """Inserts stops (marked Identities, through which no gradient flows back) into a graph, at most
    one for each tensor."""

    def __init__(self, graph: gs.Graph) -> None:
        self.graph = graph
        self.scope_of = {id(n): scope for scope in scopes(graph) for n in scope.nodes}
        self.nodes = [n for scope in scopes(graph) for n in scope.nodes]
        self.stopped: dict[int, gs.Variable] = {}

    def calls(self) -> list[tuple[Call, list[gs.Node]]]:
        """Returns the calls of torch functions that the file's metadata name, each with its
        nodes."""
        by_call: dict[tuple[int, Call], list[gs.Node]] = defaultdict(list)
        for node in self.nodes:
            if (call := call_of(node)) is not None:
                by_call[id(self.scope_of[id(node)]), call].append(node)
        return [(call, nodes) for (_, call), nodes in by_call.items()]

    def named(self) -> dict[str, list[gs.Tensor]]:
        """Returns the tensors behind which a gradient may be stopped, by their own names and by the
        names of the nodes that compute them."""
        named: dict[str, list[gs.Tensor]] = {t.name: [t] for t in constants(self.graph)}
        for node in self.nodes:
            results = [t for t in node.outputs if t.name]
            named |= {t.name: [t] for t in results}
            for name in node_names(node):
                named.setdefault(name, results)
        return named

    def follow(self, call: Call, nodes: Sequence[gs.Node]) -> Iterator[str]:
        """Stops gradients at the nodes of a call of torch, where torch does. Yields sentences about
        stops that cannot be reproduced."""
        for node in nodes:
            if node.op == "Identity" and call.is_detach:
                mark_stop(node)
            if node.op == "Gather" and call.padding_row is not None:
                mark_padding(node, call.padding_row)
        if call.scales_by_frequency:
            yield (
                f"{nodes[0].name}: torch divides the gradient of each row by how often a batch "
                "looks it up (scale_grad_by_freq), and this step does not"
            )
        if not call.detached:
            return
        reads = self._detached(call, nodes)
        if reads is None:
            yield (
                f"{nodes[-1].name}: torch stops the gradient of an operand of this node (detach), "
                "but the exporter has removed the place; export with torch.onnx.export(..., "
                "dynamo=True, optimize=False), or name the operand with --stop-gradient"
            )
        for node, index in reads or ():
            node.inputs[index] = self._copy(node.inputs[index])

    def _detached(self, call: Call, nodes: Sequence[gs.Node]) -> list[tuple[gs.Node, int]] | None:
        """Returns (node, index of the operand) where the nodes of a call read a tensor whose
        detach() is not in the file; None if the file does not tell where."""
        inner = {id(t) for node in nodes for t in node.outputs}
        reads = [
            (node, i)
            for node in nodes
            for i, t in enumerate(node.inputs)
            if t.name and id(t) not in inner and not isinstance(t, gs.Constant)
        ]
        if any(_is_detached(node.inputs[i]) for node, i in reads):
            return []
        if len(call.detached) == len(call.tensors):
            return reads
        (node, *others), names = nodes, call.tensors
        known = {t.name for n in self.nodes for t in n.outputs}
        operands = [t.name for t in node.inputs][: len(names)]
        is_clear = len(operands) == len(names) and not others
        if is_clear and all(a == b for a, b in zip(operands, names, strict=True) if b in known):
            return [(node, i) for i in call.detached]
        return None

    def behind(self, tensor: gs.Tensor) -> None:
        """Inserts a stop between a tensor and all its readers, including the graph's outputs."""
        if isinstance(tensor, gs.Constant):
            copy = gs.Variable(f"{tensor.name}/stopped", tensor.dtype, tensor.shape)
            replace_reads(tensor, copy)
            self._insert(None, tensor, copy)
            return
        (maker,) = tensor.inputs
        if is_stop(maker):
            return
        before = gs.Variable(f"{tensor.name}/before_stop", tensor.dtype, tensor.shape)
        maker.outputs[next(i for i, t in enumerate(maker.outputs) if t is tensor)] = before
        self._insert(maker, before, tensor)

    def _copy(self, tensor: gs.Tensor) -> gs.Variable:
        """Returns the result of the stop (a node that passes no gradient) after `tensor`; inserts
        the stop if there is none yet."""
        if id(tensor) not in self.stopped:
            copy = gs.Variable(f"{tensor.name}/stopped", tensor.dtype, tensor.shape)
            self._insert(tensor.inputs[0] if tensor.inputs else None, tensor, copy)
            self.stopped[id(tensor)] = copy
        return self.stopped[id(tensor)]

    def _insert(self, maker: gs.Node | None, before: gs.Tensor, after: gs.Tensor) -> None:
        """Inserts a stop from `before` to `after` behind the node `maker`; None: at the start of
        the graph."""
        scope = self.scope_of[id(maker)] if maker else self.graph
        at = next((i + 1 for i, n in enumerate(scope.nodes) if n is maker), 0)
        node = gs.Node("Identity", f"{before.name}/stop", {}, [before], [after])
        mark_stop(node)
        scope.nodes.insert(at, node)


def _is_detached(tensor: gs.Tensor) -> bool:
    """True if a tensor is the result of a detach()."""
    calls = [call_of(node) for node in tensor.inputs]
    return any(call is not None and call.is_detach for call in calls)
