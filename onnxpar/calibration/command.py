"""The command `onnxpar calibrate`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tqdm import tqdm

from onnxpar.calibration.fit import file_text, fit, lines
from onnxpar.calibration.measure import measure
from onnxpar.errors import InputError
from onnxpar.runtime.cores import own_cores
from onnxpar.runtime.launch import launched_rank
from onnxpar.write_file import whole_file

MOST_RANKS = 8
"""By default: what more of them would show takes long."""


def default_ranks() -> int:
    """One for each core, but no more than MOST_RANKS, and at least two."""
    return max(2, min(MOST_RANKS, len(own_cores())))


def calibrate(args: argparse.Namespace) -> int:
    """Measures, writes the topology file, and prints what was measured beside what it says."""
    ranks = default_ranks() if args.ranks is None else args.ranks
    if ranks < 2:
        raise InputError(f"--ranks {ranks}: links are between 2 ranks at least")
    if not 0 < args.seconds < float("inf"):
        raise InputError(f"--seconds {args.seconds}: must be above 0")
    if launched_rank() is not None:
        raise InputError("calibrate starts ranks of its own, on this host; run it by itself")
    output = Path(args.output)
    if not output.parent.is_dir():
        raise InputError(f"{output.parent}: no such folder for the output")
    is_quiet = not sys.stderr.isatty()
    with tqdm(total=1.0, desc="measured", disable=is_quiet, leave=False) as bar:
        found = measure(ranks, args.seconds, args.timeout, bar.update)
    topology = fit(found)
    with whole_file(output) as file:
        file.write(file_text(found, topology))
    print("\n".join(lines(found, topology)))
    print()
    print(topology.text(), end="")
    print(f"written to {output}")
    return 0
