"""The perceptrons that every server computes: random weights, ReLU between layers."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["MODELS", "SIZES", "Perceptron"]

SIZES = (1, 2, 4, 8, 16, 32, 64)
"""Rows of a call that a server with batches has programs for."""


@dataclass(frozen=True)
class Perceptron:
    """Layers without biases: `x @ w`, with ReLU between them.

    Attributes:
      widths: of the input, of what lies between, and of the output.
    """

    name: str
    widths: Sequence[int]

    @property
    def size_bytes(self) -> int:
        """Bytes of the weights."""
        return 4 * sum(rows * columns for rows, columns in zip(self.widths, self.widths[1:], strict=False))

    def weights(self) -> list[np.ndarray]:
        """float32, scaled so that every layer's output has about the variance of its input."""
        random = np.random.default_rng(0)
        pairs = zip(self.widths, self.widths[1:], strict=False)
        return [(random.standard_normal(pair) * (2 / pair[0]) ** 0.5).astype(np.float32) for pair in pairs]

    def pixels(self) -> np.ndarray:
        """One row to ask for."""
        return np.random.default_rng(1).uniform(size=(1, self.widths[0])).astype(np.float32)

    def expected(self, pixels: np.ndarray) -> np.ndarray:
        """What every server has to answer, by NumPy."""
        *hidden, last = self.weights()
        for weight in hidden:
            pixels = np.maximum(pixels @ weight, 0)
        return pixels @ last


MODELS = {
    model.name: model
    for model in (Perceptron("small", (784, 512, 10)), Perceptron("large", (784, 4096, 4096, 4096, 10)))
}
