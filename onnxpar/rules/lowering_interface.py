"""What a rule's own lowering may use: `Local`, a rank's view of a node, and `Lowering`, which
builds the nodes that the rank runs in place of that node."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import onnx_graphsurgeon as gs


class Local(Protocol):
    """A rank's view of a node: the sizes and positions of the rank's shards. Attributes and
    constants of the rank's nodes are functions of it.

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
        """The number of elements of the rank's shard of a factor."""
        ...

    def positions(self, factor: str) -> np.ndarray[Any, Any]:
        """The global positions of the rank's shard of a factor, in the order of the shard: [2, 3]
        on rank 1 of 2, if the factor has 4 elements."""
        ...

    def is_run(self, factor: str) -> bool:
        """True if the shards of a factor are contiguous on every rank."""
        ...

    def interval(self, factor: str) -> tuple[int, int]:
        """(start, end), exclusive, of the rank's shard of a factor, in global positions; the shard
        must be contiguous."""
        ...

    def member(self, factor: str) -> int:
        """The index of the rank's shard among the shards of a factor, 0 for the first."""
        ...

    def is_split(self, factor: str) -> bool:
        """True if axes of the mesh split this factor, so that ranks hold different shards."""
        ...

    def may_be_empty(self, factor: str) -> bool:
        """True if some rank's shard of the factor may have no elements: the factor is split, and
        its size is open or too small. A shard that gets a stand-in element is not empty."""
        ...


Step = Callable[[list[gs.Tensor], list[gs.Tensor]], tuple[Sequence[gs.Tensor], Sequence[gs.Tensor]]]
"""A function that adds the nodes of a Scan's body for one step: from (states, elements) to (new
states, elements of the results)."""


class Lowering(Protocol):
    """Builds the nodes that a rank runs in place of one node; `lowering/lowering_builder.py`
    implements it.

    Operands may be tensors or arrays; arrays become constants. `axes=` of Unsqueeze, Squeeze,
    ReduceSum and the like, and `split=` of Split, become operands. `domain=` names the domain of an
    op that is not ONNX's. Functions given to `per_rank` run after the node is gone: they must not
    read `local.node`.
    """

    local: Local

    def input(self, index: int) -> gs.Tensor:
        """Returns the rank's shard of operand `index` of the node."""
        ...

    @property
    def opset(self) -> int:
        """The opset of ONNX's own ops in the graph."""
        ...

    def per_rank(self, value: Callable[[Local], Any]) -> gs.Tensor:
        """Returns a constant that may differ between ranks: `value` computes it from a rank's
        view."""
        ...

    def add(self, op: str, inputs: Sequence[Any], **attrs: Any) -> gs.Variable:
        """Adds a node with one result; returns the result. An attribute may be a function of the
        rank's view: `k=lambda local: local.size("e")`."""
        ...

    def add_each(
        self, op: str, inputs: Sequence[Any], count: int, **attrs: Any
    ) -> list[gs.Variable]:
        """Adds a node with `count` results; returns all of them."""
        ...

    def all_reduce(self, x: gs.Tensor, factors: Iterable[str], op: str = "sum") -> gs.Tensor:
        """Returns `x` reduced by `op` ("sum", "max", ...) over the ranks that hold different shards
        of these factors; `x` itself if none of the factors is split."""
        ...

    def all_gather(
        self, x: gs.Tensor, factor: str, axis: int, extent: Callable[[Local], int]
    ) -> gs.Tensor:
        """Returns the tensors `x` of all ranks that hold shards of the factor, concatenated along
        `axis` in the order of shards. `extent` returns the size of a rank's `x` along that axis."""
        ...

    def shares_axes(self, factor: str, other: str) -> bool:
        """True if both factors are split over the same axes of the mesh."""
        ...

    def of_members(self, factor: str, value: Callable[[Local], Any]) -> list[Any]:
        """Returns a list: `value` of each rank that holds a shard of the factor, in the order of
        shards. The value must not depend on other split factors."""
        ...

    def shift(self, x: gs.Tensor, factor: str, axis: int, sizes: Sequence[int]) -> gs.Tensor:
        """Returns the tensor `x` of the rank with the previous shard of the factor; the first rank
        gets the tensor of the last. `sizes` are the sizes of all ranks' `x` along `axis`."""
        ...

    def exchange(
        self,
        x: gs.Tensor,
        factor: str,
        axis: int,
        held: Sequence[np.ndarray[Any, Any]],
        wanted: Sequence[np.ndarray[Any, Any]],
    ) -> gs.Tensor:
        """Redistributes `x`, along `axis`, among the ranks that have shards of the factor. Both
        lists have an array of positions for each of these ranks: `held` before, `wanted` in the
        returned tensor."""
        ...

    def gathered(self, factor: str) -> np.ndarray[Any, Any]:
        """Returns the global positions of a factor in the order in which `all_gather` joins its
        shards: not ascending if shards are not contiguous."""
        ...

    def scan(
        self, step: Step, states: Sequence[gs.Tensor], sequences: Sequence[gs.Tensor], **attrs: Any
    ) -> tuple[list[gs.Tensor], list[gs.Tensor]]:
        """Adds a Scan along the first dimension of `sequences`. `step` adds the nodes of the body,
        among which may be collectives. Returns (the last states, the results)."""
        ...

    def filled(
        self, x: gs.Tensor, factor: str, axis: int, value: Any = 0, count: int = 1
    ) -> gs.Tensor:
        """Returns `x`; on a rank whose shard of the factor is empty, `count` elements of `value`
        along `axis` instead, for a kernel that refuses empty tensors. `count` is also the number of
        elements in dimension `axis` for each element of the factor."""
        ...

    def fetch(
        self, x: gs.Tensor, factor: str, axis: int, wanted: Callable[[Local], tuple[int, int]]
    ) -> gs.Tensor:
        """Returns the elements of `x` at global positions [start, end) of dimension `axis`, which
        may lie in other ranks' shards. `wanted` computes (start, end) from a rank's view. The
        dimension is the factor, and its shards must be contiguous."""
        ...

    def is_open(self, factor: str) -> bool:
        """True if the factor's size may differ between runs; then nodes, not constants, must
        compute everything that depends on the size."""
        ...

    def fetch_between(
        self, x: gs.Tensor, factor: str, axis: int, bounds: gs.Tensor, extent: int
    ) -> gs.Tensor:
        """Like `fetch`, for positions known only in a run: `bounds` is an int64 tensor [start, end]
        that nodes compute. `extent` is the number of fetched elements on rank 0."""
        ...

    def finish(self, op: str, inputs: Sequence[Any], output: int = 0, **attrs: Any) -> None:
        """Adds the node that computes the rank's shard of result `output` of the replaced node."""
        ...

    def make(
        self, op: str, inputs: Sequence[Any], type_: tuple[Any, Sequence[int]], **attrs: Any
    ) -> gs.Variable:
        """Like `add`, for ops whose result types cannot be inferred: `type_` is
        (dtype, shape on rank 0)."""
        ...

    def make_each(
        self,
        op: str,
        inputs: Sequence[Any],
        types: Sequence[tuple[Any, Sequence[int]] | int],
        **attrs: Any,
    ) -> list[gs.Variable]:
        """Like `make`, for a node with several results, one for each of `types`; an int there
        instead of (dtype, shape) makes that result of the replaced node the node's result."""
        ...

    def shape(self, x: gs.Tensor) -> list[int]:
        """The shape of a tensor on rank 0."""
        ...

    def is_graph_output(self, output: int) -> bool:
        """True if result `output` of the node is also an output of the graph."""
        ...

    def finish_each(self, op: str, inputs: Sequence[Any], **attrs: Any) -> None:
        """Adds the node that computes the rank's shards of all results of the replaced node."""
        ...
