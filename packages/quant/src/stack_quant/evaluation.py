"""The loss of a model and of its quantized versions on held-out batches."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from stack_core import ops
from stack_core.abi.formats import TrainedModel
from stack_core.abi.metrics import combine_all
from stack_core.ops.building import is_quantized
from stack_quant.section import QuantConfig, Quantization

__all__ = ["Evaluation", "as_floats"]


class Evaluation:
    """Mean losses over the same held-out targets.

    Args:
      trained: model with its objective.
      batches: held-out batches.
    """

    def __init__(self, trained: TrainedModel, batches: Sequence[Mapping[str, Any]]) -> None:
        self._trained, self._batches = trained, batches
        self._float: Callable[..., Any] | None = None
        self.targets = 0

    def __call__(
        self, model: Any, section: QuantConfig | None = None, progress: Callable[[int, int], None] = lambda *_: None
    ) -> float | None:
        """Computes the mean loss over all targets, whose number becomes `targets`; None without any.

        Args:
          section: rules of a quantized model; None for a model in float.
          progress: callback with the completed batches and their number.
        """
        from flax import nnx  # an optional dependency, installed if there is an nnx.Module

        graph, state = nnx.split(model)
        if section is None:
            # Models in float have one graph, or another one with an untied head; a graph is compiled once.
            self._float = self._float or jax.jit(
                lambda graph, state, batch: self._trained.metrics(nnx.merge(graph, state), batch), static_argnums=0
            )
            compiled = functools.partial(self._float, graph)
        else:
            call = Quantization(section, self._batches[0] if self._batches else {}).call
            compiled = jax.jit(lambda state, batch: call(self._trained.metrics, nnx.merge(graph, state), batch))
        found = []
        for done, batch in enumerate(self._batches):
            progress(done, len(self._batches))
            found.append(jax.device_get(compiled(state, dict(batch))["loss"]))
        mean = combine_all([{"loss": loss} for loss in found]).get("loss")
        self.targets = int(mean.weight) if mean is not None else 0
        return float(mean) if mean is not None and mean.weight else None

    def of_quantized(self, quantized: Any, section: QuantConfig) -> float | None:
        """Computes the mean loss of a quantized model. Without quantized activations it is multiplied in float."""
        if any(rule.activations for rule in section.rules):
            return self(quantized, section)
        return self(as_floats(self._trained.model, quantized))


def as_floats(model: Any, quantized: Any) -> Any:
    """Returns a copy of the float model with the values of a quantized model, and with its head untied if that is."""
    from flax import nnx  # as above

    from stack_quant.nnx_model import plain_module, variables_by_path

    values = jax.tree.map(
        lambda leaf: ops.dequantize(leaf, leaf.dtype) if is_quantized(leaf) else leaf,
        nnx.to_pure_dict(nnx.state(quantized)),
        is_leaf=is_quantized,
    )
    is_untied = variables_by_path(plain_module(quantized)).keys() != variables_by_path(model).keys()
    copy = nnx.clone(model.untied() if is_untied else model)
    state = nnx.state(copy)
    nnx.replace_by_pure_dict(state, values)
    nnx.update(copy, state)
    return copy
