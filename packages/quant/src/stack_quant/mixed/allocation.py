"""Choice of one type per site with the smallest total error within a limit of bytes.

This is the multiple-choice knapsack problem, solved by dynamic programming over bytes (H. Kellerer, U. Pferschy,
D. Pisinger, Knapsack Problems, 2004, chapter 11; ZeroQ, arXiv:2001.00281, also adds up the errors of sites and chooses
on the Pareto front).

    minimize  sum_i error[i, t_i]  subject to  sum_i bytes[i, t_i] <= limit
"""

from collections.abc import Sequence

import numpy as np

__all__ = ["allocate"]

_STEPS = 1 << 16


def allocate(sizes: Sequence[Sequence[int]], errors: Sequence[Sequence[float]], limit: int) -> list[int]:
    """Chooses one candidate per site.

    The solution is exact if the candidates of all sites span at most 2**16 bytes. Otherwise sizes are rounded up to
    2**16 steps of this span, and uniform solutions, whose sizes stay exact, are compared, too. The total error never
    grows with the limit.

    Args:
      sizes: bytes of each candidate, by site.
      errors: error of each candidate, by site; infinite if a candidate is not available.
      limit: maximum of the total bytes, at least the sum of the smallest candidates.

    Returns:
      The index of the candidate of each site.
    """
    available = [np.isfinite(np.asarray(row, np.float64)) for row in errors]
    smallest = [min(np.asarray(row)[usable]) for row, usable in zip(sizes, available, strict=True)]
    span = sum(int(max(np.asarray(row)[usable])) for row, usable in zip(sizes, available, strict=True)) - sum(smallest)
    step = max(1, -(-int(span) // _STEPS))
    room = min(int(limit - sum(smallest)) // step, -(-int(span) // step))
    best, choices = np.zeros(room + 1), list[np.ndarray]()
    for row, error, least in zip(sizes, errors, smallest, strict=True):
        # totals[t, b]: error of the sites so far if this one is of type t and all of them need at most b steps.
        totals = np.full((len(row), room + 1), np.inf)
        for place, size in enumerate(row):
            extra = -(-int(size - least) // step)
            if np.isfinite(error[place]) and 0 <= extra <= room:
                totals[place, extra:] = best[: room + 1 - extra] + error[place]
        choices.append(np.argmin(totals, axis=0))
        best = np.min(totals, axis=0)
    chosen, left = list[int](), room
    for row, least, choice in zip(reversed(sizes), reversed(smallest), reversed(choices), strict=True):
        chosen.append(int(choice[left]))
        left -= -(-int(row[chosen[-1]] - least) // step)
    solutions = [chosen[::-1], *([place] * len(sizes) for place in range(min(map(len, sizes), default=0)))]

    def total(solution: Sequence[int], table: Sequence[Sequence[int | float]]) -> int | float:
        return sum(row[place] for row, place in zip(table, solution, strict=True))

    feasible = [solution for solution in solutions if total(solution, sizes) <= limit]
    return min(feasible, key=lambda solution: (total(solution, errors), total(solution, sizes)))
