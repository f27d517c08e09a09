"""The examples of post-training, from their commands to what they learn; models for which a few minutes suffice."""

import asyncio
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core.abi.config import apply_overrides, load_yaml
from stack_core.abi.errors import ConfigError, ConversionError, DataError
from stack_core.abi.mesh import MeshConfig
from stack_core.abi.model_formats import open_auxiliary, open_for_generation
from stack_core.cli import main
from stack_rl.contracts import Completion
from stack_rl.environments.prompts import PromptsConfig
from stack_rl.objectives.heads import scalar_head
from stack_rl.objectives.reward_model import answer_rewards
from stack_rl.rewards.model import ModelReward, ModelRewardConfig
from stack_train.run.config import run_config
from stack_train.run.resolve import parse_run
from stack_train.run.train import train
from stack_train.variables.weights import read_model

EXAMPLES = Path(__file__).parents[1] / "examples"
SMALL = ("model.layers=1", "model.embed=16", "model.heads=2", "model.mlp=16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where examples find `runs/`, as they do in the folder they are started in."""
    folder = tmp_path_factory.mktemp("learning")
    for name in ("letters.py", "add.py"):
        subprocess.run([sys.executable, EXAMPLES / name], check=True, cwd=folder)
    return folder


@pytest.fixture(autouse=True)
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(EXAMPLES))


def run(name: str, *overrides: str, resume: bool = False):
    """Trains an example."""
    mapping = apply_overrides(load_yaml(EXAMPLES / name), list(overrides))
    return train(parse_run(mapping), resume=resume)


def evaluations(output: str) -> list[dict]:
    records = map(json.loads, (Path(output) / "metrics.jsonl").read_text().splitlines())
    return [record for record in records if record["kind"] == "evaluation"]


@pytest.fixture(scope="module")
def tiny(folder):
    """A reward model of a few steps, and the run that it starts from."""
    patch = pytest.MonkeyPatch()
    patch.chdir(folder)
    run("letters_chat.yaml", *SMALL, "run.steps=2", "output=runs/tiny")
    start = ("run.init_from=runs/tiny", "run.steps=3", "run.evaluate_every_steps=0", "data.batch_size=8")
    run("letters_reward.yaml", *start, "output=runs/tiny-reward")
    patch.undo()


async def scored(reward: ModelReward, completions: list[Completion]) -> list[float]:
    return await asyncio.gather(*map(reward, completions))


def test_a_reward_model_scores_answers_as_it_was_trained_to(tiny):
    """At the last token before the end; an answer that a limit cut has its last token there."""
    reward = ModelReward("runs/tiny-reward")
    config, model = (
        run_config(Path("runs/tiny-reward")),
        read_model(Path("runs/tiny-reward"), run_config(Path("runs/tiny-reward")))[0],
    )
    tokenizer = open_for_generation("runs/tiny-reward").tokenizer
    prompt, end = tuple(tokenizer.encode("c:")), tokenizer.eos_id
    answers = [tuple(tokenizer.encode(text)) for text in ("cchh", "ab", "h" * 4)] * 30  # more than a batch of rows
    completions = [
        Completion(prompt="c:", text="", tokens=(*each, end), is_finished=True, record={}, prompt_tokens=prompt)
        for each in answers
    ]
    cut = Completion(prompt="c:", text="", tokens=answers[0], is_finished=False, record={}, prompt_tokens=prompt)
    *found, of_cut = asyncio.run(scored(reward, [*completions, cut]))
    own_mesh = ModelRewardConfig(source="runs/tiny-reward", mesh=MeshConfig(fsdp=1)).build()
    np.testing.assert_allclose(asyncio.run(scored(own_mesh, completions[:3])), found[:3], rtol=1e-5)

    shapes = {"kernel": jax.ShapeDtypeStruct((16,), jnp.float32), "bias": jax.ShapeDtypeStruct((), jnp.float32)}
    values, head = (
        open_auxiliary("runs/tiny-reward", "reward", shapes),
        scalar_head(config.model, key=jax.random.key(0)),
    )
    head.kernel.set_value(values["kernel"])
    head.bias.set_value(values["bias"])
    assert float(jnp.abs(values["kernel"]).max()) > 0
    tokens, targets = np.zeros((3, 1, 8), np.int32), np.full((3, 1, 8), -100, np.int32)
    for row, answer in enumerate(answers[:3]):
        whole = (*prompt, *answer, end)
        tokens[row, 0, : len(whole) - 1], targets[row, 0, 1 : len(whole) - 1] = whole[:-1], whole[2:]
    positions = np.broadcast_to(np.arange(8, dtype=np.int32), tokens.shape)
    batch = {"tokens": tokens, "targets": targets, "positions": positions, "segment_ids": np.ones_like(tokens)}
    expected = answer_rewards(model, head, jax.tree.map(jnp.asarray, batch))[:, 0]
    np.testing.assert_allclose(found[:3], expected, rtol=1e-5, atol=1e-6)
    assert np.ptp(found[:3]) > 1e-4
    np.testing.assert_allclose(found[-3:], found[:3], rtol=1e-6)
    assert of_cut == pytest.approx(found[0], rel=1e-5)


def test_what_is_no_reward_model_for_a_policy_is_refused(tiny):
    with pytest.raises(ConversionError, match=r"does not train a model 'reward'; it trains: none"):
        ModelReward("runs/tiny")
    with pytest.raises(ConfigError, match="'run:runs/nowhere' is not a directory"):
        PromptsConfig(source="runs/letters-data/prompts.jsonl", rewards=("run:runs/nowhere",)).check(None)
    with pytest.raises(ConfigError, match="'runs/nowhere' is not a directory"):
        PromptsConfig(
            source="runs/letters-data/prompts.jsonl", rewards=({"name": "model", "source": "runs/nowhere"},)
        ).check(None)
    reward = ModelReward("runs/tiny-reward")
    reward.check(open_for_generation("runs/tiny").tokenizer)
    with pytest.raises(DataError, match="different tokenizer than the policy"):
        reward.check(None)


RECIPE = """
data:
  name: rollouts
  environment: {name: prompts, source: PROMPTS, held_out: PROMPTS, rewards: ["letters:worth"], max_tokens: 5}
  seq_tokens: 8
  groups: 2
  group_size: 3
"""


def test_any_model_plays_the_held_out_tasks_of_a_recipe(tiny, tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.replace("PROMPTS", "runs/letters-data/prompts.jsonl"))
    main(["rl", "evaluate", str(recipe), "runs/tiny", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["tasks"] == 8 and found["reward"] == found["worth"] and found["correct"] == 0
    main(["rl", "evaluate", str(recipe), "runs/tiny", "--samples", "2"])
    *samples, means = capsys.readouterr().out.splitlines()
    assert len(samples) == 2 and samples[1].startswith("b:") and means.startswith("tasks 8, episodes 8, reward ")
    recipe.write_text(recipe.read_text().replace("letters:worth", "operator:truediv") + "  on_failure: drop\n")
    with pytest.raises(SystemExit):
        main(["rl", "evaluate", str(recipe), "runs/tiny"])
    assert "All 8 episodes failed and were dropped" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["rl", "evaluate", str(EXAMPLES / "letters_dpo.yaml"), "runs/tiny"])
    assert "data.name is 'preferences'; a recipe whose data.name is 'rollouts'" in capsys.readouterr().err


def once(name: str) -> None:
    """Trains an example that several tests start from."""
    if not Path(f"runs/{name.replace('_', '-')}/report.html").exists():
        run(f"{name}.yaml")


@pytest.mark.slow
def test_a_reward_model_learns_which_of_held_out_pairs_is_worthier(folder):
    once("letters_chat")
    once("letters_reward")
    assert evaluations("runs/letters-reward")[-1]["accuracy"] >= 0.95


@pytest.mark.slow
def test_ppo_finds_what_a_reward_model_learned_from_pairs(folder):
    """Chat, reward model and PPO on one file of pairs; the hidden worth of answers rises, too."""
    once("letters_chat")
    once("letters_reward")
    run("letters_ppo.yaml")
    first, *_, last = evaluations("runs/letters-ppo")
    assert last["reward"] > first["reward"]
    samples = [json.loads(line) for line in Path("runs/letters-ppo/samples.jsonl").read_text().splitlines()]
    worth = [each["facts"]["worth"] for each in samples if each["step"] == 150]
    assert np.mean(worth) >= 24  # of the 28 that the best answer is worth; answers to start from are worth 14


@pytest.mark.slow
def test_dpo_prefers_the_worthier_of_held_out_pairs(folder):
    once("letters_chat")
    run("letters_dpo.yaml")
    assert evaluations("runs/letters-dpo")[-1]["accuracy"] >= 0.95


@pytest.mark.slow
def test_grpo_learns_to_add_though_it_is_killed(folder):
    """The sequence of examples/add.yaml, whose last part is killed and resumed."""
    run("add_chat.yaml")
    evaluated = [sys.executable, "-m", "stack_core", "rl", "evaluate", EXAMPLES / "add.yaml", "runs/add-chat"]
    before = json.loads(subprocess.run([*evaluated, "--json"], check=True, stdout=subprocess.PIPE).stdout)
    assert before["correct"] >= 0.35
    command = [sys.executable, "-m", "stack_core", "train", EXAMPLES / "add.yaml"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as child:
        while child.poll() is None and not Path("runs/add/checkpoints/00000200").exists():
            time.sleep(0.1)
        child.send_signal(signal.SIGKILL)
    assert child.returncode == -signal.SIGKILL, "the child ended by itself"
    run("add.yaml", resume=True)
    assert evaluations("runs/add")[-1]["correct"] >= 0.9


@pytest.mark.slow
def test_grpo_learns_to_count_shapes_in_pictures(folder):
    """The sequence of examples/count.yaml: the reward on held-out pictures rises from a few supervised steps on."""
    subprocess.run([sys.executable, EXAMPLES / "count.py"], check=True)
    run("count_chat.yaml")
    evaluated = [sys.executable, "-m", "stack_core", "rl", "evaluate", EXAMPLES / "count.yaml", "runs/count-chat"]
    before = json.loads(subprocess.run([*evaluated, "--json"], check=True, stdout=subprocess.PIPE).stdout)
    assert 0.3 < before["correct"] < 0.75
    run("count.yaml")
    correct = [each["correct"] for each in evaluations("runs/count")]
    assert max(correct) >= 0.85 and correct[-1] >= before["correct"] + 0.1
    steps = [json.loads(line) for line in Path("runs/count/metrics.jsonl").read_text().splitlines()]
    assert max(each["largest_mismatch"] for each in steps if each["kind"] == "train") < 1e-4


@pytest.mark.slow
def test_distillation_from_a_teacher_needs_fewer_samples_than_rewards(folder):
    once("add_chat")
    run("add_chat.yaml", "run.steps=300", "output=runs/add-teacher")
    run("add_distill.yaml")
    assert evaluations("runs/add-distill")[-1]["correct"] >= 0.95
    samples = [load_yaml(EXAMPLES / name) for name in ("add.yaml", "add_distill.yaml")]
    of_grpo, of_distillation = (
        each["run"]["steps"] * each["data"]["groups"] * each["data"]["group_size"] for each in samples
    )
    assert of_distillation <= of_grpo / 2


DAPO = ("objective.name=dapo", "objective.minibatches=2", "objective.refill_rounds=1", "run.steps=400")


@pytest.mark.slow  # about a minute of CPU each
@pytest.mark.filterwarnings("ignore:Batch 0 has .* groups without variance")  # of DAPO, with one round of refills
@pytest.mark.parametrize("overrides", [(), DAPO], ids=["grpo", "dapo"])
def test_answers_of_uneven_lengths_are_learned_from_scratch(folder, overrides):
    output = f"runs/sorting-{len(overrides)}"
    run("sorting.yaml", *overrides, f"output={output}")
    first, *_, last = evaluations(output)
    assert first["correct"] < 0.7 and last["correct"] >= 0.9 and last["truncated"] <= 0.05
    steps = [json.loads(line) for line in (Path(output) / "metrics.jsonl").read_text().splitlines()]
    steps = [each for each in steps if each["kind"] == "train"]
    # A random policy seldom ends its answers, a trained one has answers of 2 to 5 tokens, the end token included.
    assert steps[0]["action_tokens"] > 6 and 2.5 < steps[-1]["action_tokens"] < 4.5
    if overrides:
        assert steps[0]["overlong"] > 0.5 and steps[-1]["overlong"] < 0.05
        assert max(each["clipped"] for each in steps) > 0
