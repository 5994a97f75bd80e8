"""Decoders of encoder-decoder models: caches of their own tokens, which grow, and of the encoder's,
which do not; also those that choose by an If whether there are caches yet."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from agreement import TIMEOUT, check_outputs, options
from onnx import numpy_helper

from onnxpar.base.errors import InputError
from onnxpar.compiler.plan import Plan
from onnxpar.planner import sharder
from onnxpar.report.plan_text import plan_lines
from onnxpar.runtime.session.threads import ThreadSession

HEADS, WIDTH, VOCABULARY, FRAMES = 4, 4, 24, 7
HIDDEN = HEADS * WIDTH
CACHES = ("decoder_key", "decoder_value", "encoder_key", "encoder_value")
EMPTY = f"Constant <value = float[0, {HEADS}, 1, {WIDTH}] {{}}> ()"
Feeds = dict[str, np.ndarray]


def heads(name: str, source: str, weight: str) -> str:
    """Projects, and takes the heads apart."""
    return f"""
        {name}_flat = MatMul ({source}, {weight})
        {name}_cut = Reshape ({name}_flat, to_heads)
        {name} = Transpose <perm = [0, 2, 1, 3]> ({name}_cut)"""


def attention(name: str, source: str, key: str, value: str) -> str:
    """Attends to keys and values, and adds what was attended."""
    return f"""
        {heads(f"{name}_q", source, f"{name}_wq")}
        {name}_kt = Transpose <perm = [0, 1, 3, 2]> ({key})
        {name}_scores = MatMul ({name}_q, {name}_kt)
        {name}_weights = Softmax ({name}_scores)
        {name}_seen = MatMul ({name}_weights, {value})
        {name}_back = Transpose <perm = [0, 2, 1, 3]> ({name}_seen)
        {name}_joined = Reshape ({name}_back, to_hidden)
        {name}_out = MatMul ({name}_joined, {name}_wo)
        {name} = Add ({source}, {name}_out)"""


def step(is_first: bool) -> str:
    """A step before which there are no caches, or one with them; makes `cross`, and `self_k`,
    `self_v`, `cross_k` and `cross_v`, which later steps are fed."""
    nodes = "x = Gather (table, input_ids)"
    for letter, kind in (("k", "key"), ("v", "value")):
        nodes += heads(f"new_{letter}", "x", f"self_w{letter}")
        if is_first:
            nodes += f"\nself_{letter} = Identity (new_{letter})"
            nodes += heads(f"cross_{letter}", "encoder_hidden_states", f"cross_w{letter}")
        else:
            past = f"past_key_values_0_decoder_{kind}"
            nodes += f"\nself_{letter} = Concat <axis = 2> ({past}, new_{letter})"
            nodes += f"\ncross_{letter} = Identity (past_key_values_0_encoder_{kind})"
    nodes += attention("self", "x", "self_k", "self_v")
    return nodes + attention("cross", "self", "cross_k", "cross_v")


def save(path: Path, inputs: list[str], outputs: list[str], nodes: str) -> Path:
    """The model that these nodes make, with small weights."""
    text = f"decoder ({', '.join(inputs)}) => ({', '.join(outputs)}) {{ {nodes} }}"
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]>\n{text}')
    source = np.random.default_rng(0)
    shapes = {f"{a}_w{b}": (HIDDEN, HIDDEN) for a in ("self", "cross") for b in "qkvo"}
    shapes |= {"table": (VOCABULARY, HIDDEN), "head": (HIDDEN, VOCABULARY)}
    for name, shape in shapes.items():
        weight = source.standard_normal(shape).astype(np.float32) / 3
        model.graph.initializer.append(numpy_helper.from_array(weight, name))
    for name, target in (("to_heads", [0, 0, HEADS, WIDTH]), ("to_hidden", [0, 0, HIDDEN])):
        model.graph.initializer.append(numpy_helper.from_array(np.array(target), name))
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path


def cache(kind: str) -> str:
    """The type of an input of a cache."""
    length = "frames" if "encoder" in kind else "past"
    return f"float[batch, {HEADS}, {length}, {WIDTH}] past_key_values_0_{kind}"


def present(kind: str) -> str:
    """The type of its output."""
    length = "frames" if "encoder" in kind else "total"
    return f"float[batch, {HEADS}, {length}, {WIDTH}] present_0_{kind}"


IDS = "int64[batch, seq] input_ids"
ENCODED = f"float[batch, frames, {HIDDEN}] encoder_hidden_states"
LOGITS = f"float[batch, seq, {VOCABULARY}] logits"
MADE = ("self_k", "self_v", "cross_k", "cross_v")


def with_past(path: Path, hands_on: bool) -> Path:
    """A decoder of later steps, which returns the encoder's caches as they are, or does not."""
    kept = CACHES if hands_on else CACHES[:2]
    nodes = step(False) + "\nlogits = MatMul (cross, head)"
    nodes += "".join(
        f"\npresent_0_{kind} = Identity ({made})" for kind, made in zip(kept, MADE, strict=False)
    )
    return save(path, [IDS, *map(cache, CACHES)], [LOGITS, *map(present, kept)], nodes)


def merged(path: Path) -> Path:
    """A decoder of all steps, of which one branch has no use for the encoder's caches, the other
    none for what they are made of; it returns empty ones."""
    outputs = ["hidden", *(f"present_0_{kind}" for kind in CACHES)]
    types = "float[a, b, c] cross, " + ", ".join(
        f"float[{m}_0, {m}_1, {m}_2, {m}_3] {m}" for m in MADE
    )
    again = step(False).replace("cross_k = Identity", "kept_k = Identity")
    again = again.replace("cross_v = Identity", "kept_v = Identity")
    again = again.replace("(cross_k)", "(kept_k)").replace(", cross_v)", ", kept_v)")
    again += f"\ncross_k = {EMPTY}\ncross_v = {EMPTY}"
    branches = (
        f"then_branch = again () => ({types}) {{ {again} }}, "
        f"else_branch = first () => ({types}) {{ {step(True)} }}"
    )
    nodes = f"{', '.join(outputs)} = If (use_cache_branch) <{branches}>"
    nodes += "\nlogits = MatMul (hidden, head)"
    inputs = [IDS, ENCODED, *map(cache, CACHES), "bool[1] use_cache_branch"]
    return save(path, inputs, [LOGITS, *map(present, CACHES)], nodes)


class Decoding:
    """The unsplit model and the ranks side by side."""

    def __init__(self, model: Path, folder: Path, layout: str) -> None:
        self.plan: Plan = sharder.shard(model, folder, options(layout))
        self.whole = ort.InferenceSession(str(model), providers=["CPUExecutionProvider"])
        self.inputs = {port.name for port in self.whole.get_inputs()}
        self.outputs = [port.name for port in self.whole.get_outputs()]
        self.pairs = dict(self.plan.states)

    def unsplit(self, feeds: Feeds) -> Feeds:
        return dict(zip(self.outputs, self.whole.run(None, feeds), strict=True))

    def loop(self, session: ThreadSession, feeds: Feeds, caches: Feeds, steps: int) -> None:
        """Steps that are fed what ranks do not keep; `feeds` are fed to each."""
        ids = np.zeros((len(caches[f"past_key_values_0_{CACHES[0]}"]), 1), np.int64)
        fed = dict(caches)
        for _ in range(steps):
            wanted = self.unsplit(feeds | caches | {"input_ids": ids})
            (logits,) = session.run(["logits"], feeds | fed | {"input_ids": ids}, keep_states=True)
            check_outputs([logits], [wanted["logits"]], ["logits"])
            caches = {n: wanted[self.pairs[n]] if n in self.pairs else v for n, v in caches.items()}
            fed = {n: v for n, v in caches.items() if n not in self.pairs}
            ids = wanted["logits"][:, -1:].argmax(-1)
        kept = [session.states.read(name) for name in self.pairs]
        check_outputs(kept, [caches[name] for name in self.pairs], list(self.pairs))


def random_caches(batch: int, past: int, frames: int) -> Feeds:
    """Caches of so many tokens and frames."""
    source = np.random.default_rng(batch)
    lengths = {"decoder": past, "encoder": frames}
    return {
        f"past_key_values_0_{kind}": source.standard_normal(
            (batch, HEADS, lengths[kind.split("_")[0]], WIDTH)
        ).astype(np.float32)
        for kind in CACHES
    }


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("hands_on", [True, False])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_decoder_with_caches_of_both_kinds(ranks: int, hands_on: bool, tmp_path: Path) -> None:
    """One request after the other, also of another batch and after more tokens."""
    model = with_past(tmp_path / "decoder.onnx", hands_on)
    both = Decoding(model, tmp_path / "m.par", f"tensor-parallel {ranks}")
    assert len(both.pairs) == (4 if hands_on else 2)
    with ThreadSession(tmp_path / "m.par", timeout=TIMEOUT) as session:
        for batch, past, frames in ((1, 1, FRAMES), (1, 4, 5), (3, 0, FRAMES)):
            session.states.reset()
            both.loop(session, {}, random_caches(batch, past, frames), 6)


def first_caches(batch: int, length: int) -> Feeds:
    """Dummies of the first step."""
    zeros = np.zeros((batch, HEADS, length, WIDTH), np.float32)
    return {f"past_key_values_0_{kind}": zeros for kind in CACHES}


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["tensor-parallel 3", "3", "data-parallel 2"])
def test_a_decoder_that_chooses_its_step_by_an_if(layout: str, tmp_path: Path) -> None:
    """The dummies of the first step are of no tokens, or of one."""
    both = Decoding(merged(tmp_path / "decoder.onnx"), tmp_path / "m.par", layout)
    assert set(both.pairs) == {f"past_key_values_0_{kind}" for kind in CACHES[:2]}
    assert "every rank runs its bodies whole" in "\n".join(plan_lines(both.plan.to_json()))
    source = np.random.default_rng(0)
    with ThreadSession(tmp_path / "m.par", timeout=TIMEOUT) as session:
        for batch, length in ((1, 1), (1, 0), (3, 1)):
            session.states.reset()
            encoded = source.standard_normal((batch, FRAMES, HIDDEN)).astype(np.float32)
            feeds = {"encoder_hidden_states": encoded, "use_cache_branch": np.array([False])}
            ids = source.integers(0, VOCABULARY, (batch, 2))
            first = feeds | first_caches(batch, length) | {"input_ids": ids}
            wanted = both.unsplit(first)
            check_outputs(session.run(both.outputs, first), list(wanted.values()), both.outputs)
            caches = {f"past_key_values_0_{kind}": wanted[f"present_0_{kind}"] for kind in CACHES}
            both.loop(session, feeds | {"use_cache_branch": np.array([True])}, caches, 6)


def test_the_first_step_may_leave_its_caches_on_the_ranks(tmp_path: Path) -> None:
    both = Decoding(merged(tmp_path / "decoder.onnx"), tmp_path / "m.par", "tensor-parallel 2")
    feeds = {
        "encoder_hidden_states": np.ones((2, FRAMES, HIDDEN), np.float32),
        "input_ids": np.array([[1], [2]]),
    }
    first = feeds | first_caches(2, 0) | {"use_cache_branch": np.array([False])}
    wanted = both.unsplit(first)
    with ThreadSession(tmp_path / "m.par", timeout=TIMEOUT) as session:
        of_encoder = [f"present_0_{kind}" for kind in CACHES[2:]]
        made = session.run(of_encoder, first, keep_states=True)
        check_outputs(made, [wanted[name] for name in of_encoder], of_encoder)
        own = {f"past_key_values_0_{kind}": wanted[f"present_0_{kind}"] for kind in CACHES}
        fed = {name: own[name] for name in own if name not in both.pairs}
        later = feeds | {"use_cache_branch": np.array([True])}
        (logits,) = session.run(["logits"], later | fed, keep_states=True)
        check_outputs([logits], [both.unsplit(later | own)["logits"]], ["logits"])


def test_branches_that_make_the_sizes_of_a_result_agree(tmp_path: Path) -> None:
    """What follows an If relies on its sizes."""
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        chosen (float[batch, 8] x, float[batch, 8] y, bool c) => (float[batch, 8] z) {
            a = If (c) <then_branch = one () => (float[n, 8] p) { p = Relu (x) },
                        else_branch = two () => (float[n, 8] q) { q = Neg (y) }>
            z = Tanh (a)
        }
        """)
    onnx.save(model, tmp_path / "model.onnx")
    sharder.shard(tmp_path / "model.onnx", tmp_path / "m.par", options("data-parallel 2"))
    x, y = np.ones((4, 8), np.float32), np.ones((3, 8), np.float32)
    with ThreadSession(tmp_path / "m.par", timeout=TIMEOUT) as session:
        (z,) = session.run(None, {"x": x, "y": -x, "c": np.array(False)})
        check_outputs([z], [np.tanh(x)], ["z"])
        with pytest.raises(InputError, match="batch"):
            session.run(None, {"x": x, "y": y, "c": np.array(True)})


def test_a_cache_that_a_branch_extends_is_a_state_whatever_its_name(tmp_path: Path) -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        longer (float[batch, length, 8] a, float[batch, 1, 8] x, bool c) => (float[n, m, 8] b) {
            b = If (c) <then_branch = one () => (float[n, m, 8] p) { p = Concat <axis = 1> (a, x) },
                        else_branch = two () => (float[n, m, 8] q) { q = Identity (x) }>
        }
        """)
    onnx.save(model, tmp_path / "model.onnx")
    plan, _ = sharder.plan(tmp_path / "model.onnx", options("tensor-parallel 2"))
    assert plan.states == [("a", "b")]
