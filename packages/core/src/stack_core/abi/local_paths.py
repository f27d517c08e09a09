"""Paths that users pass in commands and configs: `~` and `..` are resolved, and remote storage is rejected."""

import re
from pathlib import Path

from stack_core.abi.errors import ConfigError

__all__ = ["PathError", "hub_advice", "local_address", "local_path", "refuse_remote", "refuse_schemes"]

_STORAGE = "gs|gcs|s3|s3a|s3n|r2|b2|hdfs|webhdfs|abfs|abfss|wasb|wasbs|az|adl|oss|oci|cos|swift|dbfs|memory"
_REMOTE = re.compile(rf"(?:\w+:)?({_STORAGE}):/", re.IGNORECASE)
# One letter is a drive of Windows.
_SCHEME = re.compile(r"(?:\w+:)?([A-Za-z][A-Za-z0-9+.-]+)://")
_FILE = re.compile(r"^(\w+:)??file:(?://(?:localhost)?)?/+(?=[^/])", re.IGNORECASE)
_HUB = re.compile(r"(?:[a-z0-9_]+:)?([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)")


class PathError(ConfigError, ValueError):
    """A ConfigError that is also a ValueError, which pydantic attributes to the config key."""


def refuse_remote(text: str) -> str:
    """Returns the text unchanged if it is not an address of remote storage, with or without a format prefix.

    `Path` would turn such an address into a local folder named "gs:".

    Raises:
      ConfigError: the text is an address of remote storage.
    """
    if found := _REMOTE.match(text):
        raise PathError(
            f"{text!r} is an address of remote storage ({found[1]}), which is not supported. Use a local path: mount "
            "the bucket, or copy the files."
        )
    return text


def refuse_schemes(path: str) -> str:
    """Returns a path unchanged if it has no scheme such as "https://" or "ftp://", with or without a format prefix.

    Raises:
      ConfigError: the path has a scheme, from which `Path` would make a folder.
    """
    if found := _SCHEME.match(refuse_remote(path)):
        raise PathError(
            f"{path!r} is an address of scheme {found[1]!r}; a local path was expected. Copy the files here and give "
            "their path."
        )
    return path


def local_path(path: str | Path) -> Path:
    """Resolves `~` and `..`, which not every library does; symbolic links before `..` are followed.

    "file:///PATH" is the absolute PATH.

    Raises:
      ConfigError: the path is an address of remote storage or of another scheme.
    """
    found = Path(refuse_schemes(_FILE.sub("/", str(path))))
    if str(found).startswith("~"):
        try:
            found = found.expanduser()
        except RuntimeError as error:
            raise PathError(f"{str(path)!r}: {error} Write out the full path.") from error
    return found.resolve() if ".." in found.parts else found


def local_address(address: str) -> str:
    """Applies `local_path` to the path in "DIR" or "FORMAT:DIR"; a format is one word (letters, digits, _).

    Raises:
      ConfigError: the address names remote storage.
    """
    address = _FILE.sub(lambda found: f"{found[1] or ''}/", address)
    scheme, separator, path = address.partition(":")
    if separator and re.fullmatch(r"\w+", scheme) and path:
        return f"{scheme}:{local_path(refuse_schemes(address)[len(scheme) + 1 :])}"
    return str(local_path(address))


def hub_advice(address: str) -> str:
    """Returns how to name a model of the Hugging Face hub if the address looks like one, else ""."""
    found = _HUB.fullmatch(address)
    if found is None or Path(found[1]).exists():
        return ""
    name = found[1]
    return (
        f" If {name!r} is a model of the Hugging Face hub, write `hf:{name}`, or fetch it and give the directory: "
        f"`hf download {name} --local-dir {name.partition('/')[2]}`."
    )
