"""The topology of this host, for plans without a topology of the user's. onnxpar measures the host
once, and keeps the result in the user's cache.

The file's name has a digest of everything that changes the result: the processor, the cores that
this process may use, the memory, the versions of onnxpar and onnxruntime, and how ranks
communicate.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from onnxpar.base.errors import OnnxparError, RankError, StrategyError
from onnxpar.base.log import LOG
from onnxpar.base.progress_line import progress_line
from onnxpar.base.user_cache import user_cache
from onnxpar.base.version import version_of
from onnxpar.base.write_file import make_folders, unread, whole_file
from onnxpar.cost.topology import Topology
from onnxpar.runtime.launch.launch import launched_rank
from onnxpar.runtime.ranks.cores import Core, own_cores

if TYPE_CHECKING:
    from onnxpar.cost.measure import Shard

MEASURED = "measured on this host"
"""The origin of this topology, as plans name it."""
NEVER = "ONNXPAR_MEASURE"
"""The environment variable that, if set to 0, keeps all commands from measuring the host."""
FORMAT = 6
"""The version of the cached files; to be raised when other quantities are measured, or in another
way."""
SECONDS = 1.0
"""Duration of the measurement, without the start of the ranks and of their sessions."""
TIMEOUT = 15.0
"""Longest wait for a rank, in seconds."""
PATIENCE = 30.0
"""Longest wait, in seconds, for another process that measures the host."""
BUSY = 0.25
"""If other programs keep more than this fraction of the cores busy during the measurement, its
result is kept only for HOUR."""
HOUR = 3600.0
"""Seconds for which a result from a busy host is used."""


def host_topology(shard: Shard | None = None) -> Topology | None:
    """Returns the topology of this host: measured by the first call, in less than 5 s, and later
    read from a file.

    Returns None, so that callers use constants: if ONNXPAR_MEASURE=0; on a single core; if the
    measurement fails, after a message; and under a launcher, because ranks that make the same plan
    must use the same figures.

    shard  the compiler, for `measure`
    """
    cores = own_cores()
    if os.environ.get(NEVER) == "0" or len(cores) < 2 or _is_launched():
        return None
    return _host_topology(place_of(cores), shard)


@functools.cache
def _host_topology(place: Path | None, shard: Shard | None = None) -> Topology | None:
    """Returns the topology from the file `place`, or measures it and writes the file. A process
    measures at most once, even if it cannot write the file."""
    topology = _read(place)
    if topology is None:
        with _alone(place):
            topology = _read(place) or _measured(place, shard)
    return topology


def place_of(cores: Sequence[Core]) -> Path | None:
    """Returns the path of the cached topology for these cores; None if the user has no folder for
    caches."""
    folder = user_cache()
    if folder is None:
        return None
    about = (
        FORMAT,
        _processor(),
        [(core.node, len(core.threads)) for core in cores],
        os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 30,
        version_of("onnxpar"),
        version_of("onnxruntime"),
        os.environ.get("ONNXPAR_TRANSPORT", ""),
        os.environ.get("ONNXPAR_LINK", ""),
    )
    digest = hashlib.sha256(repr(about).encode()).hexdigest()[:12]
    return folder / f"host-{digest}.yaml"


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return f"{platform.machine()} {platform.processor()}"


def _is_launched() -> bool:
    """True if a launcher started this process, even if its variables are incomplete."""
    try:
        return launched_rank() is not None
    except RankError:
        return True


def _read(place: Path | None) -> Topology | None:
    """Returns the topology from its file, or from a file of a busy host that is less than HOUR old.
    None if there is none, or if it is damaged."""
    if place is None:
        return None
    for file, most in ((place, float("inf")), (_of_busy(place), HOUR)):
        with suppress(OSError, StrategyError):
            if time.time() - file.stat().st_mtime < most:
                return replace(Topology.read(file), origin=MEASURED)
    return None


def _of_busy(place: Path) -> Path:
    return place.with_suffix(".busy.yaml")


@contextmanager
def _alone(place: Path | None) -> Iterator[None]:
    """A block in which no other process measures the host. Where the cache cannot be locked, it
    runs unlocked."""
    lock: int | None = None
    try:
        with suppress(OSError):
            if place is not None:
                make_folders(place.parent)
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
                lock = os.open(place.with_suffix(".lock"), flags, 0o600)
                _take(lock)
        yield
    finally:
        if lock is not None:
            os.close(lock)


def _take(lock: int) -> None:
    """Locks an open file; waits up to PATIENCE seconds for another process, then goes on without
    the lock. Errors: OSError if the file system has no locks."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.05)


def _measured(place: Path | None, shard: Shard | None) -> Topology | None:
    """Measures the host, writes the result to the file `place`, and tells the user; returns the
    topology, or None if the host cannot be measured."""
    # these modules take half a second to import
    from onnxpar.cost.fit import file_text, fit
    from onnxpar.cost.measure import QUICK, default_ranks, measure

    show = progress_line("onnxpar")
    show("measuring this host, once")
    start, others_before = time.monotonic(), _others_seconds()
    try:
        measurements = measure(default_ranks(), SECONDS, TIMEOUT, effort=QUICK, shard=shard)
    except (OnnxparError, OSError) as error:
        show("")
        reason = str(error).partition("\n")[0]
        LOG.info(f"costs are constants, because this host could not be measured: {reason}")
        return None
    finally:
        show("")
    seconds = time.monotonic() - start
    topology = fit(measurements)
    text = file_text(measurements, topology)
    busy = (_others_seconds() - others_before) / seconds / len(own_cores())
    if place is None:
        said = "not kept, because there is no folder for caches"
    elif busy > BUSY:
        said = f"{_written(_of_busy(place), text)} for an hour, because others keep its cores busy"
    else:
        said = _written(place, text)
    LOG.info(f"measured this host in {seconds:.1f} s: {said} (--for-any-host plans without it)")
    return replace(topology, origin=MEASURED)


def _written(place: Path, text: str) -> str:
    """Writes the file; returns "kept in PLACE", or why it could not be written, for a message."""
    try:
        make_folders(place.parent)
        with whole_file(place) as file:
            file.write(text)
    except (OnnxparError, OSError) as error:
        reason = unread(error) if isinstance(error, OSError) else str(error)
        return f"not kept: {reason}"
    return f"kept in {place}"


def _others_seconds() -> float:
    """Returns the seconds that this process's cores have spent on other processes since boot, of
    which a difference counts; constant on systems that do not tell."""
    names = {f"cpu{thread}" for core in own_cores() for thread in core.threads}
    ticks = 0
    with suppress(OSError, ValueError):
        for line in Path("/proc/stat").read_text().splitlines():
            name, *counts = line.split()
            if name in names:  # user, nice, system, (idle, waiting,) interrupts, soft ones, stolen
                ticks += sum(int(counts[i]) for i in (0, 1, 2, 5, 6, 7))
    spent = os.times()
    return ticks / os.sysconf("SC_CLK_TCK") - sum(spent[:4])
