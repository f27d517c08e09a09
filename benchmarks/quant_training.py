"""Measures the loss that quantization adds to the quickstart's model, and the share that training leaves, with limits.

The model is trained by `examples/quickstart.yaml` and quantized afterwards. QAT trains the result for some steps to
match the logits of the float model, or on the text itself; QT trains anew. Losses are nats per token, and quantized
models run on codes. Writes `results/quant_training.md` and `.json`; exits with status 1 if a limit is exceeded.

A float model that starts at its teacher has a divergence and a gradient of zero, so steps of distillation alone lower
no loss: the gap is the distance from the teacher. Steps on text do lower it, so there the gap is the distance from a
float model that is trained on the same batches.

    nox -s bench -- quant_training
"""

import argparse
import dataclasses
import functools
import itertools
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import yaml
from flax import nnx
from report import RESULTS, circumstances, table, write

from stack_core.abi.config import load_yaml, parse
from stack_core.abi.metrics import combine_all
from stack_core.runtime.tree_paths import path_name
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
# Three values and a scale for each output: rounding adds 4.6% to the loss, 24 times as much as with int4.
W2 = ({"path": "embedding|lm_head", "weights": "int8"}, {"path": ".*", "weights": "int2"})
WEIGHTS = {"int4": W4, "int2": W2}
INT8 = ({"path": "blocks", "weights": "int8", "activations": "int8", "gradients": "int8"},)
QAT_LEARNING_RATE = 2e-4
QAT_SCHEDULE = {"warmup_steps": 10, "decay": "linear", "final_fraction": 0.0}
SMOOTHED_STEPS = 20
LIMITS = {
    "w8a8_cost": 0.002,
    "int4_cost": 0.03,
    "int4_left_by_distillation": 0.25,
    "qt_off_the_curve": 0.01,
}


def main() -> None:
    """Measures, writes the results, and exits with status 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, help="of the float model's training (the quickstart's)")
    parser.add_argument("--qat-steps", type=int, default=200)
    parser.add_argument("--text-steps", type=int, default=100, help="of QAT on text; 0 leaves it out")
    parser.add_argument("--qt-steps", type=int, default=300, help="0 leaves QT out")
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, default=list(WEIGHTS), help="types of QAT")
    parser.add_argument("--float", type=Path, help="file of the trained float model, .npz, written if it is missing")
    parser.add_argument("--batches", type=int, default=64, help="of held-out rows that losses are taken of, at most")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    started_s = time.process_time()
    measurements = measured(arguments)
    record = {**circumstances(), **measurements, "limits": LIMITS, "took_cpu_s": time.process_time() - started_s}
    write(arguments.results, "quant_training", record, markdown(record))
    sys.exit(any(exceeds(name, value) for name, value in record["figures"].items()))


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    """Trains and quantizes; returns what has limits, and the losses that it is made of."""
    mapping = load_yaml(CONFIG)
    steps = arguments.steps or mapping["run"]["steps"]
    run = parsed(mapping, steps)
    pipeline = data_of(run)
    held_out = [on_device(batch) for batch in itertools.islice(pipeline.validation_batches(), arguments.batches)]

    program = build_program(run)
    params, losses = float_model(program, pipeline, steps, arguments.float)

    def loss(params: Any, rules: Sequence[Any] | None = None) -> float:
        return loss_of(program, program.step.model.merge(params), held_out, rules)

    in_float, w8a8 = loss(params), loss(params, W8A8)
    weights = {name: WEIGHTS[name] for name in arguments.weights}
    rounded = {name: loss(params, rules) for name, rules in weights.items()}
    onward = functools.partial(aware, trained_on(mapping), params)
    distilled = {
        name: loss(onward(arguments.qat_steps, rules=rules, teaches=True), rules) for name, rules in weights.items()
    }
    figures = {
        "w8a8_cost": w8a8 / in_float - 1,
        **{f"{name}_cost": loss / in_float - 1 for name, loss in rounded.items()},
        **{f"{name}_left_by_distillation": gap_left(distilled[name], rounded[name], in_float) for name in weights},
    }
    on_text = {}
    if arguments.text_steps:
        # Steps on text lower the loss of any model: the gap is the distance from a float model that takes them, too.
        longer, learned = onward(arguments.text_steps), onward(arguments.text_steps, rules=W4)
        on_text = {"float": loss(longer), "int4": loss(longer, W4), "qat": loss(learned, W4)}
        figures["int4_left_by_text"] = gap_left(on_text["qat"], on_text["int4"], on_text["float"])
    qt_steps = min(arguments.qt_steps, steps)
    if qt_steps:
        figures["qt_off_the_curve"] = distance_of_qt(mapping, steps, pipeline, losses[:qt_steps])
    return {
        "versions": {package: version(package) for package in ("stack-quant", "stack-train", "stack-rl", "jax")},
        "steps": {"float": steps, "qat": arguments.qat_steps, "text": arguments.text_steps, "qt": qt_steps},
        "losses": {"float": in_float, "w8a8": w8a8, **rounded},
        "losses_of_distilled": distilled,
        "losses_of_trained_on_text": on_text,
        "figures": figures,
    }


def float_model(program: Program, pipeline: Pipeline, steps: int, file: Path | None) -> tuple[Any, np.ndarray]:
    """Returns the parameters and the loss of each step of the float model, from `file` if it exists."""
    shapes = program.abstract_state.params
    if file is not None and file.exists():
        with np.load(file) as stored:
            return jax.tree.map_with_path(lambda path, _: stored[path_name(path)], shapes), stored["losses"]
    state, losses = trained(program, program.init(key=jax.random.key(0)), pipeline, steps)
    params = jax.tree.map(np.asarray, state.params)
    if file is not None:
        named = {path_name(path): leaf for path, leaf in jax.tree.leaves_with_path(params)}
        np.savez(file, losses=losses, **named)
    return params, losses


def distance_of_qt(mapping: Mapping[str, Any], steps: int, pipeline: Pipeline, in_float: np.ndarray) -> float:
    """Trains by QT on the batches of the float model; returns the largest relative distance of smoothed losses.

    Args:
      steps: number of steps that the schedule spans.
      in_float: losses of the first steps of the float model, which QT repeats.
    """
    run = parsed(mapping, steps, {"quant": {"method": "qt", "rules": INT8}})
    program = build_program(run)
    _, in_int8 = trained(program, program.init(key=jax.random.key(0)), pipeline, len(in_float))
    return float(np.abs(smoothed(in_int8) / smoothed(in_float) - 1).max())


def gap_left(trained: float, rounded: float, in_float: float) -> float:
    """Returns the share of the loss added by rounding that is left after training."""
    return (trained - in_float) / (rounded - in_float)


def markdown(record: Mapping[str, Any]) -> str:
    machine, steps = record["machine"], record["steps"]
    versions = ", ".join(f"{package} {number}" for package, number in record["versions"].items())
    losses, distilled, on_text = (record[f"losses{name}"] for name in ("", "_of_distilled", "_of_trained_on_text"))
    meanings = {
        "w8a8_cost": "loss that w8a8 adds",
        "int4_cost": "loss that int4 weights add",
        "int2_cost": "loss that int2 weights add",
        "int4_left_by_distillation": f"share of int4's that {steps['qat']} steps of QAT with distillation leave",
        "int2_left_by_distillation": "share of int2's that they leave",
        "int4_left_by_text": f"share of int4's that {steps['text']} steps of QAT on text leave",
        "qt_off_the_curve": f"distance of QT in int8 from bf16 over {steps['qt']} steps, means of {SMOOTHED_STEPS}",
    }
    limits = {name: f"{limit:.1%}" for name, limit in LIMITS.items()}
    rows = [
        [meanings[name], f"{value:.2%}", limits.get(name, ""), "exceeded" if exceeds(name, value) else ""]
        for name, value in record["figures"].items()
    ]
    lines = [
        "# What quantization costs the quickstart's model",
        "",
        f"{record['date']}, {machine['cpus']} CPUs of {machine['cpu']}; {versions}; {record['took_cpu_s']:.0f} CPU-s. "
        "Validation losses are nats per token.",
        "",
        *table(["", "measured", "at most", ""], rows),
        "",
        f"- after {steps['float']} steps: " + ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items()),
        f"- after {steps['qat']} more with the logits of this float model as targets: "
        + ", ".join(f"{name} of QAT {loss:.4f}" for name, loss in distilled.items()),
    ]
    if on_text:
        lines.append(
            f"- after {steps['text']} more on text: float {on_text['float']:.4f}, int4 of it {on_text['int4']:.4f}, "
            f"int4 of QAT {on_text['qat']:.4f}"
        )
    return "\n".join(lines) + "\n"


def exceeds(name: str, figure: float) -> bool:
    return figure > LIMITS.get(name, float("inf"))


def trained_on(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the quickstart's run with the optimizer that continues from its trained model."""
    # Without decay of the weights, which would move a float model away from its teacher.
    changes = {"learning_rate": QAT_LEARNING_RATE, "schedule": QAT_SCHEDULE, "weight_decay": 0.0}
    optimizer = {**mapping["optimizer"], **changes}
    return {**mapping, "optimizer": optimizer}


def aware(
    mapping: Mapping[str, Any],
    params: Any,
    steps: int,
    *,
    rules: Sequence[Any] | None = None,
    teaches: bool = False,
) -> Any:
    """Trains a model on, by QAT if there are rules.

    Args:
      params: parameters at the start.
      teaches: True matches the logits of the float model with these parameters instead of the text.

    Returns:
      The trained parameters.
    """
    sections: dict[str, Any] = {} if rules is None else {"quant": {"method": "qat", "rules": rules}}
    with tempfile.TemporaryDirectory() as folder:
        if teaches:
            # The teacher's structure is read from its run; its values are at hand.
            (Path(folder) / "config.yaml").write_text(yaml.safe_dump(dict(mapping)))
            sections["objective"] = {"name": "logit_distill", "teacher": f"run:{folder}"}
        run = parsed(mapping, steps, sections)
        program = build_program(run)
        teacher = {"teacher": jax.tree.map(jnp.asarray, params)} if teaches else {}
        state = program.init(params, key=jax.random.key(1), auxiliary=teacher)
        return jax.tree.map(np.asarray, trained(program, state, data_of(run), steps)[0].params)


def parsed(mapping: Mapping[str, Any], steps: int, sections: Mapping[str, Any] | None = None) -> RunConfig:
    """Parses the run with a number of steps and further sections."""
    run = parse(RunConfig, {**mapping, **(sections or {})})
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
