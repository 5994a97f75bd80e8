"""The legend on a plan's page that explains the notation of layouts."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

MESH = "dp=2,tp=4"
"""The mesh of the legend's examples."""
KEY = {
    "[dp, -, tp]": "One entry per dimension: the first is sharded over mesh axis dp, the second is "
    "not sharded, the third is sharded over tp. Ranks that differ only in other axes hold the "
    "same data.",
    "[-, -]": "Not sharded: every rank holds the whole tensor.",
    "[dp.tp]": "A dimension that is sharded over two axes: over dp first, then each shard over tp.",
    "[8*tp]": "A dimension of 8 equal blocks. Each block is sharded over tp, so that every rank "
    "holds a piece of all 8.",
    "[tp+tp+tp]": "A dimension of 3 segments, one after the other, such as Q, K and V. Each is "
    "sharded over tp on its own. A number, as in 64+tp, is a segment of that size that is not "
    "sharded.",
    "[tp{4,4,1,1}]": "Shards of these sizes. Where no sizes are printed, shards are as equal as "
    "possible, the larger ones first: 10 over 4 ranks is 3, 3, 2, 2. A shard of size 0 is empty.",
    "[dp{3:1}]": "The proportion in which ranks share a size that the model leaves open: they hold "
    "6 and 2 of 8 elements.",
    "[tp:(1)2]": "A part of an axis. With tp=4 seen as a grid of 2 by 2, tp:(1)2 is its outer axis "
    "of size 2, and tp:(2)2 its inner one.",
    "[dp, -] sum(tp)": "Partial: each rank along tp holds one term, and the tensor is the sum of "
    "these terms. An AllReduce or a ReduceScatter adds them. max, min and prod work alike.",
}
"""An example of each form of a layout, and its meaning."""


def layout_key() -> Iterator[str]:
    """Yields the legend as HTML, collapsed at first."""
    yield '<details class="key"><summary>How to read a layout, such as <code>[dp, -, tp]</code>'
    yield f"</summary><p>Examples for a mesh <code>{MESH}</code>: a grid of 2 by 4 ranks, whose "
    yield "axes are named dp and tp.</p><dl>"
    for form, meaning in KEY.items():
        yield f"<dt><code>{escape(form)}</code></dt><dd>{escape(meaning)}</dd>"
    yield "</dl></details>"
