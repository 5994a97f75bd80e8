"""The text of a plan: tables of at most 100 columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from textwrap import wrap
from typing import Any

from onnxpar.base.errors import ModelError
from onnxpar.base.shown import text_of
from onnxpar.compiler.plan import Plan, SavedPlan
from onnxpar.cost.topology import ANY_HOST
from onnxpar.graph.state_pairs import unpaired_text
from onnxpar.graph.typical import sizes_text
from onnxpar.report.held_lines import held_lines
from onnxpar.report.proof_text import proof_text
from onnxpar.report.text_table import FEW as FEW
from onnxpar.report.text_table import MANY as MANY
from onnxpar.report.text_table import WIDTH as WIDTH
from onnxpar.report.text_table import grouped as grouped
from onnxpar.report.text_table import size_text as size_text
from onnxpar.report.text_table import table as table
from onnxpar.strategy.stacked_names import common_pattern

_KINDS = ("input", "state", "output")
_PORT_HEADS = ("dtype", "shape", "layout")


def _type_text(port: Mapping[str, Any]) -> str:
    """Returns the dtype of an input or output in plan.json; for a value that is no tensor,
    onnxruntime's type."""
    return str(port["dtype"] or port["type"])


def _each(rows: Sequence[Any], heads: Sequence[str]) -> Iterator[str]:
    """Yields the heads of columns of bytes; with "each" if the table joins similar rows."""
    return (f"{head} each" if len(rows) > MANY else head for head in heads)


def plan_lines(plan: Mapping[str, Any], full: bool = True) -> Iterator[str]:
    """Yields the lines of a plan, given as in plan.json; without `full`, without long tables."""
    mesh = ",".join(f"{name}={size}" for name, size in plan["mesh"])
    preset = f", {plan['preset']}" if plan["preset"] else ""
    yield f"{plan['model']} over {plan['ranks']} ranks (mesh {mesh}{preset})"
    yield ""
    rows = [
        (p["name"], kind, _type_text(p), shape_text(p["shape"]), p["layout_text"] or "whole")
        for kind, p in _ports(plan)
    ]
    each = [grouped([row for row in rows if row[1] == kind]) for kind in _KINDS]
    yield from table([row for rows_of in each for row in rows_of], ("tensor", "", *_PORT_HEADS))
    yield ""
    yield from _state_lines(plan, full)
    yield from _collective_lines(plan["collectives"], plan.get("fused", {}), full)
    yield from _weight_lines(plan, full)
    yield from held_lines(plan)
    yield from _whole_lines(plan["whole"])
    memory, flops = plan["memory"], plan["flops"]
    typical = [(each["sizes"], each["weight"]) for each in plan.get("typical", ())]
    if typical:
        change = (
            "" if plan.get("typical_given") else f"; set others with {_other_sizes(typical[0][0])}"
        )
        yield f"sizes are open: costs are for {sizes_text(typical)}{change}"
    states = memory.get("states_per_rank", 0)
    kept = "parameters and states" if plan.get("step") else "states"
    ranks = "per rank at most" if plan.get("loads") else "per rank"
    yield (
        f"{ranks}: {_stored(plan)}s {size_text(memory['weights_per_rank'])}, "
        + (f"{kept} {size_text(states)}, " if states else "")
        + f"activations at most {size_text(memory['activations_per_rank'])}"
        + (
            f", {flops['per_rank']:,} FLOPs of {flops['model']:,}{_balance(flops)}"
            if flops["model"]
            else ""
        )
    )
    if on_host := plan.get("on_host"):
        size = size_text(on_host["bytes_per_rank"])
        count = len(on_host["tensors"])
        tensors = "1 tensor" if count == 1 else f"{count} tensors"
        yield f"on the host: {tensors} in files, at most {size} per rank"
    yield from _load_lines(plan.get("loads", ()))
    yield from _predicted_lines(plan.get("predicted"), plan["ranks"], bool(plan.get("loads")))
    if plan.get("predicted") and (proof := plan.get("proof")):
        yield from wrap(f"search: {proof_text(proof)}", WIDTH, subsequent_indent="  ")
    if plan.get("predicted") or plan.get("costs") == ANY_HOST:
        yield f"costs: {plan['costs']}"
    yield from _note_lines(plan.get("notes", ()))


def _stored(plan: Mapping[str, Any]) -> str:
    """Returns the word for the stored tensors of a plan: "weight"; in a training step, whose
    parameters are states, "constant"."""
    return "constant" if plan.get("step") else "weight"


def _other_sizes(typical: Mapping[str, int]) -> str:
    """Returns an example of --typical for this model with other sizes: `--typical
    batch=8,seq=128`."""
    pairs = [f"{name}={8 if size == 1 else size}" for name, size in typical.items()]
    return f"--typical {','.join(pairs[:3])}"


def _load_lines(loads: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields a table of the memory and compute of each rank; nothing if all have the same
    device."""
    if not loads:
        return
    heads, rows = load_rows(loads)
    yield from table(rows, heads)


def load_rows(
    loads: Sequence[Mapping[str, Any]],
) -> tuple[Sequence[str], list[tuple[str | int, ...]]]:
    """Returns the heads and the rows of a table of the memory and compute of each rank, from the
    loads in plan.json."""
    rows = [
        (
            _range(*load["ranks"]),
            *(size_text(load[kind]) for kind in ("weights", "states", "activations")),
            "unknown" if load["memory"] is None else size_text(load["memory"]),
            load["flops"],
            f"{_ms(load['compute'])} ms",
        )
        for load in loads
    ]
    return ("rank", "weights", "states", "activations", "of memory", "FLOPs", "compute"), rows


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _predicted_lines(
    predicted: Mapping[str, float] | None, ranks: int, differ: bool
) -> Iterator[str]:
    """Yields the predicted time of a run, and the speedup over the unsplit model. `differ` says
    that the ranks' devices differ."""
    if not predicted:
        return
    total, one = predicted["total"], predicted["one_rank"]
    kinds = ["compute", "communication", *(["session"] if predicted.get("session") else [])]
    *first, last = (f"{_ms(predicted[kind])} {kind}" for kind in kinds)
    parts = f"{', '.join(first)} and {last}"
    yield f"predicted: {_ms(total)} ms a run ({parts})"
    if ranks > 1 and total:
        alone = "on the fastest rank alone" if differ else "unsplit"
        how = " (measured)" if predicted.get("is_timed") else ""
        yield f"{alone}: {_ms(one)} ms{how}; {ranks} ranks are {_gain(one / total)}"


def _gain(times: float) -> str:
    if times > 1.005:
        return f"{times:.2f} times as fast"
    return f"{1 / times:.2f} times as slow" if times < 0.995 else "no faster"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"


def _note_lines(notes: Sequence[str]) -> Iterator[str]:
    for note in notes:
        yield from wrap(f"note: {note}", WIDTH, subsequent_indent="      ", break_on_hyphens=False)


@text_of.register
def _(plan: Plan) -> str:
    return "\n".join(plan_lines(plan.to_json()))


@text_of.register
def _(plan: SavedPlan) -> str:
    try:
        return "\n".join(plan_lines(plan.to_json()))
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        ZeroDivisionError,
        IndexError,
    ) as error:
        # A plan that was read from a file may lack fields.
        raise ModelError(
            f"the plan is damaged: {type(error).__name__}: {error}; write the folder again with "
            "`onnxpar shard`"
        ) from error


def _balance(flops: Mapping[str, int]) -> str:
    """Returns a text on the FLOPs of the busiest rank: `, 1.25 times the mean`."""
    mean = flops.get("mean", flops["per_rank"])
    if mean == flops["per_rank"]:
        return ", the same on all"
    times = f"{flops['per_rank'] / mean:.2f}"
    return ", nearly the same on all" if times == "1.00" else f", {times} times the mean"


def _ports(plan: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields (kind, input or output) for all in the plan: "input", "state" or "output". A state of
    a training step is listed once."""
    pairs = {pair["input"]: pair["output"] for pair in plan["states"]} if plan.get("step") else {}
    yield from (("input", p) for p in plan["inputs"] if p["name"] not in pairs)
    yield from (("state", p) for p in plan["inputs"] if p["name"] in pairs)
    yield from (("output", p) for p in plan["outputs"] if p["name"] not in pairs.values())


def _state_lines(plan: Mapping[str, Any], full: bool) -> Iterator[str]:
    """Yields lines about state pairs, and a warning about caches that are in no pair. States of a
    training step are listed among inputs and outputs instead."""
    pairs, missing = plan["states"], plan.get("unpaired", [])
    if pairs and not plan.get("step"):
        count = "1 state pair" if len(pairs) == 1 else f"{len(pairs)} state pairs"
        yield f"{count}, which ranks keep between runs with keep_states=True"
        if full:
            rows = [(pair["input"], pair["output"]) for pair in pairs]
            yield from table(rows, ("input", "takes the last run's"))
        yield ""
    if missing:
        yield f"warning: {unpaired_text(missing)}"
        yield ""


def shape_text(shape: Sequence[int | str | None] | None) -> str:
    """Returns a shape as text: `8x16`, or `[batch, 16]` if a size is a symbol; `?` is a
    data-dependent size."""
    if shape is None:
        return "?"
    sizes = ["?" if s is None else str(s) for s in shape]
    if any(isinstance(s, str) for s in shape):
        return "[" + ", ".join(sizes) + "]"
    return "x".join(sizes) or "scalar"


def _collective_lines(
    collectives: Sequence[Mapping[str, Any]], fused: Mapping[str, Sequence[int]], full: bool
) -> Iterator[str]:
    if not collectives:
        yield "no collectives"
        yield ""
        return
    counts = Counter(c["kind"] for c in collectives)
    sent = sum(c["bytes"] for c in collectives)
    kinds = ", ".join(f"{n} {kind}" for kind, n in counts.items())
    yield f"collectives in order: {kinds}; each rank sends {size_text(sent)}"
    joined = ", ".join(f"{many} {kind} to {few}" for kind, (many, few) in fused.items())
    if joined:
        yield f"fuse-all-reduces ran once and joined {joined}"
    if full:
        rows = [
            (c["tensor"], c["kind"], _group(c), c["bytes"], f"{c['before']} -> {c['after']}")
            for c in collectives
        ]
        yield from table(rows, ("tensor", "kind", "group", "bytes", "layouts"))
    yield ""


def _group(collective: Mapping[str, Any]) -> str:
    ranks = collective["group"]
    steps = {b - a for a, b in pairwise(ranks)}
    if len(ranks) <= 4 or len(steps) > 1:
        shown = ",".join(map(str, ranks[:8])) + (",..." if len(ranks) > 8 else "")
    else:
        by = f" by {steps.pop()}" if steps != {1} else ""
        shown = f"{ranks[0]}..{ranks[-1]}{by}"
    return f"{shown} (x{collective['groups']})" if collective["groups"] > 1 else shown


def _weight_lines(plan: Mapping[str, Any], full: bool) -> Iterator[str]:
    weights, stored = plan["weights"], _stored(plan)
    total = sum(w["bytes"] for w in weights)
    held = plan["memory"]["weights_per_rank"]
    share = f" ({held / total:.1%} of it)" if total else ""
    yield f"{stored}s: {size_text(total)} in total, at most {size_text(held)} per rank{share}"
    if full:
        large = [w for w in weights if w["bytes"] > 4096]
        rows = [
            (w["name"], shape_text(w["shape"]), w["layout_text"], w["bytes"], w["bytes_per_rank"])
            for w in large
        ]
        if rows:
            heads = (f"{stored} over 4 kB", "shape", "layout", "bytes", "per rank")
            yield from table(grouped(rows), [*heads[:3], *_each(rows, heads[3:])])
        stacks = [(w["name"], each) for w in large if (each := w.get("stacks"))]
        if stacks:
            yield ""
            origins = [(name, len(each), _origins(each)) for name, each in stacks]
            yield from table(grouped(origins), ("stack", "weights", "names in the model"))
    yield ""


def _origins(names: Sequence[str]) -> str:
    """Returns the names of stacked weights as one text: a pattern (`experts.*.weight`) if they
    differ only in their middle."""
    pattern = common_pattern(names)
    return f"{names[0]}, ..., {names[-1]}" if pattern.endswith("*") else pattern


def _whole_lines(whole: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if not whole:
        return
    yield f"{len(whole)} {'node runs' if len(whole) == 1 else 'nodes run'} whole on every rank:"
    rows = [(w["node"], w["op"], w["bytes"], w["reason"]) for w in whole]
    yield from table(grouped(rows, FEW), ("node", "op", "gathered", "why"), wraps=True)
    yield ""
