"""fuse-attention: turn attention in basic ops or under masks, and gradients of attention, into
single ops whose keys and values can travel in a ring of ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.compiler.pass_ import Pass, PassContext, Stage
from onnxpar.graph.subgraphs import detach, scopes
from onnxpar.graph.tensors import dtype_of, given, is_float, tensor_shape
from onnxpar.load.exported_attention import ExportedAttention, find_attention
from onnxpar.load.repeated_heads import find_unrepeated
from onnxpar.rules.attention import attention_dims
from onnxpar.rules.attention_lowering import LENGTHS, MASK
from onnxpar.rules.cached_attention import CACHED, PAST, can_split_cache
from onnxpar.rules.fused_attention import DOMAIN, GRADIENT, SCORED
from onnxpar.training.gradients.known_gradient import KnownGradient, find_gradient

_READ = (0, 1, 2, MASK, LENGTHS)
"""Indices of the operands of a fused Attention."""


@dataclass(frozen=True)
class FuseAttention(Pass):
    """Turn attention for which ranks have no ring, and the gradients of attention, into single
    nodes. In a ring, keys and values travel from rank to rank.

    Requires nothing. An Attention under a mask, or with a gradient in the graph, becomes an
    Attention of the domain onnxpar.fused, which can also return the logarithm of the sum of
    exponentials. The nodes of its gradient become one node, which reads that logarithm. A product,
    elementwise steps on scores, a softmax and a product become a ScoredAttention, which has the
    steps as text. No kernel runs these nodes: localize-ops lowers them. Runs by default for the
    preset ring-attention.

    A GroupQueryAttention over caches of fixed length becomes a CachedAttention, whose caches may
    be split along positions. With `only_caches`, nothing else changes; the preset context-parallel
    runs the pass this way.

    Example: shard(mesh="cp=2", preset="ring-attention")

        <ir_version: 10, opset_import: ["" : 23]>
        masked (float[1,4,4] x, bool[4,4] mask) => (float[1,4,4] y)
        {
            y = Attention<q_num_heads = 2, kv_num_heads = 2>(x, x, x, mask)
        }

    Before:

        mesh cp=2
        input  x: float32 1x4x4 [-, -, -]
        input  mask: bool 4x4 [-, -]
        y: float32 1x4x4 [-, -, -] = Attention(x, x, x, mask) {kv_num_heads=2, q_num_heads=2}
        output y: float32 1x4x4 [-, -, -]

    After:

        mesh cp=2
        input  x: float32 1x4x4 [-, -, -]
        input  mask: bool 4x4 [-, -]
        y: float32 1x4x4 [-, -, -] = onnxpar.fused.Attention(x, x, x, mask) {kv_num_heads=2,
                q_num_heads=2}
        output y: float32 1x4x4 [-, -, -]
    """

    name: ClassVar[str] = "fuse-attention"
    stage = Stage.REWRITE
    only_caches: bool = False

    def run(self, graph: gs.Graph, ctx: PassContext) -> bool:
        changed = [_fuse_cached(graph, ctx.model.states)]
        if not self.only_caches:
            changed += [_Fusion(scope).run() for scope in scopes(graph)]
        return any(changed)


def _fuse_cached(graph: gs.Graph, states: Iterable[tuple[str, str]]) -> bool:
    """Turns each GroupQueryAttention over caches of fixed length into a CachedAttention, whose
    caches can be split along positions. `states` are the pairs (cache before, cache after). True if
    there is one."""
    pairs = set(states)
    cached = [node for node in graph.nodes if can_split_cache(node, pairs)]
    for node in cached:
        node.op, node.domain = CACHED, DOMAIN
        for i in (0, 1):
            node.outputs[1 + i].shape = list(node.inputs[PAST + i].shape)
    return bool(cached)


class _Fusion:
    """Fuses the attention of one graph; its bodies are graphs of their own."""

    def __init__(self, graph: gs.Graph) -> None:
        self.graph = graph

    def run(self) -> bool:
        """Fuses all attention of the graph. True if anything changed."""
        changed = False
        for node in [n for n in self.graph.nodes if _can_be_fused(n)]:
            gradient = find_gradient(self.graph, node)
            if gradient is not None and self._fuse_gradient(node, gradient):
                changed = True
            elif given(node, MASK) is not None and not node.domain:
                node.domain, changed = DOMAIN, True
        for node in [n for n in self.graph.nodes if n.op == "Softmax" and not n.domain]:
            exported = find_attention(node, self.graph)
            if exported is not None:
                self._fuse_exported(node, exported)
                changed = True
        return changed

    def _fuse_exported(self, softmax: gs.Node, exported: ExportedAttention) -> None:
        """Replaces attention that an exporter wrote in basic ops, around a softmax, by one node."""
        attrs = {"steps": exported.steps, "guarded": int(exported.is_guarded)}
        at = self._index(exported.nodes[-1])
        for node in exported.nodes:
            detach(node)
            node.outputs.clear()
        gone = {id(node) for node in exported.nodes}
        fused = gs.Node(SCORED, softmax.name, attrs, exported.operands, [exported.result], DOMAIN)
        self.graph.nodes.insert(at, fused)
        self.graph.nodes = [node for node in self.graph.nodes if id(node) not in gone]
        self._share_heads(fused)

    def _index(self, node: gs.Node) -> int:
        """Returns the index of a node in the graph."""
        return next(i for i, other in enumerate(self.graph.nodes) if other is node)

    def _share_heads(self, fused: gs.Node) -> None:
        """Makes a fused node read keys and values before the nodes that repeat them for query
        heads, so that ranks send fewer bytes."""
        key, value = (find_unrepeated(fused.inputs[i], is_turned=i == 1) for i in (1, 2))
        if key is None or value is None or key.heads != value.heads:
            return
        for i, repeated in ((1, key), (2, value)):
            x = repeated.source
            if i == 1:
                x = self._before(fused, "Transpose", [x], {"perm": [0, 1, 3, 2]}, turned=True)
            for node, number in repeated.scales:
                x = self._before(fused, node.op, [x, number], {})
            fused.inputs[i] = x
            self._drop(repeated.nodes)

    def _before(
        self,
        fused: gs.Node,
        op: str,
        operands: list[gs.Tensor],
        attrs: dict[str, object],
        turned: bool = False,
    ) -> gs.Tensor:
        """Adds a node before a fused node, and returns the new node's result. With `turned`, the
        result has the last two dimensions of the first operand exchanged."""
        shape = list(operands[0].shape or ())
        if turned:
            shape[-2:] = shape[:-3:-1]
        name = f"{fused.name}::{op}{len(self.graph.nodes)}"
        result = gs.Variable(name, operands[0].dtype, shape)
        node = gs.Node(op, name, attrs, operands, [result])
        self.graph.nodes.insert(self._index(fused), node)
        return result

    def _fuse_gradient(self, node: gs.Node, gradient: KnownGradient) -> bool:
        """Replaces the nodes of an attention's gradient by one node. False if that is not
        possible."""
        if any(x is not None and self._readers(x, gradient) for x in gradient.results[MASK:]):
            return False  # the gradient of a mask is a sum over all scores
        pairs = list(zip(node.inputs, gradient.operands, strict=True))
        if any(x is None and t.name for t, x in pairs):
            return False  # the gradient of the values alone does not read all operands
        operands = [gs.Variable.empty() if x is None else x for _, x in pairs]
        forward = self._attention_of(node, operands)
        place = self._insertion_index(
            [*operands, gradient.dy, *(forward.outputs if forward else ())], gradient
        )
        if place is None:
            return False
        if forward is None:
            forward = self._add_copy(node, operands, place)
            place += 1
        forward.domain = DOMAIN
        missing = [gs.Variable.empty() for _ in range(LENGTHS + 1 - len(operands))]
        inputs = [*operands, *missing, gradient.dy, forward.outputs[0], self._summary(forward)]
        results = [
            gs.Variable(f"{x.name}::fused", dtype_of(x), x.shape) if x else gs.Variable.empty()
            for x in gradient.results[:MASK]
        ]
        name = f"{node.name}.grad/{GRADIENT}"
        fused = gs.Node(GRADIENT, name, dict(node.attrs), inputs, results, DOMAIN)
        self.graph.nodes.insert(place, fused)
        for old, new in zip(gradient.results[:MASK], results, strict=True):
            if old is not None:
                self._replace(old, new)
        self._drop(gradient.nodes)
        return True

    def _attention_of(self, node: gs.Node, operands: list[gs.Tensor]) -> gs.Node | None:
        """Returns the Attention with these operands: `node` itself, or its copy in a recomputation;
        None if there is none."""
        for other in self.graph.nodes:
            is_like = other.op == node.op and other.attrs == node.attrs and _can_be_fused(other)
            is_like = is_like and len(other.inputs) == len(operands)
            if is_like and all(map(_is, other.inputs, operands)):
                return other
        return None

    def _add_copy(self, node: gs.Node, operands: list[gs.Tensor], place: int) -> gs.Node:
        """Adds a copy of an Attention with other operands at the index `place` of the graph, and
        returns it."""
        y = node.outputs[0]
        name = f"{node.name}.grad/Attention"
        copy = gs.Node(
            node.op, name, dict(node.attrs), operands, [gs.Variable(name, y.dtype, y.shape)]
        )
        self.graph.nodes.insert(place, copy)
        return copy

    def _insertion_index(self, operands: list[gs.Tensor], gradient: KnownGradient) -> int | None:
        """Returns the index in the graph after the nodes that compute all operands, and before the
        readers of all results of a gradient; None if there is no such index."""
        at = {id(node): i for i, node in enumerate(self.graph.nodes)}
        makers = [at.get(id(node), -1) for t in operands for node in t.inputs]
        results = [t for t in gradient.results[:MASK] if t is not None]
        read = [at.get(id(n), len(at)) for t in results for n in self._readers(t, gradient)]
        first = max(makers, default=-1) + 1
        return first if first <= min(read, default=first) else None

    def _readers(self, tensor: gs.Tensor, gradient: KnownGradient) -> list[gs.Node | gs.Graph]:
        """Returns the nodes outside a gradient that read one of its tensors, and the graph if the
        tensor is an output."""
        inside = {id(node) for node in gradient.nodes}
        readers = [node for node in tensor.outputs if id(node) not in inside]
        return [*readers, *([self.graph] if any(t is tensor for t in self.graph.outputs) else [])]

    def _summary(self, forward: gs.Node) -> gs.Tensor:
        """Returns the second result of a fused Attention: for each query, the greatest score and
        the sum of exponentials, as two numbers. Adds it to the node if it is missing."""
        if len(forward.outputs) < 2:
            query, y = forward.inputs[0], forward.outputs[0]
            dims = attention_dims(forward)
            assert dims is not None
            heads = (dims.sizes["k"] or 1) * (dims.sizes["g"] or 1)
            dtype = np.dtype(np.float64 if dtype_of(query) == np.float64 else np.float32)
            shape = [dims.sizes["b"], heads, dims.sizes["s"], 2]
            forward.outputs.append(gs.Variable(f"{y.name}::summary", dtype, shape))
        return forward.outputs[1]

    def _replace(self, old: gs.Tensor, new: gs.Tensor) -> None:
        """Makes all readers of a tensor read another tensor. An output of the graph keeps its
        name."""
        for node in list(old.outputs):
            for i, operand in enumerate(node.inputs):
                if operand is old:
                    node.inputs[i] = new
        for i, tensor in enumerate(self.graph.outputs):
            if tensor is old:
                old.name, new.name = f"{old.name}::decomposed", old.name
                self.graph.outputs[i] = new

    def _drop(self, nodes: list[gs.Node]) -> None:
        """Removes those of `nodes` whose results no node reads, again and again until each
        remaining node has a reader."""
        outputs = {id(t) for t in self.graph.outputs}
        while True:
            unread = [n for n in nodes if not any(t.outputs or id(t) in outputs for t in n.outputs)]
            if not unread:
                return
            gone = {id(node) for node in unread}
            nodes = [node for node in nodes if id(node) not in gone]
            for node in unread:
                detach(node)
            self.graph.nodes = [node for node in self.graph.nodes if id(node) not in gone]


def _is(a: gs.Tensor, b: gs.Tensor) -> bool:
    """True if two tensors are the same, or both stand for a missing operand."""
    return a is b or (not a.name and not b.name)


def _can_be_fused(node: gs.Node) -> bool:
    """True for an Attention without cache and with one result, whose mask (if any) has a column for
    each key."""
    if node.op != "Attention" or node.domain not in (None, "", "ai.onnx", DOMAIN):
        return False
    extra = [i for i, t in enumerate(node.inputs) if t.name and i not in _READ]
    if extra or any(t.name for t in node.outputs[1:]) or not is_float(node.inputs[0]):
        return False
    if attention_dims(node) is None:
        return False
    mask, keys = given(node, MASK), tensor_shape(node.inputs[1]) or ()
    return mask is None or (tensor_shape(mask) or (0,))[-1] == keys[-2]
