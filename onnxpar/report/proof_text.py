"""A sentence on how far a plan can be from the fastest one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onnxpar.base.units import text_of

_SAME = 5e-5
"""Times that differ by a smaller fraction count as equal."""
_COUNTS = {1: "one axis", 2: "one or two axes"}


def proof_text(proof: Mapping[str, Any]) -> str:
    """Returns a sentence on how far the plan can be from the fastest strategy. `proof` is what the
    search proved, as in plan.json."""
    seconds, bound, axes = proof["seconds"], proof["bound"], proof["axes"]
    if not bound:
        return f"{_ms(seconds)} by its own count; it proved nothing about other strategies"
    meshes = "this mesh" if axes is None else f"a mesh of {_COUNTS.get(axes, f'up to {axes} axes')}"
    within = "" if proof["memory"] is None else f" within {text_of(proof['memory'], 'B')} a rank"
    kind = "strategy" if proof["complete"] else "strategy that it compared"
    others = f"{kind} on {meshes}{within}"
    hidden = ", with sums of gradients between hosts hidden" if proof.get("hides_sums") else ""
    count = f"{_ms(seconds)} of compute and communication by its own count{hidden}"
    share = seconds / bound - 1
    if share < -_SAME:
        return f"faster than every {others}: {count}; those take at least {_ms(bound)}"
    if share < _SAME:
        return f"no {others} is faster: {count}"
    far = f"at most {share:.2%} slower than the fastest {others}"
    return f"{far}: {count}; none takes less than {_ms(bound)}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"
