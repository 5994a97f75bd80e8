"""Answers in JSON: which tokens a JSON schema, or the schemas of functions, allow next. The library
llguidance computes them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import llguidance
import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.serve.api_error import ApiError
from onnxpar.serve.served_engine import ServedEngine
from onnxpar.serve.tools import Tools

_DEEPEST = 64
"""Deepest nesting of objects and arrays in a schema."""
_MOST_TOKENS = 1 << 24
"""Most tokens of a vocabulary; a larger number means that the number is unknown."""
_OPTIONS: Any = {"whitespace_pattern": r"( |\n{1,2}[ \t]{0,20})?", "lenient": False}
"""Options of llguidance. A model may not write white space for ever: between two values, a space,
or a line break with indentation. A keyword of the schema that the library does not know is an
error, not ignored."""


@dataclass(frozen=True)
class Form:
    """The form of an answer: JSON of a schema, a list of calls of tools, or either of them.

    schema  the JSON schema; None: only calls
    tools   the tools to call; None: no calls
    param   the field of the request that asks for this form
    """

    schema: Mapping[str, Any] | None
    tools: Tools | None
    param: str

    def grammar(self) -> str:
        """Returns the grammar of answers of this form, in llguidance's variant of Lark's
        language."""
        rules = []
        if self.schema is not None:
            rules.append(("answer", _json_rule(self.schema)))
        if self.tools is not None:
            more = '(", " call)*' if self.tools.is_parallel else ""
            rules.append(("calls", f'"[" call {more} "]"'))
            calls = [f"call_{at}" for at in range(len(self.tools.parameters))]
        start = " | ".join(name for name, _ in rules)
        if self.tools is not None:
            rules.append(("call", " | ".join(calls)))
            for call, (name, parameters) in zip(calls, self.tools.parameters.items(), strict=True):
                begin = json.dumps(f'{{"name": "{name}", "arguments": ')
                rules.append((call, f'{begin} {call}_arguments "}}"'))
                rules.append((f"{call}_arguments", _json_rule({"type": "object", **parameters})))
        return "\n".join(f"{name}: {rule}" for name, rule in [("start", start), *rules])


def _json_rule(schema: Mapping[str, Any]) -> str:
    """Returns the rule of a grammar for JSON of a schema."""
    return f"%json {json.dumps({**schema, 'x-guidance': _OPTIONS})}"


class JsonConstraint:
    """A `Constraint` that allows only tokens with which an answer can still become one of a form.

    matcher     follows the answer, by a grammar
    vocabulary  the number of tokens of the model
    ends        tokens that end an answer
    param       the field of the request that asks for the form
    """

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        vocabulary: int,
        ends: Iterable[int],
        param: str,
    ) -> None:
        self._matcher, self._vocabulary, self._param = matcher, vocabulary, param
        self._ends = sorted(end for end in ends if end < vocabulary)

    def allowed(self) -> Array:
        """Returns True for each token that may come next, (vocabulary,)."""
        mask: Array = np.frombuffer(self._matcher.compute_logit_bias(), np.uint8) != 0
        mask = mask[: self._vocabulary]  # a tokenizer may have more tokens than the model
        # The library knows one token that ends texts. It allows none at all where the text is
        # complete, or the schema is beyond its limits.
        if mask[self._ends].any() or not mask.any():
            mask[self._ends] = True
        return mask

    def accept(self, token: int) -> None:
        """Called with each token that was chosen for the answer."""
        if token not in self._ends:
            self._matcher.consume_token(token)

    def check(self) -> None:
        """Errors: ApiError if the library could not follow the answer to its end, so that its text
        may not fit the form."""
        if self._matcher.is_error():
            raise _wrong(self._matcher.get_error(), self._param)


class Grammars:
    """Makes constraints for a model's vocabulary, and knows the bytes of its tokens."""

    def __init__(self, engine: ServedEngine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._vocabulary: llguidance.LLTokenizer | None = None

    def load(self) -> llguidance.LLTokenizer:
        """Returns the vocabulary as llguidance reads it. The first call takes about a second.
        Errors: ApiError if the library cannot read the model's tokenizer."""
        with self._lock:
            if self._engine.vocabulary > _MOST_TOKENS:
                raise ApiError(
                    "response_format and logprobs cannot be used: the model does not say how many "
                    "tokens it has"
                )
            if self._vocabulary is None:
                ends = sorted(self._engine.model.ends)
                tokenizer = self._engine.tokenizer
                size = max(self._engine.vocabulary, tokenizer.size)
                try:
                    self._vocabulary = llguidance.LLTokenizer(
                        tokenizer.as_json(), n_vocab=size, eos_token=ends[0] if ends else None
                    )
                except Exception as error:  # the library raises several kinds
                    raise ApiError(
                        f"response_format and logprobs cannot be used: the library llguidance "
                        f"does not know the model's tokenizer: {error}"
                    ) from None
            return self._vocabulary

    def bytes_of(self, token: int) -> bytes:
        """Returns the bytes of a token's text."""
        bytes_: bytes = self.load().decode_bytes([token])
        text = self._engine.tokenizer.decode([token], specials=True)
        if len(text) > len(bytes_.decode("utf-8", "replace")):
            return b"\xff" + bytes_  # the library's mark of special tokens, which it left out
        return bytes_

    def constraints(self, form: Form, number: int) -> list[JsonConstraint]:
        """Returns `number` constraints for answers of a form. Errors: ApiError if a schema is
        wrong, or uses keywords that the library does not know."""
        _check_depth(form)
        vocabulary = self.load()
        try:
            text = llguidance.LLMatcher.grammar_from_lark(form.grammar())
        except (ValueError, UnicodeError) as error:
            raise _wrong(str(error), form.param) from None
        matcher = llguidance.LLMatcher(vocabulary, text, log_level=0)
        if matcher.is_error():
            raise _wrong(matcher.get_error(), form.param)
        if not any(matcher.compute_logit_bias()):
            raise _wrong("NoExtension", form.param)
        common = self._engine.vocabulary, self._engine.model.ends, form.param
        return [JsonConstraint(matcher.deep_copy(), *common) for _ in range(number)]


def _wrong(why: str, param: str) -> ApiError:
    """Returns the error for a schema; `why` is the library's reason, whose first line is for users,
    and `param` the field with the schema."""
    reason = "no text fits it" if why.startswith("NoExtension") else why.partition("\n<state>")[0]
    text = f"{param} has a schema that cannot be followed: {' '.join(reason.split())[:300]}"
    return ApiError(text, param=param)


def _check_depth(form: Form) -> None:
    """Errors: ApiError if a schema is nested too deeply for the library."""
    level: list[object] = [form.schema, *(form.tools.parameters.values() if form.tools else ())]
    depth = 0
    while level:
        if depth > _DEEPEST:
            raise _wrong(f"it is nested more than {_DEEPEST} levels deep", form.param)
        inner: list[object] = []
        for value in level:
            inner += value.values() if isinstance(value, dict) else []
            inner += value if isinstance(value, list) else []
        level, depth = inner, depth + 1
