"""Deterministic split of documents into training and validation."""

import hashlib

import numpy as np
from jaxtyping import Int64, UInt64

from stack_core.abi.errors import DataError

__all__ = ["split_documents", "text_digest"]


def text_digest(text: str) -> int:
    """Returns the 64-bit BLAKE2b hash of a text."""
    # A fixed byte order, because digests decide the split on every machine.
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest(), "little")


def split_documents(
    digests: UInt64[np.ndarray, " documents"], validation_fraction: float
) -> tuple[Int64[np.ndarray, " training"], Int64[np.ndarray, " validation"]]:
    """Returns the indices of the training and the validation documents, each in order of digest.

    The round(validation_fraction * documents) documents with the lowest digests are held out, at least one if the
    fraction is not 0, together with every copy of their texts. The split does not depend on the documents' order or
    paths.

    Args:
      digests: digest of each document's text.
      validation_fraction: fraction of the documents to hold out.

    Raises:
      DataError: the training split is empty.
    """
    if not digests.size:
        raise DataError("The data source holds no text: every document is empty. Point data.source at files with text.")
    order = np.argsort(digests, kind="stable")
    if not validation_fraction:
        return order, order[:0]
    wanted = max(1, round(validation_fraction * digests.size))
    held_out = int(np.searchsorted(digests[order], digests[order[wanted - 1]], side="right"))
    if held_out == digests.size:
        raise DataError(
            f"data.validation_fraction={validation_fraction} holds out all {digests.size} document(s) of the source "
            "(copies of one text stay together), so none is left to train on. Add documents, split a file into several "
            "(split -C 4k --additional-suffix=.txt FILE part-), or set it to 0."
        )
    return order[held_out:], order[:held_out]
