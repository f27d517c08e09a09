"""Opening and checking the data source of a config."""

import inspect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stack_core.abi.data import DataSource, Document
from stack_core.abi.errors import ConfigError, DataError
from stack_core.abi.plugins import registries
from stack_train.data.cache import digest_of
from stack_train.data.settings import TextSettings

__all__ = ["ChainedSource", "check_unchanged", "documents_with_text", "open_source"]


@dataclass(frozen=True)
class ChainedSource:
    """Concatenates the documents of several sources."""

    sources: tuple[DataSource, ...]

    def documents(self) -> Iterator[Document]:
        return itertools.chain.from_iterable(source.documents() for source in self.sources)

    def fingerprint(self) -> str:
        return digest_of("chained", *(source.fingerprint() for source in self.sources))


def open_source(config: TextSettings) -> DataSource:
    """Opens the source named by `config.source`, "scheme" or "scheme:address".

    Raises:
      ConfigError: `text_field` is set for a source without fields.
      DataError: the address does not contain documents.
      UnknownName: no plugin registers the scheme.
    """
    scheme, _, address = config.source.partition(":")
    # A path without a scheme is a frequent mistake, so the message contains the address to write.
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
    """Returns whether a scheme looks like a file path or a glob."""
    return bool({"/", "*", ".", "~"} & set(scheme)) or Path(scheme).exists()


def documents_with_text(source: DataSource) -> Iterator[Document]:
    """Returns the nonempty documents. An empty one would only train the model to end a text immediately."""
    return (document for document in source.documents() if document.text)


def check_unchanged(source: DataSource, fingerprint: str) -> None:
    """Checks that the documents did not change during the computation of a cached result.

    Raises:
      DataError: the source's fingerprint differs from `fingerprint`.
    """
    if source.fingerprint() != fingerprint:
        raise DataError(
            "The documents of the data source changed while they were read. Start again once they are complete."
        )
