"""Parts of losses: graph inputs for labels and targets, and means over the elements that count
(labels that are not ignored, samples that do not only fill a batch)."""

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
    """Graph inputs for labels and targets; each is added to the graph when it is first used.

    made     the inputs so far, by their name in this class
    sampled  the labels as numbers of sampled classes, if the step samples classes; else None
    batch    the batch, if it may have fewer samples than the graph has room for; else None. The
             input SAMPLES then has their number
    """

    graph: gs.Graph
    made: dict[str, gs.Variable] = field(default_factory=dict)
    sampled: gs.Tensor | None = None
    batch: Batch | None = None

    def tensor(self, name: str, dtype: Any, shape: Sequence[int]) -> gs.Variable:
        """Returns the input for `name` ("labels", "target", ...). If another tensor of the graph
        has this name, the input's name ends with underscores."""
        if name not in self.made:
            free, taken = name, self.graph.tensors().keys()
            while free in taken:
                free += "_"
            self.made[name] = gs.Variable(free, np.dtype(dtype), list(shape))
            self.graph.inputs.append(self.made[name])
        return self.made[name]

    def mean(self, each: Value) -> Mean:
        """Returns the mean of `each`, a number for each element of the target. If a batch may have
        fewer samples than the graph has room for, only the first samples count, as many as the
        input SAMPLES says."""
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
    """A mean over the elements of a batch that count.

    total  their sum, divided by the number of all elements of the batch
    count  their number, divided by the number of all elements; None if all count
    """

    total: Value
    count: Value | None = None

    def of(self, count: Value | None, parts: int) -> Value:
        """Returns this batch's part of the mean over `parts` batches; the parts add up to that
        mean. `count` is the sum of the batches' counts (None: all elements count). NaN if no
        element counts."""
        if count is None:
            return self.total if parts == 1 else self.total * (1 / parts)
        return self.total / count.cast(self.total.dtype)


@dataclass(frozen=True)
class Metrics:
    """The mean loss over the samples, and other metrics by name."""

    loss: Mean
    others: Mapping[str, Mean]
