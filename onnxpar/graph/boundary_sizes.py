"""Sample sizes on both sides of minima: beyond the 512 of `min(seq, 512)`, and below it.

The compiler compares graphs at sample sizes. A decision that it takes where a slice keeps
everything must hold where the slice cuts, too, so for each operand of each minimum, some sample
makes it the least one. Without such a sample, runs are limited to the sizes at which another
operand is the least.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from onnxpar.graph.size_arithmetic import Limit
from onnxpar.layout.symbols import Atom, Binding, Minimum, minimum, symbols_of

Side = tuple[Minimum, int]
"""(a minimum, the index of the operand that is less than all others)."""
_EACH = 2
"""Number of samples for each side: one even size and one odd."""
_LARGEST = 1 << 20


def unseen(atoms: Sequence[Atom], bindings: Sequence[Binding]) -> list[Side]:
    """Returns the sides of minima that no binding (sizes of all symbols) takes: if `seq` is below
    512 in all of them, the side of `min(seq, 512)` where 512 is the least."""
    return [
        (atom, i)
        for atom in atoms
        if isinstance(atom, Minimum)
        for i in range(len(atom.operands))
        if not any(is_at((atom, i), binding) for binding in bindings)
    ]


def is_at(side: Side, binding: Binding) -> bool:
    """True if, at these sizes of symbols, the side's operand of the minimum is less than all
    others."""
    atom, i = side
    values = [operand.at(binding) for operand in atom.operands]
    return all(values[i] < other for k, other in enumerate(values) if k != i)


def edge_bindings(
    sides: Sequence[Side],
    bindings: Sequence[Binding],
    symbols: Collection[str],
    least: int,
    taken: Collection[int],
) -> list[Binding]:
    """Returns bindings (sizes of all symbols) that take these sides, two for each side, with an
    even and an odd size. They come from `bindings`, with another size of one of the `symbols`, or
    of all symbols. Where possible, sizes are at least `least` and not in `taken`."""
    chosen: list[Binding] = []

    def size(side: Side) -> int:
        return sum(next(_at(side, bindings, symbols, least, taken), {}).values())

    for side in sorted(sides, key=size, reverse=True):  # a small one is on the sides of others, too
        have = sum(is_at(side, binding) for binding in chosen)
        for each in _at(side, [*bindings[have:], *bindings[:have]], symbols, least, taken):
            if have < _EACH and each not in chosen:
                chosen.append(each)
                have += 1
    return chosen


def _at(
    side: Side,
    bindings: Sequence[Binding],
    symbols: Collection[str],
    least: int,
    taken: Collection[int],
) -> Iterator[Binding]:
    """Yields bindings (sizes of all symbols) that take one side, with odd and even sizes in turn.
    They come from `bindings`, with other sizes of the minimum's symbols, as far as these are among
    `symbols`; where possible at least `least` and not in `taken`."""
    own = [s for s in symbols_of(side[0]) if s in symbols]
    for changed in [[s] for s in own] + ([own] if len(own) > 1 else []):
        for parity in (1, 0):
            for binding in bindings:
                others = {*taken, *(n for s, n in binding.items() if s not in changed)}
                sizes = [n for n in _sizes(parity) if n >= least and n not in others]
                sizes += [n for n in _sizes(parity) if n < least]
                at = [{**binding, **{s: n + i for i, s in enumerate(changed)}} for n in sizes]
                fitting = [b for b in at if is_at(side, b)]
                if fitting:  # where sizes are bounded, the largest: small ones cause more conflicts
                    is_bounded = not is_at(side, max(at, key=lambda b: b[changed[0]]))
                    yield max(fitting, key=lambda b: b[changed[0]]) if is_bounded else fitting[0]
                    break


def _sizes(parity: int) -> list[int]:
    """Returns sizes at growing distances up to _LARGEST, all odd (`parity` 1) or all even (0)."""
    sizes, size = [], 1 if parity else 2
    while size < _LARGEST:
        sizes.append(size)
        size += max(2, size // 8 * 2)
    return sizes


def limit(side: Side) -> Limit:
    """Returns the pair (a, b), where runs must have a <= b, that keeps runs from this side: a is
    the minimum of the other operands, b the side's operand."""
    atom, i = side
    others = [operand for k, operand in enumerate(atom.operands) if k != i]
    return minimum(*others), atom.operands[i]
