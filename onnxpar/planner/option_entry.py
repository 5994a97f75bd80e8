"""Tables of options: what a table says of each option, and how signatures, checks and help follow
from it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from numbers import Integral, Real
from operator import attrgetter
from textwrap import wrap
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from onnxpar.base.errors import StrategyError
from onnxpar.base.near_names import did_you_mean

Call = TypeVar("Call", bound=Callable[..., Any])

NEEDED = "what most people need"
SPLIT, DECIDE, HARDWARE = "what to split", "how to decide", "hardware"
SIZES, LANGUAGE, TRAINING = "sizes and states", "language models", "training and collectives"
OUTPUT, EXTENSIONS = "output", "extensions"
REQUIRED: Any = inspect.Parameter.empty
"""Stands for the default of an option that must be given."""
GROUPS = (NEEDED, SPLIT, DECIDE, HARDWARE, SIZES, LANGUAGE, TRAINING, OUTPUT, EXTENSIONS)
"""The groups of plan options in --help, in this order."""

MANUAL_PROGRAM, DUMP = "manual program", "dump"
"""Kinds of models for which some options are decided already: the program of one rank, and the
dumped graph after passes."""


@dataclass(frozen=True)
class Option:
    """The entry of an option in a table.

    help      the text for --help, help() and the documentation; it names other options as flags
    group     the title of its group in --help; empty: the option is for Python alone
    metavar   the placeholder for its value in --help; default: N for whole numbers, X for others
    flag      its flag without dashes; default: the name, with hyphens
    field     the attribute of the compiler's `Options` that holds its value; default: the name
    default   its value if it is not given, or REQUIRED; default: None, or if the type does not
              admit None: False or an empty tuple
    decided   the kinds of models for which it has no effect, and so is refused
    choices   the values that the command line accepts, if the type does not name them
    repeated  True: may be given several times, although a single text is also a value
    """

    help: str
    group: str = ""
    metavar: str | None = None
    flag: str = ""
    field: str = ""
    default: Any = None
    decided: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    repeated: bool = False


@dataclass(frozen=True)
class NamedOption:
    """An option of a table, with its name and the type of its value."""

    name: str
    type: Any
    option: Option

    @property
    def flag(self) -> str:
        """The flag, without dashes."""
        return self.option.flag or self.name.replace("_", "-")

    @property
    def default(self) -> Any:
        """The value if the user gives none; REQUIRED if there must be one."""
        kinds = {get_origin(kind) or kind for kind in members(self.type)}
        if self.option.default is not None or NoneType in kinds:
            return self.option.default
        return False if bool in kinds else () if Sequence in kinds else REQUIRED

    @property
    def metavar(self) -> str | None:
        """The placeholder for the value in --help; None: argparse's own."""
        kinds = [kind for kind in members(self.type) if kind is not NoneType]
        return self.option.metavar or {int: "N", float: "X"}.get(kinds[0])

    def value(self, options: object) -> Any:
        """Returns the option's value in `options`, the compiler's `Options`."""
        return attrgetter(self.option.field or self.name)(options)


def table(kind: Any) -> Mapping[str, NamedOption]:
    """Returns the options of a table by name, in order; `kind` is a TypedDict whose annotations
    hold an `Option`."""
    return _table(kind)


@cache
def _table(kind: Any) -> Mapping[str, NamedOption]:
    hints = get_type_hints(kind, include_extras=True)
    each = ((name, *get_args(hint)) for name, hint in hints.items())
    return {name: NamedOption(name, hint, option) for name, hint, option in each}


def lists(kind: Any) -> Callable[[Call], Call]:
    """Returns a decorator for functions that take **options: their signature then lists each option
    of the table, for help() and editors."""
    options = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=each.type
        )
        for name, each in table(kind).items()
    ]

    def shown(function: Call) -> Call:
        own = inspect.signature(function)
        parameters = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
        signature = own.replace(parameters=[*parameters, *options])
        function.__signature__ = signature  # type: ignore[attr-defined]
        return function

    return shown


_ABSTRACT: Mapping[type, type] = {int: Integral, float: Real}
"""Types in whose place NumPy's numbers are accepted, too."""


def check_options(values: Mapping[str, Any], kind: Any, caller: str) -> None:
    """Checks options that a caller passed against a table. Errors: TypeError for a name that
    `caller` does not have, or a required option that is missing, as in any Python call;
    StrategyError for a value of the wrong type."""
    options = table(kind)
    for name, value in values.items():
        if name not in options:
            raise TypeError(f"{caller}() has no option {name!r}{did_you_mean(name, options)}")
        _check_type(options[name], value)
    for name, each in options.items():
        if each.default is REQUIRED and name not in values:
            raise TypeError(f"{caller}() needs the option {name!r}")


def _check_type(named: NamedOption, value: Any) -> None:
    origins = {hint: get_origin(hint) or hint for hint in members(named.type)}
    kinds = tuple(str if kind is Literal else kind for kind in origins.values())
    is_list = (
        not isinstance(value, str) or str in kinds
    )  # a string is a Sequence, but not a valid list
    if not is_list or not isinstance(value, tuple(_ABSTRACT.get(kind, kind) for kind in kinds)):
        wanted = ", ".join(kind.__name__ for kind in kinds if kind is not NoneType)
        raise StrategyError(
            f"{named.name}={value!r:.60} is of type {type(value).__name__}; give {wanted}"
        )


def with_defaults(values: Mapping[str, Any], kind: Any) -> dict[str, Any]:
    """Returns the values of all options of a table: the given ones, and defaults for the rest."""
    return {**{name: each.default for name, each in table(kind).items()}, **values}


def same_names(kind: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that are fields of the dataclass `kind`, by name."""
    return {each.name: values[each.name] for each in fields(kind) if each.name in values}


def members(hint: Any) -> Iterator[Any]:
    """Yields the types that an annotation admits: `int | None` gives int and NoneType."""
    if get_origin(hint) in (Union, UnionType):
        for part in get_args(hint):
            yield from members(part)
    else:
        yield hint


def option_lines(kind: Any) -> str:
    """Returns the docstring of a table: its own line, then a line for each option with its help
    text, in which names of options stand for flags."""
    names = {each.flag: name for name, each in table(kind).items()}

    def name_of(flag: re.Match[str]) -> str:
        return names.get(flag[1], flag[0])

    width = max(map(len, names.values())) + 2
    lines = [f"{kind.__doc__}\n"]
    for name, each in table(kind).items():
        text = re.sub(r"--([a-z][a-z-]*)", name_of, each.option.help)
        text = f"False: {text}" if each.default is True else text
        how: dict[str, Any] = {"subsequent_indent": " " * width, "break_on_hyphens": False}
        lines += wrap(name.ljust(width) + text, 96, **how)
    return "\n".join(lines)
