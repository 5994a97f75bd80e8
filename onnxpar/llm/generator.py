"""Generates text with a sharded language model: the class behind `onnxpar generate`."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from numbers import Integral
from reprlib import repr as shortly
from typing import Any, cast

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.base.errors import InputError
from onnxpar.llm.batching import Batching
from onnxpar.llm.decoder import Decoder
from onnxpar.llm.encoder_decoder import EncoderDecoder
from onnxpar.llm.generated_tokens import BatchSource, PagedSource, TokenSource
from onnxpar.llm.language_model import LanguageModel
from onnxpar.llm.messages import Messages
from onnxpar.llm.paged_decoder import PagedDecoder, count_pages
from onnxpar.llm.prompt_encoder import Input, read_encoder
from onnxpar.llm.requests import Limits
from onnxpar.llm.sampling import Sampling
from onnxpar.llm.sound import SoundFeatures
from onnxpar.llm.stop_strings import StopStrings
from onnxpar.llm.tokenizer import Stream, Tokenizer
from onnxpar.runtime.ranks.closing import Closing
from onnxpar.runtime.session.bundle import Bundle
from onnxpar.runtime.session.open_session import open_session
from onnxpar.runtime.session.session import InferenceSession

Prompt = str | Sequence[int] | Messages | Array
"""A text, its tokens, or a chat: objects with `role` and `content`. For a speech model, the samples
of a sound, between -1 and 1, in an array of one dimension; or its features, (mels, columns)."""
_PROMPTS = "give a text, token ids, or a chat: a list of messages with role and content"
MOST_NEW_TOKENS = 256
"""Tokens of an answer where neither max_new_tokens nor max_length is given."""
_TOGETHER, _STEP_TOKENS = 16, 512
"""Most texts that run together, and most tokens of a step, if caches are in pages."""
_SAMPLING = frozenset(f.name for f in fields(Sampling))


@dataclass
class Completion:
    """The answer to a prompt.

    tokens    the new tokens, with the one that ended the text
    text      their text without special tokens; empty if the model has no tokenizer
    logprobs  the natural logarithm of each new token's probability by the model
    reason    why the answer ended: "stop" (a token that ends texts, or a stop string) or "length"
    prompt    the number of tokens of the prompt; for a sound, of columns of its features
    """

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    reason: str = ""
    prompt: int = 0


class TooLongError(InputError):
    """A prompt that leaves no room for a new token. `limit` says where there is no room: "the
    model's context" or "the cache"."""

    def __init__(self, message: str, limit: str) -> None:
        super().__init__(message)
        self.limit = limit


class Generator(Closing):
    """A sharded language model on its ranks. The arguments of `generate` are those of Hugging Face
    Transformers.

    par      a folder that `onnxpar shard` made of a language model's folder
    kv_memory  bytes of caches on each rank, or text such as "2GB", if they are in pages; by
               default, a quarter of the free memory at most
    options  those of `InferenceSession`

    Errors: ModelError for a model that is no decoder with a cache; RankError if a rank does not
    start.
    """

    def __init__(
        self, par: str | os.PathLike[str], *, kv_memory: float | str | None = None, **options: Any
    ) -> None:
        self._session, (bundle, self.model, pages, encoder) = open_session(
            InferenceSession, par, lambda bundle: _read(bundle, kv_memory, options), **options
        )
        self._folder = bundle.path
        self._room = pages * self.model.page_size
        self._encoded: EncoderDecoder | None = None
        try:
            if encoder is not None:
                own = (self._session, bundle, self.model)
                self._encoded = EncoderDecoder.open(encoder, *own, options)
            else:
                self._source = _source(self._session, bundle, self.model, pages)
        except BaseException:
            self._session.close()
            raise

    def close(self) -> None:
        """Ends the ranks."""
        if self._encoded is not None:
            self._encoded.close()
        self._session.close()

    @property
    def hears(self) -> bool:
        """True for a speech model, whose prompts are sounds."""
        return self._encoded is not None and self._encoded.hears

    @cached_property
    def sound(self) -> SoundFeatures:
        """The conversion of sound to the model's features. Errors: ModelError if the folder does
        not describe it."""
        return SoundFeatures.of(self._folder)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model. Errors: ModelError if it has none."""
        return Tokenizer(self._folder)

    def generate(self, prompts: Prompt | Sequence[Prompt], **options: Any) -> list[Completion]:
        """Returns a completion for each prompt, in order, or `num_return_sequences` completions for
        each prompt. The rows of an array of token ids are prompts, too.

        max_new_tokens  most tokens to generate for a prompt; or `max_length`, prompt included
        min_new_tokens  least tokens before one that ends the text; default 0
        stop_strings    texts that end an answer, which then has the text before them; or special
                        tokens, which are no text
        eos_token_id    ids of tokens that end a text; default: the model's
        language, task  of a speech model: the language that is spoken (default: the likeliest), and
                        "transcribe" or "translate"; `language` of a translator: the special token
                        of the language to translate to, such as "deu_Latn"
        others          see `Sampling`

        Errors: InputError for an object that is no prompt, a prompt without tokens, or wrong
        options; TooLongError, an InputError, for a prompt that leaves no room in the model's
        context.
        """
        batch = self._batch(prompts, options.pop("num_return_sequences", 1))
        run = self._running(batch, options)
        for _ in run.steps():
            pass
        return run.completions

    def stream(self, prompt: Prompt, **options: Any) -> Iterator[str]:
        """Yields the text of an answer piece by piece, as its tokens come. Options and errors are
        those of `generate`. If the caches are not in pages, ranks keep only the caches of one call:
        InputError if another call has begun meanwhile."""
        for piece, _ in self.follow(prompt, **options):
            if piece:
                yield piece

    def follow(self, prompt: Prompt, **options: Any) -> Iterator[tuple[str, Completion]]:
        """Yields, for each token of an answer, the new text that is complete with it (perhaps
        empty), and the answer so far. Options and errors are those of `stream`."""
        run = self._running([prompt], options)
        for pieces in run.steps():
            yield pieces[0], run.completions[0]

    def check_room(self, prompt: Prompt) -> None:
        """Errors: TooLongError for a prompt that leaves no room for a new token; others as for
        `generate`. For an encoder-decoder, checks nothing."""
        if self._encoded is None:
            self._within(self._tokens(prompt), 1)

    def _batch(self, prompts: Prompt | Sequence[Prompt], copies: int) -> list[Prompt]:
        """Returns the list of prompts of a call, each `copies` times; `prompts` is one prompt or
        several. Errors: InputError if `copies` is below 1."""
        if copies < 1:
            raise InputError(f"num_return_sequences is {copies}; it must be at least 1")
        each: list[Any] = [prompts] if _is_one(prompts) else list(prompts)
        return [prompt for prompt in each for _ in range(copies)]

    def _running(self, prompts: Sequence[Prompt], options: Mapping[str, Any]) -> _Run:
        """Returns the run that generates answers to prompts. `options` are those of `generate`."""
        if self._encoded is not None:
            return self._reading(self._encoded, prompts, dict(options))
        tokens = [self._tokens(prompt) for prompt in prompts]
        return _Run(self, self._source, tokens, *self._limits(tokens, dict(options)))

    def _reading(
        self, encoded: EncoderDecoder, prompts: Sequence[Prompt], options: dict[str, Any]
    ) -> _Run:
        """Returns the run for prompts that the encoder of an encoder-decoder reads. `options` are
        those of `generate`."""
        language, task = options.pop("language", None), options.pop("task", None)
        begin, rules = encoded.start(language, task, self.tokenizer if language else None)
        inputs = [self._input(prompt) for prompt in prompts]
        for each in inputs:
            encoded.check(each)
        limits = self._limits([begin.tokens] * len(prompts), options)
        source = encoded.source(inputs, begin, rules)
        run = _Run(self, source, [begin.tokens] * len(prompts), *limits)
        for completion, each in zip(run.completions, inputs, strict=True):
            completion.prompt = each.shape[-1] if isinstance(each, np.ndarray) else len(each)
        return run

    def _input(self, prompt: Prompt) -> Input:
        """Returns the encoder's input for a prompt: token ids, or the features of a sound. Errors:
        InputError if a prompt of this kind does not fit the model."""
        is_sound = isinstance(prompt, np.ndarray) and prompt.dtype.kind == "f"
        if is_sound != self.hears:
            given = "sound" if is_sound else "text"
            reads = (
                "speech: give a sound (an array of samples, --audio FILE)"
                if self.hears
                else "text: give a text or token ids"
            )
            raise InputError(f"the prompt is {given}, and the model reads {reads}")
        if not is_sound:
            return self._encoded_text(prompt)
        sound = cast(Array, prompt)
        return self.sound.of_sound(sound) if sound.ndim == 1 else sound

    def _tokens(self, prompt: Prompt) -> list[int]:
        """Returns the tokens of a prompt of a decoder; an empty text becomes the token that begins
        texts. Errors: InputError for a prompt without tokens or with unknown ones."""
        tokens = self._encoded_text(prompt)
        if not tokens and self.model.begin is not None:
            tokens = [self.model.begin]
        self.model.check_tokens(tokens)
        return tokens

    def _encoded_text(self, prompt: Prompt) -> list[int]:
        """Returns the token ids of a prompt that is a text, a chat or token ids. Errors: InputError
        for anything else."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if isinstance(_first(prompt), Mapping):
            return self.tokenizer.chat(cast(Messages, prompt))
        return [_token(token) for token in prompt]

    def _limits(
        self, prompts: Sequence[Sequence[int]], options: dict[str, Any]
    ) -> tuple[list[Limits], tuple[str, ...]]:
        """Returns the limits of each text, and the stop strings. Removes the options that it reads
        from `options`. Errors: InputError for a wrong or an unknown option."""
        sampling = Sampling(**{n: options.pop(n) for n in _SAMPLING & options.keys()})
        sampling.check(self.model.vocabulary)
        most_new, most = options.pop("max_new_tokens", None), options.pop("max_length", None)
        least = options.pop("min_new_tokens", None)
        numbers = {"max_new_tokens": most_new, "max_length": most, "min_new_tokens": least}
        for name, value in numbers.items():
            if value is not None and not isinstance(value, Integral):
                raise InputError(f"{name} is {value!r}; it must be a whole number")
        ends = options.pop("eos_token_id", None)
        ends = self.model.ends if ends is None else ends
        stops = options.pop("stop_strings", None) or ()
        stops = (stops,) if isinstance(stops, str) else tuple(stops)
        if "" in stops:
            raise InputError("a stop string is empty; leave it out")
        if options:
            raise InputError(
                f"generate has no option {next(iter(options))!r}; it has max_new_tokens, "
                "max_length, min_new_tokens, stop_strings, eos_token_id, num_return_sequences, "
                + ("language, task, " if self._encoded else "")
                + ", ".join(sorted(_SAMPLING))
            )
        if most_new is None and most is None:
            most_new = MOST_NEW_TOKENS
        rooms = []
        for prompt in prompts:
            room = most_new if most_new is not None else most - len(prompt)
            if room < 1:
                raise InputError(
                    f"a prompt has {len(prompt)} tokens, and at most {max(room, 0)} new ones may "
                    "follow; give a larger max_new_tokens or max_length"
                )
            rooms.append(self._within(prompt, room))
        context = self.model.context
        longest, most_steps = max(map(len, prompts), default=0), max(rooms, default=0)
        is_batch = not self.model.page_size  # whose texts share their columns
        if is_batch and context is not None and longest + most_steps > context:
            raise InputError(
                f"the longest prompt of the batch has {longest} tokens, and {most_steps} new ones "
                f"may follow, but the model's context is {context}; give a smaller max_new_tokens, "
                "or prompts of similar lengths"
            )
        ended = frozenset([ends] if isinstance(ends, int) else ends)
        if stops:
            ended |= self.tokenizer.special_ids(stops)
        ended = frozenset(token for token in ended if token < self.model.vocabulary)
        limits = Limits(sampling, ends=ended, min_new_tokens=least or 0)
        each = [replace(limits, max_new_tokens=n, row=row) for row, n in enumerate(rooms)]
        return each, stops

    def _within(self, prompt: Sequence[int], room: int) -> int:
        """Returns how many of `room` new tokens the context and the caches have room for, behind a
        prompt. Errors: TooLongError if there is room for none."""
        context = self.model.context
        limits = [("the model's context", context, "a shorter one")] if context is not None else []
        if self._room:
            limits.append(("the cache", self._room, "a shorter one, or more kv_memory"))
        for what, most, remedy in limits:
            if len(prompt) >= most:
                raise TooLongError(
                    f"a prompt has {len(prompt)} tokens, and {what} {most}; give {remedy}", what
                )
            room = min(room, most - len(prompt))
        return room


def _is_one(prompts: object) -> bool:
    """True for one prompt, False for a batch of prompts. A text, a list of numbers and a list of
    messages are one prompt, and so are an array of ids of one dimension, samples, and the features
    of a sound. Errors: InputError if it is no prompt."""
    if isinstance(prompts, str):
        return True
    if isinstance(prompts, np.ndarray):
        return prompts.ndim <= (1 if prompts.dtype.kind in "iu" else 2)
    return isinstance(_first(prompts), (Integral, Mapping))


def _first(given: Any) -> object:
    """Returns the first element of a list of prompts, tokens or messages; None if the list is
    empty. Errors: InputError if `given` is no list."""
    try:
        return given[0] if len(given) else None
    except (TypeError, LookupError):
        raise InputError(f"a prompt is {shortly(given)}; {_PROMPTS}") from None


def _token(given: Any) -> int:
    """Returns a token id. Errors: InputError unless it is a whole number."""
    try:
        return operator.index(given)
    except TypeError:
        raise InputError(f"a prompt has {shortly(given)} as a token id; {_PROMPTS}") from None


def _read(
    bundle: Bundle, kv_memory: float | str | None, options: Mapping[str, Any]
) -> tuple[Bundle, LanguageModel, int, Bundle | None]:
    """Returns the model, its roles, the number of pages of its caches (0 if they are not in pages),
    and its encoder, if it has one. Errors: ModelError for another model; InputError for too little
    memory."""
    model = LanguageModel.of(bundle)
    pages = count_pages(bundle, model, kv_memory, _TOGETHER, options) if model.page_size else 0
    return bundle, model, pages, read_encoder(bundle) if model.has_encoder else None


def _source(
    session: InferenceSession, bundle: Bundle, model: LanguageModel, pages: int
) -> TokenSource:
    """Returns the source of tokens of a decoder; `pages` is 0 if its caches are not in pages."""
    if not pages:
        return BatchSource(Decoder(session, bundle, model))
    decoder = PagedDecoder(session, bundle, model, pages)
    return PagedSource(Batching(decoder, _TOGETHER, _STEP_TOKENS))


class _Run:
    """The texts that one call generates together.

    source   generates their tokens
    prompts  the tokens of each prompt
    limits   the limits of each text
    stops    the stop strings
    """

    def __init__(
        self,
        generator: Generator,
        source: TokenSource,
        prompts: Sequence[Sequence[int]],
        limits: Sequence[Limits],
        stops: Sequence[str],
    ) -> None:
        self._source, self._prompts, self._limits = source, prompts, limits
        self.completions = [Completion(prompt=len(prompt)) for prompt in prompts]
        has_text = bool(stops) or (generator._folder / "tokenizer.json").exists()
        self._streams = [Stream(generator.tokenizer) for _ in prompts] if has_text else []
        self._stops = [StopStrings(stops) for _ in prompts]

    def steps(self) -> Iterator[list[str]]:
        """Generates the texts until all have ended. Yields, after each step, the new text of each
        prompt's answer, which may be empty, and keeps `completions` up to date."""
        if not self._prompts:
            return
        ended: set[int] = set()
        for step in self._source.follow(self._prompts, self._limits, ended):
            pieces = [""] * len(self._prompts)
            for row, token in step:
                completion = self.completions[row]
                if completion.reason:
                    continue  # other calls may have generated more of it
                completion.tokens.append(token.id)
                completion.logprobs.append(token.logprob)
                pieces[row] += self._text(row, token.id)
                if completion.reason:
                    ended.add(row)
            yield pieces

    def _text(self, row: int, token: int) -> str:
        """Returns the new text of answer number `row` after a token; sets its `reason` if it ends
        there."""
        completion, limits = self.completions[row], self._limits[row]
        if token in limits.ends:
            completion.reason = "stop"
        elif len(completion.tokens) == limits.max_new_tokens:
            completion.reason = "length"
        if not self._streams:
            return ""
        new = "" if token in limits.ends else self._streams[row].add(token)
        if completion.reason:
            new += self._streams[row].end()
        piece = self._stops[row].add(new, is_last=bool(completion.reason))
        if self._stops[row].found:
            completion.reason = "stop"
        completion.text += piece
        return piece
