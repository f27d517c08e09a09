"""The dtypes of training.

| array | dtype |
|---|---|
| trained parameters | `Precision.params`: float32, or bfloat16 with stochastic rounding |
| frozen parameters, inference, exports | `model.param_dtype`, the dtype of the published model |
| activations and matrix products | `model.dtype` |
| sums of gradients over microbatches, optimizer states, updates | float32 |

A bfloat16 number has 8 bits of precision, so an update below 1/512 of a parameter rounds to nothing. Fine-tuning at
learning rates of 1e-5 and less would leave most parameters unchanged.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError, TrainingError
from stack_core.ops.building import accurate_dtype
from stack_core.runtime.tree_paths import path_name
from stack_train.optim.moments import round_stochastically

__all__ = [
    "Precision",
    "add_gradients",
    "apply_updates",
    "is_low_precision",
    "wide_dtype",
    "widen",
    "widen_optimizer",
    "zero_sums",
]


@config
class Precision:
    """The dtype of trained parameters.

    Attributes:
      params: "float32", regardless of the dtype of the initial checkpoint, or "bfloat16", which halves the memory of
        parameters. bfloat16 updates are rounded stochastically, with probabilities that preserve their mean.
    """

    params: Literal["float32", "bfloat16"] = "float32"

    def training_config(self, model_config: Any) -> Any:
        """Returns a model's config with the dtype of trained parameters as its `param_dtype`.

        Raises:
          ConfigError: the config lacks `param_dtype`, and `params` is not float32.
        """
        published = getattr(model_config, "param_dtype", None)
        # A config in float32, or without the field, already builds trained parameters in float32.
        if self.params == "float32" and (published is None or not is_low_precision(published)):
            return model_config
        if published is None:
            raise ConfigError(
                f"precision.params is {self.params!r}, and {type(model_config).__name__} has no param_dtype to set. "
                "Give the family's config the field param_dtype, or leave precision.params out."
            )
        changes: dict[str, Any] = {"param_dtype": self.params}
        return dataclasses.replace(model_config, **changes)

    def trained_dtype(self, dtype: Any) -> Any:
        """Returns the dtype of a trained parameter that the family creates in `dtype`."""
        return wide_dtype(dtype) if self.params == "float32" else dtype


def is_low_precision(dtype: Any) -> bool:
    """Returns whether a dtype has floats of less than 32 bits."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32


def wide_dtype(dtype: Any) -> Any:
    """Returns float32 for floats of less than 32 bits, and other dtypes unchanged."""
    return accurate_dtype(dtype) if is_low_precision(dtype) else dtype


def widen(tree: Any) -> Any:
    """Casts floats of less than 32 bits to float32, the dtype of sums and optimizer states."""
    return jax.tree.map(lambda x: x.astype(wide_dtype(x.dtype)), tree)


def zero_sums(tree: Any) -> Any:
    """Returns zeros to add gradients of these parameters to, of `widen`'s dtypes."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, wide_dtype(x.dtype)), tree)


def add_gradients(total: Any, gradients: Any, weight: Any = 1.0) -> Any:
    """Adds gradients times a weight to a total of `zero_sums`."""
    return jax.tree.map(lambda sum_, x: sum_ + x.astype(sum_.dtype) * jnp.asarray(weight, sum_.dtype), total, gradients)


def widen_optimizer(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Runs an optimizer in float32: its states, and the gradients and parameters that it sees."""
    # Plain transformations do not accept the keyword arguments that `update` passes on.
    inner = optax.with_extra_args_support(inner)

    def init(params: Any) -> Any:
        return inner.init(widen(params))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        return inner.update(widen(updates), state, None if params is None else widen(params), **extra)

    return optax.GradientTransformationExtraArgs(init, update)


def apply_updates(params: Any, updates: Any, *, key: jax.Array) -> Any:
    """Adds updates to parameters, in float32; sums of bfloat16 parameters are rounded stochastically.

    Args:
      key: of this update. The nth parameter draws from `fold_in(key, n)`.

    Raises:
      TrainingError: a parameter has another dtype of less than 32 bits.
    """

    def apply(place: int, path: Any, param: jax.Array, update: jax.Array) -> jax.Array:
        wide = wide_dtype(param.dtype)
        total = param.astype(wide) + update.astype(wide)
        if not is_low_precision(param.dtype):
            return total
        if param.dtype != jnp.bfloat16:
            raise TrainingError(
                f"Parameter {path_name(path)!r} is {param.dtype}; trained parameters are float32 or bfloat16."
            )
        return round_stochastically(total, key=jax.random.fold_in(key, place))

    # Paths name the parameter in the error; a separate key for each prevents equal noise in equal shapes.
    leaves, structure = jax.tree.flatten_with_path(params)
    pairs = zip(leaves, structure.flatten_up_to(updates), strict=True)
    return structure.unflatten([apply(place, *leaf, update) for place, (leaf, update) in enumerate(pairs)])
