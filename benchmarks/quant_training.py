"""What quantization costs the quickstart's model, and what training with it gives back, against their limits.

The model is trained as `examples/quickstart.yaml` says, then quantized after the training, trained on by QAT, and
trained anew by QT. All losses are nats per token; those of quantized models are of programs on codes. Writes
`results/quant_training.md` and `.json`; exits with status 1 if a limit is exceeded.

    nox -s bench -- quant_training
"""

import argparse
import dataclasses
import itertools
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from report import RESULTS, circumstances, table, write

from stack_core.abi.config import load_yaml, parse
from stack_core.abi.metrics import combine_all
from stack_quant.section import QuantConfig, Quantization
from stack_train.data.pipeline import Pipeline
from stack_train.run.config import RunConfig
from stack_train.run.program import build_program
from stack_train.step.program import Program
from stack_train.step.state import TrainState

CONFIG = Path(__file__).parents[1] / "examples" / "quickstart.yaml"
W8A8 = ({"path": ".*", "weights": "int8", "activations": "int8"},)
# Neither of the model's widths is a multiple of 128: the next coarser tiles are 160 of 320 and all of 192.
W4 = (
    {"path": "embedding|lm_head", "weights": "int8"},
    {"path": "down", "weights": "int4", "tile_size": 160},
    {"path": ".*", "weights": "int4"},
)
INT8 = ({"path": "blocks", "weights": "int8", "activations": "int8", "gradients": "int8"},)
QAT_BATCH, QAT_LEARNING_RATE, QAT_WARMUP_STEPS = 128, 2e-4, 10
SMOOTHED_STEPS = 20
LIMITS = {"w8a8_cost": 0.002, "int4_cost": 0.03, "gap_left_by_qat": 0.5, "qt_off_the_curve": 0.01}


def main() -> None:
    """Measures, writes the results, and exits with status 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, help="of the float model's training (the quickstart's)")
    parser.add_argument("--qat-steps", type=int, default=100)
    parser.add_argument("--qt-steps", type=int, default=300)
    parser.add_argument("--batches", type=int, default=64, help="of held-out rows that losses are taken of, at most")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    started_s = time.monotonic()
    record = {**circumstances(), **measured(arguments), "limits": LIMITS, "took_s": time.monotonic() - started_s}
    write(arguments.results, "quant_training", record, markdown(record))
    sys.exit(any(value > LIMITS[name] for name, value in record["figures"].items()))


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    """Trains and quantizes; returns what has limits, and the losses that it is made of."""
    mapping = load_yaml(CONFIG)
    steps = arguments.steps or mapping["run"]["steps"]
    run = parsed(mapping, steps)
    pipeline = data_of(run)
    held_out = [on_device(batch) for batch in itertools.islice(pipeline.validation_batches(), arguments.batches)]

    program = build_program(run)
    state, losses = trained(program, program.init(key=jax.random.key(0)), pipeline, steps)
    params = jax.tree.map(np.asarray, state.params)
    in_float = loss_of(program, program.step.model.merge(params), held_out, None)
    w8a8, w4 = (loss_of(program, program.step.model.merge(params), held_out, rules) for rules in (W8A8, W4))

    onward = trained_on(mapping)
    aware = build_program(parsed(onward, arguments.qat_steps, {"method": "qat", "rules": W4}))
    larger = data_of(parsed(onward, arguments.qat_steps))
    learned, _ = trained(aware, aware.init(params, key=jax.random.key(1)), larger, arguments.qat_steps)
    qat = loss_of(program, program.step.model.merge(learned.params), held_out, W4)
    # The steps themselves lower the loss: the gap is that of a float model which is trained on as long.
    plain = build_program(parsed(onward, arguments.qat_steps))
    control, _ = trained(plain, plain.init(params, key=jax.random.key(1)), larger, arguments.qat_steps)
    model = program.step.model.merge(control.params)
    longer, longer_w4 = (loss_of(program, model, held_out, rules) for rules in (None, W4))

    quantized = build_program(parsed(mapping, steps, {"method": "qt", "rules": INT8}))
    start = quantized.init(key=jax.random.key(0))
    _, in_int8 = trained(quantized, start, pipeline, min(arguments.qt_steps, steps))

    off = np.abs(smoothed(in_int8) / smoothed(losses[: len(in_int8)]) - 1)
    figures = {
        "w8a8_cost": w8a8 / in_float - 1,
        "int4_cost": w4 / in_float - 1,
        "gap_left_by_qat": (qat - longer) / (longer_w4 - longer),
        "qt_off_the_curve": float(off.max()),
    }
    return {
        "versions": {package: version(package) for package in ("stack-quant", "stack-train", "jax")},
        "steps": {"float": steps, "qat": arguments.qat_steps, "qt": len(in_int8)},
        "losses": {"float": in_float, "w8a8": w8a8, "int4": w4},
        "losses_after_qat_steps": {"float": longer, "int4": longer_w4, "qat": qat},
        "figures": figures,
    }


def markdown(record: Mapping[str, Any]) -> str:
    machine, steps = record["machine"], record["steps"]
    versions = ", ".join(f"{package} {number}" for package, number in record["versions"].items())
    before, after = record["losses"], record["losses_after_qat_steps"]
    what = {
        "w8a8_cost": "loss that w8a8 adds",
        "int4_cost": "loss that int4 weights add",
        "gap_left_by_qat": f"of what int4 adds after {steps['qat']} steps more, QAT leaves",
        "qt_off_the_curve": f"QT in int8 is off the bf16 loss of {steps['qt']} steps, means of {SMOOTHED_STEPS}",
    }
    rows = [
        [what[name], f"{value:.2%}", f"{LIMITS[name]:.1%}", "" if value <= LIMITS[name] else "exceeded"]
        for name, value in record["figures"].items()
    ]
    lines = [
        "# What quantization costs the quickstart's model",
        "",
        f"{record['date']}, {machine['cpus']} CPUs of {machine['cpu']}; {versions}; {record['took_s']:.0f} s. "
        "Validation losses are nats per token.",
        "",
        *table(["", "measured", "at most", ""], rows),
        "",
        f"- after {steps['float']} steps: float {before['float']:.4f}, w8a8 {before['w8a8']:.4f}, "
        f"int4 {before['int4']:.4f}",
        f"- after {steps['qat']} more: float {after['float']:.4f}, int4 of it {after['int4']:.4f}, "
        f"int4 of QAT {after['qat']:.4f}, which is {after['qat'] - before['float']:+.4f} to the float model before",
    ]
    return "\n".join(lines) + "\n"


def trained_on(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """The quickstart's run with the batches and the schedule for training on what it has trained."""
    schedule = {**mapping["optimizer"]["schedule"], "warmup_steps": QAT_WARMUP_STEPS}
    optimizer = {**mapping["optimizer"], "learning_rate": QAT_LEARNING_RATE, "schedule": schedule}
    return {**mapping, "data": {**mapping["data"], "batch_size": QAT_BATCH}, "optimizer": optimizer}


def parsed(mapping: Mapping[str, Any], steps: int, quant: Mapping[str, Any] | None = None) -> RunConfig:
    """The run of so many steps, with a recipe."""
    run = parse(RunConfig, {**mapping, **({} if quant is None else {"quant": quant})})
    return dataclasses.replace(run, run=dataclasses.replace(run.run, steps=steps))


def data_of(run: RunConfig) -> Pipeline:
    return run.data.build(seed=run.run.seed, model=run.model)


def trained(program: Program, state: TrainState, pipeline: Pipeline, steps: int) -> tuple[TrainState, np.ndarray]:
    """The state after so many steps, and the loss of each; batches are the same for all trainers."""
    batches = map(on_device, pipeline.train_iterator())
    first = next(batches)
    step, losses = program.compile(first), []
    for batch in itertools.chain([first], itertools.islice(batches, steps - 1)):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"].value)
    return state, np.asarray(jax.device_get(losses))


def on_device(batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Without what says where the rows are from."""
    return {name: array for name, array in batch.items() if name != "row_ids"}


def loss_of(program: Program, model: nnx.Module, batches: Sequence[Any], rules: Sequence[Any] | None) -> float:
    """The mean loss of a model, or of what it is quantized to."""
    transform = None if rules is None else Quantization(parse(QuantConfig, {"rules": rules}), batches[0])
    if transform is not None:
        model = transform.apply(model)
    graph, state = nnx.split(model)
    key = jax.random.key(0)

    @jax.jit
    def metrics(state: Any, batch: Any) -> Any:
        merged = nnx.merge(graph, state)
        if transform is None:
            return program.step.objective(merged, batch, key=key)[1]
        return transform.call(program.step.objective, merged, batch, key=key)[1]

    return float(combine_all([metrics(state, batch) for batch in batches])["loss"])


def smoothed(losses: np.ndarray) -> np.ndarray:
    """Means over neighbours: single batches differ by more than any rounding does."""
    width = min(SMOOTHED_STEPS, len(losses))
    return np.convolve(losses, np.full(width, 1 / width), mode="valid")


if __name__ == "__main__":
    main()
