"""Sampled classes: a step computes the scores of the classes of its labels, and of other classes at
random.

An et al., "Partial FC" (2022): the centres of the labels' classes are kept, negative ones are
drawn. InsightFace draws among the classes of each rank. Here classes are drawn among groups, whose
number does not depend on the mesh; so a step draws the same classes over any ranks, and each rank
draws for the groups that it holds. The random numbers are a hash of the seed and of the class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.base.errors import StrategyError
from onnxpar.graph.training_spec import IGNORED, SEED
from onnxpar.training.class_groups import ClassGroups
from onnxpar.training.draws import integers_of
from onnxpar.training.gradients.value import Builder, Value
from onnxpar.training.loss_settings import BY_LABEL, LossSettings
from onnxpar.training.means import Targets
from onnxpar.training.sampled_head import Head, find_head

_MOST = 64
"""The largest default number of groups."""
_KEPT = 1 << 32
"""The number by which a label's class is drawn for certain: it is above all random numbers."""


@dataclass(frozen=True)
class Sampling:
    """How a step samples classes.

    rate    the fraction of classes that a step computes; 1 for all
    groups  number of groups of consecutive classes; a step samples as many from each. None: chosen
    """

    rate: float = 1.0
    groups: int | None = None

    def __post_init__(self) -> None:
        """Checks the numbers. Errors: StrategyError if one is out of range."""
        if not 0 < self.rate <= 1:
            raise StrategyError(f"--sample-rate {self.rate}: must be above 0 and at most 1")
        if self.groups is not None and self.groups < 1:
            raise StrategyError(f"--sample-groups {self.groups}: must be 1 or more")
        if self.groups is not None and not self:
            raise StrategyError(
                f"--sample-groups {self.groups}: classes are sampled only with a --sample-rate "
                "below 1; give one, or leave --sample-groups out"
            )

    def __bool__(self) -> bool:
        """True if not all classes are computed."""
        return self.rate < 1

    def groups_of(self, classes: int, samples: int) -> ClassGroups:
        """Returns the groups of a number of classes, for batches of `samples` samples.

        By default, their number is the largest divisor of `classes`, up to 64, at which a group's
        share of the sample has room for a whole batch of different labels; else the largest divisor
        up to 8. Errors: StrategyError if there are more groups than classes, or if a batch may have
        more labels of a group than a smaller group has classes.
        """
        if self.groups is None:
            divisors = [n for n in range(1, min(_MOST, classes) + 1) if classes % n == 0]
            roomy = [n for n in divisors if int(self.rate * (classes // n)) >= samples]
            few = [n for n in divisors if n <= 8]
            return ClassGroups(classes, max(roomy[-1:] + few[-1:]))
        if self.groups > classes:
            raise StrategyError(
                f"--sample-groups {self.groups}: the head has only {classes} classes; give at most "
                "as many groups"
            )
        groups = ClassGroups(classes, self.groups)
        kept = self.kept(groups.size, samples)
        if kept > groups.least:
            raise StrategyError(
                f"--sample-groups {self.groups}: some groups of {classes} classes have only "
                f"{groups.least}, but a step keeps {kept} of each, because a batch of {samples} "
                f"may have as many labels; give fewer groups, or a divisor of {classes}"
            )
        return groups

    def kept(self, size: int, samples: int) -> int:
        """Returns the number of classes that a step computes of a group of `size` classes: at least
        the largest possible number of different labels in a batch of `samples` samples."""
        return max(int(self.rate * size), min(samples, size), 1)


ALL_CLASSES = Sampling()
"""No sample: each step computes all classes."""


@dataclass(frozen=True)
class Sample:
    """The sampled classes of a classifier's head.

    head     the nodes from the weight to the scores
    groups   groups of consecutive classes, independent of the mesh; a step samples equally many
             classes of each
    chosen   the positions of the sampled rows in their groups, of shape [groups, kept]
    labels   the labels as positions among the sampled classes; ignored labels stay ignored
    readers  the nodes from the weight to its sampled rows
    """

    head: Head
    groups: ClassGroups
    chosen: Value
    labels: gs.Tensor
    readers: Sequence[gs.Node]

    @property
    def table(self) -> str:
        """The name of the head's weight."""
        return str(self.head.weight.name)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(number of groups, number of classes that a step computes of each, number of all
        classes)."""
        groups, kept = self.chosen.shape
        return groups, kept, self.head.classes

    def rows(self, table: Value) -> Value:
        """Returns the sampled rows [groups, kept, width] of a table with the weight's shape."""
        return _rows(table, self.head.axis, self.groups, self.chosen)

    def written(self, table: Value, rows: Value) -> Value:
        """Returns a table with the weight's shape, with the sampled rows replaced by `rows`."""
        at = self.chosen.reshape([*self.chosen.shape, *[1] * (rows.rank - 2)]).expand(rows.shape)
        changed = _by_group(table, self.head.axis, self.groups)
        changed = changed.op("ScatterElements", at, rows, axis=1)
        return _with_classes(self.groups.joined(changed), self.head.axis)


def sample_loss(
    graph: gs.Graph,
    outputs: Mapping[str, gs.Tensor],
    loss: str,
    output: str | None,
    settings: LossSettings,
    weights: Sequence[gs.Tensor],
    targets: Targets,
    sampling: Sampling,
) -> Sample:
    """Restricts the output from which a loss is computed to a sample of its classes, and returns
    the sample. The parameters are those of `add_loss` and `sample_classes`; `loss` is its `kind`.
    Errors: StrategyError."""
    if loss not in BY_LABEL:
        raise StrategyError(
            f"--sample-rate {sampling.rate}: the loss {loss!r} has no classes; only "
            f"{', '.join(BY_LABEL)} have; leave --sample-rate out"
        )
    if settings.class_axis not in (None, 1, -1):
        raise StrategyError(
            f"--class-axis {settings.class_axis}: classes are sampled of scores of shape [samples, "
            "classes]; leave --sample-rate out, or transpose the output in the model"
        )
    of_all = {
        "--label-smoothing": settings.label_smoothing,
        "--class-weights": settings.class_weights,
    }
    for option, value in of_all.items():
        if value is not None:
            raise StrategyError(
                f"{option} and --sample-rate: a sample has classes of other numbers in each step; "
                "leave one out"
            )
    scores = outputs[output] if output else next(iter(outputs.values()))
    labels = targets.tensor("labels", np.int64, list(scores.shape or ())[:1])
    return sample_classes(graph, scores, weights, labels, sampling)


def sample_classes(
    graph: gs.Graph,
    output: gs.Tensor,
    weights: Sequence[gs.Tensor],
    labels: gs.Variable,
    sampling: Sampling,
) -> Sample:
    """Makes a graph compute an output [samples, classes] for a sample of its classes only, in
    place. Returns the sample.

    weights   the trained weights; one of them is the head's
    labels    the input of labels
    sampling  the options of the sample

    Errors: StrategyError.
    """
    if len(output.shape or ()) != 2:
        raise StrategyError(
            f"--sample-rate: output {output.name!r} has the shape {list(output.shape or ())}; only "
            "scores of shape [samples, classes] can be sampled"
        )
    head = find_head(graph, output, weights)
    samples = int(output.shape[0])
    groups = sampling.groups_of(head.classes, samples)
    before = len(graph.nodes)
    builder = Builder(graph, "sample")
    numbers = builder.value(labels)
    ignored = numbers.equal(IGNORED)
    # labels that are no classes must be refused, so they become a number that is too large
    known = ignored.where(0, (numbers < 0).where(head.classes, numbers))
    seed = builder.value(_seed(graph))
    chosen = _chosen(seed, known, groups, sampling.kept(groups.size, samples))
    position = _positions(chosen, groups).op("Gather", known, axis=0)
    sampled = ignored.where(IGNORED, position)
    first = len(graph.nodes)
    rows = _rows(builder.value(head.weight), head.axis, groups, chosen)
    readers = [node for node in graph.nodes[first:] if node.op != "Unsqueeze"]
    flat = rows.reshape([rows.shape[0] * rows.shape[1], *rows.shape[2:]])
    joined = _with_classes(flat, head.axis)
    graph.nodes = [*graph.nodes[before:], *graph.nodes[:before]]
    head.read(graph, joined.tensor)
    return Sample(head, groups, chosen, sampled.tensor, readers)


def _seed(graph: gs.Graph) -> gs.Variable:
    """Returns the input for the seed of random numbers; adds it if the graph has none."""
    for tensor in graph.inputs:
        if tensor.name == SEED:
            return tensor
    graph.inputs.append(gs.Variable(SEED, np.dtype(np.int64), []))
    return graph.inputs[-1]


def _chosen(seed: Value, labels: Value, groups: ClassGroups, kept: int) -> Value:
    """Returns the positions of the `kept` sampled classes in each group, in ascending order: the
    classes of the labels, and others at random."""
    builder = seed.builder
    drawn = integers_of(seed, builder.arange(groups.classes, np.int64))
    score = builder.constant(np.full(labels.shape, _KEPT, np.int64))
    scores = drawn.op("ScatterElements", labels, score, axis=0)
    if groups.size > groups.least:  # above the zeros where a group is smaller
        scores = scores + np.array(1, np.int64)
    count = np.array([kept], np.int64)
    scores = groups.apart(scores)
    _, best = builder.add_each("TopK", [scores, count], 2, axis=1, largest=1, sorted=0)
    positions, _ = builder.add_each("TopK", [best, count], 2, axis=1, largest=0, sorted=1)
    return positions


def _by_group(table: Value, axis: int, groups: ClassGroups) -> Value:
    """Returns a table as [groups, classes of a group, width]; `axis` is its dimension of
    classes."""
    rest = [a for a in range(table.rank) if a != axis]
    return groups.apart(table.transpose([axis, *rest]))


def _rows(table: Value, axis: int, groups: ClassGroups, chosen: Value) -> Value:
    """Returns the rows of a table that are chosen in each group: [groups, kept, width]."""
    by_group = _by_group(table, axis, groups)
    return by_group.op("GatherND", chosen.unsqueeze([2]), batch_dims=1)


def _with_classes(rows: Value, axis: int) -> Value:
    """Returns rows [class, ...] as a table whose dimension of classes is `axis`."""
    return rows.transpose([*range(1, axis + 1), 0, *range(axis + 1, rows.rank)])


def _positions(chosen: Value, groups: ClassGroups) -> Value:
    """Returns for each class its position among the sampled classes, which `chosen` has by group; 0
    for a class that is not sampled."""
    count, kept = chosen.shape
    builder = chosen.builder
    numbers = builder.arange(count * kept, np.int64).reshape([count, kept])
    empty = builder.zeros([count, groups.size], np.int64)
    return groups.joined(empty.op("ScatterElements", chosen, numbers, axis=1))
