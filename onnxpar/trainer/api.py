"""The Python functions `onnxpar.grad` and `onnxpar.train`, which do what the commands of these
names do."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from onnxpar.base.pass_times import PassTimes
from onnxpar.graph.given_model import Source, model_file
from onnxpar.graph.training_spec import Step
from onnxpar.planner.option_entry import lists
from onnxpar.runtime.ranks.ranks import StartRanks
from onnxpar.trainer.grad_options import GradOptions
from onnxpar.trainer.iterables import Samples
from onnxpar.trainer.living import held_unless_launched, living
from onnxpar.trainer.loop import Record
from onnxpar.trainer.run_request import run_request
from onnxpar.trainer.train_options import TrainOptions
from onnxpar.trainer.write_step import write_step

if TYPE_CHECKING:
    from typing_extensions import Unpack


@lists(GradOptions)
def grad(
    model: Source,
    output: str | os.PathLike[str],
    *,
    dump: str | os.PathLike[str] | None = None,
    time_passes: PassTimes | None = None,
    **options: Unpack[GradOptions],
) -> Step:
    """Writes the training step of a model: one ONNX graph of standard ops.

    model        a file, an onnx.ModelProto, or its bytes
    output       the file to write
    dump         folder to write the model to as text after each rewrite
    time_passes  collects the wall time of each rewrite
    options      see `GradOptions`

    Returns the roles of the step's inputs and outputs. Warns about weights that the step trains
    differently from PyTorch. Errors: OnnxparError; no file is left half-written.
    """
    with model_file(model) as path:
        written, _ = write_step(path, Path(output), options, dump, time_passes)
    assert written.step is not None
    for caution in written.step.cautions:
        warnings.warn(caution, stacklevel=2)
    return written.step


@lists(TrainOptions)
def train(
    par: str | os.PathLike[str],
    data: Samples,
    *,
    start_ranks: StartRanks | None = None,
    **options: Unpack[TrainOptions],
) -> list[Record]:
    """Trains with a sharded training step. Returns a record of each step: its loss and other
    metrics and, for the last step of an epoch, the evaluation. Steps that an elastic run takes
    again have the records of the last time.

    par          the folder that `onnxpar.shard` wrote for a step of `grad`
    data         samples: an .npz or .parquet file, or a folder of shards; arrays by input name; a
                 sequence of dicts; an iterable of dicts, or a function that returns one, whose
                 items are samples or batches of any size
    start_ranks  starts the ranks elsewhere than on this host, such as `onnxpar.ray.Actors`
    options      see `TrainOptions`

    In the main thread, SIGTERM makes a run with `checkpoint` save one and end with StoppedError. To
    take single steps, use `Trainer`. Errors: OnnxparError; DivergenceError if the loss is not
    finite.
    """
    request = run_request(options)
    with (
        held_unless_launched(request.run, request.elastic) as held,
        living(
            Path(par),
            request.run,
            request.elastic,
            held,
            start_ranks=start_ranks,
            **request.of_trainer,
        ) as generations,
    ):
        samples, held_out = request.data(generations.trainer, data)
        steps = {record.total: record for record in generations.records(samples, held_out)}
        if request.profile:
            generations.trainer.session.end_profile(request.profile, warm_up=1)
    return [steps[total] for total in sorted(steps)]
