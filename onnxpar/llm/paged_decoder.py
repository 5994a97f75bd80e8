"""Runs pieces of texts on ranks whose caches are in pages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.canonicalize.page_caches import PICKS, POSITIONS, ROWS, TABLE
from onnxpar.errors import InputError
from onnxpar.llm.language_model import LanguageModel
from onnxpar.llm.scheduler import Piece
from onnxpar.runtime.bundle import Bundle
from onnxpar.runtime.session import Session


class PagedDecoder:
    """The caches of a session, and the arrays that are fed to it. Steps of the same sizes use the
    same arrays."""

    def __init__(self, session: Session, bundle: Bundle, model: LanguageModel, pages: int) -> None:
        self._session, self._model = session, model
        self._ports = bundle.inputs
        self._feeds: dict[str, Array] = {}
        self._sizes: tuple[int, ...] = ()
        caches = {name: self._ports[name].shape or () for name in model.caches}
        session.states.clear({n: (pages, *map(_fixed, s[1:])) for n, s in caches.items()})

    def run(self, pieces: Sequence[Piece]) -> Array:
        """Computes pieces; returns the logits of the next token of each text that is complete with
        its piece, (texts, vocabulary), in order; of any one token if no text is."""
        tokens = sum(piece.count for piece in pieces)
        widest = max(len(piece.text.pages) for piece in pieces)
        picks = max(sum(piece.is_last for piece in pieces), 1)
        # Rounded up, so that a text may grow for some time without another shape.
        self._resize(tokens, len(pieces), 1 << (widest - 1).bit_length(), picks)
        feeds, model = self._feeds, self._model
        at = pick = 0
        for row, piece in enumerate(pieces):
            text, part = piece.text, slice(at, at + piece.count)
            positions = np.arange(text.done, text.done + piece.count)
            feeds[model.tokens][0, part] = text.tokens[text.done : text.done + piece.count]
            feeds[ROWS][part], feeds[POSITIONS][part] = row, positions
            if model.positions is not None:
                feeds[model.positions][0, part] = positions
            feeds[TABLE][row, : len(text.pages)] = text.pages
            at += piece.count
            if piece.is_last:
                feeds[PICKS][pick] = at - 1
                pick += 1
        (logits,) = self._session.run([model.logits], feeds, keep_states=True)
        return np.asarray(logits)[0]

    def _resize(self, tokens: int, texts: int, pages: int, picks: int) -> None:
        """Makes arrays of these sizes, unless the last ones have them."""
        if self._sizes == (tokens, texts, pages, picks):
            return
        self._sizes = tokens, texts, pages, picks
        shapes = {self._model.tokens: (1, tokens), ROWS: (tokens,), POSITIONS: (tokens,)}
        if self._model.positions is not None:
            shapes[self._model.positions] = (1, tokens)
        shapes |= {TABLE: (texts, pages), PICKS: (picks,)}
        self._feeds = {n: np.zeros(s, self._ports[n].dtype) for n, s in shapes.items()}


def page_bytes(bundle: Bundle, model: LanguageModel) -> int:
    """Returns the bytes of one page of all caches, on the rank that has most of it."""
    sizes = dict.fromkeys(bundle.symbols, 1)
    total = 0
    for name in model.caches:
        port = bundle.inputs[name]
        layout = port.layout_at(sizes)
        assert layout is not None, "the layout of a cache is known"
        total += int(np.prod(layout.largest_shape())) * port.dtype.itemsize
    return total


def _fixed(size: object) -> int:
    """A size that must not be open. Errors: InputError."""
    if isinstance(size, int):
        return size
    raise InputError(f"a cache has a size that is open, {size}; only its number of pages may be")
