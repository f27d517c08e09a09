"""Models beside the trained one on meshes of their own, and a reference that the data asks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stack_core.abi.errors import ConfigError, DataError
from stack_train.run.train import train

from .test_rollouts import cell, records, write_untrained

EXAMPLES = Path(__file__).parents[1] / "examples"
STEPS = ("run.steps=3", "run.evaluate_every_steps=0", "checkpoint.every_steps=3", "objective.kl=0.5")


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that others start from and take as their reference."""
    return write_untrained(tmp_path_factory.mktemp("runs") / "first")


def test_a_reference_of_the_data_holds_a_policy_as_one_of_the_trainer_does(first: Path, tmp_path: Path) -> None:
    start = (*STEPS, f"run.init_from={first}")
    train(cell(tmp_path / "companion", *start, f"objective.reference=run:{first}"))
    train(cell(tmp_path / "data", *start, "objective.reference=data", f"data.reference.source=run:{first}"))
    ours, theirs = (records(tmp_path / name, "train") for name in ("data", "companion"))
    for name in ("loss", "kl", "reward", "grad_norm"):
        assert [each[name] for each in ours] == pytest.approx([each[name] for each in theirs], rel=1e-5, abs=1e-7), name
    assert ours[0]["kl"] == pytest.approx(0, abs=1e-9) and ours[-1]["kl"] > 1e-6


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (("objective.reference=data",), ConfigError, "reads 'reference_logprobs' of a batch"),
        (("data.reference.source=run:FIRST",), ConfigError, r"objective.reference is 'init'. Set objective.kl"),
        (("data.reference.source=FIRST",), ConfigError, "name a run, such as the one that this run starts from"),
        (("objective.reference=data", "data.reference.source=run:nowhere"), ConfigError, "which is not a directory"),
    ],
)
def test_a_reference_that_cannot_be_asked_is_refused(
    first: Path, tmp_path: Path, overrides: tuple[str, ...], error: type[Exception], message: str
) -> None:
    given = [each.replace("FIRST", str(first)) for each in overrides]
    with pytest.raises(error, match=message):
        train(cell(tmp_path / "run", *STEPS, *given))
    assert not (tmp_path / "run").exists()


def test_a_reference_of_other_tokens_is_refused(first: Path, tmp_path: Path) -> None:
    reference = ("objective.reference=data", f"data.reference.source=run:{first}")
    with pytest.raises(DataError, match=r"has 16 tokens and 16 positions; the policy has 20 and 16"):
        train(cell(tmp_path / "run", *STEPS, *reference, "model.vocab_size=20"))


@pytest.mark.slow  # four runs on eight devices
def test_models_on_meshes_of_their_own_give_the_run_of_one_mesh(tmp_path: Path) -> None:
    subprocess.run([sys.executable, EXAMPLES / "letters.py"], check=True, cwd=tmp_path)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8", "PYTHONPATH": path_with_examples()}
    script = Path(__file__).with_name("roles_on_eight_devices.py")
    command = [sys.executable, str(script), str(tmp_path)]
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "roles ok" in done.stdout


def path_with_examples() -> str:
    return os.pathsep.join(filter(None, (str(EXAMPLES), os.environ.get("PYTHONPATH"))))
