"""Replaces attention that is written in basic ops by PagedAttention, which has its caches in pages.

Attention is found by its caches (`found_attention.py`), and replaced only once its numbers at
several sizes are those of PagedAttention (`proved_attention.py`). What else the decoder computed
from the length of its caches is then computed from the positions of tokens (`without_past.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx import GraphProto, NodeProto, helper, numpy_helper

from onnxpar.graph.paged_attention import COMPUTE, PAGED_ATTENTION, UnpagedError
from onnxpar.load.decoder_samples import Ports, Sampler
from onnxpar.load.found_attention import Cache, FoundAttention, find_attentions
from onnxpar.load.page_ports import POSITIONS, ROWS, TABLE
from onnxpar.load.proved_attention import Terms, proved
from onnxpar.load.without_past import WithoutPast

_FEW = 4
"""Samples below which a proof would say too little."""


def page_basic_attention(model: onnx.ModelProto, caches: list[Cache], ports: Ports) -> None:
    """Replaces the attentions of a decoder that are written in basic ops (MatMul, Softmax) by
    PagedAttention, in place.

    caches  their caches
    ports   the decoder's inputs, by role

    Errors: ModelError, which says why the caches cannot be in pages.
    """
    graph = model.graph
    for node in graph.node:
        if any(a.HasField("g") for a in node.attribute):
            raise UnpagedError(f"{node.op_type} {node.name!r} has bodies, which are not followed")
    sampler = Sampler(model, ports)
    small = sampler.small()
    if len(small) < _FEW:
        raise UnpagedError("it cannot be evaluated with every number of past and new tokens")
    attentions = find_attentions(graph, caches, small[-1])
    masks = {name for a in attentions for node in a.steps or a.nodes for name in node.input if name}
    masks -= {n for a in attentions for n in (a.query, a.keys.new, a.values.new, *ports.past)}
    masks -= {name for a in attentions for node in a.nodes for name in node.output}
    large = sampler.large(masks)
    proofs = [(a, proved(a, model, small, large)) for a in attentions]
    gone = {name for a in attentions for node in a.nodes for name in node.output}
    gone |= {*ports.past, *([ports.mask] if ports.mask is not None else [])}
    gone -= {a.output for a in attentions}
    _replace(graph, proofs)
    rewrite = WithoutPast(graph, gone, ports.tokens, POSITIONS)
    replaced = rewrite.run(small)
    rewrite.check(replaced, [*small, *sampler.large(replaced)])
    rewrite.check_order([*replaced, *filter(None, [ports.positions])], small)


def _replace(graph: GraphProto, proofs: Sequence[tuple[FoundAttention, Terms]]) -> None:
    """Puts each PagedAttention where its attention's product with values was, and removes the nodes
    of the attention. `proofs` are the attentions with the parameters that were measured."""
    removed = {node.output[0] for attention, _ in proofs for node in attention.nodes}
    ends = {attention.output: (attention, terms) for attention, terms in proofs}
    kept: list[NodeProto] = []
    for node in graph.node:
        if node.output[0] in ends:
            attention, terms = ends[node.output[0]]
            kept += _paged(graph, attention, terms, node.name)
        elif node.output[0] not in removed:
            kept.append(node)
    del graph.node[:]
    graph.node.extend(kept)


def _paged(
    graph: GraphProto, attention: FoundAttention, terms: Terms, name: str
) -> list[NodeProto]:
    """Returns the PagedAttention `name` in place of an attention, with nodes before that bring
    queries, keys and values into its form (1, tokens, heads * width), and nodes behind that bring
    its result back."""
    makers = {output: node for node in graph.node for output in node.output}
    moves: list[NodeProto] = []
    sources = {
        "query": (attention.query, terms.query, terms.heads),
        "key": (attention.keys.new, terms.keys, terms.kv_heads),
        "value": (attention.values.new, terms.values, terms.kv_heads),
    }
    operands = []
    for role, (source, form, heads) in sources.items():
        own = f"{attention.output}/{role}"
        _constant(graph, f"{own}/shape", [1, -1, heads * terms.width])
        moves += _flat(source, makers, form.order, own)
        operands.append(own)
    operands += [attention.keys.past, attention.values.past, TABLE, ROWS, POSITIONS]
    flat, apart = f"{attention.output}/flat", f"{attention.output}/apart"
    results = [flat, attention.keys.present, attention.values.present]
    paged = helper.make_node(PAGED_ATTENTION, operands, results, name, domain=COMPUTE)
    attributes: dict[str, int | float] = {
        "num_heads": terms.heads,
        "kv_num_heads": terms.kv_heads,
        "scale": terms.scale,
        "softcap": terms.softcap,
        "local_window_size": terms.window,
    }
    paged.attribute.extend(helper.make_attribute(*item) for item in attributes.items())
    order = terms.output.order
    shape = [terms.output.shape[axis] for axis in order]
    shape[order.index(terms.output.axis)] = -1
    to = _constant(graph, f"{attention.output}/shape", shape)
    back = np.argsort(order).tolist()
    return [
        *moves,
        paged,
        helper.make_node("Reshape", [flat, to], [apart], apart),
        helper.make_node("Transpose", [apart], [attention.output], f"{apart}/back", perm=back),
    ]


def _flat(
    source: str, makers: Mapping[str, NodeProto], perm: list[int], name: str
) -> list[NodeProto]:
    """Returns the nodes that bring `source` into the form (1, tokens, all else), as the tensor
    `name`: a Transpose by `perm`, and a Reshape. If a Transpose makes `source`, the nodes read its
    operand."""
    before, turned = makers.get(source), f"{name}/tokens_first"
    if before is not None and before.op_type == "Transpose":
        own = next((list(a.ints) for a in before.attribute if a.name == "perm"), None)
        if own is not None:
            perm, source = [own[i] for i in perm], before.input[0]
    moves = []
    if perm != sorted(perm):
        moves.append(helper.make_node("Transpose", [source], [turned], turned, perm=perm))
        source = turned
    return [*moves, helper.make_node("Reshape", [source, f"{name}/shape"], [name], name)]


def _constant(graph: GraphProto, name: str, values: list[int]) -> str:
    graph.initializer.append(numpy_helper.from_array(np.array(values), name))
    return name
