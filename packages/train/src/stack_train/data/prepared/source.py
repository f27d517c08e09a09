"""The source `prepared:DIR`: a set that `stack data prepare` wrote."""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from stack_core.abi.data import Document
from stack_core.abi.errors import DataError
from stack_core.abi.local_paths import local_path
from stack_train.data.corpus import Corpus
from stack_train.data.prepared.manifest import open_corpus, read_manifest
from stack_train.data.tokenizer import HuggingFaceTokenizer

__all__ = ["PreparedSource"]


class PreparedSource:
    """The documents of a prepared set. A run maps its tokens into memory instead of tokenizing the documents.

    Attributes:
      directory: directory of the set.
      tokenizer: tokenizer of the set.
    """

    def __init__(self, address: str = "") -> None:
        if not address:
            raise DataError("Source 'prepared:' lacks its directory. Write 'prepared:DIR'.")
        self.directory: Path = local_path(address).absolute()
        self._manifest = read_manifest(self.directory)
        self.tokenizer = HuggingFaceTokenizer.load(self.directory / "tokenizer")
        if self.tokenizer.digest != self._manifest.tokenizer:
            raise DataError(
                f"The tokenizer in {str(self.directory / 'tokenizer')!r} is not the one that the set was tokenized "
                "with. Restore its files."
            )

    def corpus(self, tokenizer: HuggingFaceTokenizer) -> Corpus:
        """Maps the tokens into memory.

        Raises:
          DataError: `tokenizer` is not the tokenizer of the set, or a file is missing or was cut short.
        """
        if tokenizer.digest != self.tokenizer.digest:
            raise DataError(
                f"The prepared set in {str(self.directory)!r} was tokenized with another tokenizer than this run's. "
                f"Set data.tokenizer to {str(self.directory / 'tokenizer')!r}, or prepare the documents with the "
                "run's tokenizer (--tokenizer)."
            )
        return self._corpus

    def documents(self) -> Iterator[Document]:
        """Yields the documents, decoded from their tokens."""
        corpus = self._corpus
        for number in range(len(corpus.digests)):
            tokens = corpus.tokens[int(corpus.offsets[number]) : int(corpus.offsets[number + 1])].tolist()
            special = (self.tokenizer.bos_id, self.tokenizer.eos_id)
            kept = [token for token in tokens if token not in special]
            yield Document(corpus.name(number), self.tokenizer.decode(kept))

    def fingerprint(self) -> str:
        return self._manifest.content_digest

    @cached_property
    def _corpus(self) -> Corpus:
        return open_corpus(self.directory)
