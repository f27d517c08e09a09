"""`data.name: arrays`: batches from a user-defined function."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, Literal

import jax
import numpy as np
from pydantic import Field

from stack_core.abi.config import config
from stack_core.abi.data import IGNORED_TARGET, Batch, Batches, Shapes
from stack_core.abi.errors import ConfigError, DataError
from stack_core.abi.models import LanguageModelConfig
from stack_core.functions import import_function

__all__ = ["ArraysBatches", "ArraysData"]

Make = Callable[..., Iterable[Batch]]


@config
class ArraysData:
    """Batches from a function: `function(**options)` returns an iterable of mappings of NumPy arrays.

    Every batch has the names, shapes and dtypes of the first batch, and all arrays have a leading batch axis. The
    function is called again for each epoch and each resumption. It must yield the same batches every time because a
    resumed run skips the batches it has already used.

    Attributes:
      source: function of the training batches as "module:function"; in Python, also the function itself.
      name: selects this kind of data.
      validation: function of the validation batches, in the same form; None disables validation.
      options: keyword arguments for both functions.
      unit: unit of reported rates; a batch counts as many units as it has rows.
    """

    source: Any
    name: Literal["arrays"] = "arrays"
    validation: Any = None
    options: Mapping[str, Any] = Field(default_factory=dict)
    unit: str = "examples"

    def spec(self, model: Any) -> Shapes:
        return {
            name: jax.ShapeDtypeStruct(array.shape, array.dtype)
            for name, array in self._first.items()
            if name != "row_ids"
        }

    def work(self) -> tuple[str, int]:
        return self.unit, len(next(iter(self._first.values())))

    def check(self, model: Any) -> None:
        sizes = {name: np.shape(array)[:1] for name, array in self._first.items()}
        if len(set(sizes.values())) > 1 or () in sizes.values():
            raise ConfigError(
                f"The arrays of {self.source!r} have different leading axes: {sizes}. All must begin with [batch]."
            )
        if isinstance(model, LanguageModelConfig):
            _check_tokens(self._first, model, f"{self.source}")

    def build(self, *, seed: int, model: Any) -> "ArraysBatches":
        validation = None if self.validation is None else _function(self.validation)
        language_model = model if isinstance(model, LanguageModelConfig) else None
        spec = dict(self.spec(model))
        return ArraysBatches(_function(self.source), validation, self.options, spec, str(self.source), language_model)

    @cached_property
    def _first(self) -> Batch:
        # Only the first batch, since the function may never end.
        for batch in _function(self.source)(**self.options):
            return {name: np.asarray(array) for name, array in batch.items()}
        raise DataError(f"{self.source!r} gives no batch. It must return an iterable of mappings of arrays.")


class ArraysBatches(Batches):
    """Batches from a function; see `Batches`."""

    def __init__(
        self,
        make: Make,
        validation: Make | None,
        options: Mapping[str, Any],
        spec: Shapes,
        name: str,
        language_model: LanguageModelConfig | None = None,
    ) -> None:
        self._make, self._validation, self._options, self._spec, self._name = make, validation, options, spec, name
        self._language_model = language_model

    def train_iterator(self) -> "ArraysIterator":
        return ArraysIterator(lambda: self._checked(self._make(**self._options)), self._name)

    def validation_batches(self) -> Iterator[Batch]:
        """Returns an iterator over one call of the validation function."""
        return iter(()) if self._validation is None else self._checked(self._validation(**self._options))

    def _checked(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        wanted = {name: (struct.shape, struct.dtype) for name, struct in self._spec.items()}
        for place, batch in enumerate(batches):
            arrays = {name: np.asarray(array) for name, array in batch.items()}
            # Row ids are optional and no input of the model.
            found = {name: (array.shape, array.dtype) for name, array in arrays.items() if name != "row_ids"}
            if found != wanted:
                raise DataError(f"Batch {place} of {self._name} has arrays {found}; the first batch has {wanted}.")
            if self._language_model is not None:
                _check_tokens(arrays, self._language_model, f"Batch {place} of {self._name}")
            yield arrays


class ArraysIterator:
    """An iterator that restarts an iterable after its last batch; its state is the number of batches yielded."""

    def __init__(self, batches: Callable[[], Iterator[Batch]], name: str) -> None:
        self._begin, self._name = batches, name
        self._batches = batches()
        self._taken = 0

    def __iter__(self) -> "ArraysIterator":
        return self

    def __next__(self) -> Batch:
        batch = next(self._batches, None)
        if batch is None:
            self._batches = self._begin()
            batch = next(self._batches, None)
            if batch is None:
                raise DataError(
                    f"{self._name} yields no batch when called again. Each call must start from the beginning."
                )
        self._taken += 1
        return batch

    def get_state(self) -> dict[str, Any]:
        return {"source": self._name, "batches": self._taken}

    def set_state(self, state: Any) -> None:
        """Restarts the iterable and skips the batches that were already yielded.

        Raises:
          DataError: the state belongs to another source, or is malformed.
        """
        if not isinstance(state, Mapping) or state.get("source") != self._name or "batches" not in state:
            raise DataError(f"The saved position {state!r} does not belong to {self._name}. Restore data.source.")
        self._batches, self._taken = self._begin(), 0
        for _ in range(state["batches"]):
            next(self)


def _check_tokens(batch: Batch, model: LanguageModelConfig, label: str) -> None:
    """Raises a DataError if tokens or targets are outside of the vocabulary, whose embeddings would be NaN."""
    for name in ("tokens", "targets"):
        if name not in batch or not batch[name].size:
            continue
        ids = batch[name]
        if not np.issubdtype(ids.dtype, np.integer):
            raise DataError(f"{label} has {name} of {ids.dtype}; expected integer token ids.")
        # -100 is valid in targets only.
        wrong = (ids >= model.vocab_size) | ((ids < 0) & ((ids != IGNORED_TARGET) | (name == "tokens")))
        if wrong.any():
            raise DataError(
                f"{label} has {name} with {ids[wrong][0]}, but the model has tokens 0 to {model.vocab_size - 1}. "
                "Correct the data, or raise model.vocab_size."
            )


def _function(source: Any) -> Make:
    """Returns a callable unchanged, and imports a function named "module:function"."""
    return source if callable(source) else import_function(source, label="data.source")
