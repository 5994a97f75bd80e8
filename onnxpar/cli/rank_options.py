"""Options of commands that start ranks. This module does not import the compiler, so that `onnxpar
run` starts quickly."""

from __future__ import annotations

import argparse
import os

from onnxpar.base.custom_ops import HELP as LIBRARY_HELP
from onnxpar.runtime.launch.launch import HELP as LAUNCH_HELP
from onnxpar.runtime.ranks.cores import BINDINGS


def add_runtime(to: argparse.ArgumentParser) -> None:
    """Adds the options of running ranks: --timeout, --log-dir and the options of `add_network`."""
    add_timeout(to)
    add_network(to)
    to.add_argument("--log-dir", metavar="DIR", help="write what each rank prints to DIR/rank.N/")


def add_library(to: argparse._ActionsContainer) -> None:
    """Adds --library, a library of custom ops for onnxruntime."""
    to.add_argument(
        "--library",
        dest="libraries",
        action="append",
        default=[],
        metavar="FILE",
        help=LIBRARY_HELP,
    )


def add_cores(to: argparse.ArgumentParser) -> None:
    """Adds the options that place ranks on cores: --threads, --ranks-per-numa, --bind."""
    to.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="threads of each rank; default: the number of cores divided by that of ranks",
    )
    to.add_argument(
        "--ranks-per-numa",
        type=int,
        metavar="N",
        help="ranks on each NUMA node; default: each rank is on the node where it gets most cores, "
        "so equal nodes have equally many",
    )
    to.add_argument(
        "--bind",
        choices=BINDINGS,
        default=BINDINGS[0],
        help="run each rank on its share of the cores (cores, the default; a rank with one core is "
        "bound to the NUMA node), on all cores of the NUMA nodes of its share (numa), or on any "
        "(none); a launcher such as mpirun binds ranks itself",
    )


def add_timeout(to: argparse.ArgumentParser) -> None:
    """Adds --timeout, the longest wait for a rank."""
    to.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="longest wait for a rank, in seconds; default %(default)g",
    )


VARIABLES = {
    "interface": "ONNXPAR_BIND",
    "tls_dir": "ONNXPAR_TLS_DIR",
    "insecure": "ONNXPAR_INSECURE",
}
"""The environment variable for each option of `add_network`; the plugin and the processes of ranks
read these variables."""


def apply_to_process(args: argparse.Namespace) -> None:
    """Applies parsed options that hold for the whole process: sets the variables in VARIABLES, and
    loads the libraries of --library."""
    if getattr(args, "libraries", ()):
        from onnxpar.base.custom_ops import use_libraries

        use_libraries(args.libraries)
    for option, variable in VARIABLES.items():
        if value := getattr(args, option, None):
            os.environ[variable] = "1" if value is True else value


def add_network(to: argparse.ArgumentParser) -> None:
    """Adds the options of connections between hosts: --interface, --tls-dir, --insecure."""
    to.add_argument(
        "--interface",
        metavar="NAME",
        help="the interface, or its address, that ranks listen on; default: that of the route to "
        "rank 0",
    )
    to.add_argument(
        "--tls-dir",
        metavar="DIR",
        help="encrypt connections between ranks; the folder has ca.crt, tls.crt and tls.key",
    )
    to.add_argument(
        "--insecure",
        action="store_true",
        help="let ranks listen for other hosts without --tls-dir, in a network that you trust",
    )


def add_launcher_help(to: argparse.ArgumentParser) -> None:
    """Puts a text about launchers (mpirun, srun) at the end of a command's help."""
    to.epilog, to.formatter_class = LAUNCH_HELP, argparse.RawDescriptionHelpFormatter


def add_verify(to: argparse.ArgumentParser) -> None:
    """Adds --verify, which compares every byte of a folder with the digests in it."""
    to.add_argument(
        "--verify",
        action="store_true",
        help="compare every byte of the folder with the SHA-256 that shard wrote; without this "
        "option, only 8 parts of 1 MiB each are compared of files above 8 MiB",
    )


def add_profile(to: argparse.ArgumentParser, runs: str) -> None:
    """Adds --profile, which records a trace of all ranks. `runs` is the word in its help: "runs",
    "steps"."""
    to.add_argument(
        "--profile",
        metavar="FILE",
        help="write what each rank did to a file for Perfetto or chrome://tracing: each node that "
        f"onnxruntime ran, and each collective with its waiting time, of all {runs}; if there are "
        "several, the first is a warm-up and left out",
    )
