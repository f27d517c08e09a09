"""The compilers of NVIDIA's wheels, which JAX's Triton and Mosaic-GPU kernels need instead of the machine's own.

Both kinds of kernels look for ptxas on PATH first. A ptxas older than the wheel's rejects their code ("Unsupported
.version").
"""

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["path_with_wheel_compilers", "use_wheel_compilers"]


def path_with_wheel_compilers() -> str:
    """Returns PATH with the folders of the wheels' compilers, if there are any, in front."""
    found = importlib.util.find_spec("nvidia")
    places = () if found is None else found.submodule_search_locations or ()
    folders = [str(folder) for place in places if (folder := Path(place) / "cu13" / "bin").is_dir()]
    return os.pathsep.join([*folders, *filter(None, [os.environ.get("PATH")])])


@contextlib.contextmanager
def use_wheel_compilers() -> Iterator[None]:
    """Puts the wheels' compilers first on PATH, for compilations in this context and the processes it starts."""
    before = os.environ.get("PATH")
    os.environ["PATH"] = path_with_wheel_compilers()
    try:
        yield
    finally:
        if before is None:
            del os.environ["PATH"]
        else:
            os.environ["PATH"] = before
