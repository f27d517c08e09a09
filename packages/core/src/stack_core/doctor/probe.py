"""A probe that starts JAX and prints one line of JSON on standard output per completed stage.

The doctor runs this file in a separate process, since JAX may fail to import, abort or hang. The file is executed
outside of its package: reporting that JAX is missing needs only Python.
"""

import importlib.metadata
import importlib.util
import json
import sys
import traceback
from typing import Any


def main() -> int:
    """Runs the stages in order; returns 1 after the first failure."""
    stages = {"find": _find, "import": _import, "devices": _devices, "compute": _compute, "rows": _rows}
    for stage, run in stages.items():
        try:
            answer = run()
        except BaseException as error:  # Any failure of JAX is a result, also SystemExit.
            # If JAX_PLATFORMS names no available device, JAX raises an AssertionError without a message.
            _say(stage, error=f"{type(error).__name__}: {error}".removesuffix(": "), where=_last_file(error))
            return 1
        _say(stage, **answer)
    return 0


def _find() -> dict[str, Any]:
    spec = importlib.util.find_spec("jax")
    return {"file": None if spec is None else spec.origin}


def _import() -> dict[str, Any]:
    import jax

    return {"jax": jax.__version__, "jaxlib": importlib.metadata.version("jaxlib")}


def _devices() -> dict[str, Any]:
    import jax

    devices = jax.devices()
    return {
        "platform": devices[0].platform,
        "devices": [
            {
                "id": device.id,
                "kind": device.device_kind,
                "local": device.process_index == jax.process_index(),
                "memory": _memory(device) if device.process_index == jax.process_index() else {},
            }
            for device in devices
        ],
    }


def _memory(device: Any) -> dict[str, int]:
    statistics = device.memory_stats() or {}
    return {name: statistics[name] for name in ("bytes_limit", "bytes_in_use") if name in statistics}


def _compute() -> dict[str, Any]:
    import jax
    import numpy as np

    x = jax.numpy.arange(64, dtype=np.float32).reshape(8, 8)
    product = np.asarray(jax.jit(lambda x: x @ x)(x))
    return {"right": bool(np.allclose(product, np.asarray(x) @ np.asarray(x), rtol=1e-2))}


def _rows() -> dict[str, Any]:
    import jax

    from stack_core.chips.devices import row_name

    return {"chips": {kind: row_name(kind) for kind in {device.device_kind for device in jax.devices()}}}


def _last_file(error: BaseException) -> str | None:
    frames = traceback.extract_tb(error.__traceback__)
    return frames[-1].filename if frames else None


def _say(stage: str, **answer: Any) -> None:
    sys.stdout.write(json.dumps({"stage": stage, **answer}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
