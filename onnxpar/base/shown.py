"""Displays results: `print` shows their text, a notebook their HTML.

The modules that format text and pages import the classes of results, not the other way round; so
they register a function for each class here.
"""

from __future__ import annotations

from functools import singledispatch


@singledispatch
def text_of(result: object) -> str:
    """The text of a result, in lines of at most 100 columns."""
    return repr(result)


@singledispatch
def html_of(result: object) -> str | None:
    """The HTML of a result, without the tags of a document; None if there is only text."""
    return None


class Shown:
    """Base of results that `print` and notebooks show."""

    def __str__(self) -> str:
        return text_of(self)

    def _repr_html_(self) -> str | None:
        """The HTML for notebooks, which show the text if this is None."""
        return html_of(self)

    def _repr_pretty_(self, printer: object, cycle: bool) -> None:
        """Prints the text in IPython, for a result at the end of a cell."""
        printer.text(str(self))  # type: ignore[attr-defined]
