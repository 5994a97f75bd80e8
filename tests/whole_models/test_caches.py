"""Decoders whose caches stay on their ranks give what the unsplit loop gives, token by token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from agreement import TIMEOUT, check_outputs, options, relative_error
from decoders import (
    VOCABULARY,
    Decoder,
    build,
    empty_caches,
    feeds_of,
    pairs_of,
)
from onnx import helper

import onnxpar
from onnxpar.base.errors import OnnxparError
from onnxpar.compiler.plan import Plan
from onnxpar.graph.typical import Typical
from onnxpar.load.load import load
from onnxpar.load.loading import LoadRequest
from onnxpar.planner import sharder
from onnxpar.report.check import Way, check_model
from onnxpar.report.plan_text import plan_lines
from onnxpar.runtime.session.threads import ThreadSession

TOKENS = {1: 32, 2: 6, 5: 4}
"""By batch, so that one request is long."""
PROMPTS = ((1, 3, 5), (2, 4), (5, 1))
"""Batch and tokens of the prompt, of one request also of a prompt after the first one's tokens:
GroupQueryAttention takes such only alone."""
GQA = "GroupQueryAttention"
DECODERS = [
    Decoder(GQA),
    Decoder(GQA, "float16"),
    Decoder(GQA, shared=4, options={"packed": False, "positions": True}),
    Decoder(GQA, options={"lengths": "vector"}),
    Decoder(GQA, options={"lengths": "column"}),
    Decoder(GQA, length=48),
    Decoder(GQA, "int4"),
    Decoder(GQA, "int4", options={"packed": False, "points": False}),
    Decoder(GQA, "int4", heads=3, shared=3, options={"packed": False}),
    Decoder(GQA, "int4", heads=6, shared=3),
    Decoder(GQA, "int4", options={"paired": True}),
    Decoder(GQA, options={"named": "head_width"}),
    Decoder(GQA, options={"window": 8}),
    Decoder(GQA, length=8, options={"window": 8}),
    Decoder("MultiHeadAttention"),
    Decoder("MultiHeadAttention", options={"named": "head_width"}),
    Decoder("com.microsoft.Attention"),
    Decoder("DecoderMaskedMultiHeadAttention", length=48, options={"one": True}),
    Decoder("Attention", options={"opset": 23}),
    Decoder("Attention", "float16", options={"opset": 23}),
    Decoder("Attention", shared=4, options={"opset": 24, "flat": False}),
    *(
        Decoder("plain", options={"spelling": spelling})
        for spelling in ("concat", "copies", "rows first", "behind a transpose")
    ),
    Decoder("plain", "float16", options={"spelling": "concat"}),
    *(
        Decoder("plain", length=48, options={"spelling": spelling, "opset": 24})
        for spelling in ("ScatterND", "ScatterElements", "TensorScatter")
    ),
    Decoder("plain", length=48, options={"spelling": "Where", "one": True}),
]


class Loop:
    """The unsplit model and the ranks side by side, one request after the other."""

    def __init__(self, decoder: Decoder, folder: Path, ranks: int, layout: str = "") -> None:
        self.decoder, self.model = decoder, build(decoder)
        self.model_file = file = folder / "decoder.onnx"
        onnx.save(self.model, file)
        self.pairs = pairs_of(self.model)
        how = options(layout or f"tensor-parallel {ranks}")
        self.plan: Plan = sharder.shard(file, folder / "m.par", how)
        self.folder = folder / "m.par"
        quiet = ort.SessionOptions()
        quiet.log_severity_level = 3
        self.whole = ort.InferenceSession(str(file), quiet, ["CPUExecutionProvider"])
        self.tolerance = 5e-3 if decoder.weights == "float16" else 1e-5

    def check(self, wanted: np.ndarray, got: np.ndarray, what: str) -> None:
        assert got.shape == wanted.shape and got.dtype == wanted.dtype, (what, got.shape)
        error = relative_error(got, wanted)
        assert error <= self.tolerance, f"{what}: {error:.1e}"

    def request(self, session: ThreadSession, batch: int, prompts: tuple[int, ...]) -> None:
        """Prompts with tokens between and behind them; caches are fed to the first run alone."""
        random = np.random.default_rng(batch)
        caches = empty_caches(self.decoder, self.model, batch)
        fed, before = dict(caches), 0
        for count, seq in enumerate(prompts):
            ids = random.integers(0, VOCABULARY, (batch, seq))
            for step in range(TOKENS[batch] // len(prompts)):
                feeds = feeds_of(self.decoder, self.model, ids, before)
                names = ["logits", *self.pairs.values()]
                wanted = dict(zip(names, self.whole.run(names, feeds | caches), strict=True))
                (logits,) = session.run(None, feeds | fed, keep_states=True)
                self.check(wanted["logits"], logits, f"prompt {count}, step {step}")
                caches, fed = {i: wanted[o] for i, o in self.pairs.items()}, {}
                before += ids.shape[1]
                ids = wanted["logits"][:, -1:].argmax(-1)
        window = self.decoder.options.get("window") == self.decoder.length
        held = slice(before) if window else slice(None)  # the kernel leaves the rest as it is
        for name, wanted in caches.items():
            have = session.states.read(name)
            assert have.shape == wanted.shape
            self.check(wanted[:, :, held], have[:, :, held], name)


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("decoder", DECODERS, ids=str)
def test_a_decoder_keeps_its_caches_on_the_ranks(
    decoder: Decoder, ranks: int, tmp_path: Path
) -> None:
    loop = Loop(decoder, tmp_path, ranks)
    assert dict(loop.plan.states) == loop.pairs
    gathered = [c.tensor for c in loop.plan.collectives if "past" in c.tensor or "pres" in c.tensor]
    assert not gathered, "caches travel"
    with ThreadSession(loop.folder, timeout=TIMEOUT) as session:
        for batch, *prompts in PROMPTS:
            session.states.reset()
            one = decoder.options.get("one")
            loop.request(session, batch, (1,) * len(prompts) if one else tuple(prompts))


FIXED = [d for d in DECODERS if d.cache == "plain" and d.length]


def cache_layouts(plan: Plan, decoder: Decoder, part: str = "") -> set[str]:
    layouts = {p.name: p.layout for p in [*plan.inputs, *plan.outputs]}
    names = [name for pair in pairs_of(build(decoder)).items() for name in pair]
    each = [layouts[name] for name in names if name.endswith(part)]
    return {layout.text(plan.mesh) for layout in each if layout is not None}


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("mesh", ["cp=2", "cp=5", "cp=2,tp=2"])
@pytest.mark.parametrize("decoder", FIXED, ids=str)
def test_a_cache_of_fixed_length_is_split_by_positions(
    decoder: Decoder, mesh: str, tmp_path: Path
) -> None:
    """Over 5 ranks, a rank has 9 or 10 of 48 positions, so prompts begin and end inside shards."""
    loop = Loop(decoder, tmp_path, 0, f"context-parallel {mesh}")
    heads = "tp" if "tp" in mesh else "-"
    assert cache_layouts(loop.plan, decoder) == {f"[-, {heads}, cp, -]"}
    one = {"batch": 1} if decoder.options.get("one") else {"batch": 1, "seq": 1}
    how = replace(options(f"context-parallel {mesh}"), typical=Typical.from_argument(one))
    made = sharder.plan(loop.model_file, how)[0]
    # Of the new token: keys, values, queries and results; for the softmax, a number for each head
    # that a rank attends with. Never a cache.
    assert max(c.bytes for c in made.collectives) <= 4 * decoder.hidden * 2
    inner = [c.bytes for c in made.collectives if c.tensor.startswith("in Softmax")]
    cp, tp = made.mesh.sizes["cp"], made.mesh.sizes.get("tp", 1)
    assert inner == [int(2 * 4 * decoder.heads // tp * (cp - 1) / cp)] * 4
    with ThreadSession(loop.folder, timeout=TIMEOUT) as session:
        for batch, *prompts in PROMPTS:
            session.states.reset()
            one = decoder.options.get("one")
            loop.request(session, batch, (1,) * len(prompts) if one else tuple(prompts))


INSIDE = [
    Decoder(GQA, length=48),
    Decoder(GQA, "float16", length=48),
    Decoder(GQA, length=48, shared=4, options={"packed": False}),
    Decoder(GQA, length=48, options={"lengths": "vector"}),
    Decoder(GQA, length=48, options={"lengths": "column"}),
]
"""Decoders whose op has a cache of fixed length inside."""


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("how", ["context-parallel cp=2", "ring-attention cp=5", "cp=2,tp=2"])
@pytest.mark.parametrize("decoder", INSIDE, ids=str)
def test_a_cache_inside_an_op_is_split_by_positions(
    decoder: Decoder, how: str, tmp_path: Path
) -> None:
    """A long request, and others with a cache of their own. Each rank writes the new tokens that
    have its positions; ranks exchange two numbers and a result for each head."""
    how = how if " " in how else f"context-parallel {how}"
    loop = Loop(decoder, tmp_path, 0, how)
    heads = "tp" if "tp" in how else "-"
    assert cache_layouts(loop.plan, decoder) == {f"[-, {heads}, cp, -]"}
    one = Typical.from_argument({"batch": 1, "seq": 1})
    made = sharder.plan(loop.model_file, replace(options(how), typical=one))[0]
    assert max(c.bytes for c in made.collectives) <= 4 * decoder.hidden * 4
    with ThreadSession(loop.folder, timeout=TIMEOUT) as session:
        for batch, *prompts in PROMPTS:
            session.states.reset()
            loop.request(session, batch, tuple(prompts))


def test_padded_prompts_and_full_caches_inside_an_op(tmp_path: Path) -> None:
    """A token after the end of its sample sees what the sample has. More tokens than a cache has
    places for are an error on ranks as in onnxruntime."""
    decoder = Decoder(GQA, length=48, options={"lengths": "vector"})
    loop = Loop(decoder, tmp_path, 0, "context-parallel cp=3")
    caches = empty_caches(decoder, loop.model, 2)
    names = ["logits", *loop.pairs.values()]

    def feeds(ids: np.ndarray, lengths: list[int], total: int) -> dict[str, np.ndarray]:
        found = dict(feeds_of(decoder, loop.model, ids, 0)) | caches
        found["seqlens_k"] = np.array(lengths, np.int32) - 1
        return found | {"total_sequence_length": np.array(total, np.int32)}

    ids = np.random.default_rng(0).integers(0, VOCABULARY, (2, 5))
    with ThreadSession(loop.folder, timeout=TIMEOUT) as session:
        for lengths in ([5, 3], [1, 5]):
            fed = feeds(ids, lengths, 5)
            check_outputs(session.run(names, fed), loop.whole.run(names, fed), names)
            session.states.reset()
        late = feeds(ids[:, :1], [51, 51], 51)
        with pytest.raises(Exception, match="total_sequence_length"):
            loop.whole.run(names, late)
        with pytest.raises(OnnxparError, match="out of range"):
            session.run(names, late)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    "decoder",
    [Decoder(GQA), Decoder(GQA, length=48, options={"window": 8}), Decoder("MultiHeadAttention")],
    ids=str,
)
def test_other_caches_inside_ops_stay_whole_along_positions(
    decoder: Decoder, tmp_path: Path
) -> None:
    loop = Loop(decoder, tmp_path, 0, "context-parallel cp=2")
    with ThreadSession(loop.folder, timeout=TIMEOUT) as session:
        loop.request(session, 1, (3,))


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("decoder", FIXED, ids=str)
def test_rings_leave_caches_where_they_are(decoder: Decoder, tmp_path: Path) -> None:
    """Attention to a cache that is split by positions is no ring: under ring-attention, too, ranks
    combine what they attend to."""
    loop = Loop(decoder, tmp_path, 0, "ring-attention cp=5")
    assert cache_layouts(loop.plan, decoder) == {"[-, -, cp, -]"}
    with ThreadSession(loop.folder, timeout=TIMEOUT) as session:
        for batch, *prompts in PROMPTS:
            session.states.reset()
            one = decoder.options.get("one")
            loop.request(session, batch, (1,) * len(prompts) if one else tuple(prompts))


@pytest.mark.slow
def test_the_search_splits_a_cache_by_positions_where_heads_run_out(tmp_path: Path) -> None:
    """One head with a long cache: keys by positions, and values too, or by width; the scores are
    what ranks exchange, or less."""
    decoder = Decoder("plain", "float32", 1, 1, 256, 16384, {"spelling": "TensorScatter"})
    decoder = replace(decoder, options={**decoder.options, "opset": 24})
    onnx.save(build(decoder), tmp_path / "decoder.onnx")
    made = onnxpar.plan(tmp_path / "decoder.onnx", devices=4, typical={"batch": 1, "seq": 1})
    assert "[-, -, -, -]" not in cache_layouts(made, decoder)
    assert cache_layouts(made, decoder, ".key") == {"[-, -, tp, -]"}
    assert max(c.bytes for c in made.collectives) <= 4 * decoder.length


@pytest.mark.slow
@pytest.mark.parametrize("cache", [GQA, "MultiHeadAttention"])
def test_nobody_is_warned_of_a_width_that_attributes_give(
    cache: str, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    loop = Loop(Decoder(cache, options={"named": "head_width"}), tmp_path, 2)
    shapes = [port["shape"] for port in loop.plan.to_json()["inputs"]]
    assert not [shape for shape in shapes if "head_width" in shape]
    assert not [w for w in recwarn if "in every run" in str(w.message)]


def test_an_op_that_takes_one_token_fixes_an_open_length(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """At other lengths onnxruntime refuses it, so that its heads could not be split."""
    loop = Loop(Decoder("DecoderMaskedMultiHeadAttention", length=48), tmp_path, 2)
    ports = {p["name"]: p["shape"] for p in loop.plan.to_json()["inputs"]}
    assert ports["input_ids"][1] == 1 and isinstance(ports["input_ids"][0], str)
    assert not [c for c in loop.plan.collectives if c.kind != "AllReduce"]
    assert "whole" not in "\n".join(plan_lines(loop.plan.to_json()))
    assert not [w for w in recwarn if "in every run" in str(w.message)]
    with ThreadSession(loop.folder, timeout=TIMEOUT) as session:
        loop.request(session, 2, (1,) * 6)


@pytest.mark.slow
def test_what_a_run_returns_is_whole(tmp_path: Path) -> None:
    """Keys of a length that the values of an operand decide, returned and not kept."""
    decoder = Decoder(GQA)
    loop = Loop(decoder, tmp_path, 2)
    ids = np.arange(10).reshape(2, 5)
    feeds = feeds_of(decoder, loop.model, ids, 0) | empty_caches(decoder, loop.model, 2)
    wanted = loop.whole.run(None, feeds)
    with ThreadSession(loop.folder, timeout=TIMEOUT) as session:
        check_outputs(session.run(None, feeds), wanted, [p.name for p in loop.plan.outputs])


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
def test_weights_in_blocks_are_never_gathered(ranks: int, paired: bool, tmp_path: Path) -> None:
    """The runtime quantizes activations only for a weight that is stored."""
    loop = Loop(Decoder(GQA, "int4", options={"paired": paired}), tmp_path, ranks)
    stored = {t.name for t in loop.model.graph.initializer}
    stored |= {n.output[0] for n in loop.model.graph.node if n.op_type == "DequantizeLinear"}
    assert not [c.tensor for c in loop.plan.collectives if c.tensor in stored]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("past_key_values.{}.key", "present.{}.key"),
        ("past_key_values_{}_key", "present_key_{}"),
        ("past.{}.key", "present.{}.key"),
        ("past_{}", "present_{}"),
        ("cache_k_in_{}", "cache_k_out_{}"),
        ("key_cache.{}", "updated_key_cache.{}"),
        ("h{}_in", "h{}_out"),
        ("state", "stateN"),
        ("h", "hn"),
        ("past_key_values.{}.encoder.key", "present.{}.encoder.key"),
    ],
)
def test_states_are_found_by_names(before: str, after: str, tmp_path: Path) -> None:
    """What no op tells: the output is made by arithmetic, or passes through."""
    layers = (0, 1) if "{}" in before else (0,)
    ports = [(before.format(i), after.format(i)) for i in layers]
    shape = ["n", 4]
    nodes = [
        helper.make_node(("Sigmoid", "Identity")[i], [a], [b]) for i, (a, b) in enumerate(ports)
    ]
    file = plain_model(tmp_path, nodes, ports, shape, shape)
    assert load(file).states == ports
    assert not load(file, LoadRequest(find_states=False)).states


@pytest.mark.parametrize(
    ("before", "after", "lengths"),
    [
        ("image_in", "image_out", [4, 4]),  # no word for a state
        ("hidden_states", "hidden_states_out", [4, 4]),  # of a layer, not of a run
        ("past_key", "present_value", [4, 4]),
        ("past_key", "present_key", [4, 5]),  # two dimensions differ: see below
    ],
)
def test_what_names_do_not_tell(
    before: str, after: str, lengths: list[int], tmp_path: Path
) -> None:
    a, b = lengths
    pads = [0, 0, b - a, b - a]
    nodes = [
        helper.make_node("Constant", [], ["pads"], value_ints=pads),
        helper.make_node("Pad", [before, "pads"], [after]),
    ]
    assert not load(plain_model(tmp_path, nodes, [(before, after)], [a, a], [b, b])).states


def plain_model(
    folder: Path,
    nodes: list[onnx.NodeProto],
    ports: list[tuple[str, str]],
    before: list[int | str],
    after: list[int | str],
) -> Path:
    """Writes a model of these nodes, of which every input and output is float32."""
    inputs, outputs = (
        [helper.make_tensor_value_info(pair[i], 1, shape) for pair in ports]
        for i, shape in enumerate((before, after))
    )
    graph = helper.make_graph(nodes, "plain", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    onnx.save(model, folder / "plain.onnx")
    return folder / "plain.onnx"


def test_a_state_that_lacks_its_pair_is_named(tmp_path: Path) -> None:
    """Of six layers, one passes what no output follows."""
    ports = [(f"past_key_values.{i}.key", f"present.{i}.key") for i in range(6)]
    nodes = [helper.make_node("Neg", [a], [b]) for a, b in ports]
    file = plain_model(tmp_path, nodes, ports, [4, 6], [4, 6])
    model = onnx.load(file)
    model.graph.output[4].name = model.graph.node[4].output[0] = "other"
    onnx.save(model, file)
    with pytest.warns(UserWarning, match=r"'past_key_values\.4\.key': named like a state"):
        plan, _ = sharder.plan(file, options("tensor-parallel 2"))
    assert plan.unpaired == ["past_key_values.4.key"]
    text = "\n".join(plan_lines(plan.to_json()))
    assert "5 state pairs" in text and "named like a state, but no output is paired with it" in text
    assert "past_key_values.5.key  present.5.key" in text


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("decoder", DECODERS, ids=str)
def test_check_makes_feeds_that_the_model_takes(decoder: Decoder, tmp_path: Path) -> None:
    file = tmp_path / "decoder.onnx"
    onnx.save(build(decoder), file)
    assert check_model(file, options("data-parallel 2"), Way()).ok


@pytest.mark.slow
@pytest.mark.parametrize("is_mixed", [False, True])
def test_made_up_caches_of_the_last_tokens_are_full(is_mixed: bool, tmp_path: Path) -> None:
    """They are as long as the window, also beside a layer whose cache grows."""
    window = 60
    model = build(Decoder(GQA, length=window, options={"window": window}))
    if is_mixed:
        node = [n for n in model.graph.node if n.op_type == GQA][1]
        kept = [a for a in node.attribute if "window" not in a.name]
        del node.attribute[:]
        node.attribute.extend(kept)
    for port in (*model.graph.input, *model.graph.output):
        if port.name.startswith(("past", "present")):
            grows = is_mixed and ".1." in port.name
            symbol = {"past": "before", "pres": "after"}[port.name[:4]] if grows else "last"
            port.type.tensor_type.shape.dim[2].dim_param = symbol
    file = tmp_path / "decoder.onnx"
    onnx.save(model, file)
    checked = check_model(file, options("tensor-parallel 2"), Way())
    assert checked.ok and "unsplit model changes by" not in checked.text()
    found = {row.name: row for row in checked.report.rows}
    assert found["present.0.key"].shape[2] >= window


@pytest.mark.slow
@pytest.mark.parametrize("write_at", [[47, 0], [-1, 0]])
def test_a_write_outside_of_a_split_cache_is_an_error(write_at: list[int], tmp_path: Path) -> None:
    """As with onnxruntime, which else would not write it."""
    decoder = next(d for d in FIXED if d.options["spelling"] == "TensorScatter")
    loop = Loop(decoder, tmp_path, 0, "context-parallel cp=2")
    feeds = feeds_of(decoder, loop.model, np.zeros((2, 2), np.int64), 0)
    feeds |= empty_caches(decoder, loop.model, 2) | {"write_at": np.array(write_at)}
    with pytest.raises(Exception, match="TensorScatter"):
        loop.whole.run(None, feeds)
    with (
        ThreadSession(loop.folder, timeout=TIMEOUT) as session,
        pytest.raises(OnnxparError, match="TensorScatter_10"),
    ):
        session.run(None, feeds)
