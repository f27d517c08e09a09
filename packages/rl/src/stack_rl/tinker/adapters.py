"""Low-rank adapters of a served model: their parameters, their application while training, and the engine's view."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from stack_core.abi.adapters import ExpectsAdapters, LowRankFactors
from stack_core.abi.errors import ConfigError
from stack_core.abi.formats import GenerativeCheckpoint
from stack_core.ops.building import LowRankWeight, is_quantized
from stack_core.runtime.tree_paths import path_name

__all__ = ["ALPHA", "AdaptedCheckpoint", "Factors", "adapted", "as_adapters", "new_factors", "targets_of"]

ALPHA: Final = 32.0
"""Numerator of the scale alpha / rank, as in Tinker."""

Factors = Mapping[str, Mapping[str, Any]]
"""`down` [layers, d_in, rank] and `up` [layers, rank, d_out] of each adapted parameter, float32, by path."""

_PARTS: Final = {"attn": "/attention/", "mlp": "/feed_forward/"}
_STACKED = 3


def targets_of(checkpoint: GenerativeCheckpoint) -> dict[str, tuple[int, ...]]:
    """Returns the shapes [layers, d_in, d_out] of the matrices of attention and feed-forward layers, by path.

    Raises:
      ConfigError: the model lacks these matrices, or some are quantized.
    """
    leaves = jax.tree_util.tree_leaves_with_path(checkpoint.parameters, is_leaf=is_quantized)
    found = {path_name(path): leaf for path, leaf in leaves if len(leaf.shape) == _STACKED}
    targets = {path: leaf for path, leaf in found.items() if any(part in path for part in _PARTS.values())}
    if not targets:
        raise ConfigError(f"{checkpoint.name} has no matrices of attention or feed-forward layers to adapt.")
    if quantized := [path for path, leaf in targets.items() if is_quantized(leaf)]:
        raise ConfigError(
            f"{quantized[0]} of {checkpoint.name} is quantized, to which the engine applies no adapters. "
            "Serve the model from which it was quantized."
        )
    return {path: tuple(leaf.shape) for path, leaf in targets.items()}


def new_factors(
    targets: Mapping[str, Sequence[int]], *, rank: int, seed: int, train_attn: bool = True, train_mlp: bool = True
) -> Factors:
    """Initializes an adapter that leaves the model unchanged: `down` is uniform in +-1 / sqrt(d_in), and `up` is 0.

    Source: Hu et al., 2021 (arXiv:2106.09685), with the distribution of PEFT.
    """
    parts = [name for name, is_trained in (("attn", train_attn), ("mlp", train_mlp)) if is_trained]
    source, found = np.random.default_rng(seed), dict[str, Mapping[str, Any]]()
    for path, (layers, d_in, d_out) in sorted(targets.items()):
        if any(_PARTS[part] in path for part in parts):
            bound = 1 / math.sqrt(d_in)
            down = source.uniform(-bound, bound, (layers, d_in, rank)).astype(np.float32)
            found[path] = {"down": jnp.asarray(down), "up": jnp.zeros((layers, rank, d_out), jnp.float32)}
    return found


def as_adapters(factors: Factors, scale: float) -> dict[str, LowRankFactors]:
    """Converts an adapter for engines, with arrays on the host."""
    return {
        path: LowRankFactors(np.asarray(each["down"]), np.asarray(each["up"]), scale) for path, each in factors.items()
    }


def adapted(params: Any, factors: Factors, scale: Any) -> Any:
    """Returns the parameters of a model with an adapter; products then add scale (x down) up."""

    def with_adapter(path: Any, leaf: Any) -> Any:
        name = path_name(path)
        if name not in factors:
            return leaf
        down, up = (factors[name][each][:, None].astype(leaf.dtype) for each in ("down", "up"))
        scales = jnp.full((leaf.shape[0], 1), scale, jnp.float32)
        return LowRankWeight(leaf, down, up, scales, None, name)

    return jax.tree_util.tree_map_with_path(with_adapter, params, is_leaf=is_quantized)


class AdaptedCheckpoint(ExpectsAdapters):
    """A `GenerativeCheckpoint` that shares its parameters with a trainer and expects adapters.

    Attributes:
      params: parameters on the default device.
    """

    def __init__(self, checkpoint: GenerativeCheckpoint, *, rank: int) -> None:
        # Copied, because `isinstance` of a protocol does not call `__getattr__` from Python 3.12 on.
        names = [name for name in dir(checkpoint) if not name.startswith("_") and name != "load_params"]
        vars(self).update({name: getattr(checkpoint, name) for name in names})
        self.adapter_paths, self.adapter_rank = tuple(targets_of(checkpoint)), rank
        self.params = checkpoint.load_params()

    def load_params(self, shardings: Any = None) -> Any:
        """Returns the shared parameters, copied only if they are placed elsewhere."""
        return self.params if shardings is None else jax.device_put(self.params, shardings)
