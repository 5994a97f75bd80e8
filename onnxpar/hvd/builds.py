"""Horovod's queries about what a build supports: onnxpar has Gloo, and nothing else."""

from __future__ import annotations

from onnxpar.base.errors import InputError


def gloo_built() -> bool:
    """Returns True: ranks communicate by Gloo."""
    return True


def gloo_enabled() -> bool:
    """Returns True: ranks communicate by Gloo."""
    return True


def mpi_built() -> bool:
    """Returns False: mpirun can start ranks, but they communicate by Gloo."""
    return False


def mpi_enabled() -> bool:
    """Returns False: ranks communicate by Gloo."""
    return False


def mpi_threads_supported() -> bool:
    """Errors: InputError, as in Horovod without MPI."""
    raise InputError("MPI is not enabled: ranks communicate by Gloo")


def nccl_built() -> int:
    """Returns 0, for no version of NCCL: ranks communicate by Gloo."""
    return 0


def ddl_built() -> bool:
    """Returns False: ranks do not communicate by IBM's DDL."""
    return False


def ccl_built() -> bool:
    """Returns False: ranks do not communicate by Intel's oneCCL."""
    return False


def cuda_built() -> bool:
    """Returns False: arrays are on the CPU."""
    return False


def rocm_built() -> bool:
    """Returns False: arrays are on the CPU."""
    return False
