"""Profiles JAX programs: traces joined with the compiled program and the Python source."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stack_profile._capture import Capture as Capture
    from stack_profile._capture import CaptureWarning as CaptureWarning
    from stack_profile._capture import capture as capture
    from stack_profile.errors import CaptureError as CaptureError
    from stack_profile.errors import ProfileError as ProfileError
    from stack_profile.errors import TraceError as TraceError
    from stack_profile.listener import Listener as Listener
    from stack_profile.listener import listen as listen
    from stack_profile.slow_steps import AnomalyConfig as AnomalyConfig
    from stack_profile.trace import Trace as Trace
    from stack_profile.trace import load_trace as load_trace
    from stack_profile.watch import Watch as Watch

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

# Imported on first use: `stack --help` imports this package, for its plugin, and no numpy.
_MODULES = {
    "AnomalyConfig": "slow_steps",
    "Capture": "_capture",
    "CaptureError": "errors",
    "CaptureWarning": "_capture",
    "Listener": "listener",
    "ProfileError": "errors",
    "Trace": "trace",
    "TraceError": "errors",
    "Watch": "watch",
    "capture": "_capture",
    "listen": "listener",
    "load_trace": "trace",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
