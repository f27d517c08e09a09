"""Tokenized documents of a source in a memory-mapped array."""

import array
import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64, UInt, UInt8, UInt64

from stack_core.abi.data import DataSource, Document
from stack_core.abi.errors import DataError
from stack_train.data.cache import cached, digest_of
from stack_train.data.prepared.tokens import ShardedTokens
from stack_train.data.source import check_unchanged, documents_with_text
from stack_train.data.split import text_digest
from stack_train.data.tokenizer import HuggingFaceTokenizer

__all__ = ["Corpus", "Encoded", "check_eos", "encode_documents", "token_dtype", "tokenize"]

# Part of the cache's key: raise it if equal documents give another corpus.
_FORMAT = 1
_GROUP_CHARACTERS = 2_000_000


@dataclass(frozen=True)
class Corpus:
    """The nonempty documents of a source, in order, each ending with the end-of-text token.

    Document i is tokens[offsets[i]:offsets[i + 1]], with offsets[0] == 0 and offsets[-1] == len(tokens). All arrays are
    memory-mapped.

    Attributes:
      tokens: token ids, uint16 for vocabularies of up to 65,536 tokens and uint32 for larger ones.
      offsets: start of each document in `tokens`, and their length.
      digests: digest of each document's text.
      content_digest: digest of tokens, offsets and digests, which is the same on all machines.
    """

    tokens: UInt[np.ndarray, " tokens"] | ShardedTokens
    offsets: Int64[np.ndarray, " documents_and_1"]
    digests: UInt64[np.ndarray, " documents"]
    content_digest: str
    _names: UInt8[np.ndarray, " name_bytes"]
    _name_offsets: Int64[np.ndarray, " documents_and_1"]

    def name(self, document: int) -> str:
        """Returns the origin of a document: a path, or "path:line"."""
        start, end = self._name_offsets[document : document + 2]
        return self._names[start:end].tobytes().decode("utf-8")


def tokenize(source: DataSource, tokenizer: HuggingFaceTokenizer, cache_dir: Path) -> Corpus:
    """Tokenizes a source, or loads its corpus from the cache if documents and tokenizer are the same.

    Documents are read and encoded in groups of some megabytes. Memory grows with the source by only 40 bytes per
    document; each single document must fit into memory.

    Raises:
      DataError: a document cannot be read, all documents are empty, the tokenizer lacks an end-of-text token, or the
        documents changed while they were read.
    """
    check_eos(tokenizer)
    fingerprint = source.fingerprint()

    def build(folder: Path) -> None:
        _write(folder, documents_with_text(source), tokenizer)
        check_unchanged(source, fingerprint)

    key = digest_of("corpus", _FORMAT, fingerprint, tokenizer.digest)
    return _open(cached(cache_dir / "corpora" / key, build))


@dataclass(frozen=True)
class Encoded:
    """A tokenized document.

    Attributes:
      name: origin of the document, in UTF-8.
      digest: digest of its text.
      tokens: token ids as bytes of `token_dtype`, ending with the end-of-text token; b"" for an empty text.
    """

    name: bytes
    digest: int
    tokens: bytes


def check_eos(tokenizer: HuggingFaceTokenizer) -> int:
    """Returns the end-of-text token; raises a DataError if the tokenizer does not define one."""
    if tokenizer.eos_id is None:
        raise DataError(
            "The tokenizer has no end-of-text token, which ends every training document. "
            "Name one as eos_token in its tokenizer_config.json."
        )
    return tokenizer.eos_id


def token_dtype(tokenizer: HuggingFaceTokenizer) -> np.dtype[Any]:
    """Returns the dtype of stored token ids, little-endian on all machines because digests must be portable."""
    return np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32).newbyteorder("<")


def encode_documents(documents: Iterable[Document], tokenizer: HuggingFaceTokenizer) -> Iterator[Encoded]:
    """Yields the tokens of each document; some megabytes of text are read ahead."""
    eos_id, dtype = check_eos(tokenizer), token_dtype(tokenizer)
    for group in _groups(documents):
        for document, ids in zip(group, tokenizer.encode_batch([item.text for item in group]), strict=True):
            # Paths may hold bytes that are not UTF-8, which Python represents by surrogates.
            name = document.name.encode("utf-8", "backslashreplace")
            tokens = _with_eos(ids, eos_id).astype(dtype).tobytes() if document.text else b""
            yield Encoded(name, text_digest(document.text), tokens)


def _write(folder: Path, documents: Iterable[Document], tokenizer: HuggingFaceTokenizer) -> None:
    dtype = token_dtype(tokenizer)
    # Arrays of machine integers, since lists of Python's would take several times the memory per document.
    offsets, name_offsets, digests = array.array("q", [0]), array.array("q", [0]), array.array("Q")
    content = hashlib.sha256()
    with (folder / "tokens.bin").open("wb") as tokens_file, (folder / "names.bin").open("wb") as names_file:
        for document in encode_documents(documents, tokenizer):
            content.update(document.tokens)
            tokens_file.write(document.tokens)
            offsets.append(offsets[-1] + len(document.tokens) // dtype.itemsize)
            digests.append(document.digest)
            names_file.write(document.name)
            name_offsets.append(name_offsets[-1] + len(document.name))
    if not digests:
        raise DataError("The data source holds no text: every document is empty. Point data.source at files with text.")
    for name, values in (("offsets", offsets), ("digests", digests), ("name_offsets", name_offsets)):
        np.save(folder / f"{name}.npy", np.asarray(values))
    content.update(np.asarray(offsets, "<i8").tobytes() + np.asarray(digests, "<u8").tobytes())
    facts = {"dtype": dtype.str, "content_digest": content.hexdigest()}
    (folder / "corpus.json").write_text(json.dumps(facts), encoding="utf-8")


def _with_eos(ids: Int64[np.ndarray, " tokens"], eos_id: int) -> Int64[np.ndarray, " ended_tokens"]:
    # Some tokenizers append the token themselves.
    return ids if ids.size and ids[-1] == eos_id else np.append(ids, eos_id)


def _groups(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Yields lists of documents of about `_GROUP_CHARACTERS` in total, which the tokenizer encodes in parallel."""
    group: list[Document] = []
    characters = 0
    for document in documents:
        group.append(document)
        characters += len(document.text)
        if characters >= _GROUP_CHARACTERS:
            yield group
            group = []
            characters = 0
    if group:
        yield group


def _open(folder: Path) -> Corpus:
    facts = json.loads((folder / "corpus.json").read_text(encoding="utf-8"))
    return Corpus(
        tokens=np.memmap(folder / "tokens.bin", np.dtype(facts["dtype"]), "r"),
        offsets=np.load(folder / "offsets.npy", "r"),
        digests=np.load(folder / "digests.npy", "r"),
        content_digest=facts["content_digest"],
        _names=np.memmap(folder / "names.bin", np.uint8, "r"),
        _name_offsets=np.load(folder / "name_offsets.npy", "r"),
    )
