"""Parameters grouped into parts of bounded size, for checkpoints written leaf by leaf."""

from collections.abc import Iterable, Iterator
from typing import Any

from stack_core.abi.errors import CheckpointError
from stack_core.runtime.digest import array_digests
from stack_train.checkpoint.leaves import spec_of, stored_array
from stack_train.checkpoint.manifest import LeafRecord

__all__ = ["weight_parts"]


def weight_parts(
    leaves: Iterable[tuple[str, Any]], records: dict[str, LeafRecord], part_bytes: int
) -> Iterator[dict[str, Any]]:
    """Yields groups of arrays of up to `part_bytes` (or one larger leaf), and adds each leaf to `records`.

    Raises:
      CheckpointError: a path occurs twice.
    """
    part: dict[str, Any] = {}
    size_bytes, index = 0, 0
    for path, array in leaves:
        name = f"params/{path}"
        if name in records:
            raise CheckpointError(f"Parameter {path!r} was given twice.")
        stored = stored_array(array)
        if part and size_bytes + stored.nbytes > part_bytes:
            yield part
            part, size_bytes = dict[str, Any](), 0
            index += 1
        records[name] = LeafRecord(spec_of(array), array_digests({name: stored})[name], index)
        part[name] = stored
        size_bytes += stored.nbytes
    # Also if it is empty, because `_UnitHandler.finalize` expects the folder of a part.
    yield part
