"""The data source that a config names, read with care."""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stack_core.abi.data import DataSource, Document
from stack_core.abi.errors import ConfigError, DataError
from stack_core.abi.plugins import registries
from stack_train.data.settings import TextSettings

__all__ = ["check_unchanged", "documents_with_text", "open_source"]


def open_source(config: TextSettings) -> DataSource:
    """Returns the source that `config.source` names, "scheme" or "scheme:address".

    Raises:
      ConfigError: `text_field` is set for a source that has no fields.
      DataError: the address does not lead to documents.
      UnknownName: no plugin registers the scheme.
    """
    scheme, _, address = config.source.partition(":")
    if scheme not in registries.data_sources and _is_path(scheme):
        kind = "jsonl" if scheme.endswith(".jsonl") else "text"
        files = f"{config.source.rstrip('/')}/**/*" if Path(config.source).expanduser().is_dir() else config.source
        raise registries.data_sources.unknown(config.source, hint=f" Did you mean '{kind}:{files}'?")
    factory = registries.data_sources[scheme]
    options: dict[str, Any] = {} if config.text_field is None else {"text_field": config.text_field}
    if options and "text_field" not in inspect.signature(factory).parameters:
        raise ConfigError(
            f"data.text_field is {config.text_field!r}, but documents of source {scheme!r} have no fields. Remove it."
        )
    return factory(address, **options)


def _is_path(scheme: str) -> bool:
    """Whether somebody wrote files where a scheme belongs."""
    return bool({"/", "*", ".", "~"} & set(scheme)) or Path(scheme).exists()


def documents_with_text(source: DataSource) -> Iterator[Document]:
    """The documents to learn from; an empty one would only teach that a text may end at once."""
    return (document for document in source.documents() if document.text)


def check_unchanged(source: DataSource, fingerprint: str) -> None:
    """Guards a result that was computed from documents and is to be kept under their fingerprint.

    Raises:
      DataError: the fingerprint is another one by now.
    """
    if source.fingerprint() != fingerprint:
        raise DataError("The documents of the data source changed while they were read. Start again once they rest.")
