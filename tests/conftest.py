"""Options and profiles that all tests share."""

from __future__ import annotations

import math
import os
import shutil
import signal
import tempfile
import zlib
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import hypothesis
import pytest
from sharded import PLACE

from onnxpar.runtime.ranks.ranks import ProcessRanks, Ranks
from onnxpar.runtime.session import session
from onnxpar.runtime.session.bundle import Bundle
from onnxpar.runtime.session.options import SessionSpec
from onnxpar.runtime.session.threads import ThreadRanks

# In a shell's background, or under nohup, these are ignored: commands that tests start would, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

os.environ["ONNXPAR_MEASURE"] = "0"  # costs do not depend on the machine; commands inherit this
os.environ.pop("FORCE_COLOR", None)  # tests read texts; commands inherit this, too
os.fsync = lambda fd: None  # no test cuts the power; test_kills.py counts the calls

MEDIA = "shared-memory", "gloo"
FRACTION = 60
"""Of as many cases of a matrix one runs by default."""

hypothesis.settings.register_profile(
    "repeatable",
    max_examples=40,
    derandomize=True,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile(
    "thorough", hypothesis.settings.get_profile("repeatable"), max_examples=400
)


@pytest.fixture(scope="module", params=MEDIA)
def medium(request: pytest.FixtureRequest) -> Iterator[str]:
    """What carries the messages of worlds that tests and their child processes make."""
    before = os.environ.get("ONNXPAR_TRANSPORT")
    os.environ["ONNXPAR_TRANSPORT"] = request.param
    yield request.param
    if before is None:
        del os.environ["ONNXPAR_TRANSPORT"]
    else:
        os.environ["ONNXPAR_TRANSPORT"] = before


class _Ranks:
    """Starts the ranks of sessions as threads, in a tenth of the time that processes take,
    except with `--zoo` and in tests that are marked `processes`. Threads write no logs."""

    as_processes = False

    def __call__(
        self,
        bundle: Bundle,
        spec: SessionSpec,
        timeout: float,
        log_dir: str | os.PathLike[str] | None,
        bind_address: str,
    ) -> Ranks:
        if self.as_processes:
            return ProcessRanks(bundle, spec, timeout, log_dir, bind_address)
        return ThreadRanks(bundle, spec, timeout)


RANKS = _Ranks()
session.ProcessRanks = RANKS  # type: ignore[assignment, misc]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    is_marked = item.get_closest_marker("processes") is not None
    RANKS.as_processes = is_marked or bool(item.config.getoption("zoo"))


def pytest_configure(config: pytest.Config) -> None:
    """Decides how many examples are drawn, and makes the folder of sharded models, for all
    processes of this run."""
    hypothesis.settings.load_profile("thorough" if config.getoption("zoo") else "repeatable")
    if PLACE not in os.environ:
        os.environ[PLACE] = tempfile.mkdtemp(prefix="onnxpar-tests-")
        config.add_cleanup(lambda: shutil.rmtree(os.environ.pop(PLACE)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says what the parts of tests/run.sh took before."""
    if parts := os.environ.get("ONNXPAR_PARTS"):
        terminalreporter.write_line(f"before the tests: {parts.rstrip(', ')}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write tests/golden anew; review the difference by eye",
    )
    parser.addoption(
        "--write-gradients",
        action="store_true",
        help="write onnxpar/training/gradients/proof.json: how many tests of "
        "tests/training/gradients asked each op's gradient",
    )
    parser.addoption(
        "--random-graphs",
        type=int,
        default=120,
        metavar="N",
        help="random graphs to shard and compare",
    )
    parser.addoption(
        "--frames",
        type=int,
        default=200,
        metavar="N",
        help="damaged frames that each test of the control channel sends (1000: two minutes)",
    )
    parser.addoption(
        "--horovod",
        action="store_true",
        help="read Horovod's signatures from its source on the package index",
    )
    parser.addoption(
        "--zoo",
        action="store_true",
        help="all models at every preset, number of ranks, batch and open size, and all cases of "
        "tests that are marked as a matrix or slow (hours)",
    )


def pytest_report_header(config: pytest.Config) -> list[str]:
    return [] if config.getoption("zoo") else ["a sample of all tests; --zoo runs the others, too"]


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, obj: object) -> list[pytest.Item] | None:
    """Collects no test that is marked as slow, unless all are wanted."""
    if collector.config.getoption("zoo") or not isinstance(obj, type | FunctionType):
        return None
    names = {mark.name for mark in getattr(obj, "pytestmark", ())}
    is_slow = "slow" in names or collector.get_closest_marker("slow") is not None
    return [] if is_slow else None


def _checksum(name: str) -> int:
    return zlib.crc32(name.encode())


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    """Unless all are wanted, leaves one case in FRACTION of each test marked as a matrix (in
    N of one marked `matrix(N)`), one medium for each case outside of tests/native, and no case that
    is marked as slow."""
    yield
    if metafunc.config.getoption("zoo"):
        return
    name = metafunc.definition.nodeid

    def is_wanted(case: Any) -> bool:
        medium = case.params.get("medium")
        if any(mark.name == "slow" for mark in case.marks):
            return False
        if medium is None or "tests/native/" in name:
            return True
        same_in_both = f"{name}[{case.id.replace(medium, '', 1)}]"
        return MEDIA[_checksum(same_in_both) % 2] == medium

    cases = list(filter(is_wanted, metafunc._calls))
    if mark := metafunc.definition.get_closest_marker("matrix"):
        (fraction,) = mark.args or (FRACTION,)
        # By checksum, because neighbours have parameters in common.
        numbers = sorted(range(len(cases)), key=lambda i: _checksum(f"{name}[{cases[i].id}]"))
        cases = [cases[i] for i in sorted(numbers[: math.ceil(len(cases) / fraction)])]
    metafunc._calls = cases
