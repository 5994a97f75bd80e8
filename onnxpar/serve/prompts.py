"""Converts a request for generated text to the engine's terms: its prompts to tokens, its options
to limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onnxpar.base.errors import InputError
from onnxpar.llm.requests import Limits
from onnxpar.serve.api_error import ApiError, quote
from onnxpar.serve.generation_request import CompletionRequest, GenerationRequest
from onnxpar.serve.grammar import Form, JsonConstraint
from onnxpar.serve.service import GeneratingService


@dataclass(frozen=True)
class Prepared:
    """The data of a request for the engine.

    prompts      the tokens of each prompt
    echoes       the text with which each answer begins, for requests with `echo`; else empty texts
    rooms        the largest number of new tokens after each prompt
    constraints  a constraint for each answer, if answers must have a form; else empty
    ends         the tokens that end an answer
    """

    prompts: Sequence[Sequence[int]]
    echoes: Sequence[str]
    rooms: Sequence[int]
    constraints: Sequence[JsonConstraint]
    ends: frozenset[int]


def prepare(service: GeneratingService, request: GenerationRequest) -> Prepared:
    """Returns the data of a request for the engine; may take a while. Errors: ApiError for a
    request that the model cannot read."""
    try:
        request.sampling.check(service.engine.vocabulary)
    except InputError as error:
        raise ApiError(str(error)) from None
    prompts = [_checked(service, prompt) for prompt in request.tokens(service)]
    number, most = len(prompts) * request.n, service.settings.max_choices
    if number > most:
        count = f"{len(prompts)} prompts times n={request.n} are {number} answers"
        text = f"n asks for too many: {count}, and --max-choices allows {most}"
        raise ApiError(text, param="n")
    rooms = [_room(service, request, prompt) for prompt in prompts]
    echoes = [""] * len(prompts)
    if isinstance(request, CompletionRequest) and request.echo:
        decode = service.engine.tokenizer.decode
        pairs = zip(request.prompt, prompts, strict=True)
        echoes = [text if isinstance(text, str) else decode(tokens) for text, tokens in pairs]
    form = _form(service, request)
    constraints = [] if form is None else service.grammars.constraints(form, number)
    if request.likeliest is not None:
        service.grammars.load()
    of_each = [echoes[index // request.n] for index in range(number)]
    return Prepared(prompts, of_each, rooms, constraints, _ends(service, request))


def limits_of(
    service: GeneratingService, request: GenerationRequest, prepared: Prepared, index: int
) -> Limits:
    """Returns the engine's limits for answer number `index`; `request.n` answers in turn are to one
    prompt."""
    return Limits(
        sampling=request.sampling,
        max_new_tokens=max(prepared.rooms[index // request.n], 1),
        min_new_tokens=request.min_tokens,
        ends=prepared.ends,
        tells_prompt=request.tells_prompt,
        top_logprobs=request.likeliest or 0,
        row=index,
        constraint=prepared.constraints[index] if prepared.constraints else None,
    )


def _form(service: GeneratingService, request: GenerationRequest) -> Form | None:
    """Returns the form that answers must have; None if they may be any text. Errors: ApiError for
    tools, if it is not known how the model calls tools."""
    tools = request.callable_tools
    if tools is not None and tools.are_required:
        return Form(None, tools, "tools")
    if request.answer_schema is not None:
        return Form(request.answer_schema, tools, request.schema_field)
    if tools is not None and service.family is None:
        raise ApiError(
            "tools cannot be called: how the model calls them is not known of its chat template; "
            "start the server with --tool-call-parser, or ask for tool_choice required",
            param="tools",
            code="no_tool_call_parser",
        )
    return None


def _checked(service: GeneratingService, tokens: Sequence[int]) -> Sequence[int]:
    """Returns the tokens of a prompt; an empty prompt becomes the token that begins texts. Errors:
    ApiError for no tokens, or unknown ones."""
    engine = service.engine
    if not tokens and engine.model.begin is not None:
        tokens = [engine.model.begin]
    if not tokens:
        raise ApiError("prompt has no tokens; give a text or token ids", param="prompt")
    if min(tokens) < 0 or max(tokens) >= engine.vocabulary:
        last = engine.vocabulary - 1
        raise ApiError(f"prompt has a token that is not from 0 to {last}", param="prompt")
    return tokens


def _room(service: GeneratingService, request: GenerationRequest, prompt: Sequence[int]) -> int:
    """Returns the largest number of new tokens after a prompt, by the request, the settings and the
    model. Errors: ApiError if there is no room."""
    longest = service.engine.longest
    requested, allowed = request.new_tokens, service.settings.max_tokens or longest
    most = allowed if requested is None else min(requested, allowed)
    if request.min_tokens > most:
        text = f"min_tokens is {request.min_tokens}, and at most {most} may be new; ask for fewer"
        raise ApiError(text, param="min_tokens")
    if len(prompt) >= longest:
        raise ApiError(
            f"the prompt has {len(prompt)} tokens, and the model has room for {longest}; give a "
            "shorter one",
            code="context_length_exceeded",
        )
    return min(most, longest - len(prompt))


def _ends(service: GeneratingService, request: GenerationRequest) -> frozenset[int]:
    """Returns the tokens that end an answer: the end tokens of the model and of the request, and
    stop strings that are special tokens (these never occur in the text). Errors: ApiError for an
    unknown token."""
    vocabulary = range(service.engine.vocabulary)
    for token in request.stop_token_ids:
        if token not in vocabulary:
            text = f"stop_token_ids has {quote(token)}; ids are from 0 to {vocabulary[-1]}"
            raise ApiError(text, param="stop_token_ids")
    of_model = frozenset() if request.ignore_eos else service.engine.model.ends
    named = service.engine.tokenizer.special_ids(request.stop)
    return frozenset(t for t in (*of_model, *named, *request.stop_token_ids) if t in vocabulary)
