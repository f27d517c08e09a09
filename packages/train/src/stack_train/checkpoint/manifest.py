"""The manifest of a checkpoint: a list of the contents, with digests that verify them on load.

A checkpoint is a directory:

    00000300/
    ├── manifest.json    the digest of every leaf, the SHA-256 of every document and of the manifest itself
    ├── config.yaml      the run's resolved config
    ├── data_state.json  the state of the data iterator (or data_state.bin)
    ├── frozen.json      the sources and digests of the frozen variables
    └── arrays/0/        the leaves, in the format of Orbax
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stack_core.abi.errors import CheckpointDamaged, CheckpointError
from stack_train.checkpoint.leaves import LeafSpec

__all__ = ["LeafRecord", "Manifest", "read_documents", "read_manifest", "sealed_documents"]

_MANIFEST = "manifest.json"
_FORMAT = 1


@dataclass(frozen=True)
class LeafRecord:
    """A stored leaf.

    Attributes:
      spec: shape and dtype of the leaf.
      digest: digest of the values; see `stack_core.runtime.digest`.
      part: number of the folder in `arrays/` with the leaf.
    """

    spec: LeafSpec
    digest: str
    part: int


@dataclass(frozen=True)
class Manifest:
    """The contents of one checkpoint.

    Attributes:
      step: number of training steps done; 0 for converted weights.
      kind: "train" for a full training state, "weights" for parameters only.
      leaves: record of each array, by path in the state.
      documents: SHA-256 of each other file, by name.
    """

    step: int
    kind: str
    leaves: Mapping[str, LeafRecord]
    documents: Mapping[str, str]


def sealed_documents(
    step: int, kind: str, leaves: Mapping[str, LeafRecord], documents: Mapping[str, bytes]
) -> dict[str, bytes]:
    """Adds the manifest, which has digests of itself and every other document, to the documents of a checkpoint."""
    manifest = Manifest(step, kind, leaves, {name: _sha256(content) for name, content in documents.items()})
    content = {"format": _FORMAT, **asdict(manifest)}
    sealed = {"sha256": _sha256(_canonical(content)), "content": content}
    return {**documents, _MANIFEST: json.dumps(sealed, indent=1).encode()}


def read_manifest(directory: Path) -> Manifest:
    """Reads the manifest of the checkpoint in `directory`.

    Raises:
      CheckpointDamaged: the file is missing, cannot be parsed, or does not match its own SHA-256.
      CheckpointError: the format is newer than this version reads.
    """
    path = directory / _MANIFEST
    try:
        sealed = json.loads(_read(path))
        content, expected = sealed["content"], sealed["sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointDamaged(
            f"{path} is damaged: it cannot be parsed ({type(error).__name__}: {error}). Name an earlier checkpoint."
        ) from error
    # Before the format, which a damaged file may state wrongly.
    if _sha256(_canonical(content)) != expected:
        raise CheckpointDamaged(
            f"{path} is damaged: its content does not match its own SHA-256. Name an earlier checkpoint."
        )
    if content["format"] > _FORMAT:
        raise CheckpointError(
            f"{path} is of format {content['format']}; this version of stack-train reads up to {_FORMAT}. Upgrade it."
        )
    return Manifest(
        step=content["step"],
        kind=content["kind"],
        leaves={name: _record(fields) for name, fields in content["leaves"].items()},
        documents=content["documents"],
    )


def read_documents(directory: Path, manifest: Manifest) -> dict[str, bytes]:
    """Reads the files that `manifest` names.

    Raises:
      CheckpointDamaged: a file is missing or does not match its SHA-256.
    """
    documents = {name: _read(directory / name) for name in manifest.documents}
    for name, content in documents.items():
        if _sha256(content) != manifest.documents[name]:
            raise CheckpointDamaged(f"{directory / name} is damaged: it does not match its SHA-256 in the manifest.")
    return documents


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointDamaged(f"{path} is missing or unreadable: {error}") from error


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _canonical(content: Any) -> bytes:
    # The digest is of this form, and the file is indented for readers.
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def _record(fields: Mapping[str, Any]) -> LeafRecord:
    spec = fields["spec"]
    return LeafRecord(
        LeafSpec(tuple(spec["shape"]), spec["dtype"], spec["key_impl"]), digest=fields["digest"], part=fields["part"]
    )
