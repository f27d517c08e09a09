"""Models on disk by address: "DIR", whose format is detected, or "FORMAT:DIR"."""

from pathlib import Path
from typing import Any, TypeVar

from stack_core.abi.errors import ConversionError, GenerationError, nearest
from stack_core.abi.formats import (
    GenerativeCheckpoint,
    ModelFormat,
    OpensAuxiliaryModels,
    OpensForGeneration,
    OpensModels,
    TrainedModel,
)
from stack_core.abi.installing import install_command
from stack_core.abi.local_paths import hub_advice, local_address
from stack_core.abi.plugins import provider_of, registries

__all__ = ["find_format", "open_auxiliary", "open_for_generation", "open_model"]

Format = TypeVar("Format", bound=ModelFormat)


def open_model(address: str, *, data: str | None = None) -> TrainedModel:
    """Opens a trained model with its evaluation data.

    Args:
      data: address of other documents than the model's own.

    Raises:
      ConversionError: no format that opens models has this name or recognizes the directory, or several recognize it.
      StackError: the checkpoint or the data cannot be used.
    """
    format_, directory = find_format(address, OpensModels)
    return format_.open_model(directory, data=data)


def open_for_generation(address: str, *, encoders: bool = False, sources: bool = False) -> GenerativeCheckpoint:
    """Opens a language model for text generation.

    Args:
      encoders: whether an encoder is opened, too; see `stack_core.text.embeddings`.
      sources: whether an encoder-decoder is opened, too, which generates from a source; see `stack_core.text.sources`.

    Raises:
      ConversionError: as `open_model`.
      StackError: the checkpoint cannot be used, or is an encoder or an encoder-decoder.
    """
    format_, directory = find_format(address, OpensForGeneration)
    checkpoint = format_.open_for_generation(directory)
    if not (encoders or getattr(checkpoint, "generates", True)):
        raise GenerationError(f"{address} is an encoder: it embeds texts and generates none. Use it in stack serve.")
    if not sources and getattr(checkpoint, "start_token", None) is not None:
        raise GenerationError(
            f"{address} is an encoder-decoder: it generates a target from a source text and continues no prompt. Use "
            "stack generate."
        )
    return checkpoint


def open_auxiliary(address: str, name: str, abstract: Any) -> Any:
    """Reads the parameters of an auxiliary model that an objective trained; see `OpensAuxiliaryModels`.

    Raises:
      ConversionError: as `open_model`.
      StackError: no such model was trained, or its parameters differ from `abstract`.
    """
    format_, directory = find_format(address, OpensAuxiliaryModels)
    return format_.open_auxiliary(directory, name, abstract)


def find_format(address: str, ability: type[Format]) -> tuple[Format, Path]:
    """Returns the format that opens an address, among formats with an ability, and the directory.

    Raises:
      ConversionError: as `open_model`.
    """
    address = local_address(address)
    scheme, separator, path = address.partition(":")
    # Other formats are not imported if the address names its own, which saves half a second of CPU time.
    if separator and scheme in registries.model_formats:
        format_ = registries.model_formats[scheme]
        if isinstance(format_, ability):
            return format_, Path(path)
    registered = {name: registries.model_formats[name] for name in registries.model_formats}
    formats = {name: format_ for name, format_ in registered.items() if isinstance(format_, ability)}
    known = ", ".join(formats) or f"none; `{install_command(provider_of('model_formats') or '')}` provides some"
    if separator and "/" not in scheme:
        advice = nearest(scheme, formats)
        raise ConversionError(f"Unknown model format {scheme!r} in {address!r}.{advice} Known: {known}.")
    directory = Path(address)
    found = [name for name, format_ in formats.items() if format_.recognizes(directory)]
    if len(found) > 1:
        raise ConversionError(
            f"{address} could be of the formats {' and '.join(found)}. Say which, as in {found[0]}:{address}."
        )
    if not found:
        problem = "holds no model of a known format" if directory.is_dir() else "is not a directory"
        raise ConversionError(f"{address} {problem}. Formats: {known}.{hub_advice(address)}")
    return formats[found[0]], directory
