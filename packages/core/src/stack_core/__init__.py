"""The shared core of stack: plugins, configs, errors, ops, hardware and meshes.

Models call ops by name, and the fastest installed implementation runs::

    import jax.numpy as jnp

    from stack_core import StackError, ops, registries

    query, key = jnp.ones((1, 16, 8, 64)), jnp.ones((1, 16, 2, 64))
    output = ops.attention(query, key, key, causal=True, window=(7, 0))
    print(output.shape, ops.explain(ops.attention, query, key, key))
    print(sorted(registries.ops))
    try:
        ops.attention(query, key, key, implementation="fastest")
    except StackError as error:
        print(error)
"""

from typing import TYPE_CHECKING

from stack_core.exports import lazy_exports

if TYPE_CHECKING:
    from stack_core import ops as ops
    from stack_core.abi.errors import StackError as StackError
    from stack_core.abi.model_formats import open_for_generation as open_for_generation
    from stack_core.abi.model_formats import open_model as open_model
    from stack_core.abi.plugins import hookimpl as hookimpl
    from stack_core.abi.plugins import registries as registries
    from stack_core.exports import lazy_exports as lazy_exports

    __version__: str
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "stack_core": ["ops"],
            "stack_core.abi.errors": ["StackError"],
            "stack_core.abi.model_formats": ["open_for_generation", "open_model"],
            "stack_core.abi.plugins": ["hookimpl", "registries"],
            "stack_core.exports": ["lazy_exports"],
        },
    )
