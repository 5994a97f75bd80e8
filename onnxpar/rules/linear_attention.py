"""Rules of LinearAttention and CausalConvWithState, which carry a state from step to step: split by
batch, head, channel and step. ONNX has both since opset 27; onnxruntime has them in com.microsoft,
with more attributes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.graph.tensors import Size, dtype_of, given, tensor_shape
from onnxpar.rules.communicate import has_output
from onnxpar.rules.index_maps import IndexMap, tied_fields
from onnxpar.rules.movement import int64
from onnxpar.rules.rule import Local, Lowering, Rule, einsum, given_specs, rule, whole_rule


def linear_attention(node: gs.Node) -> Rule:
    """Sharding rule of LinearAttention: `b s (k g d), b s (k d), b s (k e), b k d e, b s (k d), b s
    k -> b s (k g e); b k d e`: queries, keys, values, past state, decay and beta. The columns e of
    a state are independent, and may be split; without a delta rule, so may the rows d, over which
    ranks add. If steps s are split, each rank computes how its steps change any state; ranks
    exchange these maps, and each rank starts from the state after all earlier steps."""
    heads, groups = int(node.attrs["kv_num_heads"]), int(node.attrs["q_num_heads"])
    if node.attrs.get("state_window"):
        return whole_rule(node, "it keeps the states of several steps")
    if groups % heads:
        return whole_rule(node, "its query heads do not share key heads evenly")
    sizes = {"k": heads, "g": groups // heads}
    specs = ["b s (k g d)", "b s (k d)", "b s (k e)", "b k d e", "b s (k d)", "b s k"]
    if _width(node, 4) == heads:
        specs[4] = "b s k"
    if _width(node, 5) == 1:
        specs[5] = "b s 1"
    for at, name in ((1, "d"), (2, "e")):
        width = _width(node, at)
        if width is None or width % heads:
            return whole_rule(node, "the width of its heads is unknown")
        sizes[name] = width // heads
    operands = given_specs(specs, node.inputs)
    results = given_specs(["b s (k g e)", "b k d e"], node.outputs)

    def query_heads(local: Local) -> int:
        return local.size("k") * local.size("g")

    reads_state = str(node.attrs.get("update_rule", "gated_delta")).strip("b'").endswith("delta")
    over = frozenset("s") if reads_state else frozenset("sd")
    lowering = _LinearAttention(dict(node.attrs), sizes["d"] or 1)
    return einsum(
        node,
        f"{', '.join(operands)} -> {'; '.join(results)}",
        sizes=sizes,
        whole={"d": "each update reads all of it"} if reads_state else {},
        linear=(frozenset({2, 3} if given(node, 3) is not None else {2}),),
        local={"q_num_heads": query_heads, "kv_num_heads": lambda local: local.size("k")},
        reduce={},
        communicating=over,
        lowered=over,
        contiguous=frozenset("s"),
        nonempty=over - {"s"},
        lower=lowering.lower,
    )


@dataclass(frozen=True)
class _LinearAttention:
    """Replaces a LinearAttention whose steps s or rows d are split.

    attrs  the attributes of the node
    width  the global size of d

    Steps map a state S to M S + N. One run of the kernel computes both: with values of zero, steps
    map the identity to M. So from the state [0 | I] and values [v | 0], they lead to [N | M].
    """

    attrs: dict[str, Any]
    width: int

    def lower(self, build: Lowering) -> None:
        """Adds the nodes that a rank runs in place of the node, if its steps, rows d or both are
        split."""
        node, is_split = build.local.node, build.local.is_split("s")
        operands = [build.input(i) if t.name else t for i, t in enumerate(node.inputs)]
        operands += [gs.Variable.empty()] * (4 - len(operands))
        past = given(node, 3) is not None
        last_state: gs.Tensor | None = None
        if is_split:  # a step of zeros leaves the state as it is
            for i, x in enumerate(operands):
                operands[i] = build.filled(x, "s", 1) if x.name and i != 3 else x
            start = build.input(3) if past else self._state(build, operands[0], _zeros, _columns)
            operands[3], last_state = self._states(build, operands, start)
        out, state = self._run(build, operands, _columns)
        if is_split:
            end = build.per_rank(lambda local: int64([local.size("s")]))
            out = build.add("Slice", [out, int64([0]), end, int64([1])])
        build.finish("Identity", [build.all_reduce(out, ["d"])])
        if has_output(build, 1):
            build.finish("Identity", [state if last_state is None else last_state], 1)

    def _states(
        self, build: Lowering, operands: Sequence[gs.Tensor], start: gs.Tensor
    ) -> tuple[gs.Tensor, gs.Tensor]:
        """Returns (the state before the rank's steps, the state after the steps of all ranks), from
        the state `start` before all steps. Ranks gather the maps [N | M] of their steps to this
        end."""
        wide = list(operands)
        wide[2] = self._widened(build, operands[2])
        wide[3] = self._state(build, operands[0], _identity, _wide_columns)
        _, end_state = self._run(build, wide, _wide_columns)
        end_state = build.add("Unsqueeze", [end_state], axes=[0])
        count = len(build.of_members("s", lambda local: 0))
        maps = build.all_gather(end_state, "s", 0, lambda local: 1)
        ends = build.per_rank(lambda local: int64([_columns(local)]))
        limit, last = int64([np.iinfo(np.int64).max]), int64([4])
        added = build.add("Slice", [maps, int64([0]), ends, last])
        factors = build.add("Slice", [maps, ends, limit, last])
        state, before = start, []
        for member in range(count):
            before.append(build.add("Unsqueeze", [state], axes=[0]))
            one = np.array(member, np.int64)
            moved = build.add("MatMul", [build.add("Gather", [factors, one], axis=0), state])
            state = build.add("Add", [moved, build.add("Gather", [added, one], axis=0)])
        place = build.per_rank(lambda local: np.array(local.member("s"), np.int64))
        return build.add("Gather", [build.add("Concat", before, axis=0), place], axis=0), state

    def _run(
        self, build: Lowering, operands: Sequence[gs.Tensor], columns: Columns
    ) -> tuple[gs.Tensor, gs.Tensor]:
        """Adds the op on the rank's shards; returns its two results. `columns` computes the number
        of columns of its states, which may be more than e."""
        node, local = build.local.node, build.local
        batch, steps = build.shape(operands[0])[:2]
        heads, width = local.size("k"), columns(local)
        types = [
            (dtype_of(node.inputs[0]), [batch, steps, heads * local.size("g") * width]),
            (self._dtype(node), [batch, heads, local.size("d"), width]),
        ]
        attrs = {
            **self.attrs,
            "q_num_heads": lambda local: local.size("k") * local.size("g"),
            "kv_num_heads": lambda local: local.size("k"),
            "scale": self.attrs.get("scale") or 1 / math.sqrt(self.width),
        }
        out, state = build.make_each(node.op, operands, types, domain=node.domain, **attrs)
        return out, state

    def _state(
        self,
        build: Lowering,
        query: gs.Tensor,
        value: Callable[[Local], Any],
        columns: Columns,
    ) -> gs.Tensor:
        """Returns a state (batch, heads, d, columns) that has the matrix `value` for each sample
        and head. The batch is the batch of `query`."""
        local, dtype = build.local, self._dtype(build.local.node)
        one = build.per_rank(lambda local: np.asarray(value(local), dtype))
        rest = build.per_rank(
            lambda local: int64([local.size("k"), local.size("d"), columns(local)])
        )
        batch = build.add("Slice", [build.add("Shape", [query]), int64([0]), int64([1])])
        shape = build.add("Concat", [batch, rest], axis=0)
        sizes = [build.shape(query)[0], local.size("k"), local.size("d"), columns(local)]
        return build.make("Expand", [one, shape], (dtype, sizes))

    def _widened(self, build: Lowering, value: gs.Tensor) -> gs.Tensor:
        """Returns the values with d zeros behind the e values of each head."""

        def apart(local: Local) -> Any:
            return int64([0, 0, local.size("k"), local.size("e")])

        def joined(local: Local) -> Any:
            return int64([0, 0, local.size("k") * _wide_columns(local)])

        pads = build.per_rank(lambda local: int64([*[0] * 7, local.size("d")]))
        x = build.add("Reshape", [value, build.per_rank(apart)])
        return build.add("Reshape", [build.add("Pad", [x, pads]), build.per_rank(joined)])

    @staticmethod
    def _dtype(node: gs.Node) -> Any:
        """The element type of states."""
        tensors = [t for t in (*node.inputs[3:4], *node.outputs[1:2], node.inputs[0]) if t.name]
        return dtype_of(tensors[0])


Columns = Callable[[Local], int]
"""A function from a rank's view to a number of columns of states."""


def _columns(local: Local) -> int:
    """The number of columns of a state on the rank."""
    return local.size("e")


def _wide_columns(local: Local) -> int:
    """The number of columns of the matrix [N | M] on the rank."""
    return local.size("e") + local.size("d")


def _zeros(local: Local) -> Any:
    return np.zeros((1, 1))


def _identity(local: Local) -> Any:
    """[0 | I], the state from which steps lead to [N | M]."""
    return np.eye(local.size("d"), _wide_columns(local), local.size("e"))


def _width(node: gs.Node, index: int) -> Size:
    """The last size of an operand; None if the size is unknown or the operand is missing."""
    tensor = given(node, index)
    return None if tensor is None else (tensor_shape(tensor) or (None,))[-1]


def causal_convolution(node: gs.Node) -> Rule:
    """Sharding rule of CausalConvWithState: `b c h, c 1 w, c, b c p -> b c s; b c p`: operand,
    weight, bias, the p positions before. s, the positions of the result, are split over the same
    axes as h, the positions of the operand: a rank fetches the p positions before its shard, and
    all ranks fetch the last p positions for the new state."""
    plain = {"activation", "ndim"}
    odd = [k for k, v in node.attrs.items() if k not in plain and v and not k.startswith("onnxpar")]
    if odd or node.attrs.get("ndim", 1) != 1 or len(node.outputs) > 2:
        return whole_rule(node, "its channels or states are in another order")
    operands = given_specs(["b c h", "c 1 w", "c", "b c p"], node.inputs)
    results = given_specs(["b c s", "b c p"], node.outputs)
    used = " ".join([*operands, *results]).split()
    whole = {"w": "the weights of one window", "p": "positions before the first"}
    length = (tensor_shape(node.inputs[0]) or (None,) * 3)[2]
    back = ((tensor_shape(node.inputs[1]) or (None,) * 3)[2] or 1) - 1
    fields: dict[str, Any] = {}
    if length:
        positions = IndexMap("h", "s", np.arange(length))
        fields = {**tied_fields({2: positions}), "lower": partial(_lower, back=back, length=length)}
    else:
        whole |= dict.fromkeys("hs", "a data-dependent size")
    is_linear = str(node.attrs.get("activation", "none")) in ("none", "b'none'")
    group = frozenset(i for i in (0, 3) if given(node, i) is not None)
    return einsum(
        node,
        f"{', '.join(operands)} -> {'; '.join(results)}",
        sizes={"h": length, "s": length},
        whole={f: why for f, why in whole.items() if f in used},
        linear=(group,) if is_linear and given(node, 2) is None else (),
        **fields,
    )


def _lower(build: Lowering, back: int, length: int) -> None:
    """Adds the op on the rank's shard, with the `back` positions before the shard as its past
    state. `length` is the global number of positions."""
    node, x = build.local.node, build.input(0)

    def stretch(local: Local) -> tuple[int, int]:
        start, end = local.interval("s")
        return max(start - back, 0), end

    def before(local: Local) -> int:
        return local.interval("s")[0] - stretch(local)[0]

    held = build.fetch(x, "h", 2, stretch)
    cut = build.per_rank(lambda local: int64([before(local)]))
    shard = _part(build, held, cut, int64([length]))
    past = _past(build, x, back)
    if back:
        first = build.per_rank(lambda local: int64([min(local.interval("s")[0], back)]))
        older = _part(build, past, first, int64([back]))
        past = build.add("Concat", [older, _part(build, held, int64([0]), cut)], axis=2)
    bias = build.input(2) if given(node, 2) is not None else gs.Variable.empty()
    types = [(dtype_of(t), build.local.output_shape(i)) for i, t in enumerate(node.outputs)]
    operands = [shard, build.input(1), bias, past]
    results = build.make_each(node.op, operands, types, domain=node.domain, **node.attrs)
    build.finish("Identity", [results[0]])
    if len(results) > 1 and node.outputs[1].name:
        last = build.fetch(x, "h", 2, lambda local: (max(length - back, 0), length))
        older = _part(build, _past(build, x, back), int64([min(length, back)]), int64([back]))
        build.finish("Concat", [older, last], 1, axis=2)


def _part(build: Lowering, x: gs.Tensor, start: Any, end: Any) -> gs.Tensor:
    """Slices [start, end) of the positions out of `x`."""
    return build.add("Slice", [x, start, end, int64([2])])


def _past(build: Lowering, x: gs.Tensor, back: int) -> gs.Tensor:
    """Returns the past state; without one, zeros for the `back` positions before the first."""
    if given(build.local.node, 3) is not None:
        return build.input(3)
    lead = build.add("Slice", [build.add("Shape", [x]), int64([0]), int64([2])])
    shape = build.add("Concat", [lead, int64([back])], axis=0)
    zero = np.zeros((1, 1, 1), dtype_of(x))
    return build.make("Expand", [zero, shape], (dtype_of(x), [*build.shape(x)[:2], back]))


for _domain in ("", "com.microsoft"):
    rule("LinearAttention", domain=_domain)(linear_attention)
    rule("CausalConvWithState", domain=_domain)(causal_convolution)
