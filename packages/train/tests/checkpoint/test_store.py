import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from stack_core.abi.errors import CheckpointDamaged, CheckpointError, CheckpointIncomplete, ConversionError
from stack_core.abi.events import CheckpointRestored, CheckpointSaved, CheckpointSkipped, Event
from stack_train.checkpoint import CheckpointStore, named_leaves

from .conftest import CONFIG_YAML, abstract, bits, make_state

Make = Callable[..., CheckpointStore]


def save(store: CheckpointStore, *steps: int, **sizes: int) -> None:
    for step in steps:
        store.save(step, make_state(step, **sizes), {"epoch": step}, CONFIG_YAML)
    store.wait()


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def damage(checkpoint: Path) -> None:
    for file in (checkpoint / "arrays").rglob("*"):
        if file.is_file():
            flip_a_bit(file)


def test_a_state_comes_back_bitwise_with_its_documents(store: CheckpointStore, emitted: list[Event]) -> None:
    save(store, 3)
    restored = store.restore(abstract(make_state()))
    assert bits(restored.state) == bits(make_state(3))
    assert jax.tree.structure(restored.state) == jax.tree.structure(make_state())
    assert (restored.step, restored.data_state, restored.config_yaml) == (3, {"epoch": 3}, CONFIG_YAML)
    saved, announced = emitted
    assert isinstance(saved, CheckpointSaved)
    assert (saved.step, saved.path) == (3, store.path(3))
    assert announced == CheckpointRestored(3, store.path(3))


def test_a_directory_and_leaves_may_have_any_name(tmp_path: Path) -> None:
    state = {"params": {"a b": jnp.ones(2), "ü%20?#": jnp.zeros(3), "0": [jnp.ones(1)], "x.y": jnp.ones(4)}}
    with CheckpointStore(tmp_path / "my runs" / "50% ü?#") as store:
        store.save(1, state, {}, CONFIG_YAML)
        assert bits(store.restore(abstract(state)).state) == bits(state)


def test_data_state_may_be_bytes(store: CheckpointStore) -> None:
    store.save(1, {"params": jnp.ones(2)}, b"\x00\xff", CONFIG_YAML)
    assert store.restore({"params": jnp.zeros(2)}).data_state == b"\x00\xff"


def test_leaves_without_a_sharding_come_to_the_default_device_uncommitted(store: CheckpointStore) -> None:
    save(store, 1)
    shapes = jax.eval_shape(lambda: make_state(1)["params"])
    restored = store.restore_params(shapes).state
    assert bits(restored) == bits(make_state(1)["params"])
    assert not restored["kernel"].committed


def test_restore_params_reads_only_the_parameters(store: CheckpointStore) -> None:
    save(store, 1)
    restored = store.restore_params(abstract(make_state()["params"]))
    assert bits(restored.state) == bits(make_state(1)["params"])
    assert restored.data_state is None


def test_saving_returns_before_the_state_may_be_donated(store: CheckpointStore) -> None:
    advance = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf + 1, state), donate_argnums=0)
    state = {"params": {str(index): jnp.full((256, 1024), index, jnp.float32) for index in range(8)}}
    for step in (1, 2):
        expected = bits(state)
        store.save(step, state, {}, CONFIG_YAML)
        for _ in range(5):
            state = advance(state)
        assert bits(store.restore(abstract(state), step).state) == expected


def test_an_nnx_state_and_plain_dicts_name_their_leaves_alike() -> None:
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    assert list(named_leaves({"params": nnx.state(model)})) == ["params/bias", "params/kernel"]
    assert list(named_leaves({"params": nnx.to_pure_dict(nnx.state(model))})) == ["params/bias", "params/kernel"]


def test_two_leaves_of_one_name_are_refused() -> None:
    with pytest.raises(CheckpointError, match="have the path 'a/b'"):
        named_leaves({"a": {"b": 1}, "a/b": 2})


def test_keeps_the_newest(store: CheckpointStore) -> None:
    save(store, 1, 2, 3, 4)
    assert store.steps() == (3, 4)
    assert store.latest() == 4
    assert {path.name for path in store.path(4).parent.iterdir()} == {"00000003", "00000004"}


def test_in_the_foreground_a_save_is_on_disk_when_it_returns(make_store: Make) -> None:
    store = make_store(background=False)
    store.save(1, {"params": jnp.ones(2)}, {}, CONFIG_YAML)
    assert store.steps() == (1,)


def test_poll_reports_a_finished_save_without_blocking(store: CheckpointStore, emitted: list[Event]) -> None:
    store.poll()
    store.save(1, make_state(), {}, CONFIG_YAML)
    deadline_s = time.monotonic() + 60
    while not emitted and time.monotonic() < deadline_s:
        store.poll()
        time.sleep(0.01)
    assert [type(event) for event in emitted] == [CheckpointSaved]


def test_saving_a_step_again_does_nothing(store: CheckpointStore, make_store: Make, emitted: list[Event]) -> None:
    save(store, 1, 1)
    assert [type(event) for event in emitted] == [CheckpointSaved]
    resumed = make_store()
    resumed.restore(abstract(make_state()))
    save(resumed, 1)
    assert [type(event) for event in emitted] == [CheckpointSaved, CheckpointRestored]


def test_nothing_to_restore(store: CheckpointStore) -> None:
    with pytest.raises(CheckpointError, match="does not hold a usable checkpoint"):
        store.restore(abstract(make_state()))
    with pytest.raises(CheckpointError, match=r"There is no checkpoint .*00000007"):
        store.restore(abstract(make_state()), 7)


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(store: CheckpointStore, emitted: list[Event]) -> None:
    save(store, 1, 2)
    damage(store.path(2))
    emitted.clear()
    with pytest.warns(UserWarning, match=r"00000002 is skipped in favor of step 1: .*damaged"):
        restored = store.restore(abstract(make_state()))
    assert bits(restored.state) == bits(make_state(1))
    skipped, announced = emitted
    assert isinstance(skipped, CheckpointSkipped)
    assert skipped.path == store.path(2)
    assert announced == CheckpointRestored(1, store.path(1))
    assert store.steps() == (1, 2)
    with pytest.raises(CheckpointDamaged, match="00000002"):
        store.restore(abstract(make_state()), 2)


def test_damage_names_the_leaf(store: CheckpointStore) -> None:
    save(store, 1, width=4096)
    files = (path for path in store.path(1).rglob("*") if path.is_file())
    flip_a_bit(max(files, key=lambda path: path.stat().st_size))
    with pytest.raises(
        CheckpointDamaged, match=r"1 of its leaves do not match their digests:\n  (params|opt_state)/\w+: "
    ):
        store.restore(abstract(make_state(width=4096)), 1)


def test_a_missing_file_is_named(store: CheckpointStore) -> None:
    save(store, 1)
    (store.path(1) / "data_state.json").unlink()
    with pytest.raises(CheckpointDamaged, match=r"data_state\.json is missing"):
        store.restore(abstract(make_state()), 1)


def test_when_none_is_intact_each_is_listed_with_its_reason(store: CheckpointStore) -> None:
    save(store, 1, 2)
    damage(store.path(1))
    (store.path(2) / "config.yaml").write_text("another: config\n")
    (store.path(3).with_suffix(".orbax-checkpoint-tmp")).mkdir()
    with pytest.raises(CheckpointError) as error:
        store.restore(abstract(make_state()))
    message = str(error.value)
    assert "00000001: Checkpoint" in message
    assert "00000002/config.yaml is damaged: it does not match its SHA-256" in message
    assert "00000003.orbax-checkpoint-tmp: its saving was interrupted" in message


def test_training_resumed_below_a_damaged_checkpoint_sets_it_aside(store: CheckpointStore, make_store: Make) -> None:
    save(store, 1, 2)
    damage(store.path(2))
    damaged = bits_of_files(store.path(2))
    resumed = make_store(keep=1)
    with pytest.warns(UserWarning, match="is skipped in favor"):
        resumed.restore(abstract(make_state()))
    with pytest.warns(UserWarning, match="00000002 is set aside as 00000002.set-aside-1"):
        save(resumed, 2)
    assert bits(resumed.restore(abstract(make_state())).state) == bits(make_state(2))
    assert bits_of_files(store.path(2).with_suffix(".set-aside-1")) == damaged


def test_damaged_checkpoints_take_no_place_of_intact_ones(store: CheckpointStore, make_store: Make) -> None:
    save(make_store(keep=3), 1, 2, 3)
    damage(store.path(2))
    damage(store.path(3))
    resumed = make_store(keep=2)
    with pytest.warns(UserWarning, match="is skipped in favor"):
        resumed.restore(abstract(make_state()))
    save(resumed, 4)
    assert resumed.steps() == (1, 2, 3, 4)
    save(resumed, 5)
    assert resumed.steps() == (4, 5)


def test_a_checkpoint_without_a_manifest_takes_no_place_of_an_intact_one(store: CheckpointStore) -> None:
    save(store, 1, 2)
    (store.path(2) / "manifest.json").unlink()
    save(store, 3)
    assert store.steps() == (1, 2, 3)
    save(store, 4)
    assert store.steps() == (3, 4)


def bits_of_files(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_what_a_killed_save_left_is_named_and_removed_by_the_next(store: CheckpointStore) -> None:
    save(store, 1)
    partial = store.path(2).with_suffix(".orbax-checkpoint-tmp")
    partial.mkdir()
    with pytest.warns(UserWarning, match="00000002.orbax-checkpoint-tmp is skipped in favor .* interrupted"):
        store.restore(abstract(make_state()))
    save(store, 3)
    assert not partial.exists()


def test_another_model_names_every_leaf_that_differs_both_ways(store: CheckpointStore) -> None:
    save(store, 1)
    other = make_state(width=16)
    other["params"]["gate"] = other["params"].pop("scale")
    with pytest.raises(CheckpointError) as error:
        store.restore(abstract(other))
    assert not isinstance(error.value, CheckpointDamaged)
    lines = str(error.value).splitlines()
    assert "leaves that differ: 5" in lines[0]
    assert {line.strip() for line in lines[1:-1]} == {
        "opt_state/0: float32[8, 32] in the checkpoint, float32[8, 16] in this run",
        "params/bias: bfloat16[32] in the checkpoint, bfloat16[16] in this run",
        "params/gate: absent in the checkpoint, float16[16] in this run",
        "params/kernel: float32[8, 32] in the checkpoint, float32[8, 16] in this run",
        "params/scale: float16[32] in the checkpoint, absent in this run",
    }


def test_another_kind_of_key_is_another_state(store: CheckpointStore) -> None:
    store.save(1, {"params": {}, "key": jax.random.key(0, impl="rbg")}, {}, CONFIG_YAML)
    with pytest.raises(
        CheckpointError, match=r"key: key<rbg>\[\] in the checkpoint, key<threefry2x32>\[\] in this run"
    ):
        store.restore({"params": {}, "key": jax.random.key(0)})


def test_without_its_data_state_a_checkpoint_gives_weights_alone(store: CheckpointStore) -> None:
    store.save(1, make_state(1), None, CONFIG_YAML)
    with pytest.raises(CheckpointIncomplete, match=r"not the state of the data iterator.*run\.init_from="):
        store.restore(abstract(make_state()))
    assert bits(store.restore_params(abstract(make_state()["params"])).state) == bits(make_state(1)["params"])


def test_a_checkpoint_of_a_newer_format_is_not_called_damaged(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("stack_train.checkpoint.manifest._FORMAT", 2)
        save(store, 1)
    with pytest.raises(CheckpointError, match="is of format 2; this version of stack-train reads up to 1") as error:
        store.restore(abstract(make_state()))
    assert not isinstance(error.value, CheckpointDamaged)


def test_weights_are_written_part_by_part(store: CheckpointStore) -> None:
    taken: list[str] = []

    def leaves() -> Any:
        for index in range(10):
            taken.append(str(index))
            yield f"layers/{index}", np.full(1000, index, np.float32)

    store.save_weights(leaves(), CONFIG_YAML, part_bytes=9000)
    assert len(list((store.path(0) / "arrays").iterdir())) == 5
    restored = store.restore_params({"layers": {name: jnp.zeros(1000) for name in taken}}).state
    assert all((restored["layers"][name] == int(name)).all() for name in taken)


def test_weights_given_twice_or_cut_short_leave_nothing_behind(store: CheckpointStore) -> None:
    def broken() -> Any:
        yield "kernel", np.ones(3)
        raise ConversionError("a shard is missing")

    with pytest.raises(ConversionError, match="a shard is missing"):
        store.save_weights(broken(), CONFIG_YAML)
    with pytest.raises(CheckpointError, match="'kernel' was given twice"):
        store.save_weights([("kernel", np.ones(3))] * 2, CONFIG_YAML)
    assert list(store.path(0).parent.iterdir()) == []
