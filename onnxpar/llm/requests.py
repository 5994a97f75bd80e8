"""Requests to an engine, and the events of a request."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.base.errors import OnnxparError
from onnxpar.llm.next_tokens import Candidates
from onnxpar.llm.sampling import Sampling
from onnxpar.load.top_k_logits import BEST
from onnxpar.runtime.ranks.log import describe

E = TypeVar("E", contravariant=True)


class Constraint(Protocol):
    """Decides which tokens may come next, as a grammar does."""

    def allowed(self) -> Array:
        """True for each token that may come next, (vocabulary,)."""
        ...

    def accept(self, token: int) -> None:
        """Appends a token."""
        ...


class Busy(OnnxparError):
    """An engine that takes no request now: its queue is full, it ends, or its ranks start anew."""


@dataclass(frozen=True)
class Token:
    """A new token of a request, the natural logarithm of its probability by the model, and the
    likeliest tokens with theirs, as `Limits.top_logprobs` asks."""

    id: int
    logprob: float
    top: Sequence[tuple[int, float]] = ()


@dataclass(frozen=True)
class Limits:
    """How a request's tokens are chosen, and when it ends.

    sampling        how each token is chosen
    max_new_tokens  most new tokens, at least 1
    min_new_tokens  least new tokens before one that ends the text
    ends            ids of tokens that end the text
    top_logprobs    how many of the likeliest tokens are told with each token
    tells_prompt    True if the tokens of the prompt are told, too, before the first new one
    row             tells requests of one seed apart, which then draw different tokens
    constraint      which tokens may come next; None: all
    """

    sampling: Sampling = field(default_factory=Sampling)
    max_new_tokens: int = 256
    ends: frozenset[int] = frozenset()
    top_logprobs: int = 0
    row: int = 0
    constraint: Constraint | None = None
    min_new_tokens: int = 0
    tells_prompt: bool = False

    @property
    def needs_all(self) -> bool:
        """True if tokens can seldom be chosen without the logits of all tokens."""
        is_long = self.top_logprobs > BEST
        return is_long or self.constraint is not None or self.sampling.needs_all

    @property
    def is_plain(self) -> bool:
        """True if the likeliest token is chosen, whatever the text has; after `min_new_tokens`."""
        return self.sampling.is_plain and not self.needs_all

    def sampling_at(self, step: int) -> Sampling:
        """Returns how a token is chosen after `step` new tokens."""
        if step >= self.min_new_tokens:
            return self.sampling
        bias = {**self.sampling.logit_bias, **dict.fromkeys(self.ends, -math.inf)}
        return replace(self.sampling, logit_bias=bias)

    def choose(self, candidates: Candidates, tokens: Sequence[int], step: int) -> Token | None:
        """Returns the next token of a text with these tokens, of which the last `step` were
        generated; None if only all logits can tell it. Errors: ModelError for logits that are not
        numbers."""
        sampling = self.sampling_at(step)
        if self.constraint is not None:
            allowed = self._allowed(self.constraint, step)
            candidates = Candidates.all(np.where(allowed, candidates.logits, -np.inf))
            sampling = self.sampling
        chosen = sampling.choose(candidates, tokens, self.row, step)
        if chosen is None:
            return None
        if self.constraint is not None:
            self.constraint.accept(chosen[0])
        return Token(*chosen, candidates.logprobs(self.top_logprobs))

    def _allowed(self, constraint: Constraint, step: int) -> Array:
        """Returns the tokens that a constraint allows, (vocabulary,), without those that would end
        the text before `min_new_tokens`, unless there are no others."""
        allowed = constraint.allowed()
        if step >= self.min_new_tokens:
            return allowed
        others = allowed.copy()
        others[list(self.ends)] = False
        return others if others.any() else allowed


@dataclass(frozen=True)
class PromptTokens:
    """The tokens of a prompt but the first, each with the logarithm of its probability after the
    tokens before it; a listener gets them if `Limits.tells_prompt`."""

    tokens: Sequence[Token]


@dataclass(frozen=True)
class End:
    """The end of a request: "stop" after a token that ends the text, "length" after
    max_new_tokens, "cancelled". `cached` tokens of the prompt were read for an earlier request."""

    reason: str
    cached: int = 0


@dataclass(frozen=True)
class Failure:
    """The end of a request that cannot be finished, as its ranks are gone."""

    error: OnnxparError


Event = Token | PromptTokens | End | Failure
Listener = Callable[[Event], None]
"""Called with each event of a request, in order, in the engine's own thread. It must return soon. A
request whose listener raises an error is cancelled."""


class Heard(Protocol[E]):
    """A request with a listener."""

    is_cancelled: bool

    def listen(self, event: E, /) -> None: ...


def tell(request: Heard[E], event: E) -> None:
    """Calls the listener of a request; if it fails, cancels the request: others go on."""
    try:
        request.listen(event)
    except Exception as error:  # of the engine's user
        request.is_cancelled = True
        warnings.warn(f"a request ends, as its listener failed: {describe(error)}", stacklevel=2)
