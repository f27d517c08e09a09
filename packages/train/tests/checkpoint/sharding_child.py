"""Run as a script on 8 host devices: digests and checkpoints of sharded arrays. Its argument is a directory."""

import math
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from stack_core.runtime.digest import _digest_sums, array_digests
from stack_train.checkpoint import CheckpointStore

SPECS = [(), ("fsdp",), (None, "fsdp"), ("fsdp", "tensor"), (("tensor", "fsdp"), None), (None, ("fsdp", "tensor"))]


def collective_sizes(function: Any, argument: jax.ShapeDtypeStruct) -> list[int]:
    """Elements in the results of each collective of the compiled function."""
    hlo = function.lower(argument).compile().as_text()
    results = re.findall(r"= (.*) (?:all-gather|all-reduce|all-to-all|collective-permute)(?:-start)?\(", hlo)
    return [
        sum(math.prod(map(int, filter(None, dims.split(",")))) for dims in re.findall(r"\[([\d,]*)\]", result))
        for result in results
    ]


def main(directory: str) -> None:
    assert jax.device_count() == 8
    mesh = jax.make_mesh((2, 4), ("fsdp", "tensor"), axis_types=(AxisType.Auto, AxisType.Auto))
    shardings = [NamedSharding(mesh, PartitionSpec(*spec)) for spec in SPECS]
    array = np.random.default_rng(0).standard_normal((16, 24)).astype(np.float32)
    placed = {str(sharding.spec): jax.device_put(array, sharding) for sharding in shardings}
    assert len({*array_digests(placed).values(), *array_digests({"host": array}).values()}) == 1
    for sharding in shardings:
        travelled = collective_sizes(_digest_sums, jax.ShapeDtypeStruct((16, 24), jnp.float32, sharding=sharding))
        assert bool(travelled) == (sharding.spec != PartitionSpec()), (sharding, travelled)
        assert all(size <= 8 for size in travelled), "more than one partial sum a device travels"
    state = {"params": placed, "key": jax.device_put(jax.random.key(3), shardings[0])}
    with CheckpointStore(directory) as store:
        store.save(1, state, {}, "")
        for moved in (shardings[1:] + shardings[:1], [None] * len(shardings)):
            abstract = {
                "params": {
                    name: jax.ShapeDtypeStruct((16, 24), jnp.float32, sharding=sharding)
                    for name, sharding in zip(placed, moved, strict=True)
                },
                "key": state["key"],
            }
            restored = store.restore(abstract).state
            for name, sharding in zip(placed, moved, strict=True):
                assert np.array_equal(restored["params"][name], array)
                assert sharding is None or restored["params"][name].sharding == sharding
            assert jax.random.uniform(restored["key"]) == jax.random.uniform(jax.random.key(3))
    check_codes(f"{directory}/codes", shardings)


def check_codes(directory: str, shardings: list[NamedSharding]) -> None:
    """Codes come to each device from the host, unless a byte has codes of two devices."""
    codes = jnp.asarray(np.arange(16 * 24).reshape(16, 24) % 16 - 8, jnp.int8).astype("int4")
    with CheckpointStore(directory) as store:
        store.save_weights([("codes", codes)], "")
        for sharding in shardings:
            cuts_bytes = sharding.shard_shape(codes.shape)[-1] % 2 == 1
            wanted = {"codes": jax.ShapeDtypeStruct(codes.shape, codes.dtype, sharding=sharding)}
            with jax.transfer_guard_device_to_device("allow" if cuts_bytes else "disallow_explicit"):
                found = store.restore_params(wanted).state["codes"]
            assert found.sharding == sharding
            assert np.array_equal(found.astype("int8"), codes.astype("int8"))


if __name__ == "__main__":
    main(sys.argv[1])
