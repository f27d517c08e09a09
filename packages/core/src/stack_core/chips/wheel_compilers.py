"""The compilers of NVIDIA's wheels, which JAX's Triton and Mosaic-GPU kernels want rather than a machine's own.

Both look for ptxas on PATH first, where one older than the wheel's refuses their code ("Unsupported .version").
"""

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["path_with_wheel_compilers", "use_wheel_compilers"]


def path_with_wheel_compilers() -> str:
    """PATH with the folders of the wheels' compilers before all others, if there are any."""
    found = importlib.util.find_spec("nvidia")
    places = () if found is None else found.submodule_search_locations or ()
    folders = [str(folder) for place in places if (folder := Path(place) / "cu13" / "bin").is_dir()]
    return os.pathsep.join([*folders, *filter(None, [os.environ.get("PATH")])])


@contextlib.contextmanager
def use_wheel_compilers() -> Iterator[None]:
    """Has what is compiled in this context, and processes that it starts, find the wheels' compilers first."""
    before = os.environ.get("PATH")
    os.environ["PATH"] = path_with_wheel_compilers()
    try:
        yield
    finally:
        if before is None:
            del os.environ["PATH"]
        else:
            os.environ["PATH"] = before
