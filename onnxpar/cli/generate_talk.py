"""A chat on the terminal: the oldest messages are dropped once the model's context is full."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from onnxpar.llm.generator import Generator, TooLongError

Chat = list[dict[str, Any]]
"""Messages, the oldest first: maybe a system message, then messages of the user and answers in
turn."""


def talk(generator: Generator, chat: Chat, answer: Callable[[Chat], str]) -> None:
    """Reads messages from the terminal and answers them, until the end of input. A message that is
    too long on its own is dropped, with a line on standard error.

    chat    the messages so far
    answer  prints and returns the answer to a chat
    """
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
    """Returns the chat without its oldest messages, as many as needed so that the model's context
    has room for a new token; a line on standard error says how many are gone. Keeps the system
    message. Errors: TooLongError if even the last message alone has no room."""
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
