"""The command `serve`: its arguments, and the HTTP server that it starts."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from onnxpar.base.errors import InputError, OnnxparError
from onnxpar.base.quick_imports import quick_imports
from onnxpar.cli.config_file import add_config
from onnxpar.cli.rank_options import add_cores, add_library, add_runtime, add_verify
from onnxpar.runtime.launch.launch import launched_rank
from onnxpar.serve.log import tell
from onnxpar.serve.tool_families import FAMILIES

KEY = "ONNXPAR_API_KEY"
"""The environment variable that holds the API key."""
_ENGINE = ("kv_memory", "max_running", "max_waiting", "step_tokens")
_GENERATING = ("kv_memory", "max_running", "max_tokens", "tool_call_parser")
"""Options that apply to models that generate text, not to embedding models and rerankers."""
_LIMITS = ("max_body", "max_tokens", "max_choices", "max_inputs", "max_requests", "request_timeout")
_RANKS_ELSEWHERE = ("timeout", "verify", "threads")
_RANKS = (*_RANKS_ELSEWHERE, "log_dir", "bind", "ranks_per_numa")


def add_serve(to: Any) -> None:
    """Adds the command `serve` to a parser's commands."""
    text = "serve a sharded language or embedding model over HTTP, in the API of OpenAI"
    command = to.add_parser(
        "serve",
        help=text,
        description="Serve a sharded language model over HTTP, in the API of OpenAI: "
        "/v1/chat/completions, /v1/responses, /v1/completions, /tokenize and /detokenize; of an "
        "embedding model /v1/embeddings, of a reranker /v1/rerank; /v1/models, /health and "
        "/metrics; a page to chat at /. SIGTERM and SIGINT end it once running requests are "
        "finished; a second one ends it at once. "
        "Under a launcher such as `onnxpar launch`, each process is one rank, and rank 0 serves.",
    )
    command.set_defaults(command=serve)
    command.add_argument("par", metavar="model.par", help="folder that shard wrote")
    add_config(command)
    _add_address(command)
    _add_limits(command)
    _add_engine(command)
    add_verify(command)
    add_cores(command)
    add_runtime(command)
    add_library(command)


def _add_address(command: Any) -> None:
    """Adds the options of the server's address and of who may use it."""
    command.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="HOST",
        help="address to listen at; default %(default)s, which only this machine reaches; 0.0.0.0: "
        "all addresses",
    )
    command.add_argument(
        "--port",
        type=int,
        default=8000,
        metavar="N",
        help="port to listen at; default %(default)d; 0: any free one",
    )
    command.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"key that each request must have; default: {KEY} in the environment, which other "
        "users of the machine do not see",
    )
    command.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="file with a key in each line; any of them is accepted",
    )
    command.add_argument(
        "--model-name",
        metavar="NAME",
        help="the model's id in requests and answers; default: the folder's name without .par",
    )
    command.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        dest="cors_origins",
        metavar="ORIGIN",
        help="let pages of this origin, such as https://chat.example.com, use the server; '*': of "
        "any",
    )
    command.add_argument(
        "--no-access-log",
        action="store_false",
        dest="access_log",
        help="print no line for each request",
    )


def _add_limits(command: Any) -> None:
    """Adds the options that limit requests: their size, number and time."""
    limits: tuple[tuple[str, type, Any, str], ...] = (
        ("max-body", int, 2 << 20, "most bytes of a request"),
        ("max-choices", int, 16, "most answers of a request: prompts times n"),
        ("max-inputs", int, 2048, "most texts to embed, or documents to rank, of a request"),
        ("max-requests", int, 256, "most requests that are answered or wait at once"),
        ("request-timeout", float, 600.0, "longest time of a request, in seconds"),
        ("drain-timeout", float, 30.0, "longest time to finish requests at the end, in seconds"),
    )
    for name, kind, default, meaning in limits:
        metavar = "N" if kind is int else "S"
        text = f"{meaning}; default %(default)s"
        command.add_argument(f"--{name}", type=kind, default=default, metavar=metavar, help=text)
    command.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help="most new tokens of an answer; default: as many as the model has room for",
    )
    command.add_argument(
        "--tool-call-parser",
        choices=FAMILIES,
        metavar="NAME",
        help=f"how the model writes calls of tools: {', '.join(FAMILIES)}; default: as its chat "
        "template says",
    )


def _add_engine(command: Any) -> None:
    """Adds the options of the engine, which runs requests together: replicas, memory of caches,
    tokens."""
    command.add_argument(
        "--replicas",
        type=int,
        default=1,
        metavar="N",
        help="run the model N times, each with its own ranks on their own cores: if a rank dies, "
        "another replica goes on with its answers; default %(default)d",
    )
    command.add_argument(
        "--kv-memory",
        metavar="SIZE",
        help="memory of each rank for keys and values, such as 4GB; default: room for "
        "--max-running texts, at most a quarter of the free memory",
    )
    command.add_argument(
        "--max-running",
        type=int,
        metavar="N",
        help="most answers whose tokens are computed together; default 16",
    )
    command.add_argument(
        "--max-waiting",
        type=int,
        metavar="N",
        help="most answers in the queue; more are refused with status 429; default 256; texts to "
        "embed or rank: 4096",
    )
    command.add_argument(
        "--step-tokens",
        type=int,
        metavar="N",
        help="most tokens that a step of the model reads; default 256; texts to embed or rank: "
        "4096",
    )


def serve(args: argparse.Namespace) -> int:
    """Runs `serve` until a signal ends it; returns the exit status. Under a launcher, rank 0
    serves."""
    _check(args)
    launched = launched_rank()
    if launched is None:
        _serve(args, {option: getattr(args, option) for option in _RANKS})
        return 0
    from onnxpar.cli.serve_launched import check_launched, serve_launched

    check_launched(args)
    rank_options = {option: getattr(args, option) for option in _RANKS_ELSEWHERE}
    return serve_launched(
        args, launched, lambda lead: _serve(args, {**rank_options, "start_ranks": lead})
    )


def _serve(args: argparse.Namespace, options: dict[str, Any]) -> None:
    """Serves over HTTP until a signal comes. `options` are keyword arguments of the engine that
    starts the ranks. Errors: OnnxparError."""
    keys = _keys(args)
    try:
        with quick_imports():
            from onnxpar.serve.serve_model import serve_model
            from onnxpar.serve.server import bind
            from onnxpar.serve.settings import Settings
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("onnxpar"):
            raise
        raise OnnxparError(
            f"serve needs the package {error.name}: pip install 'onnxpar[serve]'"
        ) from None
    settings = Settings(
        model_name=args.model_name or Path(args.par).resolve().name.removesuffix(".par"),
        api_keys=keys,
        cors_origins=tuple(args.cors_origins),
        access_log=args.access_log,
        tool_call_parser=args.tool_call_parser,
        **{limit: getattr(args, limit) for limit in _LIMITS},
    )
    bound = bind(args.host, args.port)
    serve_model(bound, lambda: _started(args, options), settings, args.drain_timeout)


def _started(args: argparse.Namespace, options: dict[str, Any]) -> Any:
    """Starts and returns the engine of a language model, or the embedder of an encoder, or with
    --replicas, several of them behind one interface. Errors: OnnxparError."""
    from onnxpar.llm.embedder import Embedder
    from onnxpar.llm.encoder_model import is_encoder
    from onnxpar.llm.engine import Engine
    from onnxpar.llm.replicas import EmbedderReplicas, EngineReplicas

    options = {**options, "tell": tell}
    values = {option: getattr(args, option) for option in _ENGINE}
    options |= {option: value for option, value in values.items() if value is not None}
    is_alone = args.replicas == 1
    if not is_alone:
        options["replicas"] = args.replicas
    if not is_encoder(args.par):
        return (Engine if is_alone else EngineReplicas)(args.par, **options)
    for option in _GENERATING:
        if getattr(args, option) is not None:
            flag = f"--{option.replace('_', '-')}"
            raise InputError(
                f"{flag} is for language models, and {args.par} has no cache; leave it out"
            )
    if "step_tokens" in options:
        options["batch_tokens"] = options.pop("step_tokens")
    return (Embedder if is_alone else EmbedderReplicas)(args.par, **options)


def _check(args: argparse.Namespace) -> None:
    """Checks values of options that argparse cannot. Errors: InputError."""
    if args.drain_timeout < 0:
        raise InputError(f"--drain-timeout {args.drain_timeout:g}: it must be at least 0")
    if not 0 <= args.port < 2**16:
        raise InputError(f"--port {args.port}: a port is from 0 to 65535")


def _keys(args: argparse.Namespace) -> tuple[bytes, ...]:
    """Returns the API keys that clients may use, from an option, a file or the environment variable
    KEY; empty if clients need none. Errors: InputError."""
    if args.api_key is not None and args.api_key_file is not None:
        raise InputError("give --api-key or --api-key-file, not both")
    where = "--api-key"
    if args.api_key_file is not None:
        where = f"--api-key-file {args.api_key_file}"
        try:
            lines = args.api_key_file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{where}: cannot read it as text: {error}") from None
        keys = [line for line in lines if line.strip() and not line.startswith("#")]
    elif args.api_key is not None:
        keys = [args.api_key]
    else:
        where = KEY
        keys = [os.environ[KEY]] if os.environ.get(KEY) else []
        if not keys:
            return ()
    keys = [key.strip() for key in keys]
    if not keys or not all(key and key.isascii() and key.isprintable() for key in keys):
        raise InputError(f"{where}: a key is a line of printable ASCII characters")
    return tuple(key.encode() for key in keys)
