"""Objects that are closed at the end of a `with`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeVar

T = TypeVar("T", bound="Closing")


class Closing(ABC):
    """A context manager whose end calls `close`."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
