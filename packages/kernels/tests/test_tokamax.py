"""The adapters of Tokamax's kernels: what they refuse, and that what they put around a kernel keeps the contracts.

Most of the kernels run on GPUs alone. Where Tokamax is installed, its XLA forms of the same passes stand in for them
here, and leave NaN where a kernel leaves memory as it was; the kernel of TPUs that can be interpreted is.
"""

import dataclasses
import functools
import importlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from stack_core import ops
from stack_core.abi.ops import OpImplementation
from stack_core.abi.plugins import registries
from stack_core.chips import use_chip
from stack_core.testing import OpCheck, accelerator_checks, first_call, op_checks
from stack_kernels import from_tokamax
from stack_kernels.attention.tokamax import TOKAMAX as ATTENTION
from stack_kernels.attention.tokamax import _limits, _seen
from stack_kernels.gated_linear_unit.tokamax import TOKAMAX as GATED
from stack_kernels.gated_linear_unit.tokamax import GateTile
from stack_kernels.laboratory.without_cudnn import pretend_cudnn
from stack_kernels.laboratory.without_tokamax import pretend_tokamax
from stack_kernels.linear_cross_entropy.tokamax import TOKAMAX as LOSS
from stack_kernels.linear_cross_entropy.tokamax import LogitTile
from stack_kernels.norm.tokamax_triton import TOKAMAX_TRITON as NORM
from stack_kernels.ragged_dot import tokamax as ragged
from stack_kernels.ragged_dot.groups import zero_after

NAMES = sorted(name for name in registries.ops.names() if name.partition("/")[2].startswith("tokamax"))
OPS = "tokamax._src.ops"


def test_without_it_calls_are_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(from_tokamax, "missing", from_tokamax.missing.__wrapped__)
    monkeypatch.setattr(from_tokamax, "is_installed", lambda module="tokamax": False)
    query = jax.ShapeDtypeStruct((1, 512, 16, 128), jnp.bfloat16)
    with use_chip(registries.chips["h100"]), pretend_cudnn():
        (decision,) = ops.explain(lambda q: ops.attention(q, q, q, causal=True), query)
    assert dict(decision.forward.refused)["tokamax"] == (
        "Tokamax is not installed: pip install 'stack-kernels[tokamax]', with Python 3.12 or newer"
    )


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(from_tokamax, "is_installed", lambda module="tokamax": module != "triton")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.9")
    missing = from_tokamax.missing.__wrapped__
    assert missing() == "it is written for tokamax 0.0.17, and 0.9 is installed"
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0.17")
    assert missing() is None
    assert missing("jax_triton", "triton") == "triton is not installed: pip install 'stack-kernels[tokamax-triton]'"
    monkeypatch.setattr(from_tokamax, "is_installed", lambda module="tokamax": True)
    unmet = {"jax_triton": ["jax-triton 0.4.1 needs triton>=3.7; 3.6.0 is installed"]}
    monkeypatch.setattr(from_tokamax, "unmet_requirements", lambda name: unmet.get(name, []))
    assert missing("jax_triton", "triton") == (
        "jax-triton 0.4.1 needs triton>=3.7; 3.6.0 is installed: pip install 'stack-kernels[tokamax-triton]'"
    )


@pytest.mark.parametrize("chip", ["h100", "h200"])
def test_what_was_published_chooses_between_it_and_cudnn(chip: str) -> None:
    query = jax.ShapeDtypeStruct((4, 4096, 32, 128), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((4, 4096, 8, 128), jnp.bfloat16)
    with use_chip(registries.chips[chip]), pretend_cudnn(), pretend_tokamax():
        (decision,) = ops.explain(lambda q, k: ops.attention(q, k, k, causal=True), query, key)
    assert decision.forward.implementation.name in ("tokamax", "cudnn")
    assert decision.forward.reason.startswith("tuned table 'published': Tokamax 0.0.17 published"), decision


def test_chips_without_its_kernels_are_refused() -> None:
    query = jax.ShapeDtypeStruct((1, 512, 16, 128), jnp.bfloat16)
    with use_chip(registries.chips["a100-80gb"]), pretend_cudnn(), pretend_tokamax():
        (decision,) = ops.explain(lambda q: ops.attention(q, q, q, causal=True), query)
    assert dict(decision.forward.refused)["tokamax"] == "it is for h100, h200 and b200, not a100-80gb"


@pytest.mark.parametrize(("d_out", "takes"), [(64, False), (192, False), (256, True)])
def test_the_gated_unit_has_two_tiles_of_columns_at_a_time(d_out: int, takes: bool) -> None:
    x, weight = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((16, 64), (64, d_out)))
    with use_chip(registries.chips["h100"]), pretend_tokamax():
        (decision,) = ops.explain(ops.gated_linear_unit, x, weight, weight)
    assert ("d_in is a multiple of 64 and d_out of 128" in dict(decision.forward.refused).values()) == (not takes)


@pytest.mark.parametrize(("queries", "takes"), [(8, True), (26, False), (32, True)])
def test_blackwell_copies_a_bias_in_tiles_of_eight_queries(queries: int, takes: bool) -> None:
    query, bias = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2, queries, 4, 64), (1, 4, queries, queries))
    )
    call = first_call(lambda q, b: ops.attention(q, q, q, bias=b), query, bias)
    chip = registries.chips["b200"]
    with use_chip(chip), pretend_tokamax():
        answer = ATTENTION.supports(call, chip, None)
    assert answer is True if takes else "at most 8 queries with a bias, or a multiple of 8" in answer


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("queries", "keys"), [((0, 9), (0, 9)), ((9, 20), (0, 9)), ((0, 9), (9, 20)), ((4, 16), (2, 9))]
)
def test_parts_of_a_packed_sequence_see_the_keys_of_their_segments(
    queries: tuple[int, int], keys: tuple[int, int], causal: bool
) -> None:
    """Also queries after or before all keys, as in pairs of blocks of `ring_attention`."""
    ids = jnp.asarray([[1] * 3 + [2] * 3 + [3] * 8 + [4] * 6, [1] * 9 + [2] * 11])
    of_queries, of_keys = ids[:, slice(*queries)], ids[:, slice(*keys)]
    place, at = jnp.arange(*queries), jnp.arange(*keys)
    expected = of_queries[:, :, None] == of_keys[:, None, :]
    if causal:
        expected &= at <= place[:, None]
    call = {
        "query": jnp.zeros((2, place.size, 1, 8)),
        "key": jnp.zeros((2, at.size, 1, 8)),
        "segment_ids": ops.PackedSegments(of_queries, of_keys),
        "query_offset": queries[0] - keys[0],
        "causal": causal,
        "window": None,
        "mask": None,
        "kv_lengths": None,
    }
    mask, first, end = _limits(call)
    assert mask is None
    visible = jnp.arange(at.size) >= first[..., None]
    # Without an end the kernel masks later keys itself.
    visible &= at <= place[:, None] if end is None else jnp.arange(at.size) < end[..., None]
    np.testing.assert_array_equal(visible[:, 0], expected)
    np.testing.assert_array_equal(_seen(call)[..., 0], expected.any(axis=2))


@dataclasses.dataclass
class Vjp:
    """The gradients of attention by the residuals that it is handed, as a kernel computes them."""

    def bind(self, *arguments: Any, **options: Any) -> Any:
        return types.SimpleNamespace(args=arguments, kwargs=options)

    def _fwd(self, residuals: Any, out: Any, dout: Any, q: Any, k: Any, v: Any, *, config: Any, **options: Any) -> Any:
        wide = [x.astype(jnp.float32) for x in (out, dout, q, k, v)]
        out, dout, query, key, value = wide
        group = query.shape[2] // key.shape[2]
        highest, total = residuals
        bias, cap = options["bias"], options["logits_soft_cap"]
        bias = None if bias is None else bias.astype(jnp.float32)
        allowed = options["mask"].as_array(query.shape[1], key.shape[1])
        allowed = jnp.ones((1, 1, 1, 1), bool) if allowed is None else allowed

        def logits(query: Any, key: Any, bias: Any) -> Any:
            found = jnp.einsum("bqhd,bkhd->bhqk", query, jnp.repeat(key, group, 2)) * options["logits_scale"]
            found = found if bias is None else found + bias
            return found if cap is None else cap * jnp.tanh(found / cap)

        z, pull = jax.vjp(logits, query, key, bias)
        weights = jnp.where(allowed, jnp.exp(z - highest[..., None]) / total[..., None], 0)
        of_weights = jnp.einsum("bqhd,bkhd->bhqk", dout, jnp.repeat(value, group, 2))
        delta = jnp.sum(out * dout, axis=-1).swapaxes(1, 2)[..., None]
        of_query, of_key, of_bias = pull(weights * (of_weights - delta))
        of_value = jnp.einsum("bhqk,bqhd->bkhd", weights, dout)
        of_value = of_value.reshape(*of_value.shape[:2], -1, group, of_value.shape[3]).sum(3)
        found = dict(zip("qkv", (of_query, of_key, of_value), strict=True))
        return {name: x.astype(q.dtype) for name, x in found.items()} | {"bias": of_bias}, None


@dataclasses.dataclass
class Ragged:
    """Grouped products that leave what no group has as it was."""

    op: Any

    def bind(self, *arguments: Any, **options: Any) -> Any:
        return self.op.bind(*arguments, **options)

    def _fwd(self, lhs: Any, rhs: Any, *, config: Any, **options: Any) -> Any:
        found, residuals = self.op._fwd(lhs, rhs, config=config, **options)
        sizes = jnp.asarray(options["group_sizes"])
        written = sizes > 0 if found.ndim == 3 else jnp.arange(len(found)) < jnp.sum(sizes)
        return jnp.where(written.reshape(-1, *[1] * (found.ndim - 1)), found, jnp.nan), residuals


def _stand_ins() -> Iterator[tuple[Any, str, Any]]:
    def module(name: str) -> Any:
        return importlib.import_module(f"{OPS}.{name}")

    attention = module("attention.pallas_mosaic_gpu")
    yield attention, "PallasMosaicGpuFlashAttention", module("attention.base").DotProductAttention
    yield attention.vjp, "PallasMosaicGpuFlashAttentionVjp", Vjp
    grouped = module("ragged_dot.base").RaggedDot()
    for place, name in (
        ("pallas_mosaic_gpu", "PallasMosaicGpuRaggedDot"),
        ("triton", "TritonRaggedDot"),
        ("pallas_mosaic_tpu", "PallasMosaicTpuRaggedDot"),
        ("pallas_mosaic_tpu_v2", "PallasMosaicTpuV2RaggedDot"),
    ):
        yield module(f"ragged_dot.{place}"), name, lambda **_: Ragged(grouped)
    norm = module("normalization.base")
    yield module("normalization.triton"), "TritonNormalization", lambda **_: norm.Normalization()
    yield module("normalization.triton"), "TritonNormalizationVjp", norm.NormalizationVjp
    gated = module("gated_linear_unit.pallas_mosaic_gpu")
    yield gated, "PallasMosaicGpuGatedLinearUnit", module("gated_linear_unit.base").GatedLinearUnit
    loss = module("linear_softmax_cross_entropy_loss.pallas_mosaic_tpu_kernel")
    reference = module("linear_softmax_cross_entropy_loss.reference")
    for way in ("fwd", "bwd"):
        yield (
            loss,
            f"linear_softmax_cross_entropy_loss_{way}_pallas_mosaic_tpu",
            _without_blocks(getattr(reference, f"linear_softmax_cross_entropy_loss_{way}_reference")),
        )


def _without_blocks(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arrays, reduction, **blocks: function(*arrays, reduction=reduction)


_TILES = {"gated_linear_unit": GateTile(128, 64, 64, 2), "linear_cross_entropy": LogitTile(1024, 128, 128)}
IMPLEMENTATIONS: tuple[tuple[OpImplementation, str], ...] = (
    (ATTENTION, "h100"),
    (ragged.TOKAMAX_MOSAIC_GPU, "h100"),
    (ragged.TOKAMAX_TRITON, "h100"),
    (ragged.TOKAMAX_TPU_V1, "v6e"),
    (dataclasses.replace(ragged.V2, differentiates=True).implementation(), "v6e"),
    (NORM, "h100"),
    (GATED, "h100"),
    (LOSS, "v6e"),
)


# XLA's grouped products multiply NaN of other groups by 0, and Tokamax's XLA form of the norm's gradient knows the last
# axis alone. Its forms mix dtypes, so that only float32 is looked at.
_NOT_OF_XLA = (("ragged_dot", "not_a_number"), ("norm", "other_axis"))


def _checks() -> Iterator[Any]:
    for implementation, chip in IMPLEMENTATIONS:
        for check in op_checks(implementation.op):
            if check.aspect != "float32" or (implementation.op, check.case.name) in _NOT_OF_XLA:
                continue
            yield pytest.param(implementation, chip, check, id=f"{implementation.op}/{implementation.name}-{check}")


@pytest.mark.slow
@pytest.mark.skipif(from_tokamax.missing("jax_triton") is not None, reason=str(from_tokamax.missing("jax_triton")))
@pytest.mark.parametrize(("implementation", "chip", "check"), list(_checks()))
def test_contract_with_xla_in_the_place_of_the_kernel(
    implementation: OpImplementation, chip: str, check: OpCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name, stand_in in _stand_ins():
        monkeypatch.setattr(module, name, stand_in)
    with use_chip(registries.chips[chip]), pretend_tokamax():
        check(_of_any_size(implementation))


def _halved(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) if x.dtype == jnp.float32 else x


def _of_any_size(implementation: OpImplementation) -> OpImplementation:
    """Contracts' calls are small: what stands in takes float32 and any size, which the kernels do not."""

    def supports(call: Any, chip: Any, config: Any = None) -> bool | str:
        wide = jax.tree.map(_halved, dict(call.arrays))
        answer = implementation.supports(dataclasses.replace(call, arrays=wide), chip, config)
        sizes = ("multiple", "at least", "128 words")
        return True if isinstance(answer, str) and any(word in answer for word in sizes) else answer

    def default(call: Any, chip: Any) -> Any:
        assert implementation.default is not None
        return implementation.default(call, chip) or _TILES.get(implementation.op)

    return dataclasses.replace(implementation, supports=supports, default=default)


@dataclasses.dataclass(frozen=True)
class OfHopper(ragged.Kernel):
    """Hopper's grouped product with a correct kernel for rows and the infinities of an H100 for matrices."""

    def _by_group(self, rows: Any, matrices: Any, sizes: Any, config: Any, *, transposed: bool) -> Any:
        matrices = matrices.mT if transposed else matrices
        return zero_after(sizes, jax.lax.ragged_dot(rows, matrices, sizes).astype(rows.dtype))

    def _outer(self, lhs: Any, cotangent: Any, sizes: Any, config: Any) -> Any:
        return jnp.full((len(sizes), lhs.shape[1], cotangent.shape[1]), jnp.inf, lhs.dtype)


@dataclasses.dataclass
class Forward(Vjp):
    """Attention in float32, and the maximum and the sum that its gradients need."""

    def _fwd(self, q: Any, k: Any, v: Any, *, config: Any, **options: Any) -> Any:
        query, key, value = (x.astype(jnp.float32) for x in (q, k, v))
        group, cap = query.shape[2] // key.shape[2], options["logits_soft_cap"]
        logits = jnp.einsum("bqhd,bkhd->bhqk", query, jnp.repeat(key, group, 2)) * options["logits_scale"]
        logits = logits if options["bias"] is None else logits + options["bias"].astype(jnp.float32)
        logits = logits if cap is None else cap * jnp.tanh(logits / cap)
        allowed = options["mask"].as_array(query.shape[1], key.shape[1])
        logits = logits if allowed is None else jnp.where(allowed, logits, jnp.finfo(jnp.float32).min)
        highest = logits.max(3)
        total = jnp.exp(logits - highest[..., None]).sum(3)
        weights = jnp.exp(logits - highest[..., None]) / total[..., None]
        out = jnp.einsum("bhqk,bkhd->bqhd", weights, jnp.repeat(value, group, 2))
        return out.astype(q.dtype), (highest, total)


@dataclasses.dataclass
class VjpOfHopper(Vjp):
    """The gradients as Hopper's kernel computes them: by whole tiles of queries, read as zeros after the last one."""

    def _fwd(self, residuals: Any, out: Any, dout: Any, q: Any, k: Any, v: Any, *, config: Any, **options: Any) -> Any:
        q_seq, rest = q.shape[1], -q.shape[1] % config.block_q_dkv

        def read(x: Any, axis: int) -> Any:
            return jnp.pad(x, [(0, rest if each == axis else 0) for each in range(x.ndim)])

        highest, total = (read(x, 2) for x in residuals)
        # The queries that do not exist have logits of 0.
        weights = jnp.exp(-highest) / (total + jnp.finfo(jnp.float32).tiny)
        of_rest = jnp.einsum("bhq,bqhd->bhd", weights[:, :, q_seq:].astype(q.dtype), read(dout, 1)[:, q_seq:])
        of_rest = of_rest.reshape(len(k), k.shape[2], -1, v.shape[3]).sum(2)[:, None]
        found, residuals = super()._fwd(residuals, out, dout, q, k, v, config=config, **options)
        return found | {"v": found["v"] + of_rest}, residuals


@pytest.mark.slow
@pytest.mark.skipif(not from_tokamax.is_installed(), reason="needs tokamax, which needs Python 3.12")
@pytest.mark.parametrize("check", accelerator_checks("attention"), ids=str)
def test_gradients_of_attention_by_whole_tiles_of_queries(check: OpCheck, monkeypatch: pytest.MonkeyPatch) -> None:
    attention = importlib.import_module(f"{OPS}.attention.pallas_mosaic_gpu")
    monkeypatch.setattr(attention, "PallasMosaicGpuFlashAttention", Forward)
    monkeypatch.setattr(attention.vjp, "PallasMosaicGpuFlashAttentionVjp", VjpOfHopper)
    with use_chip(registries.chips["h100"]), pretend_tokamax():
        check(ATTENTION)


_GROUPS = ("partial_groups", "empty_first_and_last_groups", "all_rows_in_one_group", "only_rows_of_no_group")


def _on_hopper(**changes: Any) -> OpImplementation:
    fields = {field.name: getattr(ragged.MOSAIC_GPU, field.name) for field in dataclasses.fields(ragged.Kernel)}
    return OfHopper(**{**fields, **changes}).implementation()


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, id=str(check), marks=() if is_quick else pytest.mark.slow)
        for check in accelerator_checks("ragged_dot")
        for is_quick in (str(check) in {f"tiles_{name}-bfloat16" for name in _GROUPS},)
    ],
)
def test_the_gradient_of_grouped_matrices_on_hopper_is_the_reference_s(check: OpCheck) -> None:
    with use_chip(registries.chips["h100"]), pretend_tokamax():
        check(_on_hopper())


def test_the_infinities_of_its_own_gradient_would_be_noticed() -> None:
    (check, *_) = accelerator_checks("ragged_dot")
    with use_chip(registries.chips["h100"]), pretend_tokamax(), pytest.raises(AssertionError, match=r"rhs.*finite"):
        check(_on_hopper(sums_by_group=True))


def test_the_gradient_of_grouped_matrices_on_hopper_is_of_each_device() -> None:
    """Experts that are divided over devices are multiplied inside of `jax.shard_map`."""
    mesh = jax.make_mesh((1,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
    place, lhs = jax.sharding.PartitionSpec("expert"), jnp.ones((20, 64), jnp.bfloat16)
    product = jax.shard_map(
        lambda rhs: ops.ragged_dot(lhs, rhs, jnp.array([13, 7]), implementation=_on_hopper()),
        mesh=mesh,
        in_specs=place,
        out_specs=place,
    )
    with use_chip(registries.chips["h100"]), pretend_tokamax():
        found = jax.grad(lambda rhs: jnp.sum(product(rhs).astype(jnp.float32)))(jnp.ones((2, 64, 64), jnp.bfloat16))
    np.testing.assert_array_equal(np.asarray(found[:, 0, 0], np.float32), [13, 7])


@pytest.mark.slow
@pytest.mark.skipif(not from_tokamax.is_installed(), reason="needs tokamax, which needs Python 3.12")
@pytest.mark.parametrize(
    "sizes",
    [(100, 0, 156), (0, 128, 0), (300, 300, 300), (0, 0, 300), (300, 0, 0), (0, 300, 0), (0, 0, 0), (1, 298, 1)],
)
def test_the_grouped_product_of_tpus_interpreted(sizes: tuple[int, ...]) -> None:
    params = pltpu.InterpretParams(uninitialized_memory="nan")
    kernel = dataclasses.replace(ragged.V1, op=lambda groups: {"interpret": params}).implementation()
    keys = jax.random.split(jax.random.key(0), 3)
    lhs, cotangent = (jax.random.normal(key, (300, 256)) for key in keys[:2])
    rhs = jax.random.normal(keys[2], (3, 256, 256))

    def loss(lhs: Any, rhs: Any, *, implementation: Any) -> Any:
        found = ops.ragged_dot(lhs, rhs, jnp.array(sizes), implementation=implementation)
        return jnp.vdot(found, cotangent), found

    device = jax.sharding.AbstractDevice("TPU v6 lite", 1, "tpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), abstract_device=device)
    with use_chip(registries.chips["v6e"]), jax.sharding.use_abstract_mesh(mesh):
        functions = [functools.partial(loss, implementation=name) for name in (kernel, "reference")]
        (actual, expected) = (jax.grad(function, (0, 1), has_aux=True)(lhs, rhs) for function in functions)
    for found, wanted in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert jnp.max(jnp.abs(found - wanted)) < 1e-4 * jnp.max(jnp.abs(wanted) + 1e-6) + 1e-4
