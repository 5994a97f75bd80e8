"""Options that several commands share, and options of tables (such as PlanOptions), from which
flags are made. Options of a single command are in `parser.py`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from onnxpar.base.errors import OnnxparError
from onnxpar.base.pass_times import PassTimes
from onnxpar.cli.arguments import dims_of, states_of
from onnxpar.graph.typical import Typical
from onnxpar.layout.mesh import MOST_RANKS, Mesh
from onnxpar.planner.option_entry import GROUPS, REQUIRED, NamedOption, members, table
from onnxpar.planner.option_table import Kind, PlanOptions

Command = Callable[[argparse.Namespace], int]
Options = argparse._ActionsContainer
"""A parser, or a group of arguments."""


class GivenModel(argparse.Action):
    """The argparse action of the argument `model`: stores the user's path as `given_model` and
    `model`. Later, once log messages are set up, the command replaces `model` by the path of an
    ONNX file: for a folder, that may take an export."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if values is not None:
            namespace.given_model = namespace.model = Path(values)


def add_model(
    to: argparse.ArgumentParser, kind: Kind = PlanOptions, nargs: str | None = None
) -> Mapping[str, Options]:
    """Adds the argument `model` and the options of the table `kind` to a command; returns the
    groups of its help by title. `nargs` "?" makes the model optional."""
    what = "an ONNX model, or a folder of a language model (of GenAI, Optimum or transformers.js), "
    what += "also of an encoder-decoder; with onnxpar[hf] also a folder of Transformers, or a name "
    what += "on the hub of Hugging Face, which is exported first"
    what += "; or a file that --dump wrote" if nargs else ""
    to.add_argument("model", metavar="model.onnx", action=GivenModel, nargs=nargs, help=what)
    groups = add_groups(to, GROUPS)
    add_table(groups, kind)
    return groups


def add_groups(to: argparse.ArgumentParser, titles: Sequence[str]) -> Mapping[str, Options]:
    """Adds titled groups to the help of a command; returns them by title."""
    usual = to._action_groups.pop()  # argparse's --help and the like stand last
    groups = {title: to.add_argument_group(title) for title in titles}
    to._action_groups.append(usual)
    return groups


def add_table(groups: Mapping[str, Options], kind: Any) -> None:
    """Adds the options of a table (a dataclass such as PlanOptions) to their groups, by title;
    options without a group are for Python alone."""
    for each in table(kind).values():
        if each.option.group:
            add_option(groups[each.option.group], each)


def add_option(to: Options, named: NamedOption) -> None:
    """Adds one option of a table as a flag: the type of its value decides how the flag is
    parsed."""
    option, kinds = named.option, [*members(named.type)]
    how: dict[str, Any] = {"dest": named.name, "help": option.help.replace("%", "%%")}
    how |= {"required": True} if named.default is REQUIRED else {"default": named.default}
    if bool in kinds:
        how["action"] = "store_false" if named.default else "store_true"
    else:
        literals = (get_args(kind) for kind in kinds if get_origin(kind) is Literal)
        how["metavar"] = named.metavar
        how["choices"] = option.choices or next(literals, None)
        how |= {"action": "append", "default": []} if _is_repeated(named) else {}
        readers = (reader for kind, reader in _READERS.items() if kind in kinds)
        how["type"] = next(readers, None) if str not in kinds or Mesh in kinds else None
    to.add_argument(f"--{named.flag}", **how)


def _is_repeated(named: NamedOption) -> bool:
    """True if the flag may be given several times, and its values are collected in a list."""
    origins = {get_origin(kind) or kind for kind in members(named.type)}
    return named.option.repeated or (str not in origins and not origins.isdisjoint(_COLLECTIONS))


_COLLECTIONS = (Mapping, Sequence)


def values_of(args: argparse.Namespace, kind: Any) -> dict[str, Any]:
    """Returns the parsed arguments that are options of the table `kind`, in the form in which a
    Python call takes them. Errors: StrategyError."""
    values = {name: value for name, value in vars(args).items() if name in table(kind)}
    return values | {n: read(values[n]) for n, read in _READ.items() if n in values}


_READ: Mapping[str, Callable[[Any], Any]] = {
    "dims": dims_of,
    "states": states_of,
    "typical": Typical.parse,
    **dict.fromkeys(("batch_dim", "padding_idx", "pad"), dict),
}
"""Functions that convert the texts of an option that may be given several times to the value of the
Python call."""


def add_time_passes(to: Options) -> None:
    """Adds --time-passes."""
    to.add_argument(
        "--time-passes",
        action="store_true",
        help="print a table of wall times to standard error, also if the command fails: of each "
        "pass, and of reading the model, the search, checks and writing",
    )


def with_times(command: Command) -> Command:
    """Decorates a command: with --time-passes, it prints the wall times of its passes, also if it
    fails."""

    @wraps(command)
    def timing(args: argparse.Namespace) -> int:
        args.times = PassTimes()
        try:
            return command(args)
        finally:
            if args.time_passes and args.times.rows:
                print(args.times, file=sys.stderr)

    return timing


def add_save(to: Options) -> None:
    """Adds --dump and --save-strategy."""
    add_dump(to)
    to.add_argument(
        "--save-strategy",
        metavar="FILE",
        help="write the chosen strategy (of the search, a preset, ...) as a file to read and "
        "edit: a few entries, from which the rest follows; with no other option, `--strategy "
        "FILE` gives the same plan",
    )


def add_dump(to: Options) -> None:
    """Adds --dump, which writes the graph after every pass."""
    to.add_argument(
        "--dump",
        metavar="DIR",
        help="write the graph after every pass, even after one that fails: as text, "
        "01-NAME.onnxtxt, and up to localize-ops as a model, 01-NAME.onnx, which opt reads back; "
        "the folder 00-load has one file for each rewrite of the loader that changes "
        "the model",
    )


def rank_numbers(text: str) -> list[int]:
    """Parses numbers of ranks: "0,4-6" is [0, 4, 5, 6]. Errors: argparse.ArgumentTypeError."""
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        ends = (first, last if dash else first)
        if not all(end.isascii() and end.isdigit() and len(end) < 10 for end in ends):
            raise argparse.ArgumentTypeError(f"{text!r}: give numbers of ranks, such as 0,1 or 4-7")
        start, end = map(int, ends)
        if end < start:
            raise argparse.ArgumentTypeError(f"{part!r}: give the lower rank first, such as 4-7")
        if end >= MOST_RANKS:
            raise argparse.ArgumentTypeError(f"{part!r}: ranks are below {MOST_RANKS}")
        numbers += range(start, end + 1)
    return numbers


def named_number(text: str) -> tuple[str, int]:
    """Parses NAME=NUMBER. Errors: argparse.ArgumentTypeError."""
    name, _, number = text.rpartition("=")
    try:
        return name, int(number)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: give NAME=NUMBER") from None


def named_value(text: str) -> tuple[str, float]:
    """Parses NAME=VALUE, where the value is a float. Errors: argparse.ArgumentTypeError."""
    name, _, value = text.rpartition("=")
    try:
        return name, float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: give NAME=VALUE, a number") from None


def named_number_or_none(text: str) -> tuple[str, int | None]:
    """Parses NAME=NUMBER or NAME=none. Errors: argparse.ArgumentTypeError."""
    if text.endswith("=none"):
        return text.removesuffix("=none"), None
    return named_number(text)


def mesh(text: str) -> Mesh:
    """Parses a mesh such as dp=2,tp=4. Errors: argparse.ArgumentTypeError."""
    try:
        return Mesh.parse(text)
    except OnnxparError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


_READERS: Mapping[Any, Callable[[str], Any]] = {
    Mesh: mesh,
    int: int,
    float: float,
    Mapping[str, int]: named_number,
    Mapping[str, int | None]: named_number_or_none,
    Mapping[str, float]: named_value,
}
"""Parsers of an option's text, by the type of its value."""
