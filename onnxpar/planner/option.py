"""The entries of the table of options."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from textwrap import wrap
from types import UnionType
from typing import Any, Union, get_args, get_origin

NEEDED = "what most people need"
SPLIT, DECIDE, HARDWARE = "what to split", "how to decide", "hardware"
SIZES, LANGUAGE, TRAINING = "sizes and states", "language models", "training and collectives"
OUTPUT, EXTENSIONS = "output", "extensions"
GROUPS = (NEEDED, SPLIT, DECIDE, HARDWARE, SIZES, LANGUAGE, TRAINING, OUTPUT, EXTENSIONS)
"""The groups of options in --help, in order."""

MANUAL_PROGRAM, DUMP = "manual program", "dump"
"""Kinds of models for which some options are decided already: the program of one rank, and the
graph after passes."""


@dataclass(frozen=True)
class Option:
    """An entry of the table of options.

    help      the text for --help, help() and the documentation; it names other options by their
              flags
    group     its group in --help; empty: the option exists only in Python
    metavar   its value in --help
    flag      its flag without dashes; default: the name, with hyphens
    field     the attribute of the pipeline's `Options` with its value; default: the name
    default   its default value
    decided   the kinds of models for which it has no effect, and is refused
    """

    help: str
    group: str = ""
    metavar: str | None = None
    flag: str = ""
    field: str = ""
    default: Any = None
    decided: tuple[str, ...] = ()


@dataclass(frozen=True)
class NamedOption:
    """An option with its name and the type of its value."""

    name: str
    type: Any
    option: Option

    @property
    def flag(self) -> str:
        """The flag, without dashes."""
        return self.option.flag or self.name.replace("_", "-")

    def value(self, options: object) -> Any:
        """The option's value in the pipeline's options."""
        return attrgetter(self.option.field or self.name)(options)


def members(hint: Any) -> Iterator[Any]:
    """Yields the types that a type annotation admits."""
    if get_origin(hint) in (Union, UnionType):
        for part in get_args(hint):
            yield from members(part)
    else:
        yield hint


def option_lines(table: Mapping[str, NamedOption]) -> str:
    """Returns the names of options and their texts in two columns. In the texts, names replace
    flags."""
    names = {named.flag: name for name, named in table.items()}

    def name_of(flag: re.Match[str]) -> str:
        return names.get(flag[1], flag[0])

    width = max(map(len, names.values())) + 2
    lines = []
    for name, named in table.items():
        text = re.sub(r"--([a-z][a-z-]*)", name_of, named.option.help)
        text = f"False: {text}" if named.option.default is True else text
        how: dict[str, Any] = {"subsequent_indent": " " * width, "break_on_hyphens": False}
        lines += wrap(name.ljust(width) + text, 96, **how)
    return "\n".join(lines)
