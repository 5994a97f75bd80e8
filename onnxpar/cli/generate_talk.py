"""A talk on the terminal: its oldest messages are dropped once the model has no room for them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from onnxpar.llm.generator import Generator, TooLongError

Chat = list[dict[str, Any]]
"""Messages, the oldest first: a system message or none, then messages of the user and answers in
turn."""


def talk(generator: Generator, chat: Chat, answer: Callable[[Chat], str]) -> None:
    """Answers messages from the terminal, until the end of input. A message without room is
    dropped, with a line on standard error."""
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
    """Drops the oldest messages of a chat until there is room for a new token; a line on standard
    error says how many. Keeps the system message. Errors: TooLongError if the last message has no
    room."""
    first = int(chat[0]["role"] == "system")
    shortened, limit = chat, ""
    while True:
        try:
            generator.check_room(shortened)
            break
        except TooLongError as error:
            if len(shortened) == first + 1:
                raise
            shortened, limit = [*shortened[:first], *shortened[first + 2 :]], error.limit
    if limit:
        print(
            f"onnxpar: the talk is longer than {limit}; its oldest {len(chat) - len(shortened)} "
            "messages are forgotten",
            file=sys.stderr,
        )
    return shortened
