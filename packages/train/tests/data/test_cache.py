import errno
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from stack_core.abi.errors import DataError
from stack_train.data.cache import cached


def _write(folder: Path) -> None:
    (folder / "value").write_text("content")


def _fail(folder: Path) -> None:
    (folder / "value").write_text("half")
    raise DataError("interrupted")


def test_builds_once(tmp_path: Path) -> None:
    entry = cached(tmp_path / "kind" / "key", _write)
    assert (entry / "value").read_text() == "content"
    assert cached(entry, _fail) == entry


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="interrupted"):
        cached(tmp_path / "key", _fail)
    assert list(tmp_path.iterdir()) == []


def test_a_truncated_entry_is_built_again(tmp_path: Path) -> None:
    entry = cached(tmp_path / "key", _write)
    (entry / "value").write_text("")
    assert (cached(entry, _write) / "value").read_text() == "content"
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_two_builders_of_one_entry_do_not_meet(tmp_path: Path) -> None:
    both_started = Barrier(2)

    def build(folder: Path) -> None:
        _write(folder)
        both_started.wait(timeout=10)

    with ThreadPoolExecutor(2) as threads:
        entries = list(threads.map(lambda _: cached(tmp_path / "key", build), range(2)))
    assert entries == [tmp_path / "key"] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_what_a_killed_builder_left_is_removed_after_a_day(tmp_path: Path) -> None:
    abandoned, young = tmp_path / ".key-old", tmp_path / ".key-new"
    for folder in (abandoned, young):
        folder.mkdir()
        _write(folder)
    for path in (abandoned / "value", abandoned):
        os.utime(path, (time.time() - 90_000,) * 2)
    cached(tmp_path / "key", _write)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".key-new", "key"]


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"Cannot write the data cache under .* set XDG_CACHE_HOME"):
        cached(tmp_path / "file" / "key", _write)


def test_a_full_disk(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        _write(folder)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(DataError, match=r"No space left on device. Free space there"):
        cached(tmp_path / "key", build)
    assert list(tmp_path.iterdir()) == []
