"""A Ray cluster of two nodes on this machine: two raylets. Tests here are skipped without Ray.

The folder is not named `ray`, because `import ray` would find it where Ray is not installed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

NODE = {"num_cpus": 2, "object_store_memory": 100 << 20}


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """The cluster, to which this process is connected."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    made = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    made.add_node(**NODE)
    made.wait_for_nodes()
    ray.init(address=made.address, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()
