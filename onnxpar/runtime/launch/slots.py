"""Reads how many ranks run on each host: from `a:2,b:2`, or from a host file of mpirun."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from onnxpar.base.errors import InputError

_HOST = re.compile(r"(?P<name>[^\s:,]+|\[[0-9A-Fa-f:]+\])(:(?P<slots>[0-9]+))?")
_LINE = re.compile(r"(?P<name>\S+)(\s+slots\s*=\s*(?P<slots>[0-9]+))?(\s+max[-_]slots\s*=\s*\d+)?")


@dataclass(frozen=True)
class Slots:
    """A host, by the name that ssh knows, and the number of ranks on it."""

    host: str
    count: int


def parse_hosts(text: str) -> list[Slots]:
    """Reads a list such as `a:2,b:2` or `a,b` (one rank each). Errors: InputError if it has another
    form, or names a host twice."""
    slots = []
    for part in text.split(","):
        match = _HOST.fullmatch(part.strip())
        if match is None:
            raise InputError(f"--hosts {text}: {part!r} must be HOST or HOST:RANKS, as in a:2,b:2")
        slots.append(_slots(match, f"--hosts {text}"))
    return _each_once(slots, f"--hosts {text}")


def read_hostfile(path: str | Path) -> list[Slots]:
    """Reads a host file of mpirun: a line `HOST slots=N` for each host, and comments after #.
    Errors: InputError if it cannot be read, or names a host twice."""
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the host file {path} cannot be read: {error}") from error
    slots = []
    for number, line in enumerate(lines, 1):
        text = line.split("#")[0].strip()
        if not text:
            continue
        match = _LINE.fullmatch(text)
        if match is None:
            raise InputError(f"{path}, line {number}: {text!r} must be HOST slots=N")
        slots.append(_slots(match, f"{path}, line {number}"))
    if not slots:
        raise InputError(f"the host file {path} names no host")
    return _each_once(slots, str(path))


def ranks_of(slots: Sequence[Slots]) -> list[list[int]]:
    """Returns the ranks of each host, in the order of hosts: [[0, 1], [2, 3]] for `a:2,b:2`."""
    ranks, first = [], 0
    for each in slots:
        ranks.append(list(range(first, first + each.count)))
        first += each.count
    return ranks


def _slots(match: re.Match[str], where: str) -> Slots:
    """Returns a host and its number of ranks from a match of the patterns. `where` begins the
    errors: InputError for no ranks, or a name that ssh would read as an option."""
    count = int(match["slots"] or 1)
    if count == 0:
        raise InputError(f"{where}: host {match['name']} has no ranks")
    if match["name"].startswith("-"):
        raise InputError(f"{where}: {match['name']!r} is no name of a host")
    return Slots(match["name"].strip("[]"), count)


def _each_once(slots: list[Slots], where: str) -> list[Slots]:
    """Returns `slots`. Errors: InputError if a host occurs twice."""
    names = [each.host for each in slots]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"{where} names host {name} twice; give it all its ranks at once")
    return slots
