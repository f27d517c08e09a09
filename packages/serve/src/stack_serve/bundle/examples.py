"""Example inputs and outputs in a bundle, which reveal changed results when it is opened."""

from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from stack_core.abi.errors import BundleError
from stack_serve.bundle import weights
from stack_serve.bundle.manifest import Example, Signature

__all__ = ["compare", "excess", "made_up", "read", "tolerances", "write"]

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


def made_up(signature: Signature, sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Makes an example for sizes of the named axes: zeros for integers, normal numbers for floats."""
    random = np.random.default_rng(0)
    return {
        spec.name: random.standard_normal(spec.at(sizes)).astype(jnp.dtype(spec.dtype))
        # Zero is valid for token ids and indices of any table.
        if "float" in spec.dtype
        else np.zeros(spec.at(sizes), spec.dtype)
        for spec in signature.inputs
    }


def tolerances(signature: Signature) -> dict[str, float]:
    """Returns how far outputs may be off, by the coarsest dtype of a signature."""
    dtypes = {spec.dtype for spec in (*signature.inputs, *signature.outputs)}
    rtol = max((_TOLERANCES.get(dtype, 0.0) for dtype in dtypes), default=0.0)
    return {"rtol": rtol, "atol": rtol / 10}


def excess(found: np.ndarray, expected: np.ndarray, *, rtol: float, atol: float) -> float | None:
    """Returns the largest difference if one is above `atol + rtol * |expected|`; two NaN are equal."""
    ours, theirs = (np.asarray(side, np.float64) for side in (found, expected))
    with np.errstate(invalid="ignore"):
        off = np.abs(ours - theirs)
    # Equal infinities have the difference NaN.
    off = np.where((ours == theirs) | (np.isnan(ours) & np.isnan(theirs)), 0.0, off)
    return None if np.all((off == 0) | (off <= atol + rtol * np.abs(theirs))) else float(off.max())


def compare(example: Example, expected: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray]) -> None:
    """Compares outputs with those of an example.

    Raises:
      BundleError: an output differs by more than the example's tolerance.
    """
    for name, array in found.items():
        if name not in expected or expected[name].shape != array.shape:
            raise BundleError(f"{example.file} has no output {name!r} of the shape {list(array.shape)}. Export again.")
        difference = excess(array, expected[name], rtol=example.rtol, atol=example.atol)
        if difference is not None:
            raise BundleError(
                f"{example.file}: on this machine the output {name!r} differs from the exported one by up to "
                f"{difference:.3g}. Export the model again with this version of jax."
            )
