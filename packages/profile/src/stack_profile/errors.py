"""Exceptions that stack-profile raises.

stack_core.abi.errors.StackError
└── ProfileError
    ├── TraceError      a trace that is missing, damaged, or not a trace
    └── CaptureError    a capture that cannot start, stop or be written

The command line prints their messages without a traceback and exits with status 2.
"""

from stack_core.abi.errors import StackError

__all__ = ["CaptureError", "CaptureWarning", "ProfileError", "TraceError"]


class ProfileError(StackError):
    """Base class of stack-profile's exceptions."""


class TraceError(ProfileError):
    """A trace that is missing, damaged, or not a trace."""


class CaptureError(ProfileError):
    """A capture that cannot start, stop or be written."""


class CaptureWarning(UserWarning):
    """Warning about a finished capture that could not be written."""
