import dataclasses
import re
import subprocess
import sys
from typing import Any

import jax.numpy as jnp
import pytest

from stack_core import ops
from stack_core.abi.errors import UnsupportedOp
from stack_kernels.jit_cpu import host
from stack_kernels.jit_cpu.linear.tiled_product import TiledProduct, tiled_module
from stack_kernels.jit_cpu.paged_attention.call import PagedAttention
from stack_kernels.jit_cpu.paged_attention.tiles import paged_attention_module

_MAX_FRAME_BYTES = 2**14
_ATTENTION = PagedAttention(
    lanes=16, query="float32", pages="float32", output="float32", scaled=False, layout="phsd", heads=512, kv_heads=1,
    head_dim=256, slots=16, scale=1.0, softcap=None, left=None,
)  # fmt: skip
_PROMPTS = dataclasses.replace(_ATTENTION, heads=8, kv_heads=4)
_IN_TILES = dataclasses.replace(_PROMPTS, query="bfloat16", pages="bfloat16", head_dim=128)


@pytest.mark.parametrize(
    "build",
    [
        lambda processor: tiled_module(TiledProduct(), processor),
        lambda processor: tiled_module(TiledProduct(activation="silu", keeps_products=True), processor),
        *(
            lambda processor, attention=attention: paged_attention_module(attention, processor)
            for attention in (_ATTENTION, _PROMPTS, _IN_TILES)
        ),
    ],
    ids=["amx", "amx_gated", "many_heads", "prompts", "prompts_in_tiles"],
)
def test_frames_fit_on_the_stack_of_any_thread(build: Any) -> None:
    """Of every function that is compiled, also for a processor with AMX, which need not be this one."""
    processor = host.this_processor()
    if processor is None or processor.lanes < 16:
        pytest.skip("it is of kernels for AVX-512")
    features = re.sub(r"-(amx-(?:tile|bf16)|avx512bf16)\b", r"+\1", processor.features)
    with_tiles = dataclasses.replace(processor, has_bf16_dot=True, has_tiles=True, features=features)
    assembly = host.assembly(build(with_tiles), with_tiles)
    frames = [int(size) for size in re.findall(r"sub[ql]\s+\$(\d+), %[re]sp", assembly)]
    assert frames, "no function has a frame"
    assert max(frames) <= _MAX_FRAME_BYTES


def test_what_would_need_a_large_scratchpad_is_refused() -> None:
    call = {
        "block_tables": jnp.zeros((1, 1), jnp.int32),
        "kv_lengths": jnp.ones(1, jnp.int32),
        "query_starts": jnp.arange(2, dtype=jnp.int32),
    }
    pages = jnp.zeros((1, 1, 4, 8))
    with pytest.raises(UnsupportedOp, match="up to 512 query heads of a key head, not 520"):
        ops.paged_attention(jnp.zeros((1, 520, 8)), pages, pages, **call, implementation="jit_x86")


@pytest.mark.parametrize(
    ("value", "reason"), [("xla", "is 'xla'"), ("jit", "'jit', which is not known; expected 'xla'")]
)
def test_a_variable_turns_machine_code_off(monkeypatch: pytest.MonkeyPatch, value: str, reason: str) -> None:
    monkeypatch.setenv("STACK_CPU_KERNELS", value)
    x, weight = jnp.zeros((4, 32)), jnp.zeros((32, 32))
    with pytest.raises(UnsupportedOp, match=reason):
        ops.linear(x, weight, implementation="jit_x86")
    (decision,) = ops.explain(ops.linear, x, weight)
    assert decision.forward.implementation.name == "xla_cpu"


@pytest.mark.parametrize(("system", "processor"), [("darwin", "x86_64"), ("win32", "AMD64"), ("linux", "aarch64")])
def test_other_systems_and_processors_are_refused(monkeypatch: pytest.MonkeyPatch, system: str, processor: str) -> None:
    monkeypatch.setattr(host.sys, "platform", system)
    monkeypatch.setattr(host.platform, "machine", lambda: processor)
    assert host.this_processor.__wrapped__() is None


_CRASH = """
import ctypes, os, sys
import jax.numpy as jnp
from stack_core import ops

ops.linear(jnp.ones((3, 64)), jnp.ones((64, 64)), implementation="jit_x86").block_until_ready()
os.abort() if sys.argv[1] == "abort" else ctypes.string_at(0)
"""


@pytest.mark.parametrize("how", ["abort", "segfault"])
def test_a_crash_report_names_the_kernel_that_was_entered_last(how: str) -> None:
    command = [sys.executable, "-X", "faulthandler", "-c", _CRASH, how]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode < 0
    assert "stack-kernels: the kernel that was entered last is linear_streams_3_float32_float32\n" in ran.stderr
    assert "Fatal Python error: " in ran.stderr
