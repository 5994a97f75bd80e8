"""Splits every case of ONNX's own test-suite in every way, runs it on ranks, and compares.

python tests/peer/run.py [--part 1/10] [--only SUBSTRING] [--workers 2] [--json FILE]
    [--open [--sample 1/20] | --write | --write-rules]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))
from peer.cases import all_cases
from peer.outcome import BAD, Outcome
from peer.parts import part_of
from peer.proofs import write_proofs
from peer.report import summary
from peer.workers import Steps, Worker, open_trials_of, trials_of


def try_cases(numbers: Sequence[int], workers: int, steps: Steps) -> Iterator[list[Outcome]]:
    """The outcomes of these cases, as they come."""
    idle: SimpleQueue[Worker] = SimpleQueue()
    for _ in range(workers):
        idle.put(Worker(steps))

    def one(number: int) -> list[Outcome]:
        worker = idle.get()
        try:
            return worker.try_case(number)
        finally:
            idle.put(worker)

    with ThreadPoolExecutor(workers) as pool:
        yield from pool.map(one, numbers)
    while not idle.empty():
        idle.get().close()


def main() -> int:
    """Runs, prints the summary, and returns 1 where anything is wrong or missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--part", default="1/1", metavar="I/N", help="every N-th case, from the I-th"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name contains TEXT")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where each outcome goes")
    parser.add_argument(
        "--open",
        action="store_true",
        help="with sizes made open, at sizes that were not planned for",
    )
    parser.add_argument(
        "--sample",
        default="1/1",
        metavar="I/N",
        help="with --open: of each case, every N-th way to open it, from the I-th",
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="write rules/proof.json and docs/reference/ops.md of a whole run",
    )
    parser.add_argument(
        "--write-rules", action="store_true", help="write these with the counts of the last run"
    )
    args = parser.parse_args()
    if args.write_rules:
        write_proofs(None)
        return 0
    cases = all_cases()
    numbers = [i for i in part_of(len(cases), args.part) if args.only in cases[i].name]
    outcomes: list[Outcome] = []
    first, step = map(int, args.sample.split("/"))
    steps = partial(open_trials_of, sample=(first - 1, step)) if args.open else trials_of
    tried = try_cases(numbers, args.workers, steps)
    with open(args.json or os.devnull, "w", buffering=1) as file:
        for found in tqdm(tried, "cases", len(numbers), disable=None):
            outcomes += found
            file.writelines(json.dumps(asdict(o)) + "\n" for o in found)
    if args.write:
        write_proofs(outcomes)
    print("\n".join(summary(outcomes)))
    return int(any(o.kind in BAD for o in outcomes))


if __name__ == "__main__":
    sys.exit(main())
