"""The metadata of the unsplit model: producer, version, descriptions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

KEY = "metadata"
"""The key in plan.json of the metadata."""
_NO_VERSION = (1 << 63) - 1
"""The version that onnxruntime reports for a model that states none."""


@dataclass(frozen=True)
class ModelMetadata:
    """The metadata of a model, with the fields of `onnxruntime.ModelMetadata`."""

    producer_name: str = ""
    graph_name: str = ""
    domain: str = ""
    description: str = ""
    graph_description: str = ""
    version: int = _NO_VERSION
    custom_metadata_map: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(plan: Mapping[str, Any]) -> ModelMetadata:
        """Returns the metadata in plan.json, given as its object; the defaults if an earlier
        onnxpar wrote it without any."""
        return ModelMetadata(**plan.get(KEY, {}))
