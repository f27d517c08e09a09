"""Compiler options by chip and kind of program."""

import jax
import jax.numpy as jnp
import pytest

from stack_core.abi.plugins import registries
from stack_core.chips import use_chip
from stack_serve.llm.compiler_options import compile_threads, compiler_options


def test_programs_for_gpus_record_their_loops_unless_a_flag_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "")
    assert compiler_options("decode") is None and compile_threads() == 2
    with use_chip(registries.chips["v6e"]):
        assert compiler_options("prefill") is None
    with use_chip(registries.chips["h100"]):
        (recorded,) = (compiler_options("decode") or {}).values()
        assert {"WHILE", "CONDITIONAL"} <= set(recorded.split(","))
        monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer=FUSION")
        assert compiler_options("decode") is None


def test_prompts_on_cpus_dequantize_one_weight_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "")
    count, weight = 10, jnp.ones((256, 256), jnp.int8)

    def layers(x: jax.Array, weights: list[jax.Array]) -> jax.Array:
        for each in weights:
            x = jnp.tanh(x @ jax.lax.optimization_barrier(each.astype(jnp.float32)))
        return x

    lowered = jax.jit(layers).lower(jnp.ones((128, 256)), [weight] * count)
    found = {
        kind: lowered.compile(compiler_options(kind)).memory_analysis().temp_size_in_bytes
        for kind in ("decode", "prefill")
    }
    assert found["prefill"] < 3 * weight.size * 4 < count * weight.size * 4 <= found["decode"]
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_scheduler_type=CPU_SCHEDULER_TYPE_DEFAULT")
    assert compiler_options("prefill") is None
