"""Ops choose for the chip of the surrounding `use_chip`, and what was traced for another chip is traced again."""

import importlib
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp

from stack_core.chips import Chip, current_chip, target_chip, use_chip
from stack_core.chips.jit_context import JitContext


def chip(kind: str, bandwidth: float | None = None) -> Chip:
    return Chip(
        kind=kind,
        unit="device",
        peak_flops={"bfloat16": 1e15},
        hbm_bytes=None,
        hbm_bandwidth_bytes_s=bandwidth,
        on_chip_bytes=None,
        link_bandwidth_bytes_s=None,
        provenance="test",
    )


def test_the_target_is_the_chip_at_hand_outside_of_any_context():
    assert target_chip() == current_chip()


def test_a_chip_that_is_measured_while_a_program_is_traced_is_no_part_of_the_program(monkeypatch):
    module = importlib.import_module("stack_core.chips.context")
    monkeypatch.setattr(module, "current_chip", lambda: chip("cpu", bandwidth=float(jnp.sum(jnp.ones(3)))))
    jaxpr = jax.make_jaxpr(lambda x: x * target_chip().hbm_bandwidth_bytes_s)(1.0)
    assert [equation.primitive.name for equation in jaxpr.eqns] == ["mul"]


def test_contexts_nest_and_end():
    with use_chip(chip("v5p")):
        with use_chip(chip("h200")):
            assert target_chip().kind == "h200"
        assert target_chip().kind == "v5p"
    assert target_chip() == current_chip()


def test_a_jitted_function_is_traced_once_for_each_chip():
    traced = []

    @jax.jit
    def double(x):
        traced.append(target_chip().kind)
        return 2 * x

    here = current_chip().kind
    for kind in ("v5p", "h200", "v5p"):
        double(jnp.ones(3))
        with use_chip(chip(kind)):
            double(jnp.ones(3))
    # JAX learns of a context when it is first entered, so the first trace may have been repeated.
    assert [kind for kind in traced if kind != here] == ["v5p", "h200"]
    assert traced.count(here) <= 2


def test_chips_of_one_kind_with_other_numbers_are_other_targets():
    traced = []
    double = jax.jit(lambda x: traced.append(target_chip().hbm_bandwidth_bytes_s) or 2 * x)
    for bandwidth in (1e12, 2e12, 1e12):
        with use_chip(chip("h200", bandwidth)):
            double(1.0)
    assert traced == [1e12, 2e12]


def test_a_context_belongs_to_its_thread():
    seen = []
    with use_chip(chip("v5p")):
        thread = threading.Thread(target=lambda: seen.append(target_chip()))
        thread.start()
        thread.join()
    assert seen == [current_chip()]


def test_a_context_that_is_never_entered_leaves_what_was_traced_in_the_cache():
    traced = []
    context: JitContext[str] = JitContext()
    double = jax.jit(lambda x: traced.append(context.value) or 2 * x)
    double(1.0)
    double(1.0)
    assert traced == [None]
    with context("value"):
        double(1.0)
    assert traced == [None, "value"]


def test_importing_creates_no_context():
    program = "import jax; calls = []; jax.make_user_context = calls.append\nimport stack_core.chips; assert not calls"
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)
