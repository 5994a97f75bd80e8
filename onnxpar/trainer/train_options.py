"""The table of options of `train`, from which its command line, its signature in Python, help() and
the documentation follow."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Annotated, TypedDict

from onnxpar.base.custom_ops import HELP as LIBRARY_HELP
from onnxpar.planner.option_entry import NEEDED, OUTPUT, Option, option_lines
from onnxpar.runtime.ranks.cores import BINDINGS
from onnxpar.trainer.iterables import Samples
from onnxpar.trainer.rates import SCHEDULES

RATES, DATA, CHECKPOINTS = "learning rate", "data", "checkpoints"
ELASTIC, TABLES = "ranks that die", "tables on the host"
GROUPS = (NEEDED, RATES, DATA, CHECKPOINTS, ELASTIC, TABLES, OUTPUT)
"""The groups of options in --help, in order."""


class _Required(TypedDict):
    lr: Annotated[float, Option("learning rate", NEEDED)]


class TrainOptions(_Required, total=False):
    """Options of a training run."""

    eval: Annotated[
        Samples | None,
        Option("like --data: samples to evaluate after each epoch, and at the end", NEEDED, "PATH"),
    ]
    epochs: Annotated[
        int | None,
        Option("passes over the data; default: 1, or as many as --max-steps takes", NEEDED),
    ]
    max_steps: Annotated[
        int | None, Option("end the run after N steps, also in the middle of an epoch", NEEDED)
    ]
    checkpoint: Annotated[
        str | os.PathLike[str] | None,
        Option(
            "folder for checkpoints, one of which is written at the end; no other training may "
            "use the folder at the same time",
            NEEDED,
            "DIR",
        ),
    ]
    every: Annotated[int, Option("also write a checkpoint after every N steps", NEEDED, default=0)]
    resume: Annotated[
        bool,
        Option("continue from the newest complete checkpoint; start anew if there is none", NEEDED),
    ]
    schedule: Annotated[
        str,
        Option(
            "learning-rate schedule after warm-up", RATES, default="constant", choices=(*SCHEDULES,)
        ),
    ]
    warmup: Annotated[
        int, Option("warm-up steps, in which the learning rate rises from 0", RATES, default=0)
    ]
    min_lr: Annotated[
        float, Option("learning rate to which a schedule falls; default: 0", RATES, default=0.0)
    ]
    lr_power: Annotated[float | None, Option("for polynomial: its degree; default: 1", RATES)]
    lr_step_size: Annotated[
        int | None,
        Option(
            "for step: steps after which the rate is multiplied by --lr-gamma, again and again",
            RATES,
        ),
    ]
    lr_gamma: Annotated[float | None, Option("for step; default: 0.1", RATES)]
    decay_steps: Annotated[
        int | None,
        Option(
            "for wsd (warm-up, stable, decay): steps at the end of the run in which the rate "
            "falls, along half a cosine",
            RATES,
        ),
    ]
    batch: Annotated[
        int | None,
        Option(
            "expected number of samples in a step; it is an error if the step has another one", DATA
        ),
    ]
    pad: Annotated[
        Mapping[str, float] | None,
        Option(
            "fill samples of this input that are shorter than those of the step, at their end; "
            "labels are filled with -100",
            DATA,
            "NAME=VALUE",
        ),
    ]
    seed: Annotated[int, Option("seed of the order of samples", DATA, default=0)]
    shuffle: Annotated[
        bool, Option("take samples in the order of the file", DATA, flag="no-shuffle", default=True)
    ]
    patience: Annotated[
        int,
        Option(
            "end the run after N evaluations in a row without a lower loss; default: 0, never",
            CHECKPOINTS,
            default=0,
        ),
    ]
    keep: Annotated[
        int,
        Option("keep only the newest N complete checkpoints; 0: keep all", CHECKPOINTS, default=0),
    ]
    keep_best: Annotated[
        bool,
        Option(
            "also save a checkpoint after the evaluation with the least loss, and keep it; the "
            "command prints its name at the end",
            CHECKPOINTS,
        ),
    ]
    allow_changed: Annotated[
        bool,
        Option(
            "with --resume, go on also if data, batch size, --seed, --schedule or the trained "
            "weights are not those of the checkpoint's run",
            CHECKPOINTS,
        ),
    ]
    async_checkpoint: Annotated[
        bool,
        Option(
            "write checkpoints while training goes on: ranks copy their shards in memory, and "
            "take the next steps while the copies are written",
            CHECKPOINTS,
        ),
    ]
    elastic: Annotated[
        bool,
        Option(
            "go on from the last checkpoint when ranks die; needs --checkpoint and --every", ELASTIC
        ),
    ]
    min_ranks: Annotated[
        int | None,
        Option("with --elastic, the fewest ranks with which the run goes on; default: 1", ELASTIC),
    ]
    max_restarts: Annotated[
        int | None,
        Option(
            "with --elastic, how often ranks that died are started again (default: 3); after "
            "that, the run goes on without them, on a smaller mesh",
            ELASTIC,
        ),
    ]
    step: Annotated[
        str | os.PathLike[str] | None,
        Option(
            "with --elastic, the step of which step.par was made, which is sharded again for "
            "fewer ranks; default: the file of its name beside step.par",
            ELASTIC,
            "step.onnx",
        ),
    ]
    table_dir: Annotated[
        str | os.PathLike[str] | None,
        Option(
            "folder for the files of tables on the host (`onnxpar shard --place`), which vanish "
            "with the run; default: step.par",
            TABLES,
            "DIR",
        ),
    ]
    table_cache: Annotated[
        float | str | None,
        Option(
            "most bytes of rows of such tables that a rank keeps in memory, such as 2GB; default: "
            "256 MiB",
            TABLES,
            "SIZE",
        ),
    ]
    # The command line has these from `cli/rank_options.py`, as other commands that start ranks do.
    profile: Annotated[
        str | os.PathLike[str] | None, Option("a file to write with a trace of all steps")
    ]
    threads: Annotated[int | None, Option("threads of each rank, as in `InferenceSession`")]
    bind: Annotated[
        str,
        Option("the cores that each rank runs on, as in `InferenceSession`", default=BINDINGS[0]),
    ]
    ranks_per_numa: Annotated[
        int | None, Option("ranks on each NUMA node, as in `InferenceSession`")
    ]
    libraries: Annotated[Sequence[str | os.PathLike[str]], Option(LIBRARY_HELP)]
    timeout: Annotated[float, Option("limit of every wait for a rank, in seconds", default=60.0)]
    log_dir: Annotated[
        str | os.PathLike[str] | None, Option("a folder for the output of each rank, under rank.N/")
    ]
    verify: Annotated[bool, Option("compare every byte of the folder with its digests first")]


TrainOptions.__doc__ = option_lines(TrainOptions)
