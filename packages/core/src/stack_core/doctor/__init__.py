"""Checks of this installation and machine: correctness, settings that change results or speed, and suggested fixes.

No module here imports JAX, which may itself be broken: `backend` starts it in a separate process.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import Distribution

from stack_core.abi.plugins import plugins, registries
from stack_core.doctor import accelerators, backend, environment, network, packages, resources
from stack_core.doctor.findings import STATUSES, Finding, Status, worst

__all__ = ["STATUSES", "Finding", "Status", "diagnose", "worst"]


def diagnose(*, timeout_s: float = 90.0) -> Iterator[Finding]:
    """Yields each finding as soon as it is available.

    Args:
      timeout_s: maximum seconds for JAX to start.
    """
    distributions = packages.installed()
    roots = list(dict.fromkeys(["stack-core", *(report.distribution for report in plugins.reports())]))
    checks = {
        "python": lambda: packages.python_findings(distributions),
        "packages": lambda: packages.dependency_findings(distributions, roots),
        "jax's packages": lambda: packages.accelerator_findings(distributions),
        "plugins": lambda: packages.plugin_findings(plugins, registries),
        "environment": lambda: environment.environment_findings(os.environ),
        "cores": resources.core_findings,
        "memory": resources.memory_findings,
        "memory pages": lambda: resources.page_findings(os.environ),
        "caches": lambda: resources.cache_findings(os.environ),
        "clock": resources.clock_findings,
        "network": network.network_findings,
        "jax": lambda: _jax_findings(timeout_s, distributions),
    }
    for check, look in checks.items():
        yield from _guarded(check, look)


def _jax_findings(timeout_s: float, distributions: Mapping[str, Distribution]) -> Iterator[Finding]:
    answer = backend.ask_jax(timeout_s)
    yield from backend.jax_findings(answer)
    hardware = accelerators.find_hardware()
    yield from accelerators.hardware_findings(hardware, answer, os.environ, distributions)


def _guarded(check: str, look: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    try:
        yield from look()
    except Exception as error:  # Broken machines fail in unforeseen ways; the remaining checks still help.
        found = f"this check raised an error: {type(error).__name__}: {error}"
        yield Finding(check, "warning", found, "Please report it, with the output of `stack doctor --json`.")
