"""The table of options of `grad`, from which its command line, its signature in Python, help() and
the documentation follow."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, TypedDict

from onnxpar.base.custom_ops import HELP as LIBRARY_HELP
from onnxpar.graph.training_spec import IGNORED
from onnxpar.layout.mesh import Mesh
from onnxpar.planner.option_entry import (
    EXTENSIONS,
    NEEDED,
    OUTPUT,
    REQUIRED,
    Option,
    option_lines,
    table,
)
from onnxpar.planner.option_table import LayoutOptions
from onnxpar.strategy.manual import MANUAL
from onnxpar.strategy.strategy import Strategy
from onnxpar.training.loss_settings import Numbers
from onnxpar.training.losses import LOSSES
from onnxpar.training.margins import SCALE
from onnxpar.training.optimizer import Optimizer
from onnxpar.training.optimizers import NONE, OPTIMIZERS
from onnxpar.training.precision import PRECISIONS

LOSS, OPTIMIZER, TRAINED = "loss", "optimizer", "what is trained"
STEP, MANUAL_PROGRAMS = "batches and memory", "manual programs"
GROUPS = (NEEDED, LOSS, OPTIMIZER, TRAINED, STEP, MANUAL_PROGRAMS, OUTPUT, EXTENSIONS)
"""The groups of options in --help, in order."""


def _hyperparameters() -> Mapping[str, Option]:
    """Returns the option (text and group of --help) of each hyperparameter of an optimizer, by
    name."""
    of: dict[str, list[str]] = {}
    for optimizer, kind in OPTIMIZERS.items():
        for field in fields(kind):
            of.setdefault(field.name, []).append(optimizer)
    texts = {name: f"hyperparameter of {', '.join(each)}" for name, each in of.items()}
    return {name: Option(text, OPTIMIZER) for name, text in texts.items()}


HYPERPARAMETERS = _hyperparameters()


class _Required(TypedDict):
    loss: Annotated[
        str,
        Option(
            f"{', '.join(LOSSES)}, or an output that is the loss itself. Labels are class "
            f"numbers; the label {IGNORED} does not count. bce and softmax-cross-entropy are of "
            "scores; if the model ends in a Sigmoid, or in a Softmax of the classes, of its "
            "input. bce is of probabilities if the model otherwise makes numbers from 0 to 1. kl "
            "takes log-probabilities and target probabilities; it is PyTorch's batchmean, kl-mean "
            "its mean",
            NEEDED,
            "LOSS",
        ),
    ]
    optimizer: Annotated[
        str | Optimizer | None,
        Option(
            f"update rule of the parameters; {NONE}: the step returns the gradients as outputs "
            "NAME.grad, and updates nothing",
            NEEDED,
            default=REQUIRED,
            choices=(*OPTIMIZERS, NONE),
        ),
    ]


class GradOptions(_Required, total=False):
    """Options of a training step; in Python, the optimizer is a name or an `Optimizer`."""

    loss_of: Annotated[
        str | None,
        Option("output to compute the loss from, if the model has several", NEEDED, "OUTPUT"),
    ]
    dims: Annotated[Mapping[str, int | str] | None, table(LayoutOptions)["dims"].option]
    precision: Annotated[
        str | None,
        Option(
            "type in which the model computes; parameters and their states keep their types",
            NEEDED,
            choices=PRECISIONS,
        ),
    ]
    clip_norm: Annotated[
        float | None, Option("scale the gradients down if their global norm exceeds X", NEEDED)
    ]
    accumulate: Annotated[
        int,
        Option(
            "number of micro-batches in a step, one after the other; each has the model's batch "
            "size",
            NEEDED,
            "K",
            default=1,
        ),
    ]
    recompute: Annotated[
        bool,
        Option(
            "compute the activations inside blocks again in the backward pass, instead of "
            "keeping them",
            NEEDED,
        ),
    ]
    params: Annotated[
        Sequence[str],
        Option(
            "train the weights whose names match, instead of those that onnxpar finds",
            NEEDED,
            "GLOB",
        ),
    ]
    frozen: Annotated[
        Sequence[str], Option("do not train the weights whose names match", NEEDED, "GLOB")
    ]
    class_axis: Annotated[
        int | None,
        Option("dimension of the classes; default: the last, or the second of four or more", LOSS),
    ]
    label_smoothing: Annotated[
        float | None,
        Option(
            "for softmax-cross-entropy: share of the target that all classes have in equal parts",
            LOSS,
        ),
    ]
    class_weights: Annotated[
        Numbers | None,
        Option(
            "weight of each class in the mean of a loss over labels: numbers, or an .npy file",
            LOSS,
            "W,W,...",
        ),
    ]
    delta: Annotated[
        float | None,
        Option(
            "for huber and smooth-l1: difference from which the loss grows linearly; default: 1",
            LOSS,
        ),
    ]
    pos_weight: Annotated[
        Numbers | None,
        Option(
            "for bce: factor of the loss of positive targets, or one for each element of the "
            "output's last dimension: numbers, or an .npy file",
            LOSS,
            "W,...",
        ),
    ]
    margin: Annotated[
        float | None,
        Option(
            "what arcface adds to the angle of the label's class (default: 0.5 radians), or what "
            "cosface takes from its cosine (default: 0.4)",
            LOSS,
            "M",
        ),
    ]
    logit_scale: Annotated[
        float | None,
        Option(f"factor of the cosines, for arcface and cosface; default: {SCALE:g}", LOSS, "S"),
    ]
    interclass_filtering_threshold: Annotated[
        float | None,
        Option(
            "for arcface and cosface: cosines of classes other than the label's that are above T "
            "become 0, as such samples may have a wrong label; default: all count",
            LOSS,
            "T",
        ),
    ]
    sample_rate: Annotated[
        float,
        Option(
            "fraction of the classes that a step computes: those of its labels, and others at "
            "random; default: 1, all",
            LOSS,
            "R",
            default=1.0,
        ),
    ]
    sample_groups: Annotated[
        int | None,
        Option(
            "number of groups of consecutive classes, from each of which a step samples as many. "
            "At most N ranks can share the classes; default: a divisor of their number, up to 64",
            LOSS,
        ),
    ]
    weight_decay: Annotated[float | None, HYPERPARAMETERS["weight_decay"]]
    momentum: Annotated[float | None, HYPERPARAMETERS["momentum"]]
    nesterov: Annotated[bool | None, HYPERPARAMETERS["nesterov"]]
    beta1: Annotated[float | None, HYPERPARAMETERS["beta1"]]
    beta2: Annotated[float | None, HYPERPARAMETERS["beta2"]]
    epsilon: Annotated[float | None, HYPERPARAMETERS["epsilon"]]
    amsgrad: Annotated[bool | None, HYPERPARAMETERS["amsgrad"]]
    alpha: Annotated[float | None, HYPERPARAMETERS["alpha"]]
    centered: Annotated[bool | None, HYPERPARAMETERS["centered"]]
    momentum_decay: Annotated[float | None, HYPERPARAMETERS["momentum_decay"]]
    beta2_decay: Annotated[float | None, HYPERPARAMETERS["beta2_decay"]]
    clip_threshold: Annotated[float | None, HYPERPARAMETERS["clip_threshold"]]
    trust_coefficient: Annotated[float | None, HYPERPARAMETERS["trust_coefficient"]]
    match_rms_adamw: Annotated[bool | None, HYPERPARAMETERS["match_rms_adamw"]]
    decay_all: Annotated[
        bool,
        Option(
            "also decay biases and the scales of normalizations, as PyTorch's optimizers do",
            OPTIMIZER,
        ),
    ]
    group: Annotated[
        Sequence[str],
        Option(
            "hyperparameters of the parameters whose names match, and lr_scale, a factor of their "
            "learning rate, such as '*.bias:lr_scale=2,weight_decay=0'; of several groups that "
            "match, the last holds",
            OPTIMIZER,
            "GLOB:NAME=X,...",
        ),
    ]
    ema: Annotated[
        float | None,
        Option(
            "keep a moving average of each parameter, which `train --eval` evaluates and "
            "`checkpoint merge --ema` writes; DECAY is its decay in a step, such as 0.999",
            OPTIMIZER,
            "DECAY",
        ),
    ]
    loss_scale: Annotated[
        str | None,
        Option(
            "factor of all gradients during the backward pass, which prevents underflow: dynamic "
            "(default in float16), a number, or none",
            OPTIMIZER,
            "X",
        ),
    ]
    stop_gradient: Annotated[
        Sequence[str],
        Option(
            "let no gradient flow back through the tensors, or the results of the nodes, whose "
            "names match, as detach() does",
            TRAINED,
            "GLOB",
        ),
    ]
    lazy: Annotated[
        Sequence[str],
        Option(
            "update only the rows that a step looks up of the tables whose names match, and their "
            "optimizer state; with adam, as PyTorch's SparseAdam",
            TRAINED,
            "GLOB",
        ),
    ]
    padding_idx: Annotated[
        Mapping[str, int] | None,
        Option(
            "do not train this row of the tables whose names match, as PyTorch's padding_idx does "
            "where a Gather looks rows up; -1 is the last row",
            TRAINED,
            "GLOB=ROW",
        ),
    ]
    weights: Annotated[
        str | os.PathLike[str] | None,
        Option(
            "take the values of weights from a safetensors file, or from those of a folder, as "
            "save_pretrained writes it, by their names in torch",
            TRAINED,
            "DIR",
        ),
    ]
    untie: Annotated[
        bool,
        Option(
            "give each node that reads a vector as its scale or bias a copy of its own. Exporters "
            "store equal vectors only once; without this option, they are trained as one parameter",
            TRAINED,
        ),
    ]
    batch_dim: Annotated[
        Mapping[str, int | None] | None,
        Option(
            "number of the dimension of an input that numbers samples, or none if all samples "
            "share the input; by default, the dimension from which the first one of the labels or "
            "of the target comes",
            STEP,
            "NAME=K",
        ),
    ]
    batch_norm: Annotated[
        str | None,
        Option(
            "samples over which a BatchNormalization computes its statistics: the whole batch "
            "(global), those of a host (node) or of a rank (local; give --groups for both); "
            "default: the mode of the model (in training mode, over the whole batch). And the "
            "variance of n numbers by which it moves its running variance: biased (the default, "
            "as ONNX says) or unbiased, n/(n-1) of it, as in PyTorch",
            STEP,
            "WORD[,WORD]",
        ),
    ]
    groups: Annotated[
        int | None,
        Option("number of hosts or ranks over which the batch is sharded, for --batch-norm", STEP),
    ]
    recompute_nodes: Annotated[
        Sequence[str],
        Option(
            "compute the results of these nodes again, such as '/layers.*/mlp/*', instead of "
            "--recompute, which chooses among all nodes. Results that other nodes read are kept",
            STEP,
            "GLOB",
        ),
    ]
    preset: Annotated[
        str | None,
        Option(
            "the model is the program of one rank, and so is the step: its loss is the mean over "
            "all ranks, and it sums the gradients of replicated weights over the ranks",
            MANUAL_PROGRAMS,
            choices=(MANUAL,),
        ),
    ]
    devices: Annotated[int | None, Option("number of ranks of a manual program", MANUAL_PROGRAMS)]
    mesh: Annotated[
        str | Mesh | None,
        Option(
            "mesh of a manual program: names and sizes of its axes", MANUAL_PROGRAMS, "dp=2,tp=4"
        ),
    ]
    strategy: Annotated[
        str | os.PathLike[str] | Mapping[str, Any] | Strategy | None,
        Option(
            "YAML file with the mesh and the sharded tensors of a manual program; all other "
            "tensors are whole",
            MANUAL_PROGRAMS,
            "FILE",
        ),
    ]
    libraries: Annotated[
        Sequence[str | os.PathLike[str]], Option(LIBRARY_HELP, EXTENSIONS, "FILE", flag="library")
    ]


GradOptions.__doc__ = option_lines(GradOptions)
