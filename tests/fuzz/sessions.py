"""Runs a sharded model once, with random inputs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnxruntime as ort

from onnxpar.runtime.session.bundle import Bundle
from onnxpar.runtime.session.feeds import make_feeds
from onnxpar.runtime.session.threads import ThreadSession

_MOST_ELEMENTS = 1 << 20
"""Of feeds for a run."""


def run_once(par: Path) -> None:
    """Ranks are threads of this process. Errors: OnnxparError."""
    options = ort.SessionOptions()
    options.log_severity_level = 4  # what counts are our own lines
    with ThreadSession(par, options, timeout=20.0) as session:
        feeds = random_feeds(par)
        if feeds is not None:
            session.run(None, feeds)


def random_feeds(par: Path) -> dict[str, Any] | None:
    """None where feeds would be large or cannot be made up."""
    data = Bundle.load(par).data
    specs = [
        (p["name"], p["dtype"] or p["type"], _sizes(p["shape"], data["example"]))
        for p in data["inputs"]
        if not p.get("default")
    ]
    if any("(" in kind or min(shape, default=0) < 0 for _, kind, shape in specs):
        return None
    if sum(math.prod(shape) for _, _, shape in specs) > _MOST_ELEMENTS:
        return None
    return make_feeds(specs, {})


def _sizes(shape: Sequence[Any] | None, example: Mapping[str, int]) -> tuple[int, ...]:
    """A shape with 2 for what is open, or the plan's example for a symbol."""
    return tuple(n if isinstance(n, int) else example.get(n, 2) for n in shape or ())
