"""The command `generate`: its arguments, and what it prints."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onnxpar.base.quick_imports import quick_imports
from onnxpar.cli.rank_options import add_cores, add_launcher_help, add_runtime, add_verify
from onnxpar.errors import InputError
from onnxpar.runtime.launch import launched_rank
from onnxpar.runtime.redirect import redirect_output

_NUMBERS: Mapping[str, tuple[type, str]] = {
    "temperature": (float, "logits are divided by it (default 1); 0 is greedy"),
    "top_k": (int, "draw one of the N likeliest tokens (default 50); 0: of all"),
    "top_p": (float, "draw one of the likeliest tokens that have this probability together"),
    "min_p": (float, "draw one of the tokens with this fraction of the likeliest's probability"),
    "seed": (int, "the same seed draws the same tokens (default 0)"),
}
"""Options that say how tokens are drawn: type and help."""


def add_generate(to: Any) -> None:
    """Adds the command to the commands of a parser."""
    text = "continue a text, or answer a chat, with a sharded language model"
    command = to.add_parser(
        "generate",
        help=text,
        description=f"{text.capitalize()}. Prints the text as its tokens come, and the speed on "
        "standard error. `onnxpar shard FOLDER -o llm.par` makes llm.par of a folder that holds a "
        "decoder, its configuration and tokenizer.json.",
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
        "--chat",
        action="store_true",
        help="treat the prompt as a user's message, and put it into the model's chat template; "
        "without a prompt, read messages from the terminal and answer each, until the end of input",
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


def generate(args: argparse.Namespace) -> int:
    """Runs `generate`. Returns the exit status."""
    prompt = _prompt(args)
    options = _options(args)
    rank = launched_rank()
    if rank is not None:  # all ranks generate the same, and one prints it
        redirect_output(args.log_dir or "log", rank.rank, stdout=rank.rank != 0)
    with quick_imports():
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
        chat = [{"role": "system", "content": args.system}] if args.system is not None else []
        if not args.chat:
            assert prompt is not None, "only a chat may begin without a prompt"
            _answer(generator, prompt, options)
        elif prompt is not None:
            _answer(generator, [*chat, {"role": "user", "content": prompt}], options)
        else:
            _talk(generator, chat, options)
    return 0


def _prompt(args: argparse.Namespace) -> str | None:
    """The text of the prompt; None for a chat on the terminal. Errors: InputError."""
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
    """The options of `Generator.generate`. Errors: InputError."""
    drawn = {name: getattr(args, name) for name in _NUMBERS if getattr(args, name) is not None}
    if drawn and not args.sample:
        raise InputError(f"--{next(iter(drawn)).replace('_', '-')} is for drawing: add --sample")
    if args.repetition_penalty is not None:
        drawn["repetition_penalty"] = args.repetition_penalty
    return {
        **drawn,
        "do_sample": args.sample,
        "max_new_tokens": args.max_new_tokens,
        "stop_strings": args.stop,
    }


def _answer(generator: Any, prompt: Any, options: Mapping[str, Any]) -> str:
    """Prints an answer as it comes, and its speed; returns it."""
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
        f"onnxpar: {completion.prompt} tokens read, the first new one after {first:.2f} s{speed} "
        f"({count} new, ended by {completion.reason})",
        file=sys.stderr,
    )
    return str(completion.text)


def _talk(generator: Any, chat: list[dict[str, str]], options: Mapping[str, Any]) -> None:
    """Answers messages from the terminal, until the end of input."""
    while True:
        try:
            message = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if message.strip():
            chat.append({"role": "user", "content": message})
            chat.append({"role": "assistant", "content": _answer(generator, chat, options)})
