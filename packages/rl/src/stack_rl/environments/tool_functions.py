"""Functions and classes as tools: their names, schemas and addresses."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from stack_core.abi.errors import ConfigError
from stack_core.functions import import_function
from stack_rl.rewards.weighted import resolved

__all__ = ["Tool", "read_tools"]

_CLOSE = "close"


@dataclass(frozen=True)
class Tool:
    """A tool that the policy may call.

    Attributes:
      name: name in calls.
      function: the function; for a method, the function of the class.
      owner: class of which each episode has an instance; None for a plain function.
      configured: address in the config; "" for an object.
    """

    name: str
    function: Callable[..., Any]
    owner: type | None = None
    configured: str = ""

    @property
    def schema(self) -> dict[str, Any]:
        """Schema for chat templates; a parameter without an annotation accepts anything."""
        parameters = list(inspect.signature(self.function).parameters.values())[0 if self.owner is None else 1 :]
        properties = {
            each.name: {} if each.annotation is each.empty else TypeAdapter(each.annotation).json_schema()
            for each in parameters
        }
        required = [each.name for each in parameters if each.default is each.empty]
        body = {"type": "object", "properties": properties, "required": required}
        description = inspect.getdoc(self.function) or ""
        return {"type": "function", "function": {"name": self.name, "description": description, "parameters": body}}

    @property
    def address(self) -> str:
        """The address "module:name" by which another process imports the function or its class.

        Raises:
          ConfigError: the function cannot be imported by its name.
        """
        if self.configured:
            return self.configured
        target = self.function if self.owner is None else self.owner
        module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", "")
        address = f"{module}:{name}"
        try:
            found = import_function(address, label="Tool") if module != "__main__" else None
        except ConfigError:
            found = None
        if found is not target:
            raise ConfigError(
                f"The tool {self.name!r} is {target!r}, which another process cannot import as {address!r}. Put it in "
                "a module, or set data.environment.isolation: thread."
            )
        return address


def read_tools(tools: Sequence[Any]) -> dict[str, Tool]:
    """Returns tools by name. The tools of a class are its public methods except `close`.

    Args:
      tools: functions or classes, or their addresses "module:name".

    Raises:
      ConfigError: a tool cannot be imported or is not callable, a class lacks public methods, or two tools have the
        same name.
    """
    found: dict[str, Tool] = {}
    for each in tools:
        target, address = (each, "") if callable(each) else (import_function(each, label="Tool"), str(each))
        if inspect.isclass(target):
            methods = inspect.getmembers(target, inspect.isfunction)
            names = [(name, method) for name, method in methods if name[0] != "_" and name != _CLOSE]
            new = [Tool(name, method, target, address) for name, method in names]
            if not new:
                raise ConfigError(f"The class {target.__qualname__!r} has no public method that could be a tool.")
        else:
            name, function = (address.rpartition(":")[2], target) if address else resolved(target)
            new = [Tool(name, function, configured=address)]
        for tool in new:
            if tool.name in found:
                raise ConfigError(f"Two tools are called {tool.name!r}; each needs a name of its own.")
            found[tool.name] = tool
    return found
