"""Suggestions of similar names, for error messages about unknown names."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

_SHOWN = 3
_SIMILAR = 0.75
"""Names are similar if difflib's ratio of them is at least this."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns the end of an error message about the unknown `name`: `; did you mean 'x'?` with the
    most similar of the `known` names, or `; it has: ` and all of them if none is similar."""
    known = list(known)
    near = nearest(name, known)
    return f"; did you mean {near!r}?" if near is not None else f"; it has: {', '.join(known)}"


def there_are(pattern: str, names: Iterable[str]) -> str:
    """Returns the end of an error message about a pattern that matches none of `names`: a question
    with the most similar name, else up to three of the names.

    >>> there_are("inpt_ids", ["weight", "input_ids"]), there_are("*x", ["a", "b", "c", "d"])
    ("; did you mean 'input_ids'?", "; there are 'a', 'b', 'c', ...")
    """
    names = list(names)
    if not names:
        return "; there are none"
    near = nearest(pattern, names)
    if near is not None:
        return f"; did you mean {near!r}?"
    part = pattern.strip("*/").lower()
    some = [n for n in names if part and part in n.lower()][:_SHOWN] or names[:_SHOWN]
    return f"; there are {', '.join(map(repr, some))}{', ...' if len(names) > len(some) else ''}"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Returns the known name that is most similar to `name`, first one that differs only in case;
    None if none is similar."""
    known = list(known)
    same = [k for k in known if k.lower() == name.lower()]
    return next(iter(same or get_close_matches(name, known, 1, _SIMILAR)), None)
