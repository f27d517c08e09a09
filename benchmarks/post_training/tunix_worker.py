"""Measures Tunix's sampler, supervised step and GRPO step, in an environment that has Tunix."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sizes import (
    EMBED,
    END,
    GROUP_SIZE,
    GROUPS,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    LETTERS,
    MANY_ROWS,
    MLP,
    NEW_TOKENS,
    PROMPT_TOKENS,
    ROWS,
    SFT_ROWS,
    SFT_TOKENS,
    STEPS,
    VOCAB,
    WARM_UP,
    Stamps,
    prompts,
    reward,
    serve,
    timed,
)
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.models.llama3.model import Llama3, ModelConfig
from tunix.rl import rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout import base_rollout
from tunix.sft import peft_trainer

MESH = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


class Characters:
    """A tokenizer as Tunix asks for one."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return [LETTERS.index(each) for each in text]

    def decode(self, ids: Any, **_: Any) -> str:
        return "".join(LETTERS[each] for each in np.asarray(ids).tolist() if each < len(LETTERS))

    def bos_id(self) -> int:
        return 0

    def eos_id(self) -> int:
        return END

    def pad_id(self) -> int:
        return END + 1


def model() -> Any:
    config = ModelConfig(
        num_layers=LAYERS,
        vocab_size=VOCAB,
        embed_dim=EMBED,
        hidden_dim=MLP,
        num_heads=HEADS,
        head_dim=HEAD_DIM,
        num_kv_heads=KV_HEADS,
        rope_theta=10_000,
        norm_eps=1e-6,
        weight_tying=True,
    )
    made = Llama3(config, rngs=nnx.Rngs(0))
    graph, state = nnx.split(made)
    return nnx.merge(graph, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), state))


def sampling(rows: int) -> list[tuple[float, float]]:
    sampler = Sampler(
        model(),
        Characters(),
        CacheConfig(
            cache_size=PROMPT_TOKENS + NEW_TOKENS + 1, num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM
        ),
    )
    asked = prompts(rows, 0)

    def once() -> None:
        found = sampler(asked, max_generation_steps=NEW_TOKENS, temperature=1.0, top_p=1.0, eos_tokens=[VOCAB - 1])
        jax.block_until_ready(found.tokens)

    for _ in range(WARM_UP):
        once()
    return [timed(once) for _ in range(STEPS)]


def sft() -> list[tuple[float, float]]:
    rng = np.random.default_rng(0)

    def inputs(batch: peft_trainer.TrainingInput) -> dict[str, Any]:
        seq = batch.input_tokens.shape[1]
        causal = jnp.broadcast_to(jnp.tril(jnp.ones((seq, seq), bool)), (SFT_ROWS, seq, seq))
        positions = jnp.broadcast_to(jnp.arange(seq), (SFT_ROWS, seq))
        return {
            "input_tokens": batch.input_tokens,
            "input_mask": batch.input_mask,
            "positions": positions,
            "attention_mask": causal,
        }

    tokens = rng.integers(VOCAB, size=(WARM_UP + STEPS + 2, SFT_ROWS, SFT_TOKENS)).astype(np.int32)
    data = Stamps(peft_trainer.TrainingInput(each, np.ones_like(each)) for each in tokens)
    trainer = peft_trainer.PeftTrainer(
        model(), optax.adamw(1e-3), peft_trainer.TrainingConfig(eval_every_n_steps=10**9)
    )
    with MESH:
        trainer.with_gen_model_input_fn(inputs).train(data)
    return data.steps()


def grpo() -> list[tuple[float, float]]:
    actor = model()
    roles = rl_cluster.Role
    cluster = rl_cluster.RLCluster(
        actor=actor,
        tokenizer=Characters(),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh={roles.ACTOR: MESH, roles.REFERENCE: MESH, roles.ROLLOUT: MESH},
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.adamw(1e-3), eval_every_n_steps=10**9, max_steps=WARM_UP + STEPS + 2
            ),
            rollout_config=base_rollout.RolloutConfig(
                max_tokens_to_generate=NEW_TOKENS,
                max_prompt_length=PROMPT_TOKENS,
                kv_cache_size=PROMPT_TOKENS + NEW_TOKENS + 1,
                temperature=1.0,
                top_p=1.0,
            ),
        ),
    )
    config = GRPOConfig(num_generations=GROUP_SIZE, num_iterations=1, beta=0.0)
    learner = GRPOLearner(
        rl_cluster=cluster,
        algo_config=config,
        reward_fns=lambda prompts, completions, **_: [reward(each) for each in completions],
    )
    data = Stamps({"prompts": np.array(prompts(GROUPS, seed))} for seed in range(WARM_UP + STEPS + 2))
    learner.train(data)
    return data.steps()


if __name__ == "__main__":
    samplings = {"sampling": partial(sampling, ROWS), "sampling_64": partial(sampling, MANY_ROWS)}
    serve({"sft": sft, "grpo": grpo, **samplings})
