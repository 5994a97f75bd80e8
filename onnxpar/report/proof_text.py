"""Says how far a plan may be from the best one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onnxpar.base.units import text_of

_COUNTS = {1: "one axis", 2: "one or two axes"}


def proof_text(proof: Mapping[str, Any]) -> str:
    """A sentence on what the search has proved, given in the form that plan.json has."""
    seconds, bound, axes = proof["seconds"], proof["bound"], proof["axes"]
    meshes = "this mesh" if axes is None else f"a mesh of {_COUNTS.get(axes, f'up to {axes} axes')}"
    hidden = " with sums of gradients between hosts hidden" if proof.get("hides_sums") else ""
    own = f"{seconds * 1e3:.3f} ms, as the search counts{hidden}"
    within = "" if proof["memory"] is None else f" within {text_of(proof['memory'], 'B')} a rank"
    if not bound:
        return f"{own}; it proved nothing about other strategies"
    kind = "strategy" if proof["complete"] else "strategy of those compared"
    least = f"no {kind} on {meshes}{within} takes less than {bound * 1e3:.3f} ms"
    return f"{own}; {least} ({_difference(bound / seconds - 1)})"


def _difference(share: float) -> str:
    if share < -5e-5:
        return f"{-share:.2%} less"
    return "the same" if share < 5e-5 else f"{share:.2%} more"
