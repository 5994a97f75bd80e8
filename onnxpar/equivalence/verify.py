"""Proves that the ranks of a sharded folder compute a model."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from onnxpar.base.bundle_names import ENCODER_PART, PLAN, REWRITTEN
from onnxpar.base.errors import InputError
from onnxpar.equivalence.bodies import straighten
from onnxpar.equivalence.bundle import SIZES, Bundle, outputs_of, read_bundle
from onnxpar.equivalence.draws import Draws
from onnxpar.equivalence.evaluate import Evaluator, NotComputed
from onnxpar.equivalence.fold import drop_unneeded, fold, merge_equal
from onnxpar.equivalence.keep import check_keep
from onnxpar.equivalence.keep import keep as write_window
from onnxpar.equivalence.ports import PORTS
from onnxpar.equivalence.program import Program, captured
from onnxpar.equivalence.proof import Proof
from onnxpar.equivalence.sizes import bindings, borders_of
from onnxpar.equivalence.spans import Families
from onnxpar.equivalence.stored import COMPARED
from onnxpar.equivalence.verification import LEAST, Failure, Verification


def verify_bundle(
    model: Path, folder: Path, *, dims: Mapping[str, int] | None = None, least: str = "assumed",
    weights: str = "all", seed: int = 0, keep: Path | None = None, shorter: Sequence[Path] = (),
) -> Verification:  # fmt: skip
    """Proves that the ranks of a sharded folder compute a model, or says where the proof ends; the
    arguments are those of `onnxpar.verify`.

    The compiler takes no part in it: the model and the files of ranks are read, and of plan.json,
    or of ports.json, the mesh and the layouts of inputs and outputs. The encoder of an
    encoder-decoder is proved as well. Errors: ModelError if a file
    cannot be read; InputError if the folder is of a kind that cannot be verified, or an argument
    is wrong."""
    if least not in LEAST:
        raise InputError(f"least={least!r}: give one of {', '.join(LEAST)}")
    if weights not in COMPARED:
        raise InputError(f"weights={weights!r}: give one of {', '.join(COMPARED)}")
    place = None if keep is None else check_keep(keep)
    began = time.perf_counter()
    read = read_bundle(folder, model, dims or {}, weights)
    given = dict(read.sizes) if read.source == PORTS else dims or {}
    models, assumed = _pairs(read, [model, *shorter])
    if read.rewritten is not None:
        assumed[REWRITTEN] = (
            f"the loader made it of {model}, and ranks are proved against it; that both compute "
            "the same is not proved"
        )
    folded = [_folded(own, path, given) for own, path in models]
    bundle, program = folded[0]
    for port in read.plan["outputs"]:
        if port["name"] not in program.outputs:
            assumed[port["name"]] = "an output of ranks that the model does not have"
    prover = _Prover(Families(bundle.mesh.ranks), seed, place)
    parts = [prover.prove(*each) for each in folded]
    is_open = bundle.length is None
    failures = [
        each if is_open else _at(own, each)
        for part, (own, _) in zip(parts, folded, strict=True)
        for each in part.failures
    ]
    first, tested = parts[0], [dict(bundle.sizes)]
    for sizes in bindings(bundle.sizes, given, first.borders)[1:] if is_open else ():
        other = replace(bundle, sizes=sizes)
        if failures:
            break
        if not other.is_allowed():
            continue
        with suppress(NotComputed):
            again = other.model(model)
            fold(again)
            outcome = prover.prove(other, again)
            if outcome.failures and _runs(program, seed) and not _runs(again, seed):
                continue
            failures = [_at(other, each) for each in outcome.failures]
            assumed |= outcome.assumed
            tested.append(sizes)
    assumed |= {name: reason for part in parts for name, reason in part.assumed.items()}
    proved = [each for part in parts for each in part.proved.items()]
    failures = failures or [*_too_weak(proved, assumed, least)]
    found = Verification(
        model=str(model), folder=str(folder), outputs=tuple(program.outputs),
        ranks=bundle.mesh.ranks, nodes=sum(part.nodes for part in parts),
        proved=dict(Counter(how for _, how in proved)),
        sampled=tuple(key for key, how in proved if how == "sampled"), assumed=assumed,
        files=tuple(map(str, shorter)), sizes=tuple(tested) if bundle.sizes and is_open else (),
        collectives=sum(part.collectives for part in parts),
        compared=sum(part.compared for part in parts), weights=weights,
        rewritten={} if read.rewritten is None else {str(model): REWRITTEN},
        ranges=dict(bundle.ranges),
        failures=tuple(dict.fromkeys(failures)), seconds=time.perf_counter() - began,
    )  # fmt: skip
    if not (folder / ENCODER_PART / PLAN).exists():
        return found
    part = read_bundle(folder / ENCODER_PART, model, {})
    encoder = verify_bundle(
        model.parent / Path(str(part.plan.get("model"))).name, part.folder,
        dims={name: size for name, size in (dims or {}).items() if name in part.sizes},
        least=least, weights=weights, seed=seed, keep=keep if found.ok else None,
    )  # fmt: skip
    return found.joined(encoder, ENCODER_PART)


@dataclass
class _Outcome:
    """What was proved at one set of sizes."""

    nodes: int
    proved: dict[str, str] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    collectives: int = 0
    compared: int = 0
    assumed: dict[str, str] = field(default_factory=dict)
    borders: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class _Prover:
    """Proves all programs of a bundle; `place` is where the first failing window is written."""

    families: Families
    seed: int
    place: Path | None

    def prove(self, bundle: Bundle, program: Program) -> _Outcome:
        """Proves that ranks compute the outputs of a model, whose constants are folded."""
        straighten(program)
        merge_equal(program)
        drop_unneeded(program, program.outputs)
        found, seen = _Outcome(len(program.nodes)), set[str]()
        for name in bundle.programs():
            ranks = bundle.ranks(name)
            own = outputs_of(ranks, program.outputs)
            seen |= {*own}
            part = replace(program, nodes=[*program.nodes], outputs=own)
            drop_unneeded(part, own)
            proof = Proof(part, ranks, bundle, self.families, self.seed)
            with np.errstate(all="ignore"):
                failures = list(proof.run())
            if self.place is not None and failures and not found.failures:
                failures[0] = _kept(proof, failures[0], self.place)
            found.failures += failures
            found.proved |= proof.walk.proved
            found.assumed |= proof.walk.trace.assumed
            found.collectives += proof.collectives
            found.compared += proof.weights.compared
            found.borders |= borders_of(ranks.programs, SIZES) | {ranks.size}
        for name in program.outputs:
            if name not in seen:
                text = "no file of ranks computes it"
                found.failures.append(Failure("output", name, text))
        return found


def _too_weak(
    proved: Sequence[tuple[str, str]], assumed: Mapping[str, str], least: str
) -> Iterator[Failure]:
    """Yields a failure if something is proved in a weaker way than `least`."""
    weak = [key for key, how in proved if how not in LEAST[least]]
    if weak:
        text = f"{len(weak)} nodes are proved in a weaker way than {least}"
        yield Failure("least", weak[0], text)
    elif assumed and "assumed" not in LEAST[least]:
        name, reason = next(iter(assumed.items()))
        yield Failure("least", name, f"it is assumed: {reason}")


def _pairs(
    bundle: Bundle, models: Sequence[Path]
) -> tuple[list[tuple[Bundle, Path]], dict[str, str]]:
    """Each model with the folder as it is for its length of samples, and the lengths that no model
    has, with the reason. Errors: InputError if a model has none of the lengths, or that of
    another."""
    lengths = bundle.lengths()
    if lengths == [bundle]:
        if len(models) > 1:
            text = f"--shorter {models[1]}: {bundle.folder} has one program for all samples"
            raise InputError(text)
        return [(bundle, models[0])], {}
    found: dict[str, tuple[Bundle, Path]] = {}
    for path in models:
        own = [each for each in lengths if each.fits(each.model(path))]
        if not own:
            known = "; ".join(each.text() for each in lengths)
            raise InputError(
                f"{path} takes samples of none of the lengths in {bundle.folder}: {known}"
            )
        other = found.setdefault(own[0].length or "", (own[0], path))[1]
        if other is not path:
            raise InputError(f"{path} takes samples of the same length as {other}")
    left = {
        f"rank_*.{each.programs()[0]}": (
            f"the program for {each.text()} is not proved; give its step with --shorter"
        )
        for each in lengths
        if (each.length or "") not in found
    }
    return [*found.values()], left


def _kept(proof: Proof, failure: Failure, place: Path) -> Failure:
    """A failure that says where the part of the model and of ranks is written."""
    if failure.kind != "node":
        return failure
    line = write_window(proof.walk, failure.tensor, place)
    return replace(failure, details=(*failure.details, line))


def _at(bundle: Bundle, failure: Failure) -> Failure:
    return replace(failure, text=f"at {bundle.text()}: {failure.text}")


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
                text = bundle.text() or "its sizes"
                raise InputError(f"{model} cannot run at {text}: {error}") from None
            bundle = replace(bundle, sizes=sizes)
        else:
            return bundle, program


def _runs(program: Program, seed: int) -> bool:
    """True if onnxruntime computes a model at its sizes, which may be too large for it."""
    draws = Draws(program, program.nodes, (), seed, {})
    read = {name for node in program.nodes for name in (*node.inputs, *captured(node.proto))}
    values = {n: program.constants[n] for n in read if n in program.constants}
    for name in program.inputs:
        if name not in program.shapes:
            return False
        values[name] = draws.value(name, program.shapes[name], program.types[name], 0)
    try:
        Evaluator().run(program.nodes, values, program, [program.nodes[-1].outputs[0]])
    except NotComputed:
        return False
    return True
