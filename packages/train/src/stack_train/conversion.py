"""Conversion of weights between run directories and other model formats."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from stack_core.abi.errors import ConversionError, nearest
from stack_core.abi.formats import (
    Conversion,
    ExportsAdapters,
    ExportsByImportance,
    ExportsRuns,
    ExportsStored,
    IgnoresKeys,
    ImportsAdapters,
    ImportsRuns,
    ModelFormat,
    Progress,
)
from stack_core.abi.local_paths import local_address
from stack_core.abi.plugins import registries

__all__ = ["ReplacesDenoisers", "convert", "format_of"]


@runtime_checkable
class ReplacesDenoisers(ModelFormat, Protocol):
    """A format of image models, whose `import_run` also takes `denoiser`, an address of weights in another format.

    Attributes:
      denoiser_formats: formats of these weights.
    """

    denoiser_formats: Collection[str]


def convert(source: str, destination: str, *, progress: Progress | None = None, **options: Any) -> Conversion:
    """Converts weights between a run directory and FORMAT:DIR, in either direction. Nothing is overwritten.

    Args:
      source: address of the weights to read.
      destination: address to write, which must not exist.
      progress: callback with the path of each converted parameter, the bytes done and the total bytes.
      options: options of formats: `base`, `base_model`, `ignore`, `denoiser`, `stored` and `importance`, as in
        `stack convert`.

    Raises:
      ConversionError: an address names an unknown format, or an option does not apply.
      StackError: the weights cannot be read or written.
    """
    (from_format, from_path), (to_format, to_path) = format_of(source, ImportsRuns), format_of(destination, ExportsRuns)
    if (from_format is None) == (to_format is None):
        raise ConversionError(
            f"Cannot convert {source!r} to {destination!r}: one of the two is a run directory, the other FORMAT:DIR "
            f"with a format among {', '.join(_formats(ImportsRuns, ExportsRuns))}."
        )
    _check_options(options, source, from_format, destination, to_format)
    if from_format is not None:
        return from_format.import_run(from_path, to_path, progress=progress, **options)
    return to_format.export_run(from_path, to_path, progress=progress, **options)


def format_of(address: str, ability: type) -> tuple[Any, Path]:
    """Splits an address into its model format, None for a run directory, and its path.

    Raises:
      ConversionError: the format does not exist, or does not implement `ability` (`ImportsRuns` or `ExportsRuns`).
    """
    address = local_address(address)
    scheme, separator, path = address.partition(":")
    if not separator or "/" in scheme:
        return None, Path(address)
    able = _formats(ability)
    if scheme not in _formats(ImportsRuns, ExportsRuns):
        known = ", ".join(able)
        raise ConversionError(f"Unknown model format {scheme!r} in {address!r}.{nearest(scheme, able)} Known: {known}.")
    if scheme not in able:
        direction = "read as a source" if ability is ImportsRuns else "written as a destination"
        raise ConversionError(
            f"The format {scheme!r} of {address!r} cannot be {direction}: it has no "
            f"`{'import_run' if ability is ImportsRuns else 'export_run'}`. Formats that can: {', '.join(able)}."
        )
    return registries.model_formats[scheme], Path(path)


def _check_options(options: Mapping[str, Any], source: str, from_format: Any, destination: str, to_format: Any) -> None:
    """Raises a ConversionError if an option does not apply to the source or destination format."""
    uses = {
        "base": (from_format, ImportsAdapters, f"applies to adapters, but {source!r} is not an adapter"),
        "ignore": (from_format, IgnoresKeys, f"ignores keys of a config.json, but {source!r} does not have one"),
        "denoiser": (from_format, ReplacesDenoisers, f"replaces a denoiser, but {source!r} does not have one"),
        "base_model": (to_format, ExportsAdapters, f"applies to written adapters, but {destination!r} is not one"),
        "stored": (to_format, ExportsStored, f"applies to formats with a choice of dtypes, unlike {destination!r}"),
        "importance": (to_format, ExportsByImportance, f"applies to quantized types of GGUF, unlike {destination!r}"),
    }
    for name in options:
        if name not in uses:
            raise ConversionError(
                f"{name!r} is not an option of a conversion.{nearest(name, uses)} Known: {', '.join(uses)}."
            )
        used_by, ability, problem = uses[name]
        if not isinstance(used_by, ability):
            raise ConversionError(f"--{name.replace('_', '-')} {problem}. Leave it out.")


def _formats(*abilities: type) -> tuple[str, ...]:
    """Returns the names of the formats that implement any of these protocols."""
    return tuple(name for name, format_ in registries.model_formats.items() if isinstance(format_, abilities))
