"""Optional abilities of data and of its sources, which a plugin's classes may have as well."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from stack_core.abi.data import DataSource, Shapes

__all__ = ["BuildsAtOnce", "ReshapesBatches", "SplitsIntoParts", "VariesShapes"]


@runtime_checkable
class BuildsAtOnce(Protocol):
    """A `DataConfig` whose `build` may run in all processes of a run at the same time.

    Other data is built in the first process, which fills a cache, before the remaining processes build from this cache.

    Attributes:
      is_ready: True if the data is already prepared and `build` only opens files.
    """

    @property
    def is_ready(self) -> bool: ...


@runtime_checkable
class ReshapesBatches(Protocol):
    """A `DataConfig` whose objectives reshape a batch before they call the model, such as pairs of answers."""

    def call_spec(self, model: Any) -> Shapes:
        """Returns the shapes and dtypes of a batch in the form that the model is called with."""
        ...


@runtime_checkable
class SplitsIntoParts(Protocol):
    """A `DataSource` whose parts can be read in parallel."""

    def document_parts(self) -> Sequence[DataSource]:
        """Splits the documents, in order, into sources that can be pickled; the same parts on every machine."""
        ...


@runtime_checkable
class VariesShapes(Protocol):
    """`Batches` whose training batches have several shapes, such as images of several sizes.

    Attributes:
      batch_shapes: shapes and dtypes of batches over all processes that differ from `DataConfig.spec`, which may be in
        the list. The first batch of each shape compiles another program.
    """

    @property
    def batch_shapes(self) -> Sequence[Shapes]: ...
