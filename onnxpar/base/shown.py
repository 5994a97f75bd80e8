"""Displays results of the API: `print` shows their text, a notebook their HTML.

Modules that format results (`onnxpar/report`) register a function for each class with `text_of` and
`html_of`, so that the classes need not import them.
"""

from __future__ import annotations

from functools import singledispatch


@singledispatch
def text_of(result: object) -> str:
    """The text of a result, in lines of at most 100 columns; `@text_of.register` adds a class."""
    return repr(result)


@singledispatch
def html_of(result: object) -> str | None:
    """The HTML of a result, as a fragment to put into a page; None if the class has only text."""
    return None


class Shown:
    """Base class of results: `str` gives `text_of`, notebooks show `html_of`."""

    def __str__(self) -> str:
        return text_of(self)

    def _repr_html_(self) -> str | None:
        """The HTML for notebooks, which show the text if this is None."""
        return html_of(self)

    def _repr_pretty_(self, printer: object, cycle: bool) -> None:
        """Prints the text in IPython, for a result at the end of a cell."""
        printer.text(str(self))  # type: ignore[attr-defined]
