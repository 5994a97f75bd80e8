"""Proves that the ranks of a sharded folder compute a model."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from onnxpar.base.errors import InputError
from onnxpar.equivalence.bundle import Bundle, outputs_of, read_bundle
from onnxpar.equivalence.evaluate import NotComputed
from onnxpar.equivalence.fold import drop_unneeded, fold, merge_equal
from onnxpar.equivalence.program import Program
from onnxpar.equivalence.proof import Proof
from onnxpar.equivalence.verification import LEAST, Failure, Verification


def verify_bundle(
    model: Path, folder: Path, *, dims: Mapping[str, int] | None = None, least: str = "sampled",
    seed: int = 0,
) -> Verification:  # fmt: skip
    """Proves that the ranks of a sharded folder compute a model, or says where the proof ends; the
    arguments are those of `onnxpar.verify`.

    The compiler takes no part in it: the model and the files of ranks are read, and of plan.json
    the mesh and the layouts of inputs and outputs. Errors: ModelError if a file cannot be read;
    InputError if the folder is of a kind that cannot be verified, or an argument is wrong."""
    if least not in LEAST:
        raise InputError(f"least={least!r}: give one of {', '.join(LEAST)}")
    began = time.perf_counter()
    bundle, program = _folded(read_bundle(folder, dims or {}), model, dims or {})
    merge_equal(program)
    drop_unneeded(program, program.outputs)
    proved: dict[str, str] = {}
    failures: list[Failure] = []
    seen, collectives, compared = set[str](), 0, 0
    for name in bundle.programs():
        ranks = bundle.ranks(name)
        own = outputs_of(ranks, program.outputs)
        seen |= {*own}
        part = replace(program, nodes=[*program.nodes], outputs=own)
        drop_unneeded(part, own)
        proof = Proof(part, ranks, bundle, seed)
        failures += proof.run()
        proved |= proof.walk.proved
        collectives += proof.collectives
        compared += proof.walk.compared
    for name in program.outputs:
        if name not in seen:
            failures.append(Failure("output", name, "no file of ranks computes it"))
    weak = [key for key, how in proved.items() if how not in LEAST[least]]
    if weak and not failures:
        text = f"{len(weak)} nodes are proved in a weaker way than {least}"
        failures.append(Failure("least", weak[0], text))
    return Verification(
        model=str(model), folder=str(folder), outputs=tuple(program.outputs),
        ranks=bundle.mesh.ranks, nodes=len(program.nodes), proved=dict(Counter(proved.values())),
        sampled=tuple(key for key, how in proved.items() if how == "sampled"),
        sizes=dict(bundle.sizes), collectives=collectives, compared=compared,
        failures=tuple(failures), seconds=time.perf_counter() - began,
    )  # fmt: skip


def _folded(bundle: Bundle, model: Path, given: Mapping[str, int]) -> tuple[Bundle, Program]:
    """The model with folded constants. If it cannot run at the sizes of the plan's example, because
    it has fewer positions, the open sizes that are not given are halved until it can. Errors:
    InputError if it cannot run at any."""
    while True:
        program = bundle.model(model)
        try:
            fold(program)
        except NotComputed as error:
            sizes = {n: s if n in given else s // 2 for n, s in bundle.sizes.items()}
            if sizes == bundle.sizes or not all(sizes.values()):
                text = ", ".join(f"{name}={size}" for name, size in bundle.sizes.items())
                raise InputError(f"{model} cannot run at {text or 'its sizes'}: {error}") from None
            bundle = replace(bundle, sizes=sizes)
        else:
            return bundle, program
