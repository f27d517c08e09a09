"""The losses of post-training beside TRL's own on the same tensors: values, and gradients by log-probabilities.

TRL computes them in methods of its trainers, which are called here with what they read of a trainer.
"""

from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_rl.math import advantages, distillation, kl, policy, preference, sequences
from stack_rl.math.weights import token_weights

pytestmark = pytest.mark.parity

RNG = np.random.default_rng(0)
ROWS, SEQ, LONGEST = 6, 7, 9
LENGTHS = np.array([7, 3, 5, 1, 4, 6])
GROUPS = np.array([0, 0, 0, 1, 1, 1])
MASK = np.arange(SEQ) < LENGTHS[:, None]
LOGPROBS = -RNG.gamma(2.0, 0.6, (ROWS, SEQ))
OLD = LOGPROBS + RNG.normal(0, 0.3, (ROWS, SEQ))
REFERENCE = LOGPROBS + RNG.normal(0, 0.5, (ROWS, SEQ))
ADVANTAGES = RNG.normal(0, 1, ROWS)
OF_TOKENS = ADVANTAGES[:, None] * MASK
SEGMENTS = MASK.astype(np.int32)
REWARDS = RNG.normal(0, 1, (ROWS // 2, 2))


def of_trainer(**settings: Any) -> SimpleNamespace:
    """What TRL's methods read of a trainer with one process, in evaluation."""
    same = lambda values, **_: values
    accelerator = SimpleNamespace(
        device="cpu", num_processes=1, gather=same, gather_for_metrics=same, reduce=same, sync_gradients=True
    )
    usual = {
        "accelerator": accelerator,
        "model": SimpleNamespace(training=False),
        "aux_loss_enabled": False,
        "_metrics": {"eval": defaultdict(list)},
        "_total_train_tokens": 0,
    }
    return SimpleNamespace(**{**usual, **settings})


def check(
    ours: Callable[[jax.Array], jax.Array], theirs: Callable[[Any], Any], x: np.ndarray, *, gradient_alone: bool = False
) -> None:
    """Compares a loss of `x`, in double precision, and its gradient."""
    import torch

    tensor = torch.tensor(x, requires_grad=True)
    found = theirs(tensor)
    (expected,) = torch.autograd.grad(found, tensor)
    with jax.enable_x64(True):
        value, gradient = jax.value_and_grad(ours)(jnp.asarray(x))
    if not gradient_alone:
        np.testing.assert_allclose(value, found.item(), rtol=1e-6)
    np.testing.assert_allclose(gradient, expected.numpy(), rtol=1e-5, atol=1e-9)


def weights(name: str) -> np.ndarray:
    return MASK * token_weights(name, LENGTHS, GROUPS, max_tokens=LONGEST)[:, None]


def clipped(x: jax.Array, *, aggregation: str, high: float = 0.2, beta: float = 0.0, whole: bool = False) -> jax.Array:
    mask = jnp.asarray(MASK)
    moved = policy.log_ratio(x, jnp.asarray(OLD), mask)
    ratios = sequences.sequence_mean(moved, mask, jnp.asarray(SEGMENTS)) if whole else moved
    losses = policy.clipped_loss(ratios, jnp.asarray(OF_TOKENS), low=0.2, high=high)
    if beta:
        losses += beta * kl.corrected(kl.k3(x, jnp.asarray(REFERENCE)), moved)
    return jnp.sum(jnp.where(mask, weights(aggregation) * losses, 0))


def cispo(x: jax.Array) -> jax.Array:
    moved = policy.log_ratio(x, jnp.asarray(OLD), jnp.asarray(MASK))
    losses = policy.cispo_loss(x, moved, jnp.asarray(OF_TOKENS), highest=1.2)
    return jnp.sum(weights("token") * losses)


def of_grpo(x: Any, **settings: Any) -> Any:
    import torch
    from trl.trainer.grpo_trainer import GRPOTrainer

    chosen = {"loss_type": "grpo", "importance_sampling_level": "token", "epsilon_high": 0.2, "beta": 0.0} | settings
    trainer = of_trainer(
        _get_per_token_logps_and_entropies=lambda *_, **__: (x, torch.zeros(ROWS, SEQ), None),
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        epsilon_low=0.2,
        args=SimpleNamespace(use_bias_correction_kl=True, delta=None),
        use_vllm=False,
        max_completion_length=LONGEST,
        _entropy_bonus_enabled=False,
        **chosen,
    )
    tokens = torch.zeros(ROWS, SEQ, dtype=torch.long)
    inputs = {
        "prompt_ids": tokens,
        "prompt_mask": tokens,
        "completion_ids": tokens,
        "completion_mask": torch.tensor(MASK),
        "advantages": torch.tensor(ADVANTAGES),
        "old_per_token_logps": torch.tensor(OLD),
        "ref_per_token_logps": torch.tensor(REFERENCE),
        "num_items_in_batch": torch.tensor(float(LENGTHS.sum())),
    }
    return GRPOTrainer._compute_loss(trainer, trainer.model, inputs)


POLICY = {
    "grpo with corrected k3": (
        lambda x: clipped(x, aggregation="sequence", beta=0.3),
        lambda x: of_grpo(x, beta=0.3),
    ),
    "dr_grpo": (lambda x: clipped(x, aggregation="constant"), lambda x: of_grpo(x, loss_type="dr_grpo")),
    "dapo": (
        lambda x: clipped(x, aggregation="token", high=0.28),
        lambda x: of_grpo(x, loss_type="dapo", epsilon_high=0.28),
    ),
    "gspo": (
        lambda x: clipped(x, aggregation="sequence", whole=True),
        lambda x: of_grpo(x, importance_sampling_level="sequence"),
    ),
    "cispo": (cispo, lambda x: of_grpo(x, loss_type="cispo", epsilon_high=1.2)),
}


@pytest.mark.parametrize("name", POLICY)
def test_policy_gradients(name: str) -> None:
    check(*POLICY[name], LOGPROBS)


def test_rloo_on_policy_has_the_same_gradient() -> None:
    """TRL clips the ratio of a whole answer, whose value on policy is another's; its gradient is that of REINFORCE."""
    from trl.trainer.rloo_trainer import RLOOTrainer

    def theirs(x: Any) -> Any:
        import torch

        trainer = of_trainer(
            _get_per_token_logps_and_entropies=lambda *_, **__: (x, torch.zeros(ROWS, SEQ), None),
            epsilon_low=0.2,
            epsilon_high=0.2,
        )
        tokens = torch.zeros(ROWS, SEQ, dtype=torch.long)
        inputs = dict.fromkeys(("prompt_ids", "prompt_mask", "completion_ids"), tokens)
        inputs |= {"completion_mask": torch.tensor(MASK), "advantages": torch.tensor(ADVANTAGES)}
        inputs |= {"old_logps": (x.detach() * torch.tensor(MASK)).sum(1)}
        return RLOOTrainer._compute_loss(trainer, trainer.model, inputs)

    def ours(x: jax.Array) -> jax.Array:
        return jnp.sum(weights("sum") / ROWS * policy.reinforce_loss(x, jnp.asarray(OF_TOKENS)))

    check(ours, theirs, LOGPROBS, gradient_alone=True)


def test_group_advantages() -> None:
    """As TRL writes them, with its epsilon of 1e-4."""
    import torch

    rewards = torch.tensor(ADVANTAGES).view(-1, 3)
    mean, deviation = rewards.mean(1, keepdim=True), rewards.std(1, keepdim=True)
    found = advantages.group_normalized(ADVANTAGES, GROUPS, epsilon=1e-4)
    np.testing.assert_allclose(found, ((rewards - mean) / (deviation + 1e-4)).flatten(), rtol=1e-6)


def of_pairs(x: Any, loss_type: str, **settings: Any) -> Any:
    """TRL's loss of pairs; `x` holds the tokens' log-probabilities, of chosen answers first."""
    import torch
    from trl.trainer.dpo_trainer import DPOTrainer

    def outputs(logprobs: Any) -> Any:
        zeros = torch.zeros(ROWS, SEQ, dtype=torch.float64)
        masked = logprobs * torch.tensor(MASK)
        return SimpleNamespace(log_probs=masked, entropy=zeros, mean_logits=zeros, is_top1=zeros > 0)

    trainer = of_trainer(
        ld_alpha=None,
        precompute_ref_logps=False,
        args=SimpleNamespace(gradient_checkpointing=False, gradient_checkpointing_kwargs=None),
        ref_model=lambda **_: outputs(torch.tensor(REFERENCE)),
        f_divergence_type="reverse_kl",
        loss_types=[loss_type],
        loss_weights=[1.0],
        use_weighting=False,
        beta=0.3,
        **settings,
    )
    members = {"forward": lambda self, **_: outputs(x), "is_gradient_checkpointing": False}
    trainer.model = type("Model", (torch.nn.Module,), members)().eval()
    tokens = torch.zeros(ROWS, SEQ + 1, dtype=torch.long)
    mask = torch.cat([torch.zeros(ROWS, 1, dtype=torch.bool), torch.tensor(MASK)], 1).long()
    inputs = {"input_ids": tokens, "attention_mask": tokens, "completion_mask": mask}
    return DPOTrainer._compute_loss(trainer, trainer.model, inputs, False)


def sums(values: Any) -> jax.Array:
    """The answers of each pair, the chosen first."""
    return jnp.sum(jnp.where(MASK, values, 0), axis=1).reshape(2, -1).T


def means(values: Any) -> jax.Array:
    return sums(values) / LENGTHS.astype(np.float64).reshape(2, -1).T


PAIRS = {
    "dpo": (
        lambda x: jnp.mean(preference.dpo_loss(preference.dpo_margin(sums(x), sums(REFERENCE), beta=0.3))),
        lambda x: of_pairs(x, "sigmoid"),
    ),
    "ipo, of means": (  # TRL's departure from the paper
        lambda x: jnp.mean(preference.ipo_loss(preference.dpo_margin(means(x), means(REFERENCE), beta=1.0), beta=0.3)),
        lambda x: of_pairs(x, "ipo"),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_beside_a_reference(name: str) -> None:
    check(*PAIRS[name], LOGPROBS)


def test_simpo() -> None:
    from trl.experimental.cpo.cpo_trainer import CPOTrainer

    def theirs(x: Any) -> Any:
        settings = {"alpha": 0.0, "loss_type": "simpo", "beta": 2.5, "simpo_gamma": 0.7, "label_smoothing": 0.0}
        return CPOTrainer.cpo_loss(of_trainer(**settings), x[:, 0], x[:, 1])[0].mean()

    check(lambda x: jnp.mean(preference.simpo_loss(x, beta=2.5, gamma=0.7)), theirs, -np.abs(REWARDS))


def test_the_odds_ratio_of_orpo() -> None:
    """TRL computes it in float32; the likelihood of the chosen answer it adds elsewhere."""
    import torch
    from trl.experimental.orpo.orpo_trainer import ORPOTrainer

    pairs = -np.abs(REWARDS) - 0.1
    theirs = ORPOTrainer.odds_ratio_loss(of_trainer(beta=0.4), *torch.tensor(pairs).T)[0]
    ours = preference.orpo_loss(jnp.asarray(pairs), weight=0.4) + pairs[:, 0]
    np.testing.assert_allclose(ours, -theirs, rtol=1e-5)


def test_reward_models() -> None:
    from trl.trainer.reward_trainer import RewardTrainer

    def theirs(x: Any) -> Any:
        trainer = of_trainer(args=SimpleNamespace(center_rewards_coefficient=0.01))
        trainer.model = model = type("Model", (), {"training": False, "__call__": lambda *_, **__: outputs})()
        outputs = SimpleNamespace(logits=x.T.reshape(-1, 1))
        return RewardTrainer.compute_loss(trainer, model, {"margin": 0.3})

    check(lambda x: jnp.mean(preference.reward_loss(x, margin=0.3, centre=0.01)), theirs, REWARDS)


@pytest.mark.parametrize("beta", [0.3, 0.0, 1.0])
def test_distillation(beta: float) -> None:
    """TRL's beta of 0 and 1 are the two KL divergences themselves."""
    import torch
    from trl.experimental.gkd.gkd_trainer import GKDTrainer

    student, teacher = RNG.normal(0, 2, (2, 2, 3, 5))

    def ours(x: jax.Array) -> jax.Array:
        if beta in (0.0, 1.0):
            divergence = distillation.forward_kl if beta == 0 else distillation.reverse_kl
            return jnp.sum(divergence(x, jnp.asarray(teacher), temperature=1.5)) / 1.5**2 / 2
        return jnp.sum(distillation.generalized_jsd(x, jnp.asarray(teacher), beta=beta, temperature=1.5)) / 2

    def theirs(x: Any) -> Any:
        return GKDTrainer.generalized_jsd_loss(x, torch.tensor(teacher), beta=beta, temperature=1.5)

    check(ours, theirs, student)
