"""Training of one adapter: gradients that accumulate until an optimizer step, and its state on disk."""

import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import Field, FiniteFloat, NonNegativeFloat, PositiveFloat

from stack_core.abi.config import config
from stack_core.abi.data import IGNORED_TARGET
from stack_core.abi.errors import CheckpointError, TrainingError
from stack_core.abi.formats import GenerativeCheckpoint
from stack_core.runtime.atomic_directory import atomic_directory
from stack_rl.tinker.adapters import ALPHA, Factors, adapted
from stack_rl.tinker.datums import batched, checked
from stack_rl.tinker.losses import LOSSES, loss_settings

__all__ = ["AdamParams", "AdapterState", "AdapterTrainer", "ForwardBackwardOutput", "LoraSettings"]

_Decay = Annotated[FiniteFloat, Field(ge=0.0, lt=1.0)]
_ARRAYS, _SETTINGS = "arrays.npz", "adapter.json"


@config
class AdamParams:
    """Hyperparameters of one AdamW step, with the defaults of the Tinker API.

    Attributes:
      learning_rate: step size.
      beta1, beta2: decay rates of the moments.
      eps: added to the root of the second moment.
      weight_decay: decoupled weight decay, multiplied by the learning rate as in PyTorch.
      grad_clip_norm: maximum global norm of the gradient; 0 disables clipping.
    """

    learning_rate: NonNegativeFloat = 1e-4
    beta1: _Decay = 0.9
    beta2: _Decay = 0.95
    eps: PositiveFloat = 1e-12
    weight_decay: NonNegativeFloat = 0.0
    grad_clip_norm: NonNegativeFloat = 0.0


@config
class LoraSettings:
    """Sizes of a new adapter.

    Attributes:
      rank: rank of all matrices.
      train_attn, train_mlp: add adapters to the attention and feed-forward layers.
    """

    rank: Annotated[int, Field(ge=1)] = 32
    train_attn: bool = True
    train_mlp: bool = True

    @property
    def scale(self) -> float:
        return ALPHA / self.rank


@dataclass
class AdapterState:
    """An adapter with its optimizer.

    Attributes:
      lora: its sizes.
      factors: trained parameters.
      moments: first and second moment, each in the structure of `factors`.
      steps: number of optimizer steps.
      gradient: sum of the gradients since the last step, or None before the first.
    """

    lora: LoraSettings
    factors: Factors
    moments: tuple[Factors, Factors]
    steps: int = 0
    gradient: Factors | None = None

    @classmethod
    def of(cls, lora: LoraSettings, factors: Factors) -> "AdapterState":
        zeros = jax.tree.map(jnp.zeros_like, factors)
        return cls(lora, factors, (zeros, zeros))

    def save(self, directory: Path) -> None:
        """Writes the adapter and its optimizer atomically.

        Raises:
          ConversionError: the directory exists, or cannot be written.
        """
        trees = {"factors": self.factors, "first": self.moments[0], "second": self.moments[1]}
        arrays: dict[str, Any] = {
            f"{name}|{path}|{part}": np.asarray(array)
            for name, tree in trees.items()
            for path, each in tree.items()
            for part, array in each.items()
        }
        lora = {name: getattr(self.lora, name) for name in ("rank", "train_attn", "train_mlp")}
        with atomic_directory(directory) as partial_directory:
            np.savez(partial_directory / _ARRAYS, **arrays)
            (partial_directory / _SETTINGS).write_text(json.dumps({"lora": lora, "steps": self.steps}))

    @classmethod
    def load(cls, directory: Path, targets: Mapping[str, Sequence[int]], *, optimizer: bool) -> "AdapterState":
        """Reads an adapter, with its optimizer or with a new one.

        Raises:
          CheckpointError: it cannot be read, or belongs to another model.
        """
        try:
            settings = json.loads((directory / _SETTINGS).read_text())
            with np.load(directory / _ARRAYS) as file:
                arrays = {name: jnp.asarray(file[name]) for name in file.files}
            lora = LoraSettings(**settings["lora"])
        except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
            raise CheckpointError(f"{directory} holds no readable adapter: {error}. Give another path.") from error
        trees: dict[str, dict[str, dict[str, Any]]] = {}
        for name, array in arrays.items():
            tree, path, part = name.split("|")
            trees.setdefault(tree, {}).setdefault(path, {})[part] = array
        for path, each in trees["factors"].items():
            layers, d_in, d_out = targets.get(path, (0, 0, 0))
            if each["down"].shape[:2] != (layers, d_in) or each["up"].shape[::2] != (layers, d_out):
                raise CheckpointError(f"{directory} is an adapter of another model: {path} differs. Give another path.")
        if not optimizer:
            return cls.of(lora, trees["factors"])
        return cls(lora, trees["factors"], (trees["first"], trees["second"]), settings["steps"])


@dataclass(frozen=True)
class ForwardBackwardOutput:
    """Result of `forward_backward`.

    Attributes:
      loss_fn_outputs: `logprobs`, float32[tokens], of each datum's targets.
      metrics: "loss:sum", the sum of the loss over all tokens.
    """

    loss_fn_outputs: Sequence[Mapping[str, np.ndarray]]
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class AdapterTrainer:
    """Computes gradients and updates of adapters of one model.

    Attributes:
      checkpoint: the model.
      params: its parameters, which no adapter changes.
    """

    checkpoint: GenerativeCheckpoint
    params: Any
    _gradient: Any = field(init=False, repr=False)
    _forward: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_gradient", jax.jit(partial(self._run, backward=True), static_argnames=("loss",)))
        object.__setattr__(self, "_forward", jax.jit(partial(self._run, backward=False), static_argnames=("loss",)))

    def forward_backward(
        self,
        state: AdapterState,
        data: Sequence[Any],
        loss: str,
        settings: Mapping[str, float | str] | None = None,
        *,
        backward: bool = True,
    ) -> ForwardBackwardOutput:
        """Adds the gradient of a loss to `state.gradient`.

        Raises:
          DataError: the loss is unknown, or its inputs in a datum are invalid.
        """
        numbers = loss_settings(loss, settings)
        longest = self.checkpoint.max_positions
        examples = checked(data, loss, vocab_size=self.checkpoint.vocab_size, max_tokens=longest)
        total, found, gradient = 0.0, [np.zeros(0, np.float32)] * len(examples), state.gradient
        for rows in batched(examples, max_tokens=longest):
            arrays = self.params, state.factors, state.lora.scale, rows.batch, rows.inputs, numbers
            if backward:
                value, logprobs, added = self._gradient(*arrays, loss=loss)
                gradient = added if gradient is None else _add(gradient, added)
            else:
                value, logprobs = self._forward(*arrays, loss=loss)
            total += float(value)
            for row, number in enumerate(rows.members):
                found[number] = np.asarray(logprobs[row, : len(examples[number].tokens)], np.float32)
        # Assign last: a call that fails must not leave a part of its gradient.
        state.gradient = gradient
        return ForwardBackwardOutput([{"logprobs": each} for each in found], {"loss:sum": total})

    def optim_step(self, state: AdapterState, adam: AdamParams) -> Mapping[str, float]:
        """Applies AdamW to the accumulated gradient and resets the gradient.

        Raises:
          TrainingError: no gradient was accumulated, or it is not finite; the adapter stays unchanged.
        """
        if state.gradient is None:
            raise TrainingError("optim_step found no gradient. Call forward_backward before it.")
        gradient, state.gradient = state.gradient, None
        norm = float(_norm(gradient))
        if not np.isfinite(norm):
            raise TrainingError("The gradient is not finite. Lower the learning rate, or look for it in the data.")
        values = {name: getattr(adam, name) for name in AdamParams.__dataclass_fields__}
        state.steps += 1
        state.factors, state.moments = _adam(state.factors, state.moments, gradient, norm, state.steps, values)
        return {"unclipped_grad_l2:mean": norm}

    def _run(
        self,
        params: Any,
        factors: Factors,
        scale: Any,
        batch: Any,
        inputs: Any,
        settings: Any,
        *,
        loss: str,
        backward: bool,
    ) -> Any:
        def total(factors: Factors) -> Any:
            model = self.checkpoint.model(adapted(params, factors, scale))
            hidden = model(batch["tokens"], batch["positions"], batch["segment_ids"]).hidden
            losses = model.head().cross_entropy(hidden, batch["targets"], ignore_index=IGNORED_TARGET, reduction="none")
            is_target = batch["targets"] != IGNORED_TARGET
            # Padding adds 0 to every loss: its log-probability and inputs are 0, and its ratio is 1.
            logprobs = jnp.where(is_target, -losses.astype(jnp.float32), 0.0)
            each = LOSSES[loss].token_losses(logprobs, inputs, settings)
            return jnp.sum(jnp.where(is_target, each, 0.0)), logprobs

        if not backward:
            return total(factors)
        (value, logprobs), gradient = jax.value_and_grad(total, has_aux=True)(factors)
        return value, logprobs, gradient


@partial(jax.jit, donate_argnums=0)
def _add(gradient: Factors, added: Factors) -> Factors:
    return jax.tree.map(jnp.add, gradient, added)


@jax.jit
def _norm(gradient: Factors) -> jax.Array:
    return jnp.sqrt(sum(jnp.sum(jnp.square(each)) for each in jax.tree.leaves(gradient)))


@jax.jit
def _adam(factors: Any, moments: Any, gradient: Any, norm: Any, steps: Any, adam: Mapping[str, Any]) -> Any:
    """Computes AdamW as `torch.optim.AdamW` does, after clipping by the global norm."""
    limit, (beta1, beta2) = adam["grad_clip_norm"], (adam["beta1"], adam["beta2"])
    clip = jnp.where((limit > 0) & (norm > limit), limit / norm, 1.0)
    gradient = jax.tree.map(lambda each: each * clip, gradient)
    first = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, moments[0], gradient)
    second = jax.tree.map(lambda v, g: beta2 * v + (1 - beta2) * g * g, moments[1], gradient)

    def updated(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
        mean, square = m / (1 - beta1**steps), v / (1 - beta2**steps)
        decayed = p * (1 - adam["learning_rate"] * adam["weight_decay"])
        return decayed - adam["learning_rate"] * mean / (jnp.sqrt(square) + adam["eps"])

    return jax.tree.map(updated, factors, first, second), (first, second)
