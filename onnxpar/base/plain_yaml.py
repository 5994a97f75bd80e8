"""Parses YAML of mappings, lists, texts, numbers, bools and null: all that configurations need."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml

MOST_ENTRIES = 100_000
"""Most entries of a document; an alias (`*name`) counts as many entries as it refers to."""
_TAGS = ("null", "bool", "int", "float", "seq", "map", "str", "merge")


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """A YAML loader for the types of _TAGS alone; it reads dates, sets and the like as text or
    refuses them."""


_PREFIX = "tag:yaml.org,2002:"
_KNOWN = {f"{_PREFIX}{tag}" for tag in _TAGS}
_Loader.yaml_constructors = {
    tag: make
    for tag, make in yaml.SafeLoader.yaml_constructors.items()
    if tag is None or tag in _KNOWN
}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in entries if tag in _KNOWN]
    for first, entries in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def read_text(path: str | os.PathLike[str]) -> str:
    """Returns the text of a UTF-8 file. Errors: OSError; ValueError if the file is not UTF-8."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError("not a text file; give a YAML file in UTF-8") from None


def parse(text: str) -> Any:
    """Returns the lists, dicts and scalars of a YAML text; None for an empty text. Errors:
    ValueError that describes the mistake and its position."""
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check_size(node)
        return loader.construct_document(node)
    except (yaml.YAMLError, OverflowError, LookupError) as error:
        # `!!bool x` raises a KeyError, and `!!float ""` an IndexError.
        raise ValueError(f"not YAML: {_mistake(error)}") from None
    except RecursionError:
        raise ValueError("its lists and mappings are nested too deeply") from None
    finally:
        if loader is not None:
            loader.dispose()


def _mistake(error: Exception) -> str:
    """The line and column of a YAML error, if known, and what is wrong there."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        context = f" {error.context}" if error.context else ""
        return f"{_place(error.problem_mark)}: {error.problem}{context}"
    if isinstance(error, yaml.reader.ReaderError):
        return f"character {error.position + 1} is {error.character!r}, which YAML does not allow"
    if isinstance(error, LookupError):
        return f"a value does not fit its tag ({error})"
    return str(error)


def _place(mark: yaml.Mark) -> str:
    return f"line {mark.line + 1}, column {mark.column + 1}"


def _check_size(root: yaml.Node) -> None:
    """Checks that a document, with its aliases expanded, is finite and small. Errors: ValueError if
    an alias lies inside the value that it refers to, or if there are more than MOST_ENTRIES
    entries."""
    sizes: dict[int, int] = {}
    open_nodes: set[int] = set()

    def size(node: yaml.Node) -> int:
        if id(node) in open_nodes:
            raise ValueError(f"{_place(node.start_mark)}: an alias is part of what it refers to")
        if id(node) not in sizes:
            open_nodes.add(id(node))
            inner = node.value if isinstance(node, yaml.CollectionNode) else ()
            parts = (each for one in inner for each in (one if isinstance(one, tuple) else (one,)))
            sizes[id(node)] = 1 + sum(map(size, parts))
            open_nodes.discard(id(node))
        return sizes[id(node)]

    if size(root) > MOST_ENTRIES:
        raise ValueError(f"it has more than {MOST_ENTRIES:,} entries")
