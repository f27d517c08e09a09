"""Text from a language model, token by token, on the host's default device."""

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx

from stack_core.detokenize import IncrementalDetokenizer, StopTexts
from stack_core.errors import GenerationError
from stack_core.ops.building import is_quantized
from stack_core.protocols import LanguageModel, Tokenizer
from stack_train.data.tokenizer import HuggingFaceTokenizer
from stack_train.run_directory import RunDirectory
from stack_train.sampling import SamplingConfig, sample
from stack_train.weights import load_model, run_config

__all__ = ["FinishReason", "Generation", "GenerativeModel", "TextGenerator", "TokenGenerator", "load_generator"]

FinishReason = Literal["end_token", "stop", "max_tokens", "max_positions"]

_SMALLEST_BUCKET = 16


@dataclass(frozen=True)
class Generation:
    """A finished continuation.

    Attributes:
      text: without the prompt, the end token and the stop text.
      tokens: all that the model produced; more than `text` has where a stop text cut it.
    """

    text: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    finish_reason: FinishReason


@runtime_checkable
class GenerativeModel(LanguageModel, Protocol):
    """A language model that can make its own cache.

    Attributes:
      config: has `vocab_size`, `max_positions` and `dtype`.
    """

    config: Any

    def empty_cache(self, batch: int, capacity: int) -> Any:
        """Returns a `KVCache` with `lengths` and `truncate(lengths)`, as `DenseKVCache` has them."""
        ...


class TokenGenerator:
    """Continues sequences of token ids.

    A prompt is padded to a power of two and the cache likewise, so that there are few shapes; each is compiled once,
    and no sampling setting compiles anything. The parameters are cast to the compute dtype once.

    """

    def __init__(self, model: GenerativeModel) -> None:
        self._graph, state = nnx.split(model)
        self._max_positions: int = model.config.max_positions
        self._rows = _fastest_rows(model.config.dtype)
        self._empty_cache: Callable[[int, int], Any] = model.empty_cache
        self._params = jax.jit(lambda state: _computing_params(state, model.config.dtype))(state)
        self._prefill = jax.jit(self._prefill_step, donate_argnames="cache")
        self._decode = jax.jit(self._decode_step, donate_argnames="cache")

    def limit(self, prompt_tokens: int, max_tokens: int) -> int:
        """How many tokens can be generated.

        Raises:
          GenerationError: the prompt is empty, or leaves no position free.
        """
        if not prompt_tokens:
            raise GenerationError("The prompt has no tokens; a continuation needs at least one to follow.")
        free = self._max_positions - prompt_tokens
        if free < 1:
            raise GenerationError(
                f"The prompt is {prompt_tokens} tokens long; the model has max_positions={self._max_positions}, one of "
                f"which the continuation needs. Shorten the prompt to {self._max_positions - 1} tokens."
            )
        return min(max_tokens, free)

    def stream(self, prompt: Sequence[int], sampling: SamplingConfig) -> Iterator[int]:
        """Yields up to `sampling.max_tokens` tokens, or as many as there are positions; stop early by leaving.

        Raises:
          GenerationError: as `limit`.
        """
        limit = self.limit(len(prompt), sampling.max_tokens)
        cache = self._empty_cache(self._rows, self._bucket(len(prompt) + limit))
        padding = [0] * (self._bucket(len(prompt)) - len(prompt))
        tokens = jnp.array([[*prompt, *padding]] * self._rows, jnp.int32)
        settings = {
            "temperature": jnp.float32(sampling.temperature),
            "top_k": jnp.int32(sampling.top_k),
            "top_p": jnp.float32(sampling.top_p),
            "key": jax.random.key(sampling.seed),
        }
        lengths = jnp.full((self._rows,), len(prompt), jnp.int32)
        token, cache = self._prefill(self._params, tokens, lengths, cache, settings)
        for _ in range(limit - 1):
            yield int(token[0])
            token, cache = self._decode(self._params, token, cache, settings)
        yield int(token[0])

    def _bucket(self, tokens: int) -> int:
        return min(max(_SMALLEST_BUCKET, 1 << (tokens - 1).bit_length()), self._max_positions)

    def _prefill_step(
        self, params: Any, tokens: jax.Array, lengths: jax.Array, cache: Any, settings: dict[str, jax.Array]
    ) -> tuple[jax.Array, Any]:
        """Runs tokens[batch, bucket], of which row r counts lengths[r], and returns the next token of each row."""
        model = self._model(params)
        last = (lengths - 1)[:, None]
        positions = jnp.minimum(
            jnp.arange(tokens.shape[1]), last
        )  # padding reaches no position that the prompt does not
        hidden, cache = model(tokens, positions, cache=cache)
        cache = cache.truncate(lengths)
        return _next_token(model, jnp.take_along_axis(hidden, last[..., None], axis=1), cache, settings), cache

    def _decode_step(
        self, params: Any, tokens: jax.Array, cache: Any, settings: dict[str, jax.Array]
    ) -> tuple[jax.Array, Any]:
        """Runs one token a row and returns the next."""
        model = self._model(params)
        hidden, cache = model(tokens[:, None], cache.lengths[:, None], cache=cache)
        return _next_token(model, hidden, cache, settings), cache

    def _model(self, params: Any) -> Any:
        return nnx.merge(self._graph, params)


class TextGenerator:
    """Continues texts.

    Args:
      end_tokens: tokens that end a continuation.

    Raises:
      GenerationError: the tokenizer has tokens that the model does not know.
    """

    def __init__(self, model: GenerativeModel, tokenizer: Tokenizer, end_tokens: Collection[int] = ()) -> None:
        if tokenizer.vocab_size > model.config.vocab_size:
            raise GenerationError(
                f"The tokenizer has {tokenizer.vocab_size} tokens, but the model only {model.config.vocab_size}. "
                "Use the tokenizer that the model was trained with."
            )
        self._tokens = TokenGenerator(model)
        self._tokenizer = tokenizer
        self._end_tokens = frozenset(end_tokens)

    def generate(
        self, prompt: str, sampling: SamplingConfig, *, write: Callable[[str], None] = lambda piece: None
    ) -> Generation:
        """Continues `prompt`.

        Args:
          write: receives the text in pieces as it becomes final.

        Raises:
          GenerationError: the prompt is empty or too long.
        """
        prompt_tokens = list(self._tokenizer.encode(prompt))
        limit = self._tokens.limit(len(prompt_tokens), sampling.max_tokens)
        detokenizer, stop = IncrementalDetokenizer(self._tokenizer, prompt_tokens), StopTexts(sampling.stop)
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


def load_generator(run: Path) -> TextGenerator:
    """Loads the newest intact checkpoint of a run and its tokenizer.

    Raises:
      RunDirectoryError: there is no run.
      CheckpointError: it has no checkpoint that can be used.
      DataError: its tokenizer is missing or malformed.
    """
    directory = RunDirectory(run)
    config = run_config(run)
    tokenizer = HuggingFaceTokenizer.load(directory.tokenizer)
    model, _ = load_model(run, config)
    return TextGenerator(model, tokenizer, _end_tokens(run, tokenizer))


def _end_tokens(run: Path, tokenizer: Tokenizer) -> set[int]:
    """The tokenizer's end token, and those that the Hugging Face checkpoint it came from sampled with."""
    found = {tokenizer.eos_id} if tokenizer.eos_id is not None else set[int]()
    for path in (run / "huggingface" / "generation_config.json", run / "huggingface" / "config.json"):
        if not path.is_file():
            continue
        try:
            ids = json.loads(path.read_bytes()).get("eos_token_id")
        except (ValueError, AttributeError) as error:
            raise GenerationError(f"{path} cannot be read: {error}. Restore it, or delete it.") from error
        found |= set(ids if isinstance(ids, list) else [ids] if ids is not None else [])
    return found


def _fastest_rows(dtype: str) -> int:
    """Rows that a single sequence is decoded in; all but the first are copies.

    On CPU a bfloat16 product of one row is far slower than one of two: a step of a 66M-parameter Llama took 239 ms
    with one row and 47 ms with two, measured under load on two cores with jax 0.12.
    """
    return 2 if dtype == "bfloat16" and jax.default_backend() == "cpu" else 1


def _next_token(model: Any, hidden: jax.Array, cache: Any, settings: dict[str, jax.Array]) -> jax.Array:
    """Samples after hidden[batch, 1, embed]; each position has a key of its own."""
    key = jax.random.fold_in(settings["key"], cache.lengths[0])
    return sample(model.logits(hidden[:, 0]), **{**settings, "key": key})


def _computing_params(state: Any, dtype: str) -> Any:
    """Casts the matrices as the model would on each use; what is quantized, scales and biases are used as they are."""

    def cast(path: Any, variable: Any) -> Any:
        if is_quantized(variable.get_value()):
            return variable
        is_matrix = sum(axis != "layers" for axis in variable.get_metadata("logical_axes")) >= 2
        return variable.replace(variable[...].astype(dtype)) if is_matrix else variable

    return nnx.map_state(cast, state)
