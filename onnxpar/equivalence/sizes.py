"""Chooses values of open sizes at which ranks are proved, beside those of the plan's example."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from onnxpar.equivalence.program import Program

MOST_BINDINGS = 12
"""The most sets of values."""
_MOST_BORDER = 4096
_COMPARING = frozenset(
    ["Less", "Greater", "LessOrEqual", "GreaterOrEqual", "Equal", "Min", "Max", "Mod", "Div"]
)


def bindings(
    base: Mapping[str, int], given: Collection[str], borders: Iterable[int]
) -> list[dict[str, int]]:
    """Sets of values of the sizes that are not given: `base`, then all 1, then numbers below, at
    and above each of `borders`, and numbers that are odd where `base` is even. Each value of a size
    is once among them, beside other values of the other sizes."""
    names = [name for name in base if name not in given]
    near = [n + step for n in sorted({*borders}) for step in (-1, 0, 1)]
    found = [dict(base), {**base, **dict.fromkeys(names, 1)}]
    choices = {}
    for name in names:
        wanted = (base[name] + 1, *near, 2 * base[name] + 1, 1)
        choices[name] = list(dict.fromkeys(n for n in wanted if n > 0))
    for turn in range(max(map(len, choices.values()), default=0)):
        chosen = {
            name: choices[name][(turn + place) % len(choices[name])]
            for place, name in enumerate(names)
        }
        found.append({**base, **chosen})
    found = [each for i, each in enumerate(found) if each not in found[:i]]
    return found[:MOST_BINDINGS]


def borders_of(programs: Iterable[Program], sizes: str) -> set[int]:
    """The numbers with which ranks compare values that depend on the tensor `sizes`, or by which
    they divide them. Their constants must be folded."""
    found: set[int] = set()
    for program in programs:
        open_ = {sizes}
        for node in program.nodes:
            if not open_.isdisjoint(node.inputs):
                open_ |= {*node.outputs}
                if node.op in _COMPARING:
                    found |= _numbers(program, [n for n in node.inputs if n not in open_])
    return found


def _numbers(program: Program, names: Iterable[str]) -> set[int]:
    values = [program.constants[name] for name in names if name in program.constants]
    numbers = {int(v.reshape(())) for v in values if v.size == 1 and v.dtype.kind in "iu"}
    return {n for n in numbers if 1 < n <= _MOST_BORDER}
