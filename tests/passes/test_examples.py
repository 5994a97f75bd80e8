"""The examples in the docstrings of passes: what a docstring shows is what the pass does.

An example is the end of the docstring of a pass, with its options on one line, as keywords of
`onnxpar.grad`, where the model becomes a training step, and of `onnxpar.shard`:

    Example: grad(loss="mse", optimizer="sgd"), shard(mesh="dp=2", preset="data-parallel")

        the model, as onnx.parser reads it

    Before:

        the graph before the pass, as --dump writes it

    After:

        the graph after the pass

A line that is indented by 8 spaces more continues the one above. Graphs that are computed apart
are shown only where the pass changes them.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from pathlib import Path

import pytest
from pass_texts import Example, joined

from onnxpar.compiler.pass_ import Pass
from onnxpar.passes.write.split_ranks import SplitRanks
from onnxpar.planner.pass_registry import OWN

PASSES: dict[str, type[Pass]] = {**OWN, SplitRanks.name: SplitRanks}
EXAMPLE = re.compile(
    r"\nExample: (grad\((?P<grad>.*)\),\s+)?shard\((?P<shard>.*)\)\n\n(?P<model>.*)"
    r"\n\nBefore:\n\n(?P<before>.*)\n\nAfter:\n\n(?P<after>.*)$",
    re.DOTALL,
)
WIDTH = 92
"""Of a line of an example: four spaces of the class and four of the block come before it."""


def found(kind: type[Pass]) -> re.Match[str]:
    """The example of a pass."""
    match = EXAMPLE.search(inspect.cleandoc(kind.__doc__ or ""))
    assert match, f"{kind.name} has no example at the end of its docstring; {__file__} says how"
    return match


def keywords(text: str | None) -> dict[str, object] | None:
    return None if text is None else eval(f"dict({text})")


def text_of(block: str) -> str:
    """A block without its indentation, and its long lines in one."""
    return re.sub(r"\n {8,}", " ", textwrap.dedent(block))


def block_of(text: str) -> str:
    """The inverse of `text_of`, as it stands in the source."""
    lines = []
    for line in text.splitlines():
        lines += textwrap.wrap(line, WIDTH, subsequent_indent=" " * 8) or [""]
    return textwrap.indent("\n".join(lines), " " * 8)


def update(kind: type[Pass], before: str, after: str) -> None:
    """Writes the graphs into the docstring."""
    file = Path(inspect.getfile(kind))
    head, _, rest = file.read_text().partition("\n    Before:\n")
    tail = rest[rest.index('\n    """') :]
    blocks = f"\n    Before:\n\n{block_of(before)}\n\n    After:\n\n{block_of(after)}"
    file.write_text(head + blocks + tail)


@pytest.mark.parametrize("name", PASSES)
def test_example(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    match = found(PASSES[name])
    shard = keywords(match["shard"])
    assert shard is not None
    example = Example(match["model"], shard, keywords(match["grad"]))
    texts = example.texts(tmp_path)
    names = list(texts)
    earlier, later = texts[names[names.index(name) - 1]], texts[name]
    changed = {key: text for key, text in later.items() if earlier.get(key) != text}
    assert changed, f"the example of {name} shows nothing that it does"
    before = joined({key: text for key, text in earlier.items() if not key or key in changed})
    after = joined({key: text for key, text in later.items() if not key or key in changed})
    if request.config.getoption("--update-golden"):
        update(PASSES[name], before, after)
    else:
        assert text_of(match["before"]) == before.rstrip("\n")
        assert text_of(match["after"]) == after.rstrip("\n")


def test_the_reference_shows_every_pass() -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "passes.md"
    shown = re.findall(r"^### (.+)\n\n::: (.+)$", page.read_text(), re.MULTILINE)
    assert dict(shown) == {n: f"{p.__module__}.{p.__name__}" for n, p in PASSES.items()}
