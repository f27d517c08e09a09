"""Hands the events of a run to its observers."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stack_core.contracts.training import Observer
from stack_core.errors import PluginError, StackError
from stack_core.events import Event
from stack_core.registry import Registry

__all__ = ["EventBus", "ObserverContext", "observers_from"]


@dataclass(frozen=True)
class ObserverContext:
    """What an observer may need when it is made.

    Attributes:
      directory: the run's directory.
      config: the resolved config of the whole run.
      terminal: whether progress may be drawn.
    """

    directory: Path
    config: Any
    terminal: bool


@dataclass
class EventBus:
    """Hands each event to every observer; one that fails is named in a warning and left out from then on."""

    observers: list[Observer] = field(default_factory=list)

    def emit(self, event: Event) -> None:
        for observer in tuple(self.observers):
            self._guarded(observer, observer.observe, event)

    def close(self) -> None:
        for observer in tuple(self.observers):
            self._guarded(observer, observer.close)
        self.observers.clear()

    def __enter__(self) -> "EventBus":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _guarded(self, observer: Observer, call: Callable[..., None], *args: Any) -> None:
        try:
            call(*args)
        except Exception as error:  # An observer, perhaps a stranger's, must never cost the run it watches.
            self.observers.remove(observer)
            name = type(observer).__name__
            warnings.warn(f"Observer {name} failed and is left out: {type(error).__name__}: {error}", stacklevel=3)


def observers_from(registry: Registry[Any], context: ObserverContext) -> list[Observer]:
    """Builds the observers that have something to do in `context`; one that fails is named in a warning and left out.

    Args:
      registry: functions from the context to an observer or None, by name.

    Raises:
      StackError: an observer refuses the run as it is configured.
    """
    built = (_built(registry, name, context) for name in registry)
    return [observer for observer in built if observer is not None]


def _built(registry: Registry[Any], name: str, context: ObserverContext) -> Observer | None:
    try:
        return registry[name](context)
    except PluginError as error:
        problem = str(error)
    except StackError:
        raise
    except Exception as error:  # An observer, perhaps a stranger's, must never cost the run it would watch.
        problem = f"{type(error).__name__}: {error}"
    warnings.warn(f"Observer {name!r} cannot be made and is left out: {problem}", stacklevel=4)
    return None
