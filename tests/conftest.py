"""Options and profiles that all tests share."""

from __future__ import annotations

import hypothesis
import pytest
from _pytest.runner import runtestprotocol

hypothesis.settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write tests/golden anew; review the difference by eye",
    )
    parser.addoption(
        "--random-graphs",
        type=int,
        default=240,
        metavar="N",
        help="random graphs to shard and compare",
    )


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Runs a test of processes and their timeouts once more where it fails: a busy machine may
    keep a rank from its turn for seconds."""
    if not {"native", "runtime"} & set(item.path.parts):
        return None
    reports = runtestprotocol(item, nextitem=nextitem, log=False)
    if any(report.failed for report in reports):
        item._initrequest()  # type: ignore[attr-defined]
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True
