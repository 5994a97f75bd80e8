"""Ops that write updates into a tensor along one dimension."""

from __future__ import annotations

import onnx_graphsurgeon as gs

from onnxpar.rules.rule import Rule, dims_text, einsum, names, rule, tensor_shape


@rule("ScatterElements Scatter")
def scatter_elements(node: gs.Node) -> Rule:
    """`v d, i d, i d -> v d`, v and i whole; dimensions that are updated in part are whole, too."""
    data, index = (tensor_shape(t) or () for t in node.inputs[:2])
    axis = node.attrs.get("axis", 0) % len(data)
    dims, at = names("d", len(data)), names("d", len(data))
    dims[axis], at[axis] = "v", "i"
    whole = dict.fromkeys("vi", "its updates meet in the same elements")
    for i, (size, covered) in enumerate(zip(data, index, strict=True)):
        if i != axis and (size is None or size != covered):
            at[i] = f"i{i}"
            whole |= dict.fromkeys((dims[i], at[i]), "the indices cover a part of it")
    table, part = dims_text(dims), dims_text(at)
    adds = node.attrs.get("reduction", "none") in ("none", "add")
    return einsum(
        node,
        f"{table}, {part}, {part} -> {table}",
        whole=whole,
        linear=(frozenset({0, 2}),) if adds else (),
    )


@rule("TensorScatter")
def tensor_scatter(node: gs.Node) -> Rule:
    """`b h s d, b h u d, b -> b h s d`, s and u whole: a cache written from an index on."""
    shape = tensor_shape(node.inputs[0]) or ()
    axis = node.attrs.get("axis", -2) % len(shape)
    cache, update = names("d", len(shape)), names("d", len(shape))
    update[axis] = "u"
    written = dict.fromkeys((cache[axis], "u"), "where it is written only a run can tell")
    rest = ", d0" * (len(node.inputs) - 2)
    return einsum(
        node,
        f"{dims_text(cache)}, {dims_text(update)}{rest} -> {dims_text(cache)}",
        whole=written,
        linear=(frozenset({0, 1}),),
    )


@rule("ReverseSequence")
def reverse_sequence(node: gs.Node) -> Rule:
    """`t b d, b -> t b d`, t whole."""
    dims = names("d", len(tensor_shape(node.inputs[0]) or ()))
    time, batch = dims[node.attrs.get("time_axis", 0)], dims[node.attrs.get("batch_axis", 1)]
    text = dims_text(dims)
    return einsum(
        node,
        f"{text}, {batch} -> {text}",
        whole={time: "it is reversed"},
        linear=(frozenset({0}),),
        monotone=frozenset({0}),
    )
