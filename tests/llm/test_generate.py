"""Sharded language models generate what onnxruntime-genai generates of the same folder, or PyTorch
of the model that Optimum exported.

models/llm/*/expected.json has their tokens, greedily chosen (models/language_models.py,
models/optimum_models.py, models/docs_llama.py)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from committed import MODELS
from sharded import sharded

import onnxpar
from onnxpar.base.errors import InputError, ModelError, StrategyError
from onnxpar.llm.generator import Completion, Generator, TooLongError

FOLDERS = sorted(
    path.name
    for path in (MODELS / "llm").iterdir()
    if not (path / "encoder_model.onnx").exists()  # test_encoder_decoder.py has these
)
TIMEOUT = 30.0
LAYOUTS = ("1", "2", "3", "4", "tp 2", "tp 3", "tp 4")
"""Numbers of ranks: by the search, or by the preset tensor-parallel."""
NEW = 128


def expected(name: str) -> Mapping[str, list[int]]:
    """The tokens by prompt; with the one that ends a text."""
    found: dict[str, list[int]] = json.loads((MODELS / "llm" / name / "expected.json").read_bytes())
    return found


@pytest.fixture(scope="module", params=[16, 0], ids=["pages", "batch"])
def llama(request: pytest.FixtureRequest) -> Iterator[Generator]:
    """With caches in pages, or as the model has them."""
    par = sharded(MODELS / "llm" / "llama", devices=2, page_size=request.param)
    with Generator(par, timeout=TIMEOUT) as generator:
        yield generator


def unsplit(folder: Path, prompt: list[int], number: int) -> list[int]:
    """What onnxruntime generates greedily with the unsplit model."""
    session = ort.InferenceSession(folder / "model.onnx")
    names = [port.name for port in session.get_outputs()]
    caches = [port for port in session.get_inputs() if port.name.startswith("past")]
    feeds = {c.name: np.zeros((1, c.shape[1], 0, 16), np.float32) for c in caches}
    tokens, new = list(prompt), list(prompt)
    while len(tokens) < len(prompt) + number:
        feeds["input_ids"] = np.array([new])
        feeds["attention_mask"] = np.ones((1, len(tokens)), np.int64)
        found = dict(zip(names, session.run(None, feeds), strict=True))
        feeds |= {n.replace("present", "past_key_values"): found[n] for n in names[1:]}
        new = [int(found["logits"][0, -1].argmax())]
        tokens += new
    return tokens[len(prompt) :]


def keeps_pages(name: str) -> bool:
    """True for a model that cannot generate without pages, as its caches are rings."""
    return name in ("gemma2", "gpt_oss")


@pytest.mark.matrix
@pytest.mark.parametrize("page_size", [None, 0, 5], ids="pages-{}".format)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "name", [pytest.param(f, marks=pytest.mark.slow) if f != "llama" else f for f in FOLDERS]
)
def test_tokens_are_those_of_others(
    name: str, layout: str, page_size: int | None, tmp_path: Path
) -> None:
    if page_size == 0 and keeps_pages(name):
        pytest.skip("its caches are rings, which pages replace")
    preset = "tensor-parallel" if layout.startswith("tp") else None
    par = tmp_path / "m.par"
    onnxpar.shard(
        MODELS / "llm" / name, par, devices=int(layout[-1]), preset=preset, page_size=page_size
    )
    wanted = expected(name)
    with Generator(par, timeout=TIMEOUT) as generator:
        alone = [generator.generate(p, max_new_tokens=NEW)[0].tokens for p in wanted]
        together = [c.tokens for c in generator.generate(list(wanted), max_new_tokens=NEW)]
    assert alone == together == list(wanted.values())


@pytest.mark.slow
def test_tokens_are_those_of_the_unsplit_model(llama: Generator) -> None:
    prompt = llama.tokenizer.encode("import numpy")
    (found,) = llama.generate(prompt, max_new_tokens=NEW, eos_token_id=[])
    assert found.tokens == unsplit(MODELS / "llm" / "llama", prompt, NEW)
    assert found.reason == "length" and found.prompt == len(prompt)


@pytest.mark.matrix
@pytest.mark.parametrize("prompts", [[0, 1], [2, 0, 1], [1, 1]])
def test_a_batch_is_each_text_alone(llama: Generator, prompts: list[int]) -> None:
    texts = ["a", "a much longer text than the others, of several words", "of three"]
    asked = [texts[i] for i in prompts]
    together = llama.generate(asked, max_new_tokens=24)
    alone = [llama.generate(text, max_new_tokens=24)[0] for text in asked]
    assert [c.tokens for c in together] == [c.tokens for c in alone]
    np.testing.assert_allclose(together[0].logprobs, alone[0].logprobs, atol=1e-4)


def check_same(found: list[Completion], expected: list[Completion]) -> None:
    """Sums over tokens depend on the company by rounding."""
    assert [(c.tokens, c.text) for c in found] == [(c.tokens, c.text) for c in expected]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=1e-5)


@pytest.mark.slow
def test_decoding_again_begins_anew(llama: Generator) -> None:
    first = llama.generate("once", max_new_tokens=9)
    llama.generate("something else", max_new_tokens=5)
    stream = llama.stream("broken off", max_new_tokens=50)
    next(stream)
    check_same(llama.generate("once", max_new_tokens=9), first)
    if llama.model.page_size:  # both texts have pages
        (whole,) = llama.generate("broken off", max_new_tokens=50)
        assert whole.text.endswith("".join(stream))
    else:
        with pytest.raises(InputError, match="another text was begun with this generator"):
            list(stream)
    check_same(llama.generate("once", max_new_tokens=9), first)


def test_a_stream_misses_nothing_that_comes_beside_another_call(llama: Generator) -> None:
    if not llama.model.page_size:
        pytest.skip("the ranks keep the caches of one batch")
    (wanted,) = llama.generate("broken off", max_new_tokens=50)
    found = llama.follow("broken off", max_new_tokens=50)
    pieces = [next(found)]
    llama.generate("something else", max_new_tokens=60, eos_token_id=[])  # both go on
    pieces += found
    assert "".join(piece for piece, _ in pieces) == wanted.text
    assert pieces[-1][1] == wanted
    stop = wanted.text[5:8]
    cut = llama.follow("broken off", max_new_tokens=50, stop_strings=[stop])
    pieces = [next(cut)]
    llama.generate("something else", max_new_tokens=60, eos_token_id=[])
    pieces += cut
    (alone,) = llama.generate("broken off", max_new_tokens=50, stop_strings=[stop])
    assert pieces[-1][1] == alone and alone.text == wanted.text[: wanted.text.index(stop)]


def test_threads_do_not_mix_their_texts(llama: Generator) -> None:
    (wanted,) = llama.generate("once", max_new_tokens=20, eos_token_id=[])

    def generate(_: int) -> Completion | str:
        try:
            return llama.generate("once", max_new_tokens=20, eos_token_id=[])[0]
        except InputError as error:
            return str(error)

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(generate, range(8)))
    for each in found:
        if isinstance(each, str):
            assert "another text was begun" in each
        else:
            check_same([each], [wanted])


def test_logprobs_are_those_of_the_model(llama: Generator) -> None:
    (found,) = llama.generate("x", max_new_tokens=1)
    session = ort.InferenceSession(MODELS / "llm" / "llama" / "model.onnx")
    feeds = {p.name: np.zeros((1, 2, 0, 16), np.float32) for p in session.get_inputs()[2:]}
    ids = np.array([llama.tokenizer.encode("x")])
    feeds |= {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    logits = session.run(["logits"], feeds)[0][0, -1].astype(float)
    wanted = logits.max() - np.log(np.exp(logits).sum())
    assert found.logprobs == [pytest.approx(wanted, abs=1e-4)]


@pytest.mark.slow
def test_a_stream_is_the_text(llama: Generator) -> None:
    (whole,) = llama.generate("def", max_new_tokens=60, eos_token_id=[])
    pieces = list(llama.stream("def", max_new_tokens=60, eos_token_id=[]))
    assert "".join(pieces) == whole.text == llama.tokenizer.decode(whole.tokens)
    assert len(pieces) > 20


@pytest.mark.slow
def test_a_stop_string_ends_the_text_before_it(llama: Generator) -> None:
    (whole,) = llama.generate("def", max_new_tokens=60, eos_token_id=[])
    for stop in (whole.text[20:23], whole.text[20]):  # within a token, over several
        (cut,) = llama.generate("def", max_new_tokens=60, eos_token_id=[], stop_strings=stop)
        assert cut.text == whole.text[: whole.text.index(stop)]
        assert cut.reason == "stop"
        assert "".join(llama.stream("def", eos_token_id=[], stop_strings=[stop])) == cut.text
    never = whole.text[-1] + "\0"
    (same,) = llama.generate("def", max_new_tokens=60, eos_token_id=[], stop_strings=[never])
    assert (same.text, same.reason) == (whole.text, "length")


def test_a_token_that_ends_texts(llama: Generator) -> None:
    (whole,) = llama.generate("def", max_new_tokens=20, eos_token_id=[])
    at = next(i for i, t in enumerate(whole.tokens) if t not in whole.tokens[:i] and i > 4)
    for end in (whole.tokens[at], [whole.tokens[at]]):
        (cut,) = llama.generate("def", max_new_tokens=20, eos_token_id=end)
        assert cut.tokens == whole.tokens[: at + 1] and cut.reason == "stop"
        assert cut.text == llama.tokenizer.decode(whole.tokens[:at])


def test_a_chat_is_its_template(llama: Generator) -> None:
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    text = "<s>system: be brief</s><s>user: hello</s><s>assistant:"
    tokens = llama.tokenizer.encode(text, specials=False)
    assert tokens[0] == 0 and tokens.count(0) == 3, "special tokens are no text"
    assert llama.generate(chat, max_new_tokens=9) == llama.generate(tokens, max_new_tokens=9)


def test_rows_of_an_array_are_prompts(llama: Generator) -> None:
    rows = [[5, 6, 7], [1, 2, 3]]
    wanted = [llama.generate(row, max_new_tokens=9)[0].tokens for row in rows]

    def tokens(prompts: object) -> list[list[int]]:
        return [c.tokens for c in llama.generate(prompts, max_new_tokens=9)]  # type: ignore[arg-type]

    assert tokens(np.array(rows)) == tokens(list(np.array(rows))) == wanted
    assert tokens(np.array(rows[0], np.int32)) == tokens(list(np.array(rows[0]))) == wanted[:1]
    assert tokens(np.zeros((0, 3), int)) == []


@pytest.mark.slow
def test_the_caches_limit_a_prompt(tmp_path: Path) -> None:
    onnxpar.shard(MODELS / "llm" / "llama", tmp_path / "m.par", devices=1)
    with Generator(tmp_path / "m.par", kv_memory=100_000, timeout=TIMEOUT) as generator:
        most = generator._room - 1
        generator.check_room([5] * most)
        with pytest.raises(TooLongError, match=r"the cache .*; give a shorter one") as refused:
            generator.check_room([5] * (most + 1))
        assert refused.value.limit == "the cache"


def test_the_same_seed_gives_the_same_texts(llama: Generator) -> None:
    def texts(seed: int) -> list[str]:
        found = llama.generate(
            "x", do_sample=True, seed=seed, num_return_sequences=3, max_new_tokens=12
        )
        return [c.text for c in found]

    assert texts(1) == texts(1)
    assert len({*texts(1), *texts(2)}) == 6


def test_the_context_limits_a_text(llama: Generator) -> None:
    (found,) = llama.generate([5] * 500, max_new_tokens=100, eos_token_id=[])
    assert len(found.tokens) == 12 and found.reason == "length"
    with pytest.raises(InputError, match="512 tokens, and the model's context 512"):
        llama.generate([5] * 512)
    if not llama.model.page_size:
        with pytest.raises(InputError, match=r"500 tokens, and 13 new ones may follow, .* 512"):
            llama.generate([[5] * 500, [7]], max_new_tokens=13)
    both = llama.generate([[5] * 500, [7]], max_new_tokens=12, eos_token_id=[])
    assert both[0].tokens == found.tokens
    assert both[1].tokens == llama.generate([7], max_new_tokens=12, eos_token_id=[])[0].tokens


@pytest.mark.parametrize(
    "prompt,options,named",
    [
        ([320], {}, "token 320; ids are from 0 to 319"),
        ([-1], {}, "token -1"),
        (None, {}, "a prompt is None; give a text, token ids, or a chat"),
        (5, {}, "a prompt is 5; give a text, token ids, or a chat"),
        ([None], {}, "a prompt is None; give"),
        (["x", None], {}, "a prompt is None; give"),
        ({"role": "user"}, {}, "a prompt is {'role': 'user'}; give"),
        (np.array(5), {}, r"a prompt is array\(5\); give"),
        ([5, None], {}, "a prompt has None as a token id; give"),
        ([["x"]], {}, "a prompt has 'x' as a token id; give"),
        (np.array([5.5, 6]), {}, "a prompt has .*5.5.* as a token id; give"),
        (np.zeros((1, 2, 3), int), {}, "a prompt has .* as a token id; give"),
        ([{"role": "user"}], {}, "message 1 of the chat has no 'content'"),
        ("x", {"max_new_tokens": 0}, "max_new_tokens or max_length"),
        ("x", {"max_new_tokens": "a"}, "max_new_tokens is 'a'; it must be a whole number"),
        ("x", {"max_length": 2.5}, "max_length is 2.5; it must be a whole number"),
        ([5, 5, 5], {"max_length": 3}, "max_new_tokens or max_length"),
        ("x", {"tempreature": 1}, "no option 'tempreature'; it has max_new_tokens"),
        ("x", {"stop_strings": ["a", ""]}, "a stop string is empty"),
        ("x", {"num_return_sequences": 0}, "num_return_sequences is 0"),
    ],
)
def test_wrong_requests_leave_the_ranks_as_they_were(
    llama: Generator, prompt: object, options: dict[str, object], named: str
) -> None:
    with pytest.raises(InputError, match=named):
        llama.generate(prompt, **options)  # type: ignore[arg-type]
    assert llama.generate("x", max_new_tokens=3)[0].reason


def test_a_model_without_a_cache_is_named(tmp_path: Path) -> None:
    par = tmp_path / "gpt2.par"
    onnxpar.shard(MODELS / "gpt2.dynamo.static.onnx", par, devices=2, preset="tensor-parallel")
    with pytest.raises(ModelError, match=r"gpt2.par is no decoder with a cache: .* input_ids"):
        Generator(par)


@pytest.mark.slow
def test_a_decoder_of_one_token_without_mask_and_tokenizer(tmp_path: Path) -> None:
    par = tmp_path / "decode.par"
    model = MODELS / "llama_decode.dynamo.dynamic.onnx"
    onnxpar.shard(model, par, devices=2, preset="tensor-parallel")
    with Generator(par, timeout=TIMEOUT) as generator:
        (found,) = generator.generate([7, 8, 9], max_new_tokens=6)
        assert len(found.tokens) == 6 and found.text == ""
        assert [c.tokens for c in generator.generate([[7, 8, 9]] * 2, max_new_tokens=6)] == [
            found.tokens
        ] * 2
        with pytest.raises(InputError, match="reads one token at a time"):
            generator.generate([[7], [8, 9]])
        with pytest.raises(ModelError, match=r"decode.par has no tokenizer.json"):
            generator.generate("text")


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("kv_dtype,close", [("float32", 1e-5), ("float16", 0.2), ("int8", 0.5)])
@pytest.mark.parametrize("name", ["llama_int4", "gemma2"])
def test_caches_of_other_types_are_close(
    name: str, kv_dtype: str, close: float, tmp_path: Path
) -> None:
    folder, prompt = MODELS / "llm" / name, list(range(3, 60))
    found = []
    for each in (None, kv_dtype):
        par = tmp_path / f"{each}.par"
        onnxpar.shard(folder, par, devices=2, kv_dtype=each)
        with Generator(par, timeout=TIMEOUT) as generator:
            ports = generator._session.get_inputs()
            (answer,) = generator.generate(prompt, max_new_tokens=1, eos_token_id=[])
        found.append(answer)
        types = {port.type for port in ports if port.name.startswith("past")}
        assert types == {f"tensor({(each or 'float32').replace('float32', 'float')})"}
    assert abs(found[0].logprobs[0] - found[1].logprobs[0]) < close
    assert found[0].tokens == found[1].tokens


def test_types_of_caches_need_pages() -> None:
    with pytest.raises(StrategyError, match="--kv-dtype int8: only caches in pages"):
        onnxpar.plan(MODELS / "llm" / "llama", devices=2, page_size=0, kv_dtype="int8")
    with pytest.raises(StrategyError, match="--kv-dtype int4: give float32, float16, int8"):
        onnxpar.plan(MODELS / "llm" / "llama", devices=2, kv_dtype="int4")
