"""The arguments of `grad`."""

from __future__ import annotations

import argparse
from dataclasses import fields

from onnxpar.cli.options import (
    GivenModel,
    Options,
    add_option,
    mesh,
    named_number,
    named_number_or_none,
)
from onnxpar.cli.rank_options import add_library
from onnxpar.graph.training_spec import IGNORED
from onnxpar.planner.option_table import table
from onnxpar.strategy.manual import MANUAL
from onnxpar.training.losses import LOSSES
from onnxpar.training.margins import FILTER, SCALE
from onnxpar.training.optimizers import NONE, OPTIMIZERS
from onnxpar.training.precision import PRECISIONS


def add_grad(to: argparse.ArgumentParser) -> None:
    """Adds the arguments of `grad`."""
    to.add_argument("model", metavar="model.onnx", action=GivenModel, help="an ONNX model")
    to.add_argument(
        "-o",
        "--output",
        required=True,
        metavar="FILE",
        help="training step to write, such as step.onnx",
    )
    _add_loss(to.add_argument_group("loss"))
    _add_optimizer(to.add_argument_group("optimizer"))
    _add_batch_norm(to.add_argument_group("batch norms"))
    _add_step(to.add_argument_group("step"))
    _add_trained(to.add_argument_group("what is trained"))
    add_option(to, table()["dims"])
    add_library(to)
    _add_manual(to.add_argument_group("manual programs"))


def _add_loss(to: Options) -> None:
    to.add_argument(
        "--loss",
        required=True,
        metavar="LOSS",
        help=f"{', '.join(LOSSES)}, or an output that is the loss itself. Labels are class "
        f"numbers; the label {IGNORED} does not count. bce and softmax-cross-entropy are of "
        "scores; if the model ends in a Sigmoid, or in a Softmax of the classes, of its input. bce "
        "is of probabilities if the model otherwise makes numbers from 0 to 1. kl takes "
        "log-probabilities and target probabilities; it is PyTorch's batchmean, kl-mean its mean",
    )
    to.add_argument(
        "--loss-of",
        metavar="OUTPUT",
        help="output to compute the loss from, if the model has several",
    )
    to.add_argument(
        "--class-axis",
        type=int,
        metavar="N",
        help="dimension of the classes; default: the last, or the second of four or more",
    )
    to.add_argument(
        "--label-smoothing",
        type=float,
        metavar="X",
        help="for softmax-cross-entropy: share of the target that all classes have in equal parts",
    )
    to.add_argument(
        "--class-weights",
        metavar="W,W,...",
        help="weight of each class in the mean of a loss over labels: numbers, or an .npy file",
    )
    to.add_argument(
        "--delta",
        type=float,
        metavar="X",
        help="for huber and smooth-l1: difference from which the loss grows linearly; default: 1",
    )
    to.add_argument(
        "--pos-weight",
        metavar="W,...",
        help="for bce: factor of the loss of positive targets, or one for each element of the "
        "output's last dimension: numbers, or an .npy file",
    )
    to.add_argument(
        "--margin",
        type=float,
        metavar="M",
        help="what arcface adds to the angle of the label's class (default: 0.5 radians), or what "
        "cosface takes from its cosine (default: 0.4)",
    )
    to.add_argument(
        "--logit-scale",
        type=float,
        metavar="S",
        help=f"factor of the cosines, for arcface and cosface; default: {SCALE:g}",
    )
    to.add_argument(
        FILTER,
        type=float,
        metavar="T",
        help="for arcface and cosface: cosines of classes other than the label's that are above T "
        "become 0, as such samples may have a wrong label; default: all count",
    )
    to.add_argument(
        "--sample-rate",
        type=float,
        default=1.0,
        metavar="R",
        help="fraction of the classes that a step computes: those of its labels, and others at "
        "random; default: 1, all",
    )
    to.add_argument(
        "--sample-groups",
        type=int,
        metavar="N",
        help="number of groups of consecutive classes, from each of which a step samples as many. "
        "At most N ranks can share the classes; default: a divisor of their number, up to 64",
    )


def _add_optimizer(to: Options) -> None:
    to.add_argument(
        "--optimizer",
        required=True,
        choices=[*OPTIMIZERS, NONE],
        help=f"update rule of the parameters; {NONE}: the step returns the gradients as outputs "
        "NAME.grad, and updates nothing",
    )
    users: dict[str, list[str]] = {}
    flags: set[str] = set()
    for optimizer, kind in OPTIMIZERS.items():
        for field in fields(kind):
            users.setdefault(field.name, []).append(optimizer)
            flags |= {field.name} if isinstance(field.default, bool) else set()
    for name, of in users.items():
        option, text = f"--{name.replace('_', '-')}", f"hyperparameter of {', '.join(of)}"
        if name in flags:
            to.add_argument(option, action="store_true", default=None, help=text)
        else:
            to.add_argument(option, type=float, metavar="X", help=text)
    to.add_argument(
        "--decay-all",
        action="store_true",
        help="also decay biases and the scales of normalizations, as PyTorch's optimizers do",
    )
    to.add_argument(
        "--group",
        action="append",
        default=[],
        metavar="GLOB:NAME=X,...",
        help="hyperparameters of the parameters whose names match, and lr_scale, a factor of their "
        "learning rate, such as '*.bias:lr_scale=2,weight_decay=0'; of several groups that match, "
        "the last holds",
    )


def _add_batch_norm(to: Options) -> None:
    to.add_argument(
        "--batch-norm",
        metavar="WORD[,WORD]",
        help="samples over which a BatchNormalization computes its statistics: the whole batch "
        "(global), those of a host (node) or of a rank (local; give --groups for both); "
        "default: the mode of the model (in training mode, over the whole batch). And the variance "
        "of n numbers by which it moves its running variance: biased (the default, as ONNX says) "
        "or unbiased, n/(n-1) of it, as in PyTorch",
    )
    to.add_argument(
        "--groups",
        type=int,
        metavar="N",
        help="number of hosts or ranks over which the batch is sharded, for --batch-norm",
    )


def _add_step(to: Options) -> None:
    to.add_argument(
        "--clip-norm",
        type=float,
        metavar="X",
        help="scale the gradients down if their global norm exceeds X",
    )
    to.add_argument(
        "--ema",
        type=float,
        metavar="DECAY",
        help="keep a moving average of each parameter, which `train --eval` evaluates and "
        "`checkpoint merge --ema` writes; DECAY is its decay in a step, such as 0.999",
    )
    to.add_argument(
        "--precision",
        choices=PRECISIONS,
        help="type in which the model computes; parameters and their states keep their types",
    )
    to.add_argument(
        "--loss-scale",
        metavar="X",
        help="factor of all gradients during the backward pass, which prevents underflow: dynamic "
        "(default in float16), a number, or none",
    )
    to.add_argument(
        "--recompute",
        action="store_true",
        help="compute the activations inside blocks again in the backward pass, instead of "
        "keeping them",
    )
    to.add_argument(
        "--recompute-nodes",
        action="append",
        default=[],
        metavar="GLOB",
        help="compute the results of these nodes again, such as '/layers.*/mlp/*', instead of "
        "--recompute, which chooses among all nodes. Results that other nodes read are kept",
    )
    to.add_argument(
        "--accumulate",
        type=int,
        default=1,
        metavar="K",
        help="number of micro-batches in a step, one after the other; each has the model's batch "
        "size",
    )
    to.add_argument(
        "--batch-dim",
        type=named_number_or_none,
        action="append",
        default=[],
        metavar="NAME=K",
        help="number of the dimension of an input that numbers samples, or none if all samples "
        "share the input; by default, the dimension from which the first one of the labels or of "
        "the target comes",
    )


def _add_trained(to: Options) -> None:
    for name, text in (
        ("params", "train the weights whose names match, instead of those that onnxpar finds"),
        ("frozen", "do not train the weights whose names match"),
        (
            "stop-gradient",
            "let no gradient flow back through the tensors, or the results of the nodes, whose "
            "names match, as detach() does",
        ),
        (
            "lazy",
            "update only the rows that a step looks up of the tables whose names match, and their "
            "optimizer state; with adam, as PyTorch's SparseAdam",
        ),
    ):
        to.add_argument(f"--{name}", action="append", default=[], metavar="GLOB", help=text)
    to.add_argument(
        "--padding-idx",
        type=named_number,
        action="append",
        default=[],
        metavar="GLOB=ROW",
        help="do not train this row of the tables whose names match, as PyTorch's padding_idx does "
        "where a Gather looks rows up; -1 is the last row",
    )
    to.add_argument(
        "--weights",
        metavar="DIR",
        help="take the values of weights from a safetensors file, or from those of a folder, as "
        "save_pretrained writes it, by their names in torch",
    )
    to.add_argument(
        "--untie",
        action="store_true",
        help="give each node that reads a vector as its scale or bias a copy of its own. Exporters "
        "store equal vectors only once; without this option, they are trained as one parameter",
    )


def _add_manual(to: Options) -> None:
    to.add_argument(
        "--preset",
        choices=[MANUAL],
        help="the model is the program of one rank, and so is the step: its loss is the mean over "
        "all ranks, and it sums the gradients of replicated weights over the ranks",
    )
    to.add_argument("--devices", type=int, metavar="N", help="number of ranks of a manual program")
    to.add_argument(
        "--mesh",
        type=mesh,
        metavar="dp=2,tp=4",
        help="mesh of a manual program: names and sizes of its axes",
    )
    to.add_argument(
        "--strategy",
        metavar="FILE",
        help="YAML file with the mesh and the sharded tensors of a manual program; all other "
        "tensors are whole",
    )
