"""Public names of a package that are imported on first use."""

import importlib
import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["lazy_exports"]


def lazy_exports(
    package: str, modules: Mapping[str, Sequence[str]]
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Returns `__all__`, `__getattr__` and `__dir__` of a package whose public names are imported on first use.

    Importing such a package does not import JAX, which keeps `stack --help` quick. `__version__` is the version of
    the distribution with the package's name. Type checkers read the same names from a block of their own::

        from typing import TYPE_CHECKING

        from stack_core.exports import lazy_exports

        if TYPE_CHECKING:
            from acme_models.bigram import Bigram as Bigram

            __version__: str
        else:
            __all__, __getattr__, __dir__ = lazy_exports(__name__, {"acme_models.bigram": ["Bigram"]})

    Args:
      package: name of the package, `__name__` in its `__init__.py`.
      modules: public names by the module that defines them. A module listed below its own parent, such as
        `{"stack_core": ["ops"]}`, is a public name as well.
    """
    module_of = {name: module for module, names in modules.items() for name in names}
    names = sorted(module_of)

    def get(name: str) -> Any:
        if name == "__version__":
            return importlib.metadata.version(package.replace("_", "-"))
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=None)
        if module_of[name] == package:
            return importlib.import_module(f"{package}.{name}")
        return getattr(importlib.import_module(module_of[name]), name)

    return names, get, lambda: [*names, "__version__"]
