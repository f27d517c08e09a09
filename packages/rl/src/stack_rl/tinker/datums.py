"""Examples of `forward_backward`, and their arrangement in batches of few shapes."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from stack_core.abi.data import IGNORED_TARGET
from stack_core.abi.errors import DataError
from stack_rl.tinker.losses import LOSSES

__all__ = ["Datum", "Example", "Rows", "batched", "checked", "token_list"]

_BATCH_TOKENS: Final = 8192
_SHORTEST: Final = 16


@dataclass(frozen=True)
class Datum:
    """An example: position i of the input predicts target i.

    It has the attributes of `tinker.Datum`. Objects of that class are accepted as well.

    Attributes:
      model_input: token ids.
      loss_fn_inputs: arrays [tokens] that the loss reads, and `target_tokens`.
    """

    model_input: Any
    loss_fn_inputs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Example:
    """A checked datum: tokens and targets int32[tokens], inputs float32[tokens]."""

    tokens: np.ndarray
    targets: np.ndarray
    inputs: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Rows:
    """Examples of similar length in one batch.

    Attributes:
      members: number of each row's example.
      batch: `tokens`, `targets`, `positions` and `segment_ids`, int32[rows, seq]. Padding has segment 0.
      inputs: float32[rows, seq] each, 0 in padding.
    """

    members: Sequence[int]
    batch: Mapping[str, np.ndarray]
    inputs: Mapping[str, np.ndarray]


def token_list(prompt: Any) -> list[int]:
    """Returns the token ids of a list, an array or a `tinker.ModelInput`."""
    return [int(each) for each in (prompt.to_ints() if hasattr(prompt, "to_ints") else prompt)]


def checked(data: Sequence[Any], loss: str, *, vocab_size: int, max_tokens: int) -> list[Example]:
    """Converts and checks the examples of a loss.

    Raises:
      DataError: names the datum and the input that is missing, unknown, of another shape or not finite.
    """
    if not data:
        raise DataError("forward_backward got no data. Give at least one datum.")
    return [_checked(each, number, loss, vocab_size, max_tokens) for number, each in enumerate(data)]


def _checked(datum: Any, number: int, loss: str, vocab_size: int, max_tokens: int) -> Example:
    tokens, expected = token_list(datum.model_input), LOSSES[loss].inputs
    given = {name: _array(value) for name, value in datum.loss_fn_inputs.items()}
    here = f"Datum {number}"
    if not 1 <= len(tokens) <= max_tokens:
        raise DataError(f"{here} has {len(tokens)} tokens; the model takes 1 to {max_tokens}.")
    if missing := [name for name in ("target_tokens", *expected) if name not in given]:
        raise DataError(f"{here} has no {' and no '.join(missing)}, which the loss {loss!r} reads. Add it.")
    if unread := [name for name in given if name not in ("target_tokens", *expected)]:
        raise DataError(f"{here} has {', '.join(unread)}, which the loss {loss!r} does not read. Remove it.")
    for name, array in given.items():
        if array.shape != (len(tokens),):
            raise DataError(
                f"{here}: {name} has shape {list(array.shape)}; expected [{len(tokens)}], one value per input token."
            )
        if not np.isfinite(array).all():
            raise DataError(f"{here}: {name} has values that are not finite.")
    for name, ids in (("model_input", np.asarray(tokens)), ("target_tokens", given["target_tokens"])):
        if ids.min() < 0 or ids.max() >= vocab_size:
            raise DataError(
                f"{here}: {name} has token ids from {ids.min()} to {ids.max()}; expected 0 to {vocab_size - 1}."
            )
    inputs = {name: given[name].astype(np.float32) for name in expected}
    return Example(np.asarray(tokens, np.int32), given["target_tokens"].astype(np.int32), inputs)


def _array(value: Any) -> np.ndarray:
    return np.asarray(value.to_numpy() if hasattr(value, "to_numpy") else value)


def batched(examples: Sequence[Example], *, max_tokens: int) -> Iterator[Rows]:
    """Yields the examples in batches with power-of-two sizes, which limits the number of compiled programs.

    A batch has examples of one length class and about 8,192 tokens at most.
    """
    classes: dict[int, list[int]] = defaultdict(list)
    for number, each in enumerate(examples):
        classes[min(max(_SHORTEST, _power_of_two(len(each.tokens))), max_tokens)].append(number)
    for seq, members in sorted(classes.items()):
        most = max(1, _BATCH_TOKENS // seq)
        for first in range(0, len(members), most):
            yield _rows(examples, members[first : first + most], seq)


def _rows(examples: Sequence[Example], members: Sequence[int], seq: int) -> Rows:
    shape = _power_of_two(len(members)), seq
    batch = {name: np.zeros(shape, np.int32) for name in ("tokens", "segment_ids")}
    batch["targets"] = np.full(shape, IGNORED_TARGET, np.int32)
    batch["positions"] = np.broadcast_to(np.arange(seq, dtype=np.int32), shape)
    inputs = {name: np.zeros(shape, np.float32) for name in examples[members[0]].inputs}
    for row, number in enumerate(members):
        each = examples[number]
        count = len(each.tokens)
        batch["tokens"][row, :count], batch["targets"][row, :count] = each.tokens, each.targets
        batch["segment_ids"][row, :count] = 1
        for name, values in each.inputs.items():
            inputs[name][row, :count] = values
    return Rows(members, batch, inputs)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
