"""Embeddings of texts: hidden states of a language model, pooled to one vector for each prompt."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from stack_core.abi.engines import Pooling
from stack_core.abi.errors import GenerationError
from stack_core.abi.formats import GenerativeCheckpoint
from stack_serve.llm.placement import Placement
from stack_serve.llm.unstacking import layer_by_layer, loops_over

__all__ = ["PoolingPrograms", "check_pooling"]

_KNOWN = get_args(Pooling)

# A shorter bucket would save little time for one more program.
_LEAST_TOKENS = 16

Shape = tuple[int, int]
Progress = Callable[[str, int, int], None]


class PoolingPrograms:
    """Programs that run the body of a model on complete prompts, without cache pages, between an engine's steps.

    A program has the shape [rows, tokens], where `tokens` is a power of two or `max_tokens`, and `rows` is 1 or the
    number of rows that have `batch_tokens` tokens in total. Prompts are sorted by length to reduce padding.

    Args:
      checkpoint: model to run.
      placement: placement of the parameters.
      params: returns the current parameters as placed by the engine; its arrays may be `Layers`.
      max_tokens: maximum length of a prompt.
      batch_tokens: maximum number of tokens of a launch, unless a single prompt has more. It bounds the time for which
        a launch delays the steps of the engine.
    """

    def __init__(
        self,
        checkpoint: GenerativeCheckpoint,
        placement: Placement,
        params: Callable[[], Any],
        *,
        max_tokens: int,
        batch_tokens: int,
    ) -> None:
        self._checkpoint, self._placement, self._params = checkpoint, placement, params
        self._max_tokens, self._batch_tokens = max_tokens, batch_tokens
        self._compiled: dict[Shape, Any] = {}
        # One launch at a time: more would multiply the memory of the activations.
        self._lock = threading.Lock()

    def compile_all(self, progress: Progress | None = None) -> None:
        """Compiles the programs of all shapes; `progress` is as in `Programs.compile_all`."""
        powers = range(_LEAST_TOKENS.bit_length() - 1, self._max_tokens.bit_length() + 1)
        sizes = {self._tokens_bucket(1 << power) for power in powers}
        shapes = sorted({(rows, tokens) for tokens in sizes for rows in (1, self._rows(tokens))})
        for number, shape in enumerate(shapes, start=1):
            self._program(shape)
            if progress is not None:
                progress("embed {} {}".format(*shape), number, len(shapes))

    def looped(self, params: Any) -> Any:
        """Returns True for each parameter that the loops over layers only slice; see `loops_over`."""
        rows, tokens = 1, self._tokens_bucket(1)
        shapes = (jax.ShapeDtypeStruct((rows, tokens), jnp.int32), jax.ShapeDtypeStruct((rows,), jnp.int32))
        return loops_over(self._pool, params, *shapes, jax.ShapeDtypeStruct((), jnp.int32))[0]

    def embed(self, prompts: Sequence[Sequence[int]], pooling: Pooling) -> np.ndarray:
        """Computes float32[prompts, embed] of prompts with 1 to `max_tokens` tokens each; waits for the result."""
        order = sorted(range(len(prompts)), key=lambda place: len(prompts[place]), reverse=True)
        found: list[np.ndarray] = [np.empty(0)] * len(prompts)
        while order:
            tokens = self._tokens_bucket(len(prompts[order[0]]))
            rows = min(len(order), self._rows(tokens))
            places, order = order[:rows], order[rows:]
            with self._lock:
                vectors = np.asarray(self._launch([prompts[place] for place in places], tokens, pooling), np.float32)
            for place, vector in zip(places, vectors, strict=False):  # rows of padding follow
                found[place] = vector
        return np.stack(found)

    def _launch(self, prompts: Sequence[Sequence[int]], tokens: int, pooling: Pooling) -> jax.Array:
        rows = 1 if len(prompts) == 1 else self._rows(tokens)
        packed, lengths = np.zeros((rows, tokens), np.int32), np.ones(rows, np.int32)
        for row, prompt in enumerate(prompts):
            packed[row, : len(prompt)] = prompt
            lengths[row] = len(prompt)
        return self._program((rows, tokens))(self._params(), packed, lengths, np.int32(_KNOWN.index(pooling)))

    def _program(self, shape: Shape) -> Any:
        if shape not in self._compiled:
            self._compiled[shape] = self._placement.traced(self._lowered, shape).compile()
        return self._compiled[shape]

    def _lowered(self, shape: Shape) -> Any:
        def pool(*args: Any) -> Any:
            return layer_by_layer(self._pool)(*args)

        tokens, lengths = (jax.ShapeDtypeStruct(each, jnp.int32) for each in (shape, shape[:1]))
        return jax.jit(pool).lower(self._params(), tokens, lengths, jax.ShapeDtypeStruct((), jnp.int32))

    @jax.named_scope("embed")
    def _pool(
        self,
        params: Any,
        tokens: Int[Array, "rows tokens"],
        lengths: Int[Array, " rows"],
        pooling: Int[Array, ""],
    ) -> Float[Array, "rows embed"]:
        """Returns the vector of each row; `pooling` is an index into the values of `Pooling`."""
        positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        is_real = positions < lengths[:, None]
        segments = is_real.astype(jnp.int32)  # 0 is padding
        model = self._checkpoint.model(params)
        outputs = model(tokens, jnp.broadcast_to(positions, tokens.shape), segment_ids=segments)
        hidden = outputs.hidden.astype(jnp.float32)
        last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
        summed = jnp.sum(jnp.where(is_real[..., None], hidden, 0.0), axis=1)
        found = {"last": last, "mean": summed / lengths[:, None].astype(jnp.float32), "cls": hidden[:, 0]}
        return jax.lax.select_n(pooling, *(found[name] for name in _KNOWN))

    def _tokens_bucket(self, tokens: int) -> int:
        return min(max(_LEAST_TOKENS, 1 << (tokens - 1).bit_length()), self._max_tokens)

    def _rows(self, tokens: int) -> int:
        return max(1, self._batch_tokens // tokens)


def check_pooling(pooling: str) -> None:
    """Raises a GenerationError if a pooling is unknown."""
    if pooling not in _KNOWN:
        expected = ", ".join(map(repr, _KNOWN))
        raise GenerationError(f"pooling={pooling!r}: expected one of {expected}.", parameter="pooling")
