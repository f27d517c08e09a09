"""A training run profiles itself, and all of its time is found again in the model's code."""

import random
import statistics
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stack_profile
from stack_core.abi.config import apply_overrides, load_yaml, parse
from stack_core.chips import Chip
from stack_core.programs.flops import count_flops
from stack_profile.analyses.input_pipeline import input_pipeline
from stack_profile.analyses.memory import memory
from stack_profile.analyses.ops import ops
from stack_profile.analyses.overview import overview
from stack_profile.analyses.roofline import roofline_of
from stack_profile.analyses.timeline import timeline
from stack_profile.traces.trace import load_trace
from stack_train.run.config import RunConfig
from stack_train.run.program import build_program
from stack_train.run.train import train

QUICKSTART = Path(__file__).parents[1] / "examples" / "quickstart.yaml"
CHIP = Chip(
    kind="test",
    unit="device",
    peak_flops={"float32": 1e11, "bfloat16": 1e11},
    hbm_bytes=None,
    hbm_bandwidth_bytes_s=1e10,
    on_chip_bytes=None,
    link_bandwidth_bytes_s=None,
    provenance="made up",
)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """The quickstart's model on a corpus that is read at once, five of its steps captured."""
    folder = tmp_path_factory.mktemp("quickstart")
    choose = random.Random(0).choices
    for number in range(20):
        words = choose(("alpha", "beta", "return", "yield", "(x)", "\n"), k=2000)
        (folder / f"{number}.txt").write_text(" ".join(words))
    overrides = [
        f"output={folder / 'run'}",
        f"data.source=text:{folder}/*.txt",
        "data.batch_size=4",
        "data.vocab_size=280",
        "run.steps=10",
        "run.evaluate_every_steps=0",
        "profile.first_step=4",
        "profile.steps=5",
    ]
    return parse(RunConfig, apply_overrides(load_yaml(QUICKSTART), overrides))


@pytest.fixture(scope="module")
def trace(config, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        train(config)
    return load_trace(Path(config.output) / "profile")


def test_the_steps_of_the_section_are_there(trace):
    answer = overview(trace)
    assert {row.program for row in answer.rows} == {"jit_step"}
    assert 5 <= answer.facts["steps"] <= 7
    assert answer.facts["bound_by"] is not None


def test_the_time_of_operations_has_lines_and_fills_the_steps(trace):
    facts = ops(trace, by="line").facts
    rows = ops(trace, by="line").rows
    (device,) = trace.devices
    steps = trace.steps[device.device]
    busy_ps = sum(_overlap(device.covered, step) for step in steps)
    assert facts["attributed_s"] >= 0.99 * facts["busy_s"]
    assert sum(row.self_s for row in rows) == pytest.approx(facts["busy_s"], rel=0.01)
    assert busy_ps >= 0.85 * sum(step.duration_ps for step in steps)


def test_forward_backward_and_recomputed_operations_meet_in_their_layer(trace):
    rows = {row.name: row for row in ops(trace, by="layer").rows}
    for layer in ("Decoder/Block/GroupedAttention", "Decoder/Block/FeedForward"):
        assert min(rows[layer].forward_s, rows[layer].backward_s, rows[layer].recomputed_s) > 0


def test_the_flops_of_a_step_are_those_of_its_jaxpr(config, trace):
    program = build_program(config)
    shapes = config.data.spec(config.model)
    expected = count_flops(program.step, program.abstract_state, shapes).total
    (device,) = trace.devices
    runs = {step.run for step in trace.steps[device.device]}
    per_step = [
        row.flops / row.occurrences * row.runs_expected
        for row in roofline_of(trace, CHIP).rows
        if row.flops and row.runs_expected
    ]
    assert len(runs) >= 5
    assert sum(per_step) == pytest.approx(expected, rel=0.01)


def test_the_timeline_of_a_step_goes_through_the_model_and_back_to_the_optimizer(trace):
    answer = timeline(trace, spans=60)
    model = [row for row in answer.rows if row.name.startswith("Decoder/Block")]
    forward, backward = ([row.start_s for row in model if row.direction == way] for way in ("forward", "backward"))
    assert statistics.median(forward) < statistics.median(backward)
    assert "optimizer" in {row.name for row in answer.rows[-8:]}
    assert 10 <= len(answer.rows) <= 60
    assert sum(row.self_s + row.idle_s for row in answer.rows) == pytest.approx(answer.facts["window_s"])


def test_the_stages_of_the_input_are_known_and_do_not_bound_the_run(trace):
    answer = input_pipeline(trace)
    stages = {row.stage: row for row in answer.rows}
    assert "transform=batch @" in stages["Map"].detail and stages["Map"].waited_s == 0
    assert stages["Prefetch"].waited_s > 0 and stages["next_batch"].kind == "annotation"
    assert any(row.kind == "transfer" for row in answer.rows)
    assert answer.facts["input_bound"] is False


def test_the_memory_of_the_step_holds_the_state_by_name(trace):
    rows = {row.name: row for row in memory(trace).rows}
    assert rows["state.params['embedding']"].kind == "donated argument"
    assert rows["state.params['embedding']"].size_bytes == 4096 * 192 * 4


def test_one_product_and_four_of_its_kind_show_as_one_to_four(tmp_path):
    """Small enough for one thread: what is divided among threads waits for them when the machine is busy."""

    def layer(x, _):
        x = x @ jnp.eye(64)
        for _ in range(4):
            x = x @ jnp.eye(64)
        return x, None

    run = jax.jit(lambda x: jax.lax.scan(layer, x, None, length=20)[0])
    run(jnp.eye(64)).block_until_ready()
    with stack_profile.capture(tmp_path) as captured:
        for _ in range(20):
            run(jnp.eye(64)).block_until_ready()
    (device,) = load_trace(captured.wait()).devices
    line = layer.__code__.co_firstlineno
    took = {line + 1: 0.0, line + 3: 0.0}
    for which, operation in enumerate(device.operations):
        if "dot" in operation.instruction.opcodes:
            took[operation.instruction.source().line] += np.median(device.self_ps[device.which == which])
    assert took[line + 3] == pytest.approx(4 * took[line + 1], rel=0.1)


def _overlap(covered, step):
    inside = covered.clip(step.start_ps, step.end_ps)
    return int((inside[:, 1] - inside[:, 0]).sum())
