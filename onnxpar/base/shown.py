"""How results look: `print` gives their text, a notebook their HTML.

The modules that lay out text and pages stand above the results that they show, so they register
what they make of each kind.
"""

from __future__ import annotations

from functools import singledispatch


@singledispatch
def text_of(result: object) -> str:
    """The text of a result, in lines of at most 100 columns."""
    return repr(result)


@singledispatch
def html_of(result: object) -> str | None:
    """The HTML of a result, without the tags of a document; None where there is only text."""
    return None


class Shown:
    """A result that `print` and a notebook show."""

    def __str__(self) -> str:
        return text_of(self)

    def _repr_html_(self) -> str | None:
        """For notebooks, which show the text where this is None."""
        return html_of(self)

    def _repr_pretty_(self, printer: object, cycle: bool) -> None:
        """For IPython, where a result that ends a cell is printed as its text."""
        printer.text(str(self))  # type: ignore[attr-defined]
