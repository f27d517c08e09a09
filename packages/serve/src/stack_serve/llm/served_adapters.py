"""The adapters of an engine by name."""

import threading
from typing import Final

from stack_core.abi.adapters import Adapters, ExpectsAdapters
from stack_core.abi.config import changed_fields
from stack_core.abi.errors import ConfigError, GenerationError, nearest
from stack_core.abi.formats import GenerativeCheckpoint
from stack_serve.llm.adapters import AdapterShapes, HostAdapter, read_all
from stack_serve.llm.config import EngineConfig

__all__ = ["ServedAdapters"]

_SIZES: Final = ("max_adapters", "adapter_rank")


class ServedAdapters:
    """Adapters in host memory that requests select by name, of the shapes for which programs are compiled.

    Attributes:
      shapes: shapes of a slot; None if the engine serves only the base model.

    Args:
      checkpoint: model to serve.
      config: settings of the engine, with the first adapters.

    Raises:
      ConfigError: the config has sizes of adapters, but neither adapters nor a model that expects them.
      StackError: an adapter cannot be read, or cannot be served.
    """

    def __init__(self, checkpoint: GenerativeCheckpoint, config: EngineConfig) -> None:
        adapters = read_all(checkpoint, config.adapters)
        is_adapted = bool(adapters) or isinstance(checkpoint, ExpectsAdapters)
        # Nothing could be loaded later: programs apply adapters only to the parameters that had one at the start.
        if not is_adapted and (unused := changed_fields(config, _SIZES)):
            given = " and ".join(f"{name}={getattr(config, name)}" for name in unused)
            raise ConfigError(
                f"{given}: the engine has no adapters, and without one at the start none can be loaded later. Add "
                "adapters={'mine': 'runs/lora'} (--adapter mine=runs/lora), or leave it out."
            )
        self.shapes = AdapterShapes.of(checkpoint, config, adapters) if is_adapted else None
        self._checkpoint, self._lock = checkpoint, threading.Lock()
        self._adapters = {name: self._fitted(name, each) for name, each in adapters.items()}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._adapters)

    def find(self, name: str | None) -> HostAdapter | None:
        """Looks up an adapter by name; None selects the base model.

        Raises:
          GenerationError: the name is unknown.
        """
        adapter = None if name is None else self._adapters.get(name)
        if name is not None and adapter is None:
            raise GenerationError(
                f"There is no adapter {name!r}.{nearest(name, self._adapters)} There are: "
                f"{', '.join(self._adapters) or 'none'}.",
                parameter="adapter",
            )
        return adapter

    def load(self, name: str, adapters: str | Adapters) -> None:
        """Adds or replaces an adapter; see `LLMEngine.load_adapter`."""
        if isinstance(adapters, str):
            adapters = read_all(self._checkpoint, {name: adapters})[name]
        fitted = self._fitted(name, adapters)
        with self._lock:
            self._adapters[name] = fitted

    def unload(self, name: str) -> None:
        """Removes an adapter.

        Raises:
          GenerationError: the name is unknown.
        """
        with self._lock:
            self.find(name)
            del self._adapters[name]

    def _fitted(self, name: str, adapters: Adapters) -> HostAdapter:
        if self.shapes is None:
            raise GenerationError(
                f"The engine was started without adapters, so its programs cannot apply {name!r}. Start it with an "
                "adapter (stack serve BASE --adapter NAME=RUN).",
                parameter="adapter",
            )
        return self.shapes.fitted(name, adapters)
