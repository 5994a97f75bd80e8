"""The text that models/llm/docs_llama is trained on: sections of pages and of docstrings."""

from __future__ import annotations

import subprocess
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType

import numpy as np
import pytest
from committed import MODELS

PAGE = """# A title that says what the page is about

Some [words](there.md) of a paragraph
on **two** lines, and so many that a section has at least eighty characters.

| a | table |
|---|---|

- a list
  goes on

```console
$ code
```

## Next
Short.
"""
SECTION = (
    "## A title that says what the page is about\n\n"
    "Some words of a paragraph on two lines, and so many that a section has at least eighty "
    "characters.\n\n"
    "- a list goes on"
)


@pytest.fixture(scope="module")
def made() -> ModuleType:
    spec = spec_from_file_location("docs_text", MODELS / "docs_text.py")
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_sections_are_sentences(made: ModuleType) -> None:
    assert made.sections_of(PAGE) == [SECTION]
    code = (
        '"""A file."""\n\nX = 1\n"""A constant."""\n\ndef f():\n    """Does it."""\n    return "no"'
    )
    assert made.page_of("a.py", code) == "## a.py\n\nA file.\n\nA constant.\n\nDoes it."


def test_each_label_is_the_next_token(made: ModuleType) -> None:
    parts = [list(range(i, i + 7)) for i in range(0, 70, 7)]
    rows = made.windows_at_paragraphs(parts, 16, 8)
    np.testing.assert_array_equal(rows["input_ids"][:, 0], [0, 14, 28, 42])
    np.testing.assert_array_equal(rows["labels"], rows["input_ids"] + 1)
    rows = made.windows_side_by_side(parts, 16)
    counts = rows["labels"] != made.IGNORED
    np.testing.assert_array_equal(rows["labels"][counts], np.arange(1, 70))
    np.testing.assert_array_equal(rows["input_ids"][counts], np.arange(69))


@pytest.mark.slow
def test_the_text_is_the_one_that_the_model_has_read(made: ModuleType) -> None:
    found = ["git", "cat-file", "-e", f"{made.COMMIT}^{{commit}}"]
    if subprocess.run(found, cwd=MODELS, capture_output=True).returncode:
        pytest.skip("the repository lacks the commit")
    sections = made.sections()  # has the digest
    assert [len(sections), sum(map(made.is_held_out, sections))] == [1078, 64]
    assert sum(map(made.is_of_pages, sections)) == 307
