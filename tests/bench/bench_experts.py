"""Time of a training step of a mixture whose experts compute their own tokens, against one whose
experts all compute all tokens.

    python tests/bench/bench_experts.py [--tokens 2048] [--width 256] [--hidden 1024] [--pairs 9]

One rank; of 8 experts, a router chooses 2 for each token. Both steps are taken in turns, so that
what else the machine does falls on both.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1]))

from training.expert_steps import mixture
from training.steps import ThreadTrainer, batches, shard, write_step

EXPERTS = 8
FINDER = "onnxpar.passes.lower.compact_experts.find_expert_rows"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("tokens", 2048), ("width", 256), ("hidden", 1024), ("pairs", 9)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        text = mixture(EXPERTS, args.tokens, args.width, args.hidden)
        step = write_step(text, Path(folder), "mse")
        chosen, plan = shard(step, "data-parallel 1")
        with patch(FINDER, return_value=iter(())):
            dense, _ = shard(step, "data-parallel dp=1")
        (batch,) = batches(plan, 1)
        with ThreadTrainer(chosen) as few, ThreadTrainer(dense) as all_rows:
            seconds: dict[ThreadTrainer, list[float]] = {few: [], all_rows: []}
            for _ in range(args.pairs + 1):
                for trainer, taken in seconds.items():
                    start = time.perf_counter()
                    trainer.step(batch, 1e-3)
                    taken.append(time.perf_counter() - start)
            few_time, all_time = (statistics.median(s[1:]) for s in seconds.values())
    print(f"chosen rows {few_time * 1e3:.0f} ms, all rows {all_time * 1e3:.0f} ms a step")
    print(f"all rows take {all_time / few_time:.2f} times as long")


if __name__ == "__main__":
    main()
