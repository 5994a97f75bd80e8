"""Finds the attentions of a decoder by their caches: a Concat, or an op of attention itself,
appends the keys or values of new tokens to a cache.

In basic ops, keys reach a product with the queries, and values a product with the weights, through
nodes whose other operands depend on sizes alone. This module ignores what the nodes in between
compute: `proved_attention.py` measures that.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from onnx import GraphProto, NodeProto

from onnxpar.graph.paged_attention import UnpagedError
from onnxpar.load.decoder_samples import SIZES, Sample

_PRODUCT = "MatMul"
_FUSED = {("", "Attention"): 4, ("com.microsoft", "MultiHeadAttention"): 6}
"""Ops of attention with caches of their own, and the index of the first cache among operands."""


@dataclass(frozen=True)
class Cache:
    """A cache of keys or values, by names of tensors.

    past     the input with the keys or values of earlier tokens
    new      the keys or values of the new tokens
    joined   `past` and `new` together
    present  the output, a copy of `joined`
    nodes    the nodes that compute `present`
    fused    the op of attention that joins `past` and `new`; None: a Concat joins them
    """

    past: str
    new: str
    present: str
    joined: str
    nodes: tuple[NodeProto, ...]
    fused: NodeProto | None = None


@dataclass(frozen=True)
class FoundAttention:
    """An attention that reads two caches, by names of tensors.

    keys, values  the caches
    query         the operand of the product with the keys
    scores        the product with the keys; empty if the attention is a single node
    masked        the operand of the Softmax
    output        the product with the values
    steps         the nodes that compute `masked` from `scores`
    nodes         all nodes of the attention, in the order of the graph
    """

    keys: Cache
    values: Cache
    query: str
    scores: str
    masked: str
    output: str
    steps: tuple[NodeProto, ...]
    nodes: tuple[NodeProto, ...]


@dataclass(frozen=True)
class _Way:
    """The nodes from a cache to the product that reads it, and the operand of that product."""

    nodes: list[NodeProto]
    operand: str
    product: NodeProto


def find_caches(graph: GraphProto) -> list[Cache]:
    """Returns the caches that a Concat or an op of attention extends, in the order of the graph's
    outputs."""
    makers = {name: node for node in graph.node for name in node.output}
    types = {i.name: i.type.tensor_type.elem_type for i in graph.input}
    caches = []
    for port in graph.output:
        elem, nodes = port.type.tensor_type.elem_type, list[NodeProto]()
        joined = _copied(port.name, makers, elem, nodes)
        node = makers.get(joined)
        if node is None:
            continue
        first = _FUSED.get((node.domain, node.op_type))
        axes = [a.i for a in node.attribute if a.name == "axis"]
        if first is not None and joined in node.output[1:3]:
            which = list(node.output).index(joined)
            past, new = node.input[first - 1 + which], node.input[which]
        elif node.op_type == "Concat" and len(node.input) == 2 and axes[0] in (2, -2):
            past, new = node.input[0], node.input[1]
        else:
            continue
        nodes.append(node)
        past = _copied(past, makers, elem, nodes)
        if types.get(past) == elem:
            fused = node if first is not None else None
            caches.append(Cache(past, new, port.name, joined, tuple(nodes), fused))
    return caches


def _copied(name: str, makers: dict[str, NodeProto], elem: int, nodes: list[NodeProto]) -> str:
    """Returns the tensor that `name` is a copy of, through Identities and Casts to the ONNX data
    type `elem`; appends these nodes to `nodes`."""
    while name in makers and _is_copy(makers[name], elem):
        nodes.append(makers[name])
        name = makers[name].input[0]
    return name


def find_attentions(graph: GraphProto, caches: list[Cache], sample: Sample) -> list[FoundAttention]:
    """Returns the attention of each pair of caches, keys and values. `sample` has the values of
    tensors that depend on sizes alone. Errors: ModelError if a cache is read in another way."""
    search = _Search(graph, sample)
    basic = [cache for cache in caches if cache.fused is None]
    ways = {cache.past: search.way(cache) for cache in basic}
    by_product = {ways[c.past].product.output[0]: c for c in basic}
    attentions = search.fused([cache for cache in caches if cache.fused is not None])
    for cache in basic:
        attention = search.attention(cache, ways, by_product)
        if attention is not None:
            attentions.append(attention)
    used = {c.past for a in attentions for c in (a.keys, a.values)}
    for cache in caches:
        if cache.past not in used:
            raise UnpagedError(
                f"cache {cache.past!r} is neither the keys nor the values of an attention "
                "that is known: a product, a softmax, and a product"
            )
    return attentions


class _Search:
    """Follows tensors from node to node, through nodes whose other operands depend on sizes alone;
    `sample` has the values of such operands."""

    def __init__(self, graph: GraphProto, sample: Sample) -> None:
        self.sample = sample
        self.order = {_key(node): i for i, node in enumerate(graph.node)}
        self.readers: dict[str, list[NodeProto]] = defaultdict(list)
        for node in graph.node:
            for name in dict.fromkeys(node.input):
                if node.op_type not in SIZES:
                    self.readers[name].append(node)

    def way(self, cache: Cache) -> _Way:
        """Returns the nodes from a cache to the matrix product that reads it. Errors: ModelError if
        several nodes read the cache, or a node mixes it with a tensor that does not depend on sizes
        alone."""
        nodes: list[NodeProto] = []
        name = cache.joined
        while True:
            readers = [n for n in self.readers[name] if self._is_read(n)]
            if len(readers) != 1:
                raise UnpagedError(f"{len(readers)} nodes read what cache {cache.past!r} becomes")
            (node,) = readers
            if node.op_type == _PRODUCT:
                return _Way(nodes, name, node)
            if self._unknown(node, {name}) or len(node.output) != 1:
                raise UnpagedError(
                    f"{node.op_type} {node.name!r} mixes cache {cache.past!r} with other tensors"
                )
            nodes.append(node)
            name = node.output[0]

    def _is_read(self, node: NodeProto) -> bool:
        """True for a node whose results other nodes read; False if it only makes an output."""
        return any(self.readers[name] for name in node.output)

    def attention(
        self, keys: Cache, ways: dict[str, _Way], by_product: dict[str, Cache]
    ) -> FoundAttention | None:
        """Returns the attention whose keys are in the cache `keys`; None if the cache has values.

        ways        by the name of a cache's input, the nodes from the cache to its product
        by_product  by the name of a product's result, the cache that the product reads
        """
        way = ways[keys.past]
        query = next((n for n in way.product.input if n != way.operand), None)
        scores = way.product.output[0]
        inner = self._inner(scores, by_product)
        softmaxes = [n for n in inner if n.op_type == "Softmax"]
        ends = [n for n in inner if n.op_type == _PRODUCT]
        if query is None or len(softmaxes) != 1 or len(ends) != 1 or ends[0] is not inner[-1]:
            return None
        values = by_product[ends[0].output[0]]
        at = inner.index(softmaxes[0])
        nodes = {_key(n): n for c in (keys, values) for n in (*c.nodes, *ways[c.past].nodes)}
        nodes |= {_key(n): n for n in (way.product, *inner)}
        return FoundAttention(
            keys,
            values,
            query,
            scores,
            softmaxes[0].input[0],
            ends[0].output[0],
            tuple(inner[:at]),
            tuple(sorted(nodes.values(), key=lambda n: self.order[_key(n)])),
        )

    def fused(self, caches: list[Cache]) -> list[FoundAttention]:
        """Returns the attentions that are one op (Attention, MultiHeadAttention) with two of these
        caches."""
        attentions = []
        for keys in caches:
            for values in caches:
                node = keys.fused
                if node is None or [keys.joined, values.joined] != list(node.output[1:3]):
                    continue
                nodes = {_key(n): n for n in (*keys.nodes, *values.nodes)}
                each = sorted(nodes.values(), key=lambda n: self.order[_key(n)])
                query, output = node.input[0], node.output[0]
                attentions.append(
                    FoundAttention(keys, values, query, "", "", output, (), tuple(each))
                )
        return attentions

    def _inner(self, scores: str, by_product: dict[str, Cache]) -> list[NodeProto]:
        """Returns the nodes from `scores` to the product with values, in order. Empty if a node
        reads another tensor that does not depend on sizes alone, or if a node follows the
        product."""
        results, inner = {scores}, dict[str, NodeProto]()
        todo = list(self.readers[scores])
        while todo:
            node = min(todo, key=lambda n: self.order[_key(n)])
            todo = [n for n in todo if n is not node]
            inner[_key(node)] = node
            if node.op_type == _PRODUCT and node.output[0] in by_product:
                if not todo:
                    break
                return []
            if self._unknown(node, results):
                return []
            results |= set(node.output)
            todo += [n for o in node.output for n in self.readers[o] if _key(n) not in inner]
        return list(inner.values())

    def _unknown(self, node: NodeProto, results: set[str]) -> list[str]:
        """Returns the operands of a node that are not in `results`, and that depend on more than
        sizes."""
        others = [name for name in node.input if name and name not in results]
        return [name for name in others if self.sample.value(name) is None]


def _is_copy(node: NodeProto, elem: int) -> bool:
    """True for an Identity, or a Cast to the ONNX data type `elem`."""
    is_cast = node.op_type == "Cast" and any(a.name == "to" and a.i == elem for a in node.attribute)
    return is_cast or node.op_type == "Identity"


def _key(node: NodeProto) -> str:
    """The identity of a node: its first result."""
    return str(next(filter(None, node.output), ""))
