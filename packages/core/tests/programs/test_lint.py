"""The faults that a train step may have with its parameters, in programs that have one each, and in one without."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from stack_core.programs.hlo import ArrayShape
from stack_core.programs.hlo_costs import Collective
from stack_core.programs.lint import LintedParameter, lint_program


@pytest.fixture(scope="module")
def programs() -> Mapping[str, Any]:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    script = Path(__file__).with_name("programs_on_eight_devices.py")
    command = [sys.executable, "-W", "error", str(script)]
    done = subprocess.run(command, check=True, env=environment, capture_output=True, text=True)
    return json.loads(done.stdout)


def test_a_program_without_faults_has_none(programs: Mapping[str, Any]) -> None:
    found = programs["clean"]
    assert found["faults"] == [] and found["replicated_bytes"] == 0
    largest = found["largest_collectives"]
    assert largest["layers"]["loop"] is not None and largest["layers"]["bytes"] == 4 * 16 * 24
    assert largest["head"]["loop"] is None and largest["head"]["bytes"] == 4 * 16 * 56


@pytest.mark.parametrize(
    ("program", "kind", "parameter"),
    [
        ("head in a loop", "moved in an inner loop", "head"),
        ("gradient summed whole", "gradient summed whole", "embedding"),
        ("stack gathered", "more than a layer gathered", "layers"),
        ("replicated", "replicated", "embedding"),
    ],
)
def test_each_fault_is_found(programs: Mapping[str, Any], program: str, kind: str, parameter: str) -> None:
    faults = programs[program]["faults"]
    assert (kind, parameter) in {(fault["kind"], name) for fault in faults for name in fault["parameters"]}, faults
    if program == "replicated":
        assert programs[program]["replicated_bytes"] == 4 * 16 * 56


def test_a_fault_says_what_to_do() -> None:
    array = ArrayShape("f32", (16, 56))
    collective = Collective("all-reduce", 3, ("while.1",), (array,), tuple(range(8)), "", "all-reduce.1")
    head = LintedParameter(name="lm_head", shape=(16, 56), part=(2, 56), layers=False, bytes=4)
    said = "\n".join(map(str, lint_program([collective], [head]).faults))
    assert "gradient summed whole: lm_head, 0.0 MiB x 3 in while.1. Each device keeps a shard of it" in said
    assert "moved in an inner loop: lm_head" in said


def test_an_array_that_may_belong_to_a_layer_is_not_moved_in_vain() -> None:
    array = ArrayShape("f32", (16, 56))
    collective = Collective("all-gather", 3, ("while.1",), (array,), tuple(range(8)), "", "all-gather.1")
    text = LintedParameter(name="text_in", shape=(16, 56), part=(2, 56), layers=False, bytes=4)
    layer = LintedParameter(name="up", shape=(3, 16, 56), part=(3, 2, 56), layers=True, bytes=4)
    assert lint_program([collective], [text]).faults
    assert not lint_program([collective], [text, layer]).faults


def test_a_copy_of_a_parameter_that_no_axis_splits_is_summed_whole_rightly() -> None:
    array = ArrayShape("f32", (16, 56))
    collective = Collective("all-reduce", 1, (), (array,), tuple(range(8)), "", "all-reduce.1")
    head = LintedParameter(name="lm_head", shape=(16, 56), part=(16, 56), layers=False, bytes=4)
    assert [fault.kind for fault in lint_program([collective], [head]).faults] == ["replicated"]


def test_a_collective_of_the_head_is_none_of_the_embedding_which_has_its_axes_the_other_way_around() -> None:
    head = LintedParameter(name="lm_head", shape=(16, 56), part=(2, 56), layers=False, bytes=4)
    embedding = LintedParameter(name="embedding", shape=(56, 16), part=(56, 2), layers=False, bytes=4)

    def summed(*dims: int) -> Collective:
        return Collective("all-reduce", 1, (), (ArrayShape("f32", dims),), tuple(range(8)), "", "all-reduce.1")

    found = lint_program([summed(16, 56), summed(56, 2)], [head, embedding])
    assert [fault.parameters for fault in found.faults] == [("lm_head",)]
    assert found.largest["embedding"] is None
    (alone,) = lint_program([summed(16, 56)], [embedding]).faults  # a product may give a gradient transposed
    assert alone.parameters == ("embedding",)


def test_a_gather_that_runs_as_a_sum_is_no_gradient() -> None:
    layers = LintedParameter(name="layers", shape=(3, 16, 24), part=(3, 2, 24), layers=True, bytes=4)

    def gathered(*dims: int) -> Collective:
        array = ArrayShape("f32", dims)
        return Collective("all-reduce", 3, ("while.1",), (array,), tuple(range(8)), "", "all-reduce.1", is_gather=True)

    assert lint_program([gathered(1, 16, 24)], [layers]).faults == ()
    (fault,) = lint_program([gathered(3, 16, 24)], [layers]).faults
    assert fault.kind == "more than a layer gathered"


def test_a_gather_of_the_one_expert_that_a_device_has_is_one_of_its_parameter() -> None:
    experts = LintedParameter(name="experts", shape=(3, 8, 16, 24), part=(3, 1, 2, 24), layers=True, bytes=4)
    array = ArrayShape("f32", (1, 16, 24))
    gather = Collective("all-gather", 3, ("while.1",), (array,), tuple(range(8)), "", "all-gather.1")
    found = lint_program([gather], [experts])
    assert found.largest["experts"] is gather and found.faults == ()


def test_parameters_gathered_across_slices() -> None:
    layers = LintedParameter(name="layers", shape=(3, 16, 24), part=(3, 4, 24), layers=True, bytes=4)

    def faults(*dims: int, between_slices: bool) -> list[str]:
        array = ArrayShape("f32", dims)
        gather = Collective(
            "all-gather", 3, ("while.1",), (array,), (0, 1), "", "recv.1", between_slices=between_slices
        )
        return [fault.kind for fault in lint_program([gather], [layers]).faults]

    assert faults(2, 4, 24, between_slices=True) == ["gathered across slices"]  # the slices are an axis of their own
    assert faults(1, 8, 24, between_slices=True) == ["gathered across slices"]
    assert faults(24, 2, 4, between_slices=True) == ["gathered across slices"]
    assert faults(8, 24, between_slices=False) == []
    assert faults(2, 5, 24, between_slices=True) == []
