"""FLOPs, memory traffic and collectives of compiled programs, against what can be worked out by hand."""

import jax
import jax.numpy as jnp
import pytest

from stack_core.programs.flops import Flops, count_flops
from stack_core.programs.hlo import ArrayShape, parse_hlo
from stack_core.programs.hlo_costs import (
    Collective,
    collectives,
    executed_flops,
    instruction_costs,
    instruction_flops,
    memory_traffic,
    uncounted_kernels,
)


def module_of(*instructions, computations=""):
    """A module whose entry computation has the given lines."""
    return parse_hlo(
        f"HloModule test\n\n{computations}\nENTRY %main () -> f32[] {{\n  " + "\n  ".join(instructions) + "\n}"
    )


def compiled(function, *args):
    return parse_hlo(jax.jit(function).lower(*args).compile().as_text())


def zeros(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def scanned(x, weights):
    return jax.lax.scan(lambda x, weight: (jnp.tanh(x @ weight), None), x, weights)[0]


def convolved(x, kernel):
    return jax.lax.conv_general_dilated(x, kernel, (2, 1), ((2, 1), (0, 3)), rhs_dilation=(2, 1))


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (scanned, (zeros(8, 16), zeros(5, 16, 16))),
        (lambda x, y: jnp.einsum("bmk,bkn->bmn", x, y), (zeros(3, 8, 16), zeros(3, 16, 4))),
        (convolved, (zeros(2, 3, 16, 17), zeros(4, 3, 3, 3))),
    ],
)
def test_flops_that_run_are_those_of_the_jaxpr_where_nothing_is_repeated(function, args):
    assert executed_flops(compiled(function, *args)) == count_flops(function, *args)


@pytest.mark.parametrize(
    ("line", "flops"),
    [
        ("convolution(%x, %w), dim_labels=bf_io->bf", 2 * 8 * 32 * 16),
        (
            'custom-call(%x, %w), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":'
            '{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}, x={}',
            2 * 8 * 32 * 16,
        ),
        ('custom-call(%x, %w), custom_call_target="mine", backend_config={}', 0),
        ('custom-call(%x, %w), custom_call_target="mine", backend_config={flops = 99 : i64}', 99),
    ],
)
def test_products_by_other_names(line, flops):
    module = module_of(
        "%x = bf16[8,16]{1,0} parameter(0)", "%w = bf16[16,32]{1,0} parameter(1)", f"ROOT %y = bf16[8,32]{{1,0}} {line}"
    )
    assert executed_flops(module).by_dtype == ({"bfloat16": flops} if flops else {})
    assert instruction_flops(module.entry.root, module.entry).total == flops


def test_kernels_that_do_not_say_what_they_do_are_named_once():
    module = module_of(
        "%x = bf16[8,16]{1,0} parameter(0)",
        '%gmm.8 = bf16[8,16]{1,0} custom-call(%x), custom_call_target="tpu_custom_call", backend_config={}',
        '%gmm = bf16[8,16]{1,0} custom-call(%gmm.8), custom_call_target="tpu_custom_call", backend_config={}',
        '%attention.1 = bf16[8,16]{1,0} custom-call(%gmm), custom_call_target="__cudnn$fmhaSoftmax"',
        'ROOT %mine = bf16[8,16]{1,0} custom-call(%attention.1), custom_call_target="mine", backend_config={}',
    )
    assert uncounted_kernels(module) == ("attention", "gmm")


def test_a_batch_axis_that_became_a_dilated_spatial_one_counts_each_pair_once():
    module = module_of(
        "%x = bf16[4,8,16]{2,1,0} parameter(0)",
        "%w = bf16[4,16,32]{2,1,0} parameter(1)",
        "ROOT %y = bf16[4,8,32]{2,1,0} convolution(%x, %w), window={size=4 stride=3 lhs_dilate=4}, "
        "dim_labels=0bf_0io->0bf",
    )
    assert executed_flops(module) == Flops({"bfloat16": 2 * 4 * 8 * 16 * 32})


FUSIONS = """%sliced (p: f32[10,64], i: s32[]) -> f32[1,64] {
  %p = f32[10,64]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %slice = f32[1,64]{1,0} dynamic-slice(%p, %i, %i), dynamic_slice_sizes={1,64}
  ROOT %exp = f32[1,64]{1,0} exponential(%slice)
}

%updated (p.1: f32[10,64], i.1: s32[], new: f32[1,64]) -> f32[10,64] {
  %p.1 = f32[10,64]{1,0} parameter(0)
  %i.1 = s32[] parameter(1)
  %new = f32[1,64]{1,0} parameter(2)
  %update = f32[10,64]{1,0} dynamic-update-slice(%p.1, %new, %i.1, %i.1)
  ROOT %bitcast = f32[10,64]{1,0} bitcast(%update)
}

%both (p.2: f32[10,64]) -> (f32[10,64], bf16[10,64]) {
  %p.2 = f32[10,64]{1,0} parameter(0)
  %narrow = bf16[10,64]{1,0} convert(%p.2)
  ROOT %pair = (f32[10,64]{1,0}, bf16[10,64]{1,0}) tuple(%p.2, %narrow)
}
"""

ROW, ALL = 64 * 4, 10 * 64 * 4


@pytest.mark.parametrize(
    ("line", "size"),
    [
        ("f32[10,64]{1,0} negate(%x)", 2 * ALL),
        ("f32[10,64]{1,0} add(%x, %x)", 3 * ALL),
        ("f32[640]{0} bitcast(%x)", 0),
        ("f32[1,64]{1,0} dynamic-slice(%x, %k, %k), dynamic_slice_sizes={1,64}", 2 * ROW),
        ("f32[10,64]{1,0} dynamic-update-slice(%x, %row, %k, %k)", 2 * ROW),
        ("f32[1,64]{1,0} fusion(%x, %k), kind=kLoop, calls=%sliced", 2 * ROW + 4),
        ("f32[10,64]{1,0} fusion(%x, %k, %row), kind=kLoop, calls=%updated", 2 * ROW + 4),
        ("(f32[10,64]{1,0}, bf16[10,64]{1,0}) fusion(%x), kind=kLoop, calls=%both", 2 * ALL + ALL // 2),
        ("f32[10,64]{1,0:T(8,128)S(1)} copy(%x)", ALL),
        ("(f32[10,64]{1,0:S(1)}, f32[10,64]{1,0}, u32[]{:S(2)}) copy-start(%x)", ALL),
    ],
)
def test_memory_traffic(line, size):
    module = module_of(
        "%x = f32[10,64]{1,0} parameter(0)",
        "%k = s32[] parameter(1)",
        "%row = f32[1,64]{1,0} parameter(2)",
        f"ROOT %y = {line}",
        computations=FUSIONS,
    )
    assert memory_traffic(module) == size


def test_memory_traffic_of_a_loop_is_that_of_its_trips():
    x, weights = zeros(64, 128), zeros(7, 128, 128)
    traffic = memory_traffic(compiled(scanned, x, weights))
    least = 7 * (128 * 128 + 2 * 64 * 128) * 4  # each weight and the activations in and out
    assert least <= traffic < 3 * least


def bounded(x, trips):
    return jax.lax.while_loop(lambda state: state[1] < trips, lambda state: (state[0] @ x, state[1] + 1), (x, 0))[0]


@pytest.mark.parametrize(
    ("function", "args"),
    [(scanned, (zeros(8, 16), zeros(10, 16, 16))), (convolved, (zeros(2, 3, 16, 17), zeros(4, 3, 3, 3)))],
)
def test_costs_of_instructions_sum_to_those_of_the_module(function, args):
    module = compiled(function, *args)
    costs = instruction_costs(module).values()
    assert sum((cost.flops * cost.times for cost in costs), Flops()) == executed_flops(module)
    assert sum(cost.traffic_bytes * cost.times for cost in costs) == memory_traffic(module)


def test_a_scan_of_ten_trips_counts_its_product_ten_times():
    (product,) = [
        cost
        for cost in instruction_costs(compiled(scanned, zeros(8, 16), zeros(10, 16, 16))).values()
        if cost.flops.total
    ]
    assert (product.times, product.flops.total) == (10, 2 * 8 * 16 * 16)


def test_where_the_run_decides_how_often_something_runs_the_count_is_not_known():
    costs = instruction_costs(compiled(bounded, zeros(16, 16), zeros(dtype=jnp.int32)))
    (product,) = [cost for cost in costs.values() if cost.flops.total]
    assert (product.times, product.flops.total) == (None, 2 * 16**3)
    assert any(cost.times == 1 for cost in costs.values())


GROUPS = {
    "{{0,2},{1,3}}": (0, 2),
    "[2,4]<=[8]": (0, 1, 2, 3),
    "[4,2]<=[2,4]T(1,0)": (0, 4),
    "{}": tuple(range(8)),
    "mesh['a'=2,'b'=4] {'b'}": (0, 1, 2, 3),
    "mesh['a'=2,'b'=4] {'a'}": (0, 4),
    "mesh['a'=2,'b'=4] {'a','b'}": tuple(range(8)),
    "mesh['a'=8] {'a':(1)2}": (0, 4),
    "mesh['a'=8] {'a':(4)2}": (0, 1),
    "mesh['a'=2,'b'=2], device_ids=([[3,1],[2,0]]) {'b'}": (3, 1),
    "mesh['a'=4,'b'=1,'c'=2], device_ids=([2,4]T(1,0)) {'c'}": (0, 4),
    "mesh['a'=4,'b'=1,'c'=2], device_ids=([2,4]T(1,0)) {'a'}": (0, 1, 2, 3),
}


@pytest.mark.parametrize("groups", GROUPS)
def test_groups_in_every_form(groups):
    module = module_of(
        "%x = f32[16,4]{1,0} parameter(0)",
        f"ROOT %y = f32[16,4]{{1,0}} all-reduce(%x), channel_id=1, replica_groups={groups}, to_apply=%add",
    )
    (found,) = collectives(module, 8)
    assert found.group == found.groups[0] == GROUPS[groups]
    members = sorted(member for group in found.groups for member in group)
    assert members == list(range(len(members))) and {len(group) for group in found.groups} == {len(found.group)}


@pytest.mark.parametrize(
    ("transfer", "target", "kind", "devices"),
    [
        ("ALL_GATHER", "{{100000,200000},{100001,200001}}", "all-gather", 2),
        ("ALL_REDUCE", '"{1,2}x{0:3}"', "all-reduce", 2),
        ("ALL_REDUCE", '"{1,2,3,4}x{0:3}"', "all-reduce", 4),
        ("ALL_TO_ALL", "{{100000,100001,200000,200001}}", "all-to-all", 4),
        ("ONE_TO_ONE", "{{100000->200000},{200000->100000}}", "collective-permute", 2),
    ],
)
def test_transfers_between_tpu_slices(transfer, target, kind, devices):
    attributes = (
        "is_host_transfer=true, frontend_attributes={"
        f'_xla_megascale_target={target},_xla_megascale_transfer_type="{transfer}"}}'
    )
    module = module_of(
        "%x = f32[1,4]{1,0} parameter(0)",
        "%t = token[] after-all()",
        f"%s = (f32[1,4]{{1,0}}, u32[], token[]) send(%x, %t), channel_id=2, {attributes}",
        f"ROOT %y = (f32[2,4]{{1,0}}, u32[], token[]) recv(%t), channel_id=1, {attributes}",
    )
    (found,) = collectives(module, 4)
    assert (found.kind, len(found.group), found.array_bytes) == (kind, devices, 32)
    assert found.between_slices


def test_a_group_of_gpus_may_span_slices():
    module = module_of(
        "%x = f32[16,4]{1,0} parameter(0)",
        "%y = f32[16,4]{1,0} all-reduce(%x), replica_groups={{0,1},{2,3}}, to_apply=%add",
        "ROOT %z = f32[16,4]{1,0} all-reduce(%y), replica_groups={{0,2},{1,3}}, to_apply=%add",
    )
    assert [each.between_slices for each in collectives(module, 4, (0, 0, 1, 1))] == [False, True]
    assert [each.between_slices for each in collectives(module, 4)] == [False, False]


@pytest.mark.parametrize(
    ("line", "kind", "array_bytes", "sent_bytes"),
    [
        ("f32[64,4]{1,0} all-gather(%x), replica_groups={{0,1,2,3}}, dimensions={0}", "all-gather", 1024, 768),
        ("f32[4,4]{1,0} reduce-scatter(%x), replica_groups={{0,1,2,3}}, dimensions={0}", "reduce-scatter", 256, 192),
        ("f32[16,4]{1,0} all-reduce(%x), replica_groups={{0,1,2,3}}", "all-reduce", 256, 384),
        ("f32[16,4]{1,0} all-to-all(%x), replica_groups={{0,1}}", "all-to-all", 256, 128),
        *(
            (f"{made} ragged-all-to-all({given}, %t, %t, %t, %t), replica_groups={{{{0,1,2,3}}}}", kind, 256, 192)
            for made, given in (("f32[32,4]{1,0}", "%x, %room"), ("f32[16,4]{1,0}", "%room, %x"))
            for kind in ("ragged-all-to-all",)
        ),
        ("f32[16,4]{1,0} collective-permute(%x), source_target_pairs={{0,1},{1,0}}", "collective-permute", 256, 256),
        (
            "(f32[16,4]{1,0}, f32[64,4]{1,0}) all-gather-start(%x), replica_groups=[1,4]<=[4], dimensions={0}",
            "all-gather",
            1024,
            768,
        ),
    ],
)
def test_bytes_of_collectives(line, kind, array_bytes, sent_bytes):
    module = module_of(
        "%x = f32[16,4]{1,0} parameter(0)",
        "%room = f32[32,4]{1,0} parameter(1)",
        "%t = s32[8]{0} parameter(2)",
        f"ROOT %y = {line}",
    )
    (found,) = collectives(module, 4)
    assert (found.kind, found.array_bytes, found.sent_bytes) == (kind, array_bytes, sent_bytes)


def test_a_collective_of_one_device_and_the_end_of_an_asynchronous_one_are_none():
    module = module_of(
        "%x = f32[16,4]{1,0} parameter(0)",
        "%one = f32[16,4]{1,0} all-reduce(%x), replica_groups={{0},{1}}",
        "%start = f32[16,4]{1,0} all-reduce-start(%x), replica_groups={{0,1}}",
        "ROOT %done = f32[16,4]{1,0} all-reduce-done(%start)",
    )
    assert [found.kind for found in collectives(module, 2)] == ["all-reduce"]


def test_all_gathers_name_the_arrays_that_they_make():
    module = module_of(
        "%x = bf16[16,4]{1,0} parameter(0)",
        "%y = bf16[2,3]{1,0} parameter(1)",
        "ROOT %z = (bf16[16,8]{1,0}, bf16[2,6]{1,0}) all-gather(%x, %y), replica_groups={{0,1}}, dimensions={1}, "
        'metadata={op_name="jit(f)/gather"}',
    )
    arrays = (ArrayShape("bf16", (16, 8)), ArrayShape("bf16", (2, 6)))
    assert collectives(module, 2) == (
        Collective("all-gather", 1, (), arrays, (0, 1), "jit(f)/gather", "z", groups=((0, 1),)),
    )


def test_an_all_reduce_that_is_fused_with_a_slice_of_its_result_is_a_reduce_scatter():
    scatter = """%all-reduce-scatter (p: f32[64,4]) -> f32[16,4] {
  %p = f32[64,4]{1,0} parameter(0)
  %reduced = f32[64,4]{1,0} all-reduce(%p), replica_groups={{0,1,2,3}}, to_apply=%add
  %id = u32[] partition-id()
  ROOT %mine = f32[16,4]{1,0} dynamic-slice(%reduced, %id, %id), dynamic_slice_sizes={16,4}
}
"""
    module = module_of(
        "%x = f32[64,4]{1,0} parameter(0)",
        "ROOT %y = f32[16,4]{1,0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter",
        computations=scatter,
    )
    (found,) = collectives(module, 4)
    assert (found.kind, found.array_bytes, found.sent_bytes) == ("reduce-scatter", 1024, 768)
    assert found.runner == "y"
    assert memory_traffic(module) == 1024 + 256


@pytest.mark.parametrize(
    ("base", "is_gather"),
    [("f32[16,4]{1,0} broadcast(%zero), dimensions={}", True), ("f32[16,4]{1,0} copy(%y)", False)],
)
def test_an_all_reduce_of_parts_amid_zeros_is_a_gather(base, is_gather):
    lines = (
        "%x = f32[4,4]{1,0} parameter(0)",
        "%place = s32[] parameter(1)",
        "%y = f32[16,4]{1,0} parameter(2)",
        "%zero = f32[] constant(0)",
        f"%base = {base}",
    )
    update = "dynamic-update-slice(%base, %x, %place, %place)"
    summed = "all-reduce(%part), replica_groups={{0,1,2,3}}"
    module = module_of(*lines, f"%part = f32[16,4]{{1,0}} {update}", f"ROOT %sum = f32[16,4]{{1,0}} {summed}")
    (found,) = collectives(module, 4)
    assert (found.kind, found.is_gather, found.sent_bytes) == ("all-reduce", is_gather, 384)


def test_a_fusion_that_runs_beside_others_counts_as_any_other():
    module = module_of(
        "%x = f32[10,64]{1,0} parameter(0)",
        "%k = s32[] parameter(1)",
        "%start = ((f32[10,64]{1,0}, s32[]), f32[1,64]{1,0}, u32[]) fusion-start(%x, %k), kind=kLoop, calls=%sliced",
        "ROOT %done = f32[1,64]{1,0} fusion-done(%start)",
        computations=FUSIONS,
    )
    assert memory_traffic(module) == 2 * ROW + 4


def test_a_collective_in_a_call_that_runs_beside_others_counts():
    gather = """%called (p: bf16[64,256]) -> bf16[512,256] {
  %p = bf16[64,256]{1,0} parameter(0)
  ROOT %gathered = bf16[512,256]{1,0} all-gather(%p), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
}, execution_thread="sparsecore"
"""
    module = module_of(
        "%x = bf16[64,256]{1,0} parameter(0)",
        '%start = ((), (), s32[]{:S(2)}) call-start(), async_execution_thread="sparsecore", to_apply=%called',
        "%update = ((bf16[64,256]{1,0}), bf16[512,256]{1,0}) call-update(%start, %x)",
        "ROOT %done = bf16[512,256]{1,0} call-done(%update)",
        computations=gather,
    )
    assert [(found.array_bytes, found.runner) for found in collectives(module, 8)] == [(512 * 256 * 2, "start")]
    assert memory_traffic(module) == (512 + 64) * 256 * 2
