"""The roofline's terms, and what it says when one of them is not known."""

import jax
import jax.numpy as jnp
import pytest

from stack_core.chips import Chip
from stack_core.programs.roofline import ProgramMemory, Roofline, program_cost


def chip(**changes):
    fields = {
        "kind": "test",
        "unit": "device",
        "peak_flops": {"float32": 1000.0},
        "hbm_bytes": None,
        "hbm_bandwidth_bytes_s": 100.0,
        "on_chip_bytes": None,
        "link_bandwidth_bytes_s": 10.0,
        "provenance": "made up",
    }
    return Chip(**{**fields, **changes})


def square(x):
    return x @ x


@pytest.fixture
def compiled():
    return jax.jit(square, donate_argnums=0).lower(jnp.ones((32, 32))).compile()


def cost_of(compiled, **changes):
    return program_cost(compiled, jax.devices()[:1], chip(**changes), link_share=lambda devices: 1.0)


def test_a_step_takes_as_long_as_its_longest_part():
    roofline = Roofline(compute_s=2.0, memory_s=3.0, network_s=1.0)
    assert (roofline.step_s, roofline.binding) == (3.0, "memory")


def test_a_part_that_is_not_known_leaves_the_step_unknown():
    roofline = Roofline(compute_s=2.0, memory_s=3.0, network_s=None)
    assert (roofline.step_s, roofline.binding) == (None, None)


def test_a_product_at_the_peaks_of_a_chip(compiled):
    cost = cost_of(compiled)
    assert cost.flops.total == 2 * 32**3
    assert cost.roofline.compute_s == pytest.approx(2 * 32**3 / 1000)
    assert cost.roofline.memory_s == pytest.approx(cost.traffic_bytes / 100)
    assert cost.traffic_bytes >= 3 * 32 * 32 * 4
    assert cost.roofline.network_s == 0.0 and cost.collectives == ()


def test_a_device_that_is_a_part_of_a_unit_has_its_part_of_the_peaks(compiled):
    devices = [jax.devices()[0]] * 2  # one place, two devices
    half = program_cost(compiled, devices, chip(unit="chip"), link_share=lambda devices: 1.0)
    whole = cost_of(compiled)
    assert half.roofline.compute_s == pytest.approx(2 * whole.roofline.compute_s)
    assert half.roofline.memory_s == pytest.approx(2 * whole.roofline.memory_s)


def test_what_a_chip_does_not_say_is_not_known(compiled):
    assert cost_of(compiled, peak_flops={}).roofline.compute_s is None
    assert cost_of(compiled, hbm_bandwidth_bytes_s=None).roofline.memory_s is None
    # No traffic between devices takes no time, whatever the links are.
    assert cost_of(compiled, link_bandwidth_bytes_s=None).roofline.network_s == 0.0


def test_donated_memory_counts_once(compiled):
    memory = cost_of(compiled).memory
    assert memory.argument_bytes == memory.output_bytes == memory.aliased_bytes == 32 * 32 * 4
    assert memory.total_bytes == memory.argument_bytes + memory.temporary_bytes + memory.code_bytes


def test_the_total_of_memory():
    memory = ProgramMemory(argument_bytes=10, output_bytes=7, aliased_bytes=5, temporary_bytes=3, code_bytes=1)
    assert memory.total_bytes == 16
