"""The interface for a rule's own lowering: a rank's view of a node, and a builder of its nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import onnx_graphsurgeon as gs


class Local(Protocol):
    """A rank's view of a node, from which `Rule.local` computes new constants and attributes.

    `node` is still the global node: its tensors have global shapes.
    """

    node: gs.Node

    def input_shape(self, index: int) -> tuple[int, ...]:
        """The shape of the rank's shard of an operand."""
        ...

    def output_shape(self, index: int = 0) -> tuple[int, ...]:
        """The shape of the rank's shard of a result."""
        ...

    def size(self, factor: str) -> int:
        """The size of the rank's shard of a factor."""
        ...

    def positions(self, factor: str) -> np.ndarray[Any, Any]:
        """The global indices of the rank's shard of a factor, in the rank's order."""
        ...

    def is_run(self, factor: str) -> bool:
        """True if the shards of a factor are contiguous on every rank."""
        ...

    def interval(self, factor: str) -> tuple[int, int]:
        """The global start and end (exclusive) of the rank's shard of a factor, which must be
        contiguous."""
        ...

    def member(self, factor: str) -> int:
        """The position of the rank's shard among the shards of a factor: 0 for the first."""
        ...

    def is_split(self, factor: str) -> bool:
        """True if a factor is sharded."""
        ...

    def may_be_empty(self, factor: str) -> bool:
        """True if the factor is split and a shard may be empty: its size is open, or one of its
        shards has no elements. A shard with a stand-in is not empty."""
        ...


Step = Callable[[list[gs.Tensor], list[gs.Tensor]], tuple[Sequence[gs.Tensor], Sequence[gs.Tensor]]]
"""Adds the nodes of a Scan's body: a function from (states, elements) to (new states, elements of
results)."""


class Lowering(Protocol):
    """Builds the nodes that a rank runs in place of one node; see `lowering/lowering_builder.py`.

    Operands may be tensors or arrays; arrays become constants. `axes=` of Unsqueeze, Squeeze,
    ReduceSum and the like, and `split=` of Split, become operands. `domain=` names the domain of an
    op that is not ONNX's. Functions given to `per_rank` run after the node is gone: they must not
    read `local.node`.
    """

    local: Local

    def input(self, index: int) -> gs.Tensor:
        """The rank's shard of an operand of the node."""
        ...

    @property
    def opset(self) -> int:
        """The opset of ONNX's own ops in the graph."""
        ...

    def per_rank(self, value: Callable[[Local], Any]) -> gs.Tensor:
        """A constant whose value on a rank is `value` of the rank's view."""
        ...

    def add(self, op: str, inputs: Sequence[Any], **attrs: Any) -> gs.Variable:
        """Adds a node with one result; returns the result. An attribute may be a function of the
        rank's view."""
        ...

    def add_each(
        self, op: str, inputs: Sequence[Any], count: int, **attrs: Any
    ) -> list[gs.Variable]:
        """Adds a node with `count` results; returns the results."""
        ...

    def all_reduce(self, x: gs.Tensor, factors: Iterable[str], op: str = "sum") -> gs.Tensor:
        """The reduction of `x` by `op` over the ranks that hold different shards of these factors;
        `x` itself if none of them is split."""
        ...

    def all_gather(
        self, x: gs.Tensor, factor: str, axis: int, extent: Callable[[Local], int]
    ) -> gs.Tensor:
        """Concatenates `x` of all ranks that hold shards of the factor, along `axis` in the order
        of the shards; `extent` gives the size of a rank's `x` along that axis."""
        ...

    def shares_axes(self, factor: str, other: str) -> bool:
        """True if `factor` and `other` are split over the same axes."""
        ...

    def of_members(self, factor: str, value: Callable[[Local], Any]) -> list[Any]:
        """The function's value on each rank that holds a shard of the factor, in the order of
        shards. The value must not depend on other split factors."""
        ...

    def shift(self, x: gs.Tensor, factor: str, axis: int, sizes: Sequence[int]) -> gs.Tensor:
        """`x` of the rank with the previous shard; the first rank gets `x` of the last rank.
        `sizes` are the sizes of all ranks' `x` along `axis`."""
        ...

    def exchange(
        self,
        x: gs.Tensor,
        factor: str,
        axis: int,
        held: Sequence[np.ndarray[Any, Any]],
        wanted: Sequence[np.ndarray[Any, Any]],
    ) -> gs.Tensor:
        """The elements of `x` at positions `wanted` along `axis`; before, a rank has the positions
        `held`. Both have an array for each rank that holds a shard of the factor."""
        ...

    def gathered(self, factor: str) -> np.ndarray[Any, Any]:
        """The global indices of a factor, in the order in which `all_gather` joins its shards."""
        ...

    def scan(
        self, step: Step, states: Sequence[gs.Tensor], sequences: Sequence[gs.Tensor], **attrs: Any
    ) -> tuple[list[gs.Tensor], list[gs.Tensor]]:
        """Adds a Scan along the first dimension of `sequences`; returns its last states and its
        results. `step` adds the nodes of its body, which may be collectives."""
        ...

    def filled(
        self, x: gs.Tensor, factor: str, axis: int, value: Any = 0, count: int = 1
    ) -> gs.Tensor:
        """`x`; where the rank's shard is empty, `count` elements of `value` along `axis`. Dimension
        `axis` of `x` has `count` elements for each element of the factor."""
        ...

    def fetch(
        self, x: gs.Tensor, factor: str, axis: int, wanted: Callable[[Local], tuple[int, int]]
    ) -> gs.Tensor:
        """The elements of `x` from position `wanted[0]` up to (not including) `wanted[1]` of
        dimension `axis`, fetched from the ranks that hold them. The dimension is the factor; its
        shards are contiguous, and positions are global."""
        ...

    def is_open(self, factor: str) -> bool:
        """True if the factor's size may differ between runs; then nodes, not constants, must
        compute all values that depend on the size."""
        ...

    def fetch_between(
        self, x: gs.Tensor, factor: str, axis: int, bounds: gs.Tensor, extent: int
    ) -> gs.Tensor:
        """Like `fetch`, with `bounds` that nodes compute: an int64 tensor [start, end] within the
        dimension. `extent` is the number of fetched elements on rank 0."""
        ...

    def finish(self, op: str, inputs: Sequence[Any], output: int = 0, **attrs: Any) -> None:
        """Adds the node that computes the rank's shard of result `output`."""
        ...

    def make(
        self, op: str, inputs: Sequence[Any], type_: tuple[Any, Sequence[int]], **attrs: Any
    ) -> gs.Variable:
        """Adds a node whose result has the type `type_`, (dtype, shape on rank 0); returns the
        result. For ops whose types cannot be inferred."""
        ...

    def make_each(
        self,
        op: str,
        inputs: Sequence[Any],
        types: Sequence[tuple[Any, Sequence[int]] | int],
        **attrs: Any,
    ) -> list[gs.Variable]:
        """Adds a node with a result for each type (see `make`); a number instead of a type is the
        index of a result of the replaced node."""
        ...

    def shape(self, x: gs.Tensor) -> list[int]:
        """The shape of a tensor on rank 0."""
        ...

    def is_graph_output(self, output: int) -> bool:
        """True if a result is also an output of the graph."""
        ...

    def finish_each(self, op: str, inputs: Sequence[Any], **attrs: Any) -> None:
        """Adds the node that computes the rank's shards of all results."""
        ...
