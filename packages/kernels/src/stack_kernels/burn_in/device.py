"""The device of a burn-in, found by a child process: a driver's crash stays there, and this process holds no memory.

Printed by `python -m stack_kernels.burn_in.device` as one JSON object.
"""

import json
import os
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stack_core.abi.errors import HardwareError
from stack_core.chips.device_errors import explain_device_error
from stack_kernels.burn_in.children import run_child

__all__ = ["LocalDevice", "find_device", "main", "worker_environment"]

_TIMEOUT_S = 180.0
_FREE_BYTES = 2**28
"""Memory that must be allocatable; contract checks need less, but no kernel runs without scratch space."""


@dataclass(frozen=True)
class LocalDevice:
    """JAX's default device and the versions of the packages.

    Attributes:
      platform: "cpu", "gpu" or "tpu".
      kinds: `device_kind` of each device.
      file_name: name of the chip for files.
      heading: date, chip and versions.
      identity: chip and versions, which a resumed burn-in must share.
      memory_bytes: memory of one device, if known.
    """

    platform: str
    kinds: tuple[str, ...]
    file_name: str
    heading: str
    identity: str
    memory_bytes: int | None = None


def worker_environment() -> dict[str, str]:
    """Returns environment variables of all children: memory is allocated when needed, as several share the device."""
    return {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def find_device() -> LocalDevice:
    """Starts JAX in a child process and returns its device.

    Raises:
      HardwareError: JAX cannot use the device, its memory is full, or the devices are of different kinds.
    """
    messages: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory, "device.log")
        ended = run_child(
            ["-m", __spec__.name],
            time.monotonic() + _TIMEOUT_S,
            log=log,
            on_message=messages.append,
            environment=worker_environment(),
        )
        text = log.read_text(errors="replace")
    has_nvidia = Path("/dev/nvidia0").exists()
    error = messages[-1].get("error", "") if messages else ended.problem or "no answer"
    if problem := explain_failure(error, text, messages, os.environ, has_nvidia):
        raise HardwareError(problem)
    found: dict[str, Any] = {**messages[-1], "kinds": tuple(messages[-1]["kinds"])}
    return LocalDevice(**found)


def explain_failure(
    error: str, log: str, messages: Sequence[Mapping[str, Any]], environment: Mapping[str, str], has_nvidia: bool
) -> str | None:
    """Returns one line about the cause and the remedy if the device cannot be used; None if it can.

    Args:
      error: exception of the child, or the way in which it ended; "" without one.
      log: standard error of the child.
      messages: facts that the child printed.
      environment: environment variables.
      has_nvidia: whether the machine has an NVIDIA GPU.
    """
    facts = messages[-1] if messages else {}
    kinds = list(dict.fromkeys(facts.get("kinds", ())))
    is_ignored = has_nvidia and facts.get("platform") == "cpu" and "cpu" not in environment.get("JAX_PLATFORMS", "")
    if not error and not is_ignored:
        return None if len(kinds) < 2 else _several(kinds)
    details = _line(error) or _line(_last_problem(log)) or "JAX started on the CPU without an error."
    if problem := explain_device_error(details, f"{error}\n{log}"):
        return problem
    if is_ignored:
        return (
            f"This machine has an NVIDIA GPU that JAX does not use: {details} Install stack-core[cuda13], or set "
            "JAX_PLATFORMS=cpu to try the CPU; `stack doctor` lists what is missing."
        )
    return f"JAX cannot use the device: {details} `stack doctor` lists what is missing."


def _several(kinds: Sequence[str]) -> str:
    return (
        f"The devices are of different kinds: {', '.join(kinds)}. A burn-in describes one chip: choose devices of one "
        "kind, for example with CUDA_VISIBLE_DEVICES=0."
    )


def _last_problem(log: str) -> str:
    lines = [line for line in log.splitlines() if re.search(r"[Ee]rror|[Ff]ail|[Ww]arn|insufficient", line)]
    return lines[-1] if lines else ""


def _line(text: str) -> str:
    line = " ".join(text.split())[:300]
    return line if not line or line[-1] in ".!" else f"{line}."


def main() -> None:
    """Prints a description of the local device, or JAX's error."""
    from stack_kernels.burn_in.children import leave_with_parent

    leave_with_parent()
    try:
        print(json.dumps(_describe_device()), flush=True)
    except Exception as error:  # any failure of a driver is the answer
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)


def _describe_device() -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    from stack_core.chips import current_chip
    from stack_kernels.bench.run import results
    from stack_kernels.burn_in.checks import platform_of
    from stack_kernels.tuning.tables import ChipName

    devices = jax.local_devices()
    jax.block_until_ready(jnp.ones(_FREE_BYTES, jnp.int8))
    found = results(())
    return {
        "platform": platform_of(jax.default_backend()),
        "kinds": [device.device_kind for device in devices],
        "file_name": Path(ChipName.of(current_chip()).file_name).stem,
        "heading": found.heading,
        "identity": found.heading.partition(", ")[2],
        "memory_bytes": (devices[0].memory_stats() or {}).get("bytes_limit"),
    }


if __name__ == "__main__":
    main()
