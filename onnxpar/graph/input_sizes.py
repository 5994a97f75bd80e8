"""The open sizes of a model's inputs, written in symbols."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from pathlib import Path

import onnx

from onnxpar.base.errors import StrategyError
from onnxpar.layout.symbols import Polynomial, symbols_of
from onnxpar.layout.ties import solve_tie

_At = tuple[str, int]
"""The name of an input, and an axis of it."""
_MOST = 2**62
"""The largest size."""
_SHOWN = 60
"""The letters of a wrong value that an error shows."""


def bind_dims(
    graph: onnx.GraphProto, dims: Mapping[str, int | str], path: Path
) -> dict[_At, Polynomial]:
    """Replaces symbols of the graph's inputs by sizes, in place; returns the sizes that stay open.

    `dims` maps a symbol, or a label of a dimension in the file, to a number or to an expression of
    other symbols, which ties them. Errors: StrategyError for a symbol that the model does not have,
    or that would depend on itself.
    """
    labels = {
        (tensor.name, axis): _label(tensor.name, axis, dim.dim_param)
        for tensor in graph.input
        for axis, dim in enumerate(tensor.type.tensor_type.shape.dim)
        if not dim.HasField("dim_value")
    }
    sizes = _sizes(labels.values())
    symbols = {symbol: symbol for size in sizes.values() for symbol in size.variables}
    symbols.update({label: size.symbol or label for label, size in sizes.items()})
    unknown = sorted(dims.keys() - symbols.keys())
    if unknown:
        have = f"no such symbol; it has: {', '.join(sorted(symbols))}"
        have = have if symbols else "no open sizes; leave --dim out"
        raise StrategyError(f"--dim {unknown[0]}: {path} has {have}")
    open_ = {at: sizes[label] for at, label in labels.items()}
    values = [
        (label, sizes.get(label, Polynomial.variable(label)), _given(label, value, sizes))
        for label, value in dims.items()
    ]
    done: list[tuple[str, Polynomial]] = []
    for label, own, value in values:
        for symbol, by in done:
            own, value = own.replace(symbol, by), value.replace(symbol, by)
        if own == value:
            continue
        tie = _solved(own, value)
        if tie is None:
            raise StrategyError(
                f"--dim {label}={dims[label]}: with the other --dim options, this defines {own} "
                f"as {value}; define each symbol once, in terms of other symbols"
            )
        done = [(symbol, by.replace(*tie)) for symbol, by in done] + [tie]
        open_ = {at: size.replace(*tie) for at, size in open_.items()}
    for tensor in graph.input:
        for axis, dim in enumerate(tensor.type.tensor_type.shape.dim):
            bound = open_.get((tensor.name, axis))
            if bound is not None and not bound.variables:
                dim.dim_value = bound.at({})
                del open_[tensor.name, axis]
    return open_


def _given(label: str, value: int | str, sizes: Mapping[str, Polynomial]) -> Polynomial:
    """Returns the size that --dim gives to a label; `sizes` has the size of each label. Errors:
    StrategyError for an invalid expression."""
    if isinstance(value, Integral):
        value = str(value)
    if not isinstance(value, str):
        raise StrategyError(f"--dim {label}={value!r}: write a whole number, or an expression")
    if value.strip() in sizes:
        return sizes[value.strip()]
    symbols = sorted({s for size in sizes.values() for s in size.variables})
    try:
        size = Polynomial.parse(value)
    except ValueError:
        raise StrategyError(
            f"--dim {label}={value[:_SHOWN]}: this is not a size; write a number, or sums and "
            f"products of {', '.join(symbols)}"
        ) from None
    if size.number is not None and not abs(size.number) <= _MOST:
        raise StrategyError(f"--dim {label}={value[:_SHOWN]}: give a size of at most {_MOST}")
    unknown = sorted(set(size.variables) - set(symbols))
    if unknown:
        raise StrategyError(
            f"--dim {label}={value[:_SHOWN]}: the model has no symbol {unknown[0][:_SHOWN]}; it "
            f"has: {', '.join(symbols)}"
        )
    return size


def _solved(own: Polynomial, value: Polynomial) -> tuple[str, Polynomial] | None:
    """Returns a symbol and its value, for which `own` == `value`; None if no symbol of `own` can be
    solved for."""
    symbol = own.symbol
    if symbol is not None:
        return None if symbol in value.variables else (symbol, value)
    return solve_tie(own, value, own.variables)


def fix_shapes(graph: onnx.GraphProto, shapes: Mapping[str, Sequence[int]]) -> None:
    """Gives inputs of the graph these shapes, in place."""
    for tensor in graph.input:
        sizes = shapes.get(tensor.name)
        if sizes is not None and tensor.type.HasField("tensor_type"):
            dims = tensor.type.tensor_type.shape
            dims.ClearField("dim")
            dims.dim.extend(onnx.TensorShapeProto.Dimension(dim_value=size) for size in sizes)


def _label(name: str, axis: int, label: str) -> str:
    """The label of an open dimension. Placeholders for unknown sizes ('?', '-1', 'None') are
    replaced by INPUT.AXIS, since two of them need not be equal."""
    is_name = re.search(r"[^\W\d_]", label) and label not in ("None", "True", "False")
    return label if is_name else f"{name}.{axis}"


def _sizes(labels: Iterable[str]) -> dict[str, Polynomial]:
    """The size of each label: a symbol, or an expression of symbols that other labels define
    (`past + 1` beside `past`). Symbols are identifiers; different labels get different symbols."""
    distinct = list(dict.fromkeys(labels))
    names = {label for label in distinct if _is_identifier(label)}
    sizes = {label: Polynomial.variable(label) for label in names}
    known = set(names)
    formulas = {label: size for label in distinct if (size := _formula(label)) is not None}
    for label in sorted(formulas, key=lambda label: len(formulas[label].variables)):
        size = formulas[label]
        unknown = set(size.variables) - known
        if not unknown or (len(unknown) == 1 and _defines(size, *unknown)):
            sizes[label] = size
            known |= unknown
    for label in distinct:
        if label not in sizes:
            name = re.sub(r"\W", "_", label, flags=re.ASCII)
            name = name if _is_identifier(name) else f"_{name}"
            while name in known:
                name += "_"
            known.add(name)
            sizes[label] = Polynomial.variable(name)
    return {label: sizes[label] for label in distinct}


def _is_identifier(label: str) -> bool:
    """True if a label can be used as a symbol: plans write sizes as expressions."""
    return label.isidentifier() and label.isascii() and not keyword.iskeyword(label)


def _formula(label: str) -> Polynomial | None:
    """The size that a label denotes; None if it is not an expression, or could be negative."""
    try:
        size = Polynomial.parse(label)
    except ValueError:
        return None
    positive = all(c > 0 for monomial, c in size.terms if monomial)
    return size if size.variables and positive and size.symbol is None else None


def _defines(size: Polynomial, symbol: str) -> bool:
    """True if a label `symbol + n` adds to a symbol; not for a name with a hyphen (`dim-1` and
    `dim-2`)."""
    is_divided = any(symbol in symbols_of(atom) for atom in size.atoms) or size.denominator > 1
    is_sum = not is_divided and all(c > 0 for _, c in size.terms)
    return is_sum and all(monomial.count(symbol) <= 1 for monomial, _ in size.terms)
