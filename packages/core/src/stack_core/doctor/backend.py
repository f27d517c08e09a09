"""The start of JAX, probed in a separate process, which may crash or hang."""

import contextlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from stack_core.abi.findings import Finding
from stack_core.abi.installing import install_command

__all__ = ["Answer", "ask_jax", "check_jax"]

_KILL_S = 5.0
# `-P` keeps the script's folder out of `sys.path`, as for an installed command.
_PROBE = (sys.executable, "-P", str(Path(__file__).with_name("probe.py")))
_DOING = {
    "find": "looking for JAX",
    "import": "importing JAX",
    "devices": "listing JAX's devices",
    "compute": "computing on JAX's first device",
    "rows": "looking up the devices' chips",
}


@dataclass(frozen=True)
class Answer:
    """The result of the probe.

    Attributes:
      stages: results of the completed stages, by name.
      failed: first stage that failed, or None.
      error: error of the failed stage.
      where: file in which the error was raised, or None.
      log: last lines that JAX wrote to standard error.
    """

    stages: Mapping[str, Mapping[str, Any]]
    failed: str | None = None
    error: str = ""
    where: str | None = None
    log: str = field(default="", repr=False)

    @property
    def platform(self) -> str | None:
        """The platform, such as "cpu", "gpu" or "tpu"; None without a device."""
        return self.stages.get("devices", {}).get("platform")

    @property
    def devices(self) -> list[Mapping[str, Any]]:
        return self.stages.get("devices", {}).get("devices", [])


def ask_jax(timeout_s: float, command: tuple[str, ...] = _PROBE) -> Answer:
    """Starts JAX in a separate process with this process's environment."""
    # By default JAX would allocate most of a GPU's memory, which another process may be using.
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    # Files and not pipes, which a verbose JAX could fill while nobody reads.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=output, stderr=log, env=environment, start_new_session=True)
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _kill(process)
        return _answer(status, _text(output), _text(log), timeout_s)


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # A process blocked inside a driver cannot be killed, so the wait is limited.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_KILL_S)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _answer(status: int | None, output: str, log: str, timeout_s: float) -> Answer:
    stages: dict[str, Mapping[str, Any]] = {}
    tail = "\n".join(log.strip().splitlines()[-8:])
    for line in output.splitlines():
        with contextlib.suppress(ValueError, TypeError, KeyError):  # skips output of libraries
            answer = json.loads(line)
            if "error" in answer:
                return Answer(stages, answer["stage"], answer["error"], answer["where"], tail)
            stages[answer["stage"]] = answer
    left = [stage for stage in _DOING if stage not in stages]
    if not left:
        return Answer(stages, log=tail)
    if status is None:
        error = f"no answer after {timeout_s:g} s"
    elif status < 0:
        error = f"the process was killed by {signal.Signals(-status).name}"
    else:
        error = f"the process ended with status {status}"
    return Answer(stages, left[0], error, None, tail)


def check_jax(answer: Answer) -> Iterator[Finding]:
    """Reports the state of JAX, its location, and its devices."""
    local = Path.cwd() / "jax.py"
    if local.exists():
        yield Finding("jax", "warning", f"{local} hides JAX from scripts in its folder", f"Rename {local}.")
    shadows = list(_shadowed(answer))
    yield from shadows
    imported = answer.stages.get("import")
    if imported is not None:
        yield Finding("jax", "ok", f"jax {imported['jax']} with jaxlib {imported['jaxlib']} can be imported")
    if answer.failed is not None:
        yield _failure(answer, mended_above=bool(shadows))
    elif not answer.stages["compute"]["right"]:
        yield Finding(
            "devices",
            "problem",
            f"a product of two small matrices is wrong on {answer.devices[0]['kind']!r}",
            "Update the device's driver and JAX. If the product is still wrong, the device is damaged.",
        )
    yield from _devices(answer)


def _shadowed(answer: Answer) -> Iterator[Finding]:
    """Detects another `jax` that precedes the installed one on the path."""
    found = answer.stages.get("find", {}).get("file")
    try:
        distribution = importlib.metadata.distribution("jax")
    except importlib.metadata.PackageNotFoundError:
        return
    expected = Path(str(distribution.locate_file("jax/__init__.py")))
    if found is None or not expected.exists() or Path(found).resolve() == expected.resolve():
        return
    yield Finding(
        "jax",
        "warning" if answer.failed is None else "problem",
        f"`import jax` imports {found}, which hides the installed {expected}",
        f"Rename or remove {found}, or remove its folder from PYTHONPATH.",
    )


def _failure(answer: Answer, *, mended_above: bool) -> Finding:
    stage = answer.failed or ""
    found = f"{_DOING[stage]} failed: {answer.error}"
    if answer.log:
        found += f"\n{answer.log}"
    if stage in ("find", "import"):
        return Finding("jax", "problem", found, "" if mended_above else _import_remedy(answer))
    if stage == "rows":
        return Finding("devices", "problem", found)
    return Finding("devices", "problem", found, _device_remedy(answer))


def _import_remedy(answer: Answer) -> str:
    if "No module named 'jax'" in answer.error:
        return f"JAX is missing: {install_command('stack-core')}"
    if "SIGILL" in answer.error:
        return "jaxlib needs a CPU with AVX; under an emulator, use Python and JAX of the real architecture."
    where = f" (it failed in {answer.where})" if answer.where else ""
    return f"Install JAX again{where}: {install_command(f'jax{_jax_range()}', reinstall=True)}"


def _device_remedy(answer: Answer) -> str:
    if "Unknown flag" in answer.log:
        return f"Correct XLA_FLAGS or unset it; it is {os.environ.get('XLA_FLAGS')!r}."
    if "no answer" in answer.error:
        return (
            "JAX may wait for a device that another process uses, a broken driver, or the other hosts of a TPU slice. "
            "On a slice, run `stack doctor` on all of them at once. JAX_PLATFORMS=cpu runs without the device."
        )
    if platforms := os.environ.get("JAX_PLATFORMS"):
        return f"JAX_PLATFORMS is {platforms!r}: unset it to use any available device, or set it to cpu."
    return "JAX_PLATFORMS=cpu runs without the device. JAX's output above is the cause."


def _jax_range() -> str:
    from packaging.requirements import Requirement

    requirements = [Requirement(line) for line in importlib.metadata.requires("stack-core") or ()]
    return next((str(one.specifier) for one in requirements if one.name == "jax" and one.marker is None), "")


def _devices(answer: Answer) -> Iterator[Finding]:
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for device in answer.devices:
        kinds.setdefault(device["kind"], []).append(device)
    for kind, devices in kinds.items():
        limits = [device["memory"].get("bytes_limit", 0) for device in devices if device["local"]]
        memory = f", {min(limits) / 2**30:.1f} GiB for arrays on each" if limits and min(limits) else ""
        found = f"{len(devices)} x {kind!r} on platform {answer.platform!r}{memory}"
        chip = answer.stages.get("rows", {}).get("chips", {}).get(kind)
        if chip is None and "rows" in answer.stages:
            found += "; no chip row has its peaks, so MFU and rooflines are unknown"
            advice = "A plugin can add the row with `stack_register_chips`; see `stack chips`."
            yield Finding("devices", "note", found, advice)
        else:
            yield Finding("devices", "ok", found if chip is None else f"{found}, chip {chip!r}")
