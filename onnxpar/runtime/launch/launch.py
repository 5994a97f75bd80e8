"""Finds the rank of this process from the environment variables of mpirun, srun or torchrun.

The native library reads the same variables; `HELP` lists them by precedence.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from onnxpar.base.errors import RankError

LOOPBACK = "127.0.0.1"
GENERATION = "ONNXPAR_GENERATION"
"""The environment variable that says how often a launcher has started the ranks of this run again:
0 at first."""
_TORCH_RESTARTS = "TORCHELASTIC_RESTART_COUNT"
"""torchrun's variable with the same number as ONNXPAR_GENERATION."""

HELP = """under a launcher, each process is one rank and makes the same calls. The rank and the
number of ranks are read from the first pair that is set:
  ONNXPAR_RANK, ONNXPAR_WORLD_SIZE           onnxpar launch, or by hand; these override all others
  OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE mpirun
  SLURM_PROCID, SLURM_STEP_NUM_TASKS         srun (or SLURM_NTASKS, within a step)
  RANK, WORLD_SIZE                           torchrun
It is an error if two launchers contradict each other. The ranks meet at the first of these places
that is set:
  ONNXPAR_STORE                   file:/dir on a shared disk, or tcp://host:port of rank 0
  mpirun                          through mpirun itself, on one host or several
  a folder of this user alone     torchrun and srun on one host
  MASTER_ADDR, MASTER_PORT        at MASTER_PORT + 1, because torch's own store uses MASTER_PORT
ONNXPAR_KEY is a secret of 16 to 512 characters, the same on all ranks; no process can join without
it (openssl rand -hex 16 makes one). It must be set if the ranks meet at an address; else rank 0
makes a key of its own.
Ranks listen where their route to rank 0 begins; ONNXPAR_BIND (--interface) is another address, or
the name of an interface. ONNXPAR_TLS_DIR (--tls-dir) is a folder with ca.crt, tls.crt and tls.key:
then connections are encrypted, and both ends show certificates. Ranks that other hosts can reach
need it, unless ONNXPAR_INSECURE=1 (--insecure) says that the network is trusted.
ONNXPAR_CONNECTIONS is the number of TCP connections between two ranks of different hosts; default
1. ONNXPAR_TIMEOUT is the longest wait of onnxpar.hvd and of a program without Python, in
seconds."""


@dataclass(frozen=True)
class _Launcher:
    """The names of the environment variables that one launcher sets.

    rank        the rank of a process
    sizes       the number of ranks, in order of precedence
    local_size  the number of ranks on the host
    step        of srun: must be set for `SLURM_NTASKS` to count
    """

    rank: str
    sizes: tuple[str, ...]
    local_size: str = ""
    step: str = ""


_OWN = _Launcher("ONNXPAR_RANK", ("ONNXPAR_WORLD_SIZE",), "ONNXPAR_LOCAL_WORLD_SIZE")
_SLURM = _Launcher("SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), step="SLURM_STEP_ID")
_LAUNCHERS = (
    _OWN,
    _Launcher("OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",), "OMPI_COMM_WORLD_LOCAL_SIZE"),
    _SLURM,
    _Launcher("RANK", ("WORLD_SIZE",), "LOCAL_WORLD_SIZE"),
)


@dataclass(frozen=True)
class Launched:
    """The place of this process among ranks that a launcher started.

    rank, size    its rank, and the number of all ranks
    local_size    the number of ranks on this host
    store         where the ranks meet
    bind_address  the address on which this rank listens; "": the address of its route to rank 0
    """

    rank: int
    size: int
    local_size: int
    store: str
    bind_address: str = LOOPBACK

    @property
    def name(self) -> str:
        """The rank for errors, with its host if others have ranks, too."""
        where = f" (host {socket.gethostname()})" if self.local_size < self.size else ""
        return f"rank {self.rank}{where}"


def launched_rank(environment: Mapping[str, str] = os.environ) -> Launched | None:
    """Returns the rank that a launcher gave this process in its environment; None if no launcher
    started the process.

    Errors: RankError if variables are missing, or if the variables of two launchers contradict each
    other.
    """
    present = [one for one in _LAUNCHERS if _is_present(one, environment)]
    if not present:
        return None
    rank, size = _place(present[0], environment)
    for other in present[1:]:
        if present[0] is not _OWN and (rank, size) != _place(other, environment):
            first, second = (_assigned(one, environment) for one in (present[0], other))
            raise RankError(
                f"{first} and {second} contradict each other; unset those of the launcher that did "
                "not start this process, or set ONNXPAR_RANK and ONNXPAR_WORLD_SIZE, which "
                "override all others"
            )
        size = size if size is not None else _place(other, environment)[1]
    if rank is None or size is None or not 0 <= rank < size:
        of = "an unknown number" if size is None else size
        raise RankError(f"this process is rank {rank} of {of}; set {present[0].sizes[0]}")
    local = next(
        (n for one in present if (n := _number(environment, one.local_size)) is not None), None
    )
    if local is None:
        local = -(-size // (_number(environment, "SLURM_STEP_NUM_NODES") or 1))
    store = _store(environment, size, local)
    if not store and size > 1:
        raise RankError(
            "the ranks do not know where to find each other; set ONNXPAR_STORE to file:/dir, a "
            "folder that all ranks can read, or to tcp://host:port, where rank 0 can listen, and "
            "ONNXPAR_KEY to the same secret on all ranks"
        )
    several = local < size or store.startswith("tcp:")
    return Launched(
        rank,
        size,
        local,
        store or "hash:alone",
        bind_address(environment, "" if several else LOOPBACK),
    )


def generation_number(environment: Mapping[str, str] = os.environ) -> int:
    """Returns how often a launcher has started the ranks of this run again. Errors: RankError if
    the variable is not a number."""
    return _number(environment, GENERATION, _TORCH_RESTARTS) or 0


def _is_present(one: _Launcher, environment: Mapping[str, str]) -> bool:
    """True if this launcher started this process. A Slurm batch script has a rank but no step, and
    a shell under srun is a step of one task: neither counts. RANK is a common name, so torchrun
    counts only if WORLD_SIZE is set, too."""
    if not environment.get(one.rank):
        return False
    size = environment.get(one.sizes[0], "")
    if one is _SLURM:
        if environment.get(one.step):
            size = size or environment.get(one.sizes[1], "")
        return size not in ("", "1")
    return bool(size) or one.rank != "RANK"


def _place(one: _Launcher, environment: Mapping[str, str]) -> tuple[int | None, int | None]:
    """Returns (rank, number of ranks) from a launcher's variables; None for an unset one."""
    return _number(environment, one.rank), _number(environment, *one.sizes)


def _assigned(one: _Launcher, environment: Mapping[str, str]) -> str:
    """A launcher's rank and size as an error shows them: "RANK=0, WORLD_SIZE=2"."""
    size = next((name for name in one.sizes if environment.get(name)), one.sizes[0])
    return f"{one.rank}={environment[one.rank]}, {size}={environment.get(size, '')}"


def _store(environment: Mapping[str, str], size: int, local: int) -> str:
    """Returns where the ranks meet, as ONNXPAR_STORE says it, e.g. "tcp://host:port"; empty if no
    variable tells. `local` is the number of ranks on this host."""
    if store := environment.get("ONNXPAR_STORE"):
        return store
    folder = environment.get("PMIX_SERVER_TMPDIR")
    if folder and local == size and environment.get("OMPI_COMM_WORLD_RANK"):
        return f"file:{folder}/onnxpar"
    if environment.get("PMIX_NAMESPACE") and environment.get("OMPI_COMM_WORLD_RANK"):
        return "pmix:"
    host, port = environment.get("MASTER_ADDR"), _number(environment, "MASTER_PORT")
    if host and port:
        if _number(environment, "LOCAL_WORLD_SIZE") == size:
            return f"job:torchrun-{port}"
        return f"tcp://{host}:{port + 1}#{port}"
    job = _number(environment, "SLURM_JOB_ID", "SLURM_JOBID")
    if _is_present(_SLURM, environment) and job is not None and local == size:
        return f"job:slurm-{job}.{_number(environment, 'SLURM_STEP_ID') or 0}"
    return ""


def bind_address(environment: Mapping[str, str] = os.environ, default: str = LOOPBACK) -> str:
    """Returns the address that ranks listen on: ONNXPAR_BIND, else `default`."""
    return environment.get("ONNXPAR_BIND") or default


def _number(environment: Mapping[str, str], *names: str) -> int | None:
    """Returns the first of these variables that is set, as a number; None if none is. Errors:
    RankError if it is not a number."""
    for name in names:
        if name and (text := environment.get(name)):
            if not text.isdigit():
                raise RankError(f"{name}={text!r} in the environment is not a number")
            return int(text)
    return None
