"""A talk on the terminal, whose oldest messages are forgotten once the model has no room left."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from onnxpar.llm.generator import Generator, TooLongError

Chat = list[dict[str, Any]]
"""Messages, the oldest first: perhaps one of the system, then a user's and its answer in turn."""


def talk(generator: Generator, chat: Chat, answer: Callable[[Chat], str]) -> None:
    """Answers messages from the terminal, until the end of input. A message for which there is no
    room is not kept; standard error says so."""
    while True:
        try:
            message = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if not message.strip():
            continue
        try:
            chat = _within_room(generator, [*chat, {"role": "user", "content": message}])
        except TooLongError as error:
            print(f"onnxpar: this message has no room and is forgotten: {error}", file=sys.stderr)
        else:
            chat.append({"role": "assistant", "content": answer(chat)})


def _within_room(generator: Generator, chat: Chat) -> Chat:
    """The chat without as many of its oldest messages as a new token needs; standard error says
    how many. The system's message stays. Errors: TooLongError if the last message has no room."""
    first = int(chat[0]["role"] == "system")
    kept, limit = chat, ""
    while True:
        try:
            generator.check_room(kept)
            break
        except TooLongError as error:
            if len(kept) == first + 1:
                raise
            kept, limit = [*kept[:first], *kept[first + 2 :]], error.limit
    if limit:
        print(
            f"onnxpar: the talk is longer than {limit}; its oldest {len(chat) - len(kept)} "
            "messages are forgotten",
            file=sys.stderr,
        )
    return kept
