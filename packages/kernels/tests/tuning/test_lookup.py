"""What a table of measurements advises, for calls that were measured and for those near them."""

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from stack_core import ops
from stack_core.abi.ops import OWN, OpCall, OpImplementation, TunedChoice
from stack_core.chips import Chip
from stack_core.ops.building import differentiated
from stack_kernels.tuning.lookup import OneTable, RelativeChipWarning, TunedTables, duration, nearest_chip
from stack_kernels.tuning.shapes import shape_of
from stack_kernels.tuning.tables import Case, ChipName, Measurement, Table

CHIP = Chip(
    kind="cpu",
    unit="chip",
    peak_flops={"float32": 1e12},
    hbm_bytes=None,
    hbm_bandwidth_bytes_s=1e11,
    on_chip_bytes=None,
    link_bandwidth_bytes_s=None,
    provenance="test",
    model="Acme 9000, 2 cores",
)


@dataclasses.dataclass(frozen=True)
class Tile:
    rows: int
    fused: bool = False


def _implementation(name: str, **fields: Any) -> OpImplementation:
    return OpImplementation(**{"op": "attention", "name": name, "forward": len, "backward": len, **fields})


CANDIDATES = {
    name: _implementation(name, priority=priority)
    for name, priority in (("a", 1), ("b", 1), ("c", 0), ("reference", 0))
}


def _call(seq: int = 8192, *, dtype: str = "bfloat16", direction: str = "forward", **options: Any) -> OpCall:
    struct = jax.ShapeDtypeStruct((1, seq, 8, 64), dtype)
    arrays = dict.fromkeys(("query", "key", "value"), struct) | dict.fromkeys(
        ("bias", "mask", "segment_ids", "kv_lengths", "sinks")
    )
    defaults = {"causal": True, "window": None, "softcap": None, "scale": 0.125, "return_lse": False, "query_offset": 0}
    return OpCall("attention", arrays, {**defaults, **options}, direction)


def _measured(seconds: Any, call: OpCall | None = None, **fields: Any) -> list[Measurement]:
    """Seconds by implementation, or (implementation, config, seconds)."""
    call = _call() if call is None else call
    case = Case(shape_of(call), call.direction, ("query",) if call.direction == "backward" else ())
    fields = {"outcome": "measured", "rounds": 15, "versions": {"jax": jax.__version__}, **fields}
    rows = [(name, None, taken) for name, taken in seconds.items()] if isinstance(seconds, dict) else seconds
    return [
        Measurement(case=case, implementation=name, config=config, median_s=taken, **fields)
        for name, config, taken in rows
    ]


def _table(*measurements: list[Measurement]) -> OneTable:
    return OneTable(Table(ChipName.of(CHIP), tuple(found for each in measurements for found in each)))


def _choice(table: TunedTables, call: OpCall, candidates: Any = None, forward: TunedChoice | None = None) -> Any:
    candidates = CANDIDATES if candidates is None else candidates
    return table.lookup(call, CHIP, candidates=candidates, forward=forward)


def _name(*args: Any, **options: Any) -> str | None:
    choice = _choice(*args, **options)
    return None if choice is None else choice.implementation


BOTH = {"a": 2e-3, "b": 1e-3, "reference": 5e-3}


@pytest.mark.parametrize("seq", [8192, 8193, 8191, 7168, 16384, 4096])
def test_neighbours_use_what_was_measured(seq: int) -> None:
    assert _name(_table(_measured(BOTH)), _call(seq)) == "b"


@pytest.mark.parametrize("seq", [100, 65536])
def test_what_is_far_from_all_that_was_measured_gets_no_advice(seq: int) -> None:
    assert _choice(_table(_measured(BOTH)), _call(seq)) is None


def test_a_query_offset_may_be_negative() -> None:
    table = _table(_measured(BOTH, _call(query_offset=-64)))
    assert [_name(table, _call(query_offset=offset)) for offset in (-64, -65, -200, 1, -4096, 64)] == 3 * ["b"] + 3 * [
        None
    ]


def test_the_reason_says_what_was_measured_where() -> None:
    table = _table(_measured(BOTH))
    assert _choice(table, _call(8193)).reason == (
        "forward 1 ms at batch=1 head_dim=64 heads=8 kv_heads=8 kv_seq=8192 q_seq=8192 value_dim=64 "
        f"(15 rounds, jax {jax.__version__}); 2.00 x as fast as a"
    )
    assert "; about 4 ms here; 2.00 x as fast as a" in _choice(table, _call(16384)).reason


@pytest.mark.parametrize(
    "call",
    [
        _call(dtype="float32"),
        _call(causal=False),
        _call(window=(128, None)),
        _call(softcap=30.0),
        _call(direction="backward"),
        _call(query_offset=5),
        dataclasses.replace(_call(), arrays=_call().arrays | {"kv_lengths": jax.ShapeDtypeStruct((1,), "int32")}),
    ],
)
def test_calls_of_another_kind_get_no_advice(call: OpCall) -> None:
    assert _choice(_table(_measured(BOTH)), call) is None


def test_values_that_no_kernel_cares_for_are_no_difference() -> None:
    assert _name(_table(_measured(BOTH)), _call(scale=0.3)) == "b"


def test_the_nearest_sizes_decide() -> None:
    table = _table(_measured({"a": 1e-3, "b": 2e-3}, _call(4096)), _measured({"a": 9e-3, "b": 4e-3}, _call(16384)))
    assert [_name(table, _call(seq)) for seq in (3000, 4096, 16384, 20000)] == ["a", "a", "b", "b"]


def test_between_two_measured_sizes_it_is_interpolated() -> None:
    """a costs nothing to start and b is twice as fast in the long run: they cross where their models do."""
    flops = functools.partial(lambda seq: shape_of(_call(seq)).flops)

    def seconds(seq: int) -> dict[str, float]:
        return {"a": 1e-12 * flops(seq), "b": 0.02 + 0.5e-12 * flops(seq)}

    table = _table(*(_measured(seconds(seq), _call(seq)) for seq in (2048, 8192)))
    crossing = next(seq for seq in range(2048, 9000, 64) if seconds(seq)["b"] < seconds(seq)["a"])
    assert 4096 < crossing < 8192
    assert _name(table, _call(int(crossing * 0.9))) == "a"
    assert _name(table, _call(int(crossing * 1.1))) == "b"


def test_what_does_not_support_the_call_leaves_it_to_the_next() -> None:
    table = _table(_measured(BOTH), _measured({"c": 1e-3, "reference": 2e-3}, _call(4096)))
    assert _name(table, _call(), {"a": CANDIDATES["a"], "reference": CANDIDATES["reference"]}) == "a"
    assert _name(table, _call(), {"c": CANDIDATES["c"]}) == "c"
    assert _choice(table, _call(), {"new": _implementation("new")}) is None


def test_the_first_in_priority_stays_the_choice_until_it_was_tried() -> None:
    new = CANDIDATES | {"new": _implementation("new", priority=3)}
    assert _choice(_table(_measured(BOTH)), _call(), new) is None
    tried = _measured({"new": 0.0}, outcome="rejected")
    assert _name(_table(_measured(BOTH), tried), _call(), new) == "b"


def test_configs_come_back_as_what_the_implementation_takes() -> None:
    tiled = {"a": _implementation("a", default=lambda call, chip: Tile(64))}
    found = _measured([("a", {"rows": 128, "fused": True}, 1e-3), ("a", {"rows": 64, "fused": False}, 2e-3)])
    assert _choice(_table(found), _call(), tiled).config == Tile(128, fused=True)


@pytest.mark.parametrize(
    "config", [None, 64, {"rows": 64}, {"rows": "64", "fused": True}, {"rows": 64, "fused": True, "depth": 1}]
)
def test_a_config_that_no_longer_fits_is_passed_over(config: Any) -> None:
    tiled = {"a": _implementation("a", default=lambda call, chip: Tile(64))}
    good = _measured([("a", {"rows": 64, "fused": False}, 2e-3)])
    assert _choice(_table(_measured([("a", config, 1e-3)]), good), _call(), tiled).config == Tile(64)
    assert _choice(_table(_measured([("a", config, 1e-3)])), _call(), tiled) is None
    plain = {"a": _implementation("a"), "b": _implementation("b")}
    assert (_name(_table(_measured([("a", {"rows": 1}, 1e-3), ("b", None, 2e-3)])), _call(), plain)) == "b"


def test_times_under_other_versions_of_jax_count_where_there_are_no_others() -> None:
    old, older = ({"versions": {"jax": version}} for version in ("0.9.3", "0.8.0"))
    faster = {"a": 1e-3, "b": 2e-3}
    assert _name(_table(_measured(faster, **old)), _call()) == "a"
    assert _name(_table(_measured(faster, **old), _measured(BOTH)), _call()) == "b"
    assert _name(_table(_measured(BOTH, **older), _measured(faster, **old)), _call()) == "a"
    assert _name(_table(_measured(BOTH), _measured(faster, versions={"jax": "99.1"})), _call()) == "b"


BACKWARD = _call(direction="backward")


def test_gradients_decide_both_passes_where_they_were_measured() -> None:
    """a is faster forward; but b shares its passes, and together they are faster than all else."""
    table = _table(_measured({"a": 1e-3, "b": 2e-3}), _measured({"a": 9e-3, "b": 5e-3}, BACKWARD, whole=True))
    assert _name(table, _call()) == "b"
    assert _name(table, BACKWARD, forward=TunedChoice("b", None, "")) == "b"


def test_gradients_alone_decide_the_forward_pass_too() -> None:
    wholes = _measured({"a": 9e-3, "b": 5e-3}, BACKWARD, whole=True)
    assert _name(_table(wholes), _call()) == "b"
    new = CANDIDATES | {"new": _implementation("new", priority=3)}
    assert _choice(_table(wholes), _call(), new) is None


def test_a_backward_pass_of_its_own_joins_the_fastest_forward_pass() -> None:
    table = _table(
        _measured({"a": 1e-3, "b": 2e-3}),
        _measured({"b": 5e-3}, BACKWARD, whole=True),
        _measured({"a": 3e-3}, BACKWARD),
    )
    assert _name(table, _call()) == "a"
    assert _name(table, BACKWARD, forward=TunedChoice("a", None, "")) == "a"


def test_a_forward_pass_pays_for_the_gradient_that_it_needs() -> None:
    """a takes 1 ms forward and needs the 4.5 ms of c's backward pass, which is more than b's 5 ms for both."""
    table = _table(
        _measured({"a": 1e-3, "b": 2e-3, "c": 3e-3}),
        _measured({"b": 5e-3}, BACKWARD, whole=True),
        _measured({"c": 4.5e-3}, BACKWARD),
    )
    assert _name(table, _call()) == "b"


def test_after_a_given_forward_pass_what_shares_nothing_pays_for_both() -> None:
    """After b, its own whole 5 ms stand against 2 ms + 3.5 ms; after a against 1 ms + 3.5 ms."""
    table = _table(
        _measured({"a": 1e-3, "b": 2e-3}),
        _measured({"b": 5e-3}, BACKWARD, whole=True),
        _measured({"a": 3.5e-3}, BACKWARD),
    )
    assert _name(table, BACKWARD, forward=TunedChoice("b", None, "")) == "b"
    assert _name(table, BACKWARD, forward=TunedChoice("a", None, "")) == "a"


def test_passes_of_one_function_have_one_config() -> None:
    tiled = {"a": _implementation("a", default=lambda call, chip: 64), "b": _implementation("b")}
    forwards = _measured([("a", 64, 1e-3), ("a", 128, 2e-3), ("b", None, 1e-3)])
    wholes = _measured([("a", 64, 9e-3), ("a", 128, 3e-3), ("b", None, 6e-3)], BACKWARD, whole=True)
    table = _table(forwards, wholes)
    assert _choice(table, _call(), tiled).config == 128
    chosen = _choice(table, BACKWARD, tiled, TunedChoice("a", 64, ""))
    assert (chosen.implementation, chosen.config) == ("b", None)  # 1 + 6 ms against 9 ms


def test_dispatch_follows_the_pair(register: Callable[..., None]) -> None:
    forward, backward = differentiated(lambda x, weight, *, bias, preferred_dtype, requested: (x @ weight, {}))
    own = {"residuals": (OWN,), "priority": 2}
    register(*(OpImplementation("linear", name, forward, backward, **own) for name in ("a", "b")))
    structs = {"x": jax.ShapeDtypeStruct((24, 16), "float32"), "weight": jax.ShapeDtypeStruct((16, 16), "float32")}
    call = OpCall("linear", {**structs, "bias": None}, {"preferred_dtype": jnp.dtype("float32")}, "forward")
    backward = dataclasses.replace(call, direction="backward")
    table = Table(
        ChipName.of(CHIP),
        (*_measured({"a": 1e-3, "b": 2e-3}, call), *_measured({"a": 9e-3, "b": 5e-3}, backward, whole=True)),
    )
    with warnings.catch_warnings(), ops.use_tuned_table(OneTable(table)):
        warnings.simplefilter("ignore", RelativeChipWarning)
        (explained,) = ops.explain(ops.linear, *structs.values())
    assert (explained.forward.implementation.name, explained.backward.implementation.name) == ("b", "b")


def test_a_lookup_is_cheap_and_asks_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it was asked about a shape, it estimates nothing again."""
    table = _table(_measured(BOTH), _measured(BOTH, _call(4096)))
    _choice(table, _call(5000))
    monkeypatch.setattr("stack_kernels.tuning.lookup.estimate_s", lambda *args: pytest.fail("estimated again"))
    monkeypatch.setattr(jax, "devices", lambda *args: pytest.fail("asked for devices"))
    assert _name(table, _call(5000)) == "b"


def _chip_name(kind: str, model: str = "", **rates: float) -> ChipName:
    return ChipName(kind, model, rates)


H100, H200, A100 = (
    _chip_name(kind, bfloat16=flops, memory=memory)
    for kind, flops, memory in (("h100", 989e12, 3.35e12), ("h200", 989e12, 4.8e12), ("a100-40gb", 312e12, 1.56e12))
)
V5P, CPU = _chip_name("v5p", bfloat16=459e12, memory=2.8e12), _chip_name("cpu", "Acme, 2 cores", float32=2e11)


def test_the_relative_of_a_chip_is_the_nearest_of_its_platform() -> None:
    known = [A100, H100, V5P, CPU]
    assert nearest_chip(H200, known) == H100
    assert nearest_chip(_chip_name("NVIDIA L40S"), known) in (A100, H100)
    assert nearest_chip(_chip_name("v6e", bfloat16=918e12), known) == V5P
    assert nearest_chip(_chip_name("TPU v3"), known) == V5P
    assert nearest_chip(_chip_name("cpu", "Other, 64 cores", float32=4e12), known) == CPU
    assert nearest_chip(_chip_name("v100"), [V5P, CPU]) is None  # it is a GPU
    assert nearest_chip(_chip_name("acme-1"), known) is None
    assert nearest_chip(H100, [H200, H100]) == H100


def test_an_unknown_chip_uses_its_relative_and_says_so_once() -> None:
    table = _table(_measured(BOTH))
    other = dataclasses.replace(CHIP, model="Bcme 1, 64 cores")
    with pytest.warns(RelativeChipWarning, match=r"Nothing was measured on cpu \(Bcme 1, 64 cores\).* on cpu \(Acme"):
        choice = table.lookup(_call(), other, candidates=CANDIDATES)
    assert choice is not None and choice.implementation == "b"
    assert table.lookup(_call(), other, candidates=CANDIDATES) == choice  # warnings are errors
    assert table.lookup(_call(64), other, candidates=CANDIDATES) is None
    assert table.lookup(_call(), dataclasses.replace(CHIP, kind="h100"), candidates=CANDIDATES) is None


def test_a_relative_is_not_spoken_of_where_it_has_no_advice() -> None:
    other = dataclasses.replace(CHIP, model="Bcme 1, 64 cores")
    assert _table(_measured(BOTH)).lookup(_call(64), other, candidates=CANDIDATES) is None


def test_tables_in_use_are_compared_by_what_they_hold() -> None:
    one, same, other = _table(_measured(BOTH)), _table(_measured(BOTH)), _table(_measured({"a": 1.0}))
    assert one == same and hash(one) == hash(same)
    assert one != other


@pytest.mark.parametrize(
    ("seconds", "text"), [(2.5, "2.5 s"), (1.31e-3, "1.31 ms"), (1.8e-5, "18 us"), (5e-9, "5 ns"), (1.0, "1 s")]
)
def test_durations_have_three_digits(seconds: float, text: str) -> None:
    assert duration(seconds) == text
