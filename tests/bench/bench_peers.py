"""onnxpar beside onnxruntime, JAX, PyTorch and OpenMPI on this machine.

    pip install 'onnxpar[peers]'   # torch, jax and mpi4py; OpenMPI itself is the system's
    python tests/bench/bench_peers.py [--only BERT Llama encoder train all-reduce] [--rounds 20]
        [--quick] [--topology cluster.yaml] [--json FILE] [--plot FILE.svg] [--read FILE]
        [--write docs/performance.md]

Each system runs in a process of its own and takes its turns in random order. Before a turn the
machine has been quiet for a moment; a turn counts if others used less than a tenth of a core during
it, and where few did, the quietest quarter of all turns counts. Before anything is timed, all
systems of a table must agree. A run goes from arrays to arrays. Without --topology, `onnxpar
calibrate` measures the machine first, for the search. --read shows the figures of
earlier --json files; --write puts the tables into a page, between its marks.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench import peer_jax, peer_models, peer_torch
from bench.bench_collectives import MEDIA, Ranks, chain, copy_seconds, length_of, runs_of
from bench.peer_models import CASES, RANKS, TRAINED, Case, shard
from bench.peer_mpi import all_reduces, missing
from bench.peer_report import machine, show, write_page, write_plot
from bench.peers import Figure, Peer, Turn, measure, watched

from onnxpar.cli.command_line import main as command

INFERENCE_TOLERANCE = 1e-4
TRAINING_TOLERANCE = 1e-3
STEPS = 3
"""Of which the losses must agree."""
SIZES = (4 << 10, 1 << 20, 64 << 20)
GROUPS = (2, 4)
ALL_REDUCE = "all-reduce"
Table = Mapping[str, Figure]


def inference(case: Case, model: Path, folder: Path, topology: str) -> Iterator[Peer]:
    """The systems that run a model; the first is the base."""
    case.write(model)
    feeds = case.feeds
    for threads in (1, RANKS):
        name = f"onnxruntime, {threads} thread{'s' * (threads > 1)}"
        yield Peer(name, peer_models.onnxruntime, (model, feeds, threads))
    yield Peer("JAX, 2 devices", peer_jax.devices, (case, model, feeds), "jax")
    for how in ("tensor-parallel", "auto"):
        par = shard(model, folder, how, topology)
        yield Peer(f"onnxpar, {how}", peer_models.sharded, (par, feeds))


def training(case: Case, model: Path, folder: Path, topology: str) -> Iterator[Peer]:
    """The systems that train a model; the first is the base."""
    case.write(model)
    for threads in (1, RANKS):
        name = f"torch, {threads} thread{'s' * (threads > 1)}"
        yield Peer(name, peer_torch.threads, (case, model, threads), "torch")
    yield Peer("torch DDP, 2 processes", peer_torch.data_parallel, (case, model), "torch")
    step, labels = peer_models.write_step(model)
    batch = {**case.feeds, labels: case.labels}
    for how in ("data-parallel", "zero1", "auto"):
        par = shard(step, folder, how, topology)
        yield Peer(f"onnxpar, {how}", peer_models.trained, (par, batch))


def installed(peers: Iterator[Peer]) -> list[Peer]:
    """Those that can be measured; a line for each other one."""
    found = []
    for peer in peers:
        if peer.missing:
            print(peer.missing, file=sys.stderr)
        else:
            found.append(peer)
    return found


def collectives(ranks: int, rounds: int, folder: Path) -> dict[str, Table]:
    """All-reduces by size, beside a memcpy of as many bytes, which is the base."""
    lacks = missing()
    if lacks:
        print(f"OpenMPI is left out: {lacks}", file=sys.stderr)
    worlds = {medium: Ranks(ranks, medium, str(folder)) for medium in MEDIA}
    models = {size: chain("AllReduce", ranks, size // 4, length_of(size)) for size in SIZES}
    systems = ["memcpy", *MEDIA, *([] if lacks else ["OpenMPI"])]
    turns: dict[tuple[int, str], list[Turn]] = {(n, s): [] for n in SIZES for s in systems}

    def seconds(system: str) -> dict[int, float]:
        if system == "OpenMPI":
            return all_reduces(ranks, SIZES)
        if system == "memcpy":
            return {size: copy_seconds(size) for size in SIZES}
        world = worlds[system]
        return {n: world.seconds(models[n], runs_of(n)) / length_of(n) for n in SIZES}

    for _ in range(rounds):
        for system in random.sample(systems, len(systems)):
            found, others = watched(os.getpid(), partial(seconds, system))
            for size in SIZES:
                turns[size, system].append(Turn([found[size]], others))
    for world in worlds.values():
        world.close()
    names = {medium: f"onnxpar, {medium}" for medium in MEDIA}
    return {
        f"{ALL_REDUCE} of {label(size)}, {ranks} ranks": {
            names.get(system, system): Figure.of(turns[size, system]) for system in systems
        }
        for size in SIZES
    }


def label(size: int) -> str:
    """Bytes for people."""
    return f"{size >> 20} MB" if size >= 1 << 20 else f"{size >> 10} kB"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], help="words of the tables to measure")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="3 rounds of short turns")
    parser.add_argument("--topology", help="as onnxpar calibrate writes it, on this machine")
    parser.add_argument("--json", type=Path, help="file to write all figures to")
    parser.add_argument("--read", type=Path, nargs="+", help="files with figures to show instead")
    parser.add_argument("--write", type=Path, help="page whose tables to renew")
    parser.add_argument("--plot", type=Path, help="file to draw the figures to")
    return parser.parse_args()


def tables(options: argparse.Namespace, folder: Path) -> Iterator[tuple[str, Table]]:
    """Measures one table after the other."""
    rounds, seconds = (3, 0.1) if options.quick else (options.rounds, 0.4)

    def is_asked(name: str) -> bool:
        return not options.only or any(word in name for word in options.only)

    cases = {name: (case, inference) for name, case in CASES.items()}
    trained = {f"train {name}": (case, training) for name, case in TRAINED.items()}
    asked = {name: work for name, work in {**cases, **trained}.items() if is_asked(name)}
    topology = options.topology or str(folder / "cluster.yaml")
    if asked and options.topology is None and command(["calibrate", "-o", topology]) != 0:
        raise SystemExit(1)
    for number, (name, (case, systems)) in enumerate(asked.items()):
        place = folder / str(number)
        place.mkdir()
        peers = installed(systems(case, place / "model.onnx", place, topology))
        trains = systems is training
        steps, tolerance = (STEPS, TRAINING_TOLERANCE) if trains else (1, INFERENCE_TOLERANCE)
        yield name, measure(peers, rounds, seconds, steps, tolerance)
    for ranks in GROUPS if is_asked(ALL_REDUCE) else ():
        yield from collectives(ranks, rounds, folder).items()


def read_figures(files: Sequence[Path]) -> tuple[dict[str, str], dict[str, Table]]:
    """The machine of the last file, and the tables of all."""
    about: dict[str, str] = {}
    found: dict[str, Table] = {}
    for file in files:
        read = json.loads(file.read_text())
        about = read["machine"]
        for name, table in read["tables"].items():
            found[name] = {peer: Figure(**figure) for peer, figure in table.items()}
    return about, found


def write_figures(file: Path, about: Mapping[str, str], tables: Mapping[str, Table]) -> None:
    """Writes all figures so far."""
    plain = {name: {p: asdict(f) for p, f in table.items()} for name, table in tables.items()}
    file.write_text(json.dumps({"machine": about, "tables": plain}, indent=1) + "\n")


def main() -> None:
    """Prints a table for each model, training step and all-reduce."""
    options = arguments()
    if options.read:
        about, found = read_figures(options.read)
        print(show(about, found))
    else:
        about, found = machine(), {}
        print("\n".join(f"{key}: {value}" for key, value in about.items()), flush=True)
        with tempfile.TemporaryDirectory() as folder:
            for name, table in tables(options, Path(folder)):
                found[name] = table
                print(show({}, {name: table}), flush=True)
                if options.json:
                    write_figures(options.json, about, found)
    if options.json:
        write_figures(options.json, about, found)
    if options.plot:
        write_plot(options.plot, about, found)
    if options.write:
        write_page(options.write, about, found)


if __name__ == "__main__":
    main()
