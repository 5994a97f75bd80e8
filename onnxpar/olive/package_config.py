"""The package configuration of Olive, extended by ShardModel, so that workflows can name it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from olive.package_config import OlivePackageConfig

SHARD_MODEL = {
    "module_path": "onnxpar.olive.shard_model.ShardModel",
    "supported_providers": ["*"],
    "supported_accelerators": ["*"],
    "supported_precisions": ["*"],
}
"""Ranks run on any provider, and weights keep their types."""


def package_config() -> dict[str, Any]:
    """Returns a configuration with the passes of the installed Olive and ShardModel: the argument
    `package_config` of `olive.workflows.run`, or, written as JSON, the file of `olive run
    --package-config`."""
    own: dict[str, Any] = json.loads(Path(OlivePackageConfig.get_default_config_path()).read_text())
    return {**own, "passes": {**own["passes"], "ShardModel": SHARD_MODEL}}
