"""The shared core of stack: plugins, registries, configs, events, errors; ops, hardware and meshes on demand."""

from stack_core.errors import StackError as StackError
from stack_core.plugins import hookimpl as hookimpl
from stack_core.plugins import registries as registries

__all__ = ["StackError", "hookimpl", "registries"]
