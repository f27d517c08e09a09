"""`stack checkpoint`: checkpoints listed, verified, compared, averaged and deleted, without the model."""

import hashlib
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from stack_core.abi.config import to_yaml
from stack_core.abi.errors import CheckpointError, RunDirectoryError
from stack_core.abi.run_directory import RunDirectory
from stack_core.cli import main
from stack_train.checkpoint import CheckpointConfig, CheckpointStore
from stack_train.checkpoint.inspection import averaged, compare
from stack_train.models.llama import LlamaConfig
from stack_train.optim import ScheduleFreeConfig
from stack_train.run.config import RunConfig

from .conftest import make_state


def run_at(directory: Path, steps=(2, 4, 6), **config) -> RunDirectory:
    """A run whose parameters are those of `make_state(step)`."""
    run = RunDirectory(directory)
    with CheckpointStore(run.checkpoints, CheckpointConfig(keep=9)) as store:
        for step in steps:
            store.save(step, make_state(step))
    model = LlamaConfig(vocab_size=8, layers=1, embed=8, heads=1, mlp=8)
    run.config.write_text(to_yaml(RunConfig(output=str(directory), model=model, **config)))
    run.tokenizer.mkdir()
    (run.tokenizer / "tokenizer.json").write_text("{}")
    lines = [{"kind": "train", "step": 4, "loss": 2.5}, {"kind": "evaluation", "step": 4, "loss": 2.25}]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def damage(run: RunDirectory, step: int) -> None:
    """Changes the values of a checkpoint on disk."""
    file = max((run.checkpoints / f"{step:08d}").rglob("d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[200:264] = bytes(64)
    file.write_bytes(content)


def test_checkpoints_are_listed_with_their_losses(tmp_path: Path, capsys) -> None:
    run = run_at(tmp_path / "run")
    (run.checkpoints / "00000008.orbax-checkpoint-tmp").mkdir()
    (run.checkpoints / "00000006.set-aside-1").mkdir()
    (run.checkpoints / "00000002" / "manifest.json").write_text("{")
    main(["checkpoint", "ls", str(run.path), "--json"])
    rows = json.loads(capsys.readouterr().out)
    found = [(row["step"], row["state"], row["kind"]) for row in rows]
    assert found == [
        (2, "damaged", "-"),
        (4, "complete", "train"),
        (6, "complete", "train"),
        (6, "set aside", "-"),
        (8, "partial", "-"),
    ]
    assert [(row["loss"], row["validation_loss"]) for row in rows[:2]] == [(None, None), (2.5, 2.25)]
    assert rows[1]["bytes"] > 1000


def test_damage_is_found_and_named(tmp_path: Path, capsys) -> None:
    run = run_at(tmp_path / "run", steps=(2, 4))
    main(["checkpoint", "verify", str(run.path), "--every"])
    assert capsys.readouterr().out.count("leaves match their digests") == 2
    damage(run, 2)
    main(["checkpoint", "verify", str(run.path)])
    with pytest.raises(SystemExit, match="2"):
        main(["checkpoint", "verify", str(run.path), "--every"])
    told = capsys.readouterr()
    assert f"{run.checkpoints / '00000002'}: damaged" in told.out
    assert "is damaged: 10 of 10 leaves." in told.err and "  params/kernel cannot be read" in told.err


def test_two_checkpoints_are_compared(tmp_path: Path, capsys) -> None:
    run = run_at(tmp_path / "run", steps=(2, 4))
    first, second = (run.checkpoints / f"{step:08d}" for step in (2, 4))
    before, after = (np.asarray(make_state(step)["params"]["kernel"], np.float64) for step in (2, 4))
    found = {each.name: each for each in compare(first, second)}
    assert found.keys() == {"params/kernel", "params/bias", "params/scale"}
    kernel = found["params/kernel"]
    assert kernel.relative == pytest.approx(np.linalg.norm(after - before) / np.linalg.norm(before))
    assert (kernel.changed, kernel.largest) == (1.0, pytest.approx(np.abs(after - before).max()))
    whole = {each.name: each for each in compare(first, second, full_state=True)}
    assert (whole["step"].changed, whole["step"].relative, whole["opt_state/1"].changed) == (1.0, None, 0.0)
    main(["checkpoint", "diff", str(run.path), str(run.path)])
    assert capsys.readouterr().out == "0 of 3 leaves differ\n"
    main(["checkpoint", "diff", str(first), str(second)])
    assert "params/kernel" in (told := capsys.readouterr().out) and "3 of 3 leaves differ" in told

    wider = tmp_path / "wider"
    with CheckpointStore(wider) as store:
        store.save(1, make_state(2, width=16) | {"moved": jnp.zeros(3)})
    notes = {each.name: each.note for each in compare(first, wider / "00000001")}
    assert notes["params/kernel"] == "float32[8, 32], then float32[8, 16]"
    assert notes["moved"] == "absent, then float32[3]"
    with pytest.raises(CheckpointError, match="of different models: moved is absent"):
        list(averaged([first, wider / "00000001"]))


def test_entries_that_are_not_numbers_are_compared(tmp_path: Path, capsys) -> None:
    state = make_state(2)
    spoiled = state["params"]["kernel"].at[0, 0].set(jnp.nan).at[0, 1].set(jnp.inf)
    values = {1: spoiled, 2: spoiled, 3: state["params"]["kernel"]}
    with CheckpointStore(tmp_path, CheckpointConfig(keep=9)) as store:
        for step, kernel in values.items():
            store.save(step, {"params": {**state["params"], "kernel": kernel}})
    first, second, third = (tmp_path / f"{step:08d}" for step in values)
    assert {each.name: each.changed for each in compare(first, second)}["params/kernel"] == 0.0
    kernel = {each.name: each for each in compare(first, third)}["params/kernel"]
    assert kernel.changed == 2 / spoiled.size and np.isnan([kernel.relative, kernel.largest]).all()
    main(["checkpoint", "diff", str(first), str(third)])
    assert "nan" in (told := capsys.readouterr().out) and "1 of 3 leaves differ" in told


def test_a_changed_value_is_not_averaged(tmp_path: Path, capsys) -> None:
    run = run_at(tmp_path / "run", steps=(2, 4))
    manifest = run.checkpoints / "00000004" / "manifest.json"
    document = json.loads(manifest.read_text())
    leaves = document["content"]["leaves"]
    leaves["params/kernel"]["digest"] = leaves["params/bias"]["digest"]
    sealed = json.dumps(document["content"], sort_keys=True, separators=(",", ":"))
    document["sha256"] = hashlib.sha256(sealed.encode()).hexdigest()
    manifest.write_text(json.dumps(document))
    with pytest.raises(SystemExit, match="2"):
        main(["checkpoint", "average", str(tmp_path / "average"), str(run.path), "--last", "2"])
    assert "does not match its digest" in capsys.readouterr().err


def test_parameters_are_averaged_into_a_new_run(tmp_path: Path, capsys) -> None:
    run, output = run_at(tmp_path / "run"), tmp_path / "average"
    main(["checkpoint", "average", str(output), str(run.path), "--last", "2"])
    expected = {
        name: np.mean([np.asarray(make_state(step)["params"][name], np.float64) for step in (4, 6)], axis=0)
        for name in ("kernel", "bias", "scale")
    }
    with CheckpointStore(RunDirectory(output).checkpoints) as store:
        like = make_state()["params"]
        restored = store.restore_params(like).state
    for name, value in expected.items():
        np.testing.assert_array_equal(restored[name], value.astype(like[name].dtype))
    assert f"output: {output}" in RunDirectory(output).config.read_text()
    assert (output / "tokenizer" / "tokenizer.json").is_file()


def test_averages_that_mean_nothing_are_refused(tmp_path: Path, capsys) -> None:
    run, output = run_at(tmp_path / "run", steps=(2, 4)), str(tmp_path / "average")
    averaging = run_at(tmp_path / "averaging", steps=(2, 4), optimizer=ScheduleFreeConfig())
    for arguments, told in (
        ([str(run.path)], "two checkpoints or more"),
        ([str(run.path), str(run.path), "--last", "2"], "give one run"),
        ([str(run.path), "--last", "1"], "at least --last 2"),
        ([str(averaging.path), "--last", "2"], "averages weights itself"),
        ([str(tmp_path), str(run.path)], "neither a checkpoint nor a run directory"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["checkpoint", "average", output, *arguments])
        assert told in capsys.readouterr().err
    assert not Path(output).exists()


def test_old_and_unfinished_checkpoints_are_deleted(tmp_path: Path, capsys) -> None:
    run = run_at(tmp_path / "run")
    (run.checkpoints / "00000008.orbax-checkpoint-tmp").mkdir()
    (run.checkpoints / "00000006.set-aside-1").mkdir()
    names = sorted(path.name for path in run.checkpoints.iterdir())
    main(["checkpoint", "gc", str(run.path), "--keep", "1", "--dry-run"])
    assert capsys.readouterr().out.count("would delete") == 4
    assert sorted(path.name for path in run.checkpoints.iterdir()) == names
    with run.open(resume=True), pytest.raises(SystemExit, match="2"):
        main(["checkpoint", "gc", str(run.path)])
    main(["checkpoint", "gc", str(run.path), "--keep", "2"])
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["00000004", "00000006"]
    main(["checkpoint", "gc", str(run.path)])
    assert "nothing to delete" in capsys.readouterr().err


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="holds no run"):
        RunDirectory(tmp_path).config_yaml()
    with pytest.raises(SystemExit, match="2"):
        main(["checkpoint", "ls", str(tmp_path)])
