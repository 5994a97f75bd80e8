"""What tests of the plan's page share: its parts as a parser finds them, and plans made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from html.parser import HTMLParser

from onnxpar.compiler.plan import Plan
from onnxpar.layout.mesh import Mesh
from onnxpar.report.explain import COLLECTIVE, NODE, Explained, Operand, Step
from onnxpar.search.predict import Prediction

VOID = {"meta", "br", "input"}


class Page(HTMLParser):
    """Tables by id (rows of (class, texts)), terms with what is said of each, all text, and all
    tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tables: list[tuple[str, list[tuple[str, list[str]]]]] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.terms: dict[str, str] = {}
        self.text = ""
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {key: value or "" for key, value in attrs}
        self.tags.append((tag, given))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append((given.get("id", ""), []))
        elif tag == "tr":
            self.tables[-1][1].append((given.get("class", ""), []))
        elif tag in ("td", "th"):
            self.tables[-1][1][-1][1].append("")
        elif tag == "br" and "td" in self.open:
            self.tables[-1][1][-1][1][-1] += "\n"

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {key: value or "" for key, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"style", "script"} & set(self.open):
            return
        self.text += data
        if "dt" in self.open:
            self.terms[data] = ""
        elif "dd" in self.open:
            self.terms[list(self.terms)[-1]] += data
        if "td" in self.open or "th" in self.open:
            self.tables[-1][1][-1][1][-1] += data

    def table(self, name: str) -> list[tuple[str, list[str]]]:
        """Rows of a table, but for its head."""
        ((_, rows),) = [t for t in self.tables if t[0] == name]
        return rows[1:]

    def nodes(self) -> list[tuple[str, list[str]]]:
        """Rows of all nodes."""
        return [row for name, rows in self.tables if not name for row in rows[1:]]

    def of(self, tag: str, kind: str) -> list[dict[str, str]]:
        """The attributes of tags of a class."""
        return [given for t, given in self.tags if t == tag and given.get("class") == kind]


def synthetic(
    name: str, block: str = "", size: int = 4, op: str = "Add", kind: str = NODE, ms: float = 1.0
) -> Step:
    """A node of one operand and one result, of this size."""
    seconds = Prediction(0.0, ms / 1e3) if kind == COLLECTIVE else Prediction(ms / 1e3, 0.0)
    port = (Operand(f"{name}.x", str(size), "[tp]"),)
    return Step(name, op, kind, block, 0, port, port, seconds, size)


def of_steps(steps: Sequence[Step]) -> Explained:
    return Explained(Plan("m", Mesh.parse("tp=2"), None, [], [], [], [], [], []), tuple(steps))
