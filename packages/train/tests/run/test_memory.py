"""What does not fit a device's memory is refused before anything is written."""

import jax
import pytest

from stack_core.abi.config import apply_overrides, parse
from stack_core.abi.errors import HardwareError
from stack_core.abi.run_directory import RunDirectory
from stack_train.run import memory, train
from stack_train.run.config import RunConfig
from stack_train.run.program import build_program

CONFIG = {
    "model": {"name": "llama", "vocab_size": 264, "layers": 1, "embed": 16, "heads": 2, "mlp": 16},
    "data": {"seq_tokens": 16, "batch_size": 2, "validation_fraction": 0.0},
    "run": {"steps": 1},
}


@pytest.fixture
def config_of(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("some words " * 100)
    base = apply_overrides(CONFIG, [f"data.source=text:{tmp_path}/*.txt", f"output={tmp_path / 'run'}"])
    return lambda *overrides: parse(RunConfig, apply_overrides(base, overrides))


def test_a_model_of_terabytes_is_refused_before_it_is_traced(config_of, tmp_path, monkeypatch):
    monkeypatch.setattr(train.Run, "__init__", lambda *_: pytest.fail("the run was built"))
    config = config_of("model.layers=48", "model.embed=16384", "model.heads=128", "model.mlp=65536")
    with pytest.raises(HardwareError, match=r"take 3,\d{3}\.\d\d GiB .*optimizer state 1,\d{3}.*cpu has .*mesh.fsdp"):
        train.train(config)
    assert not (tmp_path / "run").exists()


def test_a_step_whose_temporaries_do_not_fit_is_refused_before_a_byte_is_written(config_of, tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda devices: 2**20)  # the state takes a third of it
    with pytest.raises(HardwareError, match=r"compiled step takes .*temporaries.*data.batch_size"):
        train.train(config_of("data.batch_size=512"))
    assert not (tmp_path / "run").exists()


def test_a_state_is_counted_as_one_device_holds_it(config_of):
    state = build_program(config_of()).abstract_state
    assert memory._device_bytes(state.params) == sum(4 * leaf.size for leaf in jax.tree.leaves(state.params))


def test_a_start_that_fails_leaves_its_directory_to_the_next(config_of, tmp_path, monkeypatch):
    def exhausted(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(train, "compile_fitting", lambda *_: object.__new__(jax.stages.Compiled))
        patch.setattr(train, "_first_state", exhausted)
        with pytest.raises(HardwareError, match="does not fit the memory of a device"):
            train.train(config_of())
    assert not RunDirectory(tmp_path / "run").config.exists()
    assert train.train(config_of()).step == 1
