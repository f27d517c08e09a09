"""An objective that trains a model of its own: a head that tells each token's place from the hidden states."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from stack_core.abi.config import config
from stack_core.abi.metrics import Metric
from stack_core.abi.objectives import Objective

__all__ = ["Guide", "GuidedConfig"]


class Guide(nnx.Module):
    def __init__(self, model: Any, *, key: jax.Array) -> None:
        kernel = 0.1 * jax.random.normal(key, (model.embed, 8))
        self.kernel = nnx.Param(kernel, logical_axes=("embed", "mlp"))
        self.bias = nnx.Param(jnp.zeros(8))

    def __call__(self, hidden: jax.Array) -> jax.Array:
        return jnp.sum(hidden.astype(jnp.float32) @ self.kernel + self.bias, axis=-1)


@config
class GuidedConfig(Objective):
    """The mean square error of the guide."""

    name: Literal["guided"] = "guided"

    inputs: ClassVar[Mapping[str, str]] = MappingProxyType(
        dict.fromkeys(("tokens", "targets", "positions", "segment_ids"), "batch seq")
    )

    @property
    def auxiliary_models(self) -> Mapping[str, Callable[..., Any]]:
        return {"guide": Guide}

    def __call__(self, model: Any, batch: Any, *, key: jax.Array, guide: Guide) -> Any:
        hidden = model(batch["tokens"], batch["positions"], batch["segment_ids"]).hidden
        loss = jnp.mean((guide(hidden) - batch["positions"] / 8) ** 2)
        return loss, {"loss": Metric.mean(loss, jnp.float32(batch["tokens"].size))}

    def scores(self, model: Any, outputs: Any, batch: Any, *, guide: Guide) -> Mapping[str, jax.Array]:
        return {"places": guide(outputs.hidden)}
