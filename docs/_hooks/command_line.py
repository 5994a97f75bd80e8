"""Writes the reference of the command line from the parser whenever the site is built."""

from __future__ import annotations

import argparse
import html
from collections.abc import Iterator
from typing import Any

from onnxpar.cli.parser import parser

PLACE = "<!-- commands -->"
"""Where a page wants the commands."""


def on_page_markdown(markdown: str, **_: Any) -> str:
    """MkDocs calls this with the text of every page."""
    return markdown.replace(PLACE, commands_text()) if PLACE in markdown else markdown


def commands_text() -> str:
    """Every command of the parser, as Markdown."""
    return "\n".join(line for each in commands(parser()) for line in command_lines(each))


def commands(of: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The commands of a parser, in its order; a command of commands stands for those."""
    for action in of._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in dict.fromkeys(action.choices.values()):
                yield from list(commands(each)) or [each]


def command_lines(command: argparse.ArgumentParser) -> Iterator[str]:
    """One command: its effect, its usage and its options."""
    name = command.prog
    yield f"\n## {name}\n"
    yield f"{_text(command.description)}\n"
    required = [a for a in command._actions if a.required or not a.option_strings]
    usage = " ".join(_usage(a) for a in required)
    yield f"```text\n{name} {usage} [options]\n```\n"
    for action in command._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        # a list item, as a table would be too wide for a phone
        anchor = f"{name}-{action.dest}".replace(" ", "-").replace("_", "-")
        yield f'<a id="{anchor}"></a>`{_flags(action)}`'
        notes = [_help(command, action) or "The model to read."]
        if action.choices is not None and not _names_all(action):
            notes.append(f"One of: {', '.join(f'`{c}`' for c in action.choices)}.")
        if _shows_default(action):
            notes.append(f"Default: `{action.default}`.")
        first = notes[0].split(",")[0].split(" ")[0]
        notes[0] = notes[0] if first in (action.choices or ()) else _capital(notes[0])
        yield f":   {' '.join(_sentence(note) for note in notes)}\n"
    if command.epilog:
        yield f"```text\n{command.epilog}\n```\n"


def _flags(action: argparse.Action) -> str:
    value = "" if action.nargs == 0 else f" {_value(action)}"
    if not action.option_strings:
        return _value(action)
    return ", ".join(action.option_strings) + value


def _value(action: argparse.Action) -> str:
    name = action.metavar or ("NAME" if action.choices is not None else action.dest.upper())
    return str(name if action.option_strings or action.metavar else action.dest)


def _usage(action: argparse.Action) -> str:
    if action.option_strings:
        return f"{action.option_strings[0]} {_value(action)}"
    return f"[{_value(action)}]" if action.nargs in ("?", "*") else _value(action)


def _names_all(action: argparse.Action) -> bool:
    return all(str(choice) in str(action.help) for choice in action.choices or ())


def _shows_default(action: argparse.Action) -> bool:
    given = action.default not in (None, False, True, [], 0, argparse.SUPPRESS)
    return given and action.nargs != 0 and "default" not in str(action.help).lower()


def _help(command: argparse.ArgumentParser, action: argparse.Action) -> str:
    """The effect of an option, with its default if the help asks for it."""
    return _text(command._get_formatter()._expand_help(action)) if action.help else ""


def _text(words: str | None) -> str:
    """Help as a user reads it, escaped for Markdown."""
    shown = " ".join((words or "").split())
    for mark in ("*", "_", "[", "]"):
        shown = shown.replace(mark, f"\\{mark}")
    return html.escape(shown, quote=False)


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _sentence(text: str) -> str:
    return text if text.endswith((".", "`", ":")) else f"{text}."
