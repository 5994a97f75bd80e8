"""An argparse parser whose errors are one line with the argument and the remedy."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from onnxpar.base.errors import InputError
from onnxpar.cli.colours import coloured
from onnxpar.cli.config_file import FLAG, with_options_of_file

_FLAG = re.compile(r"--?[A-Za-z]")


class CommandParser(argparse.ArgumentParser):
    """argparse's parser, with four differences: an error is one line on standard error, with exit
    status 2; a command may read options from a file; a group of commands without a command prints
    its help; and an optional positional argument may follow flags."""

    commands: Any = None
    siblings: Mapping[str, argparse.ArgumentParser] = {}
    """All commands of the same group, by name. If this command lacks a flag, the error names the
    commands that have it."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        words = self.prog.partition(" ")[2]
        if words:
            self.set_defaults(words_of_command=words)
            self.add_argument(
                "-q", "--quiet", action="store_true", help="print nothing but results and errors"
            )
            self.add_argument(
                "-v", "--verbose", action="store_true", help="also print what is done and decided"
            )

    def add_argument(self, *names: Any, **how: Any) -> argparse.Action:
        """Like argparse's method; errors about numbers and choices describe the expected value."""
        return super().add_argument(*names, **_checked(how))

    def add_argument_group(self, *args: Any, **how: Any) -> Group:
        """Like argparse's method; arguments of the group have the same errors as arguments of the
        parser."""
        group = Group(self, *args, **how)
        self._action_groups.append(group)
        return group

    def add_subparsers(self, **how: Any) -> Any:
        """Like argparse's method, and keeps the returned object, which has all commands, in
        `commands`."""
        self.commands = super().add_subparsers(**how)
        return self.commands

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Like argparse's method, with three differences: an unknown argument is an error here;
        without any arguments, a group of commands prints its help; and a file (--config) may give
        further options."""
        args = sys.argv[1:] if args is None else args
        if self.commands is not None and not args:
            self.print_help()
            self.exit(0)
        args = self._with_file(args)
        self._check_names(args)
        parsed, rest = super().parse_known_args(args, namespace)
        late = [a for a in self._actions if a.nargs == "?" and not a.option_strings]
        for action in late:  # argparse takes these only before the first flag
            if rest and not _FLAG.match(rest[0]) and getattr(parsed, action.dest) is None:
                action(self, parsed, self._get_values(action, [rest.pop(0)]))
        if rest:
            self.error(f"unexpected argument {rest[0]!r}; leave it out")
        return parsed, rest

    def _with_file(self, args: Sequence[str]) -> Sequence[str]:
        """Returns the arguments, preceded by the options of the --config file, for commands with
        that option."""
        if FLAG not in self._option_string_actions:
            return args
        try:
            return with_options_of_file(self, args)
        except InputError as error:
            self.error(str(error))

    def _check_names(self, args: Sequence[str]) -> None:
        """Reports an unknown flag or command. Runs before argparse, which would first report what
        is missing."""
        remaining = iter(args)
        for arg in remaining:
            if arg == "--":
                return
            if not arg:
                self.error("an argument is empty; leave it out, or give it a value")
            if not _FLAG.match(arg):
                if self.commands is None:
                    continue
                if arg not in self.commands.choices:
                    self.error(f"there is no command {arg!r}{nearest(arg, self.commands.choices)}")
                self.commands.choices[arg].siblings = self.commands.choices
                return
            name = arg.partition("=")[0]
            if not self._is_flag(name):
                self.error(f"there is no {name}{self._hint(name)}{self._remedy(args)}")
            action = self._option_string_actions.get(arg)
            if self.commands is not None and action is not None and action.nargs is None:
                next(remaining, None)  # the value of the option is no command

    def _remedy(self, args: Sequence[str]) -> str:
        """For a command that runs another one (`launch ... -- COMMAND`): returns a hint to put `--`
        before it, if there is none; else an empty string."""
        takes_command = any(action.nargs == argparse.REMAINDER for action in self._actions)
        return "; put -- before the command to run" if takes_command and "--" not in args else ""

    def _hint(self, name: str) -> str:
        """Returns the end of an error about an unknown flag: the commands of the group that have
        it, or else the most similar flag of this command; empty if there is none."""
        having = [
            command
            for command, other in self.siblings.items()
            if name.startswith("--") and name in other._option_string_actions
        ]
        if having:
            return f"; {', '.join(having)} {'has' if len(having) == 1 else 'have'} it"
        if not name.startswith("--"):
            flags = [flag for flag in self._option_string_actions if flag.startswith(f"-{name}")]
            return f" (did you mean {' or '.join(flags)}?)" if flags else ""
        return nearest(name, self._option_string_actions)

    def _is_flag(self, name: str) -> bool:
        known = self._option_string_actions
        if name.startswith("--"):
            return any(flag.startswith(name) for flag in known)  # argparse reports ambiguity
        return any(name.startswith(flag) for flag in known if len(flag) == 2)

    def error(self, message: str) -> NoReturn:
        """Prints an error in one line, and exits with status 2."""
        command = self.prog.partition(" ")[2]
        missing = message.partition("the following arguments are required: ")[2]
        any_of = message.partition("one of the arguments ")[2].removesuffix(" is required")
        if missing:
            message = f"give {missing}"
        elif any_of:
            message = f"give {any_of.replace(' ', ' or ')}"
        elif message.startswith("argument "):
            message = message.removeprefix("argument ")
        text = f"{command}: {message}" if command else message
        line = f"onnxpar: error: {' '.join(text.split())}; see `{self.prog} --help`\n"
        self.exit(2, coloured(line, sys.stderr))


class Group(argparse._ArgumentGroup):
    """A titled group of arguments in the help of a command, with the errors of `CommandParser`."""

    def add_argument(self, *names: Any, **how: Any) -> argparse.Action:
        """Like `CommandParser.add_argument`."""
        return super().add_argument(*names, **_checked(how))


def _checked(how: dict[str, Any]) -> dict[str, Any]:
    """Returns the keyword arguments for argparse's `add_argument`, with a `type` whose errors about
    numbers and choices say which values are expected."""
    if how.get("choices") is not None:
        return {**how, "type": _one_of(list(how["choices"]))}
    return {**how, "type": _NUMBERS[how["type"]]} if how.get("type") in _NUMBERS else how


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns ` (did you mean NAME?)` with the most similar of the known names; empty if none is
    similar."""
    names = get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {names[0]}?)" if names else ""


def _one_of(choices: Sequence[str]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text in choices:
            return text
        near = nearest(text, choices) or f"; give one of {', '.join(choices)}"
        raise argparse.ArgumentTypeError(f"{text!r} is not a choice{near}")

    return parse


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number")
    return value


_NUMBERS: dict[Any, Callable[[str], Any]] = {int: _whole_number, float: _number}
