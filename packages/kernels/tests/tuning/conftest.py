"""Implementations as a plugin would register them, and caches and tables of the test's own."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from stack_core.abi.ops import OWN, OpImplementation
from stack_core.abi.plugins import registries
from stack_core.abi.registry import Entry, Registry
from stack_core.chips import current_chip
from stack_core.ops.building import differentiated, forward_only
from stack_core.ops.dispatch import report
from stack_kernels.tuning.sources import MEASURED


@pytest.fixture(autouse=True)
def caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    current_chip()  # which is measured once, into the cache of this machine
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("STACK_TUNED_TABLES", str(tmp_path / "stack" / "tuned"))
    (tmp_path / "stack" / "tuned").mkdir(parents=True)
    monkeypatch.setattr(report, "_reported", set())
    monkeypatch.setattr(MEASURED, "_told", set())
    MEASURED.forget()
    yield
    MEASURED.forget()


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts implementations beside core's references."""
    references = {f"{op}/reference": registries.ops[f"{op}/reference"] for op in ("linear", "norm", "attention")}

    def register(*implementations: OpImplementation) -> None:
        targets = references | {f"{found.op}/{found.name}": found for found in implementations}
        entries = {name: Entry(name, target, "test") for name, target in targets.items()}
        monkeypatch.setattr(registries, "ops", Registry("ops", lambda: (entries, {})), raising=False)

    register()
    return register


def burned(x: jax.Array, rounds: int = 4000) -> jax.Array:
    """Next to nothing that takes a hundred times as long as the products here."""
    wave = jax.lax.fori_loop(
        0, rounds, lambda _, wave: jnp.sin(wave), jnp.ones((64, 64)) * jnp.sum(x).astype("float32")
    )
    return (jnp.sum(wave) * 1e-30).astype(x.dtype)


def product(x: Any, weight: Any, *, bias: Any, preferred_dtype: Any) -> Any:
    return (x @ weight).astype(preferred_dtype)


def slow_product(x: Any, weight: Any, *, bias: Any, preferred_dtype: Any) -> Any:
    return product(x, weight, bias=bias, preferred_dtype=preferred_dtype) + burned(x)


def linear(name: str, function: Any = product, **fields: Any) -> OpImplementation:
    """An implementation that keeps what JAX saves of a function, unless it has a backward pass of its own."""
    forward, backward = differentiated(forward_only(function))
    residuals = () if "backward" in fields else (OWN,)
    own = {"forward": forward, "backward": backward, "residuals": residuals}
    return OpImplementation(**{"op": "linear", "name": name, **own, **fields})
