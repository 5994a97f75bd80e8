"""Opens a session together with what the caller needs to know of the model."""

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
    """Makes a session of a sharded model, with the options of `make`, such as `InferenceSession`;
    returns the session, and what `read` returns for the model.

    `read` is called before ranks start, as it may find that the model is not what the caller wants;
    after that if this process is a rank of a launcher, as ranks may have to fetch the folder.
    Errors: those of both.
    """
    if launched_rank() is None or options.get("start_ranks") is not None:
        found = read(Bundle.load(par))
        return make(par, **options), found
    session = make(par, **options)
    try:
        return session, read(Bundle.load(par))
    except BaseException:
        session.close()
        raise
