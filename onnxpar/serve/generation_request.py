"""Requests for generated answers: the fields that all of them have, and requests of
/v1/completions."""

from __future__ import annotations

import re
import secrets
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from onnxpar.llm.sampling import Sampling
from onnxpar.serve.request import Array, Part, Request, Texts, Whole, refuse, unsupported
from onnxpar.serve.service import GeneratingService
from onnxpar.serve.tools import Tools

TopLogprobs = Annotated[Whole, Field(ge=0, le=20)]
"""The number of likeliest tokens that an answer lists with each token."""
_Token = Annotated[
    int, BeforeValidator(lambda key: int(key) if re.fullmatch("[0-9]{1,10}", key) else key)
]
_Bias = Annotated[float, Field(ge=-100, le=100)]
_Stop = Annotated[str, Field(min_length=1, max_length=512)]
_Stops = Annotated[Array[_Stop], BeforeValidator(lambda v: [v] if isinstance(v, str) else v)]
_GREEDY_BELOW = 1e-5
"""Below this temperature, the likeliest token is chosen: sampling would choose the same token, and
logits would overflow."""


class StreamOptions(Part):
    """The field `stream_options`: whether a last chunk has the numbers of tokens."""

    include_usage: bool = False


class GenerationRequest(Request):
    """A request for generated answers. As in OpenAI's API, tokens are sampled from the whole
    vocabulary, with a new seed for each request, unless fields say otherwise."""

    schema_field: ClassVar[str] = "response_format"
    """The field with the JSON schema of answers."""
    length_fields: ClassVar[Sequence[str]] = ("max_tokens",)
    """The fields with the largest number of new tokens; the first one that is set counts."""

    n: Whole = Field(1, ge=1, le=2**31)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    temperature: float = Field(1.0, ge=0, le=2)
    top_k: Whole = Field(0, ge=-1, le=2**31)
    top_p: float = Field(1.0, ge=0, le=1)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: dict[_Token, _Bias] = Field({}, max_length=1024)
    seed: Whole = Field(default_factory=lambda: secrets.randbits(64), ge=-(2**63), le=2**64 - 1)
    stop: _Stops = Field([], max_length=4)
    stop_token_ids: Array[int] = Field([], max_length=1024)
    ignore_eos: bool = False
    min_tokens: Whole = Field(0, ge=0, le=2**31)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def check(self, service: Any) -> None:
        if "stream_options" in self.model_fields_set and not self.stream:
            refuse("stream_options", "is for streams: add stream")
        for name in self.model_fields_set.intersection(self.length_fields):
            requested, most = getattr(self, name), service.settings.max_tokens or 2**31
            if requested > most:
                refuse(name, f"is {requested}; it should be less than or equal to {most}")

    @abstractmethod
    def tokens(self, service: GeneratingService) -> Sequence[Sequence[int]]:
        """Returns the tokens of each prompt. Errors: ApiError if the model cannot read one."""

    @property
    def new_tokens(self) -> int | None:
        """The requested limit of new tokens; None for as many as the model has room for."""
        numbers = (getattr(self, name) for name in self.length_fields)
        return next((number for number in numbers if number is not None), None)

    @property
    def likeliest(self) -> int | None:
        """How many of the likeliest tokens an answer lists with each token; None if no
        probabilities are requested."""
        return None

    @property
    def answer_schema(self) -> Mapping[str, Any] | None:
        """The JSON schema that answers must fit; None for any text."""
        return None

    @property
    def callable_tools(self) -> Tools | None:
        """The tools that answers may call; None if they may call none."""
        return None

    @property
    def continues(self) -> bool:
        """True if an answer continues the text of its prompt, as that of a chat usually does
        not."""
        return True

    @property
    def tells_prompt(self) -> bool:
        """True if the probabilities of the prompt's tokens are requested."""
        return False

    @property
    def sampling(self) -> Sampling:
        """The options for the choice of tokens."""
        penalties = {"repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias"}
        return Sampling(
            do_sample=self.temperature >= _GREEDY_BELOW,
            top_k=max(self.top_k, 0),
            seed=self.seed % 2**64,
            **self.model_dump(include={"temperature", "top_p", "min_p", *penalties}),
        )


class CompletionRequest(GenerationRequest):
    """A request of /v1/completions; by default for 16 new tokens, as in OpenAI's API."""

    prompt: Texts
    suffix: Annotated[Any, unsupported("the model continues texts at their end", "")] = None
    best_of: Whole | None = None
    echo: bool = False
    logprobs: TopLogprobs | None = None
    max_tokens: Whole = Field(16, ge=0, le=2**31)

    def check(self, service: Any) -> None:
        super().check(service)
        if self.best_of not in (None, self.n):
            refuse("best_of", "is not supported; ask for n answers")
        if not (self.max_tokens or self.echo):
            refuse("max_tokens", "is 0; ask for at least 1, or add echo")

    def tokens(self, service: GeneratingService) -> Sequence[Sequence[int]]:
        encode = service.engine.tokenizer.encode
        return [encode(prompt) if isinstance(prompt, str) else prompt for prompt in self.prompt]

    @property
    def likeliest(self) -> int | None:
        return self.logprobs

    @property
    def tells_prompt(self) -> bool:
        return self.echo and self.logprobs is not None
