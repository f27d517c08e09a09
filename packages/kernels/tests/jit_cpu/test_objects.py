import functools
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_kernels.jit_cpu import host
from stack_kernels.jit_cpu.linear.block import Product
from stack_kernels.jit_cpu.linear.tiles import product_module


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The kernels' part of JAX's compilation cache."""
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path / "stack_kernels"
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture
def optimized(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the modules that LLVM optimized."""
    if host.this_processor() is None:
        pytest.skip("it is of kernels for x86-64 with AVX2")
    names, optimize = list[str](), host._optimized
    monkeypatch.setattr(host, "_optimized", lambda *given: names.append(given[0].name) or optimize(*given))
    return names


def check_product(name: str) -> None:
    """Computes a product by a kernel that this process registers under a new name."""
    product = Product(3, "float32", "float32")
    x, weight = jnp.ones((3, 37)), jnp.arange(37.0 * 24).reshape(37, 24)
    result = jax.ShapeDtypeStruct((3, 24), jnp.float32)
    found = host.kernel_call(name, functools.partial(product_module, product), result, x, weight)
    np.testing.assert_allclose(found, x @ weight, rtol=1e-6)


def test_a_kernel_is_optimized_once(folder: Path, optimized: list[str]) -> None:
    check_product("first")
    (stored,) = folder.iterdir()
    assert len(optimized) == 1
    check_product("second")
    assert len(optimized) == 1
    content = stored.read_bytes()
    for damaged in (content[:-1], content[:40], b"", content[:-9] + b"?" + content[-8:]):
        stored.write_bytes(damaged)
        check_product(f"damaged {len(optimized)}")
        assert stored.read_bytes() == content
    assert len(optimized) == 5 and list(folder.iterdir()) == [stored]


def test_nothing_is_stored_without_a_cache_of_programs(folder: Path, optimized: list[str]) -> None:
    jax.config.update("jax_enable_compilation_cache", False)
    check_product("disabled")
    jax.config.update("jax_enable_compilation_cache", True)
    for place in ("gs://bucket/cache", None):
        jax.config.update("jax_compilation_cache_dir", place)
        check_product(f"remote {place}")
    assert len(optimized) == 3 and not folder.exists()


def test_a_cache_that_cannot_be_written_is_ignored(folder: Path, optimized: list[str]) -> None:
    folder.write_text("no directory")
    check_product("unwritable")
    assert len(optimized) == 1 and folder.read_text() == "no directory"
