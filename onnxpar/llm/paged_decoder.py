"""Runs a sharded decoder whose caches are in pages on pieces of many texts at once."""

from __future__ import annotations

import math
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.base.errors import InputError, ModelError, OnnxparError
from onnxpar.base.units import quantity
from onnxpar.graph.paged_attention import too_old
from onnxpar.llm.language_model import LanguageModel
from onnxpar.llm.next_tokens import Candidates
from onnxpar.llm.scheduler import Piece
from onnxpar.load.next_step import next_of
from onnxpar.load.page_ports import PICKS, POSITIONS, ROWS, TABLE
from onnxpar.load.top_k_logits import (
    ASKED,
    ASKED_LOGITS,
    BEST_LOGITS,
    BEST_TOKENS,
    LOG_TOTALS,
    TEMPERATURES,
)
from onnxpar.runtime.launch.launch import launched_rank
from onnxpar.runtime.session.bundle import Bundle
from onnxpar.runtime.session.session import Session
from onnxpar.runtime.states.host_memory import HostMemory

LONGEST = 4096
"""Most tokens of a text for which the default size of the caches has room."""
MOMENT = 0.08
"""The most seconds that the steps of a call should take."""
SHARE = 0.25
"""The largest share of the memory free at the start that the caches take by default."""

_TOLD = [BEST_TOKENS, BEST_LOGITS, ASKED_LOGITS, LOG_TOTALS]
"""The outputs that ranks return for each step."""


class PagedDecoder:
    """Feeds pieces of texts to a session, and reads candidates for next tokens.

    session  the session of the decoder
    bundle   the sharded decoder
    model    the roles of its inputs and outputs
    pages    the number of pages of its caches

    Steps of the same sizes use the same input arrays.
    """

    def __init__(self, session: Session, bundle: Bundle, model: LanguageModel, pages: int) -> None:
        if (reason := too_old()) is not None:
            raise ModelError(f"{bundle.path}: {reason}; install it, or shard with --page-size 0")
        self._session, self._model = session, model
        self.pages, self.page_size = pages, model.page_size
        self._ports = bundle.inputs
        self._feeds: dict[str, Array] = {}
        self._sizes: tuple[int, ...] = ()
        caches = {name: self._ports[name].shape or () for name in model.caches}
        session.states.clear({n: (pages, *map(_fixed, s[1:])) for n, s in caches.items()})
        carried = next_of(bundle.inputs, bundle.outputs)
        are_whole = all(map(session.is_whole, (*carried, *carried.values())))
        is_alone = len(session.exchange(b"")) == 1
        self._carried = carried if are_whole and is_alone else {}
        self._seconds: dict[int, float] = {}  # the shortest step, by its tokens

    def most_steps(self, tokens: int) -> int:
        """Returns how many steps of so many tokens may follow each other in one call of the ranks,
        so that the call takes at most `MOMENT` seconds. 1 if ranks cannot feed their next step
        themselves: if several processes drive them, or no rank holds all new tokens."""
        return max(int(MOMENT / self._seconds.get(tokens, math.inf)), 1) if self._carried else 1

    def run(
        self, pieces: Sequence[Piece], whole: bool = False, times: int = 1
    ) -> list[list[Candidates]]:
        """Computes pieces of texts; returns, for each step, the candidates for the token behind
        each of the pieces' `picks`, in order.

        whole  True: the candidates are the whole vocabulary; False: the likeliest tokens, so that
               the logits stay on their ranks
        times  the number of steps, in which each text goes on with its likeliest token
        """
        tokens = sum(piece.count for piece in pieces)
        picks = [(piece, place) for piece in pieces for place in piece.picks]
        self._feed(pieces, tokens, picks)
        feeds = self._feeds
        if whole:
            (logits,) = self._session.run([self._model.logits], feeds, keep_states=True)
            return [[Candidates.all(row) for row in logits[0][: len(picks)]]]
        start = time.perf_counter()
        if self._carried and tokens == len(picks):
            steps = self._session.run_steps(_TOLD, feeds, self._carried, times)
        else:
            steps = [self._session.run(_TOLD, feeds, keep_states=True)]
        took = (time.perf_counter() - start) / times
        self._seconds[tokens] = min(self._seconds.get(tokens, math.inf), took)
        each = [zip(s[0], s[1], feeds[ASKED], *s[2:], strict=True) for s in steps]
        return [
            [Candidates.best(*row) for _, row in zip(picks, rows, strict=False)] for rows in each
        ]

    def _feed(
        self, pieces: Sequence[Piece], tokens: int, picks: Sequence[tuple[Piece, int]]
    ) -> None:
        """Writes the inputs of the ranks to the arrays.

        tokens  the number of tokens of all pieces
        picks   pairs of a piece and the place, in its text, of a token behind which candidates are
                wanted
        """
        widest = max(len(piece.text.pages) for piece in pieces)
        asked = [piece.asked(place) for piece, place in picks]
        most = max(map(len, asked), default=0)
        # Rounded up, so that a text may grow for some time without another shape.
        self._resize(tokens, len(pieces), _rounded(widest), max(len(picks), 1), _rounded(most))
        feeds, model = self._feeds, self._model
        begins: dict[Piece, int] = {}
        at = 0
        for row, piece in enumerate(pieces):
            text, part = piece.text, slice(at, at + piece.count)
            positions = np.arange(piece.begin, piece.begin + piece.count)
            feeds[model.tokens][0, part] = text.tokens[piece.begin : piece.begin + piece.count]
            feeds[ROWS][part], feeds[POSITIONS][part] = row, positions
            if model.positions is not None:
                feeds[model.positions][0, part] = positions
            feeds[TABLE][row, : len(text.pages)] = text.pages
            begins[piece] = at
            at += piece.count
        for pick, (piece, place) in enumerate(picks):
            feeds[PICKS][pick] = begins[piece] + place - piece.begin
            feeds[TEMPERATURES][pick] = piece.text.limits.sampling.temperature or 1
            feeds[ASKED][pick, : len(asked[pick])] = asked[pick]

    def _resize(self, *sizes: int) -> None:
        """Replaces the input arrays, unless they have these sizes: the numbers of tokens, texts,
        pages of a text, picks, and tokens whose logits are asked for."""
        if self._sizes == sizes:
            return
        self._sizes = sizes
        tokens, texts, pages, picks, asked = sizes
        shapes = {self._model.tokens: (1, tokens), ROWS: (tokens,), POSITIONS: (tokens,)}
        if self._model.positions is not None:
            shapes[self._model.positions] = (1, tokens)
        shapes |= {TABLE: (texts, pages), PICKS: (picks,)}
        shapes |= {TEMPERATURES: (picks, 1), ASKED: (picks, asked)}
        self._feeds = {n: np.zeros(s, self._ports[n].dtype) for n, s in shapes.items()}
        self._feeds[TEMPERATURES][:] = 1


def _rounded(count: int) -> int:
    """Returns the least power of two that is at least `count` and at least 1: 5 becomes 8."""
    return 1 << max(count - 1, 0).bit_length()


def count_pages(
    bundle: Bundle,
    model: LanguageModel,
    kv_memory: float | str | None,
    texts: int,
    options: Mapping[str, Any],
) -> int:
    """Returns how many pages the caches get on each rank: as many as fit into `kv_memory` bytes. By
    default, enough for `texts` texts, within a share of the memory that is free on each host.

    options  those of the session

    Errors: InputError if there is room for fewer than two pages, or a host has too little memory.
    """
    each, size = page_bytes(bundle, model), model.page_size
    hosts = _hosts(bundle, options)
    if kv_memory is not None:
        pages = int(_bytes(kv_memory)) // each
        for host in hosts:
            _check_memory(pages * each, host)
    else:
        longest = min(model.context or LONGEST, LONGEST)
        rooms = [int(host.free * SHARE) // (each * host.ranks) for host in hosts]
        pages = min(-(-longest // size) * texts, *rooms)
    if pages < 2:
        raise InputError(
            f"--kv-memory has room for {pages} pages of {size} tokens, which take {each:,} bytes "
            f"each on a rank; give at least {2 * each:,} bytes"
        )
    return pages


def _hosts(bundle: Bundle, options: Mapping[str, Any]) -> Sequence[HostMemory]:
    """Returns the memory of each host on which a session with these options has ranks."""
    start = options.get("start_ranks")
    if start is not None:
        from onnxpar.runtime.launch.lead import Lead  # most programs do not need it

        if isinstance(start, Lead):
            return start.hosts
    elif launched_rank() is not None:
        # All processes must find the same number of pages, and other hosts have other memory free.
        return [replace(HostMemory.here(1), free=sys.maxsize)]
    return [HostMemory.here(bundle.mesh.size * int(options.get("replicas", 1)))]


def _check_memory(size: int, host: HostMemory) -> None:
    """Errors: InputError if the caches of a host's ranks, of `size` bytes each, exceed its
    memory."""
    if size * host.ranks > host.total:
        name = "this host" if host.host == socket.gethostname() else f"host {host.host}"
        raise InputError(
            f"--kv-memory is {size / 1e9:.1f} GB a rank, {size * host.ranks / 1e9:.1f} GB in all, "
            f"and {name} has {host.total / 1e9:.1f} GB of memory; give less"
        )


def _bytes(kv_memory: float | str) -> float:
    """Returns a number of bytes, which may be text such as "2GB". Errors: InputError for other
    text."""
    try:
        return quantity(kv_memory, "B", "--kv-memory", may_omit_unit=not isinstance(kv_memory, str))
    except OnnxparError as error:
        raise InputError(str(error)) from None


def page_bytes(bundle: Bundle, model: LanguageModel) -> int:
    """Returns the bytes of one page, in all caches together, on the rank that holds the most."""
    sizes = dict.fromkeys(bundle.symbols, 1)
    total = 0
    for name in model.caches:
        port = bundle.inputs[name]
        layout = port.layout_at(sizes)
        assert layout is not None, "the layout of a cache is known"
        total += int(np.prod(layout.largest_shape())) * port.dtype.itemsize
    return total


def _fixed(size: object) -> int:
    """Returns a size of a cache. Errors: InputError if it is open, a name instead of a number."""
    if isinstance(size, int):
        return size
    raise InputError(f"a cache has a size that is open, {size}; only its number of pages may be")
