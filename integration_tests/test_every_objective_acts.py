"""Every field of an objective changes the step that it trains, or is refused where it would have no effect."""

import dataclasses
import re
import typing

import jax
import numpy as np
import pytest

from stack_core.abi.config import parse
from stack_core.abi.errors import ConfigError
from stack_core.abi.plugins import registries
from stack_core.runtime.tree_paths import path_name
from stack_rl.contracts import Trajectory
from stack_rl.experience import batch_of, batch_shapes, credited, update_batch
from stack_rl.objectives.flow_grpo import FlowGRPOConfig
from stack_rl.objectives.policy import PolicyConfig
from stack_rl.updates import update_rows
from stack_train.objectives import as_objective, check_inputs
from stack_train.run.config import RunConfig
from stack_train.run.program import build_program

DECODER = {"name": "llama", "vocab_size": 61, "embed": 8, "heads": 2, "mlp": 8, "layers": 1, "max_positions": 32}
DECODER |= {"dtype": "float32"}
# With the losses of its router, of its multi-token prediction and of its indexer.
MIXTURE = {**DECODER, "name": "deepseek_v32", "layers": 2, "mtp_layers": 1, "index_training": "sparse"}
MIXTURE |= {"index_heads": 2, "index_dim": 4, "index_count": 3}
MIXTURE |= {"query_rank": 10, "kv_rank": 7, "nope_dim": 6, "rope_dim": 4, "value_dim": 5}
MIXTURE |= {"experts": 4, "active_experts": 2, "expert_mlp": 16, "expert_groups": 2, "kept_groups": 1}
DENOISER = {"name": "dit", "image_size": 8, "channels": 1, "classes": 10, "patch": 2, "layers": 1, "heads": 2}
AUTOENCODER = {"name": "autoencoder_kl", "channels": 1, "widths": (8, 8), "groups": 2}
TOWER = {"embed": 8, "heads": 2, "mlp": 8, "layers": 1}
TOWERS = {"name": "siglip", "vision": {**TOWER, "image_size": 8, "patch": 4}}
TOWERS |= {"text": {**TOWER, "vocab_size": 8, "max_positions": 4}}

SIZES = {"batch_size": 4, "seq_tokens": 8}
TEXT = {"name": "text", "source": "text:none", "vocab_size": 61, **SIZES}
PAIRS = {"name": "preferences", "source": "none", **SIZES}
JUDGED = {"name": "judged", "source": "none", **SIZES}
ROLLOUTS = {"name": "rollouts", "environment": {"name": "cell"}, "groups": 2, "group_size": 2, "seq_tokens": 16}
DIGITS = {"name": "digits", "batch_size": 2}
IMAGE_PAIRS = {"name": "image_pairs", "source": "none", "batch_size": 2}
IMAGE_ROLLOUTS = {"name": "image_rollouts", "reward": "statistics:mean", "groups": 2, "group_size": 2, "steps": 3}
IMAGE_TEXTS = {"name": "image_texts", "source": "none", "batch_size": 2}
RUNS = {
    "causal_lm": (MIXTURE, TEXT),
    **dict.fromkeys(("dpo", "ipo", "simpo", "orpo", "reward_model"), (DECODER, PAIRS)),
    "kto": (DECODER, JUDGED),
    "dapo": (DECODER, {**ROLLOUTS, "groups": 8}),
    "cispo": (DECODER, {**ROLLOUTS, "groups": 8}),
    **dict.fromkeys(("epsilon", "v", "flow_matching"), (DENOISER, DIGITS)),
    "consistency_distill": (DENOISER, DIGITS),
    "reconstruction": (AUTOENCODER, DIGITS),
    "diffusion_dpo": (DENOISER, IMAGE_PAIRS),
    "flow_grpo": (DENOISER, IMAGE_ROLLOUTS),
    **dict.fromkeys(("softmax_contrastive", "sigmoid_contrastive"), (TOWERS, IMAGE_TEXTS)),
}
"""The model and the data of objectives; of the others, the decoder and rollouts."""

NEEDED = {"kl": 0.1, "times": "logit_normal", "index_loss": 0.5, "denoising": {"name": "flow_matching"}}
"""What other fields act beside, which are refused without it."""

VALUES = {
    "correction": {"kind": "mask", "level": "sequence_mean", "low": 0.5},
    "critic_warmup_steps": 3,
    "denoising": {"name": "flow_matching", "shift": 3.0},
    "dual_clip": 2.0,
    "epochs": 5,
    "label_smoothing": 0.1,
    "max_guidance": 3.0,
    "minibatches": 4,
    "noise": {"betas": "cosine"},
    "overlong": {"kind": "mask"},
    "reference": "data",
    "refill_rounds": 3,
    "shift": 3.0,
    "solver_steps": 20,
}
OF_RUNS_ALONE = ("refill_rounds", "target_kl", "critic_warmup_steps")
"""Settings of a policy gradient that act in the course of a run (test_rollouts, stack-rl's own tests)."""

OF_RUNS = ("distill", "logit_distill")
"""Objectives that begin with the run of a teacher (test_roles)."""


def other_values(field, hint, value):
    """Returns values of a field beside the one that it has."""
    if field in VALUES:
        return [VALUES[field]]
    options = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return [option for option in options if option != value]
    return [not value] if hint is bool else [0.5 * value if value else 0.1]


def step(objective):
    """Returns the jaxpr of a step; or the refusal of its config."""
    model, data = RUNS.get(objective["name"], (DECODER, ROLLOUTS))
    try:
        config = parse(RunConfig, {"output": "none", "model": model, "data": data, "objective": objective})
        check_inputs(as_objective(config.objective.build()), config.batches.spec(config.model))
    except ConfigError as error:
        return str(error)
    program = build_program(config)
    traced = jax.make_jaxpr(program.step)(program.abstract_state, config.batches.spec(config.model))
    return re.sub(r"0x[0-9a-f]+", "", str(traced)), [str(x) for x in traced.consts], of_the_host(config.objective)


def of_the_host(objective):
    """Returns the batches that the host makes of fixed episodes for an algorithm, which no program shows."""
    if isinstance(objective, FlowGRPOConfig):  # one of forty images has a reward
        return objective.advantages(np.eye(1, 40)).tolist(), float(objective.denoising.schedule(4).shifted(0.5))
    if not isinstance(objective, PolicyConfig):
        return None
    rng, episodes = np.random.default_rng(0), []
    for row, length in enumerate((3, 8, 5, 6) * 4):
        sampled = np.arange(length) > 1
        numbers = {"tokens": rng.integers(61, size=length), "versions": np.zeros(length, np.int64)}
        rewards = np.where(np.arange(length) == length - 1, rng.normal(), 0)
        given = {**numbers, "sampled": sampled, "logprobs": -rng.random(length), "rewards": rewards}
        episodes.append(Trajectory(group=row // 2, task=row // 2, **given, is_cut=row % 3 == 0, limit_tokens=6))
    arrays = batch_shapes(16, 16, objective, reference=objective.reference == "data")
    scores = {name: -rng.random((16, 16)) for name in ("policy_logprobs", "reference_logprobs", "values")}
    whole = credited(batch_of(episodes, shapes=arrays, version=0), episodes, objective, scores)
    rows = [update_rows(16, objective, seed=(0, 0), update=update) for update in range(objective.updates)]
    found = [update_batch(whole, each, episodes, objective) for each in rows]
    of_run = {name: getattr(objective, name, None) for name in OF_RUNS_ALONE}
    return [{name: array.tolist() for name, array in sorted(each.items())} for each in found], of_run


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("causal_lm", "dpo", "grpo", "flow_matching") else pytest.mark.slow)
        for name in registries.objectives.names()
        if name not in OF_RUNS
    ],
)
def test_every_field_of_an_objective_changes_its_step_or_is_refused(name):
    config_class = registries.objectives[name]
    fields = [field.name for field in dataclasses.fields(config_class)]
    needed = {field: value for field, value in NEEDED.items() if field in fields}
    base, hints = parse(config_class, {"name": name, **needed}), typing.get_type_hints(config_class)
    expected = step({"name": name, **needed})
    assert not isinstance(expected, str), expected
    changes = [
        {field: other}
        for field in fields
        if field != "name"  # the registry is chosen by it
        for other in other_values(field, hints[field], getattr(base, field))
    ]
    for change in changes:
        found = step({"name": name, **needed, **change})
        assert found != expected, f"{change} has no effect"
        assert not isinstance(found, str) or next(iter(change)) in found, f"{change} is refused by {found}"


@pytest.mark.parametrize(
    ("objective", "problem"),
    [
        (
            {"name": "dr_grpo", "kl_estimator": "k3"},
            "objective.kl is 0, so objective.kl_estimator would have no effect",
        ),
        ({"name": "dr_grpo", "reference": "data"}, "objective.kl is 0, so objective.reference would have no effect"),
        ({"name": "dr_grpo", "dual_clip": 3.0}, "so objective.dual_clip would have no effect"),
        (
            {"name": "flow_matching", "times": "uniform", "logit_std": 0.5},
            "objective.logit_std would have no effect",
        ),
        ({"name": "v", "noise": {"betas": "cosine", "beta_end": 0.01}}, "so beta_end would have no effect"),
    ],
)
def test_a_field_that_another_turns_off_is_refused(objective, problem):
    assert problem in step(objective)


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ({"max_candidates": 8}, "data.max_candidates would have no effect, because every token is a candidate"),
    ],
)
def test_a_setting_of_rollouts_that_another_turns_off_is_refused(setting, problem):
    sections = {"data": {**ROLLOUTS, **setting}, "objective": {"name": "grpo"}}
    config = parse(RunConfig, {"output": "none", "model": DECODER, **sections})
    with pytest.raises(ConfigError, match=problem):
        config.batches.check(config.model)


ADAPTED = {"lora": {"lora": {"rules": {"path": ".*", "rank": 2}}}, "qat": {"quant": {"rules": "w4", "method": "qat"}}}


@pytest.mark.parametrize("transform", ADAPTED)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("dpo", "diffusion_dpo") else pytest.mark.slow)
        for name in registries.objectives.names()
        if name not in OF_RUNS
    ],
)
def test_every_objective_trains_adapters_and_quantized_weights(name, transform):
    model, data = RUNS.get(name, (DECODER, ROLLOUTS))
    model = DECODER if model is MIXTURE else model  # whose indexers adapters would freeze
    fields = {field.name for field in dataclasses.fields(registries.objectives[name])} - {"index_loss"}
    objective = {"name": name, **{field: value for field, value in NEEDED.items() if field in fields}}
    sections = {"model": model, "data": data, "objective": objective, **ADAPTED[transform]}
    config = parse(RunConfig, {"output": "none", **sections})
    program = build_program(config)
    before, batch = program.abstract_state, config.batches.spec(config.model)
    after, _ = jax.eval_shape(program.step, before, batch)
    assert [leaf.shape for leaf in jax.tree.leaves(after)] == [leaf.shape for leaf in jax.tree.leaves(before)]
    trained = [path_name(path) for path, _ in jax.tree.leaves_with_path(before.params)]
    assert all("lora" in path for path in trained) == (transform == "lora"), trained
