"""PagedAttention, an op of the plugin: attention over caches in pages, for tokens of many texts;
and PagedAttentionPart, for a rank that holds some positions of each page.

The tokens of a run follow each other, and each has a text and a position in this text. The caches
consist of pages, which hold some positions of one text; a table lists the pages of each text. So
texts of any lengths run together, and begin, grow and end on their own. Ranks that hold parts
attend each to its own, and combine their results by log-sum-exp.
"""

from __future__ import annotations

import atexit
from collections.abc import Iterable, Sequence

import onnx
import onnx_graphsurgeon as gs
import onnxruntime as ort
from onnx import TypeProto
from onnx.defs import OpSchema

from onnxpar.base.errors import ModelError

SINCE = (1, 24)
"""The oldest onnxruntime that can run the op; older ones crash if such an op lacks an optional
input."""
COMPUTE = "onnxpar.compute"
"""The domain of the plugin's ops that do not communicate."""
PAGED_ATTENTION = "PagedAttention"
PAGED_ATTENTION_PART = "PagedAttentionPart"
SCALE_BYTES = 4
"""With caches of int8, each row ends with its scale, a float32 of so many bytes."""
QUERY, KEY, VALUE, KEYS, VALUES, TABLE, ROWS, POSITIONS, COSINE, SINE, SINK, HELD = range(12)
"""Positions of the op's operands."""

_FLOATS = ("tensor(float)", "tensor(float16)")
_REQUIRED, _OPTIONAL = (
    OpSchema.FormalParameterOption.Single,
    OpSchema.FormalParameterOption.Optional,
)
_OPERANDS = (
    ("query", "T", _REQUIRED, "(1, tokens, heads * width), or with keys and values behind"),
    ("key", "T", _OPTIONAL, "(1, tokens, kv heads * width)"),
    ("value", "T", _OPTIONAL, "(1, tokens, kv heads * width)"),
    ("key_cache", "C", _REQUIRED, "(pages, kv heads, page size, width)"),
    ("value_cache", "C", _REQUIRED, "(pages, kv heads, page size, width)"),
    ("block_table", "I", _REQUIRED, "(texts, pages of a text): the pages of each text, in order"),
    ("rows", "I", _REQUIRED, "(tokens,): the text of each token, a row of block_table"),
    ("positions", "I", _REQUIRED, "(tokens,): the position of each token in its text"),
    ("cos_cache", "T", _OPTIONAL, "(positions, rotated width / 2)"),
    ("sin_cache", "T", _OPTIONAL, "(positions, rotated width / 2)"),
    ("head_sink", "T", _OPTIONAL, "(heads,): a score of each head without a value"),
)
_HELD = (
    "held",
    "I",
    _REQUIRED,
    "(page size of the caches,): which positions of a page they have, ascending",
)
_CACHES = (
    ("new_key_cache", "C", "key_cache, with the new tokens"),
    ("new_value_cache", "C", "value_cache, with the new tokens"),
)
_RESULTS = (("output", "T", "(1, tokens, heads * width)"), *_CACHES)
_PART_RESULTS = (
    ("output", "F", "(1, tokens, heads * width), of the positions that are held"),
    *_CACHES,
    ("log_sum", "F", "(1, tokens, heads): the logarithm of the sum of e^score; none seen: -inf"),
)
_Attribute = tuple[str, float | int | None, str]
_ATTRIBUTES: tuple[_Attribute, ...] = (
    ("num_heads", None, "heads of queries"),
    ("kv_num_heads", None, "heads of keys and values"),
    ("scale", 0.0, "factor of scores; 0: 1 / sqrt(width)"),
    ("softcap", 0.0, "scores become softcap * tanh(score / softcap); 0: they stay"),
    ("local_window_size", -1, "a token sees as many positions up to its own; -1: all"),
    ("rotary_interleaved", 0, "1: pairs of neighbors are rotated; 0: of halves"),
    ("smooth_softmax", 0, "1: there is one more score, 0, without a value"),
    ("scale_bytes", 0, "bytes behind each row of caches of int8, which are its scale: 4; else 0"),
)

ATTRIBUTES = frozenset(name for name, _, _ in _ATTRIBUTES)
"""The names of the attributes that both ops have."""


def too_old() -> str | None:
    """Returns why the onnxruntime of this process cannot run the op; None if it can."""
    version = tuple(int(part) for part in ort.__version__.split(".")[:2])
    if version >= SINCE:
        return None
    since = ".".join(map(str, SINCE))
    return f"caches in pages need onnxruntime {since} or later, and this is {ort.__version__}"


class UnpagedError(ModelError):
    """Raised if the caches of a decoder cannot be divided into pages; `reason` says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"the caches of this model cannot be in pages, because {reason}; give --page-size 0 "
            "to keep them as the model has them"
        )
        self.reason = reason


def written_in_place(graph: gs.Graph, states: Iterable[tuple[str, str]]) -> frozenset[str]:
    """Returns the inputs whose memory a run overwrites with the state's new value: PagedAttention
    writes into its caches, and an Identity from the input to the output copies nothing.

    states  pairs (input, output) of states
    """
    pairs = set(states)
    ops = (PAGED_ATTENTION, PAGED_ATTENTION_PART)
    paged = [n for n in graph.nodes if n.op in ops and n.domain == COMPUTE]
    passed = [(n.inputs[KEYS + i].name, n.outputs[1 + i].name) for n in paged for i in (0, 1)]
    same = [n for n in graph.nodes if n.op == "Identity" and not n.domain]
    passed += [(n.inputs[0].name, n.outputs[0].name) for n in same]
    return frozenset(before for before, after in passed if (before, after) in pairs)


def _schema(
    op: str,
    operands: Sequence[tuple[str, str, OpSchema.FormalParameterOption, str]],
    results: Sequence[tuple[str, str, str]],
    attributes_of: Sequence[_Attribute],
) -> OpSchema:
    kinds = OpSchema.AttrType
    has_parts = any(type_ == "F" for _, type_, _ in results)
    parts = [("F", ("tensor(float)",), "results of parts")] if has_parts else []
    attributes = [
        OpSchema.Attribute(name, kinds.INT, text, required=True)
        if default is None
        else OpSchema.Attribute(name, onnx.helper.make_attribute(name, default), text)
        for name, default, text in attributes_of
    ]
    return OpSchema(
        op,
        COMPUTE,
        1,
        __doc__ or "",
        inputs=[OpSchema.FormalParameter(n, t, d, param_option=o) for n, t, o, d in operands],
        outputs=[OpSchema.FormalParameter(n, t, d) for n, t, d in results],
        type_constraints=[
            ("T", _FLOATS, "types of tokens"),
            ("C", (*_FLOATS, "tensor(int8)"), "types of caches"),
            ("I", ("tensor(int64)",), "indices"),
            *parts,
        ],
        attributes=attributes,
    )


def _infer(context: onnx.shape_inference.InferenceContext) -> None:
    """Sets the types of PagedAttention's results during ONNX's shape inference."""
    for i, type_ in enumerate(_types(context)):
        context.set_output_type(i, type_)


def _infer_part(context: onnx.shape_inference.InferenceContext) -> None:
    """Sets the types of PagedAttentionPart's results during ONNX's shape inference."""
    result, *caches = _types(context)
    result.tensor_type.elem_type = onnx.TensorProto.FLOAT
    sums, heads = TypeProto(), context.get_attribute("num_heads")
    sums.CopyFrom(result)
    if sums.tensor_type.HasField("shape") and heads is not None:
        sums.tensor_type.shape.dim[2].dim_value = heads.i
    for i, type_ in enumerate((result, *caches, sums)):
        context.set_output_type(i, type_)


def _types(context: onnx.shape_inference.InferenceContext) -> list[TypeProto]:
    """Returns the types of the result (that of the queries, without keys and values) and of both
    caches."""
    query, caches = (
        context.get_input_type(QUERY),
        [context.get_input_type(i) for i in (KEYS, VALUES)],
    )
    result = TypeProto()
    result.CopyFrom(query)
    heads, scaled = (context.get_attribute(n) for n in ("num_heads", "scale_bytes"))
    scale = scaled.i if scaled is not None else 0
    if query.tensor_type.HasField("shape") and caches[0].tensor_type.HasField("shape"):
        width = caches[0].tensor_type.shape.dim[3]
        size = result.tensor_type.shape.dim[2]
        size.Clear()
        if heads is not None and width.HasField("dim_value"):
            size.dim_value = heads.i * (width.dim_value - scale)
    return [result, *caches]


def register() -> None:
    """Registers the schemas of both ops with onnx, so that its checker and shape inference know
    them."""
    size = ("page_size", None, "positions of a page, on all ranks together")
    whole = _schema(PAGED_ATTENTION, _OPERANDS, _RESULTS, _ATTRIBUTES)
    part = _schema(PAGED_ATTENTION_PART, (*_OPERANDS, _HELD), _PART_RESULTS, (*_ATTRIBUTES, size))
    for schema, infer in ((whole, _infer), (part, _infer_part)):
        schema.set_type_and_shape_inference_function(infer)
        onnx.defs.register_schema(schema)
        # onnx 1.20 would call into Python once more when the process ends, after Python has ended.
        atexit.register(onnx.defs.deregister_schema, schema.name, 1, COMPUTE)


if not onnx.defs.has(PAGED_ATTENTION, COMPUTE):
    register()
