"""What a repository holds, what of it is to be served, and what is: pure states.

A version is loaded beside the one that it follows, which is unloaded when the new one is ready. One that cannot be
loaded leaves the others as they are, and is tried again when its files change.
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
    """How far a version is.

    Attributes:
      fingerprint: of its files when it was last loaded, or tried to be.
      reason: why it is unavailable.
      live: some state of its files is being served, perhaps an earlier one.
    """

    fingerprint: str
    state: State
    reason: str = ""
    live: bool = False


Versions = Mapping[Key, Version]


@dataclass(frozen=True)
class Steps:
    """What is to be done next."""

    load: tuple[Key, ...]
    unload: tuple[Key, ...]


def steps(found: Mapping[Key, str], versions: Versions, *, unwanted: frozenset[str], newest: int) -> Steps:
    """What to load and unload so that the wanted versions are served.

    Args:
      found: the fingerprint of each version in the repository.
      unwanted: models that were unloaded on request.
      newest: how many of a model's versions are wanted, counted from the newest one that can be loaded; 0 is all.
    """
    load: list[Key] = []
    unload: list[Key] = []
    for model in sorted({key.model for key in (*found, *versions)}):
        usable = [key for key in found if key.model == model and not _failed(versions.get(key), found[key])]
        usable = [] if model in unwanted else sorted(usable, reverse=True)
        wanted = usable[:newest] if newest else usable
        load += [key for key in reversed(wanted) if _is_new(versions.get(key), found[key])]
        live = [key for key, version in versions.items() if key.model == model and version.live]
        # Until the new version is ready the old one answers, unless its files are gone.
        replaced = bool(wanted) and all(key in versions and versions[key].state == "READY" for key in wanted)
        ends = replaced or model in unwanted
        unload += [key for key in live if key not in wanted and (ends or key not in found)]
    return Steps(tuple(load), tuple(unload))


def changed(versions: Versions, key: Key, version: Version | None) -> dict[Key, Version]:
    """The versions after one has changed; None removes it."""
    rest = {each: known for each, known in versions.items() if each != key}
    return rest if version is None else {**rest, key: version}


def without_lost(versions: Versions, found: Mapping[Key, str]) -> dict[Key, Version]:
    """The versions without those whose files are gone and that are not served either."""
    return {key: version for key, version in versions.items() if version.live or key in found}


def tried_again(versions: Versions, model: str) -> dict[Key, Version]:
    """The versions with those of a model that failed due for another try."""
    return {
        key: replace(version, fingerprint="") if key.model == model and version.state == "UNAVAILABLE" else version
        for key, version in versions.items()
    }


def loading(known: Version | None, fingerprint: str) -> Version:
    """A version that begins to be loaded; what was live of it stays so."""
    return Version(fingerprint, "LOADING", live=known is not None and known.live)


def failed(known: Version, reason: str) -> Version:
    """A version that could not be loaded."""
    return replace(known, state="UNAVAILABLE", reason=reason)


def latest(versions: Versions, model: str) -> int | None:
    """The newest live version of a model."""
    return max((key.version for key, version in versions.items() if key.model == model and version.live), default=None)


def _failed(version: Version | None, fingerprint: str) -> bool:
    return version is not None and version.state == "UNAVAILABLE" and version.fingerprint == fingerprint


def _is_new(version: Version | None, fingerprint: str) -> bool:
    return version is None or (version.fingerprint != fingerprint and version.state != "LOADING")
