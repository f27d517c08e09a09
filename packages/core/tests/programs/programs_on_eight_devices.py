"""Train steps with known faults, and without; `test_program_lint.py` runs this in a process that has eight devices."""

import json
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from stack_core.programs.hlo import parse_hlo
from stack_core.programs.hlo_costs import collectives
from stack_core.programs.lint import LintedParameter, lint_program

MESH = Mesh(np.array(jax.devices()), ("fsdp",), axis_types=(AxisType.Auto,))
LAYERS, EMBED, MLP, VOCAB, ROWS, CHUNKS = 4, 16, 24, 56, 8, 3
SPECS = {"embedding": P(None, "fsdp"), "layers": P(None, "fsdp"), "head": P("fsdp")}
SHAPES = {"embedding": (VOCAB, EMBED), "layers": (LAYERS, EMBED, MLP), "head": (EMBED, VOCAB)}


def gathered(x, axis):
    return lax.all_gather(x, "fsdp", axis=axis, tiled=True)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def summed_whole(x, axis):
    """A gather whose gradient is summed on all devices before each takes its part."""
    return gathered(x, axis)


def _summed_whole_backward(axis, kept, cotangent):
    del kept
    whole = lax.psum(cotangent, "fsdp")
    size = whole.shape[axis] // 8
    return (lax.dynamic_slice_in_dim(whole, lax.axis_index("fsdp") * size, size, axis),)


summed_whole.defvjp(lambda x, axis: (gathered(x, axis), None), _summed_whole_backward)


def loss(params, tokens, *, embedding=gathered, head="once", layers="each"):
    x = embedding(params["embedding"], 1)[tokens]
    stack = gathered(params["layers"], 1) if layers == "all" else params["layers"]

    def layer(x, weight):
        whole = weight if layers == "all" else gathered(weight, 0)
        return x + jnp.tanh(x @ whole) @ whole.T, None

    x = lax.scan(jax.checkpoint(layer), x, stack)[0]
    once = gathered(params["head"], 0) if head == "once" else None

    @jax.checkpoint
    def chunk(rows):
        weight = gathered(params["head"], 0) if once is None else once
        return jnp.sum(jax.nn.logsumexp(rows @ weight, axis=-1))

    return jnp.sum(lax.map(chunk, x.reshape(CHUNKS, -1, EMBED)))


def lint(specs=SPECS, **faults):
    def step(params, tokens):
        return jax.grad(partial(loss, **faults))(params, tokens)

    mapped = jax.shard_map(step, mesh=MESH, in_specs=(specs, P("fsdp")), out_specs=specs, check_vma=False)
    shapes = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=jax.NamedSharding(MESH, specs[name]))
        for name, shape in SHAPES.items()
    }
    tokens = jax.ShapeDtypeStruct((ROWS, CHUNKS), jnp.int32, sharding=jax.NamedSharding(MESH, P("fsdp")))
    text = jax.jit(mapped).lower(shapes, tokens).compile().as_text()
    parameters = [
        LintedParameter(
            name=name, shape=x.shape, part=x.sharding.shard_shape(x.shape), layers=name == "layers", bytes=4
        )
        for name, x in shapes.items()
    ]
    return lint_program(collectives(parse_hlo(text), 8), parameters).as_mapping()


def replicated(x, axis):
    del axis
    return x


if __name__ == "__main__":
    whole = {**SPECS, "embedding": P()}
    results = {
        "clean": lint(),
        "head in a loop": lint(head="in a loop"),
        "gradient summed whole": lint(embedding=summed_whole),
        "stack gathered": lint(layers="all"),
        "replicated": lint(whole, embedding=replicated),
    }
    sys.stdout.write(json.dumps(results))
