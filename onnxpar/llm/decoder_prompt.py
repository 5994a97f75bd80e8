"""The tokens with which a decoder's texts begin. For a speech model, they tell the language and the
task: <|startoftranscript|> <|de|> <|transcribe|> <|notimestamps|>."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.base.errors import InputError, ModelError

_TASKS = ("transcribe", "translate")


@dataclass(frozen=True)
class Beginning:
    """The first tokens of each text.

    tokens     the tokens
    languages  if the model is to detect the language of each sound: the tokens of all languages, of
               which the likeliest becomes the second token; else empty
    """

    tokens: tuple[int, ...]
    languages: tuple[int, ...] = ()

    def of_each(
        self, number: int, first_logits: Callable[[Sequence[int]], Array]
    ) -> list[list[int]]:
        """Returns the first tokens of each of `number` texts. `first_logits(tokens)` returns the
        logits of the token after these tokens for each text, (texts, vocabulary)."""
        if not self.languages:
            return [list(self.tokens)] * number
        logits = first_logits(self.tokens[:1])[:, list(self.languages)]
        languages = [self.languages[i] for i in np.argmax(logits, axis=1)]
        return [[self.tokens[0], language, *self.tokens[2:]] for language in languages]


def start_token(settings: Mapping[str, Any]) -> int:
    """Returns the id of the token with which a decoder begins, by the configuration. Errors:
    ModelError if the configuration has none."""
    for name in ("decoder_start_token_id", "bos_token_id"):
        if isinstance(settings.get(name), int):
            return int(settings[name])
    raise ModelError(
        "neither generation_config.json nor config.json has decoder_start_token_id; add it, and "
        "shard the folder again"
    )


def text_beginning(settings: Mapping[str, Any]) -> Beginning:
    """Returns the beginning of answers of a text model, such as T5: its start token."""
    return Beginning((start_token(settings),))


def speech_beginning(
    settings: Mapping[str, Any], language: str | None, task: str | None
) -> Beginning:
    """Returns the beginning of Whisper's transcripts, as the `generate` of Transformers makes it.

    language  such as "de"; None: that of the configuration, or detected in each sound
    task      "transcribe", or "translate" to English; None: that of the configuration

    Errors: InputError for a language or a task that the model does not know.
    """
    language = language if language is not None else settings.get("language")
    task = task if task is not None else settings.get("task")
    known, tasks = settings.get("lang_to_id") or {}, settings.get("task_to_id") or {}
    tokens: list[int | None] = [start_token(settings)]
    if task is None and language is None:
        forced = settings.get("forced_decoder_ids") or []
        tokens += [token for at, (place, token) in enumerate(forced, 1) if place == at]
    is_open = len(tokens) == 1 or tokens[1] is None
    spoken: int | None = None
    if language is not None:
        spoken = _language(language, known)
    if spoken is not None or (known and is_open):
        tokens[1:2] = [spoken]
    is_detected = spoken is None and bool(known) and is_open
    if task is not None:
        if task not in _TASKS or task not in tasks:
            raise InputError(
                f"task is {task!r}; the model knows {', '.join(tasks) or 'no tasks: leave it out'}"
            )
        tokens.append(tasks[task])
    elif language is not None and "transcribe" in tasks:
        tokens.append(tasks["transcribe"])
    untimed = settings.get("no_timestamps_token_id")
    if isinstance(untimed, int) and tokens[-1] != untimed:
        tokens.append(untimed)
    if is_detected:
        languages = tuple(known.values())
        rest = [t for t in tokens[2:] if t is not None]
        return Beginning((tokens[0] or 0, languages[0], *rest), languages)
    return Beginning(tuple(t for t in tokens if t is not None))


def _language(language: str, known: Mapping[str, int]) -> int:
    """Returns the token of a language. `known` maps "<|de|>" to ids. Errors: InputError for a
    language that is not known."""
    names = (language.lower(), f"<|{language.lower()}|>")
    token = next((known[name] for name in names if name in known), None)
    if token is None:
        codes = ", ".join(sorted(name.strip("<|>") for name in known))
        raise InputError(
            f"language is {language!r}; the model knows {codes or 'one language: leave it out'}"
        )
    return token
