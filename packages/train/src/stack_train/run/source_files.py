"""Record of a run's data files, so that a resumed run reports files that were added, removed or resized."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stack_core.abi.plugins import registries
from stack_core.abi.run_directory import RunDirectory
from stack_train.data.files import matching

__all__ = ["changed_files", "keep_files", "source_files"]


def source_files(data: Any) -> dict[str, int]:
    """Returns the size in bytes of each file that `data.source` matches; empty if the data is not in files."""
    source = getattr(data, "source", None)
    if not isinstance(source, str):
        return {}
    scheme, _, address = source.partition(":")
    pattern = address if scheme in registries.data_sources else source
    paths = map(Path, sorted(matching(pattern)))
    sizes = ((str(path), path.stat().st_size) for path in paths if path.is_file())
    # Empty files yield nothing, so adding one changes nothing.
    return {name: size_bytes for name, size_bytes in sizes if size_bytes}


def keep_files(data: Any, directory: RunDirectory) -> None:
    """Writes the names and sizes of the data files to the run directory."""
    directory.write_json(directory.files, source_files(data))


def changed_files(data: Any, directory: RunDirectory) -> Iterator[str]:
    """Yields a line "data.source: ..." for each file that changed since the run was last started."""
    before: Mapping[str, int] | None = directory.read_json(directory.files)
    if before is None:
        return
    now = source_files(data)
    for name in sorted({*before, *now}):
        if name not in before:
            yield f"data.source: {name} was added"
        elif name not in now:
            yield f"data.source: {name} was removed"
        elif now[name] != before[name]:
            yield f"data.source: {name} has {now[name]} bytes, not {before[name]}"
