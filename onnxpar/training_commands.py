"""What the training commands of the command line do."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from onnxpar.arguments import dims_of
from onnxpar.grad.trained import Trained
from onnxpar.plan import numpy_dtype
from onnxpar.report import size_text, table
from onnxpar.step import Step
from onnxpar.training.api import write_step
from onnxpar.training.backward import LossOptions
from onnxpar.training.optimizers import OPTIMIZERS, make_optimizer
from onnxpar.training.step import StepOptions


def grad(args: argparse.Namespace) -> int:
    """Writes a training step."""
    loss = LossOptions(args.loss, args.loss_of, args.class_axis, args.params, args.frozen)
    options = StepOptions(make_optimizer(args.optimizer, **_hyperparameters(args)), args.clip_norm)
    model, trained = write_step(
        args.model, Path(args.output), loss, options, dims_of(args.dim)
    )
    assert model.step is not None
    print("\n".join(_trained_lines(trained, model.step)))
    print(f"written to {args.output}")
    return 0


def _hyperparameters(args: argparse.Namespace) -> dict[str, Any]:
    """Those that were given, by the names of an optimizer's fields."""
    known = {f.name for kind in OPTIMIZERS.values() for f in fields(kind)}
    return {name: value for name in known if (value := getattr(args, name, None)) is not None}


def _trained_lines(trained: Sequence[Trained], step: Step) -> Iterator[str]:
    """The list of what is trained."""
    rows = [
        (t.name, "x".join(map(str, t.tensor.shape)), f"{t.node.op} operand {t.operand}")
        for t in trained
    ]
    yield from table(rows, ("trained", "shape", "as"))
    count = sum(int(np.prod(t.tensor.shape, dtype=np.int64)) for t in trained)
    size = sum(
        int(np.prod(t.tensor.shape, dtype=np.int64)) * numpy_dtype(t.tensor).itemsize
        for t in trained
    )
    yield ""
    yield f"{len(trained)} parameters of {count:,} elements, {size_text(size)}"
    kinds = dict.fromkeys(s.kind for s in step.slots if s.of and s.kind != "parameter")
    yield f"state of each: {', '.join(kinds) or 'none'}"
    metrics = f", {', '.join(step.metrics)}" if step.metrics else ""
    yield f"a step takes {', '.join(step.data)}, {step.rate}; it tells {step.loss}{metrics}"
