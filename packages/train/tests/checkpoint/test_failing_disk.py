import contextlib
import resource
import shutil
import time
from collections.abc import Callable, Iterator

import jax.numpy as jnp
import pytest

from stack_core.abi.errors import CheckpointError
from stack_train.checkpoint import CheckpointStore

from .conftest import CONFIG_YAML

SMALL = {"params": jnp.ones(8)}
LARGE = {"params": jnp.ones((512, 1024))}


@contextlib.contextmanager
def largest_file_bytes(limit_bytes: int) -> Iterator[None]:
    """Makes the kernel refuse to let files grow beyond `limit_bytes`, as it does on a full disk."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


@pytest.fixture
def saved(store: CheckpointStore) -> CheckpointStore:
    store.save(1, SMALL, {}, CONFIG_YAML)
    store.wait()
    return store


def assert_only_the_first_is_left(store: CheckpointStore) -> None:
    assert [path.name for path in store.path(1).parent.iterdir()] == ["00000001"]
    assert (store.restore(SMALL).state["params"] == 1).all()


@pytest.fixture
def failing(saved: CheckpointStore) -> Iterator[CheckpointStore]:
    """A store whose save of step 2 is about to fail in the background."""
    with largest_file_bytes(1 << 20):
        saved.save(2, LARGE, {}, CONFIG_YAML)
        yield saved


def poll_until_it_fails(store: CheckpointStore) -> None:
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        store.poll()
        time.sleep(0.01)


@pytest.mark.parametrize(
    "call", [CheckpointStore.wait, poll_until_it_fails, lambda store: store.save(3, SMALL, {}, CONFIG_YAML)]
)
def test_a_write_that_fails_in_the_background_surfaces_at_the_next_call(
    failing: CheckpointStore, call: Callable[[CheckpointStore], None]
) -> None:
    with pytest.raises(CheckpointError) as error:
        call(failing)
    message = str(error.value)
    assert "00000002 could not be saved" in message
    assert "File too large" in message
    assert "bytes or more;" in message
    assert "are free. Checkpoints on disk, by step: 1." in message
    assert_only_the_first_is_left(failing)


def test_saving_goes_on_once_there_is_room(saved: CheckpointStore) -> None:
    with largest_file_bytes(1 << 20):
        saved.save(2, LARGE, {}, CONFIG_YAML)
        with pytest.raises(CheckpointError, match="00000002 could not be saved"):
            saved.wait()
    saved.save(3, LARGE, {}, CONFIG_YAML)
    saved.wait()
    assert saved.steps() == (1, 3)


def test_too_little_space_is_seen_before_anything_is_written(
    saved: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")._replace(free=3_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(
        CheckpointError, match=r"not enough free disk space.* needs 3,14\d,\d{3} bytes or more; 3,000,000 are free"
    ):
        saved.save(2, LARGE, {}, CONFIG_YAML)
    assert_only_the_first_is_left(saved)


def test_a_directory_that_cannot_be_made_is_named(store: CheckpointStore) -> None:
    store.path(1).parent.write_text("a file in the way")
    with pytest.raises(CheckpointError, match="00000001 could not be saved: FileExistsError"):
        store.save(1, SMALL, {}, CONFIG_YAML)
