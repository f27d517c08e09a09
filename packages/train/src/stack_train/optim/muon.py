"""Muon for hidden matrices, with AdamW for the remaining parameters."""

from typing import Any, Literal

import optax
from optax import contrib
from pydantic import PositiveFloat, PositiveInt

from stack_core.abi.config import config
from stack_train.optim.axes import AxesTree, is_hidden_matrix, is_matrix, map_axes, matrix_axes
from stack_train.optim.optimizer import OptimizerConfig
from stack_train.optim.schedule import Fraction

__all__ = ["MuonConfig"]

_MUON, _ADAMW = "muon", "adamw"


@config
class MuonConfig(OptimizerConfig):
    """Muon, which orthogonalizes the momentum of hidden matrices by Newton-Schulz iterations.

    Each matrix of a stacked array is orthogonalized separately. Embeddings, heads, scales, biases and tensors of more
    than two axes are trained by AdamW. Both share one learning rate because `update_rms` scales Muon's updates to the
    size of Adam's. Source: Jordan et al., Muon, 2024; Liu et al., Muon is Scalable for LLM Training, 2025
    (arXiv:2502.16982).

    Attributes:
      name: selects this optimizer.
      momentum: decay of Muon's momentum.
      nesterov: True uses Nesterov momentum in Muon.
      iterations: number of Newton-Schulz iterations.
      update_rms: root mean square of an orthogonal update; None scales it by sqrt(max(1, d_out / d_in)) instead.
      adam_beta1: decay of AdamW's first moments.
      adam_beta2: decay of AdamW's second moments.
      epsilon: numerical stability term in the denominators of Muon and AdamW.
    """

    name: Literal["muon"] = "muon"
    momentum: Fraction = 0.95
    nesterov: bool = True
    iterations: PositiveInt = 5
    update_rms: PositiveFloat | None = 0.2
    adam_beta1: Fraction = 0.9
    adam_beta2: Fraction = 0.95
    epsilon: PositiveFloat = 1e-8

    def transformation(self, rate: optax.Schedule, axes: AxesTree) -> optax.GradientTransformation:
        hidden = map_axes(_dimensions, axes)
        muon = contrib.muon(
            rate,
            ns_steps=self.iterations,
            beta=self.momentum,
            eps=self.epsilon,
            nesterov=self.nesterov,
            weight_decay=self.weight_decay,
            muon_weight_dimension_numbers=hidden,
            consistent_rms=self.update_rms,
        )
        decayed = map_axes(is_matrix, axes)
        adamw = optax.adamw(
            rate, self.adam_beta1, self.adam_beta2, self.epsilon, weight_decay=self.weight_decay, mask=decayed
        )
        names = map_axes(lambda names: _MUON if is_hidden_matrix(names) else _ADAMW, axes)
        return optax.partition({_MUON: muon, _ADAMW: adamw}, names)


def _dimensions(axes: tuple[str | None, ...]) -> Any:
    """Returns the input and output axis of an array of matrices [..., d_in, d_out], or None for other parameters."""
    return contrib.MuonDimensionNumbers(*matrix_axes(axes)) if is_hidden_matrix(axes) else None
