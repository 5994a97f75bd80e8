"""Relates constants of ranks to constants of the model, by their content."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from itertools import islice, product

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.equivalence.bundle import Bundle
from onnxpar.equivalence.content import Contents
from onnxpar.equivalence.held import Held, Partial
from onnxpar.equivalence.program import Constants, Program
from onnxpar.equivalence.ranks import Ranks
from onnxpar.equivalence.spans import Families, Family
from onnxpar.equivalence.stored import same_numbers

MOST_LAYOUTS = 64
"""The most layouts that are tried for a constant."""


class Weights:
    """How constants of ranks stand for constants of a model: at all positions where they are equal.

    copies    the names that ranks have for a weight of the model
    compared  the bytes of constants of ranks that are the model's
    """

    def __init__(self, model: Program, ranks: Ranks, bundle: Bundle, families: Families) -> None:
        self.model, self.ranks, self.bundle, self.families = model, ranks, bundle, families
        self.copies: dict[str, list[str]] = {}
        self.compared = 0
        self.is_inside = False
        self.contents = Contents(bundle.files)
        self._planned: dict[tuple[str, str], tuple[Family, ...] | None] = {}
        self._known: dict[tuple[str, str], list[Held]] = {}
        for weight in bundle.plan.get("weights", ()):
            term, name = weight["name"], weight["tensor"]
            self.copies.setdefault(term, []).append(name)
            self._planned[term, name] = bundle.families(weight, families)

    def inside(self, model: Program, ranks: Ranks) -> Weights:
        """The constants of a body of the model, and of those of ranks."""
        found = copy(self)
        found.model, found.ranks, found.contents = model, ranks, Contents(self.bundle.files)
        found.is_inside, found.compared, found._known = True, 0, {}
        return found

    def relate(self, term: str, name: str) -> list[Held]:
        """What a constant of ranks is of a constant of the model."""
        key = term, name
        if key not in self._known:
            self._known[key] = list(self._relate(term, name))
        return self._known[key]

    def is_believed(self, constants: Constants, name: str) -> bool:
        """True for a weight that is not read."""
        return self.bundle.compared == "none" and constants.is_in_file(name)

    def _relate(self, term: str, name: str) -> Iterator[Held]:
        shape, local = self.model.constants.shape(term), self.ranks.constant_shapes(name)
        if any(len(own) != len(shape) for own in local):
            return
        first = self.ranks.programs[0].constants
        if self.is_believed(self.model.constants, term) and self.is_believed(first, name):
            dims = self._planned.get((term, name))
            if dims is not None and local == [*zip(*(f.sizes for f in dims), strict=True)]:
                yield Held(term, name, dims)
            return
        choices = [
            self.families.known(size, tuple(own[axis] for own in local))
            for axis, size in enumerate(shape)
        ]
        is_known = False
        for dims in islice(product(*choices), MOST_LAYOUTS):
            partial = self._compare(term, name, dims)
            if partial is not None:
                is_known = True
                yield Held(term, name, dims, partial)
        if not is_known and not self.ranks.has_origins:
            yield from self._searched(term, name)

    def _searched(self, term: str, name: str) -> Iterator[Held]:
        """What a constant of ranks holds of one of the model's, by its content alone."""
        whole, spans = self.model.constants[term], list[list[Array]]()
        for program in self.ranks.programs:
            own = self.contents.find(term, whole, program.constants[name])
            if own is None:
                return
            spans.append(own)
        self.compared += sum(program.constants[name].nbytes for program in self.ranks.programs)
        yield Held(term, name, tuple(map(self.families.of, zip(*spans, strict=True))))

    def _compare(
        self, term: str, name: str, dims: tuple[Family, ...]
    ) -> tuple[Partial, ...] | None:
        """Weights in files are compared once for all sizes at which ranks are proved."""
        first, known = self.ranks.programs[0], self.bundle.files.compared
        is_in_file = first.constants.is_in_file(name) and self.model.constants.is_in_file(term)
        if self.is_inside or not is_in_file:
            return self._find(term, name, dims)
        key = first.path, term, name, dims
        if key not in known:
            known[key] = self._find(term, name, dims)
        found: tuple[Partial, ...] | None = known[key]
        return found

    def _find(self, term: str, name: str, dims: tuple[Family, ...]) -> tuple[Partial, ...] | None:
        """What a constant of ranks is if it stands for these positions: a part of a sum if ranks
        have zeros in place of some; None if it is something else."""
        whole, files = self.model.constants[term], self.bundle.files
        owns = [program.constants[name] for program in self.ranks.programs]
        is_rounded = self.model.constants.is_rounded(term) and all(
            program.constants.is_rounded(name) for program in self.ranks.programs
        )
        holds = []
        for rank, own in enumerate(owns):
            spans = [family.spans[rank] for family in dims]
            is_same = files.is_same(own, whole, spans, self.bundle.compared)
            holds.append(is_same or (is_rounded and same_numbers(own, whole, spans)))
        is_number = all(own.dtype == whole.dtype and own.dtype.kind in "fiu" for own in owns)
        partial: tuple[Partial, ...] | None = () if all(holds) else None
        if partial is None and is_number:
            are_parts = all(same or not own.any() for own, same in zip(owns, holds, strict=True))
            if any(holds) and are_parts:
                family = self.families.of(np.arange(int(same)) for same in holds)
                partial = (Partial("sum", family, 1),)
            elif all(family.is_whole(n) for family, n in zip(dims, whole.shape, strict=True)):
                partial = self._rows(whole, owns)
        if partial is not None:
            self.compared += sum(own.nbytes for own in owns)
        return partial

    def _rows(self, whole: Array, owns: Sequence[Array]) -> tuple[Partial, ...] | None:
        """Of which rows of one dimension ranks have the numbers, and zeros in place of the others;
        None if there is no such dimension. Rows of zeros are no parts of a sum."""
        for axis in range(whole.ndim):
            others = tuple(i for i in range(whole.ndim) if i != axis)
            nonzero = (whole != 0).any(others)
            if not nonzero.any():
                return None
            has = [(own == whole).all(others)[nonzero] for own in owns]
            lacks = [(own == 0).all(others) for own in owns]
            either = zip(lacks, has, strict=True)
            if all(lack[~nonzero].all() and (lack[nonzero] | own).all() for lack, own in either):
                rows = self.families.of(map(np.flatnonzero, has))
                return (Partial("sum", rows, int(nonzero.sum())),)
        return None
