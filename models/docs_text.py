"""The text that models/llm/docs_llama is trained on: the sentences of this project's own pages and
docstrings, as they were at one commit.

A section is a heading, `## ` and its words, and its paragraphs, each on one line. Code, tables,
comments and the targets of links are left out. The docstrings of a file are a section, whose
heading is the file's path. One section in 16 is held out, to evaluate the model.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import io
import re
import subprocess
import tarfile
import zlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

ROOT = Path(__file__).parents[1]
COMMIT = "6c89ff10e133bcafdd2dd500c9e2cf22aeb531de"
DIGEST = "cb2e763fe33eb9c5a74d958b3ee61c8fc8f7a5ac78627dd985244ca593b7d2df"
"""The SHA-256 of all sections at that commit."""
PLACES = ("docs", "onnxpar", "passes", "README.md", "CONTRIBUTING.md", "CHANGELOG.md")
PLACES += ("models/README.md",)
HELD_OUT = 16
SHORTEST = 80
"""Characters of a section; shorter ones are headings alone."""
VOCABULARY = 1536
SPECIALS = ("<s>", "</s>", "<pad>")
END = 1
IGNORED = -100
"""The label of a place that does not count."""
LEFT_OUT = (
    r"<!--.*?-->",
    r"^ *```.*?^ *```$",  # code
    r"^(?:\|| {4,}\S|:::).*?$",  # tables, indented code, what docstrings fill
    r"^[^\n]*\S {3,}\S.*?$",  # names and what they mean, in columns
    r"!\[[^\]]*\]\([^)]*\)",  # pictures
    r"\*\*",
)


def sections() -> list[str]:
    """All sections of all pages and files, in the order of their names."""
    found = [s for name, text in files() for s in sections_of(page_of(name, text))]
    digest = hashlib.sha256("\0".join(found).encode()).hexdigest()
    assert digest == DIGEST, f"other text than the model was trained on: {digest}"
    return found


def files() -> Iterator[tuple[str, str]]:
    """The name and the text of each page and each file with docstrings, at that commit."""
    command = ["git", "archive", COMMIT, *PLACES]
    archive = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as members:
        for member in sorted(members, key=lambda member: member.name):
            if member.name.endswith((".md", ".py")):
                content = members.extractfile(member)
                assert content is not None
                yield member.name, content.read().decode()


def page_of(name: str, text: str) -> str:
    """A page as it is, or the docstrings of a file as a page."""
    if name.endswith(".md"):
        return text
    found = [f"## {name}"]
    for node in ast.walk(ast.parse(text)):
        for child in ast.iter_child_nodes(node):
            match child:
                case ast.Expr(value=ast.Constant(value=str(words))):
                    found.append(inspect.cleandoc(words))
    return "\n\n".join(found)


def sections_of(page: str) -> list[str]:
    """The sections of a page in Markdown."""
    for pattern in LEFT_OUT:
        page = re.sub(pattern, "", page, flags=re.DOTALL | re.MULTILINE)
    page = re.sub(r"\[([^\]]*)\](?:\([^)]*\)|\[[^\]]*\])", r"\1", page)  # links
    page = re.sub(r"(?<=\S)\n[ \t]*(?!- |\d+\. |#|\n)(?=\S)", " ", page)  # lines of a paragraph
    parts = (part.strip() for part in re.split(r"^(?=#+ )", page, flags=re.MULTILINE))
    return [
        re.sub(r"\n\s*\n", "\n\n", re.sub(" +", " ", re.sub("^#+ ", "## ", part)))
        for part in parts
        if len(part) >= SHORTEST
    ]


def is_of_pages(section: str) -> bool:
    """Whether a section is not made of the docstrings of a file."""
    return re.match(r"## \S+\.py\n", section) is None


def is_held_out(section: str) -> bool:
    """Whether a section is for evaluation; its words alone decide."""
    return zlib.crc32(section.encode()) % HELD_OUT == 0


def tokenizer_of(texts: list[str]) -> Tokenizer:
    """A byte-level tokenizer that was trained on texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def paragraphs(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """The tokens of each paragraph; the last one of a section ends with the token of an end."""
    found = []
    for text in texts:
        parts = re.split(r"(?<=\n)(?=\S)", text)
        found += [tokenizer.encode(part).ids for part in parts]
        found[-1].append(END)
    return found


def windows_at_paragraphs(parts: list[list[int]], length: int, apart: int) -> dict[str, np.ndarray]:
    """For training: windows that begin where a paragraph does, so that texts are read from their
    beginnings, as prompts are. Each begins at least so many tokens after the one before."""
    stream = [token for part in parts for token in part]
    starts: list[int] = []
    for start in np.cumsum([0, *map(len, parts[:-1])]).tolist():
        if not starts or start - starts[-1] >= apart:
            starts.append(start)
    rows = np.array([stream[s : s + length + 1] for s in starts if s + length < len(stream)])
    return {"input_ids": rows[:, :-1], "labels": rows[:, 1:]}


def windows_side_by_side(parts: list[list[int]], length: int) -> dict[str, np.ndarray]:
    """For evaluation: windows each token of which, but the first, is predicted once."""
    stream = [token for part in parts for token in part]
    edges = [*range(0, len(stream) - 1, length), len(stream) - 1]
    ids = np.zeros((len(edges) - 1, length), np.int64)
    labels = np.full_like(ids, IGNORED)
    for row, (begin, end) in enumerate(pairwise(edges)):
        ids[row, : end - begin] = stream[begin:end]
        labels[row, : end - begin] = stream[begin + 1 : end + 1]
    return {"input_ids": ids, "labels": labels}
