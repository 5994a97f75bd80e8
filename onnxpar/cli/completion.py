"""The option --print-completion: prints a script with which a shell completes commands, options and
files.

The script is static: a shell that starts Python at each TAB would wait more than a second.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from typing import Any, NoReturn

SHELLS = "bash", "zsh"
_FILE = re.compile(r"FILE|NPZ|PATH|TRACE|.*\.onnx")
_FOLDER = re.compile(r"DIR|.*\.par")
"""The metavars of arguments whose values are files or folders, and of arguments whose values are
only folders."""


class PrintCompletion(argparse.Action):
    """The argparse action of --print-completion: prints the script for a shell and ends the
    command. The exit status is 2 if the package shtab, which writes such scripts, is missing."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> NoReturn:
        try:
            import shtab
        except ImportError:
            parser.error(f"{option_string} needs shtab: pip install 'onnxpar[completion]'")
        for action in _actions(parser):
            metavar = action.metavar if isinstance(action.metavar, str) else ""
            if _FOLDER.fullmatch(metavar):
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
            elif _FILE.fullmatch(metavar):
                action.complete = shtab.FILE  # type: ignore[attr-defined]
        print(shtab.complete(parser, values))
        parser.exit()


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yields all arguments of a parser and of its commands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
