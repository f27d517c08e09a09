"""Serving of models on JAX: a batching generation engine, HTTP and gRPC servers, and an export format."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stack_core.abi.generation import SamplingParams as SamplingParams
    from stack_serve.llm.language_model import LLM as LLM

__all__ = ["LLM", "SamplingParams"]

_PLACES = {"LLM": "stack_serve.llm.language_model", "SamplingParams": "stack_core.abi.generation"}


def __getattr__(name: str) -> Any:
    """Imports a public name on first access, to let the `stack` command load the plugin without JAX."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_PLACES[name]), name)
