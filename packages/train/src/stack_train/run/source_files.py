"""Record of a run's data files; a resumed run reports files that were added, removed or resized."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stack_core.abi.plugins import registries
from stack_core.abi.run_directory import RunDirectory
from stack_train.data.files import matching
from stack_train.data.settings import source_addresses

__all__ = ["changed_files", "keep_files", "source_files"]


def source_files(data: Any) -> dict[str, int]:
    """Returns the size in bytes of each file of the data's sources; empty if the data is not in files."""
    return {name: size_bytes for sizes in _sizes(data).values() for name, size_bytes in sizes.items()}


def _sizes(data: Any) -> dict[str, dict[str, int]]:
    """Returns the files of each source with their sizes in bytes, by the source's key."""
    found = {}
    for key, source in source_addresses(data).items():
        scheme, _, address = source.partition(":")
        pattern = address if scheme in registries.data_sources else source
        paths = map(Path, sorted(matching(pattern)))
        sizes = ((str(path), path.stat().st_size) for path in paths if path.is_file())
        # Empty files yield nothing, so adding one changes nothing.
        found[key] = {name: size_bytes for name, size_bytes in sizes if size_bytes}
    return found


def keep_files(data: Any, directory: RunDirectory) -> None:
    """Writes the names and sizes of the data files to the run directory."""
    directory.write_json(directory.files, source_files(data))


def changed_files(data: Any, directory: RunDirectory) -> Iterator[str]:
    """Yields a line such as "data.source: ..." for each file that changed since the run was last started."""
    before: Mapping[str, int] | None = directory.read_json(directory.files)
    if before is None:
        return
    by_key = _sizes(data)
    keys = {name: key for key, sizes in by_key.items() for name in sizes}
    now = {name: size_bytes for sizes in by_key.values() for name, size_bytes in sizes.items()}
    for name in sorted({*before, *now}):
        key = keys.get(name, next(iter(by_key)) if len(by_key) == 1 else "data.mix")
        if name not in before:
            yield f"{key}: {name} was added"
        elif name not in now:
            yield f"{key}: {name} was removed"
        elif now[name] != before[name]:
            yield f"{key}: {name} has {now[name]} bytes, not {before[name]}"
