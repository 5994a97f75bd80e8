"""Cases of broken configurations: strategies, topologies, plans, checkpoints, arrays, annotations
and arguments."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import yaml
from fuzz.corpus import FOUND, MODELS, tiny
from fuzz.mutate import mutated
from fuzz.trial import Case, chance_of, run_command

from onnxpar.base.digests import sealed
from onnxpar.cli.parser import parser

STRATEGY = {
    "mesh": {"dp": 2, "tp": 2},
    "shard": {"mm": [["dp", None], [None, "tp"]], "Relu_*": [[["dp"], 1]], "Add_b": {"a": "dp"}},
    "tensors": {"x": ["dp", None], "h": ["dp", {"tp": [1, 3]}], "y": "dp, -"},
}
TOPOLOGY = {
    "levels": [
        {"name": "host", "size": 2, "latency": "50 us", "bandwidth": "2 GB/s"},
        {"name": "rack", "latency": 1e-4, "bandwidth": 1e9, "collectives": {
            "AllReduce": {"latency": "60 us", "bandwidth": "1 GB/s"}}},
    ],
    "device": {"flops": "20 GFLOP/s", "memory_bandwidth": "10 GB/s", "memory": "1 GB"},
}  # fmt: skip
RANK_TABLE = {
    "version": "1.0",
    "server_count": "1",
    "server_list": [{"server_id": "a", "device": [
        {"device_id": "0", "device_ip": "1.2.3.4", "rank_id": str(i)} for i in range(4)]}],
}  # fmt: skip
VALUES = (
    None, True, False, 0, 1, -1, 2, 3, 4, 1 << 31, 1 << 40, 10**30, -(1 << 63), 0.5, 1e400, -0.0,
    float("nan"), "", "tp", "dp", "x", "abc", "-1", "\0", "é", "1e9", "1e99999", "2 GB", "x" * 2000,
    [], {}, [[]], [None], {"tp": 2}, {"tp": [1, 3]}, {"tp": [1, "a"]}, ["dp", "tp"], ["dp", "dp"],
    {"": 1}, [1, 2, 3], [[["dp"]]], {"a": {"b": {}}}, "tp:(2)1", "dp:(1)2", "*", "[", "(", "4 x dp",
)  # fmt: skip
RAW = (
    "!!timestamp 2020-99-99", "!!timestamp x", "!!python/object:os.system x", "!!binary '%%%'",
    "!!int 0x", "!!float abc", "!!set {a, b}", "!!omap [a: 1]", "!!pairs [a]", "2020-99-99",
    "1:99:99", "&a [*a]", "&a {b: *a}", "*gone", "{[a]: 1}", "{{a: 1}: 2}", "? [a, b]\n  : 1",
    "\t", "@", "%", "|", "!!merge x", "<<: 1", "{<<: [1]}", "0b", "0x", "1_000", ".inf", "!!null x",
    "!!bool abc", "2001-12-14t21:59:43.10-05:00", "9" * 5000, "[" * 3000, "- " * 2000, "\x7f",
    "\u2028",
)  # fmt: skip
WORDS = (
    "", "0", "1", "-1", "2", "3", "abc", "1e9", "nan", "inf", "-inf", "99999999999999999999", "0.5",
    "é", "\udcff", "a=b", "a=", "=b", "n=2", "n=0", "n=-1", "n=99999999999", "n=n", "n=n+1", "n=(",
    "n=1/0", "n=9**9**9", "n=n*n", "n=m", "dp=2", "dp=0", "dp=2,dp=2", "dp=2,tp=2", "dp=1048577",
    "dp=2,", "dp", "none", "auto", "x=y", "x=gone", "y=x", "16GB", "16", "-1GB", "1B", "0B",
    "1e999GB",
    "/", ".", "/dev/null", "gone", "*", "[", "2bit:nan", "2bit:-1", "2bit:", "float16", "\n",
    "list",
    "annotate-strategy", "no-such-pass", "drop{a=1}", "a before b", "a{",
    "fuse-all-reduces{size=x}",
    "x" * 5000, "m.onnx", "in.npz", "json", "n=1:abc", "n=1:inf", "n=1:-1", "²", "٣", "1_0",
    "0x10", " 2 ",
)  # fmt: skip
STARTS = {
    "plan": ["m.onnx", "--devices", "2"],
    "grad": ["m.onnx", "-o", "s.onnx", "--loss", "mse", "--optimizer", "sgd"],
    "opt": ["m.onnx", "--devices", "2", "--passes", "annotate-strategy,propagate-layouts"],
    "run": ["m.par", "--inputs", "gone.npz"],
    "train": ["step.par", "--data", "gone.npz", "--lr", "0.1"],
    "check": ["m.onnx", "--devices", "2", "--inputs", "gone.npz"],
}
UNTRIED = ("help", "time_passes")
"""Options that print more lines than an error."""
COMMANDS = next(action.choices for action in parser()._actions if isinstance(action.choices, dict))
FLAGS = {
    name: [a for a in COMMANDS[name]._actions if a.option_strings and a.dest not in UNTRIED]
    for name in STARTS
}
"""The options of each command."""
MERGE = ["checkpoint", "merge", "checkpoints", "m.onnx", "-o", "merged.onnx"]


def make_base(folder: Path) -> None:
    """What the cases begin with: models, sharded ones, arrays, and a checkpoint."""
    os.chdir(folder)
    onnx.save(tiny("product"), "m.onnx")
    onnx.save(tiny("open"), "open.onnx")
    np.savez("in.npz", x=np.ones((8, 16), np.float32))
    np.savez("data.npz", x=np.ones((8, 16), np.float32), target=np.ones((8, 4), np.float32))
    commands = (
        "shard m.onnx -o m.par --devices 2 --preset data-parallel",
        "shard open.onnx -o open.par --devices 2 --preset data-parallel",
        "annotate m.onnx -o annotated.onnx --mesh dp=2,tp=2 --preset hybrid",
        "grad m.onnx -o step.onnx --loss mse --optimizer adamw",
        "shard step.onnx -o step.par --devices 2 --preset data-parallel",
        f"shard {MODELS / 'llm/llama'} -o llm.par --devices 2",
    )
    for command in commands:
        status, why = run_command(command.split())
        assert status == 0, f"{command}: {why}"
    step = json.loads(Path("step.par/plan.json").read_text())
    target = next(n for n in step["step"]["data"] if n != "x")
    np.savez("data.npz", **{"x": np.ones((8, 16), np.float32), target: np.ones((8, 4), np.float32)})
    train = "train step.par --data data.npz --lr 0.1 --checkpoint checkpoints --log-dir log"
    status, why = run_command(train.split())
    assert status == 0, why


class Configurations:
    """The cases of one seed, of files that `make_base` has made."""

    def __init__(self, seed: int, base: Path) -> None:
        self.seed, self.base = seed, base

    def __call__(self, number: int, folder: Path) -> Case:
        chance = chance_of("configuration", self.seed, number)
        for each in self.base.iterdir():
            copy = shutil.copytree if each.is_dir() else shutil.copy
            copy(each, folder / each.name)
        kind = chance.choices(_KINDS, [weight for _, weight in _KIND_WEIGHTS])[0]
        arguments = kind(folder, chance)
        return Case(arguments, lambda: "", _kept(folder, arguments))


KEPT = {
    "s.yaml": "strategy",
    "t.yaml": "topology",
    "a.onnx": "annotations",
    "in.npz": "arrays",
    "checkpoints": "checkpoint",
}
"""The kind of the file that a case has broken, by what its arguments name."""


def plan_kind(par: str) -> str:
    """The kind of the plan of a sharded model of `make_base`."""
    return f"plan-{par.removesuffix('.par')}"


def _kept(folder: Path, arguments: list[str]) -> tuple[str, Path] | None:
    if arguments[0] == "inspect":
        return plan_kind(arguments[1]), folder / arguments[1] / "plan.json"
    for name in arguments:
        if name == "checkpoints":
            return KEPT[name], next((folder / name).glob("step_*/checkpoint.json"))
        if name in KEPT:
            return KEPT[name], folder / name
    return None


def spoiled(data: Any, chance: random.Random) -> Any:
    """The structure with one or two of its places replaced, removed or repeated."""
    data = json.loads(json.dumps(data))
    for _ in range(chance.choice((1, 1, 2))):
        places = list(_places(data))
        if not places:
            return chance.choice(VALUES)
        holder, key = chance.choice(places)
        way = chance.random()
        if way < 0.15:
            del holder[key]
        elif way < 0.3 and isinstance(holder, dict):
            holder[chance.choice(("", "x", "0", "tp", "gone", "mm", "*", "é", "[!", "h", "w"))] = (
                holder.pop(key)
            )
        elif way < 0.4 and isinstance(holder, list):
            holder.insert(key, holder[key])
        elif way < 0.5:
            other, at = chance.choice(places)
            holder[key] = (
                json.loads(json.dumps(other[at]))
                if at in other or (isinstance(other, list) and at < len(other))
                else None
            )
        else:
            holder[key] = chance.choice(VALUES)
        data = json.loads(json.dumps(data))
    return data


def _places(data: Any) -> Any:
    for key, value in (
        data.items()
        if isinstance(data, dict)
        else enumerate(data)
        if isinstance(data, list)
        else ()
    ):
        yield data, key
        yield from _places(value)


def _yaml(data: Any, chance: random.Random) -> bytes:
    """A structure as the bytes of a file, broken as text at times."""
    text = yaml.safe_dump(spoiled(data, chance) if chance.random() < 0.7 else data)
    way = chance.random()
    if way < 0.3:
        lines = text.splitlines()
        at = chance.randrange(len(lines))
        head, colon, _ = lines[at].partition(":")
        lines[at] = f"{head}{colon} {chance.choice(RAW)}"
        text = "\n".join(lines)
    raw = text.encode("utf-8", "surrogatepass")
    return damaged(raw, chance) if way > 0.93 else raw


def _seed(kind: str, chance: random.Random) -> bytes:
    """At times, a file that was kept, broken once more; else nothing."""
    kept = sorted((FOUND / kind).glob("*"))
    if not kept or chance.random() < 0.75:
        return b""
    raw = chance.choice(kept).read_bytes()
    try:
        return _yaml(yaml.safe_load(raw), chance)
    except (yaml.YAMLError, LookupError, ValueError, TypeError, AttributeError, RecursionError):
        return damaged(raw, chance)


def damaged(raw: bytes, chance: random.Random) -> bytes:
    data = bytearray(raw)
    for _ in range(chance.choice((1, 3, 10))):
        data[chance.randrange(len(data))] = chance.randrange(256)
    return bytes(data[: chance.randrange(len(data))] if chance.random() < 0.4 else data)


def _strategy(folder: Path, chance: random.Random) -> list[str]:
    (folder / "s.yaml").write_bytes(_seed("strategy", chance) or _yaml(STRATEGY, chance))
    model = chance.choice(("m.onnx", "m.onnx", "step.onnx"))
    more = chance.choice(([], [], ["--preset", "data-parallel"], ["--preset", "manual"]))
    return ["plan", model, "--strategy", "s.yaml", *more]


def _topology(folder: Path, chance: random.Random) -> list[str]:
    data = chance.choice((TOPOLOGY, TOPOLOGY, RANK_TABLE))
    (folder / "t.yaml").write_bytes(_seed("topology", chance) or _yaml(data, chance))
    return ["plan", "m.onnx", "--devices", "4", "--topology", "t.yaml"]


def _json(file: Path, chance: random.Random) -> None:
    """Spoils a file of JSON; half of those with a seal get a new one, so that they are read."""
    before = json.loads(file.read_text())
    data = spoiled(before, chance)
    text = json.dumps(data)
    way = chance.random()
    if "sha256" in before and isinstance(data, dict) and chance.random() < 0.5:
        text = sealed(data)
    file.write_bytes(damaged(text.encode(), chance) if way < 0.1 else text.encode())


def _plan_file(folder: Path, chance: random.Random) -> list[str]:
    par = chance.choice(("m.par", "m.par", "open.par", "step.par"))
    _json(folder / par / "plan.json", chance)
    if chance.random() < 0.7 or par == "step.par":
        return ["inspect", par, *chance.choice(([], ["--json"]))]
    return ["run", par, "--inputs", chance.choice(("in.npz", "gone.npz")), "--timeout", "10"]


def _checkpoint(folder: Path, chance: random.Random) -> list[str]:
    file = next((folder / "checkpoints").glob("step_*/checkpoint.json"))
    _json(file, chance)
    return MERGE


def _annotations(folder: Path, chance: random.Random) -> list[str]:
    model = onnx.load(folder / "annotated.onnx")
    only = ("device_configurations", "configuration", "metadata_props")
    (folder / "a.onnx").write_bytes(mutated(model, chance, only))
    return ["plan", "a.onnx", *chance.choice(([], ["--devices", "4"], ["--configuration", "x"]))]


def _arrays(folder: Path, chance: random.Random) -> list[str]:
    (folder / "in.npz").write_bytes(_npz(chance))
    way = chance.random()
    if way < 0.7:
        return ["run", "m.par", "--inputs", "in.npz", "--timeout", "10"]
    return [
        "train",
        "step.par",
        "--data",
        "in.npz",
        "--lr",
        "0.1",
        "--timeout",
        "10",
        "--log-dir",
        "log",
    ]


_HEADERS = (
    "{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776, 16), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (-1, 16), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (8, 16, 99999999999999999999999), }",
    "{'descr': '|V1099511627776', 'fortran_order': False, 'shape': (1,), }",
    "{'descr': '<f4', 'fortran_order': 'x', 'shape': (8, 16), }",
    "{'descr': '|O', 'fortran_order': False, 'shape': (8, 16), }",
    "{'descr': 'abc', 'fortran_order': False, 'shape': (8, 16), }",
    "{'descr': '<f4', 'shape': (8, 16), }", "{}", "", "[", "(" * 500, "{'descr': [('a', '<f4')],"
    " 'fortran_order': False, 'shape': (8, 16), }",
    "{'descr': ('<f4', (2,)), 'fortran_order': False,"
    " 'shape': (8,), }", "{'descr': '<M8[s]', 'fortran_order': False, 'shape': (8, 16), }",
    "{'descr': '<U9', 'fortran_order': False, 'shape': (8, 16), }", "1" * 5000, "\0" * 100,
    "{'descr': '<f4', 'fortran_order': False, 'shape': (True, 16), }", "-" * 9000 + "1",
    "{'descr': '<f4', 'fortran_order': False, 'shape': 8, }", "9" * 70000,
    "{'descr': '<f4', 'fortran_order': False, 'shape': (4294967296, 4294967296, 0), }",
    "{'descr': '>f4', 'fortran_order': True, 'shape': (8, 16), }",
)  # fmt: skip


def _npz(chance: random.Random) -> bytes:
    way = chance.random()
    sink = io.BytesIO()
    if way < 0.4:
        text = chance.choice(_HEADERS).encode()
        version = chance.choice((1, 1, 2, 3, 9))
        form = "<H" if version == 1 else "<I"
        length = len(text) % 65536 if version == 1 else len(text)
        length = chance.choice((length, length, length, 65535 if version == 1 else 1 << 31))
        member = b"\x93NUMPY" + bytes((version, 0)) + struct.pack(form, length) + text + bytes(512)
        with zipfile.ZipFile(sink, "w") as archive:
            archive.writestr("x.npy", member)
        return sink.getvalue()
    if way < 0.8:
        shape = chance.choice(((8, 16), (8,), (), (0, 16), (8, 16, 1)))
        dtype = chance.choice(("f4", "f8", "i4", "?", "U3", "c8", "O", "M8[s]", "S2", "f2"))
        name = chance.choice(("x", "x", "", "y", "a/b", "é", "../x"))
        with np.errstate(all="ignore"):
            np.savez(sink, **{name: np.zeros(shape).astype(dtype)})
        return sink.getvalue() if way < 0.6 else damaged(sink.getvalue(), chance)
    np.savez_compressed(sink, x=np.ones((8, 16), np.float32))
    return damaged(sink.getvalue(), chance)


def _arguments(folder: Path, chance: random.Random) -> list[str]:
    command = chance.choices((*FLAGS,), (8, 5, 3, 1, 1, 1))[0]
    words = [command, *STARTS[command]]
    if command in ("plan", "opt") and chance.random() < 0.3:
        words[1] = "open.onnx"
    for _ in range(chance.choice((1, 1, 2))):
        flag = chance.choice(FLAGS[command])
        words.append(flag.option_strings[-1])
        if flag.nargs != 0:
            known = list(map(str, flag.choices or ()))
            words.append(chance.choice(known if known and chance.random() < 0.5 else WORDS))
    return words


_KIND_WEIGHTS: tuple[tuple[Callable[[Path, random.Random], list[str]], int], ...] = (
    (_strategy, 30), (_topology, 14), (_plan_file, 14), (_checkpoint, 8),
    (_annotations, 10), (_arrays, 8), (_arguments, 24),
)  # fmt: skip
_KINDS = tuple(kind for kind, _ in _KIND_WEIGHTS)
