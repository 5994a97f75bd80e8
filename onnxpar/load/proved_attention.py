"""Measures an attention that was found in basic ops, and checks that PagedAttention computes the
same numbers.

The nodes of the attention run on random numbers at several sizes. From the scores follow their
scale, their cap, and which keys are hidden: all later ones, and perhaps those before a window. Then
the whole attention must give the results of PagedAttention's formula with these parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import onnx
import onnxruntime as ort
from onnx import NodeProto, helper, numpy_helper

from onnxpar.base.arrays import Array
from onnxpar.base.custom_ops import quiet_options
from onnxpar.base.errors import ModelError
from onnxpar.graph.paged_attention import UnpagedError
from onnxpar.graph.stored import nodes_before
from onnxpar.load.decoder_samples import Sample
from onnxpar.load.found_attention import FoundAttention

_HIDDEN = -5000.0
"""Scores below it have no weight; random scores are far above."""
_TOLERANCES = {"float32": 2e-5, "float64": 2e-5, "float16": 1e-2}
"""Largest errors of results and of scores, as parts of the largest number, by type."""


class _CannotRunError(UnpagedError):
    """The nodes of an attention cannot run at some numbers of past and new tokens."""


@dataclass(frozen=True)
class Form:
    """Where a tensor of all tokens and heads has its tokens: its shape at one sample, and the axis
    of tokens."""

    shape: tuple[int, ...]
    axis: int

    @property
    def order(self) -> list[int]:
        """The permutation of axes that puts the axis of tokens before all others but the batch."""
        batch = [0] if self.shape[0] == 1 and self.axis else []
        others = [i for i in range(len(self.shape)) if i != self.axis and i not in batch]
        return [*batch, self.axis, *others]

    def shape_of(self, tokens: int) -> tuple[int, ...]:
        """Returns the shape of the tensor for `tokens` tokens."""
        return (*self.shape[: self.axis], tokens, *self.shape[self.axis + 1 :])

    def by_head(self, array: Array, heads: int) -> Array:
        """Returns an array of this form as (heads, tokens, width), in float64."""
        tokens = array.shape[self.axis]
        rows = np.moveaxis(array, self.axis, 0).reshape(tokens, heads, -1)
        return rows.swapaxes(0, 1).astype(np.float64)


@dataclass(frozen=True)
class Terms:
    """The parameters with which PagedAttention computes an attention.

    query, keys, values, output  the forms of these tensors
    heads, kv_heads              numbers of heads of queries, and of keys and values
    width                        elements of a head
    scale, softcap               as the op's attributes; softcap 0: no cap
    window                       how many keys a token sees, itself included; -1: all up to itself
    """

    query: Form
    keys: Form
    values: Form
    output: Form
    heads: int
    kv_heads: int
    width: int
    scale: float = 0.0
    softcap: float = 0.0
    window: int = -1


def proved(
    attention: FoundAttention,
    model: onnx.ModelProto,
    small: Sequence[Sample],
    large: Sequence[Sample],
) -> Terms:
    """Returns the parameters with which PagedAttention computes an attention.

    small  samples of short texts, at which results are compared
    large  samples of longer texts; for attention in basic ops, only the mask is compared there

    Errors: ModelError if PagedAttention does not compute the same.
    """
    return _Proof(attention, model, small[-1]).terms(small, large)


class _Proof:
    """Runs parts of one attention on random numbers, to measure its parameters and to compare its
    results."""

    def __init__(self, attention: FoundAttention, model: onnx.ModelProto, sample: Sample) -> None:
        self.found, self.model, self.types = attention, model, sample.walk.types
        inner = [n for n in attention.nodes if n.op_type == "Softmax"] or list(attention.nodes)
        self.name = inner[0].name
        elem = self.types[attention.query].tensor_type.elem_type
        self.dtype = helper.tensor_dtype_to_np_dtype(elem)
        if self.dtype.name not in _TOLERANCES:
            raise UnpagedError(f"the attention of {self.name!r} is in {self.dtype.name}")
        self.tolerance = _TOLERANCES[self.dtype.name]
        self.rng = np.random.default_rng(0)
        self.scores = (sample.shape(attention.scores) or ()) if attention.scores else ()
        if attention.scores and self.scores[-2:] != (sample.new, sample.total):
            raise self._error("has scores of another shape than new tokens by keys")

    def terms(self, small: Sequence[Sample], large: Sequence[Sample]) -> Terms:
        """Returns the parameters with which PagedAttention computes the attention, after comparing
        results at samples of short texts (`small`) and of longer ones (`large`). Errors: ModelError
        if the results differ."""
        terms = self._layout(small)
        if self.found.scores:
            terms = replace(terms, window=self._window(small, large))
            terms = self._scaled(terms, small)
        else:
            terms = self._declared(terms, [*small, *large])
        for sample in small if self.found.scores else [*small, *large]:
            self._compare(terms, sample)
        return terms

    def _layout(self, samples: Sequence[Sample]) -> Terms:
        """Returns the parameters that follow from shapes: heads, and the forms of queries, keys,
        values and results. Errors: ModelError if the shapes do not fit such an attention."""
        attention, last = self.found, samples[-1]
        past = [last.shape(c.past) for c in (attention.keys, attention.values)]
        if past[0] is None or len(past[0]) != 4 or past[0] != past[1]:
            raise self._error(f"has caches of other shapes than PagedAttention's, {past}")
        _, kv_heads, _, width = past[0]
        names = (attention.query, attention.keys.new, attention.values.new, attention.output)
        query, keys, values, output = (self._form(name, samples) for name in names)
        forms = (query, keys, values, output)
        counts = [int(np.prod(form.shape)) // (last.new * width) for form in forms]
        heads = counts[0]
        if counts != [heads, kv_heads, kv_heads, heads] or heads % kv_heads:
            raise self._error(f"has {counts[0]} heads of queries for {kv_heads} in caches")
        return Terms(query, keys, values, output, heads, kv_heads, width)

    def _form(self, name: str, samples: Sequence[Sample]) -> Form:
        """Returns the form of a tensor that has a row for each token and head, from its shapes at
        the samples. Errors: ModelError if not exactly one axis has the size of the tokens."""
        shapes = [s.shape(name) or () for s in samples]
        axes = [
            axis
            for axis in range(len(shapes[-1]) - 1)
            if all(len(h) > axis and h[axis] == s.new for h, s in zip(shapes, samples, strict=True))
        ]
        if len(axes) != 1:
            raise self._error(f"has {name!r}, {shapes[-1]}, without one axis of tokens")
        return Form(shapes[-1], axes[0])

    def _declared(self, terms: Terms, samples: Sequence[Sample]) -> Terms:
        """Returns `terms`, completed for an op of attention: scale and cap are its attributes, the
        window is measured. For this, all queries are 0, so that a token's result is the mean of the
        values that it sees."""
        node = self.found.keys.fused
        assert node is not None
        values = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        scale = values.get("scale", 0.0) or terms.width**-0.5
        sample = max(samples, key=lambda s: s.total)
        feeds = self._feeds(terms, sample)
        feeds[self.found.query] = np.zeros_like(feeds[self.found.query])
        at = np.arange(sample.total, dtype=self.dtype) / sample.total
        for name, axis, part in (
            (self.found.values.past, 2, at[: sample.past]),
            (self.found.values.new, terms.values.axis, at[sample.past :]),
        ):
            shape = [1] * feeds[name].ndim
            shape[axis] = -1
            feeds[name] = np.broadcast_to(part.reshape(shape), feeds[name].shape).copy()
        results = terms.output.by_head(self._outputs(feeds, sample), terms.heads)
        mean = float(results[0, -1, 0]) * sample.total
        width = round(2 * (sample.total - 1 - mean) + 1)
        window = width if 0 < width < sample.total else -1
        return replace(terms, scale=scale, softcap=values.get("softcap", 0.0), window=window)

    def _outputs(self, feeds: Mapping[str, Array], sample: Sample) -> Array:
        """Returns the attention's result for these queries, keys and values."""
        return self._run(self.found.nodes, feeds, self.found.output, sample)

    def _window(self, small: Sequence[Sample], large: Sequence[Sample]) -> int:
        """Returns the window (-1: none), from the keys that masks hide at all samples. Errors:
        ModelError for any mask that is not causal, perhaps with a window."""
        visible = {(s.past, s.new): self._visible(s) for s in small}
        for sample in large:
            with suppress(_CannotRunError):  # texts of this length do not run
                visible[sample.past, sample.new] = self._visible(sample)
        counts = {
            past + row + 1: int(mask[..., row, :].sum(-1).max())
            for (past, new), mask in visible.items()
            for row in range(new)
        }
        cut = {count for before, count in counts.items() if count < before}
        window = max(cut) if cut else -1
        for (past, new), mask in visible.items():
            if not np.array_equal(mask, np.broadcast_to(_wanted(past, new, window), mask.shape)):
                raise self._error(
                    "does not see all tokens up to its own, or a window of the last ones (seen at "
                    f"{past} past and {new} new tokens)"
                )
        return window

    def _visible(self, sample: Sample) -> Array:
        """Returns True for each score that the mask does not hide, (..., new, keys)."""
        shape = (*self.scores[:-2], sample.new, sample.total)
        scores = self.rng.standard_normal(shape).astype(self.dtype)
        masked = self._run(self.found.steps, {self.found.scores: scores}, self.found.masked, sample)
        if masked.shape[-2:] != shape[-2:] or masked.size != scores.size:
            raise self._error(f"makes scores {masked.shape} of {shape}")
        return np.asarray(masked > _HIDDEN)

    def _scaled(self, terms: Terms, samples: Sequence[Sample]) -> Terms:
        """Returns `terms` with the scale and the cap of scores, measured from scores before the
        Softmax."""
        sample = samples[-1]
        feeds = self._feeds(terms, sample)
        at = next(i for i, n in enumerate(self.found.nodes) if n.op_type == "Softmax")
        nodes = self.found.nodes[:at]
        seen = _wanted(sample.past, sample.new, terms.window)

        def scores(factor: float) -> tuple[Array, Array]:
            scaled = {**feeds, self.found.query: feeds[self.found.query] * self.dtype.type(factor)}
            masked = self._run(nodes, scaled, self.found.masked, sample)
            masked = masked.reshape(terms.heads, sample.new, sample.total)[:, seen]
            products, _ = self._products(scaled, terms)
            return masked.astype(np.float64), products[:, seen]

        cap = 0.0
        if any(node.op_type == "Tanh" for node in self.found.steps):
            cap = float(f"{np.abs(scores(1e4)[0]).max():.4g}")
        masked, products = scores(0.1 if cap else 1)
        if cap:
            masked = np.arctanh(np.clip(masked / cap, -0.99, 0.99)) * cap
        if not np.isfinite(masked).all():
            raise self._error("has scores that are not finite")
        scale = float((masked * products).sum() / (products * products).sum())
        return replace(terms, scale=self._usual(scale, terms), softcap=cap)

    def _usual(self, scale: float, terms: Terms) -> float:
        """Returns the usual scale, such as width ** -0.5, that equals a measured one within the
        tolerance; else the measured scale."""
        for usual in (terms.width**-0.5, terms.width**-0.25, 1.0, 1 / terms.width):
            if abs(scale - usual) <= self.tolerance / 10 * usual:
                return float(usual)
        return scale

    def _compare(self, terms: Terms, sample: Sample) -> None:
        """Errors: ModelError if the attention's results at a sample differ from those of a
        PagedAttention with the parameters `terms`, by more than the tolerance."""
        feeds = self._feeds(terms, sample)
        products, values = self._products(feeds, terms)
        scores = products * terms.scale
        if terms.softcap:
            scores = np.tanh(scores / terms.softcap) * terms.softcap
        scores = np.where(_wanted(sample.past, sample.new, terms.window), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        wanted = weights @ values
        results = terms.output.by_head(self._outputs(feeds, sample), terms.heads)
        error = np.abs(results - wanted).max() / max(np.abs(wanted).max(), 1)
        if not error <= self.tolerance:
            raise self._error(
                "does not compute softmax(scale * query * key) * value with this mask, as a bias "
                f"of positions or a sink would do (its error is {error:.2g})"
            )

    def _products(self, feeds: Mapping[str, Array], terms: Terms) -> tuple[Array, Array]:
        """Returns queries times keys, (heads, new, keys), and the values of each head, in
        float64."""
        attention, group = self.found, terms.heads // terms.kv_heads
        query = terms.query.by_head(feeds[attention.query], terms.heads)
        keys, values = (
            np.concatenate([feeds[c.past][0], form.by_head(feeds[c.new], terms.kv_heads)], axis=1)
            for c, form in ((attention.keys, terms.keys), (attention.values, terms.values))
        )
        keys, values = (np.repeat(a, group, axis=0) for a in (keys, values))
        return query @ keys.swapaxes(1, 2), values

    def _feeds(self, terms: Terms, sample: Sample) -> dict[str, Array]:
        """Returns random queries, keys and values for a sample, by name."""
        attention, past = self.found, (1, terms.kv_heads, sample.past, terms.width)
        shapes = {
            attention.query: terms.query.shape_of(sample.new),
            attention.keys.new: terms.keys.shape_of(sample.new),
            attention.values.new: terms.values.shape_of(sample.new),
            attention.keys.past: past,
            attention.values.past: past,
        }
        return {n: self.rng.standard_normal(s).astype(self.dtype) for n, s in shapes.items()}

    def _run(
        self, nodes: Sequence[NodeProto], feeds: Mapping[str, Array], result: str, sample: Sample
    ) -> Array:
        """Runs nodes on the arrays `feeds`, and returns the tensor `result`; other operands are the
        values that the sample has."""
        if result in feeds:
            return feeds[result]
        computed = {name for node in nodes for name in node.output}
        others = {name for n in nodes for name in n.input if name} - computed - feeds.keys()
        weights = [self._known(name, sample) for name in sorted(others)]
        inputs = [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
            for n, a in feeds.items()
        ]
        output = helper.make_tensor_value_info(
            result, self.types[result].tensor_type.elem_type, None
        )
        graph = helper.make_graph(nodes_before(nodes, [result]), "part", inputs, [output], weights)
        part = helper.make_model(
            graph, opset_imports=self.model.opset_import, ir_version=self.model.ir_version
        )
        try:
            session = ort.InferenceSession(part.SerializeToString(), quiet_options(1))
            (array,) = session.run([result], dict(feeds))
        except Exception as error:  # onnxruntime's errors have no other base
            reason = f"the attention of {self.name!r} cannot be run on its own: {error}"
            raise _CannotRunError(reason) from None
        return np.asarray(array)

    def _known(self, name: str, sample: Sample) -> onnx.TensorProto:
        """Returns the value that the sample has of a tensor. Errors: ModelError if it has none."""
        value = sample.value(name)
        if value is None:
            raise self._error(f"reads {name!r}, which is not known from sizes and positions alone")
        return numpy_helper.from_array(np.asarray(value), name)

    def _error(self, reason: str) -> ModelError:
        return UnpagedError(f"the attention of {self.name!r} {reason}")


def _wanted(past: int, new: int, window: int) -> Array:
    """Returns the mask of PagedAttention: True for each key that a new token sees, (new, past +
    new). A token sees itself and earlier tokens, at most `window` in all unless `window` is -1."""
    at = past + np.arange(new)[:, None]
    keys = np.arange(past + new)
    return (keys <= at) & (keys > at - window) if window > 0 else np.asarray(keys <= at)
