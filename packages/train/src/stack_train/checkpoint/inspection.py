"""Checkpoints leaf by leaf, without the model: listing, verification, comparison and averages.

Memory holds one leaf of each checkpoint at a time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stack_core.abi.errors import CheckpointDamaged, CheckpointError, RunDirectoryError
from stack_core.abi.run_directory import RunDirectory
from stack_core.runtime.digest import array_digests
from stack_train.checkpoint.directory import CheckpointDirectory
from stack_train.checkpoint.frozen import FROZEN
from stack_train.checkpoint.manifest import Manifest, read_documents, read_manifest
from stack_train.checkpoint.unit import read_stored

__all__ = ["LeafDifference", "averaged", "checkpoint_at", "compare", "run_of", "size_bytes", "verify"]

_MODEL = ("params", "moved")  # the branches of a state that hold a model's variables
_FLOATS = ("bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True)
class LeafDifference:
    """Comparison of one leaf of two checkpoints.

    Attributes:
      name: path of the leaf.
      changed: fraction of differing entries; 1 if the leaf is absent from a checkpoint, or has another shape or dtype
        there. NaN equals NaN.
      relative: L2 norm of the difference, divided by the L2 norm of the first leaf; NaN if an entry that differs is not
        finite, and None for integers and if the leaves cannot be subtracted.
      largest: largest absolute difference; NaN or None as for `relative`.
      note: shape and dtype of both leaves if they differ; otherwise empty.
    """

    name: str
    changed: float
    relative: float | None = None
    largest: float | None = None
    note: str = ""


def checkpoint_at(path: Path) -> Path:
    """Returns a checkpoint: `path` itself, or the newest complete one if `path` is a run directory.

    Raises:
      CheckpointError: `path` is neither, or the run does not contain a checkpoint.
    """
    if (path / "manifest.json").is_file():
        return path
    directory = CheckpointDirectory(RunDirectory(path).checkpoints)
    if not directory.root.is_dir():
        raise CheckpointError(f"{path} is neither a checkpoint nor a run directory. Give the directory of a run.")
    if not (steps := directory.steps()):
        raise CheckpointError(f"{path} has no complete checkpoint.")
    return directory.path(steps[-1])


def run_of(checkpoint: Path) -> RunDirectory:
    """Returns the run directory of a checkpoint.

    Raises:
      RunDirectoryError: the checkpoint is not inside one.
    """
    run = RunDirectory(checkpoint.resolve().parent.parent)
    if not run.config.is_file():
        raise RunDirectoryError(f"{checkpoint} is not in a run directory.")
    return run


def size_bytes(path: Path) -> int:
    """Returns the size of all files of a checkpoint."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def verify(checkpoint: Path) -> int:
    """Reads a checkpoint and verifies every digest; returns the number of leaves.

    Raises:
      CheckpointDamaged: a file or a leaf is missing or differs from its digest; names all damaged leaves.
    """
    manifest = read_manifest(checkpoint)
    read_documents(checkpoint, manifest)
    damaged = []
    for name in manifest.leaves:
        try:
            _verified_leaf(checkpoint, manifest, name)
        except CheckpointDamaged as error:
            damaged.append(f"  {error}")
    if damaged:
        lines = "\n".join(damaged)
        raise CheckpointDamaged(f"{checkpoint} is damaged: {len(damaged)} of {len(manifest.leaves)} leaves.\n{lines}")
    return len(manifest.leaves)


def compare(first: Path, second: Path, *, full_state: bool = False) -> Iterator[LeafDifference]:
    """Compares the leaves of two checkpoints.

    Args:
      full_state: compare the full training state; otherwise only the model's variables.
    """
    manifests = [read_manifest(path) for path in (first, second)]
    names = [name for manifest in manifests for name in manifest.leaves if full_state or _is_of_model(name)]
    for name in dict.fromkeys(names):
        specs = [str(found.leaves[name].spec) if name in found.leaves else "absent" for found in manifests]
        if specs[0] != specs[1]:
            yield LeafDifference(name, 1.0, note=f"{specs[0]}, then {specs[1]}")
            continue
        before, after = (_leaf(path, each, name) for path, each in zip((first, second), manifests, strict=True))
        if manifests[0].leaves[name].spec.dtype in _FLOATS:
            yield _float_difference(name, before, after)
        else:
            yield LeafDifference(name, float(np.mean(before != after)) if before.size else 0.0)


def averaged(checkpoints: Sequence[Path]) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the variables of the model by path, as the means over checkpoints in float64, in their stored dtype.

    Raises:
      CheckpointError: the checkpoints hold different variables, variables that are not floats, or records of frozen
        variables instead of their values.
      CheckpointDamaged: a variable cannot be read or does not match its digest.
    """
    manifests = [read_manifest(path) for path in checkpoints]
    specs = [{name: each.leaves[name].spec for name in each.leaves if _is_of_model(name)} for each in manifests]
    for path, manifest, found in zip(checkpoints, manifests, specs, strict=True):
        if FROZEN in manifest.documents:
            raise CheckpointError(f"{path} records its frozen parameters by their source; only adapters are in it.")
        if found != specs[0]:
            name = next(
                name for name in sorted(found.keys() | specs[0].keys()) if found.get(name) != specs[0].get(name)
            )
            raise CheckpointError(
                f"{checkpoints[0]} and {path} are of different models: {name} is {specs[0].get(name, 'absent')} in the "
                f"first and {found.get(name, 'absent')} in the second."
            )
    for name, spec in specs[0].items():
        if spec.dtype not in _FLOATS:
            raise CheckpointError(f"{name} is {spec}, which has no mean; average checkpoints of floats.")
        total, dtype = np.zeros(spec.shape, np.float64), np.dtype(np.float64)
        for path, manifest in zip(checkpoints, manifests, strict=True):
            values = _verified_leaf(path, manifest, name)
            total += values
            dtype = values.dtype
        yield name.partition("/")[2], (total / len(checkpoints)).astype(dtype)


def _is_of_model(name: str) -> bool:
    return name.partition("/")[0] in _MODEL


def _float_difference(name: str, before: np.ndarray, after: np.ndarray) -> LeafDifference:
    differs = (before != after) & ~(np.isnan(before) & np.isnan(after))
    if not differs.any():
        return LeafDifference(name, 0.0, 0.0, 0.0)
    before, after = before.astype(np.float64), after.astype(np.float64)
    with np.errstate(invalid="ignore"):
        difference = np.where(differs, after - before, 0.0)
    if not np.isfinite(difference).all():
        return LeafDifference(name, float(np.mean(differs)), float("nan"), float("nan"))
    norm = float(np.linalg.norm(before[np.isfinite(before)]))
    relative = float(np.linalg.norm(difference.ravel())) / norm if norm else 1.0
    return LeafDifference(name, float(np.mean(differs)), relative, float(np.max(np.abs(difference))))


def _verified_leaf(checkpoint: Path, manifest: Manifest, name: str) -> np.ndarray:
    values = _leaf(checkpoint, manifest, name)
    if array_digests({name: values})[name] != (expected := manifest.leaves[name].digest):
        raise CheckpointDamaged(f"{name} of {checkpoint} does not match its digest {expected}")
    return values


def _leaf(checkpoint: Path, manifest: Manifest, name: str) -> np.ndarray:
    try:
        return read_stored(checkpoint, manifest.leaves[name].part, name)
    except Exception as error:  # TensorStore and its codecs raise exceptions of any type on damaged files.
        if isinstance(error, MemoryError):
            raise
        raise CheckpointDamaged(f"{name} cannot be read ({type(error).__name__}: {str(error)[:200]})") from error
