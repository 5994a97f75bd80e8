"""Turns the prompts of a request into tokens, and its wishes into the engine's limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from onnxpar.errors import InputError
from onnxpar.llm.requests import Limits
from onnxpar.llm.tokenizer import Messages
from onnxpar.serve.api_error import ApiError, quoted
from onnxpar.serve.grammar import Form, JsonConstraint
from onnxpar.serve.service import GeneratingService
from onnxpar.serve.tools import with_ids
from onnxpar.serve.wanted import Prompt, Wanted


@dataclass(frozen=True)
class Prepared:
    """A request that the engine can take.

    prompts      the tokens of each prompt
    echoes       the text in front of each answer
    rooms        the most new tokens after each prompt
    constraints  of each answer, where its form is asked for
    ends         the tokens that end an answer
    """

    prompts: Sequence[Sequence[int]]
    echoes: Sequence[str]
    rooms: Sequence[int]
    constraints: Sequence[JsonConstraint]
    ends: frozenset[int]


def prepare(service: GeneratingService, wanted: Wanted) -> Prepared:
    """Returns the tokens of a request and what goes with them; may take a while. Errors: ApiError
    for what the model cannot read."""
    try:
        wanted.sampling.check(service.engine.vocabulary)
    except InputError as error:
        raise ApiError(str(error)) from None
    prompts = [_tokens(service, wanted, prompt) for prompt in wanted.prompts]
    rooms = [_room(service, wanted, prompt) for prompt in prompts]
    number = len(prompts) * wanted.number
    echoes = [""] * len(prompts)
    if wanted.echo:
        decode = service.engine.tokenizer.decode
        each = zip(wanted.prompts, prompts, strict=True)
        echoes = [text if isinstance(text, str) else decode(tokens) for text, tokens in each]
    form = _form(service, wanted)
    constraints = [] if form is None else service.grammars.constraints(form, number)
    if wanted.logprobs is not None:
        service.grammars.load()
    of_each = [echoes[index // wanted.number] for index in range(number)]
    return Prepared(prompts, of_each, rooms, constraints, _ends(service, wanted))


def limits_of(service: GeneratingService, wanted: Wanted, prepared: Prepared, index: int) -> Limits:
    """Returns the engine's limits of an answer, by its number."""
    return Limits(
        sampling=wanted.sampling,
        max_new_tokens=max(prepared.rooms[index // wanted.number], 1),
        min_new_tokens=wanted.min_tokens,
        ends=prepared.ends,
        tells_prompt=wanted.tells_prompt,
        top_logprobs=wanted.logprobs or 0,
        row=index,
        constraint=prepared.constraints[index] if prepared.constraints else None,
    )


def _form(service: GeneratingService, wanted: Wanted) -> Form | None:
    """The form of answers; None if it is not asked for. Errors: ApiError for tools where it is not
    known how the model calls them."""
    tools = wanted.tools
    if tools is not None and tools.are_required:
        return Form(None, tools, "tools")
    if wanted.schema is not None:
        return Form(wanted.schema, tools, wanted.schema_field)
    if tools is not None and service.family is None:
        raise ApiError(
            "tools cannot be called: how the model calls them is not known of its chat template; "
            "start the server with --tool-call-parser, or ask for tool_choice required",
            param="tools",
            code="no_tool_call_parser",
        )
    return None


def _tokens(service: GeneratingService, wanted: Wanted, prompt: Prompt) -> Sequence[int]:
    """The tokens of a prompt."""
    engine = service.engine
    if isinstance(prompt, str):
        found: Sequence[int] = engine.tokenizer.encode(prompt)
    elif prompt and not isinstance(prompt[0], int):
        found = chat_tokens(service, cast(Messages, prompt), wanted.chat)
    else:
        found = cast(Sequence[int], prompt)
    if not found and engine.model.begin is not None:
        found = [engine.model.begin]
    if not found:
        raise ApiError("prompt has no tokens; give a text or token ids", param="prompt")
    if min(found) < 0 or max(found) >= engine.vocabulary:
        last = engine.vocabulary - 1
        raise ApiError(f"prompt has a token that is not from 0 to {last}", param="prompt")
    return found


def chat_tokens(
    service: GeneratingService, messages: Messages, options: Mapping[str, Any]
) -> Sequence[int]:
    """Returns the tokens of a chat, by options of its template. Errors: ApiError."""
    tokenizer = service.engine.tokenizer
    if not tokenizer.has_chat:
        raise ApiError(
            "the model has no chat template; use /v1/completions",
            param="messages",
            code="no_chat_template",
        )
    if service.family is not None and service.family.ids:
        messages = with_ids(messages, service.family.ids)
    try:
        return tokenizer.chat(messages, **options)
    except InputError as error:
        raise ApiError(str(error), param="messages") from None


def _room(service: GeneratingService, wanted: Wanted, prompt: Sequence[int]) -> int:
    """The most new tokens after a prompt."""
    longest = service.engine.longest
    most = service.settings.max_tokens or longest
    most = most if wanted.max_tokens is None else wanted.max_tokens
    if wanted.min_tokens > most:
        text = f"min_tokens is {wanted.min_tokens}, and at most {most} may be new; ask for fewer"
        raise ApiError(text, param="min_tokens")
    if len(prompt) >= longest:
        raise ApiError(
            f"the prompt has {len(prompt)} tokens, and the model has room for {longest}; give a "
            "shorter one",
            code="context_length_exceeded",
        )
    return min(most, longest - len(prompt))


def _ends(service: GeneratingService, wanted: Wanted) -> frozenset[int]:
    """The tokens that end an answer: of the model, those that are asked for, and stop strings that
    are special tokens, which no text has. Errors: ApiError for a token that there is not."""
    vocabulary = range(service.engine.vocabulary)
    for token in wanted.stop_tokens:
        if token not in vocabulary:
            text = f"stop_token_ids has {quoted(token)}; ids are from 0 to {vocabulary[-1]}"
            raise ApiError(text, param="stop_token_ids")
    own = frozenset() if wanted.ignore_eos else service.engine.model.ends
    named = service.engine.tokenizer.special_ids(wanted.stops)
    return frozenset(t for t in own | named | wanted.stop_tokens if t in vocabulary)
