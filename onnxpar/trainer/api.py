"""The Python calls of `onnxpar grad` and `onnxpar train`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnxpar.training.gradients  # noqa: F401  (registers the gradient rules)
from onnxpar.base.custom_ops import use_libraries
from onnxpar.base.errors import OnnxparError, StrategyError
from onnxpar.graph.given_model import Source, model_file
from onnxpar.graph.training_spec import Step
from onnxpar.graph.write_model import export_model, write_model
from onnxpar.layout.mesh import Mesh
from onnxpar.load.load import Model
from onnxpar.planner.context import load_model
from onnxpar.planner.options import Options, manual_of
from onnxpar.planner.refuse_overwriting import refuse_overwriting
from onnxpar.runtime.profile.trace import check_place
from onnxpar.runtime.ranks.cores import BINDINGS
from onnxpar.runtime.ranks.ranks import StartRanks
from onnxpar.strategy.strategy import Strategy
from onnxpar.trainer.elastic import Elastic
from onnxpar.trainer.import_weights import read_values
from onnxpar.trainer.iterables import Samples
from onnxpar.trainer.living import held_unless_launched, living
from onnxpar.trainer.loop import Record, Run
from onnxpar.trainer.rates import Schedule
from onnxpar.training.backward import LossOptions
from onnxpar.training.batch_norm import BatchNorm
from onnxpar.training.gradients.trained import Weights
from onnxpar.training.loss_scale import LossScale
from onnxpar.training.loss_settings import LossSettings, Numbers, numbers_of
from onnxpar.training.manual import RankProgram
from onnxpar.training.margins import Margin
from onnxpar.training.optimizer import Optimizer
from onnxpar.training.optimizers import make_optimizer
from onnxpar.training.parameter_groups import Group
from onnxpar.training.sampling import Sampling
from onnxpar.training.step import StepOptions, make_step


def grad(
    model: Source,
    output: str | os.PathLike[str],
    *,
    loss: str,
    optimizer: str | Optimizer | None,
    loss_of: str | None = None,
    class_axis: int | None = None,
    label_smoothing: float | None = None,
    class_weights: Numbers | None = None,
    delta: float | None = None,
    pos_weight: Numbers | None = None,
    margin: float | None = None,
    logit_scale: float | None = None,
    interclass_filtering_threshold: float | None = None,
    sample_rate: float = 1.0,
    sample_groups: int | None = None,
    params: Sequence[str] = (),
    frozen: Sequence[str] = (),
    stop_gradient: Sequence[str] = (),
    padding_idx: Mapping[str, int] | None = None,
    lazy: Sequence[str] = (),
    batch_norm: str | None = None,
    groups: int | None = None,
    precision: str | None = None,
    loss_scale: str | None = None,
    recompute: bool = False,
    recompute_nodes: Sequence[str] = (),
    clip_norm: float | None = None,
    accumulate: int = 1,
    group: Sequence[str] = (),
    decay_all: bool = False,
    ema: float | None = None,
    batch_dim: Mapping[str, int | None] | None = None,
    weights: str | os.PathLike[str] | None = None,
    untie: bool = False,
    dims: Mapping[str, int | str] | None = None,
    libraries: Sequence[str | os.PathLike[str]] = (),
    devices: int | None = None,
    mesh: str | Mesh | None = None,
    preset: str | None = None,
    strategy: str | os.PathLike[str] | Mapping[str, Any] | Strategy | None = None,
    **hyperparameters: Any,
) -> Step:
    """Writes the training step of a model: one ONNX graph of standard ops.

    model       a file, an onnx.ModelProto, or its bytes
    output      the file to write
    loss        softmax-cross-entropy, nll, arcface, cosface, mse, l1, huber, smooth-l1, bce, kl or
                kl-mean, or the name of an output that is the loss
    optimizer   sgd, momentum, adam, adamw, lamb, adagrad, rmsprop, nadam, adafactor, lion, lars or
                muon, with its hyperparameters by name (weight_decay, momentum, beta1 ...), or an
                Optimizer; "none" to return gradients
    loss_of     the output to compare with the target, if the model has several
    class_axis  the dimension of classes: by default the last, or the second of four or more
    label_smoothing  share of the target that all classes have in equal parts
    class_weights  the weight of each class in the mean: numbers, or an .npy file
    delta       for huber and smooth-l1, the difference from which the loss grows linearly; 1 by
                default
    pos_weight  for bce, a factor of the loss of positive targets: a number, or one for each element
                of the output's last dimension
    margin      what arcface adds to the angle of the label's class (by default 0.5, in radians), or
                what cosface takes from its cosine (by default 0.4)
    logit_scale the factor of the cosines of arcface and cosface; 64 by default
    interclass_filtering_threshold  cosines of arcface and cosface above it become 0, except those
                of the labels' classes: such samples may have a wrong label
    sample_rate the fraction of classes that a step computes: those of its labels, others at random
    sample_groups  number of groups of consecutive classes, of each of which a step samples as many;
                by default a divisor of the number of classes. At most as many ranks can share the
                classes
    params      globs of the weights to train; by default, onnxpar finds them
    frozen      globs of weights not to train
    stop_gradient  globs of tensors, or of nodes, through which no gradient flows back
    padding_idx  by name or glob of tables, the row that lookups do not train; -1 is the last
    lazy        globs of tables of which a step updates only the rows that it looks up, with their
                optimizer state: sgd, adagrad, or adam (then as PyTorch's SparseAdam)
    batch_norm  the samples over which BatchNormalization takes statistics: global (the batch), node
                (those of a host) or local (those of a rank); by default as in the model. And, after
                a comma or alone, the variance by which a running variance moves: biased (the
                default, as ONNX says) or unbiased, n/(n-1) of it, as in PyTorch
    groups      for node, the number of hosts; for local, the number of ranks
    precision   float16 or bfloat16: the dtype in which the model computes; parameters keep theirs
    loss_scale  factor of the loss: "dynamic" (the default with float16), a number, or "none"
    recompute   True to compute activations again in the backward pass instead of keeping them
    recompute_nodes  globs of nodes whose results are computed again, instead of a choice among all;
                those that other nodes read are kept
    clip_norm   the largest norm over all gradients together; larger gradients are scaled down
    accumulate  number of micro-batches in a step; each has the model's batch size
    group       hyperparameters of the parameters whose names match a glob, and a factor of their
                learning rate: "*.bias:lr_scale=2,weight_decay=0"; the last that matches holds
    decay_all   True to decay biases and scales of normalizations, too, as PyTorch's optimizers do
    ema         decay of moving averages of the parameters, which evaluations then use, and
                `merge(ema=True)` writes
    batch_dim   by input, the dimension that numbers samples, or None for an input that all samples
                share; by default, onnxpar finds them
    weights     a safetensors file, or a folder of some: values of the weights whose names they have
    untie       True to give each node that reads a shared scale or bias vector its own copy
    dims        sizes of symbolic dimensions, by symbol: numbers, or other symbols as text
    libraries   custom-op libraries for onnxruntime
    preset      "manual" if the model is one rank's program with collectives; then the step is one,
                too, for `devices` ranks or a `mesh` ("dp=2,tp=4" or a Mesh), with tensors sharded
                as in `strategy`

    Returns the roles of the step's inputs and outputs. Warns about weights that the step trains
    differently from PyTorch. Errors: OnnxparError; no file is left half-written.
    """
    # The parameters are listed one by one so that editors and type checkers know them: a TypedDict
    # cannot be combined with **hyperparameters, whose names depend on the optimizer.
    if isinstance(optimizer, str):
        optimizer = make_optimizer(optimizer, **hyperparameters)
    elif hyperparameters:
        names = ", ".join(sorted(hyperparameters))
        remedy = f"give them to {type(optimizer).__name__}(...)" if optimizer else "leave them out"
        raise StrategyError(
            f"{names}: hyperparameters go with an optimizer that is given by name; {remedy}, or "
            "correct the name of the argument"
        )
    wanted = LossOptions(
        loss,
        loss_of,
        LossSettings(
            class_axis,
            Margin(margin, logit_scale, interclass_filtering_threshold),
            label_smoothing,
            numbers_of("--class-weights", class_weights),
            delta,
            numbers_of("--pos-weight", pos_weight),
        ),
        params,
        frozen,
        BatchNorm.parse(batch_norm, groups),
        precision,
        LossScale.parse(loss_scale, precision),
        recompute,
        lazy,
        recompute_nodes,
        Sampling(sample_rate, sample_groups),
        stop_gradient,
        padding_idx or {},
        batch_dim or {},
    )
    mesh = Mesh.parse(mesh) if isinstance(mesh, str) else mesh
    how = Strategy.from_argument(strategy)
    use_libraries(libraries)
    source = Options(devices=devices, mesh=mesh, preset=preset, strategy=how, dims=dims)
    of_groups = [Group.parse(text) for text in group]
    options = StepOptions(optimizer, clip_norm, accumulate, of_groups, decay_all, ema)
    with model_file(model) as path:
        written, _ = write_step(path, Path(output), wanted, options, source, untie, weights)
    assert written.step is not None
    for caution in written.step.cautions:
        warnings.warn(caution, stacklevel=2)
    return written.step


def train(
    par: str | os.PathLike[str],
    data: Samples,
    *,
    lr: float,
    eval: Samples | None = None,
    pad: Mapping[str, float] | None = None,
    batch: int | None = None,
    epochs: int | None = None,
    max_steps: int | None = None,
    schedule: str = "constant",
    warmup: int = 0,
    min_lr: float = 0.0,
    lr_power: float | None = None,
    lr_step_size: int | None = None,
    lr_gamma: float | None = None,
    decay_steps: int | None = None,
    seed: int = 0,
    shuffle: bool = True,
    checkpoint: str | os.PathLike[str] | None = None,
    every: int = 0,
    keep: int = 0,
    resume: bool = False,
    allow_changed: bool = False,
    async_checkpoint: bool = False,
    patience: int = 0,
    keep_best: bool = False,
    elastic: bool = False,
    min_ranks: int | None = None,
    max_restarts: int | None = None,
    step: str | os.PathLike[str] | None = None,
    profile: str | os.PathLike[str] | None = None,
    table_dir: str | os.PathLike[str] | None = None,
    table_cache: float | str | None = None,
    threads: int | None = None,
    bind: str = BINDINGS[0],
    ranks_per_numa: int | None = None,
    libraries: Sequence[str | os.PathLike[str]] = (),
    timeout: float = 60.0,
    log_dir: str | os.PathLike[str] | None = None,
    start_ranks: StartRanks | None = None,
    verify: bool = False,
) -> list[Record]:
    """Trains with a sharded training step. Returns a record of each step: its loss and other
    metrics and, for the last step of an epoch, the evaluation.

    par         the folder that `onnxpar.shard` wrote for a step of `grad`
    data        samples: an .npz or .parquet file, or a folder of shards; arrays by input name; a
                sequence of dicts; an iterable of dicts, or a function that returns one, whose items
                are samples or batches of any size
    lr          the learning rate; with a schedule or warm-up, its peak
    eval        samples for an evaluation after each epoch, and at the end
    pad         by input, the value that fills samples that are shorter than the step's; labels are
                filled with -100
    batch       the batch size you expect; an error if the step was written for another one
    epochs      number of passes over all samples; by default one, or as many as `max_steps` takes
    max_steps   number of steps after which the run ends, also in the middle of an epoch
    schedule    learning-rate schedule after warm-up: constant, linear, cosine, polynomial, step,
                inverse-sqrt or wsd
    warmup      number of warm-up steps, in which the learning rate rises linearly
    min_lr      the rate to which a schedule falls
    lr_power    the degree of polynomial; 1 by default
    lr_step_size, lr_gamma  for step, the number of steps after which the rate is multiplied by
                lr_gamma, 0.1 by default
    decay_steps for wsd, the number of steps at the end of the run in which the rate falls
    seed        decides the order of samples, and the random numbers of steps
    shuffle     False to use samples in the order of `data`
    checkpoint  a folder for checkpoints; one is saved at the end. The folder is locked against
                other runs
    every       number of steps between checkpoints; 0 to save one at the end only
    keep        number of checkpoints to keep, the newest; 0 to keep all
    resume      True to continue from the newest complete checkpoint in the folder
    allow_changed  with `resume`, True to go on also if data, batch size, seed, schedule or the
                trained weights are not those of the checkpoint's run
    async_checkpoint  True to write checkpoints while training goes on: ranks copy their shards in
                memory, and take the next steps while the copies are written
    patience    number of evaluations in a row without a lower loss after which the run ends; 0 for
                none
    keep_best   True to save a checkpoint after the evaluation with the least loss, and to keep it
    elastic     True to go on from the last checkpoint when ranks die. The steps after it are taken
                again; their records replace the earlier ones
    min_ranks   with `elastic`, the fewest ranks with which the run goes on; default: 1
    max_restarts  with `elastic`, how often ranks that died are started again (default: 3); after
                that, the run goes on without them, on a smaller mesh
    step        with `elastic`, the step of which `par` was made, which is sharded again for fewer
                ranks; default: the file of its name beside `par`
    profile     a file to write with a trace of all steps
    table_dir   a folder for the files of tables on the host; default: `par`
    table_cache  most bytes of their rows that a rank keeps in memory; default: 256 MiB
    threads, bind, ranks_per_numa  threads of each rank, and the cores that it runs on, as in
                `InferenceSession`
    libraries   custom-op libraries for onnxruntime
    timeout     limit of every wait for a rank, in seconds
    log_dir     a folder for the output of each rank, under rank.N/
    start_ranks  starts the ranks elsewhere than on this host, such as `onnxpar.ray.Actors`
    verify      True to compare every byte of `par` with its digests first

    In the main thread, SIGTERM makes a run with `checkpoint` save one and end with StoppedError. To
    take single steps, use `Trainer`. Errors: OnnxparError; DivergenceError if the loss is not
    finite.
    """
    # Long for the list of parameters and their descriptions, which editors show.
    use_libraries(libraries)
    folder = None if checkpoint is None else Path(checkpoint)
    falling = Schedule(schedule, warmup, min_lr, lr_power, lr_step_size, lr_gamma, decay_steps)
    order = (epochs, lr, falling, seed, shuffle)
    going_on = (resume, async_checkpoint, allow_changed)
    run = Run(*order, folder, every, keep, *going_on, patience, keep_best, max_steps)
    run.check_evaluation(eval is not None)
    if profile is not None:
        check_place(profile)
    options: dict[str, Any] = {
        "timeout": timeout,
        "log_dir": log_dir,
        "profile": profile is not None,
        "table_dir": table_dir,
        "table_cache": table_cache,
        "threads": threads,
        "bind": bind,
        "ranks_per_numa": ranks_per_numa,
        "start_ranks": start_ranks,
        "verify": verify,
    }
    elasticity = Elastic.of(elastic, min_ranks, max_restarts, step, profile is not None)
    with (
        held_unless_launched(run, elasticity) as held,
        living(Path(par), run, elasticity, held, **options) as generations,
    ):
        trainer = generations.trainer
        samples = trainer.batches_of(data, pad=pad)
        samples.check_batch(batch)
        held_out = None if eval is None else trainer.batches_of(eval, False, pad)
        steps = {record.total: record for record in generations.records(samples, held_out)}
        if profile is not None:
            trainer.session.end_profile(profile, warm_up=1)
    return [steps[total] for total in sorted(steps)]


def write_step(
    path: Path,
    output: Path,
    loss: LossOptions,
    options: StepOptions,
    source: Options,
    untie: bool = False,
    values: str | os.PathLike[str] | None = None,
) -> tuple[Model, Weights]:
    """Writes a training step; returns the step, and its trained and untrained weights. `source` has
    the sizes of the model and, if the model is one rank's program, its mesh and strategy; `untie`
    is as in `grad`, and `values` as its `weights`. Errors: OnnxparError."""
    if not output.parent.is_dir():
        raise OnnxparError(f"{output.parent}: no such folder for the output")
    refuse_overwriting({"model": path, "output": output})
    if source.strategy is not None and source.strategy.context:
        raise StrategyError(
            f"{source.strategy.source}: context is for `onnxpar shard`, which splits the step; "
            "give a strategy without it"
        )
    manual = manual_of(source)
    if manual is None and (source.mesh or source.devices or source.strategy):
        raise StrategyError(
            "a mesh and a strategy are for a program per rank (--preset manual); for any other "
            "model, give them to `onnxpar shard`, which splits the step"
        )
    model = load_model(path, source, for_training=True, untied=untie)
    weights = make_step(model, loss, options, None if manual is None else RankProgram(manual))
    proto = export_model(model.graph, model.header)
    if values is None:
        write_model(proto, model.folder, output)
    else:
        assert model.step is not None
        write_model(proto, model.folder, output, read_values(values, model.step, proto))
    return model, weights
