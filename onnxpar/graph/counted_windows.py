"""Rewrites pools so that ONNX's shape inference counts as many windows as onnxruntime's kernels do.

Where a pool rounds the number of its windows up, or pads automatically and has dilations, inference
counts more of them (see `kernel_sizes`), and onnxruntime does not load nodes behind the pool that
need the right size. An equivalent pool that rounds down, with more padding at its end, has no such
problem.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from onnx import GraphProto, NodeProto, helper

from onnxpar.graph.kernel_sizes import POOLS, pool_windows

_Sizes = Sequence[int | None] | None


def round_down(graph: GraphProto, sizes_of: Callable[[str], _Sizes]) -> None:
    """Replaces pools of a graph that round up by equivalent ones that round down, in place.
    `sizes_of` returns the sizes of a tensor, with None for open ones; a pool that reads open sizes
    stays as it is."""
    for node in graph.node:
        if node.op_type in POOLS and node.domain in ("", "ai.onnx"):
            sizes = list(sizes_of(node.input[0]) or ())[2:]
            known = [size for size in sizes if size is not None]
            if sizes and len(known) == len(sizes):
                _round_down(node, known)


def _round_down(node: NodeProto, sizes: Sequence[int]) -> None:
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    pads_itself = attributes.get("auto_pad", b"NOTSET").startswith(b"SAME")
    gaps = max(attributes.get("dilations", [1])) > 1
    if not attributes.get("ceil_mode") and not (pads_itself and gaps):
        return
    windows = [pool_windows(attributes, i, size) for i, size in enumerate(sizes)]
    ends = [
        max((w.count - 1) * w.stride + w.span - size - w.before, 0)
        for w, size in zip(windows, sizes, strict=True)
    ]
    pads = [w.before for w in windows] + ends
    widths = [*attributes["kernel_shape"]] * 2
    counts_more = attributes.get("count_include_pad") and any(
        end > w.after for w, end in zip(windows, ends, strict=True)
    )
    if counts_more or any(not 0 <= p < width for p, width in zip(pads, widths, strict=True)):
        return
    kept = [a for a in node.attribute if a.name not in ("auto_pad", "ceil_mode", "pads")]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute("pads", pads)])
