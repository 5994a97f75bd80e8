"""A lower bound of the seconds that a step takes on one core and one link, in whatever order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush


@dataclass(frozen=True)
class Job:
    """A node that computes, or a collective: its seconds, whether the link does it, and the indices
    of the jobs before it whose results it needs."""

    seconds: float
    is_sent: bool = False
    needs: Sequence[int] = ()


def least_seconds(jobs: Sequence[Job]) -> float:
    """No schedule of the jobs takes less, even if jobs may be interrupted.

    A job begins no earlier than what it depends on can end, and what depends on it takes its time
    after it. With these heads and tails, Jackson's schedule is the fastest on one machine."""
    heads = _heads(jobs, [job.needs for job in jobs])
    last = len(jobs) - 1
    readers: list[list[int]] = [[] for _ in jobs]
    for i, job in enumerate(jobs):
        for need in job.needs:
            readers[last - need].append(last - i)
    tails = _heads(jobs[::-1], readers)[::-1]
    each = [(heads[i], job.seconds, tails[i], job.is_sent) for i, job in enumerate(jobs)]
    return max(_jackson([e[:3] for e in each if e[3] is sent]) for sent in (False, True))


def _heads(jobs: Sequence[Job], needs: Sequence[Sequence[int]]) -> list[float]:
    """When each job can begin: all that it depends on must have ended, one after the other on the
    core, and on the link."""
    before: list[int] = []  # bits: what a job depends on
    heads: list[float] = []
    order: list[int] = []  # by head
    for i, own in enumerate(needs):
        mask = 0
        for need in own:
            mask |= before[need] | 1 << need
        before.append(mask)
        clock = [0.0, 0.0]
        for j in order:
            if mask >> j & 1:
                machine = jobs[j].is_sent
                clock[machine] = max(clock[machine], heads[j]) + jobs[j].seconds
        heads.append(max(clock))
        at = next((k for k, j in enumerate(order) if heads[j] > heads[i]), len(order))
        order.insert(at, i)
    return heads


def _jackson(each: Sequence[tuple[float, float, float]]) -> float:
    """The end of the last tail, if one machine always does what is ready and has the longest
    tail; each job has a head, seconds, and a tail."""
    queue = sorted(each)
    clock = end = 0.0
    ready: list[tuple[float, float]] = []
    at = 0
    while at < len(queue) or ready:
        if not ready:
            clock = max(clock, queue[at][0])
        while at < len(queue) and queue[at][0] <= clock:
            heappush(ready, (-queue[at][2], queue[at][1]))
            at += 1
        tail, seconds = heappop(ready)
        if at < len(queue) and queue[at][0] < clock + seconds:
            heappush(ready, (tail, clock + seconds - queue[at][0]))
            clock = queue[at][0]
        else:
            clock += seconds
            end = max(end, clock - tail)
    return end
