"""Combines the plans of a training step for samples of several lengths (length buckets) into one
plan with a program for each length. A run takes the program that fits its feeds; all programs read
and change the same states."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from onnxpar.base.errors import StrategyError
from onnxpar.compiler.plan import Plan, Port
from onnxpar.layout.fits import line_through
from onnxpar.layout.layout import leaves
from onnxpar.layout.symbols import Polynomial

_ROLES = (
    "loss",
    "rate",
    "seed",
    "labels",
    "target",
    "samples",
    "full_batches",
    "turns",
    "precision",
    "data",
    "batch",
    "metrics",
    "evaluation",
    "magnitudes",
)
"""Entries of a training step in plan.json that must be equal for all lengths, so that one trainer
can run any of the programs."""


def join_plans(plans: Sequence[Plan], files: Sequence[Path]) -> tuple[dict[str, Any], list[str]]:
    """Returns the plan.json of a step with shorter steps, and the name of each step's program: ""
    for the first, `length_128` for one of shorter samples. In the result, the sizes of samples are
    open; its `lengths` lists the programs, the shortest first, with their values of the symbols in
    `example`.

    plans  the plan of each step, the one for the longest samples first
    files  the file of each step, for error messages

    Errors: StrategyError if the plans are not of the same step at different sizes.
    """
    plans_json = [plan.to_json() for plan in plans]
    states = {name for pair in plans[0].states for name in pair}
    _check_shards(plans, files, states)
    columns = _columns(plans_json, files)
    symbols = {_symbol(i): column for i, column in enumerate(columns)}
    for key in ("inputs", "outputs"):
        ports = zip(*(data[key] for data in plans_json), strict=True)
        plans_json[0][key] = [
            same[0] if same[0]["name"] in states else _opened(same, symbols, same[0]["name"])
            for same in ports
        ]
    rows = list(zip(*columns, strict=True))
    names = ["", *(f"length_{'_'.join(map(str, row))}" for row in rows[1:])]
    programs = sorted(zip(rows, names, strict=True))
    longest = {symbol: column[0] for symbol, column in symbols.items()}
    data = {
        **plans_json[0],
        "example": longest,
        "typical": [{"sizes": longest, "weight": 1.0}],
        "lengths": [{"program": name, "sizes": list(row)} for row, name in programs],
        "streams": max(data["streams"] for data in plans_json),
    }
    return data, names


def _batch_of(plan: Mapping[str, Any]) -> int | None:
    """Returns the number of samples in a batch of the step, from its plan.json; None if it has no
    samples."""
    shapes = {port["name"]: port["shape"] for port in plan["inputs"]}
    return next((shapes[name][axis] for name, axis in plan["step"]["batch"].items()), None)


def _check_shards(plans: Sequence[Plan], files: Sequence[Path], states: Collection[str]) -> None:
    """Raises StrategyError unless all plans split each state (parameter, moment) into the same
    shards."""
    first, *shorter = [{p.name: p for p in (*plan.inputs, *plan.outputs)} for plan in plans]
    for ports, file in zip(shorter, files[1:], strict=True):
        for name in sorted(states):
            if first[name].shape != ports[name].shape or not same_cut(first[name], ports[name]):
                raise StrategyError(
                    f"{file} does not split {name!r} like {files[0]}; give a --preset, or a "
                    "--strategy that says how it is split"
                )


def same_cut(a: Port, b: Port) -> bool:
    """True if two inputs or outputs are split over the same axes along each dimension, whatever
    their sizes. How an unsplit dimension is composed of factors makes no difference."""
    return bool(_cut(a) == _cut(b))


def _cut(port: Port) -> Any:
    dims = port.layout.dims if port.layout is not None else ()
    split = [[(leaf.axes, leaf.parts) for leaf in leaves(dim)] for dim in dims]
    return (
        port.dtype,
        [cuts if any(axes for axes, _ in cuts) else None for cuts in split],
        (port.layout and port.layout.partial),
    )


def _symbol(i: int) -> str:
    return "length" if i == 0 else f"length_{i + 1}"


def _columns(
    plans_json: Sequence[Mapping[str, Any]], files: Sequence[Path]
) -> list[tuple[int, ...]]:
    """Returns the sizes of samples that differ between steps: a tuple (size in step 0, size in step
    1, ...) for each such dimension, without duplicates. Errors: StrategyError unless step 0 has the
    largest sizes, and no two steps have the same sizes."""
    shapes = [{p["name"]: p["shape"] for p in data["inputs"]} for data in plans_json]
    sizes_of_dims = [
        tuple(shape[name][axis] for shape in shapes)
        for name in plans_json[0]["step"]["data"]
        for axis in range(len(shapes[0][name]))
    ]
    columns = [column for column in dict.fromkeys(sizes_of_dims) if len(set(column)) > 1]
    rows = list(zip(*columns, strict=True)) or [()] * len(files)
    for i, row in enumerate(rows):
        if any(size > most for size, most in zip(row, rows[0], strict=True)):
            raise StrategyError(
                f"{files[i]} takes longer samples than {files[0]}; give the step for the longest "
                "samples first, and others with --shorter"
            )
        if row in rows[:i]:
            raise StrategyError(
                f"{files[i]} takes samples of the same sizes as {files[rows.index(row)]}; write it "
                "for shorter ones with `onnxpar grad --dim`"
            )
    return columns


def check_lengths(plans: Sequence[Plan], files: Sequence[Path]) -> None:
    """Raises StrategyError unless the plans are of one training step at different lengths of
    samples, the longest first."""
    plans_json = [plan.to_json() for plan in plans]
    for data, file in zip(plans_json[1:], files[1:], strict=True):
        _check_alike(plans_json[0], data, file, files[0])
    _columns(plans_json, files)


def _check_alike(
    first: Mapping[str, Any], other: Mapping[str, Any], file: Path, longest: Path
) -> None:
    """Raises StrategyError unless two plan.json objects are of the same training step, with the
    same states and batch size."""
    remedy = "write both with the same options of `onnxpar grad`, but for the length in --dim"
    if first["step"]["deal"] or other["step"]["deal"]:
        raise StrategyError(f"--shorter {file}: a manual program has one length")
    sizes = [_batch_of(plan) for plan in (first, other)]
    if sizes[0] != sizes[1]:
        raise StrategyError(
            f"{file} takes batches of {sizes[1]} samples, and {longest} of {sizes[0]}; {remedy}"
        )
    sides = [{key: plan["step"][key] for key in _ROLES} for plan in (first, other)]
    sides[0] |= {slot["input"]: slot["kind"] for slot in first["step"]["slots"]}
    sides[1] |= {slot["input"]: slot["kind"] for slot in other["step"]["slots"]}
    for key in {**sides[0], **sides[1]}:
        if sides[0].get(key) != sides[1].get(key):
            raise StrategyError(
                f"{file} is another training step than {longest}: {key!r} is not the same; {remedy}"
            )
    if first["states"] != other["states"]:
        raise StrategyError(f"{file} keeps other states than {longest}; {remedy}")
    for key in ("inputs", "outputs"):
        names = [[port["name"] for port in plan[key]] for plan in (first, other)]
        if names[0] != names[1]:
            odd_name = min({*names[0]} ^ {*names[1]}, default=names[0][0])
            raise StrategyError(
                f"{file} is another training step than {longest}: only one of them has "
                f"{odd_name!r}; {remedy}"
            )


def _opened(values: Sequence[Any], symbols: Mapping[str, Sequence[int]], name: str) -> Any:
    """Merges JSON values of the same structure, one per step, into one value: numbers that differ
    become text of a linear function of a symbol, such as "2*length + 1". Errors: StrategyError if
    there is none.

    symbols  for each symbol, its value in each step
    name     the tensor, for errors
    """
    first = values[0]
    if all(value == first for value in values[1:]):
        return first
    if all(isinstance(value, dict) and value.keys() == first.keys() for value in values):
        return {key: _opened([v[key] for v in values], symbols, name) for key in first}
    if all(isinstance(value, list) and len(value) == len(first) for value in values):
        return [_opened(column, symbols, name) for column in zip(*values, strict=True)]
    if all(type(value) is int for value in values):
        for symbol, sizes in symbols.items():
            line = line_through(values, sizes)
            if line is not None:
                slope, base = map(Polynomial.constant, line)
                return str(Polynomial.variable(symbol) * slope + base)
    raise StrategyError(
        f"{name!r} is split otherwise in the plans of shorter steps; give a --preset, or a "
        "--strategy that says how it is split"
    )
