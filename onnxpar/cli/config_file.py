"""Reads options of a command from a YAML file (--config)."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from onnxpar.base.errors import InputError

FLAG = "--config"


def add_config(command: Any) -> None:
    """Adds the option --config to a command."""
    command.add_argument(
        FLAG,
        type=Path,
        metavar="FILE",
        help="YAML file with options of this command by their names, such as port: 8001; those of "
        "the command line come first",
    )


def with_options_of_file(parser: argparse.ArgumentParser, args: Sequence[str]) -> list[str]:
    """Returns the arguments of a command, preceded by the options of the file that --config names
    in them; later ones win, so the command line overrules the file. Errors: InputError."""
    arguments = list(args)
    for at, arg in enumerate(arguments):
        name, has_value, value = arg.partition("=")
        if arg == "--":
            break
        if len(name) > 2 and _flags(parser, name) == [FLAG]:
            file = value if has_value else "".join(arguments[at + 1 : at + 2])
            return [*_options(parser, file), *arguments]
    return arguments


def _flags(parser: argparse.ArgumentParser, name: str) -> list[str]:
    """The flags of a command that begin with this text; argparse accepts unique beginnings."""
    return [flag for flag in parser._option_string_actions if flag.startswith(name)]


def _options(parser: argparse.ArgumentParser, file: str) -> Iterator[str]:
    """Yields the arguments that the entries of a file stand for: `port: 8001` gives `--port=8001`.
    Errors: InputError."""
    from onnxpar.base.plain_yaml import parse, read_text  # most commands read no YAML

    try:
        entries = parse(read_text(file))
    except (OSError, ValueError) as error:
        raise InputError(f"{FLAG} {file}: {error}") from None
    if not isinstance(entries, dict):
        raise InputError(f"{FLAG} {file}: it has no options; write lines such as port: 8001")
    for name, value in entries.items():
        action = parser._option_string_actions.get(f"--{name}")
        if action is None or name in (FLAG[2:], "help"):
            raise InputError(f"{FLAG} {file}: there is no option {name!r}; leave it out")
        for text in _texts(action, value):
            if text is None:
                raise InputError(
                    f"{FLAG} {file}: {name} is {value!r}; give {_kind_of_value(action)}"
                )
            yield f"--{name}{text}"


def _kind_of_value(action: argparse.Action) -> str:
    """Says in words which kind of value an option takes, for errors: "true or false", "a list",
    ..."""
    if action.nargs == 0:
        return "true or false"
    return "a list" if isinstance(action, argparse._AppendAction) else "a text or a number"


def _texts(action: argparse.Action, value: object) -> list[str | None]:
    """Returns what follows the flag of an option, once for each time that the option is to occur:
    `=8001`, or an empty text for a flag without value. None stands for a value of the wrong kind.
    """
    if action.nargs == 0:
        return [""] * value if isinstance(value, bool) else [None]
    if isinstance(action, argparse._AppendAction):
        return [_text(item) for item in value] if isinstance(value, list) else [None]
    return [_text(value)]


def _text(value: object) -> str | None:
    is_right = isinstance(value, str | int | float) and not isinstance(value, bool)
    return f"={value}" if is_right else None
