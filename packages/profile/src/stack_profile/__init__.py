"""Profiles JAX programs: traces joined with the compiled program and the Python source."""

from stack_profile._capture import Capture as Capture
from stack_profile._capture import CaptureWarning as CaptureWarning
from stack_profile._capture import capture as capture
from stack_profile.errors import CaptureError as CaptureError
from stack_profile.errors import ProfileError as ProfileError
from stack_profile.errors import TraceError as TraceError
from stack_profile.trace import Trace as Trace
from stack_profile.trace import load_trace as load_trace

__all__ = [
    "Capture",
    "CaptureError",
    "CaptureWarning",
    "ProfileError",
    "Trace",
    "TraceError",
    "capture",
    "load_trace",
]
