"""What quantization costs the quickstart's model, and what training with it gives back, against their limits.

The model is trained as `examples/quickstart.yaml` says, then quantized after the training, trained on by QAT, and
trained anew by QT. All losses are nats per token; those of quantized models are of programs on codes.

    nox -s bench -- quant_training
"""

import argparse
import dataclasses
import itertools
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from stack_core.config import load_yaml, parse
from stack_quant import Rule, quantize_model
from stack_quant.section import QUANTIZER
from stack_train.config import RunConfig
from stack_train.data.pipeline import Pipeline, build_pipeline
from stack_train.run import build_trainer
from stack_train.step import LanguageModelTrainer, TrainState

CONFIG = Path(__file__).parents[1] / "examples" / "quickstart.yaml"
W8A8 = ({"path": ".*", "weights": "int8", "activations": "int8"},)
# The width of the model, 192, is no multiple of 128.
W4 = (
    {"path": "embedding|head", "weights": "int8"},
    {"path": "down", "weights": "int4", "tile_size": 128},
    {"path": ".*", "weights": "int4", "tile_size": 96},
)
INT8 = ({"path": "blocks", "weights": "int8", "activations": "int8", "gradients": "int8"},)
QAT_LEARNING_RATE = 3e-4
SMOOTHED_STEPS = 20


def main() -> None:
    """Prints a line for each limit; exits with status 1 if one is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, help="of the float model's training (the quickstart's)")
    parser.add_argument("--qat-steps", type=int, default=100)
    parser.add_argument("--qt-steps", type=int, default=300)
    parser.add_argument("--batches", type=int, default=64, help="of held-out rows that losses are taken of, at most")
    arguments = parser.parse_args()
    mapping = load_yaml(CONFIG)
    steps = arguments.steps or mapping["trainer"]["steps"]
    started_s = time.monotonic()
    run = parsed(mapping, steps)
    pipeline = build_pipeline(run.data, seed=run.trainer.seed)
    held_out = [on_device(batch) for batch in itertools.islice(pipeline.validation_batches(), arguments.batches)]

    trainer = build_trainer(run)
    state, losses = trained(trainer, trainer.init(key=jax.random.key(0)), pipeline, steps)
    params = jax.tree.map(np.asarray, state.params)
    in_float = loss_of(trainer, trainer.model(params), held_out, None)
    w8a8, w4 = (loss_of(trainer, trainer.model(params), held_out, rules) for rules in (W8A8, W4))

    aware = build_trainer(parsed(mapping, arguments.qat_steps, {"method": "qat", "rules": W4}, QAT_LEARNING_RATE))
    learned, _ = trained(aware, aware.init_from(params, key=jax.random.key(1)), pipeline, arguments.qat_steps)
    qat = loss_of(trainer, trainer.model(learned.params), held_out, W4)
    # The steps themselves lower the loss: the gap is that of a float model which is trained on as long.
    plain = build_trainer(parsed(mapping, arguments.qat_steps, None, QAT_LEARNING_RATE))
    control, _ = trained(plain, plain.init_from(params, key=jax.random.key(1)), pipeline, arguments.qat_steps)
    longer, longer_w4 = (loss_of(trainer, trainer.model(control.params), held_out, rules) for rules in (None, W4))

    quantized = build_trainer(parsed(mapping, steps, {"method": "qt", "rules": INT8}))
    start = quantized.init(key=jax.random.key(0))
    _, in_int8 = trained(quantized, start, pipeline, min(arguments.qt_steps, steps))

    off = np.abs(smoothed(in_int8) / smoothed(losses[: len(in_int8)]) - 1)
    print(f"float {in_float:.4f}, w8a8 {w8a8:.4f}, int4 {w4:.4f}")
    print(
        f"after {arguments.qat_steps} steps more: float {longer:.4f}, int4 of it {longer_w4:.4f}, int4 of QAT {qat:.4f}"
    )
    checks = [
        limited("w8a8 costs", w8a8 / in_float - 1, most=0.002),
        limited("int4 weights cost", w4 / in_float - 1, most=0.03),
        limited("of the gap after as many steps in float QAT leaves", (qat - longer) / (longer_w4 - longer), most=0.5),
        limited(f"QT int8 is off the bf16 curve, means of {SMOOTHED_STEPS} steps, by", off.max(), most=0.01),
    ]
    print(f"{time.monotonic() - started_s:.0f} s")
    sys.exit(not all(checks))


def parsed(
    mapping: Mapping[str, Any], steps: int, quant: Mapping[str, Any] | None = None, learning_rate: float | None = None
) -> RunConfig:
    """The quickstart's run, of so many steps; with a recipe, and for training on with another learning rate."""
    run = parse(RunConfig, {**mapping, **({} if quant is None else {"quant": quant})})
    run = dataclasses.replace(run, trainer=dataclasses.replace(run.trainer, steps=steps))
    run = dataclasses.replace(run, data=dataclasses.replace(run.data, vocab_size=run.model.vocab_size))
    if learning_rate is None:
        return run
    return dataclasses.replace(run, optimizer=dataclasses.replace(run.optimizer, learning_rate=learning_rate))


def trained(
    trainer: LanguageModelTrainer, state: TrainState, pipeline: Pipeline, steps: int
) -> tuple[TrainState, np.ndarray]:
    """The state after so many steps, and the loss of each; batches are the same for all trainers."""
    batches = map(on_device, pipeline.train_iterator())
    first = next(batches)
    step, losses = trainer.compile(first), []
    for batch in itertools.chain([first], itertools.islice(batches, steps - 1)):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    return state, np.asarray(jax.device_get(losses))


def on_device(batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Without what says where the rows are from."""
    return {name: array for name, array in batch.items() if name != "row_ids"}


def loss_of(
    trainer: LanguageModelTrainer, model: nnx.Module, batches: Sequence[Any], rules: Sequence[Any] | None
) -> float:
    """The mean loss of a model, or of what it is quantized to."""
    if rules is not None:
        model = quantize_model(model, [Rule(**rule) for rule in rules], batches[0])
    graph, state = nnx.split(model)
    key = jax.random.key(0)

    @jax.jit
    def metrics(state: Any, batch: Any) -> Any:
        merged = nnx.merge(graph, state)
        if rules is None:
            return trainer.objective(merged, batch, key=key)[1]
        return QUANTIZER.call(trainer.objective, merged, batch, key=key)[1]

    found = jax.device_get([metrics(state, batch) for batch in batches])
    weights = [float(one["weight"]) for one in found]
    return float(np.average([float(one["loss"]) for one in found], weights=weights))


def smoothed(losses: np.ndarray) -> np.ndarray:
    """Means over neighbours: single batches differ by more than any rounding does."""
    width = min(SMOOTHED_STEPS, len(losses))
    return np.convolve(losses, np.full(width, 1 / width), mode="valid")


def limited(what: str, value: float, *, most: float) -> bool:
    print(f"{'ok ' if value <= most else 'BAD'} {what} {value:.2%}, at most {most:.1%}")
    return value <= most


if __name__ == "__main__":
    main()
