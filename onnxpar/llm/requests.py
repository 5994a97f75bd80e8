"""Requests to an engine, and the events that a request's listener gets."""

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
    """Decides which tokens may come next in one text, as a grammar does."""

    def allowed(self) -> Array:
        """Returns True for each token that may come next, (vocabulary,)."""
        ...

    def accept(self, token: int) -> None:
        """Called with each token that was chosen for the text."""
        ...


class Busy(OnnxparError):
    """The error of an engine or embedder that accepts no request now: its queue is full, or it is
    closed, or its ranks do not start."""


@dataclass(frozen=True)
class Token:
    """An event: a new token of a request.

    id       the token
    logprob  the natural logarithm of its probability by the model
    top      the likeliest tokens with theirs, as many as `Limits.top_logprobs` asks for
    """

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
    row             a number that differs between texts of one seed, so that they draw different
                    tokens
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
        """True if choosing a token usually needs the logits of all tokens, not only the logits of
        the likeliest tokens."""
        is_long = self.top_logprobs > BEST
        return is_long or self.constraint is not None or self.sampling.needs_all

    @property
    def is_plain(self) -> bool:
        """True if the likeliest token is chosen after `min_new_tokens`, whatever tokens came
        before."""
        return self.sampling.is_plain and not self.needs_all

    def sampling_at(self, step: int) -> Sampling:
        """Returns how a token is chosen after `step` new tokens: before `min_new_tokens`, tokens
        that end the text get the bias -inf."""
        if step >= self.min_new_tokens:
            return self.sampling
        bias = {**self.sampling.logit_bias, **dict.fromkeys(self.ends, -math.inf)}
        return replace(self.sampling, logit_bias=bias)

    def choose(self, candidates: Candidates, tokens: Sequence[int], step: int) -> Token | None:
        """Returns the next token of a text; None if only the logits of all tokens can tell it.

        candidates  the tokens to choose from
        tokens      the tokens of the text, prompt included
        step        how many of them were generated

        Errors: ModelError for logits that are NaN.
        """
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
        """Returns True for each token that a constraint allows, (vocabulary,). Before
        `min_new_tokens`, tokens that end the text are not allowed, unless the constraint allows no
        others."""
        allowed = constraint.allowed()
        if step >= self.min_new_tokens:
            return allowed
        others = allowed.copy()
        others[list(self.ends)] = False
        return others if others.any() else allowed


@dataclass(frozen=True)
class PromptTokens:
    """An event: the tokens of a prompt but the first, each with the logarithm of its probability
    after the tokens before it. A listener gets it before the first new token, if
    `Limits.tells_prompt`."""

    tokens: Sequence[Token]


@dataclass(frozen=True)
class End:
    """An event: the end of a request.

    reason  "stop" after a token that ends the text, "length" after max_new_tokens, or "cancelled"
    cached  how many tokens of the prompt were in the caches already, from earlier requests
    """

    reason: str
    cached: int = 0


@dataclass(frozen=True)
class Failure:
    """An event: a request ends with an error, for instance because its ranks died."""

    error: OnnxparError


Event = Token | PromptTokens | End | Failure
Listener = Callable[[Event], None]
"""Called with each event of a request, in order, in the engine's own thread. It must return soon. A
request whose listener raises an error is cancelled."""


class Heard(Protocol[E]):
    """A request with a listener, which can be cancelled."""

    is_cancelled: bool

    def listen(self, event: E, /) -> None: ...


def tell(request: Heard[E], event: E) -> None:
    """Calls the listener of a request with an event. If the listener raises an error, cancels the
    request and warns: other requests go on."""
    try:
        request.listen(event)
    except Exception as error:  # of the engine's user
        request.is_cancelled = True
        warnings.warn(f"a request ends, as its listener failed: {describe(error)}", stacklevel=2)
