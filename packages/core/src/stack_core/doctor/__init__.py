"""Checks of this installation and machine: correctness, settings that change results or speed, and suggested fixes.

Packages add checks by the hook `stack_register_checks`. No module here imports JAX, which may itself be broken:
`backend` starts it in a separate process.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import Distribution

from stack_core.abi.findings import STATUSES, Finding, Status, worst
from stack_core.abi.plugins import plugins, registries
from stack_core.doctor import accelerators, backend, environment, network, packages, resources

__all__ = ["STATUSES", "Finding", "Status", "diagnose", "worst"]


def diagnose(*, timeout_s: float = 90.0) -> Iterator[Finding]:
    """Yields each finding as soon as it is available.

    Args:
      timeout_s: maximum seconds for JAX to start.
    """
    distributions = packages.installed()
    roots = list(dict.fromkeys(["stack-core", *(report.distribution for report in plugins.reports())]))
    # Pairs, not a dict: a check of a plugin must not replace one of the same name.
    checks = [
        ("python", lambda: packages.check_python(distributions)),
        ("packages", lambda: packages.check_dependencies(distributions, roots)),
        ("jax's packages", lambda: packages.check_accelerator_packages(distributions)),
        ("plugins", lambda: packages.check_plugins(plugins, registries)),
        ("environment", lambda: environment.check_environment(os.environ, _variables())),
        ("cores", resources.check_cores),
        ("memory", resources.check_memory),
        ("memory pages", lambda: resources.check_pages(os.environ)),
        ("caches", lambda: resources.check_cache(os.environ)),
        ("clock", resources.check_clock),
        ("network", network.check_network),
        *((name, lambda name=name: registries.checks[name](os.environ)) for name in registries.checks),
        ("jax", lambda: _check_jax(timeout_s, distributions)),  # last, because it takes longest
    ]
    for check, look in checks:
        yield from _guarded(check, look)


def _variables() -> list[str]:
    """Lists the environment variables that the checks of packages declare."""
    return [name for entry in registries.checks.entries() for name in entry.details.get("variables", ())]


def _check_jax(timeout_s: float, distributions: Mapping[str, Distribution]) -> Iterator[Finding]:
    answer = backend.ask_jax(timeout_s)
    yield from backend.check_jax(answer)
    hardware = accelerators.find_hardware()
    yield from accelerators.check_hardware(hardware, answer, os.environ, distributions)


def _guarded(check: str, look: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    try:
        yield from look()
    except Exception as error:  # Broken machines fail in unforeseen ways; the remaining checks still help.
        found = f"this check raised an error: {type(error).__name__}: {error}"
        yield Finding(check, "warning", found, "Please report it, with the output of `stack doctor --json`.")
