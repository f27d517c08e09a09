"""Checkpoints by their address: "DIR", whose format is found, or "FORMAT:DIR"."""

from pathlib import Path
from typing import Any

from stack_core.errors import ConversionError, nearest
from stack_core.plugins import registries
from stack_core.protocols import GenerativeCheckpoint, TrainedModel

__all__ = ["open_for_generation", "open_model"]


def open_model(address: str, *, data: str | None = None) -> TrainedModel:
    """Opens a trained model with the data that it is measured on.

    Args:
      data: address of other documents than the model's own.

    Raises:
      ConversionError: no format that opens models has this name or knows the directory, or several know it.
      StackError: the checkpoint or the data cannot be used.
    """
    format_, directory = _found(address, "open_model")
    return format_.open_model(directory, data=data)


def open_for_generation(address: str) -> GenerativeCheckpoint:
    """Opens a language model to generate text.

    Raises:
      ConversionError: as `open_model`.
      StackError: the checkpoint cannot be used.
    """
    format_, directory = _found(address, "open_for_generation")
    return format_.open_for_generation(directory)


def _found(address: str, method: str) -> tuple[Any, Path]:
    """The format of an address, one of those that have `method`, and the directory."""
    formats = {name: registries.checkpoint_formats[name] for name in registries.checkpoint_formats}
    formats = {name: format_ for name, format_ in formats.items() if hasattr(format_, method)}
    known = ", ".join(formats) or "none; `pip install stack-train` provides some"
    scheme, separator, path = address.partition(":")
    if separator and "/" not in scheme:
        if scheme not in formats:
            advice = nearest(scheme, formats)
            raise ConversionError(f"Unknown checkpoint format {scheme!r} in {address!r}.{advice} Known: {known}.")
        return formats[scheme], Path(path)
    directory = Path(address)
    found = [name for name, format_ in formats.items() if format_.recognizes(directory)]
    if len(found) > 1:
        raise ConversionError(
            f"{address} could be of the formats {' and '.join(found)}. Say which, as in {found[0]}:{address}."
        )
    if not found:
        what = "holds no model of a known format" if directory.is_dir() else "is no directory"
        raise ConversionError(f"{address} {what}. Formats: {known}.")
    return formats[found[0]], directory
