"""Inputs and outputs that a bundle carries, so that whoever opens it sees that it still computes the same."""

from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from stack_core.errors import BundleError
from stack_serve.bundle import weights
from stack_serve.bundle.manifest import Example, Signature

__all__ = ["compare", "made_up", "read", "tolerances", "write"]

_INPUT, _OUTPUT = "inputs/", "outputs/"
# Programs are compiled by another XLA, perhaps for another machine, which sums in another order.
_TOLERANCES = {"bfloat16": 0.05, "float16": 0.01, "float32": 1e-3, "float64": 1e-6}


def write(path: Path, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]) -> None:
    """Writes an example."""
    named = {f"{_INPUT}{name}": array for name, array in inputs.items()}
    weights.write(path, named | {f"{_OUTPUT}{name}": array for name, array in outputs.items()})


def read(content: bytes) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The inputs and outputs of an example."""
    arrays = weights.read(content)
    inputs, outputs = (
        {name.removeprefix(side): array for name, array in arrays.items() if name.startswith(side)}
        for side in (_INPUT, _OUTPUT)
    )
    return inputs, outputs


def made_up(signature: Signature) -> dict[str, np.ndarray]:
    """An example for who gives none: zeros for integers, normal numbers for floats, of the smallest sizes."""
    random = np.random.default_rng(0)
    sizes = {axis: known[0] for axis, known in signature.sizes.items()}
    return {
        spec.name: random.standard_normal(spec.at(sizes)).astype(jnp.dtype(spec.dtype))
        if "float" in spec.dtype
        else np.zeros(spec.at(sizes), spec.dtype)
        for spec in signature.inputs
    }


def tolerances(signature: Signature) -> dict[str, float]:
    """How far outputs may be off, by the coarsest dtype that a signature has."""
    dtypes = {spec.dtype for spec in (*signature.inputs, *signature.outputs)}
    rtol = max((_TOLERANCES.get(dtype, 0.0) for dtype in dtypes), default=0.0)
    return {"rtol": rtol, "atol": rtol / 10}


def compare(example: Example, expected: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray]) -> None:
    """Compares outputs with those of an example.

    Raises:
      BundleError: one differs by more than the example's tolerance.
    """
    for name, array in found.items():
        if name not in expected or expected[name].shape != array.shape:
            raise BundleError(f"{example.file} has no output {name!r} of the shape {list(array.shape)}. Export again.")
        ours, theirs = (np.asarray(side, np.float64) for side in (array, expected[name]))
        off = np.abs(ours - theirs) - (example.atol + example.rtol * np.abs(theirs))
        if not np.all((off <= 0) | (ours == theirs) | (np.isnan(ours) & np.isnan(theirs))):
            raise BundleError(
                f"{example.file}: on this machine the output {name!r} differs from the exported one by up to "
                f"{np.nanmax(np.abs(ours - theirs)):.3g}. Export the model again with this version of jax."
            )
