"""A simple cost model: seconds = overhead + flops / rate + bytes / bandwidth, fitted to measurements of one kernel."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stack_core.chips import Chip
from stack_kernels.tuning.shapes import CallShape

__all__ = ["CostModel", "Sample", "estimate_s", "roofline_s"]

Sample = tuple[CallShape, float]
"""A measured call and its seconds."""


@dataclass(frozen=True)
class CostModel:
    """Cost terms of a kernel, in seconds; none is negative."""

    overhead_s: float
    s_per_flop: float
    s_per_byte: float

    @classmethod
    def fit(cls, samples: Sequence[Sample]) -> "CostModel":
        """Fits the terms with the least squared relative error; among equally good fits, the one with the fewest terms.

        A single sample gives a cost proportional to the FLOPs.
        """
        rows = np.array([(shape.flops, shape.traffic_bytes, 1.0) for shape, _ in samples])
        rows = rows / np.array([seconds for _, seconds in samples])[:, None]  # the target of each row is 1
        units = np.maximum(rows.max(axis=0), 1e-300)  # scaled columns, else lstsq drops the small ones
        best, best_error = np.zeros(3), math.inf
        for count in (1, 2, 3):
            for terms in itertools.combinations(range(3), count):
                solution = np.zeros(3)
                solution[list(terms)] = np.linalg.lstsq(rows[:, terms] / units[list(terms)], np.ones(len(rows)))[0]
                error = float(np.sum((rows / units @ solution - 1) ** 2))
                # Another term must reduce the error by a thousandth, because equal fits differ by rounding.
                if (solution >= 0).all() and error < best_error * 0.999 - 1e-9:
                    best, best_error = solution / units, error
        s_per_flop, s_per_byte, overhead_s = map(float, best)
        return cls(overhead_s, s_per_flop, s_per_byte)

    def seconds(self, shape: CallShape) -> float:
        """Predicts the seconds of a call, at least one nanosecond."""
        return max(self.overhead_s + self.s_per_flop * shape.flops + self.s_per_byte * shape.traffic_bytes, 1e-9)


def estimate_s(samples: Sequence[Sample], target: CallShape) -> float:
    """Estimates the seconds of a kernel at sizes where it was not measured.

    The model's value is corrected by its errors at the samples, weighted by the inverse square of their distance. At a
    measured size the estimate is the measurement.
    """
    for shape, seconds in samples:
        # Its distance is 0 or small, and the weights below divide by the distance.
        if shape.bucket == target.bucket:
            return seconds
    model = CostModel.fit(samples)
    weights = [1 / target.distance(shape) ** 2 for shape, _ in samples]
    corrections = [math.log(seconds / model.seconds(shape)) for shape, seconds in samples]
    correction = sum(w * c for w, c in zip(weights, corrections, strict=True)) / sum(weights)
    return model.seconds(target) * math.exp(correction)


def roofline_s(shape: CallShape, chip: Chip) -> float:
    """Returns the time at the chip's peaks.

    Unknown peaks count as 1 TFLOP/s and 100 GB/s, which is enough to order calls.
    """
    peak_flops = max(chip.peak_flops.values(), default=1e12)
    return max(shape.flops / peak_flops, shape.traffic_bytes / (chip.hbm_bandwidth_bytes_s or 1e11))
