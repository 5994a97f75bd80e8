"""State pairs (input, output): outputs of a model that are fed back as inputs in the next run
(caches, hidden states), found by ops and by names.

An op makes a pair if it has operands and results such as `past_key` and `present_key`, or if it
writes into a cache or extends it. Names make a pair if they differ only by words for before and
after, and contain a word for a state.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache

import onnx_graphsurgeon as gs

from onnxpar.base.errors import StrategyError
from onnxpar.graph.shapes_by_onnxruntime import operator_ports
from onnxpar.graph.subgraphs import bodies
from onnxpar.graph.tensors import tensor_shape

Pair = tuple[str, str]
Stem = tuple[str, ...]

_BEFORE = frozenset(("past", "in", "input", "inputs", "prev", "previous", "old", "init", "initial"))
_AFTER = frozenset(
    ("present", "out", "output", "outputs", "next", "new", "updated", "current", "final", "y")
)
_KEPT = frozenset(
    ("past", "present", "cache", "caches", "kv", "state", "states", "mem", "memory", "h", "c")
)
"""The name of a state contains at least one of these words."""
_ACTIVATIONS = (("hidden", "states"), ("last", "hidden", "state"), ("encoder", "hidden", "states"))
"""Words of names that look like states, but are activations."""

_THROUGH = frozenset(
    ("Identity", "Cast", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Slice", "Gather", "Split")
)
"""Ops whose result is their first operand in another form, or part of it."""
_WRITES = frozenset(("Scatter", "ScatterElements", "ScatterND"))
"""Ops that write into their first operand."""


def given_states(graph: gs.Graph, given: Sequence[Pair]) -> list[Pair]:
    """Returns the pairs (input, output) that the user gave, without duplicates. Errors:
    StrategyError for a name that the model does not have."""
    inputs = {t.name for t in graph.inputs}
    outputs = {t.name for t in graph.outputs}
    for pair in given:
        if isinstance(pair, str) or len(pair) != 2:
            raise StrategyError(f"states: {pair!r:.60} is no pair; give (INPUT, OUTPUT)")
        source, result = pair
        if source not in inputs or result not in outputs:
            raise StrategyError(
                f"state {source}={result}: the model has no input {source!r} with an output "
                f"{result!r}; write --state INPUT=OUTPUT"
            )
    return list(dict(given).items())


def find_states(graph: gs.Graph, given: Sequence[Pair] = (), is_step: bool = False) -> list[Pair]:
    """Returns all state pairs (input, output) of a graph: the user's (`given`), then pairs found by
    ops, then pairs found by names. In a training step (`is_step`), only caches that a Concat
    extends are looked for. Errors: StrategyError for a given name that the model does not have."""
    inputs = {t.name: t for t in graph.inputs}
    outputs = {t.name: t for t in graph.outputs}
    pairs = dict(given_states(graph, given))
    for output in graph.outputs:
        if output.name not in pairs.values():
            extended = _extended(output, inputs, pairs, is_step)
            if extended is not None:
                pairs[extended] = output.name
    if not is_step:
        pairs |= _named_alike(inputs, outputs, pairs)
    return list(pairs.items())


def missing_states(graph: gs.Graph, pairs: Sequence[Pair]) -> list[str]:
    """Returns inputs that look like states but are in no pair: their names differ only by numbers
    from names of states, such as `past.5.key` if `past.0.key` to `past.4.key` are states."""
    paired = {source for source, _ in pairs}
    like: dict[str, list[gs.Tensor]] = defaultdict(list)
    for tensor in graph.inputs:
        like[re.sub(r"\d+", "#", tensor.name)].append(tensor)
    names = []
    for pattern, tensors in like.items():
        kept = [t for t in tensors if t.name in paired]
        ranks = {(str(t.dtype), len(t.shape or ())) for t in kept}
        rest = [t for t in tensors if t.name not in paired]
        if "#" in pattern:
            names += [t.name for t in rest if (str(t.dtype), len(t.shape or ())) in ranks]
    return names


def unpaired_text(missing: Sequence[str]) -> str:
    """Returns the warning about inputs that look like states, but to which no output is fed
    back."""
    names = ", ".join(map(repr, missing[:4])) + (", ..." if len(missing) > 4 else "")
    return (
        f"{names}: named like a state, but no output is paired with it, so every run must be given "
        "its whole value; if an output updates it, declare the pair with --state INPUT=OUTPUT"
    )


def _extended(
    output: gs.Variable,
    inputs: Mapping[str, gs.Tensor],
    pairs: Mapping[str, str],
    is_step: bool,
) -> str | None:
    """Returns the input whose updated value this output is, found by the ops between both; None if
    there is none.

    pairs    the pairs found so far, output by input
    is_step  as for `find_states`
    """
    names = [
        name
        for name in dict.fromkeys(_sources(output, False, set(), is_step))
        if name in inputs and name not in pairs and _fits(inputs[name], output)
    ]
    if len(names) > 1:
        stem = _stem(output.name, _AFTER)
        names = [n for n in names if _stem(n, _BEFORE) == stem] or names
    return names[0] if names else None


def _sources(
    tensor: gs.Tensor, is_cache: bool, seen: set[tuple[int, bool]], is_step: bool
) -> Iterator[str]:
    """Yields the names of inputs and constants from which this tensor is made by an op that extends
    a cache or writes into it.

    is_cache  True once the search, backwards from the output, has passed such an op
    seen      what has been visited
    """
    if (id(tensor), is_cache) in seen:
        return
    seen.add((id(tensor), is_cache))
    if not tensor.inputs:
        if is_cache:
            yield tensor.name
        return
    (node,) = tensor.inputs[:1]
    domain = "" if node.domain in (None, "ai.onnx") else node.domain
    at = next(i for i, t in enumerate(node.outputs) if t is tensor)
    if node.op == "If" and not is_step:
        for body in bodies(node):
            yield from _sources(body.outputs[at], is_cache, seen, is_step)
    elif node.op == "Concat" and domain == "":
        for i, operand in enumerate(node.inputs[:1] if is_step else node.inputs):
            others = [t for k, t in enumerate(node.inputs) if k != i]
            for name in _sources(operand, True, seen, is_step):
                if any(_reads_another(other, name) for other in others):
                    yield name
    elif is_step:
        if node.op == "Identity":
            yield from _sources(node.inputs[0], is_cache, seen, is_step)
    elif domain == "" and node.op in _THROUGH:
        yield from _sources(node.inputs[0], is_cache, seen, is_step)
    elif domain == "" and node.op in _WRITES:
        yield from _sources(node.inputs[0], True, seen, is_step)
    elif (before := _op_pairs(domain, node.op).get(at)) is not None and before < len(node.inputs):
        yield from _sources(node.inputs[before], True, seen, is_step)


def _reads_another(tensor: gs.Tensor, name: str) -> bool:
    """True if a tensor depends on any input but `name`. If it does not, it only joins parts of that
    input in another order, and so extends no cache."""
    seen, rest = {id(tensor)}, [tensor]
    while rest:
        each = rest.pop()
        if not each.inputs and isinstance(each, gs.Variable) and each.name not in ("", name):
            return True
        for node in each.inputs:
            if bodies(node):
                return True  # it may read any input
            new = [t for t in node.inputs if id(t) not in seen]
            seen.update(map(id, new))
            rest += new
    return False


@cache
def _op_pairs(domain: str, op: str) -> Mapping[int, int]:
    """Returns which operand each result updates, by their positions, according to their names in
    onnxruntime's schema: `past_key` and `present_key`, `initial_h` and `Y_h`."""
    operands, results = operator_ports(domain, op)
    before = {_stem(name, _BEFORE): i for i, name in enumerate(operands) if _is_kept(name)}
    after = {i: _stem(name, _AFTER) for i, name in enumerate(results) if _is_kept(name)}
    return {i: before[stem] for i, stem in after.items() if stem in before}


def _named_alike(
    inputs: Mapping[str, gs.Tensor], outputs: Mapping[str, gs.Tensor], pairs: Mapping[str, str]
) -> dict[str, str]:
    """Returns pairs found by names alone, output by input, of the inputs and outputs that are not
    in `pairs`."""
    free = [t for name, t in inputs.items() if name not in pairs]
    results = [t for name, t in outputs.items() if name not in pairs.values()]
    sources = {t.name: _stem(t.name, _BEFORE) for t in free}
    ends = {t.name: _stem(t.name, _AFTER) for t in results}
    often = Counter(sources.values()), Counter(ends.values())
    named = {}
    for source in free:
        stem = sources[source.name]
        for result in results:
            if ends[result.name] != stem or any(count[stem] > 1 for count in often):
                continue
            is_directed = _has_word(source.name, _BEFORE) or _has_word(result.name, _AFTER)
            is_kept = _is_kept(source.name) or _is_kept(result.name)
            if is_directed and is_kept and _fits(source, result) and not _is_left_out(result):
                named[source.name] = result.name
    return named


def _is_left_out(result: gs.Tensor) -> bool:
    """True if a branch of an If returns an empty constant for this result, to say that the old
    value of the state stays valid."""
    if isinstance(result, gs.Constant):
        return 0 in result.shape
    for node in result.inputs[:1]:
        at = next(i for i, t in enumerate(node.outputs) if t is result)
        before = (
            [node.inputs[0]] if node.op == "Identity" else [b.outputs[at] for b in bodies(node)]
        )
        value = node.attrs.get("value") if node.op == "Constant" else None
        return 0 in getattr(value, "shape", ()) or any(map(_is_left_out, before))
    return False


def _words(name: str) -> list[str]:
    """Splits a name into lower-case words and numbers: `past_key_values.0.key` gives past, key,
    values, 0, key."""
    words = [w.lower() for w in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+", name)]
    if words[-1:] == ["n"] and len(words) > 1:  # stateN
        return [*words[:-1], "out"]
    return [*words[:-1], words[-1][0], "out"] if words[-1:] in (["hn"], ["cn"]) else words


def _stem(name: str, directions: frozenset[str]) -> Stem:
    """Returns the sorted words of a name, without the words for before or after (`directions`), so
    that both names of a state give the same."""
    words = _words(name)
    stem = [w for w in words if w not in directions]
    if words[:3] in (["past", "key", "values"], ["present", "key", "values"]):
        stem = [w for w in words[3:] if w not in directions]
    return tuple(sorted(stem))


def _has_word(name: str, directions: frozenset[str]) -> bool:
    return not directions.isdisjoint(_words(name))


def _is_kept(name: str) -> bool:
    """True if a name contains a word for a state, and is not the name of an activation."""
    words = _words(name)
    text = " ".join(words)
    return not _KEPT.isdisjoint(words) and not any(" ".join(a) in text for a in _ACTIVATIONS)


def _fits(source: gs.Tensor, result: gs.Tensor) -> bool:
    """True if the output `result` can be fed back to the input `source`: both have one dtype and
    equal sizes, except in at most one dimension, in which a cache grows."""
    before, after = tensor_shape(source), tensor_shape(result)
    if source.dtype != result.dtype or before is None or after is None:
        return source.dtype == result.dtype and source.dtype is not None
    grown = [None not in (a, b) and a != b for a, b in zip(before, after, strict=False)]
    return len(before) == len(after) and sum(grown) <= 1
