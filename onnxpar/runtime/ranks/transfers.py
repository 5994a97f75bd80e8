"""Plans which rank sends which file to which ranks; all ranks compute the same plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

PIECE = 4 << 20
"""The most bytes of a file that travel at a time, so what a rank needs in memory."""


@dataclass(frozen=True)
class Transfer:
    """A file that rank `source` sends to the ranks `receivers`, each of which writes it to a folder
    of its own."""

    name: str
    bytes: int
    source: int
    receivers: tuple[int, ...]


Part = tuple[Transfer, int, int]
"""A piece of a file: (transfer, offset, length)."""


def planned(
    sizes: Mapping[str, int],
    holders: Mapping[str, Collection[int]],
    needs: Mapping[str, Sequence[Collection[int]]],
) -> list[Transfer]:
    """Returns the transfers of all files that are needed, chosen so that ranks send and write about
    equally many bytes.

    sizes    the bytes of each file
    holders  the ranks that have each file
    needs    for each file, the folders that lack it, each as the ranks that can write to it
    """
    sent, written = Counter[int](), Counter[int]()
    transfers = []
    for name, places in needs.items():
        source = min(holders[name], key=lambda rank: (sent[rank], rank))
        receivers = tuple(min(place, key=lambda rank: (written[rank], rank)) for place in places)
        sent[source] += sizes[name] * len(receivers)
        written.update(dict.fromkeys(receivers, sizes[name]))
        transfers.append(Transfer(name, sizes[name], source, receivers))
    return transfers


def waves(transfers: Sequence[Transfer]) -> Iterator[list[Part]]:
    """Yields lists of pieces that travel at the same time. No rank receives two pieces of a list,
    so that no rank waits long for another."""
    done = dict.fromkeys(transfers, 0)
    waiting = [one for one in transfers if one.bytes]
    while waiting:
        busy, wave = set[int](), list[Part]()
        for one in waiting:
            if busy.isdisjoint(one.receivers):
                busy.update(one.receivers)
                wave.append((one, done[one], min(PIECE, one.bytes - done[one])))
        for one, _, length in wave:
            done[one] += length
        waiting = [one for one in waiting if done[one] < one.bytes]
        yield wave
