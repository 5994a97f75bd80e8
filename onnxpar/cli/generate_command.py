"""The command `generate`: its arguments, and the text that it prints."""

from __future__ import annotations

import argparse
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from onnxpar.base.errors import InputError
from onnxpar.base.quick_imports import quick_imports
from onnxpar.cli.rank_options import (
    add_cores,
    add_launcher_help,
    add_library,
    add_runtime,
    add_verify,
)
from onnxpar.runtime.launch.launch import launched_rank
from onnxpar.runtime.ranks.redirect import redirect_output

_NUMBERS: Mapping[str, tuple[type, str]] = {
    "temperature": (float, "logits are divided by it (default 1); 0 is greedy"),
    "top_k": (int, "draw one of the N likeliest tokens (default 50); 0: of all"),
    "top_p": (float, "draw one of the likeliest tokens that have this probability together"),
    "min_p": (float, "draw one of the tokens with this fraction of the likeliest's probability"),
    "seed": (int, "the same seed draws the same tokens (default 0)"),
}
"""Options of `generate` that say how tokens are drawn: type and help by name."""


def add_generate(to: Any) -> None:
    """Adds the command `generate` to a parser's commands."""
    text = "continue a text, answer a chat, or write down speech, with a sharded language model"
    command = to.add_parser(
        "generate",
        help=text,
        description=textwrap.fill(  # add_launcher_help has texts printed as they are
            f"{text.capitalize()}. Prints the text as its tokens come, and the speed on standard "
            "error. `onnxpar shard FOLDER -o llm.par` makes llm.par of a folder that holds a "
            "decoder, or an encoder and a decoder (T5, BART, Whisper), the configuration and "
            "tokenizer.json.",
            width=78,
        ),
    )
    command.set_defaults(command=generate)
    command.add_argument("par", metavar="llm.par", help="folder that shard wrote")
    command.add_argument("prompt", nargs="?", help="the text to continue, or the user's message")
    command.add_argument(
        "--file",
        type=Path,
        metavar="FILE",
        help="read the prompt from a file; - for standard input",
    )
    command.add_argument(
        "--audio",
        type=Path,
        metavar="FILE",
        help="what a speech model hears: a WAV file, or FILE.npy with samples of one channel at "
        "the model's rate, or with features; a longer sound in windows of the model's length, one "
        "after the other",
    )
    command.add_argument(
        "--language",
        metavar="NAME",
        help="with --audio: the language that is spoken, such as de (default: the likeliest); of a "
        "translator: the special token of the language to translate to, such as deu_Latn",
    )
    command.add_argument(
        "--task",
        choices=("transcribe", "translate"),
        help="with --audio: write down what is said, or translate it to English",
    )
    command.add_argument(
        "--chat",
        action="store_true",
        help="treat the prompt as a user's message, and put it into the model's chat template; "
        "without a prompt, read messages from the terminal and answer each, until the end of "
        "input; a talk that outgrows the model's context loses its oldest messages",
    )
    command.add_argument("--system", metavar="TEXT", help="the system message of a chat")
    command.add_argument(
        "--max-new-tokens", type=int, default=256, metavar="N", help="most new tokens (default 256)"
    )
    command.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end the answer before this text",
    )
    command.add_argument(
        "--sample", action="store_true", help="draw tokens; default: the likeliest (greedy)"
    )
    for name, (kind, meaning) in _NUMBERS.items():
        flag = f"--{name.replace('_', '-')}"
        metavar = "N" if kind is int else "X"
        command.add_argument(flag, type=kind, metavar=metavar, help=f"with --sample: {meaning}")
    command.add_argument(
        "--repetition-penalty",
        type=float,
        metavar="X",
        help="above 1: tokens that are already in the text become less likely",
    )
    add_launcher_help(command)
    add_verify(command)
    add_cores(command)
    add_runtime(command)
    add_library(command)


def generate(args: argparse.Namespace) -> int:
    """Runs `generate`; returns the exit status."""
    prompt = _prompt(args)
    options = _options(args)
    rank = launched_rank()
    if rank is not None:  # all ranks generate the same, and one prints it
        redirect_output(args.log_dir or "log", rank, stdout=rank.rank != 0)
    with quick_imports():
        from onnxpar.cli.generate_talk import talk
        from onnxpar.llm.generator import Generator

    with Generator(
        args.par,
        timeout=args.timeout,
        log_dir=args.log_dir if rank is None else None,
        verify=args.verify,
        threads=args.threads,
        bind=args.bind,
        ranks_per_numa=args.ranks_per_numa,
    ) as generator:
        if args.language is not None and not generator.model.has_encoder:
            raise InputError("--language is for speech models and translators; leave it out")
        if args.audio is not None:
            for what, sound in _sounds(args.audio, generator):
                _answer(generator, sound, options, what)
            return 0
        chat = [{"role": "system", "content": args.system}] if args.system is not None else []
        if not args.chat:
            assert prompt is not None, "only a chat may begin without a prompt"
            _answer(generator, prompt, options)
        elif prompt is not None:
            _answer(generator, [*chat, {"role": "user", "content": prompt}], options)
        else:
            talk(generator, chat, lambda so_far: _answer(generator, so_far, options))
    return 0


def _prompt(args: argparse.Namespace) -> str | None:
    """Returns the text of the prompt, from an argument, a file or standard input; None for a chat
    on the terminal, or for speech. Errors: InputError."""
    if args.audio is not None:
        text_options = (args.prompt, args.file, args.system, args.chat or None)
        if any(value is not None for value in text_options):
            raise InputError("--audio is the prompt: leave other prompts and --chat out")
        return None
    if args.task is not None:
        raise InputError("--task is for speech: add --audio FILE")
    if args.system is not None and not args.chat:
        raise InputError("--system is for chats: add --chat")
    if args.prompt is not None and args.file is not None:
        raise InputError("give a prompt or --file, not both")
    if args.file is not None:
        try:
            if str(args.file) == "-":
                return sys.stdin.read()
            return str(args.file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"--file {args.file}: cannot read it as text: {error}") from None
    if args.prompt is None and not args.chat:
        raise InputError('give a prompt: onnxpar generate llm.par "Once upon a time"; or --chat')
    return None if args.prompt is None else str(args.prompt)


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the keyword arguments of `Generator.generate`. Errors: InputError."""
    if args.max_new_tokens < 1:
        raise InputError(f"--max-new-tokens is {args.max_new_tokens}; it must be at least 1")
    options = {name: getattr(args, name) for name in _NUMBERS if getattr(args, name) is not None}
    if options and not args.sample:
        raise InputError(f"--{next(iter(options)).replace('_', '-')} is for drawing: add --sample")
    if args.repetition_penalty is not None:
        options["repetition_penalty"] = args.repetition_penalty
    texts = {"language": args.language, "task": args.task}
    options |= {name: value for name, value in texts.items() if value is not None}
    return {
        **options,
        "do_sample": args.sample,
        "max_new_tokens": args.max_new_tokens,
        "stop_strings": args.stop,
    }


def _sounds(file: Path, generator: Any) -> Iterator[tuple[str, Any]]:
    """Yields (text about its length, samples) for each window of a sound file, such as ("30.0 s of
    sound", array); a .npy file of features is one window. Errors: InputError."""
    import numpy as np

    from onnxpar.llm.sound import read_wave

    if not generator.hears:
        raise InputError(f"--audio {file}: the model reads text, not sound; give a text")
    if file.suffix == ".npy":
        try:
            array = np.load(file, allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise InputError(f"--audio {file}: cannot read it as an array: {error}") from None
        if array.dtype.kind != "f" or array.ndim not in (1, 2):
            raise InputError(
                f"--audio {file}: it has {array.dtype} {list(array.shape)}; give samples between "
                "-1 and 1 in one dimension, or features in two"
            )
        if array.ndim == 2:
            yield "features", array
            return
    else:
        array = read_wave(file, generator.sound.rate)
    for window in generator.sound.windows(array):
        yield f"{len(window) / generator.sound.rate:.1f} s of sound", window


def _answer(generator: Any, prompt: Any, options: Mapping[str, Any], what: str = "") -> str:
    """Prints an answer token by token on standard output, and its speed on standard error; returns
    the answer. `what` describes a prompt that is no text: "30.0 s of sound"."""
    times = [time.perf_counter()]
    completion = None
    for piece, completion in generator.follow(prompt, **options):  # noqa: B007 (the last one counts)
        times.append(time.perf_counter())
        print(piece, end="", flush=True)
    print(flush=True)
    assert completion is not None, "at least one token is generated"
    first, count = times[1] - times[0], len(completion.tokens)
    speed = f"; then {(count - 1) / (times[-1] - times[1]):.1f} tokens/s" if count > 1 else ""
    print(
        f"onnxpar: {what or f'{completion.prompt} tokens'} read, the first new one after "
        f"{first:.2f} s{speed} ({count} new, ended by {completion.reason})",
        file=sys.stderr,
    )
    return str(completion.text)
