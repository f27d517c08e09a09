"""The versions that all hosts of a cluster must share: Python, jax, the packages of stack, and plugins."""

import platform
from collections.abc import Mapping
from importlib import metadata
from typing import Any

__all__ = ["differing", "installed"]

_WATCHED = ("jax", "jaxlib", "numpy", "flax", "optax", "orbax-checkpoint")


def installed() -> dict[str, Any]:
    """Returns the versions of Python and numerical packages, and the state of the plugins.

    Returns:
      {"versions": version by package, "plugins": version by plugin unless blocked, "failed": reason by plugin}
    """
    from stack_core.abi.plugins import plugins

    # Patch releases of Python are compatible.
    versions = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in _WATCHED:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    loaded = {f"{each.name}": str(each.version) for each in plugins.reports() if each.status != "blocked"}
    failed = {each.name: "; ".join(each.problems) for each in plugins.reports() if each.status == "failed"}
    return {"versions": versions, "plugins": loaded, "failed": failed}


def differing(host: str, remote: Mapping[str, Any], local: Mapping[str, Any]) -> list[str]:
    """Lists the differences between a host and the driver's host, one line each; empty if they are compatible."""
    lines = []
    for name in sorted({*local["versions"], *remote["versions"]}):
        there, here = remote["versions"].get(name, "none"), local["versions"].get(name, "none")
        if there != here:
            lines.append(f"{host} has {name} {there}, but the driver has {here}. Install {name} {here} there.")
    for name, version in sorted(local["plugins"].items()):
        there = remote["plugins"].get(name)
        if there is None:
            lines.append(f"{host} lacks the plugin {name!r} ({version}), which the driver has. Install it there.")
        elif there != version:
            lines.append(f"{host} has the plugin {name!r} in version {there}, but the driver has {version}.")
    lines += [
        f"{host} has the plugin {name!r} ({version}), which the driver lacks. Install it here, or block it there."
        for name, version in sorted(remote["plugins"].items())
        if name not in local["plugins"]
    ]
    for name, problem in sorted(remote["failed"].items()):
        if name not in local["failed"]:
            lines.append(f"{host} cannot load the plugin {name!r}: {problem}")
    return lines
