"""Parts of the suite that have all its families."""


def part_of(total: int, part: str) -> list[int]:
    """The numbers of the cases of part `i/n`, from 1: every n-th, from the i-th."""
    i, n = map(int, part.split("/"))
    return list(range(i - 1, total, n))
