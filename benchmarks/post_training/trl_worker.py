"""Measures generation by transformers, and TRL's supervised and GRPO steps, in an environment that has TRL."""

import itertools
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from datasets import Dataset
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
    prompts,
    reward,
    serve,
    timed,
)
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

STEPS_OF_RUN = WARM_UP + STEPS + 2
# Without what differs from the other contenders by default: bfloat16, recomputed activations, logs and checkpoints.
COMMON: dict[str, Any] = {
    "output_dir": tempfile.mkdtemp(),
    "max_steps": STEPS_OF_RUN,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "bf16": False,
    "gradient_checkpointing": False,
    "use_cpu": True,
    "logging_strategy": "no",
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}


class Clock(TrainerCallback):
    """Notes the CPU and wall time at which each step begins."""

    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.times.append((time.process_time(), time.perf_counter()))

    def steps(self) -> list[tuple[float, float]]:
        """CPU and wall seconds of each step after the warm-up."""
        times = self.times[WARM_UP:]
        return [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(times)]


def characters() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(vocab={each: place for place, each in enumerate(LETTERS)}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<end>", "<pad>"])
    assert tokenizer.token_to_id("<end>") == END
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>", padding_side="left"
    )


def model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB,
        num_hidden_layers=LAYERS,
        hidden_size=EMBED,
        intermediate_size=MLP,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=SFT_TOKENS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=END + 1,
        dtype="float32",
    )
    return LlamaForCausalLM(config)


def sampling(rows: int) -> list[tuple[float, float]]:
    tokenizer, policy = characters(), model().eval()
    asked = tokenizer(prompts(rows, 0), return_tensors="pt")
    options = {
        "max_new_tokens": NEW_TOKENS,
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 0,
        "eos_token_id": VOCAB - 1,
    }

    def once() -> None:
        tokens = policy.generate(input_ids=asked.input_ids, attention_mask=asked.attention_mask, **options)
        assert tokens.shape == (rows, PROMPT_TOKENS + NEW_TOKENS)
        tokenizer.batch_decode(tokens[:, PROMPT_TOKENS:])

    for _ in range(WARM_UP):
        once()
    return [timed(once) for _ in range(STEPS)]


def sft() -> Sequence[tuple[float, float]]:
    rows = np.random.default_rng(0).integers(VOCAB, size=(STEPS_OF_RUN * SFT_ROWS, SFT_TOKENS))
    clock = Clock()
    SFTTrainer(
        model(),
        SFTConfig(**COMMON, per_device_train_batch_size=SFT_ROWS),
        train_dataset=Dataset.from_dict({"input_ids": rows.tolist()}),
        processing_class=characters(),
        callbacks=[clock],
    ).train()
    return clock.steps()


def grpo() -> Sequence[tuple[float, float]]:
    clock = Clock()
    config = GRPOConfig(
        **COMMON,
        per_device_train_batch_size=GROUPS * GROUP_SIZE,
        num_generations=GROUP_SIZE,
        max_completion_length=NEW_TOKENS,
        num_iterations=1,
        beta=0.0,
        temperature=1.0,
        top_k=0,
    )
    GRPOTrainer(
        model(),
        reward_funcs=lambda completions, **_: [reward(each) for each in completions],
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts(STEPS_OF_RUN * GROUPS, 0)}),
        processing_class=characters(),
        callbacks=[clock],
    ).train()
    return clock.steps()


if __name__ == "__main__":
    samplings = {"sampling": partial(sampling, ROWS), "sampling_64": partial(sampling, MANY_ROWS)}
    serve({"sft": sft, "grpo": grpo, **samplings})
