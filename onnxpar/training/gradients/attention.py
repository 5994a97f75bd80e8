"""Gradients of attention and of rotary embeddings."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from onnx.helper import tensor_dtype_to_np_dtype

from onnxpar.training.gradients.indexing import scatter_add
from onnxpar.training.gradients.value import Value
from onnxpar.training.gradients.vjp import Grads, Vjp, vjp

_MASK, _LENGTHS = 3, 6


@vjp("Attention")
def attention(v: Vjp) -> Grads:
    """The gradient rule of Attention. Computes the attention probabilities again from queries
    and keys, instead of keeping them. Query heads that share a key head are rows of one matrix
    product."""
    query, keys, values = _heads(v, v.x, "q"), _Sequence(v, 1), _Sequence(v, 2)
    batch, heads, rows, width = query.shape
    _, shared, seen, _ = keys.whole.shape
    grouped = [batch, shared, heads // shared * rows]
    by_head, by_group = [batch, heads, rows, seen], [*grouped, seen]
    scale = v.attr("scale") or 1 / math.sqrt(width)

    scaled = query.reshape([*grouped, width]) * scale
    scores = (scaled @ keys.whole.swap()).reshape(by_head)
    cap = v.attr("softcap")
    bent = (scores / cap).op("Tanh") if cap else None
    weights, visible = _probabilities(v, bent * cap if bent is not None else scores)

    dy = _heads(v, v.dy, "q").reshape([*grouped, values.whole.shape[3]])
    of_weights = _with_scores(v, 3, (dy @ values.whole.swap()).reshape(by_head))
    weighted = weights * of_weights
    of_masked = weighted - weights * weighted.sum([3], keepdims=True)
    of_masked = _with_scores(v, 2, of_masked, visible)
    of_scores = _with_scores(v, 1, of_masked)
    if bent is not None:
        of_scores = of_scores * (1.0 - bent * bent)
    of_scores = _with_scores(v, 0, of_scores).reshape(by_group)
    of_query = ((of_scores @ keys.whole) * scale).reshape(query.shape)
    of_key, of_past_key = keys.gradients(of_scores.swap() @ scaled)
    of_value, of_past_value = values.gradients(weights.reshape(by_group).swap() @ dy)
    of_mask = None if visible is None else of_masked
    return _joined(v, of_query), of_key, of_value, of_mask, of_past_key, of_past_value


def _with_scores(v: Vjp, mode: int, gradient: Value, visible: Value | None = None) -> Value:
    """Returns a gradient of the scores, plus the gradient of the node's last result if this result
    has the scores of stage `mode` (ONNX's `qk_matmul_output_mode`). With a mask `visible`, hidden
    scores get no gradient from the result."""
    dy = v.dys[3] if len(v.dys) > 3 else None
    if dy is None or v.attr("qk_matmul_output_mode") != mode:
        return gradient
    return gradient + (dy if visible is None else visible.where(dy, 0.0))


class _Sequence:
    """The keys (operand 1) or values (operand 2) of an Attention, by head: the rows of the cache,
    then the new rows. `past` is the number of rows of the cache."""

    def __init__(self, v: Vjp, operand: int) -> None:
        self.v = v
        self.operand = operand
        new_rows = v.operands[operand]
        past = v.operand(operand + 3)
        self.whole = _heads(v, new_rows, "kv")
        self.past = 0
        if past is not None:
            self.past = past.shape[2]
            self.whole = past.op("Concat", self.whole, axis=2)

    def gradients(self, whole: Value) -> tuple[Value, Value | None]:
        """Returns (the gradient of the operand, the gradient of the cache or None), given the
        gradient of both together (`whole`)."""
        dys = self.v.dys
        present = dys[self.operand] if len(dys) > self.operand else None
        if present is not None:
            whole = whole + present
        of_new = _joined(self.v, whole.slice(self.past, whole.shape[2], 2))
        return of_new, whole.slice(0, self.past, 2) if self.past else None


def _heads(v: Vjp, x: Value, role: str) -> Value:
    """Returns a tensor with the dimensions [batch, head, row, element]. If `x` has three
    dimensions, its last dimension is split into heads; `role`, "q" or "kv", says which attribute
    has their number."""
    if x.rank == 4:
        return x
    batch, rows, width = x.shape
    heads = v.attr(f"{role}_num_heads")
    return x.reshape([batch, rows, heads, width // heads]).transpose([0, 2, 1, 3])


def _joined(v: Vjp, x: Value) -> Value:
    """Returns a tensor [batch, head, row, element] in the shape of the node's operands: the inverse
    of `_heads`."""
    if v.x.rank == 4:
        return x
    batch, heads, rows, width = x.shape
    return x.transpose([0, 2, 1, 3]).reshape([batch, rows, heads * width])


def _probabilities(v: Vjp, scores: Value) -> tuple[Value, Value | None]:
    """Returns the softmax of masked scores, and the mask (True: visible; None without a mask). The
    softmax is zero in rows that see no key.

    In a mask of numbers, minus infinity hides a key; before opset 25, so does the least number, as
    in onnxruntime.
    """
    dtype = scores.dtype
    precision = v.node.attrs.get("softmax_precision")
    scores = scores.cast(tensor_dtype_to_np_dtype(precision) if precision else dtype)
    least = float(np.finfo(scores.dtype).min)
    visible = _positions(v, scores)
    mask = v.operand(_MASK)
    if mask is not None and mask.dtype != np.bool_:
        least = -np.inf if v.builder.graph.opset >= 25 else least
        bias = mask.cast(scores.dtype)
        scores, mask = scores + bias, bias > least
    seen = [m for m in (visible, mask) if m is not None]
    if not seen:
        return scores.op("Softmax", axis=-1).cast(dtype), None
    both = seen[0] if len(seen) == 1 else seen[0].op("And", seen[1])
    masked = both.where(scores, least)
    if least == -np.inf:
        masked = (masked.op("ReduceMax", np.array([-1]), keepdims=1) > least).where(masked, 0.0)
    return both.where(masked.op("Softmax", axis=-1), 0.0).cast(dtype), both


def _positions(v: Vjp, scores: Value) -> Value | None:
    """Returns a mask that is True for each key that a query may see by its position; None if all
    queries see all keys."""
    rows, seen = scores.shape[2:]
    lengths, past = v.operand(_LENGTHS), v.operand(4)
    keys, queries = np.arange(seen), np.arange(rows)[:, None]
    if lengths is None:
        ahead = past.shape[2] if past is not None else 0
        near = _near(v, queries + ahead - keys)
        return v.builder.constant(np.logical_and.reduce(near)) if near else None
    lengths = lengths.reshape([-1, 1, 1, 1])
    visible: Value = v.builder.constant(keys) < lengths
    for mask in _near(v, lengths + (queries - rows) - keys):
        visible = visible.op("And", mask)
    return visible


def _near(v: Vjp, distance: Any) -> list[Any]:
    """Returns the masks of causal attention and of the attention window (none, one or several),
    given the distance from each key to each query."""
    left, right = (v.node.attrs.get(f"{side}_window_size", -1) for side in ("left", "right"))
    bounds = [distance >= 0] if v.attr("is_causal") else []
    bounds += [distance <= left] if left >= 0 else []
    return bounds + ([distance >= -right] if right >= 0 else [])


@vjp("RotaryEmbedding")
def rotary_embedding(v: Vjp) -> Grads:
    """The gradient rule of RotaryEmbedding: rotates the gradient back, by the negative angle. The
    tables of cosines and sines get the gradient of a product of complex numbers."""
    cosine, sine, positions = v.operands[1], v.operands[2], v.operand(3)
    rotated = v.dy.op("RotaryEmbedding", cosine, -sine, positions, **v.node.attrs)
    (x, y), (dx, dy) = _pairs(v, v.x), _pairs(v, v.dy)
    head = 1 if v.x.rank == 4 else 2
    tables = [(dx * x + dy * y).sum([head]), (dy * x - dx * y).sum([head])]
    if positions is not None:
        at = positions.reshape([-1])
        rows = [table.reshape([-1, table.shape[-1]]) for table in tables]
        tables = [scatter_add(row, at, 0, cosine.shape) for row in rows]
    return [rotated, *tables]


def _pairs(v: Vjp, x: Value) -> tuple[Value, Value]:
    """Returns both coordinates of the rotated pairs of elements, each [batch, head, row, pair] or,
    for operands of three dimensions, [batch, row, head, pair]."""
    width = x.shape[-1]
    if x.rank == 3:
        heads = v.attr("num_heads")
        width //= heads
        x = x.reshape([*x.shape[:2], heads, width])
    half = (v.attr("rotary_embedding_dim") or width) // 2
    x = x.slice(0, 2 * half, 3)
    if v.attr("interleaved"):
        x = x.reshape([*x.shape[:3], half, 2])
        shape = x.shape[:4]
        return x.slice(0, 1, 4).reshape(shape), x.slice(1, 2, 4).reshape(shape)
    return x.slice(0, half, 3), x.slice(half, 2 * half, 3)
