"""fuse-attention: attention in basic ops or under masks, and gradients, become ops with rings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.compiler.pass_ import Pass, PassContext, Stage
from onnxpar.grad.known_gradient import KnownGradient, find_gradient
from onnxpar.graph.subgraphs import detach, scopes
from onnxpar.graph.tensors import dtype_of, given, is_float, tensor_shape
from onnxpar.load.exported_attention import ExportedAttention, find_attention
from onnxpar.load.repeated_heads import find_unrepeated
from onnxpar.rules.attention import attention_dims
from onnxpar.rules.attention_lowering import LENGTHS, MASK
from onnxpar.rules.cached_attention import CACHED, PAST, can_split_cache
from onnxpar.rules.fused_attention import DOMAIN, GRADIENT, SCORED

_READ = (0, 1, 2, MASK, LENGTHS)
"""Indices of the operands that a fused Attention may have."""


@dataclass(frozen=True)
class FuseAttention(Pass):
    """Make attention that an op has no ring for, and gradients of attention, single nodes.

    Requires nothing. An Attention under a mask, or with a gradient in the graph, becomes an
    Attention of the domain onnxpar.fused, which can also return the logarithm of the sum of
    exponentials. The nodes of its gradient become one node, which reads that. A product, steps for
    each score, a softmax and a product become a ScoredAttention, which has the steps as text. No
    kernel runs these nodes: localize-ops lowers them. Runs by default for the preset
    ring-attention.

    A GroupQueryAttention over caches of fixed length becomes a CachedAttention, whose caches may
    be split along positions. With `only_caches`, nothing else changes; so the pass runs for the
    preset context-parallel.

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
    """Turns GroupQueryAttention over states of fixed length into an op that can split them along
    positions."""
    pairs = set(states)
    found = [node for node in graph.nodes if can_split_cache(node, pairs)]
    for node in found:
        node.op, node.domain = CACHED, DOMAIN
        for i in (0, 1):
            node.outputs[1 + i].shape = list(node.inputs[PAST + i].shape)
    return bool(found)


class _Fusion:
    """Fuses the attention of one graph, without those of its subgraphs."""

    def __init__(self, graph: gs.Graph) -> None:
        self.graph = graph

    def run(self) -> bool:
        """Fuses all that can be fused; returns whether anything changed."""
        changed = False
        for node in [n for n in self.graph.nodes if _can_be_fused(n)]:
            found = find_gradient(self.graph, node)
            if found is not None and self._fuse_gradient(node, found):
                changed = True
            elif given(node, MASK) is not None and not node.domain:
                node.domain, changed = DOMAIN, True
        for node in [n for n in self.graph.nodes if n.op == "Softmax" and not n.domain]:
            exported = find_attention(node, self.graph)
            if exported is not None:
                self._fuse_exported(node, exported)
                changed = True
        return changed

    def _fuse_exported(self, softmax: gs.Node, found: ExportedAttention) -> None:
        """Puts one node in the place of attention in basic ops."""
        attrs = {"steps": found.steps, "guarded": int(found.is_guarded)}
        at = self._index(found.nodes[-1])
        for node in found.nodes:
            detach(node)
            node.outputs.clear()
        gone = {id(node) for node in found.nodes}
        fused = gs.Node(SCORED, softmax.name, attrs, found.operands, [found.result], DOMAIN)
        self.graph.nodes.insert(at, fused)
        self.graph.nodes = [node for node in self.graph.nodes if id(node) not in gone]
        self._share_heads(fused)

    def _index(self, node: gs.Node) -> int:
        return next(i for i, other in enumerate(self.graph.nodes) if other is node)

    def _share_heads(self, fused: gs.Node) -> None:
        """Makes attention read keys and values before they are repeated for query heads, so that
        fewer bytes travel."""
        key, value = (find_unrepeated(fused.inputs[i], is_turned=i == 1) for i in (1, 2))
        if key is None or value is None or key.heads != value.heads:
            return
        for i, each in ((1, key), (2, value)):
            x = each.source
            if i == 1:
                x = self._before(fused, "Transpose", [x], {"perm": [0, 1, 3, 2]}, turned=True)
            for node, number in each.scales:
                x = self._before(fused, node.op, [x, number], {})
            fused.inputs[i] = x
            self._drop(each.nodes)

    def _before(
        self,
        fused: gs.Node,
        op: str,
        operands: list[gs.Tensor],
        attrs: dict[str, object],
        turned: bool = False,
    ) -> gs.Tensor:
        """Adds a node before a fused one; returns its result."""
        shape = list(operands[0].shape or ())
        if turned:
            shape[-2:] = shape[:-3:-1]
        name = f"{fused.name}::{op}{len(self.graph.nodes)}"
        result = gs.Variable(name, operands[0].dtype, shape)
        node = gs.Node(op, name, attrs, operands, [result])
        self.graph.nodes.insert(self._index(fused), node)
        return result

    def _fuse_gradient(self, node: gs.Node, found: KnownGradient) -> bool:
        """Puts one node in the place of those of a gradient; False if that is not possible."""
        if any(x is not None and self._readers(x, found) for x in found.results[MASK:]):
            return False  # the gradient of a mask is a sum over all scores
        pairs = list(zip(node.inputs, found.operands, strict=True))
        if any(x is None and t.name for t, x in pairs):
            return False  # the gradient of values alone does not read them
        operands = [gs.Variable.empty() if x is None else x for _, x in pairs]
        forward = self._same_as(node, operands)
        place = self._place([*operands, found.dy, *(forward.outputs if forward else ())], found)
        if place is None:
            return False
        if forward is None:
            forward = self._again(node, operands, place)
            place += 1
        forward.domain = DOMAIN
        missing = [gs.Variable.empty() for _ in range(LENGTHS + 1 - len(operands))]
        inputs = [*operands, *missing, found.dy, forward.outputs[0], self._summary(forward)]
        results = [
            gs.Variable(f"{x.name}::fused", dtype_of(x), x.shape) if x else gs.Variable.empty()
            for x in found.results[:MASK]
        ]
        name = f"{node.name}.grad/{GRADIENT}"
        fused = gs.Node(GRADIENT, name, dict(node.attrs), inputs, results, DOMAIN)
        self.graph.nodes.insert(place, fused)
        for old, new in zip(found.results[:MASK], results, strict=True):
            if old is not None:
                self._replace(old, new)
        self._drop(found.nodes)
        return True

    def _same_as(self, node: gs.Node, operands: list[gs.Tensor]) -> gs.Node | None:
        """The Attention of these operands: the node itself, or a copy that a step computes again;
        None if there is none."""
        for other in self.graph.nodes:
            is_like = other.op == node.op and other.attrs == node.attrs and _can_be_fused(other)
            is_like = is_like and len(other.inputs) == len(operands)
            if is_like and all(map(_is, other.inputs, operands)):
                return other
        return None

    def _again(self, node: gs.Node, operands: list[gs.Tensor], place: int) -> gs.Node:
        """Adds a copy of an Attention with other operands."""
        y = node.outputs[0]
        name = f"{node.name}.grad/Attention"
        copy = gs.Node(
            node.op, name, dict(node.attrs), operands, [gs.Variable(name, y.dtype, y.shape)]
        )
        self.graph.nodes.insert(place, copy)
        return copy

    def _place(self, operands: list[gs.Tensor], found: KnownGradient) -> int | None:
        """The index in the graph at which all operands are known and no result is read yet; None if
        there is none."""
        at = {id(node): i for i, node in enumerate(self.graph.nodes)}
        made = [at.get(id(node), -1) for t in operands for node in t.inputs]
        results = [t for t in found.results[:MASK] if t is not None]
        read = [at.get(id(n), len(at)) for t in results for n in self._readers(t, found)]
        first = max(made, default=-1) + 1
        return first if first <= min(read, default=first) else None

    def _readers(self, tensor: gs.Tensor, found: KnownGradient) -> list[gs.Node | gs.Graph]:
        """The nodes outside a gradient that read a tensor of it, and the graph if it returns it."""
        own = {id(node) for node in found.nodes}
        readers = [node for node in tensor.outputs if id(node) not in own]
        return [*readers, *([self.graph] if any(t is tensor for t in self.graph.outputs) else [])]

    def _summary(self, forward: gs.Node) -> gs.Tensor:
        """The second result of a fused Attention."""
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
        for node in list(old.outputs):
            for i, operand in enumerate(node.inputs):
                if operand is old:
                    node.inputs[i] = new
        for i, tensor in enumerate(self.graph.outputs):
            if tensor is old:
                old.name, new.name = f"{old.name}::decomposed", old.name
                self.graph.outputs[i] = new

    def _drop(self, nodes: list[gs.Node]) -> None:
        """Removes nodes that nothing reads any more."""
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
    return a is b or (not a.name and not b.name)


def _can_be_fused(node: gs.Node) -> bool:
    """True for an Attention without a cache and without other results, if its mask has a column for
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
