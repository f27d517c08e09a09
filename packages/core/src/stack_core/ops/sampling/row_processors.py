"""Application of logits processors to the rows of a step, whose parameters are packed into words."""

import collections
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from stack_core.abi.config import parse
from stack_core.abi.errors import ConfigError, GenerationError, PluginError, nearest
from stack_core.ops.sampling.processors import NO_TOKEN, History, LogitsProcessor

__all__ = ["LogitsProcessors", "RowProcessors"]

_DTYPES = MappingProxyType({bool: jnp.bool_, int: jnp.int32, float: jnp.float32})
_INT32, _FLOAT32 = np.iinfo(np.int32), np.finfo(np.float32)
_MAX_CHARACTERS = 500  # an error may quote a client's input


@dataclass(frozen=True)
class _Field:
    """A parameter of a processor.

    Attributes:
      name: its name.
      kind: bool, int or float.
      length: length of the array; None for a scalar.
    """

    name: str
    kind: type
    length: int | None

    @property
    def words(self) -> int:
        return 1 if self.length is None else self.length

    def packed(self, value: Any) -> Int[np.ndarray, " words"]:
        """Packs the bits of a value; an array is padded."""
        values = [value] if self.length is None else list(value)
        if self.kind is float:
            found = np.clip(np.array(values, np.float64), _FLOAT32.min, _FLOAT32.max).astype(np.float32).view(np.int32)
        elif any(not _INT32.min <= each <= _INT32.max for each in values):
            raise ConfigError(f"{self.name} is {value}; expected numbers from {_INT32.min} to {_INT32.max}.")
        else:
            found = np.array(values, np.int32)
        return np.pad(found, (0, self.words - len(found)), constant_values=NO_TOKEN if self.kind is int else 0)

    def unpacked(self, words: Int[Array, "rows words"]) -> Array:
        values = words[:, 0] if self.length is None else words
        return values != 0 if self.kind is bool else lax.bitcast_convert_type(values, _DTYPES[self.kind])


class _Packing:
    """Layout of a processor's words: 1 if the row selects it, then its parameters."""

    def __init__(self, name: str, processor: LogitsProcessor) -> None:
        self.name, self.function, self._params = name, processor.function, processor.params
        if not hasattr(self._params, "__pydantic_fields__") or not is_dataclass(self._params):
            raise ConfigError(f"Logits processor {name!r}: params is {self._params!r}; expected a @config class.")
        self._fields = [_field(name, processor.params, each.name) for each in fields(processor.params)]
        self.words = 1 + sum(each.words for each in self._fields)
        self._tuple = collections.namedtuple(processor.params.__name__, [each.name for each in self._fields])

    def packed(self, requested: Any) -> Int[np.ndarray, " words"]:
        if len(self._fields) == 1 and not isinstance(requested, Mapping):
            requested = {self._fields[0].name: requested}
        try:
            params = parse(self._params, requested, path=self.name)
            values = [each.packed(getattr(params, each.name)) for each in self._fields]
        except ConfigError as error:
            raise GenerationError(_shortened(str(error)), parameter="logits_processors") from None
        return np.concatenate([np.ones(1, np.int32), *values])

    def unpacked(self, words: Int[Array, "rows words"]) -> tuple[Bool[Array, " rows"], Any]:
        """Returns the rows that select the processor, and the parameters of each row."""
        selected, *parts = _split(words, [1, *(each.words for each in self._fields)])
        values = [each.unpacked(part) for each, part in zip(self._fields, parts, strict=True)]
        return selected[:, 0] != 0, self._tuple(*values)


class RowProcessors:
    """Logits processors with the parameters of each row of a step.

    Args:
      parts: each processor, the rows that select it, and the parameters of each row.
    """

    def __init__(self, parts: list[tuple[_Packing, Bool[Array, " rows"], Any]]) -> None:
        self._parts = parts

    @property
    def is_used(self) -> Bool[Array, ""]:
        """True if any row selects a processor."""
        return jnp.any(jnp.stack([selected for _, selected, _ in self._parts]))

    def __call__(
        self,
        logits: Float[Array, "rows vocab"],
        history: Int[Array, "rows max_tokens"],
        lengths: Int[Array, " rows"],
        prompt_tokens: Int[Array, " rows"],
    ) -> Float[Array, "rows vocab"]:
        """Applies the processors in order. A row that does not select a processor keeps its bits.

        Args:
          logits: logits of the next token, without padding of the vocabulary.
          history, lengths: as in `sample`.
          prompt_tokens: number of prompt tokens in each row.
        """

        def histories() -> History:
            # From `lengths` on are rejected drafts, or tokens of an earlier sequence in the slot.
            tokens = jnp.where(jnp.arange(history.shape[1]) < lengths[:, None], history, NO_TOKEN)
            return History(tokens, lengths, prompt_tokens)

        def apply(packing: _Packing, selected: Array, params: Any, logits: Array) -> Array:
            found = _process(packing, logits, params, histories())
            return jnp.where(selected[:, None] & (logits != -jnp.inf), found, logits)

        for packing, selected, params in self._parts:
            change = partial(apply, packing, selected, params)
            logits = lax.cond(jnp.any(selected), change, lambda logits: logits, logits)
        return logits


class LogitsProcessors:
    """Logits processors of an engine, in the order in which they change the logits.

    Attributes:
      names: names of the processors.
      words: number of int32 words of a row's parameters.

    Args:
      processors: processors by name.

    Raises:
      ConfigError: a parameter of a processor has another type than `LogitsProcessor` allows.
    """

    def __init__(self, processors: Mapping[str, LogitsProcessor]) -> None:
        self._packings = {name: _Packing(name, each) for name, each in processors.items()}
        self.names = tuple(processors)
        self.words = sum(each.words for each in self._packings.values())

    def packed(self, requested: Mapping[str, Any]) -> Int[np.ndarray, " words"]:
        """Packs the parameters of a request.

        Args:
          requested: `SamplingParams.logits_processors`.

        Raises:
          GenerationError: a name or a parameter is invalid.
        """
        if unknown := next((name for name in requested if name not in self._packings), None):
            unknown = _shortened(unknown)
            raise GenerationError(
                f"There is no logits processor {unknown!r}.{nearest(unknown, self.names)} The engine was started with: "
                f"{', '.join(self.names) or 'none'} (--logits-processors, or logits_processors in Python).",
                parameter="logits_processors",
            )
        nothing = {name: np.zeros(each.words, np.int32) for name, each in self._packings.items()}
        words = nothing | {name: self._packings[name].packed(value) for name, value in requested.items()}
        return np.concatenate([np.zeros(0, np.int32), *words.values()])

    def of_rows(self, words: Int[Array, "rows words"]) -> RowProcessors | None:
        """Returns the processors with the parameters of each row; None without processors."""
        if not self._packings:
            return None
        packings = list(self._packings.values())
        parts = _split(words, [each.words for each in packings])
        return RowProcessors([(each, *each.unpacked(part)) for each, part in zip(packings, parts, strict=True)])

    def check(self, vocab_size: int, max_tokens: int) -> None:
        """Traces the processors, because an error in a step would end the engine.

        Raises:
          PluginError: a function raises, or does not return float32[vocab].
        """

        def apply(words: Array, *inputs: Array) -> Any:
            rows = self.of_rows(words)
            return None if rows is None else rows(*inputs)

        words, tokens, count = (
            jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1, self.words), (1, max_tokens), (1,))
        )
        jax.eval_shape(apply, words, jax.ShapeDtypeStruct((1, vocab_size), jnp.float32), tokens, count, count)


def _process(packing: _Packing, logits: Array, params: Any, history: History) -> Array:
    try:
        found = jax.vmap(packing.function)(logits, params, history)
    except Exception as error:  # a plugin's function may raise any exception; the message names the processor
        raise PluginError(
            f"Logits processor {packing.name!r} cannot be traced: {type(error).__name__}: {error}"
        ) from error
    if jnp.shape(found) != logits.shape or jnp.result_type(found) != jnp.float32:
        returned = f"{jnp.result_type(found)}{list(jnp.shape(found)[1:])}"
        raise PluginError(
            f"Logits processor {packing.name!r} returned {returned}; expected float32[{logits.shape[1]}]."
        )
    return found


def _field(processor: str, params: type[Any], name: str) -> _Field:
    """Reads the type of a parameter.

    Raises:
      ConfigError: the type does not determine the shape and dtype of an array.
    """
    info: Any = vars(params)["__pydantic_fields__"][name]
    kind, length = _unannotated(info.annotation), None
    if typing.get_origin(kind) is tuple and typing.get_args(kind)[1:] == (Ellipsis,):
        kind = _unannotated(typing.get_args(kind)[0])
        length = next((each.max_length for each in info.metadata if hasattr(each, "max_length")), None)
        if length is None:
            raise ConfigError(f"Logits processor {processor!r}: {name} needs a max_length, the size of its array.")
    if kind not in _DTYPES:
        raise ConfigError(
            f"Logits processor {processor!r}: {name} has the type {kind}; expected bool, int, float, or a tuple of "
            "these with a max_length."
        )
    return _Field(name, kind, length)


def _unannotated(hint: Any) -> Any:
    return typing.get_args(hint)[0] if typing.get_origin(hint) is typing.Annotated else hint


def _split(words: Array, sizes: list[int]) -> list[Array]:
    """Splits columns into parts of the given sizes."""
    return jnp.split(words, np.cumsum(sizes)[:-1].tolist(), axis=1)


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}..."
