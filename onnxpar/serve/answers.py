"""The answers of a request: collects tokens from the engine's thread, and makes text and calls of
them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from onnxpar.base.errors import InputError, OnnxparError
from onnxpar.llm.requests import Busy, End, Event, Failure, PromptTokens, Token
from onnxpar.llm.stop_strings import StopStrings
from onnxpar.llm.tokenizer import Stream
from onnxpar.serve.answer_parts import CallEnd, Part, Text
from onnxpar.serve.api_error import ApiError
from onnxpar.serve.generation_request import GenerationRequest
from onnxpar.serve.placed_text import PlacedText, PlacedToken
from onnxpar.serve.prompts import Prepared, limits_of
from onnxpar.serve.served_engine import ServedGeneration
from onnxpar.serve.service import GeneratingService, engine_error
from onnxpar.serve.tool_families import BARE
from onnxpar.serve.tool_parser import ToolParser


@dataclass(frozen=True)
class Piece:
    """The part of an answer that one event of the engine adds.

    index   the number of the answer
    text    new text, which may be empty
    tokens  the new tokens, if the client requests their probabilities
    finish  the reason why the answer ends: "stop", "length" or "tool_calls"; None if it goes on
    parts   the text as content and calls of tools, as far as these are complete
    """

    index: int
    text: str
    tokens: Sequence[PlacedToken] = ()
    finish: str | None = None
    parts: Sequence[Part] = ()

    @property
    def content(self) -> str:
        """The new text outside of calls."""
        return "".join(part.text for part in self.parts if isinstance(part, Text))


@dataclass(frozen=True)
class Usage:
    """The numbers of tokens of a request: tokens of prompts, new tokens, and tokens of prompts that
    were in the caches already."""

    prompt: int
    new: int
    cached: int


class _Answer:
    """One answer: its text, and the state of its generation.

    text    turns tokens into text
    placed  also finds the place of each token in the text; None if no probabilities are requested
    stops   cuts the text at stop strings
    echo    the text of the prompt, if the answer is to begin with it
    parser  finds calls of tools; None if there are no tools
    """

    def __init__(
        self,
        text: Stream,
        placed: PlacedText | None,
        stops: StopStrings,
        echo: str,
        parser: ToolParser | None,
    ) -> None:
        self.text, self.placed, self.stops, self.parser = text, placed, stops, parser
        self.echo = echo
        """The text of the prompt, until it is sent."""
        self.generation: ServedGeneration | None = None
        self.new, self.cached = 0, 0
        self.last = 0.0
        self.is_done = False
        """True if the text of the answer is complete."""
        self.has_ended = False
        """True if the engine sends no more events for the answer."""

    def add(self, token: Token) -> tuple[str, list[PlacedToken]]:
        """Adds a token. Returns the text that is complete now, and a list of the token if its
        probability is requested."""
        if self.placed is None:
            return self.text.add(token.id), []
        text, begin = self.placed.add(token.id)
        return text, [PlacedToken.of(token, begin)]

    def end(self) -> None:
        """Ends the answer here, though the engine may still send tokens."""
        assert self.generation is not None, "an answer has tokens after it was submitted"
        self.is_done = True
        self.generation.cancel()

    def parted(self, piece: Piece) -> Piece:
        """Returns a piece with its text split into content and calls. The finish "stop" becomes
        "tool_calls" if the answer has called tools."""
        if self.parser is None:
            return replace(piece, parts=[Text(piece.text)] if piece.text else ())
        is_last, is_cut = piece.finish is not None, piece.finish == "length"
        parts = self.parser.add(piece.text, is_last, is_cut)
        has_called = piece.finish == "stop" and self.parser.calls
        return replace(piece, parts=parts, finish="tool_calls" if has_called else piece.finish)


class Answers:
    """The answers of a request. Use it in a `with`: it submits them to the engine, and at the end
    cancels answers that still run. `prepared` has the tokens of each prompt, and other data for the
    engine."""

    def __init__(
        self, service: GeneratingService, request: GenerationRequest, prepared: Prepared
    ) -> None:
        self._service, self._request, self._prepared = service, request, prepared
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._start = time.perf_counter()
        self._answers = [
            self._new_answer(prepared.prompts[index // request.n], echo)
            for index, echo in enumerate(prepared.echoes)
        ]

    def __enter__(self) -> Answers:
        """Submits all answers to the engine. Errors: ApiError if the engine refuses one of them."""
        try:
            for index, answer in enumerate(self._answers):
                answer.generation = self._service.engine.submit(
                    self._prepared.prompts[index // self._request.n],
                    limits_of(self._service, self._request, self._prepared, index),
                    partial(self._listen, index),
                )
        except OnnxparError as error:
            self.__exit__()
            if isinstance(error, InputError):
                raise ApiError(str(error)) from None
            raise self._service.busy() if isinstance(error, Busy) else engine_error(error) from None
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for answer in self._answers:
            if answer.generation is not None and not answer.has_ended:
                answer.generation.cancel()

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yields the pieces of all answers as they come, until all have ended. Errors: ApiError if
        an answer cannot be finished."""
        running = len(self._answers)
        while running:
            index, event = await self._events.get()
            answer = self._answers[index]
            if isinstance(event, Failure):
                answer.has_ended = True
                raise engine_error(event.error)
            if isinstance(event, End):
                running -= 1
                answer.has_ended, answer.cached = True, event.cached
            if not answer.is_done:
                piece = self._piece(index, answer, event)
                yield self._parted(answer, replace(piece, text=answer.echo + piece.text))
                answer.echo = ""

    @property
    def usage(self) -> Usage:
        """The numbers of tokens, once all answers have ended. A token of a prompt counts as cached
        if it was in the caches for all answers to that prompt."""
        number = self._request.n
        of_prompts = [
            self._answers[at : at + number] for at in range(0, len(self._answers), number)
        ]
        return Usage(
            sum(map(len, self._prepared.prompts)),
            sum(answer.new for answer in self._answers),
            sum(min(answer.cached for answer in same_prompt) for same_prompt in of_prompts),
        )

    def _parted(self, answer: _Answer, piece: Piece) -> Piece:
        """Splits a piece into parts. If the request allows a single call, the piece that ends a
        call is the last one of the answer."""
        piece = answer.parted(piece)
        if self._request.callable_tools is None or self._request.callable_tools.is_parallel:
            return piece
        for at, part in enumerate(piece.parts):
            if isinstance(part, CallEnd) and part.outcome == "right":
                answer.end()
                return replace(piece, parts=piece.parts[: at + 1], finish="tool_calls")
        return piece

    def _listen(self, index: int, event: Event) -> None:
        """Called in the engine's thread with an event of answer number `index`: passes it on to the
        event loop."""
        with suppress(RuntimeError):  # the loop has ended, and with it the request
            self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

    def _new_answer(self, prompt: Sequence[int], echo: str) -> _Answer:
        """Returns an answer without text to a prompt; it begins with the text `echo`."""
        request = self._request
        behind = prompt if request.continues else ()
        tokenizer = self._service.engine.tokenizer
        parser = None
        shown: Set[int] = frozenset()
        if request.callable_tools is not None:
            family = BARE if self._prepared.constraints else self._service.family
            assert family is not None, "a request with tools has been refused without it"
            parser = ToolParser(family, request.callable_tools.parameters)
            shown = tokenizer.special_ids(family.special)
        stream = Stream(tokenizer, not request.skip_special_tokens, behind, shown)
        placed = None
        if request.likeliest is not None:
            placed = PlacedText(stream, self._service.grammars.bytes_of, len(echo))
        stops = StopStrings(request.stop, request.include_stop_str_in_output)
        return _Answer(stream, placed, stops, echo, parser)

    def _piece(self, index: int, answer: _Answer, event: Token | PromptTokens | End) -> Piece:
        """Returns what an event of the engine adds to answer number `index`, which is not complete:
        text, tokens with probabilities, or its end."""
        if isinstance(event, PromptTokens):
            return Piece(index, "", self._of_prompt(index, event))
        if isinstance(event, End):
            if event.reason not in ("stop", "length"):
                raise self._service.busy()  # the engine ended the answer
            if self._prepared.constraints:
                self._prepared.constraints[index].check()
            text = answer.stops.add(answer.text.end(), is_last=True)
            answer.is_done = True
            reason = "length" if self._request.new_tokens == 0 else event.reason
            return Piece(index, text, (), "stop" if answer.stops.found else reason)
        self._measure(answer)
        if self._request.new_tokens == 0:
            return Piece(index, "")  # the engine computes a token all the same
        answer.new += 1
        if event.id in self._prepared.ends and not self._request.include_stop_str_in_output:
            return Piece(index, "", self._last(answer, event))
        text, tokens = answer.add(event)
        if answer.new > self._request.min_tokens:
            text = answer.stops.add(text)
        if not answer.stops.found:
            return Piece(index, text, tokens)
        answer.end()
        return Piece(index, text, tokens, "stop")

    def _last(self, answer: _Answer, token: Token) -> Sequence[PlacedToken]:
        """Returns the token that ends an answer, in a list, for clients that also request the
        tokens of the prompt; none for others."""
        if answer.placed is None or not self._request.tells_prompt:
            return ()
        return [PlacedToken.of(token, answer.placed.length)]

    def _of_prompt(self, index: int, event: PromptTokens) -> list[PlacedToken]:
        """Returns the tokens of the prompt of answer number `index`, with their places in its
        text."""
        first = self._prepared.prompts[index // self._request.n][0]
        stream = Stream(self._service.engine.tokenizer)
        text = PlacedText(stream, self._service.grammars.bytes_of)
        tokens = [PlacedToken(first, None, (), text.add(first)[1])]
        return tokens + [PlacedToken.of(token, text.add(token.id)[1]) for token in event.tokens]

    def _measure(self, answer: _Answer) -> None:
        """Records in the metrics the time since the answer's last token, or since the request for
        its first."""
        now = time.perf_counter()
        if answer.new:
            self._service.metrics.per_token.observe(now - answer.last)
        else:
            self._service.metrics.first.observe(now - self._start)
        answer.last = now
