import dataclasses
from collections.abc import Iterator

import jax
import pytest

from stack_kernels.jit_cpu import host


@pytest.fixture(scope="module", autouse=True)
def forgotten_programs() -> Iterator[None]:
    """What one file compiled is of no use to another; all together take gigabytes."""
    yield
    jax.clear_caches()


@pytest.fixture(params=["this", "without_dot_products", "avx2"])
def processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> host.Processor:
    """Kernels are written for this processor, or for a lesser one that it can stand in for."""
    found = host.this_processor()
    if found is None:
        pytest.skip("kernels are not written for this processor")
    lesser = dataclasses.replace(found, has_bf16_dot=False, has_int8_dot=False, has_tiles=False)
    if request.param == "avx2":
        features = [f"-{word[1:]}" if word[1:].startswith("avx512") else word for word in found.features.split(",")]
        lesser = dataclasses.replace(lesser, lanes=8, features=",".join(features))
    chosen = found if request.param == "this" else lesser
    if request.param != "this" and chosen == found:
        pytest.skip("this processor is no better")
    monkeypatch.setattr(host, "this_processor", lambda: chosen)
    return chosen
