"""Sharded encoder-decoders generate what PyTorch generates of the models that Optimum exported.

models/llm/{t5,bart,whisper}/expected.json has the tokens, greedily chosen
(models/encoder_decoder_models.py)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from committed import MODELS
from sharded import sharded
from sounds import RATE, sound

import onnxpar
from onnxpar.base.errors import InputError, ModelError, StrategyError
from onnxpar.llm.engine import Engine
from onnxpar.llm.generator import Generator
from onnxpar.llm.sampling import Sampling
from onnxpar.runtime.session.bundle import Bundle

FOLDERS = {name: MODELS / "llm" / name for name in ("t5", "bart", "whisper")}
LAYOUTS = ("1", "2", "3", "tp 2", "tp 3", "tp 4", "dp 2")
PRESETS = {"tp": "tensor-parallel", "dp": "data-parallel"}
"""Numbers of ranks: by the search, or by a preset."""
TIMEOUT = 30.0
NEW = 96
SECONDS = (2, 1.3, 0.4)


def expected(name: str) -> Any:
    """The tokens of PyTorch."""
    return json.loads((FOLDERS[name] / "expected.json").read_bytes())


def cases(name: str) -> Iterator[tuple[dict[str, str], list[Any], list[list[int]]]]:
    """Options, prompts, and the tokens of each."""
    found = expected(name)
    if name == "whisper":
        sounds = [sound(seed, seconds) / 32768 for seed, seconds in enumerate(SECONDS)]
        for options in ({}, {"language": "de"}, {"language": "en", "task": "translate"}):
            yield options, sounds, found["tokens"][" ".join(options.values())]
    else:
        yield {}, list(found), list(found.values())


@pytest.fixture(scope="module", params=["t5", pytest.param("bart", marks=pytest.mark.slow)])
def translator(request: pytest.FixtureRequest) -> Iterator[Generator]:
    par = sharded(FOLDERS[request.param], devices=2, preset="tensor-parallel")
    with Generator(par, timeout=TIMEOUT) as generator:
        yield generator


@pytest.fixture(scope="module")
def whisper() -> Iterator[Generator]:
    par = sharded(FOLDERS["whisper"], devices=2, preset="tensor-parallel")
    with Generator(par, timeout=TIMEOUT) as generator:
        yield generator


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FOLDERS)
def test_tokens_are_those_of_pytorch(name: str, layout: str, tmp_path: Path) -> None:
    par = tmp_path / "m.par"
    preset = PRESETS.get(layout[:2])
    onnxpar.shard(FOLDERS[name], par, devices=int(layout[-1]), preset=preset)
    with Generator(par, timeout=TIMEOUT) as generator:
        for options, prompts, wanted in cases(name):
            asked: dict[str, Any] = {"max_new_tokens": NEW, **options}
            alone = [generator.generate(prompt, **asked)[0].tokens for prompt in prompts]
            together = [c.tokens for c in generator.generate(prompts, **asked)]
            assert alone == together == wanted


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("name", FOLDERS)
def test_no_weight_of_the_decoder_is_in_the_encoder(name: str) -> None:
    par = sharded(FOLDERS[name], devices=1)
    decoder, encoder = (Bundle.load(folder).data["weights"] for folder in (par, par / "encoder"))
    sizes = [sum(weight["bytes"] for weight in each) for each in (decoder, encoder)]
    whole = 4 * parameters(name)
    assert sum(sizes) <= whole * 1.02, "tables of positions are constants of the graph"
    assert {w["name"] for w in decoder}.isdisjoint(w["name"] for w in encoder)


def parameters(name: str) -> int:
    """The elements of all weights of the files, with those of both decoders once."""
    found: dict[tuple[str, bytes], int] = {}
    for file in FOLDERS[name].glob("*.onnx"):
        kind = "encoder" if file.name.startswith("encoder") else "decoder"
        for tensor in onnx.load(file).graph.initializer:
            size = int(np.prod(tensor.dims))
            if size > 8:
                found[kind, onnx.numpy_helper.to_array(tensor).tobytes()] = size
    return sum(found.values())


@pytest.mark.slow
def test_caches_of_cross_attention_stay_on_the_ranks(translator: Generator) -> None:
    session, model = translator._session, translator.model
    cross = [name for name in model.caches if ".encoder." in name]
    assert len(cross) == 4
    bundle = Bundle.load(translator._folder)
    assert bundle.in_place >= set(cross), "a step copies none of them"
    translator.generate("a text", max_new_tokens=3)
    before = {name: session.states.read(name) for name in cross}
    fed: list[str] = []
    run = session.run

    def watched(names: Any, feeds: Any, *rest: Any, **options: Any) -> Any:
        fed.extend(feeds)
        return run(names, feeds, *rest, **options)

    session.run = watched  # type: ignore[method-assign]
    try:
        translator.generate("a text", max_new_tokens=6, eos_token_id=[])
    finally:
        session.run = run  # type: ignore[method-assign]
    assert [fed.count(name) for name in cross] == [1] * 4
    after = {name: session.states.read(name) for name in cross}
    for name in cross:
        np.testing.assert_array_equal(before[name], after[name])


@pytest.mark.matrix
@pytest.mark.parametrize("prompts", [[0, 1], [2, 0, 1], [1, 1]])
def test_a_batch_is_each_text_alone(translator: Generator, prompts: list[int]) -> None:
    texts = ["a", "a much longer text than the others, of several words", "of three"]
    asked = [texts[i] for i in prompts]
    together = translator.generate(asked, max_new_tokens=24)
    alone = [translator.generate(text, max_new_tokens=24)[0] for text in asked]
    assert [c.tokens for c in together] == [c.tokens for c in alone]
    np.testing.assert_allclose(together[0].logprobs, alone[0].logprobs, atol=1e-4)
    lengths = [len(translator.tokenizer.encode(text)) for text in asked]
    assert [c.prompt for c in together] == lengths


@pytest.mark.slow
def test_options_are_those_of_decoders(translator: Generator) -> None:
    (whole,) = translator.generate("x", max_new_tokens=40, eos_token_id=[])
    stop = whole.text[12:14]
    (cut,) = translator.generate("x", max_new_tokens=40, eos_token_id=[], stop_strings=stop)
    assert cut.text == whole.text[: whole.text.index(stop)] and cut.reason == "stop"
    assert "".join(translator.stream("x", max_new_tokens=40, eos_token_id=[])) == whole.text
    drawn = translator.generate(
        "x", do_sample=True, seed=3, num_return_sequences=3, max_new_tokens=12
    )
    assert len({tuple(c.tokens) for c in drawn}) == 3
    tokens = translator.tokenizer.encode("x")
    assert translator.generate(tokens, max_new_tokens=40, eos_token_id=[]) == [whole]


def test_penalties_count_the_answer_and_not_the_prompt(translator: Generator) -> None:
    prompt = translator.tokenizer.encode("x")
    (first,) = translator.generate(prompt, max_new_tokens=2)
    likely = first.tokens[-1]
    (found,) = translator.generate(
        [likely, *prompt], max_new_tokens=2, repetition_penalty=1e-6 + 1.0
    )
    (plain,) = translator.generate([likely, *prompt], max_new_tokens=2)
    assert found.tokens == plain.tokens
    seen: list[list[int]] = []
    choose = Sampling.choose

    def watched(self: Sampling, logits: Any, tokens: Any, row: int, step: int) -> Any:
        seen.append(list(tokens))
        return choose(self, logits, tokens, row, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sampling, "choose", watched)
        translator.generate(prompt, max_new_tokens=2)
    assert [len(tokens) for tokens in seen] == [1, 2]


def test_another_call_ends_a_stream(translator: Generator) -> None:
    stream = translator.stream("broken off", max_new_tokens=50, eos_token_id=[])
    next(stream)
    translator.generate("something else", max_new_tokens=5)
    with pytest.raises(InputError, match="another text was begun with this generator"):
        list(stream)


def test_a_language_is_the_first_token(translator: Generator) -> None:
    token = translator.tokenizer.encode("q")[0]
    language = translator.tokenizer.decode([token])
    (found,) = translator.generate("x", language=language, max_new_tokens=4)
    assert found.tokens[0] == token
    with pytest.raises(InputError, match="language is 'no token', which is no token of the model"):
        translator.generate("x", language="no token")


@pytest.mark.parametrize(
    "prompt,options,named",
    [
        ([320], {}, "token 320; ids are from 0 to 319"),
        ([], {}, "a prompt has no tokens"),
        ("x", {"task": "transcribe"}, "task is for speech models"),
        ("x", {"max_new_tokens": 0}, "max_new_tokens or max_length"),
        ("x", {"tempreature": 1}, "no option 'tempreature'; it has .*language, task"),
        (np.zeros(100), {}, "the prompt is sound, and the model reads text"),
    ],
)
def test_wrong_prompts(
    translator: Generator, prompt: Any, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(InputError, match=named):
        translator.generate(prompt if len(prompt) else [prompt], **options)
    assert translator.generate("x", max_new_tokens=3)[0].reason


@pytest.mark.slow
def test_positions_limit_prompts_and_answers() -> None:
    par = sharded(FOLDERS["bart"], devices=1)
    with Generator(par, timeout=TIMEOUT) as generator:
        with pytest.raises(InputError, match="257 tokens, and the encoder reads at most 256"):
            generator.generate([[5] * 257])
        (found,) = generator.generate([5] * 256, max_new_tokens=300)
        assert len(found.tokens) == 255 and found.reason == "stop", "with the start token, 256"


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    "prompt,options,named",
    [
        ("text", {}, "the prompt is text, and the model reads speech: give a sound"),
        ([5, 6], {}, "the prompt is text"),
        (np.zeros(3 * RATE), {}, "48000 samples, and the model reads 2 s, 32000 samples"),
        (np.zeros((80, 100), np.float32), {}, r"features of a sound \[80, 100\] must be .*200"),
        (np.zeros(9), {"language": "xx"}, "language is 'xx'; the model knows de, en"),
        (np.zeros(9), {"task": "sing"}, "task is 'sing'; the model knows transcribe, translate"),
    ],
)
def test_wrong_sounds(whisper: Generator, prompt: Any, options: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=named):
        whisper.generate(prompt, **options)
    assert whisper.hears


@pytest.mark.slow
def test_features_are_a_prompt(whisper: Generator) -> None:
    samples = sound(1, SECONDS[1]) / 32768
    features = whisper.sound.of_sound(samples)
    found = whisper.generate([samples, features], max_new_tokens=9)
    assert found[0] == found[1] and found[0].prompt == 200


def test_folders_that_lack_files(tmp_path: Path) -> None:
    folder = tmp_path / "t5"
    shutil.copytree(FOLDERS["t5"], folder)
    (folder / "encoder_model.onnx").unlink()
    with pytest.raises(ModelError, match=r"t5 holds an encoder-decoder .*needs encoder_model.onnx"):
        onnxpar.shard(folder, tmp_path / "t5.par", devices=1)
    with pytest.raises(StrategyError, match=r"--page-size 16: .* is an encoder-decoder"):
        onnxpar.shard(FOLDERS["t5"], tmp_path / "t5.par", devices=1, page_size=16)
    with pytest.raises(StrategyError, match=r"--kv-dtype int8: .* is an encoder-decoder"):
        onnxpar.plan(FOLDERS["t5"], devices=2, kv_dtype="int8")


@pytest.mark.slow
def test_the_encoder_of_another_model_is_refused(tmp_path: Path) -> None:
    for name in ("t5", "llama"):
        shutil.copytree(sharded(MODELS / "llm" / name, devices=1), tmp_path / name)
    shutil.copytree(tmp_path / "t5" / "encoder", tmp_path / "llama" / "encoder")
    with pytest.raises(ModelError, match=r"is not the encoder of .*; shard the folder again"):
        Generator(tmp_path / "llama")


@pytest.mark.slow
def test_a_folder_is_written_again(tmp_path: Path) -> None:
    par = tmp_path / "t5.par"
    for devices in (2, 1):
        onnxpar.shard(FOLDERS["t5"], par, devices=devices, preset="tensor-parallel")
    assert sorted(p.name for p in par.glob("encoder/rank*.onnx")) == ["rank_0000.onnx"]
    (par / "encoder" / "mine.txt").write_text("")
    with pytest.raises(InputError, match=r"its folder 'encoder' contains 'mine\.txt'"):
        onnxpar.shard(FOLDERS["t5"], par, devices=1)


def test_serving_is_refused(translator: Generator) -> None:
    with pytest.raises(
        ModelError, match=r"is an encoder-decoder, which cannot be served yet.*generate"
    ):
        Engine(translator._folder)
