"""Rewrites a decoder so that its caches are in pages of fixed size.

GroupQueryAttention of com.microsoft becomes PagedAttention (`graph/paged_attention.py`), and so
does attention in basic ops (`page_basic_attention.py`). The tokens of many texts then lie one
behind the other, (1, tokens); for each token, inputs have the number of its text and its position.
An attention mask is not read any more. Logits are computed only for the tokens that a run asks for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx import GraphProto, NodeProto, TensorProto, ValueInfoProto, helper

from onnxpar.base.errors import ModelError
from onnxpar.graph.model_folder import carried_files, model_at
from onnxpar.graph.paged_attention import (
    COMPUTE,
    PAGED_ATTENTION,
    SCALE_BYTES,
    UnpagedError,
    too_old,
)
from onnxpar.graph.patterns import Known, Match, Op, Scope, attributes, rewrite
from onnxpar.graph.stored import nodes_before, onnx_opset
from onnxpar.load.decoder_samples import Ports
from onnxpar.load.found_attention import Cache, find_caches
from onnxpar.load.next_step import add_next_step
from onnxpar.load.page_basic_attention import page_basic_attention
from onnxpar.load.page_ports import PICKS, POSITIONS, ROWS, TABLE
from onnxpar.load.past_branch import take_past_branch
from onnxpar.load.top_k_logits import ASKED_DIM, OLDEST, PICK_DIM, add_candidates

TOKEN_DIM, TEXT_DIM, LENGTH_DIM, PAGE_DIM = "new_tokens", "texts", "pages_of_text", "pages"
"""Names of the open sizes of these inputs, and of the number of pages."""

DTYPES = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "int8": TensorProto.INT8,
}
"""Types that caches may have, by name."""
PAGE_SIZE = 16
"""Tokens of a page, unless the user asks for other ones."""
_STEP = {TEXT_DIM: 8, LENGTH_DIM: 32, PAGE_DIM: 1024, PICK_DIM: 8, ASKED_DIM: 1}
USUAL = (
    ({TOKEN_DIM: 8, **_STEP}, 0.96),
    ({TOKEN_DIM: 256, **_STEP}, 0.04),
)
"""Usual sizes and their weights. Most steps generate some texts, the others read a prompt: 8 texts
that run together, each with a prompt of 256 tokens and an answer of 200, take 25 steps to a prompt.
"""
HOLDING = 0.05
"""The cost of holding weights, as a share of the time to read them. So tables of tokens are split
where a step takes little longer."""

_GROUPED = "GroupQueryAttention"
_KEPT = (
    "num_heads",
    "kv_num_heads",
    "scale",
    "softcap",
    "local_window_size",
    "rotary_interleaved",
    "smooth_softmax",
)
_IGNORED = frozenset(("do_rotary", "sliding_window_cache"))
"""Attributes without a meaning for pages, or of which the operands say the same."""
_COSINE, _SINE, _IDS, _SINK = 7, 8, 9, 11
"""Indices of optional operands of GroupQueryAttention."""
_BY_RANGE = "DynamicQuantizeLinear"
_PRODUCTS = frozenset(("MatMul", "MatMulNBits", "Gemm", "FusedMatMul"))
_BEHIND = frozenset(("Cast", "Mul", "Div", "Tanh", "Add", "Sub"))
"""Ops behind the product that makes logits."""
_LAST = Op("Gather", "every", Known("index", [-1]), axis=1)
_LAST_TOKEN = (
    _LAST,
    Op("Unsqueeze", _LAST, axes=[1]),
    Op("Unsqueeze", _LAST, Known("axes", [1])),
)


@dataclass(frozen=True)
class _Ports:
    """The names of a decoder's inputs and outputs that are no caches: the token ids, other inputs,
    and the logits."""

    tokens: str
    others: tuple[str, ...]
    logits: str


def usual_page_size(folder: Path) -> int:
    """Returns the page size to use unless the user requests one: PAGE_SIZE for a folder that holds
    a language model whose caches may be in pages, else 0. Errors: ModelError for a folder that
    cannot be read."""
    file = model_at(folder)
    return 0 if file == folder or too_old() or not carried_files(file) else PAGE_SIZE


def page_caches(
    model: onnx.ModelProto, page_size: int, dtype: str | None = None
) -> list[tuple[str, str]]:
    """Rewrites a decoder so that its caches are in pages, in place; returns the caches, as (input,
    output) pairs.

    page_size  positions of a page
    dtype      a name in DTYPES; None: the type of the model's caches

    Errors: ModelError, which says why the caches cannot be in pages.
    """
    if page_size < 1:
        raise ModelError(f"a page of a cache has at least one token, not {page_size}")
    opset = onnx_opset(model)
    if opset < OLDEST:
        raise UnpagedError(f"its ops are those of opset {opset}, before {OLDEST}")
    take_past_branch(model)
    graph = model.graph
    if any(node.op_type == _BY_RANGE for node in graph.node):
        raise UnpagedError(
            f"its activations are quantized by the range of all tokens of a run ({_BY_RANGE}), so "
            "that texts which run together would change each other"
        )
    grouped = [node for node in graph.node if _is_grouped(node)]
    caches = [] if grouped else find_caches(graph)
    pairs = [pair for node in grouped for pair in _caches(node, graph)]
    pairs += [(cache.past, cache.present) for cache in caches]
    if not pairs:
        raise UnpagedError(
            f"it has no {_GROUPED} (com.microsoft), and neither a Concat nor an attention that "
            "extends a cache"
        )
    if len({p[0] for p in pairs}) < len(pairs):
        raise UnpagedError("two attentions share a cache")
    ports = _ports(graph, {name for pair in pairs for name in pair})
    rewrite(graph, {Op(_GROUPED, domain="com.microsoft"): _page})
    if caches:
        page_basic_attention(model, caches, _roles(ports, caches))
    _set_ports(graph, ports, pairs, page_size)
    if dtype == "int8":
        for node in graph.node:
            if node.op_type == PAGED_ATTENTION:
                node.attribute.append(helper.make_attribute("scale_bytes", SCALE_BYTES))
    if dtype is not None:
        _set_dtype(graph, pairs, DTYPES[dtype])
    _pick(graph, ports.logits)
    add_candidates(graph, ports.logits, opset)
    _remove_unread(graph)
    left = {name for node in graph.node for name in node.input} & set(ports.others)
    _remove_inputs(graph, [name for name in ports.others if name not in left])
    for name in left:
        _check_positions(name, graph)
    add_next_step(graph, ports.tokens, [POSITIONS, *sorted(left)])
    if not any(o.domain == COMPUTE for o in model.opset_import):
        model.opset_import.append(helper.make_opsetid(COMPUTE, 1))
    return pairs


def _is_grouped(node: NodeProto) -> bool:
    return node.op_type == _GROUPED and node.domain == "com.microsoft"


def _given(node: NodeProto, index: int) -> str:
    """Returns the name of operand `index`, empty if it is left out."""
    return node.input[index] if index < len(node.input) else ""


def _caches(node: NodeProto, graph: GraphProto) -> Iterable[tuple[str, str]]:
    """Yields the (input, output) pairs of the caches of a GroupQueryAttention. Errors: ModelError
    if it has an attribute or operand that PagedAttention does not support."""
    inputs, outputs = {i.name for i in graph.input}, {o.name for o in graph.output}
    for past, present in zip(node.input[3:5], node.output[1:3], strict=True):
        if past not in inputs or present not in outputs:
            raise UnpagedError(f"a cache of {node.name!r} is no input and output of the model")
        yield past, present
    defaults = {"qk_output": 0, "k_quant_type": b"NONE", "v_quant_type": b"NONE"}
    for attribute in node.attribute:
        value = helper.get_attribute_value(attribute)
        known = attribute.name in _IGNORED or attribute.name in _KEPT
        if (not known and value != defaults.get(attribute.name, value)) or (
            not known and attribute.name not in defaults
        ):
            raise UnpagedError(f"{node.name!r} has {attribute.name}={value!r}")
    more = [i for i in (10, *range(12, len(node.input))) if _given(node, i)]
    if more or any(node.output[3:]):
        what = f"operand {more[0]}" if more else "a fourth result"
        raise UnpagedError(f"{node.name!r} has {what}")


def _ports(graph: GraphProto, caches: Collection[str]) -> _Ports:
    """Returns the inputs and outputs that are no caches, by role. Errors: ModelError if there are
    others than one input of token ids and one output."""
    stored = {w.name for w in graph.initializer}
    inputs = [i for i in graph.input if i.name not in caches and i.name not in stored]
    outputs = [o for o in graph.output if o.name not in caches]
    tokens = [i.name for i in inputs if "ids" in i.name and "position" not in i.name]
    if len(tokens) != 1 or len(outputs) != 1:
        names = ", ".join(p.name for p in (*inputs, *outputs))
        raise UnpagedError(
            "besides caches, it must have one input of token ids and one output, the logits, but "
            f"it has {names}"
        )
    others = tuple(i.name for i in inputs if i.name != tokens[0])
    return _Ports(tokens[0], others, outputs[0].name)


def _roles(ports: _Ports, caches: Collection[Cache]) -> Ports:
    """Returns the inputs of a decoder whose attention is in basic ops, by role. Errors: ModelError
    for an input that is neither position ids nor a mask."""
    roles: dict[str, str] = {}
    for name in ports.others:
        role = next((r for r in ("position", "mask") if r in name), None)
        if role is None or role in roles:
            raise UnpagedError(f"its input {name!r} is neither token ids, position ids nor a mask")
        roles[role] = name
    past = tuple(cache.past for cache in caches)
    return Ports(ports.tokens, roles.get("mask"), roles.get("position"), past)


def _page(at: Match) -> None:
    """Replaces a GroupQueryAttention by a PagedAttention."""
    values = attributes(at.node)
    angles = [at.operand(i) if values.get("do_rotary") else "" for i in (_COSINE, _SINE)]
    operands = [*at.node.input[:5], TABLE, ROWS, POSITIONS, *angles, at.operand(_SINK)]
    kept = {name: values[name] for name in _KEPT if name in values}
    integers = kept.keys() & {"local_window_size", "rotary_interleaved", "smooth_softmax"}
    kept |= {name: int(kept[name]) for name in integers}  # exporters write numbers of either type
    at.add(PAGED_ATTENTION, operands, domain=COMPUTE, **kept)


def _set_dtype(graph: GraphProto, pairs: list[tuple[str, str]], dtype: int) -> None:
    """Declares that caches have the ONNX data type `dtype`; `pairs` are the names of their inputs
    and outputs. With int8, each row of a cache has its scale behind it, and is SCALE_BYTES
    longer."""
    caches = {name for pair in pairs for name in pair}
    for port in (*graph.input, *graph.output):
        if port.name in caches:
            port.type.tensor_type.elem_type = dtype
            if dtype == TensorProto.INT8:
                row = port.type.tensor_type.shape.dim[3]
                size = row.dim_value
                row.Clear()
                if size:
                    row.dim_value = size + SCALE_BYTES
                else:
                    row.dim_param = "cache_row"


def _set_ports(
    graph: GraphProto, ports: _Ports, pairs: list[tuple[str, str]], page_size: int
) -> None:
    """Declares new shapes of all inputs and outputs, and adds the inputs for pages: tables, rows,
    positions and picks (see `page_ports.py`). `pairs` are the names of each cache's input and
    output."""
    for port in (*graph.input, *graph.output):
        dims = port.type.tensor_type.shape.dim
        if port.name in {name for pair in pairs for name in pair}:
            dims[0].dim_param, dims[2].dim_value = PAGE_DIM, page_size
        elif port.name == ports.logits:
            dims[0].dim_value, dims[1].dim_param = 1, PICK_DIM
        elif port.name == ports.tokens or len(dims) == 2:
            dims[0].dim_value, dims[1].dim_param = 1, TOKEN_DIM
    added: dict[str, list[str | int]] = {
        TABLE: [TEXT_DIM, LENGTH_DIM],
        ROWS: [TOKEN_DIM],
        POSITIONS: [TOKEN_DIM],
        PICKS: [PICK_DIM],
    }
    taken = {i.name for i in graph.input}
    for name, shape in added.items():
        if name in taken:
            raise UnpagedError(f"it already has an input {name!r}")
        graph.input.append(helper.make_tensor_value_info(name, TensorProto.INT64, shape))
    del graph.value_info[:]


def _pick(graph: GraphProto, logits: str) -> None:
    """Inserts a Gather of the picked tokens before the product with weights that makes the logits,
    so that only their logits are computed. Elementwise nodes may follow the product. Errors:
    ModelError if another op makes the logits."""
    makers = {name: node for node in graph.node for name in node.output}
    readers = Counter(name for node in graph.node for name in node.input)
    stored = {w.name for w in graph.initializer}
    node = makers[logits]
    while node.op_type in _BEHIND:
        inner = [n for n in node.input if n in makers and not _is_constant(n, makers, stored)]
        if len(inner) != 1 or readers[inner[0]] != 1:
            break
        node = makers[inner[0]]
    if node.op_type not in _PRODUCTS:
        raise UnpagedError(f"its logits are made by {node.op_type}, not by a product with weights")
    every = _before_last(node.input[0], Scope(graph))
    picked = f"{every}/picked"
    gather = helper.make_node("Gather", [every, PICKS], [picked], "pick_tokens", axis=1)
    node.input[0] = picked
    at = list(graph.node).index(node)
    graph.node.insert(at, gather)


def _before_last(name: str, scope: Scope) -> str:
    """Returns the tensor of all tokens, if `name` is only its last token: some exporters compute
    the logits of that token alone, behind a Gather and perhaps an Unsqueeze. Otherwise returns
    `name`."""
    node = scope.maker(name)
    matches = (form.match(node, scope) for form in _LAST_TOKEN if node is not None)
    return next((at["every"] for at in matches if at is not None), name)


def _is_constant(name: str, makers: dict[str, NodeProto], stored: Collection[str]) -> bool:
    """True for a tensor that depends on stored tensors and constants alone."""
    if name in stored:
        return True
    maker = makers.get(name)
    return maker is not None and all(_is_constant(n, makers, stored) for n in maker.input)


def _remove_unread(graph: GraphProto) -> None:
    """Removes nodes that nothing reads any more, such as nodes that reshaped the mask."""
    nodes = nodes_before(graph.node, (o.name for o in graph.output))
    del graph.node[:]
    graph.node.extend(nodes)


def _remove_inputs(graph: GraphProto, names: Collection[str]) -> None:
    kept: list[ValueInfoProto] = [i for i in graph.input if i.name not in names]
    del graph.input[:]
    graph.input.extend(kept)


def _check_positions(name: str, graph: GraphProto) -> None:
    """Errors: ModelError unless the input `name` has the shape and the name of position ids."""
    port = next(i for i in graph.input if i.name == name)
    if "position" not in name or len(port.type.tensor_type.shape.dim) != 2:
        raise UnpagedError(f"its input {name!r} is neither token ids, position ids nor a cache")
