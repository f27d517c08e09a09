import dataclasses
import functools
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_kernels.jit_cpu import host
from stack_kernels.jit_cpu.linear.block import Product
from stack_kernels.jit_cpu.linear.tiles import product_module

BUILD = functools.partial(product_module, Product(3, "float32", "float32"))


def in_this_file(processor: host.Processor) -> Any:
    return BUILD(processor)


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
    x, weight = jnp.ones((3, 37)), jnp.arange(37.0 * 24).reshape(37, 24)
    result = jax.ShapeDtypeStruct((3, 24), jnp.float32)
    found = host.kernel_call(name, BUILD, result, x, weight)
    np.testing.assert_allclose(found, x @ weight, rtol=1e-6)


def code_of(name: str, build: Any = BUILD, **changes: Any) -> bytes:
    """Returns the object code that a new process would load under a name."""
    processor = host.this_processor()
    assert processor is not None
    return host._object_code(name, build, dataclasses.replace(processor, **changes))


def test_a_kernel_is_built_once(folder: Path, optimized: list[str]) -> None:
    check_product("first")
    (stored,) = folder.iterdir()
    (name,) = (target for target in host._registered if target.startswith("stack_kernels.first."))
    content, code = stored.read_bytes(), code_of(name)
    assert code == code_of(name, functools.partial(product_module, None))  # would fail if it were built
    assert len(optimized) == 1
    for damaged in (content[:-1], content[:40], b"", content[:-9] + b"?" + content[-8:]):
        stored.write_bytes(damaged)
        assert code_of(name) == code and stored.read_bytes() == content
    assert len(optimized) == 5 and list(folder.iterdir()) == [stored]


def test_another_name_processor_or_source_is_built_anew(
    folder: Path, optimized: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code_of("name")
    code_of("other name")
    code_of("name", count=1000)
    code_of("name", build=in_this_file)
    monkeypatch.setattr(host, "_source_digest", lambda package: f"edited {package}")
    code_of("name")
    assert len(optimized) == len(list(folder.iterdir())) == 5


def test_the_sources_of_a_package_are_hashed_once(folder: Path, optimized: list[str]) -> None:
    host._source_digest.cache_clear()
    code_of("name")  # of modules of stack_kernels and of stack_core
    assert host._source_digest.cache_info().misses == 2


def test_a_kernel_of_interactive_code_is_not_stored(
    folder: Path, optimized: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    interactive = types.ModuleType("interactive")  # has no file
    monkeypatch.setitem(sys.modules, "interactive", interactive)
    monkeypatch.setattr(in_this_file, "__module__", "interactive")
    for _ in range(2):
        code_of("name", build=in_this_file)
    assert len(optimized) == 2 and not folder.exists()


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
