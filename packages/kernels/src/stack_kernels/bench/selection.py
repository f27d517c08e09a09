"""Selection of the standard cases by names from the command line."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stack_core.abi.errors import BenchmarkError, UnknownName, nearest
from stack_core.abi.plugins import registries

if TYPE_CHECKING:
    from stack_kernels.bench.run import Task

__all__ = ["Selection"]

_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Selection:
    """Cases to measure, as comma-separated names.

    Attributes:
      ops: comma-separated names; by default all ops that have cases.
      implementations: comma-separated implementations to measure instead of core's choice.
      models: sizes of the calls, 66m or 8b or 66m,8b; by default 66m on a CPU and 8b elsewhere.
      dtypes: float32, bfloat16 and float16; by default float32,bfloat16.
    """

    ops: str = ""
    implementations: str = ""
    models: str = ""
    dtypes: str = ""

    def tasks(self) -> "list[Task]":
        """Lists the tasks to measure.

        Raises:
          UnknownName: an op, implementation, model or dtype is unknown.
          BenchmarkError: an op has no cases.
        """
        from stack_core.chips import current_chip
        from stack_kernels.bench.cases import CASES
        from stack_kernels.bench.run import tasks

        with_cases = sorted({case.op for case in CASES})
        registered = [name.partition("/") for name in registries.ops.names()]
        ops = _chosen("ops", self.ops, dict.fromkeys(op for op, _, _ in registered), default=with_cases)
        if missing := [op for op in ops if op not in with_cases]:
            raise BenchmarkError(
                f"{', '.join(missing)}: there are no cases to measure, as it needs a mesh of several devices. "
                f"Name others: {', '.join(with_cases)}."
            )
        known = sorted({implementation for op, _, implementation in registered if op in ops})
        asked = _chosen("implementations", self.implementations, known, default=("",))
        dtypes = _chosen("dtypes", self.dtypes, _DTYPES, default=_DTYPES[:2])
        small, large = dict.fromkeys(case.model for case in CASES)
        usual = small if current_chip().kind == "cpu" else large
        models = _chosen("models", self.models, (small, large), default=(usual,))
        return tasks([case for case in CASES if case.op in ops and case.model in models], dtypes, asked)


def _chosen(label: str, listing: str, known: Iterable[str], *, default: Iterable[str]) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in listing.split(",") if name.strip()))
    for name in names:
        if name not in known:
            raise UnknownName(
                f"Unknown name {name!r} among {label}.{nearest(name, known)} There are: {', '.join(known)}."
            )
    return names or tuple(default)
