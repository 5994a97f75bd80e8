"""The sizes of a model's inputs that are left open, as polynomials of symbols."""

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
"""An error shows at most this many letters of a wrong value."""


def bind_dims(
    graph: onnx.GraphProto, dims: Mapping[str, int | str], path: Path
) -> dict[_At, Polynomial]:
    """Replaces open dimensions of the graph's inputs by the sizes that the user gave, in place;
    returns the sizes that stay open, by (input, axis).

    dims  by symbol (or name of a dimension in the file): a number, or an expression of other
          symbols, such as {"batch": 4, "total": "past + seq"}

    Errors: StrategyError for a symbol that the model does not have, or that would depend on itself.
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
    """Returns the size that --dim gives to a dimension called `label`. `sizes` has the sizes of all
    labels. Errors: StrategyError for an invalid expression."""
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
    """Solves `own` == `value` for a symbol; returns (symbol, replacement), or None if it has no
    solution."""
    symbol = own.symbol
    if symbol is not None:
        return None if symbol in value.variables else (symbol, value)
    return solve_tie(own, value, own.variables)


def fix_shapes(graph: onnx.GraphProto, shapes: Mapping[str, Sequence[int]]) -> None:
    """Gives graph inputs fixed shapes, by name, in place."""
    for tensor in graph.input:
        sizes = shapes.get(tensor.name)
        if sizes is not None and tensor.type.HasField("tensor_type"):
            dims = tensor.type.tensor_type.shape
            dims.ClearField("dim")
            dims.dim.extend(onnx.TensorShapeProto.Dimension(dim_value=size) for size in sizes)


def _label(name: str, axis: int, label: str) -> str:
    """Returns the name of an open dimension. Placeholders for unknown sizes ('?', '-1', 'None')
    become INPUT.AXIS, since two such dimensions need not be equal."""
    is_name = re.search(r"[^\W\d_]", label) and label not in ("None", "True", "False")
    return label if is_name else f"{name}.{axis}"


def _sizes(labels: Iterable[str]) -> dict[str, Polynomial]:
    """Returns the size of each label (name of an open dimension): a symbol, or for a label such as
    `past + 1` an expression, if other labels define its symbols. Symbols are identifiers; different
    labels get different symbols."""
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
    """True if a label can be a symbol as it is, and in expressions of plans."""
    return label.isidentifier() and label.isascii() and not keyword.iskeyword(label)


def _formula(label: str) -> Polynomial | None:
    """Returns the size that a label such as `past + 1` denotes; None if it is no expression, or
    could be negative."""
    try:
        size = Polynomial.parse(label)
    except ValueError:
        return None
    positive = all(c > 0 for monomial, c in size.terms if monomial)
    return size if size.variables and positive and size.symbol is None else None


def _defines(size: Polynomial, symbol: str) -> bool:
    """True if an expression in a label may introduce `symbol`, which is no label itself: it must be
    a sum, not a name with a hyphen (`dim-1` beside `dim-2`)."""
    is_divided = any(symbol in symbols_of(atom) for atom in size.atoms) or size.denominator > 1
    is_sum = not is_divided and all(c > 0 for _, c in size.terms)
    return is_sum and all(monomial.count(symbol) <= 1 for monomial, _ in size.terms)
