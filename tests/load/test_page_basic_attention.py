"""Attention in basic ops in pages: what is proved to be that of PagedAttention generates the tokens
of the unsplit model, and all else is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from decoders import VOCABULARY, Decoder, build, empty_caches, feeds_of, pairs_of
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

import onnxpar
from onnxpar.base.errors import ModelError
from onnxpar.graph.paged_attention import PAGED_ATTENTION, too_old
from onnxpar.llm.generator import Generator
from onnxpar.load.page_caches import page_caches

pytestmark = pytest.mark.skipif(too_old() is not None, reason=str(too_old()))
PLAIN = Decoder("plain", options={"spelling": "concat"})
Change = Callable[[GraphProto], None]


def attentions(graph: GraphProto, op: str) -> list[NodeProto]:
    """The nodes of an op that attentions have and nothing else."""
    found = [node for node in graph.node if node.op_type == op]
    assert len(found) == 2, "one for each layer"
    return found


def before(graph: GraphProto, node: NodeProto, index: int, *nodes: NodeProto) -> None:
    """Puts nodes, which read `x` and make `y`, before an operand of a node."""
    at = next(i for i, n in enumerate(graph.node) if n.output[0] == node.output[0])
    prefix = node.output[0]
    named = {"x": node.input[index]} | {o: f"{prefix}/{o}" for n in nodes for o in n.output}
    for offset, each in enumerate(nodes):
        made = NodeProto()
        made.CopyFrom(each)
        made.input[:] = [named.get(name, name) for name in each.input]
        made.output[:] = [named[name] for name in each.output]
        made.name = made.output[0]
        graph.node.insert(at + offset, made)
    graph.node[at + len(nodes)].input[index] = named["y"]


def constants(graph: GraphProto, **arrays: object) -> None:
    graph.initializer.extend(
        numpy_helper.from_array(np.asarray(array), name) for name, array in arrays.items()
    )


def node(op: str, inputs: str, output: str = "y", **attrs: object) -> NodeProto:
    return helper.make_node(op, inputs.split(), [output], **attrs)


def windowed(*widths: int) -> Change:
    """Hides keys that lie before a window, of another width in each layer."""

    def change(graph: GraphProto) -> None:
        for where, visible, width in zip(
            attentions(graph, "Where"), attentions(graph, "LessOrEqual"), widths, strict=True
        ):
            keys, at = visible.input
            name = f"width_{where.output[0]}"
            constants(graph, **{name: np.array(width)})
            first = node("Sub", f"{at} {name}", "first")
            inside = node("Greater", f"{keys} first", "inside")
            before(graph, where, 0, first, inside, node("And", "x inside"))

    return change


def seen(op: str, right: str | None = None) -> Change:
    """Compares keys with queries by another op, or with a constant."""

    def change(graph: GraphProto) -> None:
        constants(graph, three=np.array(3), many=np.array(10**6))
        for visible in attentions(graph, "LessOrEqual"):
            visible.op_type = op
            if right is not None:
                visible.input[1] = right

    return change


def prefix(graph: GraphProto) -> None:
    """Shows the first three keys to all."""
    constants(graph, three=np.array(3))
    for where, visible in zip(
        attentions(graph, "Where"), attentions(graph, "LessOrEqual"), strict=True
    ):
        first = node("Less", f"{visible.input[0]} three", "first")
        before(graph, where, 0, first, node("Or", "x first"))


def scored(*nodes: NodeProto, **arrays: object) -> Change:
    """Puts nodes between scores and mask."""

    def change(graph: GraphProto) -> None:
        constants(graph, **{n: np.asarray(a, np.float32) for n, a in arrays.items()})
        for where in attentions(graph, "Where"):
            before(graph, where, 1, *nodes)

    return change


def alibi(graph: GraphProto) -> None:
    """Adds a bias that grows with the distance of keys."""
    constants(graph, slope=np.float32(0.1))
    for where, visible in zip(
        attentions(graph, "Where"), attentions(graph, "LessOrEqual"), strict=True
    ):
        keys = node("Cast", visible.input[0], "keys", to=TensorProto.FLOAT)
        before(graph, where, 1, keys, node("Mul", "keys slope", "bias"), node("Add", "x bias"))


def weighted(*nodes: NodeProto, **arrays: object) -> Change:
    """Puts nodes between weights and values."""

    def change(graph: GraphProto) -> None:
        constants(graph, **{n: np.asarray(a, np.float32) for n, a in arrays.items()})
        for softmax in attentions(graph, "Softmax"):
            reader = next(n for n in graph.node if softmax.output[0] in n.input)
            before(graph, reader, 0, *nodes)

    return change


def hides_a_token(graph: GraphProto) -> None:
    """Hides keys where the token is 5."""
    constants(graph, five=np.array(5))
    for where in attentions(graph, "Where"):
        other = node("Equal", "input_ids five", "is_five")
        odd = [node("ReduceMax", "as_int", "any", keepdims=0), node("Cast", "any", "b", to=9)]
        made = [other, node("Cast", "is_five", "as_int", to=7), *odd, node("Or", "x b")]
        before(graph, where, 0, *made)


def guarded(graph: GraphProto) -> None:
    """Replaces NaN by zero, as scaled_dot_product_attention is exported."""
    constants(graph, none=np.float32(0))
    weighted(node("IsNaN", "x", "is_nan"), node("Where", "is_nan none x"))(graph)


def positions_added(graph: GraphProto) -> None:
    """Adds a row of a table for each position, which the attention mask counts."""
    rows = np.random.default_rng(3).standard_normal((96, PLAIN.hidden)).astype(np.float32)
    constants(graph, rows=rows, one_axis=np.array([1]), axis=np.array(1), two=np.array(2))
    constants(graph, ends=np.array([10**9]))
    graph.input.append(
        helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["batch", "total"])
    )
    constants(graph, zero=np.array([0]))
    made = [
        node("Shape", "past_key_values.0.key", "s"),
        node("Gather", "s two", "length"),
        node("CumSum", "attention_mask axis", "counted"),
        node("Unsqueeze", "length zero", "from"),
        node("Slice", "counted from ends one_axis", "own"),
        node("Add", "own two", "shifted"),
        node("Gather", "rows shifted", "row"),
        node("Add", "embedded row", graph.node[0].output[0]),
    ]
    graph.node[0].output[0] = "embedded"
    for offset, each in enumerate(made, 1):
        each.name = f"position_{offset}"
        graph.node.insert(offset, each)


def stored_mask(graph: GraphProto) -> None:
    """Takes the mask from a table of 300 positions, with a window of 200."""
    at, keys = np.arange(300)[:, None], np.arange(300)
    constants(graph, mask=((keys <= at) & (keys > at - 200)), minus=np.array([1]))
    for where, visible in zip(
        attentions(graph, "Where"), attentions(graph, "LessOrEqual"), strict=True
    ):
        keys_, column = visible.input
        made = [node("Gather", f"mask {keys_}", "by_key", axis=1)]
        made += [node("Squeeze", f"{column} minus", "rows"), node("Gather", "by_key rows")]
        before(graph, where, 0, *made)


KEPT: dict[str, tuple[Change, dict[str, object]]] = {
    "as-it-is": (lambda graph: None, {"scale": 0.25}),
    "window": (windowed(6, 6), {"local_window_size": 6}),
    "windows": (windowed(3, 40), {}),
    "long-window": (windowed(300, 300), {"local_window_size": 300}),
    "scaled": (scored(node("Mul", "x more"), more=2.5), {"scale": 0.625}),
    "capped": (
        scored(node("Div", "x c", "d"), node("Tanh", "d", "t"), node("Mul", "t c"), c=1.5),
        {"softcap": 1.5},
    ),
    "guarded": (guarded, {}),
    "positions": (positions_added, {}),
    "stored-mask": (stored_mask, {"local_window_size": 200}),
}
"""Changes after which attention is still that of PagedAttention, and its attributes then."""
REFUSED: dict[str, tuple[Change, str]] = {
    "bidirectional": (seen("LessOrEqual", "many"), "does not see all tokens up to its own"),
    "without-itself": (seen("Less"), "does not see all tokens up to its own"),
    "backwards": (seen("GreaterOrEqual"), "does not see all tokens up to its own"),
    "first-tokens-alone": (seen("LessOrEqual", "three"), "does not see all tokens up to its own"),
    "prefix": (prefix, "does not see all tokens up to its own"),
    "alibi": (alibi, "does not compute softmax"),
    "other-cap": (
        scored(node("Tanh", "x", "t"), node("Add", "x t")),
        "does not compute softmax",
    ),
    "clipped": (scored(node("Min", "x most"), most=0.5), "does not compute softmax"),
    "scaled-weights": (weighted(node("Mul", "x more"), more=1.1), "does not compute softmax"),
    "tokens-hide-keys": (hides_a_token, "neither the keys nor the values of an attention"),
}
"""Changes after which it is not, and the reason of the refusal."""


def changed(change: Change, decoder: Decoder = PLAIN) -> onnx.ModelProto:
    model = build(decoder)
    change(model.graph)
    return model


def unsplit(
    decoder: Decoder, model: onnx.ModelProto, prompt: Sequence[int], new: int
) -> tuple[list[int], list[float]]:
    """The tokens that onnxruntime generates greedily, and their logarithms of probabilities."""
    session = ort.InferenceSession(model.SerializeToString())
    names = [port.name for port in session.get_outputs()]
    caches, tokens, read = empty_caches(decoder, model, 1), list(prompt), 0
    chances = []
    while len(tokens) < len(prompt) + new:
        ids = np.array([tokens[read:]])
        found = session.run(None, {**feeds_of(decoder, model, ids, read), **caches})
        made = dict(zip(names, found, strict=True))
        caches = {past: made[present] for past, present in pairs_of(model).items()}
        logits, read = made["logits"][0, -1].astype(np.float64), len(tokens)
        chances.append(float(logits.max() - np.log(np.exp(logits).sum())))
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :], chances


def compare(decoder: Decoder, model: onnx.ModelProto, folder: Path, devices: int = 2) -> None:
    """Generates with pages of four tokens, prompts together and alone, and compares with the
    unsplit model."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, VOCABULARY, n).tolist() for n in (1, 23, 9)]
    onnx.save(model, folder / "model.onnx")
    onnxpar.shard(folder / "model.onnx", folder / "m.par", devices=devices, page_size=4)
    wanted = [unsplit(decoder, model, prompt, 24) for prompt in prompts]
    with Generator(folder / "m.par", timeout=30) as generator:
        for found in (
            generator.generate(prompts, max_new_tokens=24),
            [generator.generate(p, max_new_tokens=24)[0] for p in prompts],
        ):
            assert [c.tokens for c in found] == [tokens for tokens, _ in wanted]
            for completion, (_, chances) in zip(found, wanted, strict=True):
                np.testing.assert_allclose(completion.logprobs, chances, atol=2e-4)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("name", KEPT)
def test_pages_generate_the_tokens_of_the_unsplit_model(name: str, tmp_path: Path) -> None:
    change, attributes = KEPT[name]
    model = changed(change)
    paged = onnx.ModelProto()
    paged.CopyFrom(model)
    page_caches(paged, 4)
    found = [n for n in paged.graph.node if n.op_type == PAGED_ATTENTION]
    assert len(found) == 2
    for attention in found:
        own = {a.name: helper.get_attribute_value(a) for a in attention.attribute}
        assert {n: own[n] for n in attributes} == pytest.approx(attributes, rel=1e-6)
    compare(PLAIN, model, tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize("name", REFUSED)
def test_other_attention_is_refused(name: str) -> None:
    change, reason = REFUSED[name]
    with pytest.raises(ModelError, match=f"cannot be in pages, because .*{reason}.*--page-size 0"):
        page_caches(changed(change), 16)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("spelling", ["concat", "copies"])
@pytest.mark.parametrize("devices", [1, 3, 4])
def test_ranks_have_the_pages_of_their_heads(spelling: str, devices: int, tmp_path: Path) -> None:
    decoder = Decoder("plain", options={"spelling": spelling})
    compare(decoder, build(decoder), tmp_path, devices)


def test_a_merged_decoder_takes_its_branch_with_past(tmp_path: Path) -> None:
    """As Optimum merges a decoder without caches and one with them."""
    model = build(PLAIN)
    merged = onnx.ModelProto()
    merged.CopyFrom(model)
    outputs = [o.name for o in model.graph.output]
    own = helper.make_graph(list(model.graph.node), "with_past", [], list(model.graph.output))
    other = helper.make_graph([], "no_past", [], [])
    for port in model.graph.output:
        kept = port.name.replace("present", "past_key_values")
        source = kept if kept != "logits" else "past_key_values.0.key"
        other.node.append(helper.make_node("Identity", [source], [f"{port.name}_none"]))
        other.output.append(helper.make_empty_tensor_value_info(f"{port.name}_none"))
    del merged.graph.node[:]
    merged.graph.node.append(
        helper.make_node("If", ["use_cache_branch"], outputs, then_branch=own, else_branch=other)
    )
    merged.graph.input.append(
        helper.make_tensor_value_info("use_cache_branch", TensorProto.BOOL, [1])
    )
    page_caches(merged, 4)
    page_caches(model, 4)
    assert merged.graph.node == model.graph.node
    assert [i.name for i in merged.graph.input] == [i.name for i in model.graph.input]


def test_half_precision_is_measured_too() -> None:
    model = build(Decoder("plain", "float16", options={"spelling": "concat"}))
    page_caches(model, 4)
    found = [n for n in model.graph.node if n.op_type == PAGED_ATTENTION]
    scales = [a.f for n in found for a in n.attribute if a.name == "scale"]
    assert scales == [0.25, 0.25]


FUSED = {
    "Attention": Decoder("Attention", options={"opset": 23}),
    "Attention-of-four-dimensions": Decoder("Attention", options={"opset": 23, "flat": False}),
    "MultiHeadAttention": Decoder("MultiHeadAttention"),
}


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("name", FUSED)
def test_ops_of_attention_have_pages(name: str, tmp_path: Path) -> None:
    compare(FUSED[name], build(FUSED[name]), tmp_path)


@pytest.mark.parametrize(
    "name,given", [("Attention", {"is_causal": 0}), ("MultiHeadAttention", {"unidirectional": 0})]
)
def test_ops_of_attention_that_see_later_tokens_are_refused(
    name: str, given: dict[str, int]
) -> None:
    model = build(FUSED[name])
    for attention in attentions(model.graph, name):
        kept = [a for a in attention.attribute if a.name not in given]
        del attention.attribute[:]
        attention.attribute.extend([*kept, *(helper.make_attribute(*i) for i in given.items())])
    with pytest.raises(ModelError, match="does not compute softmax"):
        page_caches(model, 16)


@pytest.mark.parametrize("spelling", ["rows first", "behind a transpose"])
def test_caches_in_another_order_are_refused(spelling: str) -> None:
    with pytest.raises(ModelError, match=r"neither a Concat nor an attention|neither token ids"):
        page_caches(build(Decoder("plain", options={"spelling": spelling})), 16)


@pytest.mark.parametrize("decoder", [PLAIN, FUSED["Attention"]], ids=str)
def test_keys_that_are_read_elsewhere_are_refused(decoder: Decoder) -> None:
    def change(graph: GraphProto) -> None:
        most = node("ReduceMax", "present.0.key", "m", keepdims=0)
        before(graph, graph.node[-1], 0, most, node("Add", "x m"))

    with pytest.raises(ModelError, match=r"nodes read what|which pages do not have"):
        page_caches(changed(change, decoder), 16)


def test_the_order_of_new_tokens_is_no_position() -> None:
    def number(graph: GraphProto) -> None:
        constants(graph, one=np.array(1), none=np.array(0), axis=np.array([1]))
        made = [node("Shape", "input_ids", "s"), node("Gather", "s one", "n")]
        made += [node("Range", "none n one", "r"), node("Unsqueeze", "r axis", "column")]
        made += [node("Cast", "column", "f", to=TensorProto.FLOAT), node("Add", "x f")]
        before(graph, graph.node[-1], 0, *made)

    with pytest.raises(ModelError, match="depends on the order of new tokens"):
        page_caches(changed(number), 16)


def test_bodies_are_refused() -> None:
    def choose(graph: GraphProto) -> None:
        constants(graph, yes=np.array(True))
        made = helper.make_node("Identity", ["present.0.key"], ["inner"])
        body = helper.make_graph([made], "b", [], [helper.make_empty_tensor_value_info("inner")])
        graph.node.append(
            helper.make_node("If", ["yes"], ["if"], then_branch=body, else_branch=body, name="if")
        )

    with pytest.raises(ModelError, match="If 'if' has bodies"):
        page_caches(changed(choose), 16)


def test_what_needs_the_length_of_texts_is_refused() -> None:
    """A factor that grows with the number of all tokens is no position."""

    def grow(graph: GraphProto) -> None:
        constants(graph, two=np.array(2))
        past = [node("Shape", "present.0.key", "s"), node("Gather", "s two", "n")]
        last = graph.node[-1]
        before(graph, last, 0, *past, node("Cast", "n", "f", to=1), node("Div", "x f"))

    with pytest.raises(ModelError, match=r"Shape .* reads 'present.0.key', which pages do not"):
        page_caches(changed(grow), 16)
