"""Success rates of several attempts at each task: pass@k, and confidence intervals of averages."""

import math
from typing import Final

import numpy as np
from jaxtyping import Float, Int

__all__ = ["pass_at_k", "share_interval", "task_interval"]

_Z: Final = 1.959964  # 97.5% quantile of the normal distribution, for intervals of 95%

Counts = Int[np.ndarray, " tasks"]


def pass_at_k(attempts: Counts, correct: Counts, k: int) -> Float[np.ndarray, " tasks"]:
    """Estimates the probability that at least one of k attempts is correct, without bias, for each task.

        1 - C(n - c, k) / C(n, k) = 1 - prod_{i = n - c + 1}^{n} (1 - k / i)

    Args:
      attempts: n, at least k.
      correct: c.
      k: number of attempts that count as one.

    Raises:
      ValueError: a task has fewer than k attempts.

    Source: Chen et al., Evaluating large language models trained on code, 2021 (arXiv:2107.03374), equation 1.
    """
    if k < 1 or (attempts < k).any():
        raise ValueError(f"pass@{k} needs k >= 1 and at least {k} attempts at each task; given: {min(attempts)}")
    # The product, because the binomials of large n exceed float64. A factor is 0 if n - c < k.
    ranges = (np.arange(n - c + 1, n + 1) for n, c in zip(attempts.tolist(), correct.tolist(), strict=True))
    return np.asarray([1 - np.prod(np.maximum(1 - k / each, 0)) for each in ranges], np.float64)


def task_interval(means: Float[np.ndarray, " tasks"]) -> tuple[float, float] | None:
    """Computes a 95% confidence interval of the mean over tasks: mean +- 1.96 s / sqrt(tasks); None for one task.

    s is the standard deviation of the tasks' means, so attempts at the same task count as dependent.

    Source: Miller, Adding error bars to evals, 2024 (arXiv:2411.00640), section 2.
    """
    if len(means) < 2:
        return None
    mean, error = float(means.mean()), float(means.std(ddof=1)) / math.sqrt(len(means))
    return mean - _Z * error, mean + _Z * error


def share_interval(shares: Float[np.ndarray, " tasks"]) -> tuple[float, float] | None:
    """Computes a 95% confidence interval, within 0 to 1, of the mean of shares; None for one task.

    Wilson's interval of p = mean with n = p (1 - p) / e^2 attempts, where e is the standard error over tasks, as in
    `task_interval`; n is the number of tasks if all shares are equal. Unlike mean +- 1.96 e, it does not shrink to a
    point if all tasks are solved.

    Source: Wilson, Probable inference, the law of succession, and statistical inference, 1927. Departures: (1) n is an
    effective number of attempts, because attempts at the same task are dependent.
    """
    if len(shares) < 2:
        return None
    p, variance = float(shares.mean()), float(shares.var(ddof=1)) / len(shares)
    n = p * (1 - p) / variance if variance > 0 else len(shares)
    center, width = p + _Z**2 / (2 * n), _Z * math.sqrt(p * (1 - p) / n + _Z**2 / (4 * n**2))
    scale = 1 + _Z**2 / n
    return max((center - width) / scale, 0.0), min((center + width) / scale, 1.0)
