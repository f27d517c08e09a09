"""Hopper's grouped product keeps its contract in an interpreter where unwritten memory is NaN."""

import importlib
import types
from typing import Any

import jax
import pytest

from stack_core.abi.plugins import registries
from stack_core.chips import use_chip
from stack_core.testing import OpCheck, accelerator_checks
from stack_kernels import from_tokamax
from stack_kernels.laboratory.interpreted import on_hopper
from stack_kernels.ragged_dot.tokamax import TOKAMAX_MOSAIC_GPU


@pytest.mark.slow
@pytest.mark.gpu_aot
@pytest.mark.skipif(not from_tokamax.is_installed(), reason="needs tokamax, which needs Python 3.12")
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="needs jax 0.11: before, Pallas cannot interpret it")
@pytest.mark.parametrize(
    "check", [check for check in accelerator_checks("ragged_dot") if check.aspect == "bfloat16"], ids=str
)
def test_contract_in_poisoned_memory(check: OpCheck, monkeypatch: pytest.MonkeyPatch) -> None:
    """The value and the gradient of the rows come from the kernel."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def kernel(*arguments: Any, **options: Any) -> Any:
        params = plgpu.InterpretGPUParams(uninitialized_memory="nan")
        return plgpu.kernel(*arguments, **options, interpret=params)

    hopper = importlib.import_module("tokamax._src.ops.ragged_dot.pallas_mosaic_gpu_kernel_sm90")
    monkeypatch.setattr(hopper, "plgpu", types.SimpleNamespace(**{**vars(plgpu), "kernel": kernel}))
    monkeypatch.setattr(importlib.import_module("tokamax._src.gpu_utils"), "is_sm90", lambda device=None: True)
    with use_chip(registries.chips["h100"]), on_hopper():
        check.isolated(TOKAMAX_MOSAIC_GPU)
