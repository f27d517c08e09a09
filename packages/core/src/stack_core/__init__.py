"""The shared core of stack: plugins, registries, configs, events, errors; ops, hardware and meshes on demand."""

from stack_core.abi.errors import StackError as StackError
from stack_core.abi.plugins import hookimpl as hookimpl
from stack_core.abi.plugins import registries as registries

__all__ = ["StackError", "hookimpl", "registries"]
