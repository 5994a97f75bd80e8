"""What a proof says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from html import escape
from typing import Any

HOW = {
    "arithmetic": "by arithmetic",
    "lemma": "by lemma",
    "whole": "of whole tensors",
    "sampled": "sampled",
    "assumed": "assumed",
}
"""How nodes are proved, in the order of strength."""
LEAST = {
    "exact": ("arithmetic",),
    "lemma": ("arithmetic", "lemma", "whole"),
    "sampled": ("arithmetic", "lemma", "whole", "sampled"),
    "assumed": tuple(HOW),
}
"""The proofs that are accepted, by the weakest of them."""

_COMPARED = {
    "sample": "; of weights in files, a sample of rows was compared",
    "none": "; weights in files were not compared: they are believed to be as plan.json says",
}


@dataclass(frozen=True)
class Failure:
    """Where a proof ends.

    kind    `node`, `output`, `state`, `default`, `order` or `least`
    tensor  the tensor of the model that is not related to tensors of ranks
    text    what is wrong
    details lines on the operands, the rule that is broken, and the readers
    """

    kind: str
    tensor: str
    text: str
    details: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verification:
    """The result of `onnxpar.verify`.

    nodes        the nodes of the model that depend on its inputs
    proved       the number of nodes by how they were proved
    sampled      the first results of the nodes that were compared on drawn values
    assumed      what is believed without proof, and why: by the name of a node's first result, or
                 of a file in the folder
    files        the models that were proved beside `model`: steps of shorter samples, an encoder
    rewritten    the models that ranks compute as the loader rewrote them: by name, the file in the
                 folder that has the graph
    sizes        the values of open sizes for which the proof was made, one set after the other;
                  counts are those of the first
    ranges       the integers [low, high) of inputs for which it holds
    collectives  the collectives whose order was checked
    compared     bytes of ranks' weights and constants that are the model's
    weights      how much of the weights in files was compared: all, sample or none
    failures     where the proof ends; empty if the ranks compute the model
    """

    model: str
    folder: str
    outputs: tuple[str, ...]
    ranks: int
    nodes: int
    proved: Mapping[str, int]
    sampled: tuple[str, ...]
    assumed: Mapping[str, str]
    files: tuple[str, ...]
    rewritten: Mapping[str, str]
    sizes: tuple[Mapping[str, int], ...]
    ranges: Mapping[str, tuple[int, int]]
    collectives: int
    compared: int
    weights: str
    failures: tuple[Failure, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """True if the ranks compute the model."""
        return not self.failures

    def joined(self, other: Verification, folder: str) -> Verification:
        """The result for this folder and for a folder in it."""
        rewritten = {model: f"{folder}/{file}" for model, file in other.rewritten.items()}
        assumed = {f"{folder}/{name}": reason for name, reason in other.assumed.items()}
        return replace(
            self, outputs=(*self.outputs, *other.outputs), nodes=self.nodes + other.nodes,
            proved=dict(Counter(self.proved) + Counter(other.proved)),
            sampled=(*self.sampled, *other.sampled), files=(*self.files, other.model),
            assumed={**self.assumed, **assumed}, rewritten={**self.rewritten, **rewritten},
            sizes=(*self.sizes, *other.sizes), collectives=self.collectives + other.collectives,
            compared=self.compared + other.compared, failures=(*self.failures, *other.failures),
            seconds=self.seconds + other.seconds,
        )  # fmt: skip

    def text(self) -> str:
        """What the command prints."""
        return "\n".join(self._lines())

    def to_json(self) -> dict[str, Any]:
        """The verification as JSON."""
        return {"ok": self.ok, **asdict(self)}

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.text())}</pre>"

    def _lines(self) -> list[str]:
        if self.ok:
            shown = ", ".join(self.outputs[:4]) + (", ..." if len(self.outputs) > 4 else "")
            models = ", ".join(map(self._named, [self.model, *self.files]))
            lines = [f"the ranks of {self.folder} compute {models}: {shown}"]
        else:
            lines = []
            for failure in self.failures:
                lines.append(f"not proved: {failure.tensor or failure.kind}: {failure.text}")
                lines += [f"  {line}" for line in failure.details]
        counts = [f"{self.proved.get(how, 0)} {text}" for how, text in HOW.items()]
        done = sum(self.proved.values())
        lines.append(f"  {_count(self.nodes, 'node')} over {self.ranks} ranks: {', '.join(counts)}")
        if done < self.nodes:
            lines.append(f"  not proved: {_count(self.nodes - done, 'node')}")
        lines += [f"  assumed: {name}: {reason}" for name, reason in self.assumed.items()]
        if not any(failure.kind == "order" for failure in self.failures):
            lines.append(f"  {_count(self.collectives, 'collective')}, in one order on all ranks")
        lines.append(f"  {self.compared:,} bytes of ranks' weights and constants are the model's")
        if self.weights != "all":
            lines[-1] += _COMPARED[self.weights]
        lines.append("  over the real numbers: ranks may add in another order")
        lines.append(f"  sizes: {self._sizes()}")
        for name, (low, high) in self.ranges.items():
            lines.append(f"  for {name} from {low} to {high - 1}, as ports.json says")
        lines.append(
            "  relies on: lemmas, which are tested; onnxruntime's kernels; the plugin; the session"
        )
        return lines

    def _named(self, model: str) -> str:
        """What ranks compute: a model, or the graph that the loader made of it."""
        file = self.rewritten.get(model)
        return model if file is None else f"{self.folder}/{file}, made of {model}"

    def _sizes(self) -> str:
        if not self.sizes:
            return "as in the file"
        shown = [",".join(f"{n}={s}" for n, s in each.items()) for each in self.sizes]
        more = f", and {len(shown) - 3} more" if len(shown) > 3 else ""
        return f"tested at {'; '.join(shown[:3])}{more}; not proved for others"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
