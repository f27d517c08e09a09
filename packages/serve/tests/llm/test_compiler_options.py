"""Compiler options by chip."""

import pytest

from stack_core.abi.plugins import registries
from stack_core.chips import use_chip
from stack_serve.llm.compiler_options import compile_threads, compiler_options


def test_programs_for_gpus_record_their_loops_unless_a_flag_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "")
    assert compiler_options() is None and compile_threads() == 2
    with use_chip(registries.chips["v6e"]):
        assert compiler_options() is None
    with use_chip(registries.chips["h100"]):
        (recorded,) = (compiler_options() or {}).values()
        assert {"WHILE", "CONDITIONAL"} <= set(recorded.split(","))
        monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer=FUSION")
        assert compiler_options() is None
