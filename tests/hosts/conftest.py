"""Two hosts that log in to each other, shared by the tests of a module."""

from __future__ import annotations

import inspect
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from certificates import authority, certificate
from hosts import ssh
from hosts.hosts import Host, Hosts, why_not


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, obj: object) -> list[pytest.Item] | None:
    """Tests on hosts of their own take long, each: unless all are wanted, none is collected."""
    is_wanted = collector.config.getoption("zoo") or not inspect.isfunction(obj)
    return None if is_wanted or "cluster" not in inspect.signature(obj).parameters else []


@dataclass
class Cluster:
    """Hosts, a folder that all share, and the environment in which ssh works between them."""

    hosts: list[Host]
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def certificates(self) -> Path:
        return self.folder / "certificates"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Hosts a, b and c. Says why where a machine cannot have them."""
    reason = why_not() or ssh.why_not()
    if reason:
        pytest.skip(reason)
    # Hosts have a /tmp of their own each, so what they share lies elsewhere.
    folder = Path(tempfile.mkdtemp(dir="/var/tmp", prefix="onnxpar-hosts-"))
    try:
        with Hosts(3) as hosts:
            made = Cluster(hosts, folder, ssh.serve(hosts, folder / "ssh"))
            certificate(made.certificates, authority(folder / "ca"))
            yield made
    finally:
        shutil.rmtree(folder)
