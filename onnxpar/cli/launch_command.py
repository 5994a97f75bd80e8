"""The command `launch`: starts one command as ranks on several hosts."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from typing import Any

from onnxpar.base.errors import InputError
from onnxpar.runtime.session.checks import LONGEST

_DESCRIPTION = """Starts a command as ranks on several hosts, over ssh; the command is one of
onnxpar's own, or a program. Each rank finds the others, and a secret that is made for this launch
keeps strangers out. This command prints what all ranks print. When a rank fails, all are ended, and
the exit status is that of the rank; with --min-ranks or --max-restarts, the ranks that are left
start again."""

_EXAMPLES = r"""examples:
  onnxpar launch --hosts a:2,b:2 --tls-dir certificates -- run llm.par --inputs in.npz
  onnxpar launch --hostfile hosts --insecure -- python train.py
  onnxpar launch --hosts a:2,b:2 --tls-dir certificates --min-ranks 2 -- \
    train step.par --data train.npz --lr 1e-3 --checkpoint /shared/run --elastic

On each host, `ssh HOST` must work without a password, Python with onnxpar must be at the same path
(or at --python), and the command runs in the folder of the same name. --tls-dir, --insecure and
--interface hold for all ranks, as do environment variables whose names begin with ONNXPAR_ or
OMP_."""


def add_launch(to: Any) -> None:
    """Adds the command `launch` to a parser's commands."""
    from onnxpar.cli.rank_options import add_network

    launch = to.add_parser(
        "launch",
        help="run a command as ranks on several hosts",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    launch.set_defaults(command=_launch)
    where = launch.add_mutually_exclusive_group(required=True)
    where.add_argument("--hosts", metavar="HOST:N,...", help="hosts, with their numbers of ranks")
    where.add_argument("--hostfile", metavar="FILE", help="lines `HOST slots=N`, as mpirun's")
    add_network(launch)
    launch.add_argument(
        "--python",
        default=sys.executable,
        metavar="PATH",
        help="Python with onnxpar on the hosts; its folder comes first in PATH there; default: the "
        "Python that runs launch",
    )
    launch.add_argument(
        "--min-ranks",
        type=int,
        metavar="N",
        help="when hosts are lost, start the ranks of the others again, if at least N are left; "
        "add hosts that return: for commands that go on from a checkpoint, such as train "
        "--elastic; default: the loss of a host is an error",
    )
    launch.add_argument(
        "--max-restarts",
        type=int,
        metavar="N",
        help="how often to start ranks again that died although their hosts live, before going on "
        "without them; default 3 with --min-ranks",
    )
    launch.add_argument(
        "--grace",
        type=float,
        default=40.0,
        metavar="S",
        help="ranks that are to end get SIGTERM, and S seconds until they are killed: to save a "
        "checkpoint, or to finish requests; default %(default)g",
    )
    launch.add_argument("words", nargs=argparse.REMAINDER, metavar="-- COMMAND ...")


def _launch(args: argparse.Namespace) -> int:
    from onnxpar.cli.command_line import arguments
    from onnxpar.cli.command_parser import nearest
    from onnxpar.cli.parser import command_names
    from onnxpar.runtime.launch.generations import Generations
    from onnxpar.runtime.launch.launcher import Command, Launcher, passed_on
    from onnxpar.runtime.launch.membership import MAX_RESTARTS
    from onnxpar.runtime.launch.slots import parse_hosts, ranks_of, read_hostfile

    words = args.words[1:] if args.words[:1] == ["--"] else args.words
    if not words:
        raise InputError("launch needs a command, as in: onnxpar launch --hosts a:2,b:2 -- run ...")
    if words[0] in command_names():
        arguments(words)  # reports wrong arguments once, and not on each rank
        words = [args.python, "-m", "onnxpar", *words]
    elif shutil.which(words[0]) is None and (hint := nearest(words[0], command_names())):
        raise InputError(f"there is no program {words[0]}{hint}")
    if not 0 <= args.grace <= LONGEST:
        raise InputError(f"--grace {args.grace:g}: give a number of seconds of at least 0")
    slots = parse_hosts(args.hosts) if args.hosts else read_hostfile(args.hostfile)
    command = Command(words, os.getcwd(), passed_on(), args.python, args.grace)
    if args.min_ranks is not None or args.max_restarts is not None:
        least = sum(slot.count for slot in slots) if args.min_ranks is None else args.min_ranks
        restarts = MAX_RESTARTS if args.max_restarts is None else args.max_restarts
        return Generations(slots, command, least, restarts).run()
    ranks = {slot.host: numbers for slot, numbers in zip(slots, ranks_of(slots), strict=True)}
    with Launcher(ranks, command) as launcher:
        return launcher.wait()
