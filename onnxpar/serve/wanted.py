"""What a request wants: the fields that chats and completions share."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from onnxpar.llm.sampling import Sampling
from onnxpar.llm.tokenizer import Messages
from onnxpar.serve.api_error import ApiError, quoted
from onnxpar.serve.body import Fields
from onnxpar.serve.settings import Settings
from onnxpar.serve.tools import Tools

Prompt = str | Sequence[int] | Messages
"""A text, its tokens, or a chat."""
MOST_LOGPROBS = 20
_MOST_STOPS = 4
_LONGEST_STOP = 512
_MOST_BIASES = 1024
_GREEDY_BELOW = 1e-5
"""Below this temperature, the likeliest token is drawn anyway, and logits would overflow."""


@dataclass(frozen=True)
class Wanted:
    """The answers that a request wants.

    prompts        what is continued, one or several
    number         answers for each prompt
    sampling       how tokens are chosen
    max_tokens     most new tokens; None: the server decides
    stops          strings before which an answer ends
    logprobs       how many of the likeliest tokens are told with each; None: no probabilities
    is_stream      True if text is sent as it comes
    wants_usage    True if a stream ends with the numbers of tokens
    echo           True if each answer begins with its prompt
    schema         the JSON schema of answers; None: any text
    schema_field   the field of the request that has it
    stop_tokens    further tokens that end an answer
    ignore_eos     True if those of the model do not
    min_tokens     least new tokens before one that ends an answer, or a stop string
    shows_stop     True if an answer has the stop string or token that ends it
    shows_specials  True if the text of an answer has its special tokens
    chat           options for the template of a chat
    tools          what answers may call; None: nothing
    repeated       fields of the request that answers repeat
    """

    prompts: Sequence[Prompt]
    number: int
    sampling: Sampling
    max_tokens: int | None
    stops: tuple[str, ...]
    logprobs: int | None
    is_stream: bool
    wants_usage: bool
    echo: bool = False
    schema: Mapping[str, Any] | None = None
    schema_field: str = "response_format"
    stop_tokens: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_tokens: int = 0
    shows_stop: bool = False
    shows_specials: bool = False
    chat: Mapping[str, Any] = field(default_factory=dict)
    tools: Tools | None = None
    repeated: Mapping[str, Any] = field(default_factory=dict)

    @property
    def continues(self) -> bool:
        """True if answers continue the text of their prompts."""
        return not self.chat or bool(self.chat["continue_final_message"])

    @property
    def tells_prompt(self) -> bool:
        """True if the probabilities of the prompt's tokens are asked for."""
        return self.echo and self.logprobs is not None


def check_model(fields: Fields, settings: Settings) -> None:
    """Errors: ApiError if the request names another model; it may leave the name out."""
    name = fields.text("model")
    if name is not None and name != settings.model_name:
        raise unknown_model(name, settings)


def unknown_model(name: str, settings: Settings) -> ApiError:
    """Returns the error of a model that is not served here."""
    text = f"there is no model {quoted(name)}; this server has {settings.model_name!r}"
    return ApiError(text, 404, param="model", code="model_not_found")


def common(fields: Fields, settings: Settings, prompts: int) -> dict[str, Any]:
    """Returns the members of `Wanted` that chats and completions have in common."""
    most = settings.max_choices
    number = fields.whole("n", 1, most)
    number = 1 if number is None else number
    if number * prompts > most:
        count = f"{prompts} prompts times n={number} are {number * prompts} answers"
        fields.refuse("n", f"asks for too many: {count}, and --max-choices allows {most}")
    is_stream = fields.flag("stream")
    options = fields.inner("stream_options")
    if options is not None and not is_stream:
        fields.refuse("stream_options", "is for streams: add stream")
    return {
        "number": number,
        "sampling": _sampling(fields),
        "stops": _stops(fields),
        "stop_tokens": _stop_tokens(fields),
        "ignore_eos": fields.flag("ignore_eos"),
        "min_tokens": fields.whole("min_tokens", 0, 2**31) or 0,
        "shows_stop": fields.flag("include_stop_str_in_output"),
        "shows_specials": not fields.flag("skip_special_tokens", default=True),
        "is_stream": is_stream,
        "wants_usage": options is not None and options.flag("include_usage"),
    }


def _sampling(fields: Fields) -> Sampling:
    """How tokens are chosen. OpenAI's defaults: drawn of all tokens, another one each time."""
    temperature = fields.number("temperature", 1, 0, 2)
    seed = fields.whole("seed", -(2**63), 2**64 - 1)
    top_k = fields.whole("top_k", -1, 2**31)
    return Sampling(
        do_sample=temperature >= _GREEDY_BELOW,
        temperature=temperature,
        top_k=max(top_k or 0, 0),
        top_p=fields.number("top_p", 1, 0, 1),
        min_p=fields.number("min_p", 0, 0, 1),
        repetition_penalty=fields.number("repetition_penalty", 1, 0.01, 100),
        frequency_penalty=fields.number("frequency_penalty", 0, -2, 2),
        presence_penalty=fields.number("presence_penalty", 0, -2, 2),
        logit_bias=_biases(fields),
        seed=secrets.randbits(64) if seed is None else seed % 2**64,
    )


def _biases(fields: Fields) -> dict[int, float]:
    """What is added to the logits of tokens."""
    value = fields.get("logit_bias")
    inner = fields.inner("logit_bias")
    if inner is None:
        return {}
    if len(value) > _MOST_BIASES:
        fields.refuse("logit_bias", f"has {len(value)} tokens; at most {_MOST_BIASES} are allowed")
    found = {}
    for key in value:
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            fields.refuse("logit_bias", f"has {quoted(key)}, which is no id of a token")
        found[int(key)] = inner.number(key, 0, -100, 100)
    return found


def _stops(fields: Fields) -> tuple[str, ...]:
    """The strings before which an answer ends."""
    value = fields.get("stop")
    if value is None:
        return ()
    each = value if isinstance(value, list) else [value]
    if len(each) > _MOST_STOPS:
        fields.refuse("stop", f"has {len(each)} strings; at most {_MOST_STOPS} are allowed")
    stops = tuple(fields.valid_text("stop", stop) for stop in each)
    for stop in stops:
        if not 0 < len(stop) <= _LONGEST_STOP:
            fields.refuse("stop", f"has a string of {len(stop)} characters; 1 to {_LONGEST_STOP}")
    return stops


def _stop_tokens(fields: Fields) -> frozenset[int]:
    """The ids of tokens that end an answer."""
    found = fields.array("stop_token_ids") or ()
    if len(found) > _MOST_BIASES:
        fields.refuse(
            "stop_token_ids", f"has {len(found)} tokens; at most {_MOST_BIASES} are allowed"
        )
    for token in found:
        if isinstance(token, bool) or not isinstance(token, int):
            fields.refuse("stop_token_ids", f"has {quoted(token)}, which is no id of a token")
    return frozenset(found)


def max_tokens(fields: Fields, name: str, settings: Settings, least: int = 1) -> int | None:
    """Returns the most new tokens, of a field of this name."""
    return fields.whole(name, least, settings.max_tokens or 2**31)
