"""Measures stack's static engine, supervised step and GRPO step."""

import json
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

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
from tokenizers import Tokenizer, decoders, models

from stack_core.abi.config import parse
from stack_core.abi.generation import GenerationRequest, SamplingParams
from stack_core.abi.model_formats import open_for_generation
from stack_core.abi.plugins import registries
from stack_train import RunConfig, build, start
from stack_train.generation.static_engine import StaticEngineConfig

FOLDER = Path(tempfile.mkdtemp())
MODEL = {"name": "llama", "vocab_size": VOCAB, "layers": LAYERS, "embed": EMBED, "heads": HEADS, "mlp": MLP}
MODEL |= {"kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "max_positions": SFT_TOKENS, "dtype": "float32"}
MODEL |= {"tie_embeddings": True, "unroll": True}
OPTIMIZER = {"name": "adamw", "learning_rate": 1e-3, "schedule": {"warmup_steps": 0, "decay": "constant"}}
STEPS_OF_RUN = WARM_UP + STEPS + 2


def count_letters(completion: Any) -> float:
    return reward(completion.text)


def trained(name: str, sections: dict[str, Any]) -> Sequence[tuple[float, float]]:
    config = {"output": str(FOLDER / name), "optimizer": OPTIMIZER, "checkpoint": {"every_steps": 0}, **sections}
    run, made = build(parse(RunConfig, config)), list[Stamps]()
    take = run.data.train_iterator

    def stamped() -> Stamps:
        made.append(Stamps(take()))
        return made[-1]

    run.data.train_iterator = stamped
    start(run)
    return made[0].steps()


def sft() -> Sequence[tuple[float, float]]:
    """Also makes the run that the others start from."""
    tokenizer = Tokenizer(models.BPE(vocab={each: place for place, each in enumerate(LETTERS)}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<end>"])
    assert tokenizer.token_to_id("<end>") == END
    (FOLDER / "tokenizer").mkdir(exist_ok=True)
    tokenizer.save(str(FOLDER / "tokenizer" / "tokenizer.json"))
    (FOLDER / "tokenizer" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    rows = ({"prompt": each, "completion": each * 6} for each in prompts(SFT_ROWS * STEPS_OF_RUN, 0))
    (FOLDER / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"name": "chat", "source": str(FOLDER / "rows.jsonl"), "tokenizer": str(FOLDER / "tokenizer")}
    data |= {"seq_tokens": SFT_TOKENS, "batch_size": SFT_ROWS, "packed": False, "validation_fraction": 0.0}
    return trained("sft", {"model": MODEL, "data": data, "run": {"steps": STEPS_OF_RUN}})


def grpo() -> Sequence[tuple[float, float]]:
    records = ({"prompt": each} for each in prompts(GROUPS * STEPS_OF_RUN, 0))
    (FOLDER / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    environment = {"name": "prompts", "source": str(FOLDER / "prompts.jsonl"), "rewards": ["__main__:count_letters"]}
    data = {"name": "rollouts", "environment": environment | {"max_tokens": NEW_TOKENS}, "groups": GROUPS}
    data |= {"group_size": GROUP_SIZE, "seq_tokens": PROMPT_TOKENS + NEW_TOKENS}
    run = {"steps": STEPS_OF_RUN, "init_from": str(FOLDER / "sft")}
    return trained("grpo", {"model": MODEL, "data": data, "objective": {"name": "grpo", "kl": 0.0}, "run": run})


def sampling(rows: int) -> Sequence[tuple[float, float]]:
    policy = open_for_generation(str(FOLDER / "sft"))
    engine = registries.engines["static"](policy, StaticEngineConfig(rows=rows))
    engine.start()
    asked = [tuple(policy.tokenizer.encode(each)) for each in prompts(rows, 0)]
    options = {"max_tokens": NEW_TOKENS, "temperature": 1.0, "ignore_eos": True}

    def once() -> None:
        for row, prompt in enumerate(asked):
            sampling = SamplingParams(**options, seed=row)
            engine.submit(GenerationRequest(request_id=f"{row}", prompt=prompt, sampling=sampling))
        for row in range(rows):
            (update,) = engine.stream(f"{row}")
            assert len(update.tokens) == NEW_TOKENS

    for _ in range(WARM_UP):
        once()
    return [timed(once) for _ in range(STEPS)]


if __name__ == "__main__":
    samplings = {"sampling": partial(sampling, ROWS), "sampling_64": partial(sampling, MANY_ROWS)}
    serve({"sft": sft, "grpo": grpo, **samplings})
