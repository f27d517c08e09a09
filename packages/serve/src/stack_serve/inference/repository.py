"""States of the versions in a repository, and the steps to the requested state (pure).

The previous version stays loaded until the new one is ready. A version that fails to load does not affect the rest and
is retried when its files change.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

__all__ = [
    "Key",
    "State",
    "Steps",
    "Version",
    "changed",
    "failed",
    "latest",
    "loading",
    "steps",
    "tried_again",
    "without_lost",
]

State = Literal["LOADING", "READY", "UNAVAILABLE"]


class Key(NamedTuple):
    """A version of a model."""

    model: str
    version: int


@dataclass(frozen=True)
class Version:
    """State of a version.

    Attributes:
      fingerprint: fingerprint of its files at the last attempt to load them.
      state: state of the last attempt.
      reason: reason why the version is unavailable, or an empty string.
      live: True if the version is being served, possibly from an earlier state of its files.
    """

    fingerprint: str
    state: State
    reason: str = ""
    live: bool = False


Versions = Mapping[Key, Version]


@dataclass(frozen=True)
class Steps:
    """Versions to load and to unload next."""

    load: tuple[Key, ...]
    unload: tuple[Key, ...]


def steps(found: Mapping[Key, str], versions: Versions, *, unwanted: frozenset[str], newest: int) -> Steps:
    """Computes which versions to load and unload.

    Args:
      found: fingerprint of each version in the repository.
      versions: current state of each version.
      unwanted: models that were unloaded on request.
      newest: number of versions to serve per model, counted from the newest loadable one. 0 serves all.
    """
    load: list[Key] = []
    unload: list[Key] = []
    for model in sorted({key.model for key in (*found, *versions)}):
        usable = [key for key in found if key.model == model and not _failed(versions.get(key), found[key])]
        usable = [] if model in unwanted else sorted(usable, reverse=True)
        wanted = usable[:newest] if newest else usable
        load += [key for key in reversed(wanted) if _is_new(versions.get(key), found[key])]
        live = [key for key, version in versions.items() if key.model == model and version.live]
        # The old version is served until the new one is ready, unless its files were deleted.
        replaced = bool(wanted) and all(key in versions and versions[key].state == "READY" for key in wanted)
        ends = replaced or model in unwanted
        unload += [key for key in live if key not in wanted and (ends or key not in found)]
    return Steps(tuple(load), tuple(unload))


def changed(versions: Versions, key: Key, version: Version | None) -> dict[Key, Version]:
    """Returns the versions with one replaced, or removed if `version` is None."""
    rest = {each: known for each, known in versions.items() if each != key}
    return rest if version is None else {**rest, key: version}


def without_lost(versions: Versions, found: Mapping[Key, str]) -> dict[Key, Version]:
    """Removes versions that are neither live nor in the repository."""
    return {key: version for key, version in versions.items() if version.live or key in found}


def tried_again(versions: Versions, model: str) -> dict[Key, Version]:
    """Clears the fingerprints of a model's unavailable versions, which makes them load again."""
    return {
        key: replace(version, fingerprint="") if key.model == model and version.state == "UNAVAILABLE" else version
        for key, version in versions.items()
    }


def loading(known: Version | None, fingerprint: str) -> Version:
    """Returns the state of a version that starts to load. It stays live if it was."""
    return Version(fingerprint, "LOADING", live=known is not None and known.live)


def failed(known: Version, reason: str) -> Version:
    """Returns the state of a version that failed to load."""
    return replace(known, state="UNAVAILABLE", reason=reason)


def latest(versions: Versions, model: str) -> int | None:
    """Returns the newest live version of a model, or None if none is live."""
    return max((key.version for key, version in versions.items() if key.model == model and version.live), default=None)


def _failed(version: Version | None, fingerprint: str) -> bool:
    return version is not None and version.state == "UNAVAILABLE" and version.fingerprint == fingerprint


def _is_new(version: Version | None, fingerprint: str) -> bool:
    # If files change during a load, the scan after it starts another.
    return version is None or (version.fingerprint != fingerprint and version.state != "LOADING")
