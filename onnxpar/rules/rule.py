"""Sharding rules: how the dimensions of an op's operands and results share factors.

A factor is a named part of a dimension that the axes of a mesh can split. In MatMul's rule
`m k, k n -> m n`, splitting m splits operand 0 and the result, and splitting k leaves partial sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from dataclasses import fields as fields_of
from functools import partial
from typing import Any

import onnx_graphsurgeon as gs

from onnxpar.base.errors import ModelError, OnnxparError, StrategyError
from onnxpar.graph.custom_shapes import Shape, ShapeFunction, register_shapes
from onnxpar.graph.tensors import Size, tensor_shape
from onnxpar.rules.lowering_interface import Local as Local
from onnxpar.rules.lowering_interface import Lowering as Lowering
from onnxpar.rules.lowering_interface import Step as Step
from onnxpar.rules.notation import (
    Expr,
    Prod,
    RuleTextError,
    Spec,
    Var,
    expr_vars,
    parse_rule,
    spec_text,
)

FIRST = frozenset({0})
"""Operand 0 alone, for `Rule.linear` and `Rule.monotone`."""


@dataclass(frozen=True)
class RankOp:
    """The node that each rank runs in place of the whole node, and the cost of it.

    local       attributes (by name) and constant operands (by index) that the rank's node gets
                instead of the node's own; functions of the rank's view of the node
    lower       replaces the node by other nodes if one of the `lowered` factors is split, or if the
                op has no kernel
    has_kernel  False for an op of the compiler, which no runtime implements
    nonempty    factors with empty shards that the kernel does not accept: such a shard gets one
                element, a stand-in (`Factor.filled`)
    constants   operands that must be stored weights, never results of collectives: for results of
                nodes, the kernel computes differently
    steps       for the cost model of a lowered node: the number of ops that each read and write as
                many bytes as the node returns
    products    a function from the sizes of a contraction's factors to its number of
                multiplications; by default one for each element of both operands and of the result
    """

    local: Mapping[str | int, Callable[[Local], Any]] = field(default_factory=dict)
    lowered: frozenset[str] = frozenset()
    lower: Callable[[Lowering], None] | None = None
    has_kernel: bool = True
    nonempty: frozenset[str] = frozenset()
    constants: frozenset[int] = frozenset()
    steps: int = 4
    products: Callable[[Mapping[str, Size]], int] | None = None


_OF_RANKS = frozenset(each.name for each in fields_of(RankOp))


@dataclass(frozen=True)
class Rule:
    """The factors that the dimensions of a node's operands and results share, for any mesh.

    inputs         the dimensions of each operand as expressions of factors; None: no layout
    outputs        the dimensions of each result
    sizes          the global size of each factor
    reduce         factors that give partial results if they are split, with the reduction to apply:
                   {"k": "sum"}
    whole          factors that must not be split, with the reason
    linear         groups of operands in which the results are jointly linear, so that partial sums
                   pass: Add {0,1}, Mul {0} and {1}
    monotone       operands through which a partial max or min passes
    additive       operands added after the reduction (a bias); only one rank may add them
    communicating  lowered factors over whose shards the ranks communicate inside the op, so that
                   the results are not partial
    contiguous     factors whose shards must be contiguous
    co_sharded     groups of factors that are split over the same axes or stay whole, with shards of
                   different sizes: the rows before and after a window
    rings          pairs of factors that the same axes may split: the shards of the second factor
                   travel in a ring, so each rank has them one after the other
    balanced       True if ranks of a ring exchange their shards before and after it, so that all
                   ranks have equal work
    overlapping    second factors of rings with elements that several ranks may hold, because only
                   some segments are split; the ring counts each element once
    ranks          the node that ranks run in place of the node
    """

    inputs: tuple[Spec | None, ...]
    outputs: tuple[Spec | None, ...]
    sizes: Mapping[str, Size]
    reduce: Mapping[str, str] = field(default_factory=dict)
    whole: Mapping[str, str] = field(default_factory=dict)
    linear: tuple[frozenset[int], ...] = ()
    monotone: frozenset[int] = frozenset()
    additive: frozenset[int] = frozenset()
    communicating: frozenset[str] = frozenset()
    contiguous: frozenset[str] = frozenset()
    co_sharded: tuple[tuple[str, ...], ...] = ()
    rings: tuple[tuple[str, str], ...] = ()
    balanced: bool = False
    overlapping: frozenset[str] = frozenset()
    ranks: RankOp = RankOp()

    @classmethod
    def of(
        cls,
        inputs: tuple[Spec | None, ...],
        outputs: tuple[Spec | None, ...],
        sizes: Mapping[str, Size],
        **fields: Any,
    ) -> Rule:
        """Returns a rule from fields of `Rule` and of its `RankOp`, e.g.
        `Rule.of(..., whole=..., lower=...)`."""
        of_ranks = {name: fields.pop(name) for name in _OF_RANKS & fields.keys()}
        return cls(inputs, outputs, sizes, **fields, ranks=RankOp(**of_ranks))

    def with_op(self, **fields: Any) -> Rule:
        """Returns the rule with other values of these fields of its `RankOp`."""
        return replace(self, ranks=replace(self.ranks, **fields))

    def may_overlap(self, factor: str, axes: Callable[[str], Sequence[object]]) -> bool:
        """True if several ranks may hold an element of this factor (see `overlapping`). `axes`
        returns the mesh axes that split a factor."""
        first = [a for a, b in self.rings if b == factor and factor in self.overlapping]
        return any(any(axes(a)) and axes(a) == axes(factor) for a in first)

    def text(self) -> str:
        """Returns the rule on one line, as plans print it: `m k, k n -> m n {sum: k}`."""
        left = ", ".join(spec_text(s) for s in self.inputs)
        right = "; ".join(spec_text(s) for s in self.outputs)
        notes = [f"{op}: {f}" for f, op in self.reduce.items()]
        if self.communicating:
            notes.append("communicating: " + " ".join(sorted(self.communicating)))
        notes += ["co-sharded: " + " ".join(group) for group in self.co_sharded]
        if self.whole:
            notes.append("whole: " + " ".join(self.whole))
        return f"{left} -> {right}" + (" {" + ", ".join(notes) + "}" if notes else "")


def invalid(node: gs.Node, what: str) -> ModelError:
    """Returns the error for a node whose attributes no runtime accepts:
    `invalid(node, "no hidden_size")` says that the node "has no hidden_size"."""
    return ModelError(f"{node.op} '{node.name}' has {what}; export the model again")


class Misfit(Exception):
    """A rule's text has another number of dimensions than a tensor of the node: runtimes accept
    some nodes outside the op's definition. `rule_of` then keeps the node whole."""


def einsum(
    node: gs.Node,
    text: str,
    *,
    sizes: Mapping[str, Size] | None = None,
    reduce: Mapping[str, str] | None = None,
    **fields: Any,
) -> Rule:
    """Returns the rule that `text` states for the node, e.g. `einsum(node, "m k, k n -> m n")`.

    text    the dimensions of operands and results, in the notation of `notation.py`
    sizes   sizes of factors that are no dimension by themselves, e.g. the two of `(h d)`; the
            node's shapes give all others
    reduce  factors that give partial results, with the reduction; by default, each factor that is
            in no result gives a sum, unless `communicating` or `whole` names it
    fields  other fields of `Rule` and `RankOp`

    Errors: Misfit if an operand or a result has another number of dimensions than in `text`.
    """
    inputs, outputs = parse_rule(text)
    known_sizes: dict[str, Size] = dict(sizes or {})
    for spec, tensor in zip(inputs + outputs, [*node.inputs, *node.outputs], strict=False):
        shape = tensor_shape(tensor)
        if spec is not None and shape is not None and len(spec) != len(shape):
            raise Misfit(
                f"{text!r} gives {len(spec)} dimensions to {tensor.name!r}, which has {len(shape)}"
            )
        for expr, size in zip(spec or (), shape or (), strict=False):
            if isinstance(expr, Var):
                known_sizes.setdefault(expr.name, size)
    names = {v for s in inputs + outputs for e in s or () for v in expr_vars(e)}
    in_results = {v for s in outputs for e in s or () for v in expr_vars(e)}
    met = {*fields.get("whole", {}), *fields.get("communicating", ())}
    summed = {v: "sum" for v in sorted(names - in_results - met)}
    reduced = summed if reduce is None else dict(reduce)
    missing = names - known_sizes.keys()
    if missing:
        raise RuleTextError(
            f"{text!r}: no dimension of {node.op}, which has {len(node.inputs)} operands and "
            f"{len(node.outputs)} results, gives the size of {', '.join(sorted(missing))}"
        )
    own_sizes = {v: known_sizes[v] for v in sorted(names)}
    return Rule.of(inputs, outputs, own_sizes, reduce=reduced, **fields)


def names(prefix: str, count: int) -> list[str]:
    """Returns `count` factor names that begin with a prefix: `d0`, `d1`, `d2`, ..."""
    return [f"{prefix}{i}" for i in range(count)]


def given_specs(specs: Sequence[str], tensors: Sequence[gs.Tensor]) -> list[str]:
    """Returns the texts `specs`, one for each operand or result, with `_` where the node has no
    such tensor: ["m k", "n"] becomes ["m k", "_"] without a bias."""
    return [spec if tensor.name else "_" for spec, tensor in zip(specs, tensors, strict=False)]


RuleFunction = Callable[[gs.Node], Rule]
_RULES: dict[tuple[str, str], RuleFunction] = {}
_WHOLE: dict[tuple[str, str], str] = {}
_ANY_RANK: set[tuple[str, str]] = set()
_NO_EMPTY_PARTS: dict[tuple[str, str], tuple[str, ...]] = {}


def rule(
    *ops: str,
    domain: str = "",
    ranks_known: bool = True,
    replace: bool = False,
    shapes: ShapeFunction | None = None,
) -> Callable[[RuleFunction], RuleFunction]:
    """Decorator that registers a rule function for one or more ops: `@rule("Sin Cos", "Tan")`.
    Errors: StrategyError if an op already has a rule and `replace` is False.

    domain       the domain of the ops; "": ONNX's own
    ranks_known  True to call the function only for nodes whose tensors all have a known number of
                 dimensions
    replace      True to replace a rule that an op already has
    shapes       for a custom op: a function from the node, whose operands have known shapes, to the
                 shapes of its results

    If neither onnxruntime nor the model declares the shapes of a custom op's results, they follow
    from the text of a plugin's rule: `b f -> b f`. If they do not, as in `b f -> b g`, give
    `shapes`. If sizes are open, both functions are called at several sizes.
    """

    def register(function: RuleFunction) -> RuleFunction:
        for op in " ".join(ops).split():
            have = _RULES.get((domain, op))
            if have is not None and not replace:
                raise StrategyError(
                    f"{function.__module__}.{function.__name__}: {op} already has a rule, "
                    f"{have.__module__}.{have.__name__}; give replace=True to replace it"
                )
            _RULES[domain, op] = function
            if not ranks_known:
                _ANY_RANK.add((domain, op))
            if not _is_own(function):
                register_shapes(domain, op, partial(_result_shapes, function, shapes))
        return function

    return register


def registered() -> Mapping[tuple[str, str], RuleFunction]:
    """Returns every rule function, by (domain, op)."""
    return _RULES


def whole_op(ops: str, reason: str, domain: str = "") -> None:
    """Registers the reason why ops stay whole, which plans print:
    `whole_op("NonZero", "the size of its ...")`."""
    for op in ops.split():
        assert (domain, op) not in _WHOLE, f"two reasons for {op}"
        _WHOLE[domain, op] = reason


def whole_ops() -> Mapping[tuple[str, str], str]:
    """Returns the registered reasons why ops stay whole, by (domain, op)."""
    return _WHOLE


def no_empty_parts(ops: str, factors: str = "", domain: str = "") -> None:
    """Registers ops whose kernels do not accept empty shards, so that a rank without elements gets
    one element as a stand-in. `factors` are the prefixes of the factors concerned, e.g. "d h"; if
    empty, all are."""
    for op in ops.split():
        assert (domain, op) not in _NO_EMPTY_PARTS, f"twice {op}"
        _NO_EMPTY_PARTS[domain, op] = tuple(factors.split()) or ("",)


def _with_kernel(rule: Rule, domain: str, op: str) -> Rule:
    """Returns the rule with `nonempty` extended by what `no_empty_parts` registered for the op."""
    letters = _NO_EMPTY_PARTS.get((domain, op))
    if letters is None:
        return rule
    inner = {f for spec in rule.inputs for e in spec or () for f in expr_vars(e)}
    met = rule.communicating | {f for group in rule.co_sharded for f in group if f in inner}
    named = frozenset(f for f in rule.sizes if f.startswith(letters))
    return rule.with_op(nonempty=rule.ranks.nonempty | (named - met))


def whole_rule(node: gs.Node, reason: str) -> Rule:
    """Returns the rule of a node all of whose operands and results must be whole on every rank;
    plans print the reason."""
    sizes: dict[str, Size] = {}

    def spec(tensor: gs.Tensor, prefix: str) -> Spec | None:
        shape = tensor_shape(tensor)
        if shape is None:
            return None
        dims = names(prefix, len(shape))
        sizes.update(zip(dims, shape, strict=True))
        return tuple(Var(d) for d in dims)

    inputs = tuple(spec(t, f"i{i}_") for i, t in enumerate(node.inputs))
    outputs = tuple(spec(t, f"o{i}_") for i, t in enumerate(node.outputs))
    return Rule(inputs, outputs, sizes, whole=dict.fromkeys(sizes, reason))


_NO_RULE = "no rule"


def is_lack(reason: str) -> bool:
    """True for the reason of a node that stays whole only because nobody wrote a rule for its
    op."""
    return reason.startswith(_NO_RULE)


def rule_of(node: gs.Node) -> Rule:
    """Returns the rule for a node, from its op's rule function. If the op has none, or a tensor has
    strings or an unknown number of dimensions, returns a rule that keeps the node whole, with the
    reason."""
    domain = "" if node.domain in (None, "ai.onnx") else node.domain
    function = _RULES.get((domain, node.op))
    if function is None:
        lack = f"{_NO_RULE} for {domain + '.' if domain else ''}{node.op}"
        return whole_rule(node, _WHOLE.get((domain, node.op), lack))
    if (domain, node.op) in _ANY_RANK:
        return _with_kernel(_called(function, node), domain, node.op)
    tensors = [t for t in [*node.inputs, *node.outputs] if t.name]
    if any(str(t.dtype) == "object" for t in tensors):
        return whole_rule(node, "collectives cannot send strings")
    if any(tensor_shape(t) is None for t in tensors):
        return whole_rule(node, "an operand of unknown rank")
    return _with_kernel(_called(function, node), domain, node.op)


def _is_own(function: RuleFunction) -> bool:
    """True for a rule function of this package, False for one of a plugin."""
    return function.__module__.startswith(f"{__name__.partition('.')[0]}.")


def _result_shapes(
    function: RuleFunction, shapes: ShapeFunction | None, node: gs.Node
) -> Sequence[Shape]:
    """Returns the shapes of the results of a plugin's op: from the function `shapes`, else from the
    text of its rule. Errors: StrategyError if a function of the plugin fails."""
    try:
        if shapes is not None:
            results = list(shapes(node))
            if len(results) != len(node.outputs):
                raise ValueError(f"{len(results)} shapes for {len(node.outputs)} results")
            return results
        rule = function(node)
    except OnnxparError:
        raise
    except Exception as error:
        raise _failed(function, node, error, ", or give @rule(..., shapes=function)") from error
    return [
        None if spec is None else [_size(expr, rule.sizes) for expr in spec]
        for spec in rule.outputs
    ]


def _size(expr: Expr, sizes: Mapping[str, Size]) -> Size:
    """Returns the size of a dimension, a product or sum of the sizes of its factors; None if one of
    them is unknown."""
    if isinstance(expr, Var):
        return sizes[expr.name]
    parts = [_size(child, sizes) for child in expr.children]
    if None in parts:
        return None
    counts = [part for part in parts if part is not None]
    return math.prod(counts) if isinstance(expr, Prod) else sum(counts)


def _called(function: RuleFunction, node: gs.Node) -> Rule:
    """Returns the rule of a node from a rule function. Errors: StrategyError if a plugin's function
    fails."""
    if _is_own(function):
        try:
            return function(node)
        except Misfit as error:
            return whole_rule(node, str(error))
    try:
        result = function(node)
    except OnnxparError:
        raise
    except Exception as error:
        raise _failed(function, node, error) from error
    if not isinstance(result, Rule):
        raise _failed(function, node, TypeError(f"it returned {type(result).__name__}, not a Rule"))
    return result


def _failed(
    function: RuleFunction, node: gs.Node, error: Exception, remedy: str = ""
) -> StrategyError:
    """Returns the error that tells users which function of a plugin failed, on which node. `remedy`
    is added to "correct the plugin"."""
    return StrategyError(
        f"the rule {function.__module__}.{function.__name__} fails on {node.op} '{node.name}': "
        f"{type(error).__name__}: {error}; correct the plugin{remedy}"
    )
