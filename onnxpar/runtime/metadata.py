"""The metadata of the unsplit model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

KEY = "metadata"
"""The key of the metadata in plan.json."""
_NO_VERSION = (1 << 63) - 1
"""onnxruntime's version of a model without one."""


@dataclass(frozen=True)
class ModelMetadata:
    """The fields of onnxruntime's class of that name."""

    producer_name: str = ""
    graph_name: str = ""
    domain: str = ""
    description: str = ""
    graph_description: str = ""
    version: int = _NO_VERSION
    custom_metadata_map: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(plan: Mapping[str, Any]) -> ModelMetadata:
        """The metadata in a plan.json; plans of earlier versions have none."""
        return ModelMetadata(**plan.get(KEY, {}))
