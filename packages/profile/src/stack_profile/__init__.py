"""Profiler for JAX programs: traces joined with the compiled program and the Python source.

Capture a block, then ask for lines, layers, idle time or the report (the value of a notebook cell shows it)::

    import jax
    import jax.numpy as jnp

    import stack_profile
    from stack_profile.analyses.ops import ops

    step, x = jax.jit(lambda x: jnp.tanh(x @ x)), jnp.ones((256, 256))
    with stack_profile.capture("profile") as captured:
        x = step(x)
    print(ops(stack_profile.load_trace(captured.wait()), by="line"))
"""

from typing import TYPE_CHECKING

from stack_core.exports import lazy_exports

if TYPE_CHECKING:
    from stack_profile.captures.capture import Capture as Capture
    from stack_profile.captures.capture import CaptureWarning as CaptureWarning
    from stack_profile.captures.capture import capture as capture
    from stack_profile.captures.continuous import Continuous as Continuous
    from stack_profile.captures.listener import Listener as Listener
    from stack_profile.captures.listener import listen as listen
    from stack_profile.captures.ring import ContinuousConfig as ContinuousConfig
    from stack_profile.captures.slow_steps import AnomalyConfig as AnomalyConfig
    from stack_profile.captures.watch import Watch as Watch
    from stack_profile.errors import CaptureError as CaptureError
    from stack_profile.errors import ProfileError as ProfileError
    from stack_profile.errors import TraceError as TraceError
    from stack_profile.traces.trace import Trace as Trace
    from stack_profile.traces.trace import load_trace as load_trace

    __version__: str
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "stack_profile.captures.capture": ["Capture", "CaptureWarning", "capture"],
            "stack_profile.captures.continuous": ["Continuous"],
            "stack_profile.captures.listener": ["Listener", "listen"],
            "stack_profile.captures.ring": ["ContinuousConfig"],
            "stack_profile.captures.slow_steps": ["AnomalyConfig"],
            "stack_profile.captures.watch": ["Watch"],
            "stack_profile.errors": ["CaptureError", "ProfileError", "TraceError"],
            "stack_profile.traces.trace": ["Trace", "load_trace"],
        },
    )
