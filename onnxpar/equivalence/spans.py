"""The positions in a dimension that each rank holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate

import numpy as np

from onnxpar.base.arrays import Array


class Family:
    """For each rank, the positions in one dimension that it holds, in its order: int64 vectors.

    Families of one `Families` are interned: equal families are the same object.
    """

    def __init__(self, spans: tuple[Array, ...]) -> None:
        self.spans = spans

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of positions of each rank."""
        return tuple(len(span) for span in self.spans)

    def is_whole(self, size: int) -> bool:
        """True if each rank holds all positions of a dimension of this size, in order."""
        return all(len(span) == size for span in self.spans) and all(
            bool((span == np.arange(size)).all())
            for span in {id(s): s for s in self.spans}.values()
        )

    def fits(self, size: int) -> bool:
        """True if a dimension of this size has all positions."""
        spans = {id(span): span for span in self.spans}.values()
        return all(not len(s) or 0 <= s.min() <= s.max() < size for s in spans)

    def covers(self, ranks: Sequence[int], size: int) -> bool:
        """True if these ranks together hold each position of a dimension exactly once."""
        held = np.concatenate([self.spans[rank] for rank in ranks])
        return len(held) == size and bool((np.sort(held) == np.arange(size)).all())

    def pieces(self, size: int) -> tuple[list[Array], int]:
        """Divides a dimension of this size into pieces that each rank holds wholly or not at all;
        returns the pieces of each rank, and the number of all."""
        codes = np.zeros(size, np.int64)
        for span in {id(s): s for s in self.spans}.values():
            member = np.zeros(size, np.int64)
            member[span] = 1
            codes = np.unique(codes * 2 + member, return_inverse=True)[1].reshape(-1)
        count = int(codes.max()) + 1 if size else 1
        return [np.unique(codes[span]) for span in self.spans], count

    def text(self, rank: int) -> str:
        """The positions of a rank, as text: `24-35`."""
        span = self.spans[rank]
        if not len(span):
            return "no positions"
        if (np.diff(span) == 1).all():
            return str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}"
        shown = ", ".join(map(str, span[:6].tolist()))
        return shown if len(span) <= 6 else f"{shown}, ... ({len(span)} positions)"


class Families:
    """Interns families of a number of ranks."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.by_layout: dict[str, Family] = {}
        """The families of layouts of dimensions, by their text."""
        self._spans: dict[bytes, Array] = {}
        self._families: dict[tuple[int, ...], Family] = {}
        self._known: dict[tuple[int, ...], list[Family]] = {}

    def of(self, spans: Iterable[Array]) -> Family:
        """The family with these positions, a vector for each rank."""
        own = tuple(self._interned(span) for span in spans)
        key = tuple(map(id, own))
        family = self._families.get(key)
        if family is None:
            family = self._families[key] = Family(own)
            self._known.setdefault(family.sizes, []).append(family)
        return family

    def whole(self, size: int) -> Family:
        """The family in which each rank holds all positions of a dimension."""
        return self.of([np.arange(size)] * self.ranks)

    def known(self, size: int, sizes: tuple[int, ...]) -> list[Family]:
        """The families seen so far of a dimension, by its size and the sizes of ranks; first the
        one that holds all positions."""
        whole = [self.whole(size)] if all(n == size for n in sizes) else []
        others = [f for f in self._known.get(sizes, ()) if f not in whole and f.fits(size)]
        return [*whole, *others]

    def filled(self, size: int, sizes: tuple[int, ...]) -> list[Family]:
        """Families of these sizes that are known but for ranks without positions; there, ranks have
        the first ones, which they may drop later."""
        found = []
        for known, families in list(self._known.items()):
            if known != sizes and all(k in (0, n) for k, n in zip(known, sizes, strict=True)):
                found += [f for f in families if f.fits(size)]
        pairs = ([*zip(family.spans, sizes, strict=True)] for family in found)
        return [self.of(s if len(s) else np.arange(n) % size for s, n in own) for own in pairs]

    def possible(self, size: int, sizes: tuple[int, ...]) -> list[Family]:
        """The families that ranks may have of a dimension: known ones, and those that follow from
        known ones of longer or shorter dimensions."""
        others = [*self.coarse(size, sizes), *self.stretched(size, sizes)]
        return list(dict.fromkeys([*self.known(size, sizes), *others]))

    def stretched(self, size: int, sizes: tuple[int, ...]) -> list[Family]:
        """Families in which ranks have parts in the order of those of a known one, one behind the
        other: rows of an image, after a convolution."""
        found = []
        for family in [own for families in self._known.values() for own in families]:
            counts: dict[int, set[int]] = {}
            for span, count in zip(family.spans, sizes, strict=True):
                counts.setdefault(id(span), set()).add(count)
            parts = {id(span): span for span in family.spans}
            order = sorted(parts, key=lambda part: (*parts[part][:1], len(parts[part])))
            if len(order) < 2 or any(len(own) > 1 for own in counts.values()):
                continue
            ends = dict(zip(order, accumulate(min(counts[part]) for part in order), strict=True))
            if ends[order[-1]] == size:
                pairs = zip(map(id, family.spans), sizes, strict=True)
                found.append(self.of(np.arange(ends[part] - n, ends[part]) for part, n in pairs))
        return found

    def coarse(self, size: int, sizes: tuple[int, ...]) -> list[Family]:
        """Families of these sizes of which known ones hold several elements for each position:
        heads, of which ranks hold the elements."""
        found = []
        for known, families in list(self._known.items()):
            each = sum(known) // max(sum(sizes), 1)
            if each < 2 or any(k != each * n for k, n in zip(known, sizes, strict=True)):
                continue
            for family in families:
                spans = [span[::each] // each for span in family.spans]
                wide = [(s[:, None] * each + np.arange(each)).reshape(-1) for s in spans]
                pairs = zip(wide, family.spans, strict=True)
                if family.fits(size * each) and all(np.array_equal(a, b) for a, b in pairs):
                    found.append(self.of(spans))
        return found

    def _interned(self, span: Array) -> Array:
        own = np.ascontiguousarray(span, np.int64)
        return self._spans.setdefault(own.tobytes(), own)


def places_of(spans: Iterable[Array], shape: Iterable[int]) -> Array:
    """The places of elements in the row-major order of a tensor with this shape: of those at these
    positions of each dimension."""
    places = np.zeros((), np.int64)
    for span, size in zip(spans, shape, strict=True):
        places = places[..., None] * size + span
    return np.asarray(places)


def covers(dims: Sequence[Family], shape: Sequence[int], ranks: int) -> bool:
    """True if ranks together hold each element of a tensor."""
    pieces = [family.pieces(size) for family, size in zip(dims, shape, strict=True)]
    held = np.zeros([count for _, count in pieces], bool)
    for rank in range(ranks):
        own = [of_rank[rank] for of_rank, _ in pieces]
        held[np.ix_(*own) if own else ()] = True
    return bool(held.all()) or 0 in shape
