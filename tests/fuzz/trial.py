"""Runs commands in forked children with limits, and says what is wrong with how they end."""

from __future__ import annotations

import contextlib
import importlib
import os
import pkgutil
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnxruntime as ort
from fuzz.mutate import messages
from fuzz.sessions import run_once

import onnxpar
from onnxpar import cli
from onnxpar.base.errors import OnnxparError
from onnxpar.cli.error_line import report
from onnxpar.graph.shapes_by_onnxruntime import REFUSED

MEMORY = 4 << 30
"""Bytes of address space that a command may have beyond what it begins with."""
SECONDS = 60
"""Of processor time for a command."""
PATIENCE = 120.0
"""Seconds of wall time after which a child is ended."""
KEPT = "kept-"
"""Begins the name of the copy of a broken file, which ends with its kind."""
SESSION = "(session)"
"""Stands for a command: a session runs the sharded model once, with its ranks as threads."""


@dataclass(frozen=True)
class Case:
    """A command to try: its arguments, and what holds its result against something else where it
    ends with 0: returns what is wrong, or nothing. `kept` is the broken file, and the kind of files
    among which a corpus keeps it. `statuses` are those with which the command may end."""

    arguments: list[str]
    judge: Callable[[], str]
    kept: tuple[str, Path] | None = None
    statuses: tuple[int, ...] = (0, 2)


Maker = Callable[[int, Path], Case]
"""Makes the case of a number in a folder, which is the working directory."""


@dataclass(frozen=True)
class Outcome:
    """How a case ended; `fault` is empty where all is well, else its first line tells its class.
    `said` is the last line on standard error."""

    number: int
    status: str
    fault: str
    said: str = ""


def run_all(
    maker: Maker,
    numbers: Iterable[int],
    jobs: int = 2,
    keep: Callable[[Outcome, str, Path], None] | None = None,
) -> Iterator[Outcome]:
    """Tries each case in a child of its own, `jobs` at a time. `keep` gets each outcome with the
    kind and the copy of the file that a corpus keeps."""
    _import_all()
    waiting = iter(numbers)
    running: dict[int, tuple[int, Path, float]] = {}
    root = Path(tempfile.mkdtemp(prefix="onnxpar-fuzz-"))
    try:
        while True:
            while len(running) < jobs and (number := next(waiting, None)) is not None:
                folder = root / str(number)
                folder.mkdir()
                running[_start(maker, number, folder)] = (number, folder, time.monotonic())
            if not running:
                return
            for child in list(running):
                number, folder, since = running[child]
                pid, status = os.waitpid(child, os.WNOHANG)
                if pid:
                    del running[child]
                    _end_group(child)  # what it has started
                    outcome = _outcome(number, folder, status)
                    for copy in folder.glob(f"{KEPT}*"):
                        if keep is not None:
                            keep(outcome, copy.name.removeprefix(KEPT), copy)
                    yield outcome
                    shutil.rmtree(folder, ignore_errors=True)
                elif time.monotonic() - since > PATIENCE:
                    _end(child)
            time.sleep(0.005)
    finally:
        for child in running:
            _end(child)
            os.waitpid(child, 0)
        shutil.rmtree(root, ignore_errors=True)


def _import_all() -> None:
    """Imports what commands import when they need it, so that no child takes a second for it."""
    folder = str(Path(onnxpar.__file__).parent)  # an editable install has others in its __path__
    for module in pkgutil.walk_packages([folder], "onnxpar.", lambda name: None):
        if not module.name.endswith("__main__"):
            with contextlib.suppress(ImportError, OnnxparError):  # of what is optional
                importlib.import_module(module.name)


def _end(child: int) -> None:
    """Ends a child that has not been waited for, and what it has started."""
    _end_group(child)
    os.kill(child, signal.SIGKILL)  # at first, it has no group of its own


def _end_group(child: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)


def _outcome(number: int, folder: Path, status: int) -> Outcome:
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        log = folder / "stderr"
        last = log.read_text(errors="replace")[-300:] if log.exists() else ""
        return Outcome(number, name, f"ended by {name}: {last}")
    verdict = folder / "verdict"
    if not verdict.exists():
        return Outcome(number, "?", f"no verdict, exit status {os.WEXITSTATUS(status)}")
    first, _, fault = verdict.read_text().partition("\n")
    said = (folder / "stderr").read_text(errors="replace").splitlines()
    return Outcome(number, first, fault, said[-1] if said else "")


def _start(maker: Maker, number: int, folder: Path) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        _child(maker, number, folder)
    except BaseException:  # a fault of the fuzzer itself, or of what judges
        (folder / "verdict").write_text(f"?\nfuzzer: {traceback.format_exc()}")
    finally:
        os._exit(0)


def _child(maker: Maker, number: int, folder: Path) -> None:
    os.setpgid(0, 0)
    os.chdir(folder)
    for name, stream in (("stdout", 1), ("stderr", 2)):
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    tempfile.tempdir = str(folder)
    case = maker(number, folder)
    if case.kept is not None:
        kind, broken = case.kept
        shutil.copy(broken, folder / f"{KEPT}{kind}")  # before the command may change it
    limit = _address_space() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    status, place = run_command(case.arguments)
    text = (folder / "stderr").read_text(errors="replace")
    fault = fault_of(status, text, place, case.statuses)
    if status == 0 and not fault:
        fault = case.judge()
    (folder / "verdict").write_text(f"{status}\n{fault}")


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def run_command(arguments: list[str]) -> tuple[int, str]:
    """The exit status of a command, and the traceback of what it reported."""
    places = []

    def watched(error: BaseException) -> None:
        places.append("".join(traceback.format_exception(error)[-6:]))
        report(error)

    cli.report = watched  # type: ignore[attr-defined]
    try:
        status = _run_session(arguments[1]) if arguments[0] == SESSION else cli.main(arguments)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status, places[0] if places else ""


def _run_session(par: str) -> int:
    """Ends as a command does."""
    try:
        run_once(Path(par))
    except OnnxparError as error:
        report(error)
        return 2
    return 0


def fault_of(status: int, text: str, place: str = "", statuses: tuple[int, ...] = (0, 2)) -> str:
    """What is wrong with an exit status and the text on standard error."""
    every = [line for line in text.splitlines() if line]
    lines = [n for n in every if not n.startswith("onnxpar:") or n.startswith("onnxpar: error: ")]
    if any(word in text for word in ("Traceback", "internal error")):
        return f"traceback: {lines[-1][:200] if lines else ''}\n{place}"
    if "not enough memory" in text:
        return f"memory: {lines[-1][:200]}\n{place}"
    if status in {*statuses} - {2}:
        return ""
    if status != 2:
        return f"exit status {status}: {text[-300:]}"
    if len(lines) != 1 or not lines[0].startswith("onnxpar: error: "):
        return f"{len(lines)} lines instead of one: {text[:400]}\n{place}"
    return ""


def refusal(model: Path) -> str:
    """Why onnxruntime does not load a file. Nothing where it does, or would if another execution
    provider has a kernel that the CPU lacks, or a library of custom ops an op of its own domain: a
    plan for that is no harm."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        ort.InferenceSession(str(model), options, ["CPUExecutionProvider"])
    except REFUSED as error:
        text = str(error)
        return "" if "NOT_IMPLEMENTED" in text or has_ops_of_others(model) else text
    except UnicodeDecodeError as error:  # of what it says
        return str(error)
    return ""


def has_ops_of_others(file: Path) -> bool:
    """Whether there are ops, also in functions, that neither the file nor the runtime defines, of
    domains that are not the runtime's."""
    model = onnx.load(file, load_external_data=False)
    known = {(f.domain, f.name) for f in model.functions}
    domains = {s.domain for s in ort.capi.onnxruntime_pybind11_state.get_all_operator_schema()}
    nodes = [m for m in messages(model) if m.DESCRIPTOR.name == "NodeProto"]
    ops = {(n.domain, n.op_type) for n in nodes}
    return any(domain not in {*domains, "ai.onnx"} for domain, _ in ops - known)


def chance_of(*seed: object) -> random.Random:
    """A source of chance for one case."""
    return random.Random(" ".join(map(str, seed)))


def tally(outcomes: Iterable[Outcome], show: Callable[[Outcome], None]) -> Mapping[str, int]:
    """How many ended with 0, were refused, and are faults, each of which is shown at once."""
    counts = {"right": 0, "refused": 0, "faults": 0}
    for outcome in outcomes:
        if outcome.fault:
            show(outcome)
        counts["faults" if outcome.fault else "right" if outcome.status == "0" else "refused"] += 1
    return counts


@contextlib.contextmanager
def made_apart(make: Callable[[Path], None]) -> Iterator[Path]:
    """A folder that `make` fills in a child, so that no thread is started in this process, from
    which others are forked."""
    folder = Path(tempfile.mkdtemp(prefix="onnxpar-fuzz-"))
    try:
        pid = os.fork()
        if not pid:
            try:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                make(folder)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        assert os.waitpid(pid, 0)[1] == 0, "the corpus could not be made"
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
