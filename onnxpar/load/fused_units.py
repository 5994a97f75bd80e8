"""Finds the tensors between nodes that onnxruntime fuses; they must not be resharded.

A quantized model reads stored integers through DequantizeLinear, and rounds results with
QuantizeLinear. onnxruntime fuses these two with the node between them (to MatMulNBits, QLinearConv
and others). With a collective or a slice in between, onnxruntime would not fuse the nodes but
compute in floats: rounding would differ from the unsplit model, and the floats would take memory.
So the nodes on both sides of such a tensor must split it in the same way.
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from onnxpar.base.names import Names
from onnxpar.graph.subgraphs import replace_reads, scopes
from onnxpar.graph.used_names import names_of

_DEQUANTIZE, _QUANTIZE = "DequantizeLinear", "QuantizeLinear"
_MOVES = {"Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Cast", "Identity"}
"""Ops that onnxruntime swaps with the DequantizeLinear before them, or fuses with it."""
_ABSORBED = {"Relu", "Clip"}
"""Ops that onnxruntime may drop before a QuantizeLinear, because its integers have bounds."""


def fused_tensors(graph: gs.Graph) -> frozenset[str]:
    """Returns the names of the tensors in the graph and its bodies that must not be resharded."""
    return frozenset(name for scope in scopes(graph) for name in _Scope(scope).fused())


class _Scope:
    """The fused tensors of one graph or body."""

    def __init__(self, graph: gs.Graph) -> None:
        self.nodes = graph.nodes
        self.own = {id(node) for node in graph.nodes}
        self.results = {id(tensor) for tensor in graph.outputs}
        self.floats: set[str] = set()

    def fused(self) -> set[str]:
        """Returns the names of the tensors between a DequantizeLinear and its reader, and between
        that reader and a QuantizeLinear."""
        for node in self.nodes:
            source = node.inputs[0] if node.inputs else None
            is_float = source is not None and source.name in self.floats
            is_stored = node.op == _QUANTIZE and isinstance(source, gs.Constant)
            if node.op == _DEQUANTIZE or is_stored or (node.op in _MOVES and is_float):
                self.floats |= {t.name for t in node.outputs[:1] if self._reader(t)}
        ends = [node for node in self.nodes if node.op == _QUANTIZE]
        return self.floats.union(*map(self._before, ends))

    def _before(self, node: gs.Node) -> set[str]:
        """Returns the names of the tensors from the node that onnxruntime fuses with the
        QuantizeLinear `node` to the latter. Empty if it fuses no node; it fuses a node whose
        operands are all dequantized or stored."""
        names: set[str] = set()
        while node.inputs[0].inputs and self._reader(node.inputs[0]):
            names.add(node.inputs[0].name)
            node = node.inputs[0].inputs[0]
            read = [t for t in node.inputs if t.name and not isinstance(t, gs.Constant)]
            if read and all(t.name in self.floats for t in read):
                return names if len(node.outputs) == 1 else set()
            if node.op not in _ABSORBED:
                break
        return set()

    def _reader(self, tensor: gs.Tensor) -> gs.Node | None:
        """Returns the only node that reads a tensor, if it is in this graph and reads it once; else
        None."""
        readers = tensor.outputs
        is_one = len(readers) == 1 and id(tensor) not in self.results
        return readers[0] if is_one and id(readers[0]) in self.own else None


def separate_dequantized(graph: gs.Graph) -> None:
    """Gives each reader of a DequantizeLinear its own copy of that node, in place, as onnxruntime
    does, so that the readers can be split differently. Exception: a weight quantized in blocks that
    a MatMul or Gemm reads keeps one DequantizeLinear, which onnxruntime fuses only if a single node
    reads it."""
    names = names_of(graph)
    for scope in scopes(graph):
        results = {id(tensor) for tensor in scope.outputs}
        _join_blocks(scope, results)
        nodes: list[gs.Node] = []
        for node in scope.nodes:
            nodes.append(node)
            if node.op == _DEQUANTIZE and not _multiplies_blocks(node):
                readers = _readers(node)
                others = readers if id(node.outputs[0]) in results else readers[1:]
                nodes += [_copy_for(r, node, i, names) for i, r in enumerate(others, 1)]
        scope.nodes[:] = nodes


def _join_blocks(graph: gs.Graph, results: set[int]) -> None:
    """Lets all MatMuls and Gemms that read the same weight in blocks read one DequantizeLinear.
    `results` are the ids of the graph's outputs."""
    first: dict[tuple[int, ...], gs.Node] = {}
    for node in graph.nodes:
        if node.op != _DEQUANTIZE or not _multiplies_blocks(node):
            continue
        kept = first.setdefault(tuple(map(id, node.inputs)), node)
        if kept is not node and kept.attrs == node.attrs and id(node.outputs[0]) not in results:
            replace_reads(node.outputs[0], kept.outputs[0])


def _multiplies_blocks(node: gs.Node) -> bool:
    """True for a DequantizeLinear of blocks whose result a MatMul or Gemm reads."""
    is_block = bool(node.attrs.get("block_size"))
    return is_block and any(reader.op in ("MatMul", "Gemm") for reader in _readers(node))


def _readers(node: gs.Node) -> list[gs.Node]:
    """Returns the nodes that read a node's first result, each once."""
    return list({id(r): r for r in node.outputs[0].outputs}.values())


def _copy_for(reader: gs.Node, node: gs.Node, number: int, names: Names) -> gs.Node:
    """Returns a copy, number `number`, of a DequantizeLinear, which `reader` reads from now on."""
    result = node.outputs[0]
    own = gs.Variable(names.free(f"{result.name}@{number}"), result.dtype, result.shape)
    for i, operand in enumerate(reader.inputs):
        if operand is result:
            reader.inputs[i] = own
    name = names.free(f"{node.name}@{number}")
    copy = gs.Node(node.op, name, dict(node.attrs), list(node.inputs), [own], node.domain)
    copy.onnx_source = vars(node).get("onnx_source")
    return copy
