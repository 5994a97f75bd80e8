"""Opens the bodies of If, Loop and Scan, so that passes can treat them as parts of the main graph.

Afterwards no two tensors of the model share a name, all weights and declared types are in the main
graph, and each result of a body is computed by a node of that body.
"""

from __future__ import annotations

from collections.abc import Mapping

from onnx import GraphProto, NodeProto, helper

from onnxpar.graph.stored import lift_constants, subgraphs_of

CONTROL = ("If", "Loop", "Scan")
"""Ops whose bodies are inferred and may be split, like the graph around them."""


def is_control(node: NodeProto) -> bool:
    """True for If, Loop and Scan, whose bodies are parts of the program."""
    return node.op_type in CONTROL and node.domain in ("", "ai.onnx")


def open_scopes(graph: GraphProto) -> None:
    """Renames tensors in bodies, at any depth, so that names are unique, and moves their weights
    and types to the main graph, in place."""
    taken = {t.name for t in (*graph.input, *graph.initializer)}
    taken |= {output for node in graph.node for output in node.output}
    _Opening(graph, taken).enter(graph, {})


class _Opening:
    """Opens the bodies of one model; `taken` are all names in use so far."""

    def __init__(self, main: GraphProto, taken: set[str]) -> None:
        self.main = main
        self.taken = taken

    def enter(self, graph: GraphProto, names: Mapping[str, str]) -> None:
        """Opens the bodies in a graph whose own tensors are renamed already; `names` has new names
        by old ones of tensors that the bodies can see."""
        for node in graph.node:
            for body in subgraphs_of(node):
                if is_control(node):
                    self._open(body, dict(names))
                else:
                    _rename_captured(body, names)

    def _open(self, body: GraphProto, names: dict[str, str]) -> None:
        """Renames the tensors of one body, moves its weights and types to the main graph, and opens
        the bodies inside."""
        lift_constants(body)
        inputs = {port.name for port in body.input}
        for port in body.input:
            port.name = self._declare(port.name, names)
        for weight in body.initializer:
            if weight.name not in inputs:
                weight.name = self._declare(weight.name, names)
                self.main.initializer.add().CopyFrom(weight)
        del body.initializer[:]
        for node in body.node:
            node.output[:] = [self._declare(o, names) if o else "" for o in node.output]
        for node in body.node:
            node.input[:] = [names.get(i, i) for i in node.input]
        for info in body.value_info:
            info.name = names.get(info.name, info.name)
        self.main.value_info.extend(body.value_info)
        del body.value_info[:]
        self._own_results(body, names)
        self.enter(body, names)

    def _own_results(self, body: GraphProto, names: Mapping[str, str]) -> None:
        """Adds an Identity for each result of the body that no node of the body computes, or that
        it returns twice."""
        computed = {o for node in body.node for o in node.output}
        for port in body.output:
            port.name = names.get(port.name, port.name)
            if port.name in computed:
                computed.discard(port.name)
                continue
            result = self._fresh(port.name)
            body.node.append(helper.make_node("Identity", [port.name], [result]))
            port.name = result

    def _declare(self, name: str, names: dict[str, str]) -> str:
        """Returns a unique name for a tensor of a body (its own, if that is free), and records it
        in `names`."""
        names[name] = own = self._fresh(name)
        return own

    def _fresh(self, name: str) -> str:
        unique, i = name, 1
        while unique in self.taken:
            unique, i = f"{name}::{i}", i + 1
        self.taken.add(unique)
        return unique


def _rename_captured(graph: GraphProto, names: Mapping[str, str]) -> None:
    """Renames tensors of outer graphs where a graph reads them; its own tensors stay."""
    own = {t.name for t in (*graph.input, *graph.initializer)}
    own |= {o for node in graph.node for o in node.output}
    seen = {old: new for old, new in names.items() if old not in own}
    for node in graph.node:
        node.input[:] = [seen.get(i, i) for i in node.input]
        for inner in subgraphs_of(node):
            _rename_captured(inner, seen)
