"""Multi-token prediction: the contract of a language model that drafts its own tokens."""

from typing import Any, Protocol, runtime_checkable

import jax

from stack_core.abi.caches import KVCache
from stack_core.abi.models import Outputs

__all__ = ["PredictsAhead"]


@runtime_checkable
class PredictsAhead(Protocol):
    """A `LanguageModel` that may have a layer for multi-token prediction, with which an engine drafts tokens.

    Attributes:
      mtp_states: state of the layer, as in `LanguageModel.states`; None without the layer.
    """

    @property
    def mtp_states(self) -> Any: ...

    def predict_ahead(self, hidden: jax.Array, tokens: jax.Array, positions: jax.Array, cache: KVCache) -> Outputs:
        """Runs the layer; the head of the result's `hidden` predicts the token after `tokens`.

        Args:
          hidden: [batch, seq, embed], outputs of the model, or of this method for the token before.
          tokens: int32[batch, seq], the token that follows each hidden state.
          positions: int32[batch, seq], positions of the hidden states.
          cache: keys of the layer for earlier hidden states, which the call extends.
        """
        ...
