"""The bound is below every schedule, and is reached where a schedule can be seen by eye."""

from __future__ import annotations

import random
from itertools import permutations

import pytest
from bench.least_time import Job, least_seconds


def best(jobs: list[Job]) -> float:
    """The seconds of the fastest of all orders of the jobs."""
    return min(_seconds(jobs, order) for order in permutations(range(len(jobs))))


def _seconds(jobs: list[Job], order: tuple[int, ...]) -> float:
    ends: dict[int, float] = {}
    free = [0.0, 0.0]
    for i in order:
        job = jobs[i]
        if any(need not in ends for need in job.needs):
            return float("inf")
        start = max([free[job.is_sent], *(ends[need] for need in job.needs)])
        free[job.is_sent] = ends[i] = start + job.seconds
    return max(ends.values())


@pytest.mark.parametrize(
    ("jobs", "expected"),
    [
        ([Job(3.0), Job(4.0)], 7.0),
        ([Job(3.0), Job(4.0, is_sent=True)], 4.0),
        ([Job(3.0), Job(4.0, True, [0]), Job(2.0, needs=[1])], 9.0),
        ([Job(3.0), Job(4.0, True, [0]), Job(5.0, needs=[0]), Job(1.0, needs=[1, 2])], 9.0),
        # gradients: the last one cannot be hidden
        ([Job(3.0), Job(4.0, True, [0]), Job(3.0, needs=[0]), Job(2.0, True, [2])], 9.0),
        # gathers: the first one cannot be hidden
        ([Job(2.0, True), Job(3.0, needs=[0]), Job(2.0, True), Job(3.0, needs=[1, 2])], 8.0),
    ],
)
def test_what_is_seen_by_eye(jobs: list[Job], expected: float) -> None:
    assert best(jobs) == expected
    assert least_seconds(jobs) == expected


def test_no_order_takes_less() -> None:
    draw = random.Random(0)
    reached = 0
    for _ in range(150):
        jobs = [
            Job(
                draw.randint(0, 5) / 7,
                draw.random() < 0.5,
                [j for j in range(i) if draw.random() < 0.3],
            )
            for i in range(6)
        ]
        bound, least = least_seconds(jobs), best(jobs)
        assert bound <= least + 1e-9
        reached += bound > least - 1e-9
    assert reached > 100
