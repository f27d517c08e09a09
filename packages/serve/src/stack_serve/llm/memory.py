"""Summary of the memory of an engine."""

from collections.abc import Sequence

import jax

from stack_core.chips.machine import resident_bytes
from stack_serve.llm.programs import Programs

__all__ = ["describe_memory"]


def describe_memory(programs: Programs, drafting: Sequence[Programs], pages: int) -> str:
    """Returns the memory use of this process by purpose, as human-readable text.

    Args:
      programs: programs of the served model.
      drafting: separate programs of a draft model.
      pages: number of cache pages.
    """
    parts, all_bytes = programs.sizes_bytes(), resident_bytes()
    for each in drafting:
        of_draft = each.sizes_bytes()
        parts["draft model"] = of_draft["parameters"]
        parts["pages"] += of_draft["pages"]
    on_cpu = jax.default_backend() == "cpu"
    pages_bytes = parts.pop("pages")
    if all_bytes is not None:
        # On CPUs, pages that no sequence has used yet take no memory.
        parts["programs, libraries and used pages" if on_cpu else "programs and libraries"] = max(
            all_bytes - (sum(parts.values()) if on_cpu else 0), 0
        )
    text = ", ".join(f"{name} {size_bytes / 2**20:.0f} MB" for name, size_bytes in parts.items())
    return (
        f"{text}; the cache {'grows to' if on_cpu else 'has'} {pages_bytes / 2**20:.0f} MB for "
        f"{pages * programs.page_tokens} tokens, set by memory_fraction or pages"
    )
