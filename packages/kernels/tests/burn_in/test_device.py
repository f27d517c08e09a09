"""Devices that cannot be used, each explained in one line."""

import re

import pytest

from stack_kernels.burn_in.device import explain_failure

OLD = (
    "RuntimeError: Unable to initialize backend 'cuda': INTERNAL: no supported devices: CUDA driver version is "
    "insufficient for CUDA runtime version"
)
FULL = "XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 268435456 bytes."
CPU = {"platform": "cpu", "kinds": ["cpu"]}


def explain(
    error: str = "", log: str = "", facts: dict[str, object] = CPU, has_nvidia: bool = True, **environment: str
) -> str | None:
    return explain_failure(error, log, [] if error else [facts], environment, has_nvidia)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (explain(OLD), "The NVIDIA driver is too old for JAX's CUDA: .* Update the driver: CUDA 13 needs version 580"),
        (explain(log=f"W1 jax: {OLD}\nbye"), "The NVIDIA driver is too old"),
        (explain(FULL), r"The device has no memory left: .*`nvidia-smi` lists processes.*CUDA_VISIBLE_DEVICES"),
        (explain(), "This machine has an NVIDIA GPU that JAX does not use: .*stack-core.cuda13"),
        (explain("ValueError: odd", has_nvidia=False), "JAX cannot use the device: ValueError: odd. `stack doctor`"),
        (
            explain(facts={"platform": "gpu", "kinds": ["NVIDIA H100", "NVIDIA A100", "NVIDIA H100"]}),
            "The devices are of different kinds: NVIDIA H100, NVIDIA A100. .*CUDA_VISIBLE_DEVICES=0",
        ),
    ],
)
def test_a_device_that_cannot_be_used_is_explained_in_one_line(found: str | None, expected: str) -> None:
    assert found is not None and "\n" not in found
    assert re.match(expected, found), found


def test_a_usable_device_has_no_problem() -> None:
    assert explain(has_nvidia=False) is None
    assert explain(JAX_PLATFORMS="cpu") is None
    assert explain(facts={"platform": "gpu", "kinds": ["NVIDIA H100", "NVIDIA H100"]}) is None
