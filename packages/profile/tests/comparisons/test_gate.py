"""What grew beyond what is allowed is a regression, with its line; what the data do not decide is called so."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_profile.comparisons.costs import compiled_costs
from stack_profile.comparisons.gate import GateSide, gate
from stack_profile.errors import ProfileError
from stack_profile.traces.hlo import read_program
from stack_profile.traces.trace import trace_of
from stack_profile.traces.xplane import read_space

LAYERS = ("one", "two", "three", "four")


def step(x):
    for layer in LAYERS:
        with jax.named_scope(layer):
            x = jnp.sort(x, axis=len(layer) % 2)
    return x


@pytest.fixture(scope="module")
def program(build):
    """A program's HLO, and the names of its sorts in the order of the layers."""
    proto = build.hlo_proto(jax.jit(step).lower(jnp.ones((4, 8))).compile())
    found = read_program(proto, 7).instructions.values()
    sorts = {each.layer: each.name for each in found if each.opcode == "sort"}
    return proto, [sorts[layer] for layer in LAYERS]


@pytest.fixture
def side(build, program):
    """Captures in which the sorts of the layers take 1,000 microseconds in the mean, or times a factor."""
    proto, names = program
    rng = np.random.default_rng(0)

    def captured(factors=(1, 1, 1, 1), *, captures=1, steps=20, noise=0.01, idle=100):
        times = [np.array(factors)[:, None] * 1000 * (1 + noise * rng.normal(size=(4, steps))) for _ in range(captures)]
        traces = [
            build.steps(dict(zip(names, each.astype(int), strict=True)), proto=proto, idle=idle) for each in times
        ]
        return GateSide.of_traces([trace_of([read_space(trace)]) for trace in traces])

    return captured


def only(answer):
    (row,) = answer.rows
    return row


def step_time(base, new, **options):
    return only(gate(base, new, metrics=["step_time"], **options))


@pytest.mark.parametrize("captures", [1, 3])
def test_a_slower_operation_is_a_regression_of_its_line(side, program, captures):
    row = step_time(side(captures=captures), side((1, 1.3, 1, 1), captures=captures))
    assert row.verdict == "regressed" and row.low_base_share > 0.05
    assert row.change_base_share == pytest.approx(0.3 / 4.1, abs=0.01)
    assert re.match(rf"{re.escape(__file__)}:\d+ \(two, jit_step: {program[1][1]}\): \S+ .s -> 1.3 ms", row.at_fault[0])
    assert len(row.at_fault) == 1


def test_what_is_allowed_is_no_regression(side):
    base, new = side(), side((1.02, 1.02, 1.02, 1.02))
    assert step_time(base, new).verdict == "within"
    assert step_time(base, new).at_fault == ()
    assert step_time(base, new, allowed={"step_time": 0.005}).verdict == "regressed"


def test_what_the_steps_do_not_tell_is_undecided(side):
    assert step_time(side(steps=1), side(steps=1)).verdict == "undecided"
    assert step_time(side(steps=1), side(steps=1)).low_base_share is None
    noisy = step_time(side(steps=5, noise=0.3), side(steps=5, noise=0.3))
    assert noisy.verdict == "undecided" and noisy.high_base_share > 0.03


def test_time_in_which_nothing_runs_is_at_fault_where_it_grew(side):
    row = step_time(side(), side(idle=1100))
    assert row.verdict == "regressed" and row.at_fault[0].startswith("idle time of the devices: 1 ms more")


def test_where_all_operations_are_slower_none_is_at_fault(side):
    row = step_time(side(), side((1.2, 1.2, 1.2, 1.2)))
    assert row.verdict == "regressed" and row.at_fault[0].startswith("no operation stands out from the others")


def test_a_change_of_the_mean_that_the_verdict_leaves_out_is_noted(side):
    base, new = side(steps=40), side(steps=40)
    stalled = new.step_s[0] * np.where(np.arange(len(new.step_s[0])) % 8, 1, 2)  # every eighth step takes twice as long
    new = dataclasses.replace(new, step_s=(stalled,))
    answer = gate(base, new, metrics=["step_time"])
    assert only(answer).verdict == "within"
    assert any("The mean of all steps, stalls included, changed by +1" in note for note in answer.notes)


def test_one_capture_of_a_side_is_noted(side):
    answer = gate(side(), side(), metrics=["step_time"])
    assert any("one capture per side" in note for note in answer.notes)
    assert not any("one capture per side" in note for note in gate(side(captures=2), side(captures=2)).notes)


@pytest.fixture(scope="module")
def grown():
    """The costs of a program, and of one that does more on one line."""

    def grown(x, again):
        with jax.named_scope("head"):
            y = x @ x
            return (y, jnp.sin(x) @ y) if again else y

    shape = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    return [compiled_costs(lambda x, each=each: grown(x, each), shape, compilations=2) for each in (False, True)]


def test_flops_and_memory_are_exact_and_have_lines(grown):
    before, after = map(GateSide.of_costs, grown)
    rows = {row.metric: row for row in gate(before, after, metrics=["flops", "memory"]).rows}
    assert (rows["flops"].base, rows["flops"].new) == (2 * 64**3, 4 * 64**3)
    assert {row.verdict for row in rows.values()} == {"regressed"}
    assert {row.low_base_share for row in rows.values()} == {None}
    assert all(row.at_fault[0].startswith(f"{__file__}:") for row in rows.values())
    assert rows["flops"].at_fault[0].endswith(": 0 -> 524 k")
    assert {row.verdict for row in gate(after, before, metrics=["flops", "memory"]).rows} == {"within"}
    assert only(gate(before, after, metrics=["flops"], allowed={"flops": 1.0})).verdict == "within"


def test_compilations_are_compared_as_steps_are(grown):
    def taking(costs, *compile_s):
        return GateSide.of_costs(dataclasses.replace(costs, compile_s=compile_s))

    before, after = grown
    row = only(gate(taking(before, 1.0, 1.01, 1.02), taking(after, 1.5, 1.52, 1.51), metrics=["compile_time"]))
    assert row.verdict == "regressed" and row.at_fault[0].endswith("instructions")
    single = taking(before, 1.0), taking(after, 9.0)
    assert "compile_time" not in {row.metric for row in gate(*single).rows}
    assert only(gate(*single, metrics=["compile_time"])).verdict == "undecided"


def test_what_a_side_lacks_is_said(grown, side):
    with pytest.raises(ProfileError, match="step_time of base and new is unknown"):
        gate(*map(GateSide.of_costs, grown), metrics=["step_time"])
    with pytest.raises(ProfileError, match="memory of base is unknown"):
        gate(side(), GateSide.of_costs(grown[0]), metrics=["memory"])
    with pytest.raises(ProfileError, match="no metric in common"):
        gate(GateSide((), (), None, ()), side())
    assert [row.metric for row in gate(side(), GateSide.of_costs(grown[0])).rows] == ["flops"]
