"""Whatever is typed, and however a command is ended: one line, and the status that says so."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from onnxpar.base.interrupts import Terminated
from onnxpar.cli.command_line import main
from onnxpar.cli.command_parser import CommandParser
from onnxpar.cli.parser import parser

Capture = pytest.CaptureFixture[str]
WRONG = {
    "number": ("shard m.onnx --devices x", "shard: --devices: 'x' is not a whole number"),
    "fraction": ("shard m.onnx --devices 2.5", "'2.5' is not a whole number"),
    "no number": ("train s.par --data d.npz --lr nan", "--lr: 'nan' is not a finite number"),
    "no --": ("launch --hosts a:1 run m.par --inputs i.npz", "put -- before the command to run"),
    "seconds": ("calibrate --seconds nan", "--seconds: 'nan' is not a finite number"),
    "infinity": ("run m.par --inputs i.npz --timeout inf", "--timeout: 'inf' is not a finite"),
    "tolerance": ("check m.onnx --rtol x", "--rtol: x: must be a number"),
    "choice": ("shard m.onnx --preset tensorparallel", "did you mean tensor-parallel?"),
    "choices": ("shard m.onnx --search 3", "auto, data-parallel, tensor-parallel"),
    "nothing": ("plan m.onnx --compare ", "an argument is empty"),
    "mesh": ("plan m.onnx --mesh dp", "'dp' is not NAME=SIZE"),
    "large mesh": ("plan m.onnx --mesh dp=65536,tp=65536", "give at most 1,048,576"),
    "flag": ("shard m.onnx --devcies 2", "there is no --devcies (did you mean --devices?)"),
    "flag before what is missing": ("run m.par --imputs i.npz", "did you mean --inputs?"),
    "flag of another": ("shard m.onnx --devices 2 --html p.html", "no --html; plan has it; see"),
    "flag of others": ("annotate m.onnx --each", "there is no --each"),
    "letter": ("shard m.onnx -x", "there is no -x"),
    "first letter": ("shard m.onnx -t 2", "there is no -t (did you mean --topology or --typical"),
    "first flag": ("--devices 2 shard m.onnx", "there is no --devices"),
    "two flags in one": ("shard m.onnx --d 2", "--devices, --dim, --dataset-strategy, --dump"),
    "command": ("shrad m.onnx", "there is no command 'shrad' (did you mean shard?)"),
    "command within": ("checkpoint merg", "did you mean merge?"),
    "missing": ("shard", "shard: give model.onnx"),
    "missing flags": ("grad m.onnx", "grad: give -o/--output, --loss, --optimizer"),
    "no value": ("train s.par --data", "--data: expected one argument"),
    "too many": ("plan a.onnx b.onnx", "unexpected argument 'b.onnx'"),
}


def test_help_is_a_command_too(capsys: Capture) -> None:
    told = []
    for arguments in (["help", "shard"], ["shard", "--help"], ["help"], ["--help"]):
        with pytest.raises(SystemExit, match="0"):
            main(arguments)
        told.append(capsys.readouterr().out)
    assert told[0] == told[1] != told[2] == told[3]


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case: str, capsys: Capture) -> None:
    arguments, words = WRONG[case]
    with pytest.raises(SystemExit, match="2"):
        main(arguments.split(" "))
    told = capsys.readouterr()
    assert told.err.startswith("onnxpar: error: ") and told.err.count("\n") == 1, told.err
    assert words in told.err and "--help`" in told.err
    assert told.out == ""


@pytest.mark.parametrize("command", [[], ["checkpoint"]])
def test_help_where_no_command_is_given(command: list[str], capsys: Capture) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(command)
    told = capsys.readouterr()
    assert "COMMAND" in told.out and told.err == ""


def test_numbers_and_files_that_look_like_flags() -> None:
    args = parser().parse_args(["check", "m.onnx", "--lr", "-1", "--seed=-3"])
    assert (args.lr, args.seed) == (-1.0, -3)
    assert parser().parse_args(["run", "--inputs", "i.npz", "--", "-m.par"]).par == "-m.par"
    assert parser().parse_args(["plan", "m.onnx", "--dev", "4"]).devices == 4
    assert isinstance(parser(), CommandParser)


STARTS = {
    "installed": [str(Path(sys.executable).with_name("onnxpar"))],
    "module": [sys.executable, "-m", "onnxpar"],
}


@pytest.mark.matrix
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize(
    "number,status,word",
    [
        (signal.SIGINT, 130, "interrupted"),
        (signal.SIGTERM, 143, "terminated"),
        (signal.SIGHUP, 129, "terminated, because its terminal was closed"),
    ],
)
@pytest.mark.parametrize("seen", ["numpy", "onnxruntime"])
def test_ended_during_imports(
    seen: str, number: signal.Signals, status: int, word: str, start: str, tmp_path: Path
) -> None:
    """A signal comes while a module is imported, which then tells so and waits for it."""
    (tmp_path / f"{seen}.py").write_text(
        "import sys, time\nsys.stdout.write('ready\\n'); sys.stdout.flush()\ntime.sleep(60)\n"
    )
    process = subprocess.Popen(
        [*STARTS[start], "ops"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    _, error = process.communicate(timeout=30)
    assert (process.returncode, error) == (status, f"onnxpar: {word}\n")


def test_importing_the_package_leaves_signals_alone() -> None:
    code = "import signal, onnxpar; assert signal.getsignal(signal.SIGINT) is "
    code += "signal.default_int_handler; assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("command", [["ops"], ["plan", "--help"]])
def test_a_reader_that_goes_away(command: list[str], start: str) -> None:
    process = subprocess.Popen(
        [*STARTS[start], *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    error = process.stderr.read()
    assert (process.wait(timeout=60), error) == (0, b"")


@pytest.mark.slow
def test_no_standard_output_at_all() -> None:
    line = f"{sys.executable} -m onnxpar ops Relu >&- 2>&-"
    assert subprocess.run(["sh", "-c", line], timeout=60).returncode == 0


@pytest.mark.slow
def test_a_second_interrupt_does_not_stop_the_cleaning() -> None:
    code = """if True:
        import signal, sys, tempfile, time
        from onnxpar.cli import commands
        from onnxpar.cli import main
        def slow(args):
            try:
                print("ready", flush=True)
                time.sleep(60)
            finally:
                print("cleaning", flush=True)
                time.sleep(1)
                print("clean", flush=True)
        commands.ops = slow
        sys.exit(main(["ops"]))
    """
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in ("ready\n", "cleaning\n"):
        assert process.stdout.readline() == line
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
    out, error = process.communicate(timeout=30)
    assert (process.returncode, out, error) == (130, "clean\n", "onnxpar: interrupted\n")


def test_the_end_in_the_middle_of_an_import(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """Which libraries that are written with pybind11 turn into an ImportError."""

    def command(args: argparse.Namespace) -> int:
        raise ImportError("initialization failed") from Terminated(signal.SIGTERM)

    given = argparse.Namespace(command=command)
    monkeypatch.setattr("onnxpar.cli.command_line.arguments", lambda argv: given)
    assert main(["run"]) == 143
    assert capsys.readouterr().err == "onnxpar: terminated\n"
