"""Installed Python, packages and plugins, checked for compatibility."""

import importlib.metadata
import platform
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import Distribution

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from stack_core.abi.findings import Finding
from stack_core.abi.hookspecs import REGISTRY_KINDS
from stack_core.abi.installing import install_command
from stack_core.abi.plugins import Plugins, Registries

__all__ = ["check_accelerator_packages", "check_dependencies", "check_plugins", "check_python", "unmet_requirements"]

_CORE = "stack-core"
# Packages that add an accelerator to JAX, with the extra of jax that pins their compatible release.
_ACCELERATORS = {
    "libtpu": "tpu",
    "jax-cuda13-plugin": "cuda13",
    "jax-cuda13-pjrt": "cuda13",
    "jax-cuda12-plugin": "cuda12",
    "jax-cuda12-pjrt": "cuda12",
}


def installed() -> dict[str, Distribution]:
    """Returns the first distribution on the path (the imported one) for each normalized name."""
    found: dict[str, Distribution] = {}
    for distribution in importlib.metadata.distributions():
        metadata = distribution.metadata
        if "Name" in metadata:  # an interrupted installation may have no name
            found.setdefault(canonicalize_name(metadata["Name"]), distribution)
    return found


def check_python(distributions: Mapping[str, Distribution], version: str | None = None) -> Iterator[Finding]:
    """Checks that stack-core supports this Python."""
    version = version or platform.python_version()
    supported = distributions[_CORE].metadata["Requires-Python"] if _CORE in distributions else None
    found = f"Python {version} at {sys.executable}"
    if supported and not SpecifierSet(supported).contains(version, prereleases=True):
        yield Finding("python", "problem", found, f"Use Python {supported}; stack-core supports no other version.")
    else:
        yield Finding("python", "ok", found)


def unmet_requirements(name: str) -> list[str]:
    """Returns what an installed package requires and this environment lacks, each as a clause of a sentence."""
    distributions, name = installed(), canonicalize_name(name)
    if name not in distributions:
        return []
    return [finding.found for finding in _misfits(distributions, name, frozenset(), set(), direct=True)]


def check_dependencies(distributions: Mapping[str, Distribution], roots: list[str]) -> Iterator[Finding]:
    """Checks that the dependencies of each root distribution are installed in compatible versions, transitively.

    Dependencies of an extra are checked if they are installed.
    """
    seen: set[tuple[str, frozenset[str]]] = set()
    for root in roots:
        name = canonicalize_name(root)
        if name not in distributions:
            yield Finding(root, "problem", f"{root} is not installed", install_command(root))
            continue
        wrong = list(_misfits(distributions, name, frozenset(), seen, direct=True))
        wrong += _optional_misfits(distributions, name, seen)
        yield from wrong
        if not any(finding.status == "problem" for finding in wrong):
            yield Finding(root, "ok", f"version {distributions[name].version}; all its dependencies are installed")


def _optional_misfits(
    distributions: Mapping[str, Distribution], name: str, seen: set[tuple[str, frozenset[str]]]
) -> Iterator[Finding]:
    """Yields problems of the installed packages that only the extras of a distribution require."""
    extras = frozenset(distributions[name].metadata.get_all("Provides-Extra") or ())
    always = list(_requirements(distributions[name], frozenset()))
    for requirement in _requirements(distributions[name], extras):
        needed = canonicalize_name(requirement.name)
        if requirement in always or needed not in distributions or needed == name:
            continue
        finding = _misfit(distributions, name, requirement, serious=False)
        if finding is not None:
            yield finding
        yield from _misfits(distributions, needed, frozenset(), seen, direct=False)


def _misfits(
    distributions: Mapping[str, Distribution],
    name: str,
    extras: frozenset[str],
    seen: set[tuple[str, frozenset[str]]],
    *,
    direct: bool,
) -> Iterator[Finding]:
    if (name, extras) in seen:
        return
    seen.add((name, extras))
    for requirement in _requirements(distributions[name], extras):
        needed = canonicalize_name(requirement.name)
        # Ranges of stack packages and JAX are tested; other packages' ranges are often too narrow.
        finding = _misfit(distributions, name, requirement, serious=direct or name == "jax")
        if finding is not None:
            yield finding
        if needed in distributions:
            yield from _misfits(distributions, needed, frozenset(requirement.extras), seen, direct=False)


def _misfit(
    distributions: Mapping[str, Distribution], name: str, requirement: Requirement, *, serious: bool
) -> Finding | None:
    needed = canonicalize_name(requirement.name)
    asked = f"{distributions[name].metadata['Name']} {distributions[name].version} needs {_plain(requirement)}"
    command = install_command(_plain(requirement))
    if needed not in distributions:
        return Finding(needed, "problem", f"{asked}, which is not installed", command)
    version = distributions[needed].version
    if requirement.specifier.contains(version, prereleases=True):
        return None
    return Finding(needed, "problem" if serious else "warning", f"{asked}; {version} is installed", command)


def _requirements(distribution: Distribution, extras: frozenset[str]) -> Iterator[Requirement]:
    """Yields a distribution's requirements on this Python and platform."""
    for line in distribution.requires or ():
        try:
            requirement = Requirement(line)
        except InvalidRequirement:  # metadata of an old package, which pip cannot parse either
            continue
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": one}) for one in extras or {""}):
            yield requirement


def _plain(requirement: Requirement) -> str:
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    return f"{requirement.name}{extras}{requirement.specifier}"


def check_accelerator_packages(distributions: Mapping[str, Distribution]) -> Iterator[Finding]:
    """Checks that the installed TPU and CUDA packages match the installed JAX."""
    jax = distributions.get("jax")
    if jax is None:
        return
    needed: dict[str, dict[str, Requirement]] = {
        extra: {str(canonicalize_name(one.name)): one for one in _requirements(jax, frozenset({extra}))}
        for extra in _ACCELERATORS.values()
    }
    plugins = {name: distributions[name] for name in _ACCELERATORS if name in distributions}
    for name, distribution in plugins.items():
        requirement = needed[_ACCELERATORS[name]].get(name)
        for plugin in plugins.values():  # jax pins the CUDA plugin, which pins its runtime
            for one in _requirements(plugin, frozenset()):
                requirement = one if canonicalize_name(one.name) == name else requirement
        if requirement is None or requirement.specifier.contains(distribution.version, prereleases=True):
            yield Finding(name, "ok", f"version {distribution.version}, for jax {jax.version}")
        else:
            yield Finding(
                name,
                "problem",
                f"version {distribution.version} does not fit jax {jax.version}, which needs {_plain(requirement)}",
                install_command(f"jax[{_ACCELERATORS[name]}]=={jax.version}", upgrade=True),
            )


def check_plugins(plugins: Plugins, registries: Registries) -> Iterator[Finding]:
    """Reports plugins that failed or are incomplete, and plugin variables with unknown names."""
    for kind in REGISTRY_KINDS:
        getattr(registries, kind).names()
    reports = plugins.reports()
    loaded = [report.name for report in reports if report.status == "loaded"]
    yield Finding("plugins", "ok", f"loaded: {', '.join(loaded) or 'none'}")
    for report in reports:
        found = f"{report.name!r} of {report.distribution} {report.version}, {report.status}: "
        if report.status == "blocked":
            yield Finding("plugins", "note", found + " ".join(report.problems))
        elif report.status != "loaded":
            advice = f"Update or fix {report.distribution}, or block it with STACK_DISABLE_PLUGINS={report.name}."
            yield Finding("plugins", "problem", found + " ".join(report.problems), advice)
    for problem in plugins.mistakes():
        yield Finding("plugins", "warning", problem, "Correct the variable or unset it.")
