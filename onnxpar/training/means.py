"""Parts of losses: inputs for labels and targets, and means over the elements that count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs
from onnx import numpy_helper

from onnxpar.graph.training_spec import SAMPLES
from onnxpar.training.batch import Batch
from onnxpar.training.gradients.value import Value


@dataclass
class Targets:
    """Graph inputs for labels and targets; each is added to the graph on first use.

    sampled  the labels among the sampled classes, if the scores are those of a sampled head
    batch    the batch, if it may have fewer samples, by the input SAMPLES
    """

    graph: gs.Graph
    made: dict[str, gs.Variable] = field(default_factory=dict)
    sampled: gs.Tensor | None = None
    batch: Batch | None = None

    def tensor(self, name: str, dtype: Any, shape: Sequence[int]) -> gs.Variable:
        """Returns the input for `name`. Its name in the graph has underscores appended if another
        tensor has that name."""
        if name not in self.made:
            free, taken = name, self.graph.tensors().keys()
            while free in taken:
                free += "_"
            self.made[name] = gs.Variable(free, np.dtype(dtype), list(shape))
            self.graph.inputs.append(self.made[name])
        return self.made[name]

    def mean(self, each: Value) -> Mean:
        """Returns the mean of `each`, a number for each element of the target. If a batch may have
        fewer samples than the graph has room for, only as many as the input SAMPLES says count."""
        batch = self.batch
        if batch is None or each.rank == 0 or each.shape[batch.of_labels] != batch.size:
            return Mean(each.mean())
        # a float: integers may decide shapes, so they could not be fed
        port = self.tensor(SAMPLES, np.float32, [])
        port.onnx_default = numpy_helper.from_array(np.array(batch.size, np.float32), port.name)
        samples = each.builder.value(port)
        shape = [-1 if axis == batch.of_labels else 1 for axis in range(each.rank)]
        place = each.builder.arange(batch.size, np.float32).reshape(shape)
        counted = samples.cast(each.dtype).op("Max", 0.0).op("Min", float(batch.size))
        share = counted * (1 / batch.size)
        return Mean((place < samples).where(each, 0.0).mean(), share)


@dataclass(frozen=True)
class Mean:
    """A mean over the elements of a batch that count: `total` is their sum, and `count` their
    number (None: all count), both divided by the number of all elements of the batch."""

    total: Value
    count: Value | None = None

    def of(self, count: Value | None, parts: int) -> Value:
        """Returns the part of this batch in the mean over a larger batch of `parts` batches;
        `count` is the sum of their counts. NaN if nothing counts."""
        if count is None:
            return self.total if parts == 1 else self.total * (1 / parts)
        return self.total / count.cast(self.total.dtype)


@dataclass(frozen=True)
class Metrics:
    """The mean loss over the samples, and other metrics by name."""

    loss: Mean
    others: Mapping[str, Mean]
