"""Text generation with a language model, token by token, on the default device."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from stack_core.abi.caches import CacheStorage, LayerState, Recurrent
from stack_core.abi.errors import GenerationError
from stack_core.abi.formats import GenerativeCheckpoint
from stack_core.ops.kv_cache import DenseKVCache
from stack_core.ops.sampling.sampling import SamplingSettings, sample
from stack_core.report.document import continuation
from stack_core.text.detokenize import IncrementalDetokenizer, StopTexts
from stack_core.text.sources import start_token_of
from stack_train.generation.sampling import SamplingConfig

__all__ = ["FinishReason", "Generation", "TextGenerator", "TokenGenerator"]

FinishReason = Literal["end_token", "stop", "max_tokens", "max_positions"]

_SMALLEST_BUCKET = 16


@dataclass(frozen=True)
class Generation:
    """A finished continuation.

    Attributes:
      text: generated text, without the prompt, the end token and the stop text.
      tokens: all generated tokens, including those after the cut if a stop text ended the text.
      prompt_tokens: number of tokens of the prompt.
      finish_reason: reason why generation ended.
    """

    text: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    finish_reason: FinishReason

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        count = f"{self.prompt_tokens:,} tokens of prompt, {len(self.tokens):,} generated, {self.finish_reason}"
        return str(continuation("", self.text, count))


class TokenGenerator:
    """Generator of token ids, one sequence at a time.

    The prompt of an encoder-decoder is the source, which is encoded once. Prompts and the cache are padded to powers of
    two to limit the number of compiled shapes. Sampling settings are inputs of the program and never trigger a
    compilation.
    """

    def __init__(self, checkpoint: GenerativeCheckpoint, kv_cache: CacheStorage = "model") -> None:
        self._checkpoint, self._kv_cache = checkpoint, kv_cache
        self._params = checkpoint.load_params()
        self._start_token = start_token_of(checkpoint)
        self._rows = _fastest_rows(checkpoint.states)
        # Donated, because a cache that is copied for every token would be in memory twice.
        self._prefill = jax.jit(self._prefill_step, donate_argnames="cache")
        self._decode = jax.jit(self._decode_step, donate_argnames="cache")

    def limit(self, prompt_tokens: int, max_tokens: int) -> int:
        """Returns the maximum number of tokens that can be generated.

        Raises:
          GenerationError: the prompt is empty, or leaves no position free.
        """
        if not prompt_tokens:
            raise GenerationError("The prompt has no tokens; generation needs at least one.")
        positions = self._checkpoint.max_positions
        if self.reads_source:
            if prompt_tokens > positions:
                raise GenerationError(
                    f"The source is {prompt_tokens} tokens long; the model has max_positions={positions}. Shorten it, "
                    "or raise n_positions in config.json, or model.max_positions of a run: no weight depends on it."
                )
            return min(max_tokens, positions - 1)
        free = positions - prompt_tokens
        if free < 1:
            raise GenerationError(
                f"The prompt is {prompt_tokens} tokens long; the model has max_positions={positions}, one of "
                f"which the continuation needs. Shorten the prompt to {positions - 1} tokens."
            )
        return min(max_tokens, free)

    @property
    def reads_source(self) -> bool:
        """True if the prompt is a source, from which a target is generated."""
        return self._start_token is not None

    def stream(self, prompt: Sequence[int], sampling: SamplingConfig) -> Iterator[int]:
        """Yields up to `limit(...)` tokens; close the iterator to stop early.

        Raises:
          GenerationError: the prompt is empty, or leaves no position free.
        """
        limit = self.limit(len(prompt), sampling.max_tokens)
        # A target follows its start token.
        begun = 1 if self.reads_source else len(prompt)
        capacity = self._bucket(begun + limit)
        cache = DenseKVCache.empty(self._checkpoint.states, batch=self._rows, capacity=capacity, storage=self._kv_cache)
        padding = [0] * (self._bucket(len(prompt)) - len(prompt))
        tokens = jnp.array([[*prompt, *padding]] * self._rows, jnp.int32)
        row = SamplingSettings.row(sampling.params, seed=(sampling.seed, 0), end_tokens=(), prompt_tokens=begun)
        settings = np.tile(row.packed(), (self._rows, 1))
        lengths = jnp.full((self._rows,), len(prompt), jnp.int32)
        token, cache, source = self._prefill(self._params, tokens, lengths, cache, settings)
        for _ in range(limit - 1):
            yield int(token[0])
            token, cache = self._decode(self._params, token, cache, settings, source)
        # Outside of the loop, because no token follows the last one.
        yield int(token[0])

    def _bucket(self, tokens: int) -> int:
        return min(max(_SMALLEST_BUCKET, 1 << (tokens - 1).bit_length()), self._checkpoint.max_positions)

    def _prefill_step(
        self, params: Any, tokens: jax.Array, lengths: jax.Array, cache: Any, settings: np.ndarray | jax.Array
    ) -> tuple[jax.Array, Any, Mapping[str, Any]]:
        """Prefills tokens[batch, bucket] with lengths[r] valid tokens in row r.

        Returns:
          Each row's next token, the cache, and the keyword arguments of the model in decoding steps.
        """
        model: Any = self._checkpoint.model(params)
        if self._start_token is not None:
            segment_ids = (jnp.arange(tokens.shape[1]) < lengths[:, None]).astype(jnp.int32)
            source = {"source": model.encode(tokens, segment_ids)}
            starts = jnp.full((len(tokens), 1), self._start_token, jnp.int32)
            outputs = model(starts, jnp.zeros_like(starts), cache=cache, **source)
            return _next_token(model, outputs.hidden, outputs.cache, settings), outputs.cache, source
        last = (lengths - 1)[:, None]
        # Padding repeats the last position, because dynamic and longrope scaling depend on a row's largest one.
        positions = jnp.minimum(jnp.arange(tokens.shape[1]), last)
        outputs = model(tokens, positions, cache=cache.expecting(lengths))
        hidden = jnp.take_along_axis(outputs.hidden, last[..., None], axis=1)
        return _next_token(model, hidden, outputs.cache, settings), outputs.cache, {}

    def _decode_step(
        self,
        params: Any,
        tokens: jax.Array,
        cache: Any,
        settings: np.ndarray | jax.Array,
        source: Mapping[str, Any],
    ) -> tuple[jax.Array, Any]:
        """Decodes one token per row and returns the next."""
        model = self._checkpoint.model(params)
        outputs = model(tokens[:, None], cache.lengths[:, None], cache=cache, **source)
        return _next_token(model, outputs.hidden, outputs.cache, settings), outputs.cache


class TextGenerator:
    """Generator of text continuations for one language model.

    Args:
      checkpoint: opened language model with a tokenizer.
      kv_cache: storage format of keys and values in the cache.

    Raises:
      GenerationError: the checkpoint does not have a tokenizer.
    """

    def __init__(self, checkpoint: GenerativeCheckpoint, kv_cache: CacheStorage = "model") -> None:
        if checkpoint.tokenizer is None:
            raise GenerationError(
                f"{checkpoint.name} has no tokenizer. Add the tokenizer.json that the model was trained with; in a run "
                "directory it belongs under tokenizer/."
            )
        self._tokens = TokenGenerator(checkpoint, kv_cache)
        self._tokenizer = checkpoint.tokenizer
        self._end_tokens = checkpoint.end_tokens

    def generate(
        self, prompt: str, sampling: SamplingConfig, *, write: Callable[[str], None] = lambda piece: None
    ) -> Generation:
        """Generates a continuation of `prompt`, or the target of an encoder-decoder whose source is `prompt`.

        Args:
          write: receives the text in pieces as it becomes final.

        Raises:
          GenerationError: the prompt is empty or too long.
        """
        prompt_tokens = list(self._tokenizer.encode(prompt))
        limit = self._tokens.limit(len(prompt_tokens), sampling.max_tokens)
        continued = [] if self._tokens.reads_source else prompt_tokens
        detokenizer, stop = IncrementalDetokenizer(self._tokenizer, continued), StopTexts(sampling.stop)
        pieces: list[str] = []
        tokens: list[int] = []

        def put(piece: str) -> None:
            if piece:
                pieces.append(piece)
                write(piece)

        reason: FinishReason = "max_tokens" if limit == sampling.max_tokens else "max_positions"
        for token in self._tokens.stream(prompt_tokens, sampling):
            tokens.append(token)
            if token in self._end_tokens:
                reason = "end_token"
                break
            put(stop.push(detokenizer.push(token)))
            if stop.found is not None:
                break
        put(stop.push(detokenizer.flush()))
        put(stop.flush())
        if stop.found is not None:
            reason = "stop"
        return Generation("".join(pieces), tuple(tokens), len(prompt_tokens), reason)


def _fastest_rows(states: Any) -> int:
    """Returns the number of rows for decoding one sequence; rows after the first are copies.

    On CPU a bfloat16 matrix product is far slower with one row than with two: a step of a 66M-parameter Llama took
    239 ms with one row and 47 ms with two, measured under load on two cores with jax 0.12.
    """
    is_narrow = any("bfloat16" in _dtypes(state) for state in jax.tree.leaves(states))
    return 2 if is_narrow and jax.default_backend() == "cpu" else 1


def _dtypes(state: LayerState) -> tuple[str, ...]:
    return state.dtypes if isinstance(state, Recurrent) else (state.dtype,)


def _next_token(model: Any, hidden: jax.Array, cache: Any, settings: Any) -> jax.Array:
    """Samples the tokens after hidden[batch, 1, embed], with packed `SamplingSettings` that apply no penalties."""
    # Without penalties the history is never read, so a dummy column is enough.
    history = jnp.zeros((len(settings), 1), jnp.int32)
    return sample(model.logits(hidden[:, 0]), SamplingSettings.unpacked(settings), history, cache.lengths).tokens
