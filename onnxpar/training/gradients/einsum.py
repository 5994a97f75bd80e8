"""The gradient of Einsum: another Einsum for each operand."""

from __future__ import annotations

import string
from dataclasses import dataclass

import numpy as np

from onnxpar.training.gradients.value import Value
from onnxpar.training.gradients.vjp import Grads, Vjp, vjp


@dataclass(frozen=True)
class Term:
    """A tensor and a letter for each of its dimensions."""

    value: Value
    letters: str

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each letter."""
        return dict(zip(self.letters, self.value.shape, strict=True))

    def without(self, letters: set[str]) -> Term:
        """Returns the term without the dimensions of some letters, which must have size 1."""
        axes = [i for i, a in enumerate(self.letters) if a not in letters]
        shape = [self.value.shape[i] for i in axes]
        return Term(self.value.reshape(shape), "".join(self.letters[i] for i in axes))


@vjp("Einsum", trained=(0, 1))
def einsum(v: Vjp) -> Grads:
    terms, out = _parse(v)
    sizes: dict[str, int] = {}
    for term in terms:
        for letter, size in term.sizes.items():
            sizes[letter] = size if sizes.get(letter, 1) == 1 else sizes[letter]
    narrow = [{a for a, n in t.sizes.items() if n != sizes[a]} for t in terms]
    terms = [t.without(a) for t, a in zip(terms, narrow, strict=True)]
    dy = Term(v.dy, out)
    gradients: list[Value | None] = []
    for i, (term, x) in enumerate(zip(terms, v.operands, strict=True)):
        if v.wanted[i]:
            others = [dy, *terms[:i], *terms[i + 1 :]]
            gradients.append(_gradient(others, term.letters, sizes).reshape(x.shape))
        else:
            gradients.append(None)
    return gradients


def _parse(v: Vjp) -> tuple[list[Term], str]:
    """Returns the operands with their letters, and the letters of the result. Letters that the
    equation does not use replace an ellipsis."""
    equation = v.attr("equation").replace(" ", "")
    left, arrow, out = equation.partition("->")
    texts = left.split(",")
    free = [a for a in string.ascii_letters if a not in equation]
    ranks = [x.rank - len(t.replace("...", "")) for t, x in zip(texts, v.operands, strict=True)]
    dots = "".join(free[: max(r for r, t in zip([0, *ranks], ["...", *texts], strict=True))])
    texts = [t.replace("...", dots[len(dots) - r :]) for t, r in zip(texts, ranks, strict=True)]
    if not arrow:
        letters = left.replace("...", "").replace(",", "")
        out = "..." + "".join(sorted(a for a in letters if letters.count(a) == 1))
    terms = [Term(x, t) for t, x in zip(texts, v.operands, strict=True)]
    return terms, out.replace("...", dots)


def _gradient(factors: list[Term], letters: str, sizes: dict[str, int]) -> Value:
    """Returns the gradient of an operand with these letters, as an Einsum of `factors`. The product
    is broadcast over letters that no factor has. If the operand repeats a letter, only the diagonal
    is nonzero."""
    unique = "".join(dict.fromkeys(letters))
    product = _product(factors, "".join(a for a in unique if any(a in f.letters for f in factors)))
    lacking = [i for i, a in enumerate(unique) if not any(a in f.letters for f in factors)]
    gradient = product.unsqueeze(lacking).expand([sizes[a] for a in unique])
    for i, letter in enumerate(letters):
        first = letters.index(letter)
        if i != first:
            shape = [sizes[letter] if a in (first, i) else 1 for a in range(gradient.rank + 1)]
            diagonal = np.eye(sizes[letter], dtype=gradient.dtype).reshape(shape)
            gradient = gradient.unsqueeze([i]) * diagonal
    return gradient


def _product(factors: list[Term], out: str) -> Value:
    """Returns an Einsum of the factors that have dimensions, times the factors that are scalars."""
    scalars = [f.value for f in factors if not f.letters]
    others = [f for f in factors if f.letters]
    if others:
        equation = ",".join(f.letters for f in others) + "->" + out
        first, *rest = (f.value for f in others)
        product = first
        if equation != f"{out}->{out}":
            product = first.op("Einsum", *rest, equation=equation)
    else:
        product, *scalars = scalars
    for scalar in scalars:
        product = product * scalar
    return product
