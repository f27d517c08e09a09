"""Messages of `stack serve` to its user."""

import json
import os
import sys
from typing import Any

__all__ = ["print_ready", "say"]


def say(message: str) -> None:
    """Prints a message to standard error."""
    print(f"stack: {message}", file=sys.stderr, flush=True)


def print_ready(address: str, **members: Any) -> None:
    """Prints the address, the process id and other members to standard output as JSON."""
    print(json.dumps({"address": address, **members, "process": os.getpid()}), flush=True)
