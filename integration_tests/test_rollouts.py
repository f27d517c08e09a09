"""Runs on rollouts: what they report, that sampler and program agree, and that a killed one ends like a whole one."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.nnx.traversals import flatten_mapping

from stack_core.abi.config import apply_overrides, load_yaml, parse, to_yaml
from stack_core.abi.errors import ConfigError, ConversionError, StackError, UnknownName
from stack_core.abi.policy import PolicyBatches
from stack_quant import quantize
from stack_rl.environments.prompts import PromptsConfig
from stack_rl.objectives.presets import GRPOConfig
from stack_rl.rollouts import RolloutData
from stack_train import RunConfig, RunSettings, RunSummary, build, start
from stack_train.checkpoint import CheckpointStore, named_leaves
from stack_train.run.config import run_config
from stack_train.run.program import build_program
from stack_train.run.train import train
from stack_train.variables.weights import read_model, read_params

EXAMPLES = Path(__file__).parents[1] / "examples"
TINY = (
    *("model.layers=1", "model.embed=16", "model.heads=2", "model.mlp=16"),
    *("data.groups=4", "data.group_size=4", "data.environment.held_out=20"),
    *("run.steps=8", "checkpoint.every_steps=2", "checkpoint.keep=10", "run.evaluate_every_steps=4"),
)


def cell(output: Path, *overrides: str) -> RunConfig:
    """The run of examples/cell.yaml, in the smallest sizes."""
    mapping = load_yaml(EXAMPLES / "cell.yaml")
    return parse(RunConfig, apply_overrides(mapping, [*TINY, f"output={output}", *overrides]))


def write_untrained(output: Path) -> Path:
    """Writes the run of `cell` with the parameters that it starts from."""
    config = cell(output)
    params = build_program(config).init(key=jax.random.key(0)).params
    with CheckpointStore(output / "checkpoints") as store:
        store.save_weights(named_leaves(params).items(), to_yaml(config))
    (output / "config.yaml").write_text(to_yaml(config))
    return output


def records(output: Path, kind: str) -> list[dict]:
    found = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return [record for record in found if record["kind"] == kind]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The summary of a run that nothing interrupted, and the numbers of its compilations."""
    run = build(cell(tmp_path_factory.mktemp("runs") / "whole"))
    assert isinstance(run.data, PolicyBatches)
    return _start_and_count(run)


@pytest.fixture(scope="module")
def whole(finished):
    return finished[0].directory


def test_a_run_reports_its_rollouts_and_the_sampler_agrees_with_the_trainer(whole, finished):
    summary, _ = finished
    steps, (*_, last) = records(whole, "train"), records(whole, "evaluation")
    shown = ("reward", "flat_groups", "unparsed", "truncated")
    assert summary.metrics == {name: steps[-1][name] for name in shown}
    assert summary.validation_metrics == {name: last[name] for name in shown}
    assert [each["step"] for each in steps] == list(range(1, 9)) and last["step"] == 8
    assert max(each["largest_mismatch"] for each in steps) < 1e-4
    assert {each["staleness"] for each in steps} == {0.0} and {each["dropped"] for each in steps} == {0.0}
    assert {each["action_tokens"] for each in steps} == {2.0} and {each["clipped"] for each in steps} == {0.0}
    assert all(0 <= each["flat_groups"] <= 1 and 0 <= each["reward"] <= 1 for each in steps)
    assert len({each["reward"] for each in steps}) > 1  # tasks and draws are new at each step
    assert last["largest_mismatch"] < 1e-4 and round(last["reward"] * 20, 4) % 1 == 0  # 20 tasks, once each
    report = (whole / "report.html").read_text()
    assert "Greedy episodes at step 8" in report and "cell held out 3" in report
    assert "last flat groups" in report


def test_the_step_forms_no_logits_of_a_whole_batch_and_is_compiled_once(tmp_path, finished):
    sizes = ("model.vocab_size=65536", "model.max_positions=64", "data.seq_tokens=64", "objective.kl=0.1")
    run = build(cell(tmp_path / "wide", *sizes))
    shapes = re.findall(r"tensor<((?:\d+x)+)", run.traced.lower().as_text())
    largest = max(math.prod(map(int, shape.rstrip("x").split("x"))) for shape in shapes)
    assert 65536 * 16 <= largest < 4 * 4 * 64 * 65536  # the embedding's is the largest

    # The first checkpoint is after step 2, and the first evaluation, which compiles greedy sampling, after step 4.
    _, at_step = finished
    assert len(at_step) == 9 and at_step[0] < at_step[1] <= at_step[5] == at_step[7], at_step


def _start_and_count(run) -> tuple[RunSummary, list[int]]:
    """Returns the summary of a run, and the number of compilations before each step and after the last one."""
    compiled, at_step = [], []
    take = run.data.update_weights  # before the first step, and after each
    run.data.update_weights = lambda *given: take(*given) or at_step.append(len(compiled))

    def listen(event, duration_s, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(duration_s)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        return start(run), at_step
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.slow  # compiles the step for five meshes
def test_meshes_and_microbatches_have_the_gradient_of_one_device_by_every_aggregation(whole, tmp_path):
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "8",
        "XDG_CACHE_HOME": str(tmp_path),
    }
    script = Path(__file__).with_name("rollouts_on_eight_devices.py")
    command = [sys.executable, str(script), str(tmp_path), str(whole)]
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rollouts ok" in done.stdout


CHILD = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_rollouts import cell
from stack_train.run.train import train
train(cell(Path(sys.argv[1])), resume=sys.argv[2] == "resume")
"""


def _check_same_run(run, whole):
    ours, theirs = ({each["step"]: each for each in records(path, "train")} for path in (run, whole))
    assert sorted(ours) == sorted(theirs)
    measured = ("loss", "reward", "grad_norm", "logprob", "flat_groups")
    assert {step: [each[name] for name in measured] for step, each in ours.items()} == {
        step: [each[name] for name in measured] for step, each in theirs.items()
    }
    digests = [_digests(path / "checkpoints" / "00000008") for path in (run, whole)]
    assert digests[0] == digests[1] and len(digests[0]) > 10


def test_a_killed_run_ends_bitwise_like_an_uninterrupted_one(whole, tmp_path):
    cut = tmp_path / "cut"
    command = [sys.executable, "-c", CHILD.format(tests=str(Path(__file__).parent)), str(cut), "begin"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
        while child.poll() is None and not (cut / "checkpoints" / "00000004").exists():
            time.sleep(0.01)
        child.send_signal(signal.SIGKILL)
    assert child.returncode == -signal.SIGKILL, "the child ended by itself"
    train(cell(cut), resume=True)
    _check_same_run(cut, whole)


def test_an_engine_in_another_process_plays_the_same_episodes_also_after_it_was_killed(whole, tmp_path):
    elsewhere = cell(tmp_path / "elsewhere", "data.engine_process={}")
    run = build(elsewhere)
    take = run.data.update_weights

    def kill(params, version, score):
        take(params, version, score)
        if version == 5:
            os.kill(run.data._play.engine.pid, signal.SIGKILL)

    run.data.update_weights = kill
    with pytest.raises(StackError, match=r"The process of the engine 'static' \(pid \d+\) is gone: ended by SIGKILL"):
        start(run)
    train(elsewhere, resume=True)
    _check_same_run(tmp_path / "elsewhere", whole)
    steps = records(tmp_path / "elsewhere", "train")
    assert max(each["largest_mismatch"] for each in steps) < 1e-4  # the worker samples with the newest weights


SEVERAL = (
    *("objective.epochs=2", "objective.minibatches=4", "run.evaluate_every_steps=0", "checkpoint.every_steps=0"),
    *("optimizer.learning_rate=0.02", "run.steps=12"),
)


@pytest.mark.slow  # a run; packages/rl/tests/objectives counts what is clipped
def test_after_two_epochs_of_four_minibatches_tokens_are_clipped_as_numpy_counts_them(tmp_path):
    run = build(cell(tmp_path / "whole", *SEVERAL))
    counts, take = [], run.data.train_iterator

    def counted():
        iterator = take()
        inner = iterator._take

        def next_update():
            batch = inner()
            # Before the step, whose ratios are to the policy before the first update of the batch.
            logprobs = run.data._policy.score(batch)["logprobs"].astype(float)
            drawn = batch["targets"] != -100
            ratio, advantages = np.exp(logprobs - batch["old_logprobs"])[drawn], batch["advantages"][drawn]
            counts.append(np.sum((advantages > 0) & (ratio > 1.2) | (advantages < 0) & (ratio < 0.8)))
            return batch

        iterator._take = next_update
        return iterator

    run.data.train_iterator = counted
    start(run)
    steps = records(tmp_path / "whole", "train")
    tokens = [each["action_tokens"] * 4 for each in steps]
    assert [each["clipped"] * count for each, count in zip(steps, tokens, strict=True)] == pytest.approx(counts)
    assert counts[0] == counts[8] == 0 < min(counts[7], sum(counts[9:]))  # the batches begin at steps 1 and 9
    assert steps[0]["update_kl"] == pytest.approx(0, abs=1e-6) and steps[7]["update_kl"] > 1e-3


def test_packed_rows_agree_with_the_sampler_resume_bitwise_and_compile_once(tmp_path):
    wide = ("data.seq_tokens=12", "data.packed=true", "objective.minibatches=2", "run.evaluate_every_steps=0")
    whole, cut = (cell(tmp_path / name, *wide, "run.steps=5", "checkpoint.every_steps=3") for name in ("whole", "cut"))
    _, at_step = _start_and_count(build(whole))
    assert len(at_step) == 6 and at_step[4] == at_step[5]  # two batches and a checkpoint have compiled everything
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "00000005")
    train(cut, resume=True)  # from step 3, within the second batch
    ours, theirs = ({each["step"]: each for each in records(tmp_path / name, "train")} for name in ("cut", "whole"))
    # Two episodes of five tokens in each row of twelve.
    assert [each["padding"] for each in ours.values()] == pytest.approx([1 / 6] * 5)
    assert max(each["largest_mismatch"] for step, each in theirs.items() if step % 2) < 1e-4
    for name in ("loss", "reward", "grad_norm", "logprob", "mismatch", "action_tokens", "flat_groups"):
        assert [ours[step][name] for step in (4, 5)] == [theirs[step][name] for step in (4, 5)], name
    digests = [_digests(tmp_path / name / "checkpoints" / "00000005") for name in ("cut", "whole")]
    assert digests[0] == digests[1] and len(digests[0]) > 10


@pytest.mark.slow  # a run
def test_updates_stop_once_the_policy_has_moved_far(tmp_path):
    train(cell(tmp_path / "run", *SEVERAL, "objective.target_kl=1e-3"))
    skipped = [each["skipped_updates"] for each in records(tmp_path / "run", "train")]
    assert skipped[0] == 0 < max(skipped) < 8


def test_reinforce_pp_names_its_departures_and_updates_a_policy_published_in_bfloat16_in_float32(tmp_path, capfd):
    published = ("model.param_dtype=bfloat16", "optimizer.learning_rate=1e-6", "run.evaluate_every_steps=0")
    chosen = ("objective.name=reinforce_pp", "objective.kl=0.02", "run.steps=2", "checkpoint.every_steps=1")
    config = cell(tmp_path / "run", *published, *chosen)
    train(config)
    lines = capfd.readouterr().err.splitlines()
    first = next(place for place, line in enumerate(lines) if "episodes a step" in line)
    assert lines[first + 1 : first + 4] == [
        "reinforce_pp, with other settings than in its paper:",
        "  objective.kl: 0.02 (reinforce_pp has 0.01)",
        "  objective.entropy: 0.05 (reinforce_pp has 0.0)",
    ]
    steps = records(tmp_path / "run", "train")
    assert steps[0]["reward_kl"] == pytest.approx(0, abs=1e-5)  # the reference is the model at the start
    variables = build_program(config).initial_variables
    dtypes = {path: leaf.dtype for path, leaf in flatten_mapping(variables).items()}
    start, end = (
        flatten_mapping(read_params(tmp_path / "run", config.model, step=step, dtypes=dtypes)[0]) for step in (1, 2)
    )
    changed = [(start[path] != end[path]).ravel() for path in dtypes if "kernel" in path]
    assert jnp.concatenate(changed).mean() > 0.9  # of bfloat16 parameters 2%
    assert max(each["largest_mismatch"] for each in steps) < 1e-4


@pytest.mark.slow  # two runs
def test_a_run_that_draws_ahead_is_stale_by_what_it_may_be_and_goes_on(tmp_path):
    ahead = ("data.max_staleness=2", "run.evaluate_every_steps=0")
    train(cell(tmp_path / "run", *ahead, "run.steps=4"))
    train(cell(tmp_path / "run", *ahead), resume=True)
    steps = records(tmp_path / "run", "train")
    assert [each["step"] for each in steps] == list(range(1, 9))
    assert 0 < max(each["staleness"] for each in steps) <= 2
    assert all(0 < each["effective_share"] <= 1 + 1e-6 and each["correction"] <= 2 for each in steps)
    assert max(each["largest_mismatch"] for each in steps) > 1e-4  # another policy drew


@pytest.mark.slow  # a run
@pytest.mark.parametrize("engine", ["static", "llm"])
def test_with_top_p_the_trainer_has_the_distribution_that_was_drawn_from(tmp_path, engine):
    """Mean ratios of a run's own batches: with the candidates 1, without them what top-p kept."""
    drawing = (
        f"data.engine={engine}",
        "data.top_p=0.9",
        "data.groups=16",
        "data.group_size=16",
        "run.steps=2",
        "run.evaluate_every_steps=0",
    )
    run = build(cell(tmp_path / "run", *drawing, "optimizer.learning_rate=1e-12", "objective.kl=0.1"))
    batches, take = [], run.data.train_iterator

    def kept():
        iterator = take()
        inner = iterator._take
        iterator._take = lambda: batches.append(inner()) or batches[-1]
        return iterator

    run.data.train_iterator = kept
    start(run)
    for each in records(run.directory.path, "train"):
        assert each["ratio"] == pytest.approx(1, abs=0.002)
        assert each["largest_mismatch"] < 1e-4 and each["effective_share"] == pytest.approx(1, abs=1e-4)
        assert each["kl"] == pytest.approx(0, abs=1e-6)  # the reference is the model, over the same candidates
    model, _ = read_model(run.directory.path, run_config(run.directory.path))  # hardly moved
    objective, ratios = GRPOConfig(kl=0.0).build(), {}
    for name, left_out in {"with": (), "without": ("candidates",)}.items():
        batch = {key: jnp.asarray(value) for key, value in batches[0].items() if key not in left_out}
        ratios[name] = float(objective(model, batch, key=jax.random.key(0))[1]["ratio"].value)
    assert ratios["with"] == pytest.approx(1, abs=0.002)
    assert 0.88 < ratios["without"] < 0.96


@pytest.mark.slow  # two engines; packages/rl/tests/objectives/test_sampled.py has each setting
def test_the_loss_has_the_distribution_of_every_sampling_setting_on_both_engines(tmp_path):
    """Answers of several tokens; the evaluation is greedy, so its log-probabilities are the model's."""
    sizes = ("data.environment={name: sorting, max_digits: 3, held_out: 8}", "data.seq_tokens=12", "run.steps=2")
    changed = ("data.temperature=0.7", "data.presence_penalty=0.9", "data.frequency_penalty=0.5")
    changed += ("data.repetition_penalty=1.4",)
    changed += ("data.min_p=0.02", "data.top_p=0.95", "data.top_k=9")
    for engine in ("static", "llm"):
        run = build(cell(tmp_path / engine, *sizes, *changed, f"data.engine={engine}"))
        start(run)
        steps = records(tmp_path / engine, "train")
        assert max(each["largest_mismatch"] for each in steps) < 1e-4, engine
        assert steps[0]["action_tokens"] > 2, engine


@pytest.mark.slow  # a run of a larger model
def test_in_bfloat16_few_ratios_of_trainer_and_sampler_are_far_from_one(tmp_path):
    """At most 1.5% of tokens outside [0.9, 1.1], by logits that are unlike each other."""
    mask = ("objective.correction={kind: mask, low: 0.9, high: 1.1}", "objective.entropy=0")
    model = ("layers=4", "embed=128", "heads=4", "mlp=512", "initializer_std=0.2", "dtype=bfloat16")
    sizes = ("data.groups=32", "data.group_size=16", "run.steps=4", "run.evaluate_every_steps=0")
    train(cell(tmp_path / "run", *(f"model.{each}" for each in model), *mask, *sizes))
    steps = records(tmp_path / "run", "train")
    assert min(each["mismatch"] for each in steps) > 1e-4  # the two do round differently
    assert max(each["logprob"] for each in steps) > -2.2  # -2.5 is uniform
    assert sum(each["masked"] for each in steps) / len(steps) <= 0.015


def _digests(checkpoint: Path) -> dict[str, str]:
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    return {name: leaf["digest"] for name, leaf in manifest["content"]["leaves"].items()}


@pytest.mark.parametrize(
    ("override", "error", "message"),
    [
        ("data.group_sizes=4", ConfigError, r"Unknown key 'data.group_sizes'. Did you mean 'group_size'"),
        ("data.environment.name=cells", UnknownName, "Did you mean 'cell'"),
        ("data.engine=statics", UnknownName, r"Unknown name 'statics' among engines. Did you mean 'static'"),
        ("data.environment.rows=4", ConfigError, "Unknown key 'data.environment.rows'"),
        ("data.group_size=1", ConfigError, "data.group_size"),
        ("data.seq_tokens=32", ConfigError, "seq_tokens is 32, but model.max_positions is 16"),
        ("model.vocab_size=8", ConfigError, "the environment 'cell' has 12 tokens"),
        ("objective.name=causal_lm", ConfigError, "Unknown key 'objective.kl'"),
        ("objective={name: causal_lm}", ConfigError, "'causal_lm', which cannot learn from rollouts"),
        ("objective.advantage=gae", ConfigError, "grpo has no critic, which 'gae' reads"),
        ("objective={name: ppo, advantage: group}", ConfigError, "ppo trains a critic, which only 'gae' reads"),
        ("objective.minibatches=3", ConfigError, "3, which does not divide the 16 episodes"),
        ("objective={name: grpo, kl_estimator: k1}", ConfigError, "whose expectation is zero"),
        ("data.advantage=group", ConfigError, "no key 'data.advantage' any more: it is now objective.advantage"),
        ("data.weights=token", ConfigError, "no key 'data.weights' any more: it is now objective.loss_aggregation"),
        ("data.decay=0.9", ConfigError, "no key 'data.decay' any more: it is now objective.gae_lambda"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(tmp_path, override, error, message):
    with pytest.raises(error, match=message):
        train(cell(tmp_path / "run", override))
    assert not (tmp_path / "run").exists()


def test_ppo_trains_its_critic_with_the_policy_and_resumes_bitwise(tmp_path):
    """All steps are updates of one batch, whose advantages and scores the resumed run has from the journal."""
    ppo = ("objective.name=ppo", "run.evaluate_every_steps=0")
    train(cell(tmp_path / "whole", *ppo, "run.steps=4"))
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "00000004")
    train(cell(tmp_path / "cut", *ppo, "run.steps=4"), resume=True)
    *_, third, fourth = records(tmp_path / "cut", "train")
    theirs = records(tmp_path / "whole", "train")
    assert [each["step"] for each in (third, fourth)] == [3, 4]
    for name in ("loss", "reward", "value", "value_loss", "critic_grad_norm"):
        assert [each[name] for each in (third, fourth)] == [each[name] for each in theirs[2:]], name
    assert theirs[0]["value"] == 0.0 != theirs[-1]["value"]
    assert all(each["critic_grad_norm"] > 0 for each in theirs)
    digests = [_digests(tmp_path / name / "checkpoints" / "00000004") for name in ("cut", "whole")]
    assert digests[0] == digests[1] and "further/critic/params/kernel" in digests[0]

    with pytest.raises(ConversionError, match=r"made by the policy in training.*--data SOURCE"):
        quantize(tmp_path / "whole", "w4")


def briefly(completion):
    return -float(len(completion.tokens))


@pytest.fixture(scope="module")
def text_run(tmp_path_factory):
    """The config of a finished run on text, whose policy answers nothing that a reward can read."""
    path = tmp_path_factory.mktemp("text")
    (path / "text.txt").write_text("one two buckle my shoe, three four knock at the door. " * 40)
    model = {"name": "llama", "vocab_size": 270, "layers": 1, "embed": 16, "heads": 2, "mlp": 16, "dtype": "float32"}
    text = {"source": f"text:{path}/text.txt", "seq_tokens": 16, "batch_size": 2, "validation_fraction": 0.0}
    config = parse(RunConfig, {"output": str(path / "first"), "model": model, "data": text, "run": {"steps": 2}})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(path / "cache"))
        train(config)
    return config


def test_a_run_whose_answers_cannot_be_parsed_says_so_once_and_is_quantized_on_texts(text_run, tmp_path, capfd):
    (tmp_path / "sums.jsonl").write_text('{"prompt": "one and one is", "answer": "2"}\n' * 4)
    rewards = ({"name": "math", "library": "none"},)
    environment = PromptsConfig(source=str(tmp_path / "sums.jsonl"), rewards=rewards, max_tokens=4)
    data = RolloutData(environment=environment, groups=2, group_size=2, seq_tokens=32)
    settings = RunSettings(steps=5, init_from=str(text_run.output))
    config = {"model": text_run.model, "data": data, "objective": GRPOConfig(kl=0.0), "run": settings}
    with pytest.warns(UserWarning, match="learned nothing from the first 3 batches") as caught:
        start(build(RunConfig(output=str(tmp_path / "run"), **config)))
    (message,) = (str(each.message) for each in caught if "learned nothing" in str(each.message))
    assert "An answer to" in message and "sums.jsonl:" in message and "prompt: 'one and one is'" in message
    assert "100% unparsed" in message and "verdict unparsed" in message and "data.environment.rewards" in message
    steps = records(tmp_path / "run", "train")
    assert {(each["flat_groups"], each["unparsed"]) for each in steps} == {(1.0, 1.0)}
    # 4 answers of at most 4 tokens, counted from the batch.
    assert all(each["tokens"] == 4 * each["action_tokens"] for each in steps)
    assert steps[0]["truncated"] > 0
    line = next(line for line in capfd.readouterr().err.splitlines() if line.startswith("step 1/5"))
    assert re.search(r"reward 0\.00  flat groups 1\.00  unparsed 1\.00  truncated .* episodes/s  .* tokens/s", line), (
        line
    )
    for number in range(40):
        (tmp_path / f"note{number}.txt").write_text(f"one two buckle my shoe, three four and {number}. " * 100)
    texts, out = f"text:{tmp_path}/note*.txt", tmp_path / "quantized"
    result = quantize(tmp_path / "run", "w8a8", out=out, data=texts, algorithm="gptq", calibration_batches=2)
    # The loss of a language model on these texts, as the reward of rollouts is no loss of held-out targets.
    assert result.targets > 100 and 0 < result.loss_before < math.log(text_run.model.vocab_size) + 1
    assert result.loss_after == pytest.approx(result.loss_before, rel=0.02)
    assert run_config(out).objective.name == "grpo" and run_config(out).data.name == "rollouts"


@pytest.mark.slow  # the README's example is the same flow
def test_answers_to_prompts_start_from_a_run_and_keep_its_tokenizer(text_run, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "one two"}\n{"prompt": "three four"}\n{"prompt": "my shoe"}')
    environment = PromptsConfig(
        source=str(tmp_path / "prompts.jsonl"),
        held_out=str(tmp_path / "prompts.jsonl"),
        rewards=(briefly,),
        max_tokens=4,
    )
    data = RolloutData(environment=environment, groups=2, group_size=2, seq_tokens=32)
    settings = RunSettings(steps=2, init_from=str(text_run.output))
    output = tmp_path / "second"
    start(build(RunConfig(output=str(output), model=text_run.model, data=data, objective=GRPOConfig(), run=settings)))
    tokenizers = [(path / "tokenizer" / "tokenizer.json").read_bytes() for path in (Path(text_run.output), output)]
    assert tokenizers[0] == tokenizers[1]
    assert all(each["reward.briefly"] == each["reward"] != 0 for each in records(output, "train"))
    samples = [json.loads(line) for line in (output / "samples.jsonl").read_text().splitlines()]
    assert [each["turns"][0] for each in samples] == ["one two", "three four", "my shoe"]
    assert {each["step"] for each in samples} == {2} and {len(each["turns"]) for each in samples} == {2}
    assert max(each["largest_mismatch"] for each in records(output, "train")) < 1e-4
    assert "test_rollouts:briefly" in (output / "config.yaml").read_text()
