"""Text that comes token by token is the text of all tokens, in every script, by tokenizers of every
family: `tokenizers` itself decodes them at once."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from lazily import lazily

from onnxpar.llm.tokenizer import Stream, Tokenizer

tokenizers = lazily("tokenizers")

SCRIPTS = (
    *("\u0041\u005a", "\u00c0\u00ff", "\u0391\u03a9", "\u0410\u044f", "\u0531\u0556"),  # Latin
    *("\u05d0\u05ea", "\u0621\u064a", "\u0710\u072f", "\u0780\u07a5", "\u07ca\u07ea"),  # Hebrew
    *("\u0905\u0939", "\u0985\u09b9", "\u0a05\u0a39", "\u0a85\u0ab9", "\u0b05\u0b39"),  # Hindi
    *("\u0b85\u0bb9", "\u0c05\u0c39", "\u0c85\u0cb9", "\u0d05\u0d39", "\u0d85\u0dc6"),  # Tamil
    *("\u0e01\u0e30", "\u0e81\u0eb0", "\u0f40\u0f6c", "\u1000\u1021", "\u10d0\u10f0"),  # Thai
    *("\u1200\u1248", "\u13a0\u13f4", "\u1780\u17b3", "\u1820\u1842", "\u3041\u3096"),  # Ge'ez
    *("\u30a1\u30fa", "\u4e00\u9fa5", "\uac00\ud7a3", "\U00010330\U0001034a"),  # Japanese
)
"""The first and the last letter of 34 scripts, or of a part of them."""
OTHERS = (
    *(" ", "  ", "\n", "\t", ".", ", ", "'s ", "0", "=", "\u0301", "\u094d", "\u200d", "\ufe0f"),
    *("\U0001f600", "\U0001f469\u200d\U0001f467", "\U0001f1e8\U0001f1ed", "\U0001f44d\U0001f3fd"),
    *("<tool>", "\ufffd"),
)
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def text_of(chosen: random.Random) -> str:
    """A text in one to three scripts, with spaces, marks and emoji."""
    scripts = chosen.choices(SCRIPTS, k=chosen.randrange(1, 4))
    found = ""
    for _ in range(chosen.randrange(1, 40)):
        first, last = chosen.choice(scripts)
        letter = chr(chosen.randrange(ord(first), ord(last) + 1))
        found += chosen.choice((letter, letter, letter, " ", chosen.choice(OTHERS)))
    return found


def byte_level() -> Any:
    t = tokenizers
    made = t.Tokenizer(t.models.BPE())
    made.pre_tokenizer = t.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = t.decoders.ByteLevel()
    alphabet = t.pre_tokenizers.ByteLevel.alphabet()
    return trained(made, t.trainers.BpeTrainer, 500, initial_alphabet=alphabet)


def byte_fallback(*decoders: Any, unigram: bool = False) -> Any:
    """BPE, or a unigram, that knows few characters, and the bytes of others."""
    t = tokenizers
    pieces = ["<unk>", *BYTES, *"\u2581abcdeABCDE.,'0", "\u2581a", "ab", "\u2581\u2581", "\u2581A"]
    if unigram:
        made = t.Tokenizer(t.models.Unigram([(p, -1.0) for p in pieces], 0, byte_fallback=True))
    else:
        pairs = [tuple(piece) for piece in pieces if len(piece) == 2]
        ids = {piece: at for at, piece in enumerate(pieces)}
        made = t.Tokenizer(t.models.BPE(ids, pairs, unk_token="<unk>", byte_fallback=True))
    d = t.decoders
    made.normalizer = t.normalizers.Replace(" ", "\u2581")
    made.decoder = d.Sequence([d.Replace("\u2581", " "), d.ByteFallback(), d.Fuse(), *decoders])
    return made


def llama_2() -> Any:
    t = tokenizers
    made = byte_fallback(t.decoders.Strip(" ", 1, 0))
    start = t.normalizers.Prepend("\u2581")
    made.normalizer = t.normalizers.Sequence([start, made.normalizer])
    return made


def word_piece() -> Any:
    t = tokenizers
    made = t.Tokenizer(t.models.WordPiece(unk_token="[UNK]"))
    made.pre_tokenizer = t.pre_tokenizers.BertPreTokenizer()
    made.decoder = t.decoders.WordPiece()
    return trained(made, t.trainers.WordPieceTrainer, 2000, special_tokens=["[UNK]"])


def metaspace(model: Any, trainer: Any, **options: Any) -> Any:
    t = tokenizers
    made = t.Tokenizer(model)
    made.pre_tokenizer = t.pre_tokenizers.Metaspace()
    made.decoder = t.decoders.Metaspace()
    return trained(made, trainer, 2000, **options)


def word_ends() -> Any:
    t = tokenizers
    made = t.Tokenizer(t.models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    made.pre_tokenizer = t.pre_tokenizers.WhitespaceSplit()
    made.decoder = t.decoders.BPEDecoder("</w>")
    options = {"end_of_word_suffix": "</w>", "special_tokens": ["<unk>"]}
    return trained(made, t.trainers.BpeTrainer, 2000, **options)


def trained(made: Any, trainer: Any, size: int, **options: Any) -> Any:
    """A tokenizer that has learned a vocabulary from some texts."""
    chosen = random.Random(1)
    texts = [text_of(chosen) for _ in range(300)]
    made.train_from_iterator(texts, trainer(vocab_size=size, show_progress=False, **options))
    return made


FAMILIES: dict[str, Callable[[], Any]] = {
    "byte-level BPE": byte_level,  # GPT-2, Llama 3, Qwen
    "byte fallback": byte_fallback,  # Gemma
    "byte fallback without the first space": llama_2,  # Llama 2, Mistral, Phi 3
    "unigram with byte fallback": lambda: byte_fallback(unigram=True),
    "WordPiece": word_piece,  # BERT
    "unigram": lambda: metaspace(  # T5, XLM-RoBERTa
        tokenizers.models.Unigram(),
        tokenizers.trainers.UnigramTrainer,
        unk_token="<unk>",
        special_tokens=["<unk>"],
    ),
    "BPE with metaspace": lambda: metaspace(  # older Llamas
        tokenizers.models.BPE(unk_token="<unk>"),
        tokenizers.trainers.BpeTrainer,
        special_tokens=["<unk>"],
    ),
    "BPE with ends of words": word_ends,  # the first GPT
}


@cache
def family(name: str) -> Any:
    """A tokenizer of `tokenizers`, with special tokens and one that is added, but not special."""
    made = FAMILIES[name]()
    made.add_special_tokens(["<s>", "</s>"])
    made.add_tokens(["<tool>"])
    return made


@pytest.fixture(params=FAMILIES)
def made(request: pytest.FixtureRequest) -> Any:
    """A tokenizer of a family."""
    return family(request.param)


@pytest.fixture
def tokenizer(made: Any, tmp_path: Path) -> Tokenizer:
    made.save(str(tmp_path / "tokenizer.json"))
    return Tokenizer(tmp_path)


def streamed(tokenizer: Tokenizer, tokens: Sequence[int], specials: bool = False) -> list[str]:
    """What comes with each token, and at the end."""
    stream = Stream(tokenizer, specials)
    return [*map(stream.add, tokens), stream.end()]


def texts(request: pytest.FixtureRequest) -> Iterator[str]:
    """Random texts: 50, and with --zoo, 10,000."""
    chosen = random.Random(0)
    for _ in range(10_000 if request.config.getoption("zoo") else 50):
        yield text_of(chosen)


def test_random_texts(made: Any, tokenizer: Tokenizer, request: pytest.FixtureRequest) -> None:
    for text in texts(request):
        tokens = made.encode(text).ids
        assert "".join(streamed(tokenizer, tokens)) == made.decode(tokens)


def test_special_tokens_within_a_text(made: Any, tokenizer: Tokenizer) -> None:
    chosen = random.Random(0)
    specials = [made.token_to_id("<s>"), made.token_to_id("</s>"), made.get_vocab_size() + 5]
    for _ in range(50):
        tokens = made.encode(text_of(chosen)).ids
        for _ in range(5):
            tokens.insert(chosen.randrange(len(tokens) + 1), chosen.choice(specials))
        assert "".join(streamed(tokenizer, tokens)) == made.decode(tokens)


def test_a_text_is_continued(made: Any, tokenizer: Tokenizer) -> None:
    """The text of all tokens is that of the first ones and what comes with the others: a space
    between them stays."""
    chosen, compared = random.Random(0), 0
    for _ in range(100):
        tokens = made.encode(text_of(chosen)).ids
        at = chosen.randrange(len(tokens) + 1)
        begin, whole = made.decode(tokens[:at]), made.decode(tokens)
        if "\ufffd" not in begin and whole.startswith(begin):
            stream = Stream(tokenizer, behind=tokens[:at])
            found = "".join(map(stream.add, tokens[at:])) + stream.end()
            assert begin + found == whole
            compared += 1
    assert compared > 20


def test_special_tokens_may_be_shown(made: Any, tokenizer: Tokenizer) -> None:
    chosen = random.Random(0)
    for _ in range(50):
        texts = [made.encode(text_of(chosen)).ids for _ in range(3)]
        tokens = [made.token_to_id("<s>"), *texts[0], made.token_to_id("</s>"), *texts[1]]
        shown = "".join(streamed(tokenizer, tokens, specials=True))
        assert shown == made.decode(tokens, skip_special_tokens=False)


@pytest.mark.parametrize("made", ["byte-level BPE"], indirect=True)
def test_any_bytes(made: Any, tokenizer: Tokenizer) -> None:
    chosen = random.Random(0)
    for _ in range(100):
        tokens = [chosen.randrange(256) for _ in range(chosen.randrange(100))]
        assert "".join(streamed(tokenizer, tokens)) == made.decode(tokens)


@pytest.mark.parametrize("made", [name for name in FAMILIES if "byte" in name], indirect=True)
def test_bytes_that_are_no_character_come_at_once(made: Any, tokenizer: Tokenizer) -> None:
    is_fallback = made.token_to_id("<0xFF>") is not None  # byte-level BPE writes bytes as letters
    first = made.token_to_id("<0xFF>" if is_fallback else "\u00ff")
    for before, after in (("", ""), ("\u4f60 b", ""), ("", "\u4f60"), ("\u4f60", "a\u4f60")):
        begin, end = made.encode(before).ids, made.encode(after).ids
        pieces = streamed(tokenizer, [*begin, *[first] * 400, *end])
        come = pieces[len(begin) : len(begin) + 400]
        assert "".join(come) == "\ufffd" * (400 - 3) and come[3:] == ["\ufffd"] * 397
        assert "".join(pieces).startswith(made.decode(begin) + "\ufffd" * 400)


@pytest.mark.parametrize("made", ["byte fallback"], indirect=True)
def test_text_goes_on_behind_bytes_that_are_no_character(made: Any, tokenizer: Tokenizer) -> None:
    text, wrong = "\u4f60\u597d", made.token_to_id("<0xE4>")
    tokens = [*made.encode(text).ids, wrong, *made.encode("a" + text).ids]
    assert made.decode(tokens) == "\ufffd" * 7 + "a" + text  # replaces the characters, too
    assert "".join(streamed(tokenizer, tokens)) == text + "\ufffda" + text


def test_few_tokens_are_decoded_for_each(
    made: Any, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    decode = tokenizer.decode

    def noted(ids: Sequence[int], specials: bool = False) -> str:
        lengths.append(len(ids))
        return decode(ids, specials)

    monkeypatch.setattr(tokenizer, "decode", noted)
    chosen = random.Random(0)
    size = made.get_vocab_size()
    for tokens in (
        made.encode("".join(text_of(chosen) for _ in range(30))).ids,
        [chosen.randrange(size) for _ in range(500)],
        *([token] * 200 for token in range(0, size, max(size // 40, 1))),
        *([made.token_to_id(token)] * 200 for token in ("\u2581", "<0xFF>", "\u00e4")),
    ):
        lengths.clear()
        streamed(tokenizer, [token for token in tokens if token is not None])
        assert max(lengths) <= 64 and len(lengths) <= 5 * len(tokens) + 2
