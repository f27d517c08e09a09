"""Profiler for JAX programs: traces joined with the compiled program and the Python source."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stack_profile.captures.capture import Capture as Capture
    from stack_profile.captures.capture import CaptureWarning as CaptureWarning
    from stack_profile.captures.capture import capture as capture
    from stack_profile.captures.listener import Listener as Listener
    from stack_profile.captures.listener import listen as listen
    from stack_profile.captures.slow_steps import AnomalyConfig as AnomalyConfig
    from stack_profile.captures.watch import Watch as Watch
    from stack_profile.errors import CaptureError as CaptureError
    from stack_profile.errors import ProfileError as ProfileError
    from stack_profile.errors import TraceError as TraceError
    from stack_profile.traces.trace import Trace as Trace
    from stack_profile.traces.trace import load_trace as load_trace

__all__ = [
    "AnomalyConfig",
    "Capture",
    "CaptureError",
    "CaptureWarning",
    "Listener",
    "ProfileError",
    "Trace",
    "TraceError",
    "Watch",
    "capture",
    "listen",
    "load_trace",
]

# Imported on first use: `stack --help` imports this package for its plugin and must not import numpy.
_MODULES = {
    "AnomalyConfig": "captures.slow_steps",
    "Capture": "captures.capture",
    "CaptureError": "errors",
    "CaptureWarning": "captures.capture",
    "Listener": "captures.listener",
    "ProfileError": "errors",
    "Trace": "traces.trace",
    "TraceError": "errors",
    "Watch": "captures.watch",
    "capture": "captures.capture",
    "listen": "captures.listener",
    "load_trace": "traces.trace",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
