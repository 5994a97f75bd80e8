"""Typical sizes of runs, for which the costs of models with open sizes are computed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onnxpar.base.errors import StrategyError
from onnxpar.graph.cache_sizes import CacheSizes, settled
from onnxpar.layout.symbols import Binding, Polynomial

Profile = tuple[Mapping[str, int], float]
"""(sizes of a run by symbol, weight among all profiles)."""
OpenDims = Mapping[tuple[str, int], Polynomial]

BATCH = 1
LENGTHS = (128, 64, 32, 16, 8, 4, 2, 1)
"""Default sizes of symbols other than batches and images, to be tried in this order; the first that
the model's other sizes allow is taken."""
IMAGES = (224, 256, 64, 32, 16, 8)
"""Default heights and widths of images, to be tried in this order."""
_LENGTH_NAME = re.compile(r"seq|len|time|token|frame|past|step", re.IGNORECASE)


@dataclass(frozen=True)
class Typical:
    """The typical sizes that a user gave for some symbols: none, one profile, or several with
    weights."""

    profiles: tuple[Profile, ...] = ()

    @staticmethod
    def from_argument(value: Typical | Mapping[str, int] | Sequence[Any] | str | None) -> Typical:
        """Returns the typical sizes that a caller passed: sizes by symbol, a sequence of (sizes,
        weight), a text for `parse`, or None. Errors: StrategyError."""
        if isinstance(value, str):
            return Typical.parse([value])
        if value is None or isinstance(value, Typical):
            return value or Typical()
        each: Sequence[Any] = [(value, 1.0)] if isinstance(value, Mapping) else value
        profiles = []
        for entry in each:
            sizes, weight = (entry, 1.0) if isinstance(entry, Mapping) else entry
            for name, size in sizes.items():
                if isinstance(size, bool) or not isinstance(size, int) or size < 0:
                    raise StrategyError(
                        f"--typical {name}={size!r}: a size must be an integer of at least 0"
                    )
            if not weight > 0:
                raise StrategyError(f"--typical: the weight {weight!r} must be above 0")
            profiles.append((dict(sizes), float(weight)))
        return Typical(tuple(profiles))

    @staticmethod
    def parse(entries: Sequence[str]) -> Typical:
        """Returns the typical sizes of texts such as `batch=1,seq=128`, or with a weight
        `batch=8,seq=16:0.2`. Errors: StrategyError."""
        profiles = []
        for entry in entries:
            match = re.fullmatch(r"(.+?)(?::([0-9.]+))?", entry)
            pairs = [pair.rpartition("=") for pair in (match[1].split(",") if match else [])]
            bad = not pairs or any(not name or not size.isdigit() for name, _, size in pairs)
            try:
                weight = float(match[2] or 1) if match else 0.0
            except ValueError:
                bad, weight = True, 0.0
            if bad or not weight > 0:
                raise StrategyError(
                    f"--typical {entry}: write NAME=N,NAME=N; add :WEIGHT if you give --typical "
                    "several times"
                )
            profiles.append(({name: int(size) for name, _, size in pairs}, weight))
        return Typical(tuple(profiles))


@dataclass(frozen=True)
class Ties:
    """Symbols that must equal expressions of other symbols (`found`: (symbol, expression)), in the
    order of discovery."""

    found: tuple[tuple[str, Polynomial], ...] = ()

    def solve(self, given: Mapping[str, int], free: Mapping[str, int]) -> dict[str, int]:
        """Returns sizes of the symbols in `free`, which equal no expression. They follow from the
        `given` sizes of any symbols; where these do not determine a size, it is that in `free`.
        With total = past + seq, given total=9 and seq=4 make past 5. Errors: StrategyError if given
        sizes contradict each other."""
        sizes = {name: given.get(name, size) for name, size in free.items()}
        for name, size in reversed(self.found):
            if name not in given:
                continue
            known = {v: sizes.get(v, given.get(v, 1)) for v in size.variables}
            for symbol in [v for v in size.variables if v not in given and v in sizes]:
                solved = size.solve(symbol, known, given[name])
                if size.at(known) != given[name] and solved is not None and solved >= 0:
                    sizes[symbol] = known[symbol] = solved
            if size.at(known) != given[name]:
                note = f", here {size.at(known)}" if size.variables else ""
                raise StrategyError(
                    f"--typical {name}={given[name]}: the model ties {name} to {size}{note}; "
                    f"leave {name} out"
                )
        return sizes


def typical_sizes(
    typical: Typical,
    symbols: Sequence[str],
    ties: Ties,
    dims: OpenDims,
    caches: Sequence[CacheSizes],
    fits: Sequence[Callable[[Binding], bool]],
) -> tuple[Profile, ...]:
    """Returns profiles with sizes of all symbols, and with weights whose sum is 1; empty if the
    user gave none and no default sizes pass.

    typical  the user's sizes
    symbols  all symbols that are open
    ties     symbols that must equal expressions of others
    dims     the open dimensions of inputs
    caches   relations between sizes that attention kernels demand
    fits     tests whether the model is valid at sizes: defaults must pass the first test; if none
             do, the second, and so on

    By default, a batch is 1, and lengths are the first of LENGTHS that pass. Errors: StrategyError
    for a symbol that is not open, or for given sizes that do not pass.
    """
    known = {*symbols, *(name for name, _ in ties.found)}
    total = sum(weight for _, weight in typical.profiles)
    profiles: list[Profile] = []
    for sizes, weight in typical.profiles or (({}, 1.0),):
        fixed = {re.sub(r"\W", "_", name): size for name, size in sizes.items()}
        unknown = [name for name in sizes if re.sub(r"\W", "_", name) not in known]
        if unknown:
            raise StrategyError(
                f"--typical {unknown[0]}: the model has no open size of that name; it has: "
                f"{', '.join(sorted(known))}"
            )
        tried: list[dict[str, int]] = []
        for free in _defaults(symbols, dims):
            solved = settled(caches, ties.solve(fixed, free), fixed)
            tried += [solved] if solved not in tried else []
        tried = [b for b in tried if all(cache.fits(b) for cache in caches)]
        best = next((b for fit in fits for b in tried if fit(b)), None)
        if best is None and typical.profiles:
            text = ",".join(f"{name}={size}" for name, size in sizes.items())
            raise StrategyError(
                f"--typical {text}: the model does not run at these sizes; give others"
            )
        if best is not None:
            profiles.append((best, weight / (total or 1.0)))
    return tuple(profiles)


def _defaults(symbols: Sequence[str], dims: OpenDims) -> Iterator[dict[str, int]]:
    """Yields default sizes of all symbols, the most usual first. If a symbol counts units of an
    input dimension (`width_by_32`), the dimension gets the usual size, not the symbol."""
    batch, images = _batch(symbols, dims), _images(symbols, dims)
    parts = {
        symbol: size.at({symbol: 1}) - size.at({symbol: 0})
        for size in dims.values()
        for symbol in size.variables
        if len(size.variables) == 1 and not size.symbol
    }
    for length in LENGTHS:
        for image in IMAGES if images else IMAGES[:1]:
            sizes = {s: BATCH if s in batch else image if s in images else length for s in symbols}
            yield {s: max(size // max(parts.get(s, 1), 1), 1) for s, size in sizes.items()}


def _batch(symbols: Sequence[str], dims: OpenDims) -> set[str]:
    """Returns the symbols that are batch sizes: symbols with such a name; else all symbols that
    occur only as first dimensions of inputs; else the most frequent first dimension."""
    named = {s for s in symbols if "batch" in s.lower() or s.lower() in ("b", "n", "bs")}
    leading: Counter[str] = Counter(
        size.symbol
        for (_, axis), size in dims.items()
        if axis == 0 and size.symbol and not _LENGTH_NAME.search(size.symbol)
    )
    elsewhere = {v for (_, axis), size in dims.items() if axis for v in size.variables}
    return named or leading.keys() - elsewhere or {s for s, _ in leading.most_common(1)}


def _images(symbols: Sequence[str], dims: OpenDims) -> set[str]:
    """Returns the symbols that are the height or width of an image: dimensions 2 and 3 of an input,
    both open, and not named like a length."""
    sized: set[str] = set()
    for (name, axis), size in dims.items():
        beside = dims.get((name, axis + 1 if axis % 2 == 0 else axis - 1))
        if axis in (2, 3) and beside is not None and len(size.variables) == 1:
            sized.update(size.variables)
    return {s for s in sized if not _LENGTH_NAME.search(s)}


def sizes_text(profiles: Sequence[Profile]) -> str:
    """Returns profiles as text: `batch=1, seq=128`."""
    each = []
    for sizes, weight in profiles:
        text = ", ".join(f"{name}={size}" for name, size in sizes.items())
        each.append(text if len(profiles) == 1 else f"{text} (weight {weight:.3g})")
    return "; ".join(each)


def check_closed(typical: Typical, path: Any) -> None:
    """Checks that the user gave no typical sizes, for a model without open sizes. Errors:
    StrategyError."""
    if typical.profiles:
        name = next(iter(typical.profiles[0][0]), "")
        raise StrategyError(f"--typical {name}: {path} has no open sizes; leave --typical out")
