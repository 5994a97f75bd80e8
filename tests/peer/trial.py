"""One case under one split: sharded, run on ranks as threads, and compared with what it expects."""

from __future__ import annotations

import shutil
import traceback
from pathlib import Path

import numpy as np
import onnx
from peer.cases import Feeds, PeerCase
from peer.outcome import CRASH, GATHERED, HANG, LIMITED, REFUSED, ROUNDED, SPLIT, WRONG, Outcome
from peer.readers import Reader
from peer.splits import Split, splits_of

from onnxpar.base.errors import InputError, OnnxparError, PassError, RankError
from onnxpar.base.write_digested import DigestedFolder
from onnxpar.compiler.plan import write_plan
from onnxpar.load.load import Model, load
from onnxpar.load.loading import LoadRequest
from onnxpar.passes.write.split_ranks import SplitRanks
from onnxpar.planner import sharder
from onnxpar.planner.context import make_context
from onnxpar.planner.default_passes import DEFAULT_PASSES
from onnxpar.planner.options import Options
from onnxpar.planner.run_passes import run_passes
from onnxpar.runtime.ranks.groups import World, thread_worlds
from onnxpar.runtime.session.threads import ThreadSession
from onnxpar.sharding.analysis import analyse

TIMEOUT = 20.0
"""Seconds after which a collective that waits is a hang."""


class Bench:
    """A folder and worlds that runs share: making them costs more than a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._worlds: dict[int, list[World]] = {}

    def worlds(self, ranks: int) -> list[World]:
        """Worlds of this many ranks, the same ones until a run fails in them."""
        if ranks not in self._worlds:
            self._worlds[ranks] = thread_worlds(ranks, TIMEOUT)
        return self._worlds[ranks]

    def drop_worlds(self, ranks: int) -> None:
        """Leaves worlds in which a run has failed."""
        for world in self._worlds.pop(ranks, ()):
            world.close()


class Trials:
    """All splits of one case."""

    def __init__(self, case: PeerCase, bench: Bench) -> None:
        self.case = case
        self.bench = bench
        self.path = bench.folder / "model.onnx"
        onnx.save(case.model, self.path)

    def splits(self) -> list[Split]:
        """Every split to try. Errors: OnnxparError where the model is refused."""
        model = load_case(self.path)
        factors = analyse(model.graph, model.states)
        inputs = [t.name for t in model.graph.inputs if t.name in factors.tensors]
        return list(splits_of(inputs, factors))

    def run(self, split: Split) -> Outcome:
        """Shards and runs the case under the split; never raises."""
        self._reader = Reader(None)
        kind, detail = self._outcome(split)
        name, reason = self._reader.name, self._reader.reason
        return Outcome(self.case.name, str(split), name, kind, detail, reason)

    def _outcome(self, split: Split) -> tuple[str, str]:
        par = self.bench.folder / "model.par"
        shutil.rmtree(par, ignore_errors=True)
        par.mkdir()
        problem: str | None = None
        feeds, limit = self.case.data[0][0], ""
        try:
            kind = self._shard(split, par)
            worlds = self.bench.worlds(split.ranks)
            with ThreadSession(par, timeout=TIMEOUT, worlds=worlds) as session:
                for feeds, expected in self.case.data:
                    try:
                        outputs = session.run(None, feeds)
                    except InputError as error:
                        if feeds is self.case.data[0][0]:
                            raise
                        kind, limit = LIMITED, f"{shapes_of(feeds)}: {error}"
                        continue
                    problem = self.case.check(expected, outputs)
                    if problem and not self.case.is_rounded(expected, outputs):
                        return WRONG, f"{shapes_of(feeds)}: {problem}"
        except RankError as error:
            self.bench.drop_worlds(split.ranks)
            kind = HANG if "imed out" in str(error) else CRASH
            return kind, f"{shapes_of(feeds)}: {error}"[:400]
        except PassError:
            return CRASH, last_lines()
        except OnnxparError as error:
            return REFUSED, str(error)[:400]
        except Exception:  # any other is a crash, which the report shows
            self.bench.drop_worlds(split.ranks)
            return CRASH, last_lines()
        return kind, ROUNDED if problem else limit[:400]

    def _shard(self, split: Split, par: Path) -> str:
        """Writes the split model; returns whether the op that reads the input computes on parts."""
        model = load_case(self.path)
        shapes = {t.name: t.shape for t in model.graph.inputs}
        if model.sizes is not None:
            sharder.shard(self.path, par, Options(strategy=split.strategy(shapes)))
            return SPLIT
        ctx = make_context(model, Options(strategy=split.strategy(shapes)))
        reader = self._reader = Reader.of(split, ctx.sharding.factors)
        made = run_passes(model, ctx, [p() for p in DEFAULT_PASSES], check=True)
        assert made is not None
        SplitRanks(DigestedFolder(par)).run(model.graph, ctx)
        write_plan(par, made.to_json())
        on_parts = reader.op is None or any(ctx.sharding.op_axes(reader.op))
        return SPLIT if on_parts else GATHERED


def load_case(path: Path) -> Model:
    """A case runs once: nothing that it makes is fed back, and what would grow may be split."""
    return load(path, LoadRequest(find_states=False))


def shapes_of(feeds: Feeds) -> str:
    """The shapes of tensors, for a line about a run."""
    return " ".join(
        f"{name} {list(np.shape(v))}" for name, v in feeds.items() if hasattr(v, "shape")
    )


def last_lines() -> str:
    """The end of the traceback of the error that is being handled."""
    return " | ".join(line.strip() for line in traceback.format_exc().splitlines()[-3:])[-400:]
