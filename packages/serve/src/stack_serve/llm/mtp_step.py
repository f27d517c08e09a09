"""Device programs of a model's multi-token prediction layer, which drafts from the model's hidden states."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from stack_core.abi.errors import ConfigError
from stack_core.abi.formats import GenerativeCheckpoint
from stack_core.abi.models import ImageTokens
from stack_core.text.prediction import PredictsAhead
from stack_serve.llm.adapters import Weights
from stack_serve.llm.cache import HiddenStates, LayoutPreferences, PagedKVCache
from stack_serve.llm.config import EngineConfig
from stack_serve.llm.step import ROW_FIELDS, Step

__all__ = ["HiddenStep", "MtpLayers", "MtpPools", "MtpStep", "cached_states"]

_START = ROW_FIELDS.index("start")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MtpPools:
    """Pools of a multi-token prediction layer, or their specifications.

    Attributes:
      layer: `PagedLayer` with the keys of the layer.
      hidden: hidden states of the model, by the place of their token.
    """

    layer: Any
    hidden: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MtpLayers:
    """Pools of a model and of its multi-token prediction layer, or their specifications.

    Attributes:
      model: pools and states of the model, in the structure of its states.
      mtp: pools of the layer.
    """

    model: Any
    mtp: MtpPools


def cached_states(checkpoint: GenerativeCheckpoint, config: EngineConfig) -> Any:
    """Returns the states that the engine keeps: the model's, and `MtpLayers` with the speculation method "mtp".

    Raises:
      ConfigError: the method is "mtp", and the model has no layer for multi-token prediction.
    """
    if config.speculation is None or config.speculation.method != "mtp":
        return checkpoint.states
    states: Any = None

    def trace(params: Any) -> Any:
        nonlocal states
        model = checkpoint.model(params)
        states = model.mtp_states if isinstance(model, PredictsAhead) else None
        one = jnp.zeros((1, 1), jnp.int32)
        return None if states is None else model(one, one).hidden

    hidden = jax.eval_shape(trace, checkpoint.parameters)
    if states is None:
        raise ConfigError(
            f"speculation: model {checkpoint.name!r} has no layer for multi-token prediction, which the method mtp "
            "needs. Use ngram, or draft with a draft_model; or serve a run that was trained with model.mtp_layers=1 "
            "and objective.mtp_loss, or a checkpoint that stores the layer."
        )
    return MtpLayers(checkpoint.states, MtpPools(states, HiddenStates(dim=hidden.shape[-1], dtype=hidden.dtype.name)))


class HiddenStep(Step):
    """A step that also stores the hidden state of each token, for the multi-token prediction layer."""

    def __call__(
        self,
        weights: Weights,
        layers: Any,
        known: Int[Array, "slots max_tokens"],
        rows: Int[Array, "rows fields"],
        *,
        tokens: int,
        single: bool = False,
        preferences: LayoutPreferences | None = None,
        images: ImageTokens | None = None,
    ) -> tuple[Any, Float[Array, "tokens 1 embed"], Float[Array, "rows embed"]]:
        """Runs the forward pass; see `Step`. `layers` are `MtpLayers`."""
        options: Any = {"tokens": tokens, "single": single, "preferences": preferences, "images": images}
        model, hidden, last = super().__call__(weights, layers.model, known, rows, **options)
        places, *_ = self._places(known, rows, tokens)
        stored = PagedKVCache(None, places, self.layout).store_hidden(layers.mtp.hidden, hidden)
        return MtpLayers(model, replace(layers.mtp, hidden=stored)), hidden, last


class MtpStep(Step):
    """A step of the multi-token prediction layer, whose token t follows the hidden state of token t - 1.

    The layer predicts the token after t from this hidden state and the embedding of t. It has the place and position of
    the hidden state, as in training, so the key for token t is at place t - 1, and token 0 has none. A sequence that
    shares the pages of a prefix replaces the key at the last place, which depends on the next token.

    Layers of greater depth are not used. Drafts of several tokens apply the first layer repeatedly, to its own hidden
    states.
    """

    def __call__(
        self,
        weights: Weights,
        layers: Any,
        known: Int[Array, "slots max_tokens"],
        rows: Int[Array, "rows fields"],
        *,
        tokens: int,
        single: bool = False,
        preferences: LayoutPreferences | None = None,
        images: ImageTokens | None = None,
    ) -> tuple[Any, Float[Array, "tokens 1 embed"], Float[Array, "rows embed"]]:
        """Runs the layer over the tokens of all rows; see `Step`. `layers` are `MtpPools`.

        A call with `single` drafts: its hidden states are stored at the places of their tokens, where the next call
        reads them. The verification replaces them by the model's. Other calls compute keys of known tokens, and leave
        the model's hidden states unchanged.
        """
        before = rows.at[:, _START].set(jnp.maximum(rows[:, _START] - 1, 0))
        places, token_ids, positions, _ = self._places(known, before, tokens, ahead=1)
        cache: Any = PagedKVCache(layers.layer, places, self.layout, single)
        model: Any = self.checkpoint.model(weights.params)
        given = cache.load_hidden(layers.hidden)
        outputs = model.predict_ahead(given, token_ids[:, None], positions[:, None], cache)
        hidden, stored = outputs.hidden, layers.hidden
        if single:
            own, *_ = self._places(known, rows, tokens)
            stored = PagedKVCache(None, own, self.layout).store_hidden(stored, hidden)
        last = hidden[jnp.maximum(places.query_starts[1:] - 1, 0), 0]
        return MtpPools(outputs.cache.layers, stored), hidden, last
