"""`python tests/fuzz/run.py --models 3000 --configurations 3000 --seed 1`: tries commands on
mutated models and configurations, and prints how they ended and each fault with its number."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from fuzz.bundles import Bundles, make_hand_split
from fuzz.configurations import Configurations, make_base
from fuzz.folders import Folders
from fuzz.found import keeper
from fuzz.models import Models
from fuzz.trial import Outcome, made_apart, run_all, tally


def main() -> int:
    """Returns 1 where there is a fault."""
    args = _parser().parse_args()
    classes: Counter[str] = Counter()

    def show(outcome: Outcome) -> None:
        lines = outcome.fault.splitlines()
        classes[lines[0][:90]] += 1
        print(f"--- {kind} {outcome.number}: {outcome.fault}", flush=True)

    keep = keeper(args.keep) if args.keep else None
    total = 0
    with made_apart(_make) as base:
        makers = {
            "bundle": (Bundles(args.seed, base), args.bundles),
            "folder": (Folders(args.seed, base), args.folders),
            "configuration": (Configurations(args.seed, base), args.configurations),
            "model": (Models(args.seed), args.models),
        }
        for kind, (maker, count) in makers.items():
            numbers = args.only or range(count)
            counts = tally(run_all(maker, numbers if count else (), args.jobs, keep), show)
            print(f"{kind}s of seed {args.seed}: {dict(counts)}", flush=True)
            total += counts["faults"]
    for text, count in classes.most_common():
        print(f"{count:5} {text}")
    return 1 if total else 0


def _make(folder: Path) -> None:
    make_base(folder)
    make_hand_split(folder)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=0, metavar="N")
    parser.add_argument("--bundles", type=int, default=0, metavar="N")
    parser.add_argument("--folders", type=int, default=0, metavar="N")
    parser.add_argument("--configurations", type=int, default=0, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="copy files that cause new messages there"
    )
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", type=int, nargs="*", metavar="NUMBER", help="these cases alone")
    return parser


if __name__ == "__main__":
    sys.exit(main())
