"""`tune` finds the calls of a function, measures what could compute them, and what it finds is what runs."""

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import stack_kernels
from stack_core import ops
from stack_core.abi.errors import ArgumentError, TuningError
from stack_core.abi.ops import QView
from stack_kernels.tuning import search
from stack_kernels.tuning.measure import Measured, Timing
from stack_kernels.tuning.search import TuneReport, tune
from stack_kernels.tuning.tables import Table

from .conftest import burned, linear, product, slow_product

X = jax.ShapeDtypeStruct((24, 16), "float32")
WEIGHT = jax.ShapeDtypeStruct((16, 16), "float32")
WEIGHTS = jax.ShapeDtypeStruct((3, 16, 16), "float32")
SLOW = linear("slow", slow_product, priority=5)
FAST = linear("fast")


def layer(x: Any, weight: Any) -> Any:
    return ops.linear(x, weight)


def loss(x: Any, weight: Any) -> Any:
    return jnp.sum(layer(x, weight))


def _names(fn: Any = layer, *args: Any) -> tuple[str, str]:
    (call,) = ops.explain(fn, *(args or (X, WEIGHT)))
    return call.forward.implementation.name, call.backward.implementation.name


def _outcomes(report: TuneReport, direction: str = "forward") -> dict[str, str]:
    found = [found for found in report.table.measurements if found.case.direction == direction]
    return {found.implementation: found.outcome for found in found}


def test_what_is_measured_as_faster_runs(register: Callable[..., None]) -> None:
    register(SLOW, FAST)
    assert _names()[0] == "slow"
    report = stack_kernels.tune(layer, X, WEIGHT)
    (job,) = report.jobs
    assert (str(job.before), job.calls) == ("slow", 1)
    assert str(job.after) in ("fast", "reference")  # which of the two is chance
    assert not report.interrupted and not report.out_of_time
    times = {found.implementation: found.median_s for found in report.measured(job)}
    assert times["slow"] > times["fast"] > 0
    assert _names()[0] == str(job.after)
    (call,) = ops.explain(layer, X, WEIGHT)
    assert call.forward.reason.startswith("tuned table 'measured': forward ")
    assert "at d_in=16 d_out=16 rows=24" in call.forward.reason


def test_it_chooses_among_configs(register: Callable[..., None]) -> None:
    @dataclass(frozen=True)
    class Tile:
        rounds: int

    def function(x: Any, weight: Any, *, bias: Any, preferred_dtype: Any, config: Tile) -> Any:
        return product(x, weight, bias=bias, preferred_dtype=preferred_dtype) + burned(x, config.rounds)

    tiled = {"default": lambda call, chip: Tile(4000), "space": lambda call, chip: (Tile(4000), Tile(0), Tile(8000))}
    register(linear("tiled", function, **tiled, priority=5))
    tune(layer, X, WEIGHT)
    named = ops.explain(lambda x, w: ops.linear(x, w, implementation="tiled"), X, WEIGHT)[0].forward
    assert named.config == Tile(0)
    assert named.reason.startswith("named by the caller; config of tuned table 'measured'")


def test_candidates_are_compiled_in_threads_and_their_failures_recorded(register: Callable[..., None]) -> None:
    traced_in: set[threading.Thread] = set()

    def watched(x: Any, weight: Any, *, bias: Any, preferred_dtype: Any) -> Any:
        traced_in.add(threading.current_thread())
        return product(x, weight, bias=bias, preferred_dtype=preferred_dtype)

    def broken(x: Any, weight: Any, *, bias: Any, preferred_dtype: Any) -> Any:
        raise ValueError("no such register")

    register(linear("watched", watched, priority=5), linear("broken", broken, priority=3))
    report = tune(layer, X, WEIGHT, threads=2)
    assert _outcomes(report) == {"watched": "measured", "broken": "failed", "reference": "measured"}
    assert traced_in - {threading.main_thread()}


def test_what_is_fast_and_wrong_is_rejected(register: Callable[..., None]) -> None:
    def zeros(x: Any, weight: Any, *, bias: Any, preferred_dtype: Any) -> Any:
        return jnp.zeros((x.shape[0], weight.shape[1]), preferred_dtype)

    register(linear("slow", slow_product, priority=5), linear("wrong", zeros, priority=7))
    report = tune(layer, X, WEIGHT)
    assert _outcomes(report) == {"slow": "measured", "wrong": "rejected", "reference": "measured"}
    (rejected,) = (found for found in report.table.measurements if found.outcome == "rejected")
    assert rejected.reason.startswith("output: off by")
    assert _names()[0] == "reference"


def test_a_wrong_gradient_is_rejected_and_its_forward_pass_is_not(register: Callable[..., None]) -> None:
    def backward(
        arrays: Any, options: Any, outputs: Any, residuals: Any, cotangents: Any, *, requested: Any
    ) -> Mapping[str, Any]:
        return {"x": cotangents @ arrays["weight"].T, "weight": 2 * (arrays["x"].T @ cotangents)}

    register(linear("wrong", backward=backward, priority=5))
    report = tune(jax.grad(loss, argnums=(0, 1)), X, WEIGHT)
    assert _outcomes(report)["wrong"] == "measured"
    assert _outcomes(report, "backward") == {"wrong": "rejected", "reference": "measured"}
    (rejected,) = (found for found in report.table.measurements if found.outcome == "rejected")
    assert rejected.reason.startswith("gradient['weight'][0]: off by")
    assert _names()[1] == "reference"


@pytest.mark.parametrize("kind", [ValueError, AssertionError])
def test_what_raises_is_recorded_and_the_rest_goes_on(register: Callable[..., None], kind: type[Exception]) -> None:
    def broken(x: Any, weight: Any, *, bias: Any, preferred_dtype: Any) -> Any:
        raise kind("no tile of 24 rows")

    register(SLOW, FAST, linear("broken", broken))
    report = tune(layer, X, WEIGHT)
    assert _outcomes(report)["broken"] == "failed"
    (failed,) = (found for found in report.table.measurements if found.outcome == "failed")
    assert failed.reason == f"{kind.__name__}: no tile of 24 rows"
    assert _names()[0] in ("fast", "reference")


def test_forward_and_backward_are_chosen_apart(register: Callable[..., None]) -> None:
    """The pair with the least time for both decides what is differentiated; alone, the forward pass does."""

    @jax.custom_vjp
    def function(x: Any, weight: Any) -> Any:
        return x @ weight

    def backward(residuals: Any, cotangent: Any) -> Any:
        x, weight = residuals
        return cotangent @ weight.T + burned(cotangent, 8000), x.T @ cotangent

    function.defvjp(lambda x, weight: (x @ weight, (x, weight)), backward)

    def quick_forward(x: Any, weight: Any, *, bias: Any, preferred_dtype: Any) -> Any:
        return function(x, weight)

    def alone(
        arrays: Any, options: Any, outputs: Any, residuals: Any, cotangents: Any, *, requested: Any
    ) -> Mapping[str, Any]:
        return {"x": cotangents @ arrays["weight"].T, "weight": arrays["x"].T @ cotangents}

    def slower(x: Any, weight: Any, *, bias: Any, preferred_dtype: Any) -> Any:
        return slow_product(x, weight, bias=bias, preferred_dtype=preferred_dtype)

    reference = linear("reference", slower, priority=0)
    register(linear("forward", quick_forward, priority=2), linear("backward", slower, backward=alone), reference)
    assert _names() == ("forward", "forward")
    report = tune(jax.grad(loss, argnums=(0, 1)), X, WEIGHT)
    assert {job.case.direction: job.case.gradients_of for job in report.jobs} == {
        "forward": (),
        "backward": ("x", "weight"),
    }
    assert _names() == ("forward", "backward")
    whole = {(found.implementation, found.whole) for found in report.table.measurements}
    assert whole >= {("forward", True), ("forward", False), ("backward", False), ("reference", True)}
    assert ("backward", True) not in whole


FOUND = [
    (layer, (X, WEIGHT), 1, ()),
    (jax.jit(layer), (X, WEIGHT), 1, ()),
    (lambda x, weights: jax.lax.scan(lambda x, w: (layer(x, w), None), x, weights)[0], (X, WEIGHTS), 3, ()),
    (jax.vmap(layer, (None, 0)), (X, WEIGHTS), 1, ()),
    (jax.grad(loss), (X, WEIGHT), 1, ("x",)),
    (
        jax.jit(jax.grad(jax.checkpoint(lambda x, w: jnp.sum(jnp.sin(layer(x, w)))), (0, 1))),
        (X, WEIGHT),
        2,
        ("x", "weight"),
    ),
]


@pytest.mark.parametrize(
    ("fn", "args", "calls", "gradients"), FOUND, ids=["call", "jit", "scan", "vmap", "grad", "remat"]
)
def test_calls_are_found_wherever_they_are(
    register: Callable[..., None], fn: Any, args: Any, calls: int, gradients: Any
) -> None:
    register(SLOW)
    report = tune(fn, *args, budget_s=0.0)
    directions = {job.case.direction: job for job in report.jobs}
    assert directions["forward"].calls == calls
    assert dict(directions["forward"].case.shape.sizes) == {"rows": 24, "d_in": 16, "d_out": 16}
    assert ("backward" in directions) == bool(gradients)
    if gradients:
        assert directions["backward"].case.gradients_of == gradients
    assert all(Path(job.sources[0].rpartition(":")[0]).name == "test_tune.py" for job in report.jobs)


def test_calls_of_one_kind_are_one_job(register: Callable[..., None]) -> None:
    register(SLOW)
    report = tune(
        lambda x, y, w: (layer(x, w), ops.linear(y, w)),
        X,
        jax.ShapeDtypeStruct((2, 12, 16), "float32"),
        WEIGHT,
        budget_s=0.0,
    )
    (job,) = report.jobs
    assert (job.calls, len(job.sources)) == (2, 2)


def test_nothing_is_measured_without_time(register: Callable[..., None]) -> None:
    register(SLOW, FAST)
    report = tune(layer, X, WEIGHT, budget_s=0.0)
    assert report.out_of_time
    assert [(job.skipped, str(job.after)) for job in report.jobs] == [("out of time", "slow")]
    assert not report.table.measurements


def test_the_most_expensive_calls_come_first_and_the_budget_ends_it(
    register: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    register(SLOW, FAST)
    told: list[str] = []
    written: list[int | None] = []
    path = tmp_path / "table.json"
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(search, "time", SimpleNamespace(perf_counter=lambda: clock.now_s))

    def progress(done: int, total: int, what: str) -> None:
        told.append(what)
        written.append(len(Table.read(path).measurements) if path.exists() else None)
        clock.now_s = 1000.0 * done

    def two(x: Any, y: Any, weight: Any) -> Any:
        return layer(x, weight), layer(y, weight)

    report = tune(
        two, X, jax.ShapeDtypeStruct((240, 16), "float32"), WEIGHT, budget_s=500.0, progress=progress, out=path
    )
    assert told == ["linear forward d_in=16 d_out=16 rows=240", "linear forward d_in=16 d_out=16 rows=24", "done"]
    assert report.out_of_time
    assert [job.skipped for job in report.jobs] == ["", "out of time"]
    assert written == [None, 3, 3]
    assert {dict(found.case.shape.sizes)["rows"] for found in report.table.measurements} == {240}


def test_forward_passes_that_decide_nothing_come_last(register: Callable[..., None]) -> None:
    """Where every candidate is timed with its gradient, the forward pass alone is not needed for the choice."""
    register(SLOW, FAST, linear("reference", product, priority=0))
    differentiated = tune(jax.grad(loss), X, WEIGHT, budget_s=0.0)
    assert [(job.case.direction, job.decides) for job in differentiated.jobs] == [
        ("backward", True),
        ("forward", False),
    ]
    assert [job.decides for job in tune(layer, X, WEIGHT, budget_s=0.0).jobs] == [True]
    register(SLOW, linear("forward only", backward=None))
    assert all(job.decides for job in tune(jax.grad(loss), X, WEIGHT, budget_s=0.0).jobs)


def test_ctrl_c_keeps_and_writes_what_was_measured(register: Callable[..., None]) -> None:
    def interrupted(x: Any, weight: Any, *, bias: Any, preferred_dtype: Any) -> Any:
        if x.shape[0] == 24:
            raise KeyboardInterrupt
        return product(x, weight, bias=bias, preferred_dtype=preferred_dtype)

    register(SLOW, linear("interrupted", interrupted))
    larger = jax.ShapeDtypeStruct((240, 16), "float32")
    report = tune(lambda x, y, w: (layer(x, w), layer(y, w)), larger, X, WEIGHT)
    assert report.interrupted
    assert [job.skipped for job in report.jobs] == ["", "interrupted"]
    measured = {(found.implementation, dict(found.case.shape.sizes)["rows"]) for found in report.table.measurements}
    assert measured == {("slow", 240), ("interrupted", 240), ("reference", 240)}
    assert Table.read(report.path) == report.table


def test_what_is_known_is_not_measured_again(register: Callable[..., None]) -> None:
    traced: list[str] = []

    def counted(x: Any, weight: Any, *, bias: Any, preferred_dtype: Any) -> Any:
        traced.append("once")
        return slow_product(x, weight, bias=bias, preferred_dtype=preferred_dtype)

    register(linear("counted", counted, priority=5))
    first = tune(layer, X, WEIGHT)
    before = len(traced)
    second = tune(layer, jax.ShapeDtypeStruct((25, 16), "float32"), WEIGHT)
    assert [job.cached for job in second.jobs] == [True]
    assert second.table == first.table
    assert len(traced) == before
    dates = {found.implementation: found for found in tune(layer, X, WEIGHT, again=True).table.measurements}
    assert dates.keys() == {"counted", "reference"}
    assert len(traced) > before


def test_what_is_missing_is_measured_beside_the_best_known(register: Callable[..., None]) -> None:
    register(SLOW, linear("slower", slow_product))
    tune(layer, X, WEIGHT)
    register(SLOW, linear("slower", slow_product), FAST)
    report = tune(layer, X, WEIGHT)
    assert not report.jobs[0].cached
    assert _outcomes(report) == dict.fromkeys(("slow", "slower", "fast", "reference"), "measured")


def test_two_processes_that_tune_at_once_keep_what_both_measured(register: Callable[..., None], tmp_path: Path) -> None:
    register(SLOW)
    path = tmp_path / "table.json"

    def progress(done: int, total: int, what: str) -> None:
        if done == 0:
            tune(layer, jax.ShapeDtypeStruct((240, 16), "float32"), WEIGHT, out=path)

    report = tune(layer, X, WEIGHT, out=path, progress=progress)
    assert {dict(found.case.shape.sizes)["rows"] for found in report.table.measurements} == {24, 240}
    assert Table.read(path) == report.table


def test_what_nothing_else_supports_costs_no_time(register: Callable[..., None]) -> None:
    register()
    report = tune(jax.grad(loss), X, WEIGHT)
    assert {job.skipped for job in report.jobs} == {"nothing else supports it"}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((X, "weights"), r"\(float32\[24, 16\], str\): TypeError at .*test_tune\.py:\d+: "),
        ((X,), r"\(float32\[24, 16\]\): TypeError"),
        ((X, jax.ShapeDtypeStruct((15, 16), "float32")), r".*float32\[15, 16\]\): TypeError at .*test_tune\.py:\d+: "),
    ],
)
def test_a_wrong_argument_is_answered_in_one_sentence(args: tuple[Any, ...], message: str) -> None:
    def product(x: Any, weight: Any) -> Any:
        return ops.norm(jnp.matmul(x, weight))

    with pytest.raises(ArgumentError, match=rf"cannot be traced for {message}") as caught:
        tune(product, *args)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("rounds", "chosen"), [(1, "slow"), (4, "slow"), (5, "fast")])
def test_a_few_rounds_do_not_change_the_choice(
    register: Callable[..., None], monkeypatch: pytest.MonkeyPatch, rounds: int, chosen: str
) -> None:
    """A disturbance in one round must not record a reversal."""
    register(SLOW, FAST)

    def ended_early(candidates: Mapping[Any, Any], **_: Any) -> Measured[Any]:
        speeds = {"slow": 2.0, "fast": 1.0, "reference": 3.0}
        times = {each: (speeds[each.implementation.name],) * rounds for each in candidates}
        return Measured({each: Timing(found, found) for each, found in times.items()}, {}, out_of_time=True)

    monkeypatch.setattr(search, "measure", ended_early)
    (job,) = tune(layer, X, WEIGHT).jobs
    assert str(job.after) == _names()[0] == chosen
    assert ("a change needs 5" in job.skipped) == (rounds < 5)


def test_a_function_without_ops_is_an_error() -> None:
    with pytest.raises(TuningError, match="calls no op"):
        tune(lambda x: x + 1, X)


def test_a_table_of_another_chip_is_not_added_to(register: Callable[..., None], tmp_path: Path) -> None:
    register(SLOW)
    table = tune(layer, X, WEIGHT, out=tmp_path / "mine.json").table
    replace(table, chip=replace(table.chip, model="another")).write(tmp_path / "other.json")
    with pytest.raises(TuningError, match=r"is a table of cpu \(another\), and this is cpu"):
        tune(layer, X, WEIGHT, out=tmp_path / "other.json")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Int8Columns:
    values: Any
    scales: Any

    def __stack_qview__(self) -> QView:
        return QView((1, 0), self.values, self.scales, None, "int8/columns")


def test_quantized_operands_are_drawn_and_measured(register: Callable[..., None]) -> None:
    def dequantizing(x: Any, weight: Any, *, bias: Any, preferred_dtype: Any) -> Any:
        return x @ ops.dequantize(weight, x.dtype) + burned(x)

    register(linear("slow", dequantizing, priority=5))
    weight = Int8Columns(jax.ShapeDtypeStruct((16, 8), "int8"), jax.ShapeDtypeStruct((1, 8), "float32"))
    report = tune(jax.grad(loss, allow_int=True), X, weight)
    assert _outcomes(report) == _outcomes(report, "backward") == {"slow": "measured", "reference": "measured"}
    assert dict(report.jobs[0].case.shape.traits)["weight"] == "int8, scale float32 allx1"
    assert _names(layer, X, weight) == ("reference", "reference")


def test_a_table_chooses_within_its_context_and_jit_knows(register: Callable[..., None], tmp_path: Path) -> None:
    register(SLOW, linear("marked", lambda x, weight, **options: product(x, weight, **options) + 1e-6))
    report = tune(layer, X, WEIGHT, out=tmp_path / "table.json")
    traced: list[str] = []

    @jax.jit
    def traced_layer(x: Any, weight: Any) -> Any:
        traced.append(_names()[0])
        return layer(x, weight)

    arrays = jnp.ones((24, 16)), jnp.ones((16, 16))
    traced_layer(*arrays)
    for table in (report.path, str(report.path), report.table):
        with stack_kernels.tuned(table):
            traced_layer(*arrays)
    with stack_kernels.tuned(Table(report.table.chip)):
        traced_layer(*arrays)
    traced_layer(*arrays)
    assert traced == ["slow", str(report.jobs[0].after), "slow"]
    assert traced[1] != "slow"


def test_the_file_says_what_was_measured_with_what(register: Callable[..., None], tmp_path: Path) -> None:
    register(SLOW)
    report = tune(layer, X, WEIGHT, out=tmp_path / "table.json")
    (case,) = json.loads(report.path.read_text())["cases"]
    assert (case["op"], case["sizes"]) == ("linear", {"d_in": 16, "d_out": 16, "rows": 24})
    for record in case["measurements"]:
        assert record["versions"]["jax"] == jax.__version__
        assert {"stack-core", "stack-kernels"} <= record["versions"].keys()
        assert record["rounds"] >= 1 and record["median_s"] > 0 and record["date"][:2] == "20"
