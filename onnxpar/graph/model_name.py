"""The name of a model: that of its file, or for generic names such as model.onnx, of its folder."""

from __future__ import annotations

import os
import re
from pathlib import Path

_GENERIC = re.compile(r"model\.onnx|onnx|snapshots|[0-9a-f]{40}")
"""Parts of paths that do not tell models apart. Exporters write `gpt2/model.onnx`, hubs
`gpt2/onnx/model.onnx`, and their caches
`models--gpt2/snapshots/607a30d783dfa663caf39e06633721c8d4cfcd7e/onnx/model.onnx`."""


def model_name(path: Path) -> str:
    """The last part of a model's path that distinguishes it from other models.

    >>> model_name(Path("exports/gpt2/onnx/model.onnx")), model_name(Path("gpt2.onnx"))
    ('gpt2', 'gpt2.onnx')
    """
    parts = Path(os.path.abspath(path)).parts[1:]
    specific = (part for part in reversed(parts) if not _GENERIC.fullmatch(part))
    return next(specific, path.name)
