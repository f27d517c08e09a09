"""Logits processors: changes of the sampled distribution by plugins, inside the program that samples."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jaxtyping import Array, Float

__all__ = ["NO_TOKEN", "History", "LogitsProcessor"]

NO_TOKEN = 2**31 - 1
"""Padding of tokens: equal to no token, and an index behind the end, which `logits.at[tokens]` drops."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class History:
    """Tokens of a sequence before the sampled token.

    Attributes:
      tokens: int32[max_tokens], tokens of the prompt and the continuation; `NO_TOKEN` from `length` on.
      length: int32[], number of tokens.
      prompt_tokens: int32[], number of tokens of the prompt.
    """

    tokens: Any
    length: Any
    prompt_tokens: Any


@dataclass(frozen=True)
class LogitsProcessor:
    """A change of the logits, which requests select and parameterize by its registered name.

        z' = function(z, params, history)

        z: float32[vocab], logits of one sequence after constraint, bias and penalties
        z': float32[vocab], logits that are divided by the temperature; -inf excludes a token

    The function is pure and is traced once, under `jax.vmap` over the rows of a step. A sampled token therefore depends
    on its own request only, and its distribution on nothing but the arguments: seeds, recomputed sequences and the
    verification of drafted tokens stay exact. A token with -inf in z keeps it, so a constraint cannot be violated.

    Attributes:
      params: config class (`stack_core.abi.config.config`) of the parameters of a request. Fields of type bool, int and
        float are scalars for the function. Fields of type `tuple[int, ...]` or `tuple[float, ...]` need a `max_length`
        (`pydantic.Field`) and are arrays of that length, padded with `NO_TOKEN` or 0.0.
      function: the change; `params` has the fields as attributes, of dtype bool, int32 or float32.
    """

    params: type[Any]
    function: Callable[[Float[Array, " vocab"], Any, History], Float[Array, " vocab"]]
