"""A small classifier of 8 x 8 images in plain JAX, and bundles of it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from stack_serve import bundle

SIZES = (1, 2, 8)


def params(seed: int = 0) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    sizes = ((64, 32), (32, 10))
    return {
        "layers": [
            {"kernel": random.normal(size=size).astype("f4") / 8, "bias": random.normal(size=size[1]).astype("f4")}
            for size in sizes
        ]
    }


def predict(params: Mapping[str, Any], pixels: jax.Array) -> dict[str, jax.Array]:
    first, last = params["layers"]
    hidden = jax.nn.relu(pixels @ first["kernel"] + first["bias"])
    return {"probabilities": jax.nn.softmax(hidden @ last["kernel"] + last["bias"])}


def images(rows: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).uniform(size=(rows, 64)).astype("f4")


def export(directory: Path, seed: int = 0, *, sizes: tuple[int, ...] = SIZES) -> bundle.Manifest:
    function = bundle.Function(
        predict,
        inputs={"pixels": ("float32", ("batch", 64))},
        sizes={"batch": sizes},
        examples=[{"pixels": images(3)}],
    )
    return bundle.export(directory, {"predict": function}, params(seed), licence="Apache-2.0", name="digits")
