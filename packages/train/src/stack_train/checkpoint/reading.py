"""Reading of one checkpoint; every part is verified before anything is returned."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from stack_core.abi.errors import CheckpointDamaged, CheckpointError, CheckpointIncomplete
from stack_core.runtime.digest import array_digests
from stack_core.runtime.processes import ALONE, Processes
from stack_train.checkpoint.frozen import frozen_records
from stack_train.checkpoint.leaves import differences, named_leaves, spec_of, stored_array
from stack_train.checkpoint.manifest import LeafRecord, Manifest, read_documents, read_manifest
from stack_train.checkpoint.unit import read_array

__all__ = ["CONFIG", "DATA_BYTES", "DATA_JSON", "data_state_of", "read_state", "read_variables"]

CONFIG = "config.yaml"
_VARIABLES = ("params", "moved")  # the branches of a state that hold a model's variables
_FLOATS = {"bfloat16", "float16", "float32"}
DATA_JSON, DATA_BYTES = "data_state.json", "data_state.bin"


def read_state(
    checkpoint: Path, abstract: Any, *, under: str = "", cast: bool = False, processes: Processes = ALONE
) -> tuple[Manifest, dict[str, bytes], Any]:
    """Reads a state, or a branch of it, and verifies every digest.

    Args:
      abstract: pytree with the structure, shapes, dtypes and shardings to read.
      under: branch of the saved state that `abstract` describes, such as "params"; "" for the full state.
      cast: True casts floats to the dtypes of `abstract`; False makes a different stored dtype an error.
      processes: processes that read together, each reading its own shards.

    Returns:
      The manifest, the documents by name, and the state.

    Raises:
      CheckpointDamaged: a file or leaf is missing or differs from its digest; the message gives its name.
      CheckpointError: the leaves of the checkpoint and of `abstract` differ; names each difference.
    """
    manifest, documents = _opened(checkpoint)
    expected = named_leaves({under: abstract} if under else abstract)
    records = {name: record for name, record in manifest.leaves.items() if _within(name, under)}
    read = _read_cast if cast else _read_leaves
    leaves = read(checkpoint, records, expected, processes)
    return manifest, documents, jax.tree.unflatten(jax.tree.structure(abstract), [leaves[name] for name in expected])


def read_variables(
    checkpoint: Path, abstract: Any, *, processes: Processes = ALONE
) -> tuple[Manifest, dict[str, bytes], Any]:
    """Reads a model's variables from a checkpoint of any kind, with floats cast as in `read_state(..., cast=True)`.

    Frozen variables, which the checkpoint replaces by a record of their source, are None.

    Args:
      abstract: nested dicts of the shapes and dtypes of all variables.
    """
    manifest, documents = _opened(checkpoint)
    expected = named_leaves(abstract)
    records = frozen_records(documents)
    frozen = records["model"].specs if "model" in records else {}
    stored = {
        name.partition("/")[2]: name
        for name in manifest.leaves
        if name.partition("/")[0] in _VARIABLES and name.partition("/")[2] not in frozen
    }
    # A variable that the checkpoint lacks keeps a name for the error of `_check_structure`.
    here = {stored.get(name, f"params/{name}"): leaf for name, leaf in expected.items() if name not in frozen}
    leaves = _read_cast(checkpoint, {name: manifest.leaves[name] for name in stored.values()}, here, processes)
    values = [None if name in frozen else leaves[stored[name]] for name in expected]
    return manifest, documents, jax.tree.unflatten(jax.tree.structure(abstract), values)


def data_state_of(checkpoint: Path, documents: Mapping[str, bytes]) -> dict[str, Any] | bytes:
    """Returns the state of the data iterator.

    Raises:
      CheckpointIncomplete: the checkpoint holds weights only.
    """
    if DATA_JSON in documents:
        return json.loads(documents[DATA_JSON])
    if DATA_BYTES in documents:
        return documents[DATA_BYTES]
    raise CheckpointIncomplete(
        f"Checkpoint {checkpoint} holds weights but not the state of the data iterator; training cannot resume. "
        f"To start a new run from its weights, set run.init_from={str(checkpoint.parent.parent)!r} "
        "and choose a new output directory."
    )


def _opened(checkpoint: Path) -> tuple[Manifest, dict[str, bytes]]:
    if not checkpoint.is_dir():
        raise CheckpointError(f"There is no checkpoint {checkpoint}.")
    manifest = read_manifest(checkpoint)
    return manifest, read_documents(checkpoint, manifest)


def _read_leaves(
    checkpoint: Path, records: Mapping[str, LeafRecord], expected: Mapping[str, Any], processes: Processes
) -> dict[str, Any]:
    """Reads leaves by their stored names and verifies their digests, in collectives of all processes."""
    _check_structure(checkpoint, records, expected)
    leaves, problem = dict[str, Any](), ""
    try:
        leaves = {name: _read_leaf(checkpoint, records[name].part, name, leaf) for name, leaf in expected.items()}
    except CheckpointDamaged as error:
        if processes.count == 1:
            raise
        problem = str(error)
    # Digests are collectives: every process must stop here if any could not read.
    if found := [each for each in processes.from_each("leaves", problem) if each]:
        raise CheckpointDamaged(found[0])
    _check_digests(checkpoint, records, leaves)
    return leaves


def _read_cast(
    checkpoint: Path, records: Mapping[str, LeafRecord], expected: Mapping[str, Any], processes: Processes
) -> dict[str, Any]:
    """Reads leaves in their stored dtypes, verifies their digests, and casts floats to the requested dtypes."""

    def in_stored_dtype(name: str, leaf: Any) -> Any:
        stored, requested = records[name].spec.dtype if name in records else "", spec_of(leaf).dtype
        # Only floats are cast; any other difference of dtypes stays an error.
        if stored == requested or not {stored, requested} <= _FLOATS:
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, stored, sharding=getattr(leaf, "sharding", None))

    requested = {name: in_stored_dtype(name, leaf) for name, leaf in expected.items()}
    leaves = _read_leaves(checkpoint, records, requested, processes)
    for name, leaf in expected.items():
        if requested[name] is not leaf:
            leaves[name] = leaves[name].astype(leaf.dtype)  # One by one, so only one leaf is in memory twice.
    return leaves


def _within(name: str, under: str) -> bool:
    return not under or name == under or name.startswith(f"{under}/")


def _check_structure(checkpoint: Path, records: Mapping[str, LeafRecord], expected: Mapping[str, Any]) -> None:
    stored_specs = {name: record.spec for name, record in records.items()}
    lines = differences(stored_specs, {name: spec_of(leaf) for name, leaf in expected.items()})
    if lines:
        raise CheckpointError(
            f"Checkpoint {checkpoint} was saved with another model or optimizer; leaves that differ: {len(lines)}\n"
            + "\n".join(lines)
            + f"\nUse the config that it was saved with: {checkpoint / CONFIG}."
        )


def _read_leaf(checkpoint: Path, part: int, name: str, leaf: Any) -> Any:
    try:
        return read_array(checkpoint, part, name, leaf)
    except Exception as error:  # TensorStore and its codecs raise exceptions of any type on damaged files.
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
            raise
        raise CheckpointDamaged(
            f"Checkpoint {checkpoint} is damaged: leaf {name!r} cannot be read ({type(error).__name__}: {error})."
        ) from error


def _check_digests(checkpoint: Path, records: Mapping[str, LeafRecord], leaves: Mapping[str, Any]) -> None:
    found = array_digests({name: stored_array(leaf) for name, leaf in leaves.items()})
    lines = [
        f"  {name}: {records[name].spec}, digest {records[name].digest} saved, {digest} read"
        for name, digest in found.items()
        if digest != records[name].digest or spec_of(leaves[name]) != records[name].spec
    ]
    if lines:
        raise CheckpointDamaged(
            f"Checkpoint {checkpoint} is damaged: {len(lines)} of its leaves do not match their digests:\n"
            + "\n".join(lines)
        )
