"""Types chosen by the sensitivity of the outputs and a budget of bytes."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core.abi.errors import ArgumentError, UnknownName
from stack_quant import quantize_model, report
from stack_quant.errors import QuantError
from stack_quant.mixed.allocation import allocate
from stack_quant.mixed.sensitivity import Sensitivity, measure_sensitivity
from stack_quant.mixed.types import Budget

TYPES = ("int2/t8", "int4/t8", "int6/t8", "int8", "float")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Model:
    """A tied table, fused products, stacked layers, and a path that is a part of other paths."""

    table: Any
    query: Any
    key: Any
    layers: Any
    query_norm: Any

    def __call__(self, tokens: Any) -> Any:
        hidden = self.table[tokens] * self.query_norm["query"]
        both = hidden @ jnp.concatenate([self.query, self.key], axis=1)
        hidden = hidden + both[..., :16] * both[..., 16:]
        hidden, _ = jax.lax.scan(lambda x, layer: (x + jnp.tanh(x @ layer["query"]), None), hidden, self.layers)
        return hidden @ self.table.T


def model() -> Model:
    keys = jax.random.split(jax.random.key(0), 4)
    table, query, key = (
        jax.random.normal(one, shape) for one, shape in zip(keys[:3], [(64, 16), (16, 16), (16, 16)], strict=True)
    )
    # The outputs hardly depend on the layers, which a uniform scheme does not use.
    layers = {"query": jax.random.normal(keys[3], (3, 16, 16)) / 100}
    return Model(table, query / 4, key / 4, layers, {"query": jnp.ones(16)})


def stream(first: int = 0) -> Iterator[Any]:
    for seed in range(first, first + 2):
        yield jax.random.randint(jax.random.key(seed), (2, 8), 0, 64)


@pytest.fixture(scope="module")
def table() -> Sensitivity:
    return measure_sensitivity(model(), TYPES, next(stream()), stream=stream(), stream_batches=2)


def error_of(changed: Any, batches: Iterator[Any]) -> float:
    """Returns ||y' - y||^2 / ||y||^2 over the batches."""
    pairs = [(changed(batch), model()(batch)) for batch in batches]
    return sum(float(jnp.sum((new - old) ** 2)) for new, old in pairs) / sum(float(jnp.sum(old**2)) for _, old in pairs)


def test_each_error_is_of_the_model_with_one_quantized_site(table: Sensitivity) -> None:
    assert set(table.sites) == {"table", "query", "key", "layers/query"} and set(table.other_bytes) == {
        "query_norm/query"
    }
    for path, candidates in table.sites.items():
        assert [one.type for one in candidates] == list(TYPES)
        rules = [{"path": f"query_norm/query|{path}/none", "optional": True}]
        if path == "query":
            rules.append({"path": "layers/query"})
        one = candidates[1]
        rule = {"path": re.escape(path), "weights": "int4", "tile_size": 8}
        quantized = quantize_model(model(), [*rules, rule], next(stream()))
        assert one.error == pytest.approx(error_of(quantized, stream()), rel=1e-3)
        (row,) = [row for row in report(quantized).parameters if row.path == path]
        assert one.bytes == row.bytes_after
        assert candidates[-1].error == 0


def test_a_budget_holds_and_the_error_falls_with_it(table: Sensitivity) -> None:
    errors, last = list[float](), np.inf
    for bits in (7, 9, 11, 16, 32):
        budget = Budget(f"{bits}bits", TYPES)
        chosen = table.choose(budget)
        quantized = quantize_model(model(), table.rules(chosen), next(stream()))
        found = report(quantized)
        assert found.bytes_after == table.total_bytes(chosen) <= budget.bytes(table.entries)
        schemes = {row.path: row.scheme for row in found.parameters}
        assert {path: schemes[path] for path in chosen} == {
            path: "float32" if one.type == "float" else one.type for path, one in chosen.items()
        }
        total = sum(one.error for one in chosen.values())
        assert total <= last
        last = total
        errors.append(error_of(quantized, stream(5)))
    assert errors == sorted(errors, reverse=True) and errors[-1] < 1e-12


@pytest.mark.parametrize("name", ["int4/t8", "int6/t8"])
def test_a_mixed_scheme_has_a_smaller_error_than_a_uniform_one_of_the_same_bytes(table: Any, name: str) -> None:
    uniform = table.uniform(name)
    chosen = table.choose(Budget(f"{table.total_bytes(uniform)}B", TYPES))
    assert table.total_bytes(chosen) <= table.total_bytes(uniform)
    mixed, plain = (
        error_of(quantize_model(model(), table.rules(each), next(stream())), stream(5)) for each in (chosen, uniform)
    )
    assert mixed < 0.9 * plain


def test_the_choice_equals_that_of_trying_all() -> None:
    rng = np.random.default_rng(0)
    for scale in (1, 10**6):  # Larger sizes are rounded up to steps of the span.
        sizes = np.sort(rng.integers(1, 50, (4, 3)), axis=1) * scale
        errors = np.sort(rng.random((4, 3)), axis=1)[:, ::-1].copy()
        errors[2, 1] = np.inf
        smallest, every = sizes[:, 0].sum(), list(itertools.product(range(3), repeat=4))
        previous = np.inf
        for limit in (smallest, smallest + 30 * scale, smallest + 60 * scale, 10**9):
            chosen = allocate(sizes.tolist(), errors.tolist(), int(limit))
            total = lambda places, of: sum(of[site, place] for site, place in enumerate(places))
            best = min(total(each, errors) for each in every if total(each, sizes) <= limit)
            assert total(chosen, sizes) <= limit and best <= total(chosen, errors) <= previous
            assert scale > 1 or total(chosen, errors) == pytest.approx(best)
            previous = total(chosen, errors)


def test_wrong_budgets_types_and_streams_are_refused(table: Sensitivity) -> None:
    for text in ("3.5", "bits", "-1GB", "0bits", "2XB", "nanGB"):
        with pytest.raises(ArgumentError, match=r"expected bits per parameter .* such as 3.5bits"):
            Budget(text)
    assert (Budget("2GB").bytes(1), Budget("1.5GiB").bytes(1), Budget("4bit").bytes(10)) == (2 * 10**9, 3 << 29, 5)
    for types, error, message in (
        (("int4/t0",), ArgumentError, "positive tile"),
        (("int4/x8",), UnknownName, "int4/x8"),
        (("nvfp4/t8",), ArgumentError, "nvfp4 has tiles of 16"),
        (("int4", "int4"), ArgumentError, "different types"),
    ):
        with pytest.raises(error, match=message):
            Budget("4bits", types)
    with pytest.raises(
        QuantError, match=r"allows 100 bytes, but the model needs [\d,]+ .*int2/t8.* Raise the budget to"
    ):
        table.choose(Budget("100B"))
    with pytest.raises(QuantError) as raised:
        table.choose(Budget("1bits"))
    (enough,) = re.findall(r"Raise the budget to ([\d.]+bits)", str(raised.value))
    table.choose(Budget(enough))

    def measured(model: Any, batches: Any, types: Any = TYPES) -> None:
        measure_sensitivity(model, types, next(stream()), stream=batches, stream_batches=2)

    with pytest.raises(QuantError, match="needs batches for calibration, but there are none"):
        measured(model(), [])
    broken = Model(**{**vars(model()), "key": model().key.at[0, 0].set(jnp.nan)})
    with pytest.raises(QuantError, match="outputs hold NaN or infinities for batch 0 of the calibration stream"):
        measured(broken, stream())
    with pytest.raises(QuantError, match="None of the 5 parameters can be quantized to float"):
        measured(model(), stream(), ["float"])
