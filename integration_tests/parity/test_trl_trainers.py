"""Gradients of whole algorithms by a model's parameters beside TRL's trainers, from the same answers and rewards.

The trainers compute advantages, log-probabilities, loss and gradient themselves; only their sampling is replaced.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_rl.contracts import Trajectory
from stack_rl.experience import batch_of, batch_shapes, credited, update_batch
from stack_rl.objectives.policy import PolicyConfig
from stack_rl.objectives.presets import CISPOConfig, DAPOConfig, DrGRPOConfig, GRPOConfig, GSPOConfig, RLOOConfig
from stack_rl.objectives.settings import Overlong

from .conftest import PLAIN, model_of

pytestmark = [
    pytest.mark.parity,
    pytest.mark.filterwarnings("default"),  # of TRL and transformers
]

VOCAB, SEQ, LIMIT = PLAIN["vocab_size"], 12, 8
LENGTHS, GROUPS = (3, 1, 7, 2, 8, 5, 4, 6), np.repeat([0, 1], 4)
# Far apart, because TRL adds 1e-4 to the standard deviation of a group, and this implementation 1e-6.
REWARDS = (40.0, 0.0, 10.0, 30.0, 20.0, 40.0, 0.0, 5.0)
PROMPTS = ((5, 6), (7, 8, 9))
RNG = np.random.default_rng(3)
ANSWERS = [RNG.integers(3, VOCAB, length).tolist() for length in LENGTHS]
MOVED = 0.05
"""Standard deviation of the noise that stands for the first update of a batch."""


@dataclass(frozen=True)
class Case:
    """An algorithm, and the same in TRL: settings of its GRPOConfig, or of its RLOOConfig."""

    algorithm: PolicyConfig
    settings: Mapping[str, Any]
    is_rloo: bool = False

    @property
    def updates(self) -> int:
        return self.algorithm.updates


SECOND = {"epochs": 2, "minibatches": 1}
"""Compared in the second update of a batch, whose ratios are not 1."""
GRPO_BASE = {"loss_type": "grpo", "beta": 0.0, "use_bias_correction_kl": False}
CASES = {
    "grpo": Case(GRPOConfig(), GRPO_BASE | {"beta": 0.04}),
    "grpo, second update": Case(GRPOConfig(**SECOND), GRPO_BASE | {"beta": 0.04}),
    "bnpo": Case(GRPOConfig(**SECOND, kl=0.0, loss_aggregation="token"), GRPO_BASE | {"loss_type": "bnpo"}),
    "dr_grpo": Case(
        DrGRPOConfig(**SECOND),
        # Its constant is data.seq_tokens.
        GRPO_BASE | {"loss_type": "dr_grpo", "scale_rewards": "none", "max_completion_length": SEQ},
    ),
    "dapo": Case(
        DAPOConfig(**SECOND, overlong=Overlong(buffer_fraction=0.5)),
        GRPO_BASE | {"loss_type": "dapo", "epsilon_high": 0.28, "reward_weights": [1.0, 1.0]},
    ),
    "cispo": Case(CISPOConfig(**SECOND, highest=1.05), GRPO_BASE | {"loss_type": "cispo", "epsilon_high": 1.05}),
    "gspo": Case(
        GSPOConfig(**SECOND),
        GRPO_BASE | {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
    ),
    "rloo": Case(RLOOConfig(), {"beta": 0.05}, is_rloo=True),
}


class Tokens:
    """Tokenizer of single numbers, for the trainers."""

    @staticmethod
    def build() -> Any:
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        words = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {str(token): token for token in range(3, VOCAB)}
        backend = Tokenizer(models.WordLevel(words, "<unk>"))
        backend.pre_tokenizer = pre_tokenizers.Whitespace()
        return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """A Llama in PyTorch before and after an update, and its reference: their weights."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**PLAIN, "num_hidden_layers": 1})
    before, reference = (transformers.LlamaForCausalLM(config).state_dict() for _ in range(2))
    after = {name: value + MOVED * value.std() * torch.randn_like(value) for name, value in before.items()}
    return {"config": config, "before": before, "after": after, "reference": reference}


def torch_model(policies: Mapping[str, Any], name: str) -> Any:
    import transformers

    model = transformers.LlamaForCausalLM(policies["config"])
    model.load_state_dict(policies[name])
    return model


def imported(torch_model: Any, folder: Path) -> tuple[Any, Any]:
    """The config and the parameters of a model of PyTorch."""
    from stack_train.huggingface import FORMAT
    from stack_train.run.config import run_config
    from stack_train.variables.weights import read_params

    torch_model.save_pretrained(folder / "hf")
    FORMAT.import_run(folder / "hf", folder / "run")
    config = run_config(folder / "run").model
    return config, read_params(folder / "run", config)[0]


def expected_gradient(case: Case, policies: Mapping[str, Any], folder: Path) -> Any:
    """The gradient of TRL's trainer, as parameters of this implementation."""
    import transformers
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
    from trl.rewards import get_soft_overlong_punishment

    kinds = (RLOOConfig, RLOOTrainer) if case.is_rloo else (GRPOConfig, GRPOTrainer)
    args = kinds[0](
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=len(ANSWERS),
        num_generations=4,
        num_iterations=case.updates,
        report_to=[],
        use_cpu=True,
        bf16=False,
        **{"max_completion_length": LIMIT, **case.settings},
    )

    def rewards(completions: Any, **_: Any) -> list[float]:
        return list(REWARDS)

    # The part of the limit that DAPO charges is buffer_fraction, which 4 tokens of 8 are.
    charges = [get_soft_overlong_punishment(LIMIT, 4)] if case.algorithm.overlong else []
    rows = [{"prompt": " ".join(map(str, PROMPTS[group]))} for group in GROUPS]
    # The trainer reads its reference from the directory of the model.
    torch_model(policies, "before").save_pretrained(folder / "start")
    trainer = kinds[1](
        model=transformers.LlamaForCausalLM.from_pretrained(folder / "start"),
        reward_funcs=[rewards, *charges],
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=Tokens.build(),
    )
    if args.beta:
        trainer.ref_model.load_state_dict(policies["reference"])
    sampled = (ANSWERS,) if case.is_rloo else (ANSWERS, None)
    trainer._generate_single_turn = lambda *_, **__: sampled[0] if case.is_rloo else sampled
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    inputs = trainer._prepare_inputs(rows)
    if case.updates > 1:
        trainer.model.load_state_dict(policies["after"])
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    gradient = torch_model(policies, "before")
    gradient.load_state_dict({name: value.grad for name, value in trainer.model.named_parameters()})
    return imported(gradient, folder / "gradient")[1]


def logprobs_of(model: Any) -> list[np.ndarray]:
    """Log-probabilities of the answers' tokens."""
    found = []
    for group, answer in zip(GROUPS, ANSWERS, strict=True):
        tokens = jnp.asarray([[*PROMPTS[group], *answer]])
        logits = model.logits(model(tokens[:, :-1], jnp.arange(tokens.shape[1] - 1)[None]).hidden)[0]
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[0, 1:, None], axis=1)[:, 0]
        found.append(np.asarray(chosen)[-len(answer) :])
    return found


def found_gradient(algorithm: PolicyConfig, config: Any, params: Mapping[str, Any]) -> Any:
    models = {name: model_of(config, each) for name, each in params.items()}
    before, reference = logprobs_of(models["before"]), logprobs_of(models["reference"])
    trajectories, scores = [], {name: np.zeros((len(ANSWERS), SEQ), np.float32) for name in ("old", "reference")}
    for row, (group, answer, reward) in enumerate(zip(GROUPS, ANSWERS, REWARDS, strict=True)):
        prompt = PROMPTS[group]
        is_sampled = np.arange(len(prompt) + len(answer)) >= len(prompt)
        trajectories.append(
            Trajectory(
                group=int(group),
                task=int(group),
                tokens=np.asarray([*prompt, *answer], np.int32),
                sampled=is_sampled,
                logprobs=np.concatenate([np.zeros(len(prompt), np.float32), before[row]]),
                versions=np.where(is_sampled, 0, -1).astype(np.int32),
                rewards=np.asarray([*[0.0] * (len(is_sampled) - 1), reward], np.float32),
                limit_tokens=LIMIT,
            )
        )
        place = slice(len(prompt) - 1, len(prompt) - 1 + len(answer))
        scores["old"][row, place], scores["reference"][row, place] = before[row], reference[row]
    named = {"policy_logprobs": scores["old"], "reference_logprobs": scores["reference"]}
    batch = batch_of(trajectories, shapes=batch_shapes(len(ANSWERS), SEQ, algorithm), version=0)
    batch = credited(batch, trajectories, algorithm, named)
    batch = update_batch(batch, np.arange(len(ANSWERS)), trajectories, algorithm)
    objective = algorithm.build()
    auxiliary = {"reference": models["reference"]} if "reference" in objective.auxiliary_models else {}
    given = {name: jnp.asarray(each) for name, each in batch.items()}

    def loss(params: Any) -> Any:
        return objective(model_of(config, params), given, key=jax.random.key(0), **auxiliary)

    gradient, metrics = jax.grad(loss, has_aux=True)(params["after" if algorithm.updates > 1 else "before"])
    return gradient, metrics


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_is_the_trainers(name: str, policies: Mapping[str, Any], tmp_path: Path) -> None:
    case = CASES[name]
    expected = expected_gradient(case, policies, tmp_path)
    read = {each: imported(torch_model(policies, each), tmp_path / each) for each in ("before", "after", "reference")}
    config = read["before"][0]
    found, metrics = found_gradient(case.algorithm, config, {each: params for each, (_, params) in read.items()})
    if "clipped" in metrics and case.updates > 1:
        assert float(metrics["clipped"]) > 0
    for (path, ours), theirs in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        largest = np.abs(theirs).max()
        np.testing.assert_allclose(ours / largest, theirs / largest, atol=2e-5, rtol=0, err_msg=str(path))
