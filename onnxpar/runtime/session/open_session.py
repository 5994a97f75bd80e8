"""Opens a session of a sharded model, and reads facts about the model for the caller."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

from onnxpar.runtime.launch.launch import launched_rank
from onnxpar.runtime.session.bundle import Bundle
from onnxpar.runtime.session.session import Session

S = TypeVar("S", bound=Session)
T = TypeVar("T")


def open_session(
    make: Callable[..., S], par: str | os.PathLike[str], read: Callable[[Bundle], T], **options: Any
) -> tuple[S, T]:
    """Returns (a session of a sharded model, what `read` returns for the model).

    make     the class of the session, such as `InferenceSession`
    par      the folder of the sharded model
    read     a function that reads facts about the model, or refuses it
    options  further arguments of `make`

    Calls `read` before ranks start, because it may refuse the model; under a launcher, after the
    start, because ranks may have to fetch the folder. Errors: as `make` and `read`.
    """
    if launched_rank() is None or options.get("start_ranks") is not None:
        result = read(Bundle.load(par))
        return make(par, **options), result
    session = make(par, **options)
    try:
        return session, read(Bundle.load(par))
    except BaseException:
        session.close()
        raise
