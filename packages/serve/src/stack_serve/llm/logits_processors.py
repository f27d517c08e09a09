"""Logits processors of an engine, and the packed settings of its rows."""

import functools

import numpy as np

from stack_core.abi.errors import PluginError
from stack_core.abi.plugins import registries
from stack_core.ops.sampling.processors import LogitsProcessor
from stack_core.ops.sampling.row_processors import LogitsProcessors
from stack_core.ops.sampling.sampling import SamplingSettings

__all__ = ["SETTINGS_WORDS", "idle_words", "open_processors"]

SETTINGS_WORDS = len(SamplingSettings.greedy_row().packed())
"""Number of words of the packed sampling settings of a slot, which the words of the logits processors follow."""


@functools.cache
def open_processors(names: tuple[str, ...]) -> LogitsProcessors:
    """Returns registered logits processors in this order.

    Raises:
      UnknownName: no plugin registers a name.
      PluginError: a registered object is not a `LogitsProcessor`.
      ConfigError: a parameter of a processor has a type without an array.
    """
    found = {name: registries.logits_processors[name] for name in names}
    for name, each in found.items():
        if not isinstance(each, LogitsProcessor):
            raise PluginError(f"logits_processors {name!r} is a {type(each).__name__}; a LogitsProcessor was expected.")
    return LogitsProcessors(found)


def idle_words(processors: LogitsProcessors) -> np.ndarray:
    """Returns the words of a row that is not sampled: greedy settings and no processor, which cost nothing."""
    return np.concatenate([SamplingSettings.greedy_row().packed(), processors.packed({})])
