"""How the hidden states of a text's tokens become one vector, as the files of sentence-transformers
say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.base.bundle_names import POOLING
from onnxpar.base.errors import ModelError
from onnxpar.graph.model_folder import read_config, read_json

_MODULES = "modules.json"


def _weighted(hidden: Array) -> Array:
    """Returns the mean of hidden states in which token i (from 1) has weight i."""
    weights = np.arange(1, len(hidden) + 1, dtype=hidden.dtype)
    mean: Array = weights @ hidden / weights.sum()
    return mean


_POOLINGS: Mapping[str, Callable[[Array], Array]] = {
    "cls_token": lambda hidden: hidden[0],
    "max_tokens": lambda hidden: hidden.max(0),
    "mean_tokens": lambda hidden: hidden.mean(0),
    "mean_sqrt_len_tokens": lambda hidden: hidden.sum(0) / np.sqrt(len(hidden)),
    "weightedmean_tokens": _weighted,
    "lasttoken": lambda hidden: hidden[-1],
}
"""Poolings by the name after `pooling_mode_`, in the order in which several are concatenated."""
_SHORT = {"cls": "cls_token", "max": "max_tokens", "mean": "mean_tokens"}
"""Other names, used by `pooling_mode`."""


@dataclass(frozen=True)
class Pooling:
    """Turns the hidden states of a text into a vector.

    modes        names of poolings ("mean_tokens"), whose vectors are concatenated; empty if the
                 model pools itself
    normalizes   True if the vector is then scaled to length 1
    """

    modes: tuple[str, ...] = ("mean_tokens",)
    normalizes: bool = False

    @staticmethod
    def of(folder: Path, is_pooled: bool) -> Pooling:
        """Returns the pooling that the files in a folder describe. `is_pooled` is True if the model
        itself pools. Errors: ModelError for an unknown module or pooling."""
        kinds = _modules(folder)
        known = ("Transformer", "Pooling", "Normalize")
        unknown = [kind for kind in kinds if kind not in known]
        if unknown and not is_pooled:
            raise ModelError(
                f"{folder / _MODULES} has a module {unknown[0]!r}, which is not in the ONNX file; "
                "export the model with all modules, so that it has the output sentence_embedding"
            )
        return Pooling(() if is_pooled else _modes(folder), "Normalize" in kinds)

    def vector(self, states: Array) -> Array:
        """Returns the vector of a text, in float32. `states` are the hidden states of its tokens,
        (tokens, width), or the vector that the model has pooled, (width,)."""
        result = states.astype(np.float32)
        if self.modes:
            result = np.concatenate([_POOLINGS[mode](result) for mode in self.modes])
        return normalized(result) if self.normalizes else result


def normalized(vectors: Array) -> Array:
    """Returns vectors (the last dimension) scaled to length 1."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    result: Array = vectors / np.maximum(lengths, 1e-12)
    return result


def _modes(folder: Path) -> tuple[str, ...]:
    """Returns the names of the poolings that the configuration requests; the mean without a
    configuration. Errors: ModelError for an unknown pooling."""
    file = folder / POOLING
    if not file.exists():
        return Pooling.modes
    config = read_config(file)
    wanted = config.get("pooling_mode")
    asked = [wanted] if isinstance(wanted, str) else wanted
    if not isinstance(asked, list):
        prefix = "pooling_mode_"
        asked = [name.removeprefix(prefix) for name, value in config.items() if value is True]
        asked = [name for name in asked if f"{prefix}{name}" in config]
    modes = {_SHORT.get(name, name) for name in map(str, asked)}
    if not modes or modes - _POOLINGS.keys():
        what = sorted(modes - _POOLINGS.keys()) or "none"
        raise ModelError(f"{file}: the pooling {what} is not known; {', '.join(_POOLINGS)} are")
    return tuple(name for name in _POOLINGS if name in modes)


def _modules(folder: Path) -> list[str]:
    """Returns the kinds of modules in the file modules.json, such as ["Transformer", "Pooling"];
    none if there is no such file. Errors: ModelError for a damaged file."""
    file = folder / _MODULES
    if not file.exists():
        return []
    modules: Any = read_json(file)
    if not isinstance(modules, list) or not all(isinstance(each, dict) for each in modules):
        raise ModelError(f"{file} does not hold a list of JSON objects; copy it again")
    return [str(each.get("type", "")).rpartition(".")[2] for each in modules]
