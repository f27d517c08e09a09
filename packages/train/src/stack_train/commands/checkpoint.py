"""`stack checkpoint`: lists, verifies, compares, averages and deletes checkpoints of runs."""

import json as json_format
import math
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.table import Table

from stack_core.abi.errors import CheckpointDamaged, CheckpointError
from stack_core.abi.run_directory import RunDirectory
from stack_core.commands.tables import print_table

if TYPE_CHECKING:
    from stack_train.checkpoint.inspection import LeafDifference

__all__ = ["average", "collect_garbage", "diff", "list_checkpoints", "verify"]

_ROWS = 20


def list_checkpoints(run: Path, /, *, json: Annotated[bool, Parameter(negative=())] = False) -> None:
    """List the checkpoints of a run: step, kind, size, time, losses, and whether it is complete.

    Args:
      run: the run's directory.
      json: print the table as JSON.
    """
    rows = _rows(run)
    if json:
        print(json_format.dumps(rows, indent=2))
        return
    table = Table("step", "state", "kind", "size", "saved", "loss", "validation loss")
    for row in rows:
        losses = ["-" if row[name] is None else f"{row[name]:.4f}" for name in ("loss", "validation_loss")]
        saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["time"]))
        table.add_row(str(row["step"]), row["state"], row["kind"], f"{row['bytes'] / 1e6:,.1f} MB", saved, *losses)
    print_table(table)


def verify(path: Path, /, *, every: Annotated[bool, Parameter(negative=())] = False) -> None:
    """Read a checkpoint and verify the digest of every array and file; exits with status 2 if one is damaged.

    Args:
      path: a checkpoint, or a run directory for its newest checkpoint.
      every: verify all complete checkpoints of a run.
    """
    from stack_train.checkpoint.directory import CheckpointDirectory
    from stack_train.checkpoint.inspection import checkpoint_at, run_of
    from stack_train.checkpoint.inspection import verify as verify_one

    paths = [checkpoint_at(path)]
    if every:
        directory = CheckpointDirectory(run_of(paths[0]).checkpoints)
        paths = [directory.path(step) for step in directory.steps()]
    damaged = []
    for each in paths:
        try:
            print(f"{each}: {verify_one(each)} leaves match their digests", flush=True)
        except CheckpointDamaged as error:
            damaged.append(str(error))
            print(f"{each}: damaged", flush=True)
    if damaged:
        raise CheckpointDamaged("\n".join(damaged))


def diff(
    first: Path,
    second: Path,
    /,
    *,
    full_state: Annotated[bool, Parameter(negative=())] = False,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Compare two checkpoints leaf by leaf, with the leaves that differ most at the top.

    Args:
      first: a checkpoint, or a run directory for its newest checkpoint.
      second: another checkpoint or run directory.
      full_state: compare the full training state, with the optimizer's; otherwise only the model's variables.
      json: print all leaves as JSON.
    """
    from stack_train.checkpoint.inspection import checkpoint_at, compare

    found = list(compare(checkpoint_at(first), checkpoint_at(second), full_state=full_state))
    if json:
        print(json_format.dumps([asdict(each) for each in found], indent=2))
        return
    differing = sorted((each for each in found if each.changed), key=_size_of, reverse=True)
    if differing:
        table = Table("leaf", "relative difference", "largest", "entries that differ")
        for each in differing[:_ROWS]:
            numbers = ["-" if value is None else f"{value:.3g}" for value in (each.relative, each.largest)]
            table.add_row(each.name, *numbers, each.note or f"{each.changed:.1%}")
        print_table(table)
    hidden = f"; the {_ROWS} that differ most are shown" if len(differing) > _ROWS else ""
    print(f"{len(differing)} of {len(found)} leaves differ{hidden}")


def average(
    destination: Path,
    /,
    *sources: Path,
    last: int | None = None,
) -> None:
    """Average the parameters of checkpoints into a new run: stack checkpoint average OUT RUN --last 5

    The parameters are averaged in float64. The new run holds only weights. It can be evaluated, served and converted,
    and run.init_from can start training from its weights.

    Args:
      destination: directory of the new run, which must not exist.
      sources: checkpoints, or runs for their newest checkpoints; with `last`, a single run.
      last: number of the newest complete checkpoints of one run to average.
    """
    from stack_core.abi.config import to_yaml
    from stack_core.runtime.atomic_directory import atomic_directory
    from stack_train.checkpoint.inspection import averaged, run_of
    from stack_train.checkpoint.store import CheckpointStore
    from stack_train.optim.optax_optimizer import as_optimizer
    from stack_train.run.config import run_config

    checkpoints = _averaged_checkpoints(sources, last)
    run = run_of(checkpoints[-1])
    config = run_config(run.path)
    if as_optimizer(config.optimizer).averages:
        raise CheckpointError(
            f"The optimizer {config.optimizer.name!r} of {run.path} averages weights itself, and its checkpoints hold "
            "the weights that it trains, not the average. Use the run as it is."
        )
    with atomic_directory(destination) as partial:
        paths = RunDirectory(partial)
        config_yaml = to_yaml(replace(config, output=str(destination)))
        for folder in (run.tokenizer, run.path / "huggingface"):
            if folder.is_dir():
                shutil.copytree(folder, partial / folder.name)
        with CheckpointStore(paths.checkpoints) as store:
            store.save_weights(averaged(checkpoints), config_yaml)
        paths.config.write_text(config_yaml, encoding="utf-8")
    print(f"{destination} holds the average of {', '.join(map(str, checkpoints))}")


def collect_garbage(
    run: Path,
    /,
    *,
    keep: int | None = None,
    dry_run: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Delete partial checkpoints, checkpoints set aside, and, with `keep`, old checkpoints.

    A run that is training is refused.

    Args:
      run: the run's directory.
      keep: number of the newest complete checkpoints to keep; by default all.
      dry_run: print what would be deleted, and delete nothing.
    """
    from stack_train.checkpoint.directory import CheckpointDirectory
    from stack_train.checkpoint.inspection import size_bytes

    if keep is not None and keep < 1:
        raise CheckpointError(f"--keep is {keep}; keep at least 1 checkpoint.")
    with RunDirectory(run).open(resume=True):
        directory = CheckpointDirectory(RunDirectory(run).checkpoints)
        rows = _rows(run)
        # As in training, damaged checkpoints do not count; they are deleted if older than every retained one.
        intact = [row["step"] for row in rows if row["state"] == "complete"]
        first_kept = intact[-keep] if keep is not None and len(intact) >= keep else 0
        leftovers = [Path(row["path"]) for row in rows if row["state"] in ("partial", "set aside")]
        old = [step for step in directory.steps() if step < first_kept]
        doomed = [*leftovers, *map(directory.path, old)]
        for path in doomed:
            print(f"{'would delete' if dry_run else 'deleting'} {path}, {size_bytes(path) / 1e6:,.1f} MB", flush=True)
        if not dry_run:
            directory.delete(old)
            for path in leftovers:
                shutil.rmtree(path)
    if not doomed:
        print("stack: nothing to delete.", file=sys.stderr)


def _size_of(difference: "LeafDifference") -> float:
    """Returns the size by which differences are sorted: NaN is the largest."""
    size = difference.relative or difference.changed
    return math.inf if math.isnan(size) else size


def _averaged_checkpoints(sources: Sequence[Path], last: int | None) -> list[Path]:
    """Returns the checkpoints that `average` reads.

    Raises:
      CheckpointError: there are fewer than two, or `last` is invalid for the sources.
    """
    from stack_train.checkpoint.directory import CheckpointDirectory
    from stack_train.checkpoint.inspection import checkpoint_at, run_of

    checkpoints = [checkpoint_at(source) for source in sources]
    if last is not None:
        if len(sources) != 1 or last < 2:
            raise CheckpointError(f"--last {last} with {len(sources)} sources: give one run, and at least --last 2.")
        directory = CheckpointDirectory(run_of(checkpoints[0]).checkpoints)
        checkpoints = [directory.path(step) for step in directory.steps()[-last:]]
    if len(checkpoints) < 2:
        raise CheckpointError("An average needs two checkpoints or more: name them, or give one run and --last.")
    return checkpoints


def _rows(run: Path) -> list[dict[str, Any]]:
    from stack_train.checkpoint.directory import CheckpointDirectory
    from stack_train.checkpoint.inspection import size_bytes
    from stack_train.checkpoint.manifest import read_manifest
    from stack_train.panels.records import number_in, records

    directory = RunDirectory(run)
    directory.config_yaml()  # raises if the directory is not a run
    losses: dict[str, dict[int, float | None]] = {"train": {}, "evaluation": {}}
    for record in records(directory.metrics):
        losses.get(record.get("kind", ""), {})[record.get("step", -1)] = number_in(record, "loss")

    def row(path: Path, step: int, state: str) -> dict[str, Any]:
        kind = "-"
        if state == "complete":
            try:
                kind = read_manifest(path).kind
            except CheckpointDamaged:
                state = "damaged"
        return {
            "step": step,
            "state": state,
            "kind": kind,
            "bytes": size_bytes(path),
            "time": path.stat().st_mtime,
            "loss": losses["train"].get(step),
            "validation_loss": losses["evaluation"].get(step),
            "path": str(path),
        }

    found = CheckpointDirectory(directory.checkpoints)
    rows = [row(found.path(step), step, "complete") for step in found.steps()]
    rows += [row(path, step, "partial") for step, path in found.partial()]
    rows += [row(path, step, "set aside") for step, path in found.quarantined()]
    return sorted(rows, key=lambda each: each["step"])
