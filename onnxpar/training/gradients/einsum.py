"""The gradient of Einsum, which is another Einsum for each operand."""

from __future__ import annotations

import string
from dataclasses import dataclass

import numpy as np

from onnxpar.graph.einsum import einsum_dims, einsum_sizes
from onnxpar.training.gradients.value import Value
from onnxpar.training.gradients.vjp import Grads, Vjp, vjp


@dataclass(frozen=True)
class Term:
    """A tensor in an Einsum, with a letter for each of its dimensions."""

    value: Value
    letters: str

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each letter."""
        return dict(zip(self.letters, self.value.shape, strict=True))

    def without(self, letters: set[str]) -> Term:
        """Returns the term without the dimensions of these letters, whose size must be 1."""
        axes = [i for i, a in enumerate(self.letters) if a not in letters]
        shape = [self.value.shape[i] for i in axes]
        return Term(self.value.reshape(shape), "".join(self.letters[i] for i in axes))


@vjp("Einsum", trained=(0, 1))
def einsum(v: Vjp) -> Grads:
    equation = v.attr("equation")
    free = [a for a in string.ascii_letters if a not in equation]  # in place of an ellipsis
    dims, out = einsum_dims(equation, [x.rank for x in v.operands], lambda n: free[:n])
    sizes = einsum_sizes(dims, [x.shape for x in v.operands])
    terms = [Term(x, "".join(letters)) for x, letters in zip(v.operands, dims, strict=True)]
    narrow = [{a for a, n in t.sizes.items() if n != sizes[a]} for t in terms]
    terms = [t.without(a) for t, a in zip(terms, narrow, strict=True)]
    dy = Term(v.dy, "".join(out))
    gradients: list[Value | None] = []
    for i, (term, x) in enumerate(zip(terms, v.operands, strict=True)):
        if v.wanted[i]:
            others = [dy, *terms[:i], *terms[i + 1 :]]
            gradients.append(_gradient(others, term.letters, sizes).reshape(x.shape))
        else:
            gradients.append(None)
    return gradients


def _gradient(factors: list[Term], letters: str, sizes: dict[str, int]) -> Value:
    """Returns the gradient of an operand with these letters: an Einsum of `factors`, which are the
    other operands and the gradient of the result.

    sizes  the size of each letter, for broadcasting over letters that no factor has

    If the operand repeats a letter, only the diagonal is nonzero.
    """
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
    """Returns the Einsum of the factors, with the letters `out` in the result. Factors without
    dimensions are multiplied with it."""
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
