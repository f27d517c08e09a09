"""Division of a burn-in's time among its stages, and of a machine among its workers."""

from dataclasses import dataclass

__all__ = ["STAGES", "Workers", "stage_s", "workers_for"]

# Seconds that a stage's processes take to start, and the weight of its work in the rest of the time.
STAGES = {"contracts": (10.0, 0.52), "tuning": (8.0, 0.24), "speeds": (8.0, 0.20), "profile": (22.0, 0.04)}
_GPU_WORKER_BYTES = 2 * 2**30  # CUDA context, libraries and scratch space of one process
_HOST_WORKER_BYTES = 3 * 2**30  # JAX, compilers and their largest program
_TPU_THREADS = 16


def stage_s(stage: str, remaining_s: float) -> float:
    """Returns the seconds of a stage if it and all later stages have `remaining_s` together.

    A stage that ends early leaves its rest to later stages.
    """
    names = list(STAGES)
    later = [STAGES[name] for name in names[names.index(stage) :]]
    fixed_s, weights = sum(fixed_s for fixed_s, _ in later), sum(weight for _, weight in later)
    own_s, weight = STAGES[stage]
    if remaining_s <= fixed_s:
        return max(remaining_s, 0.0) * own_s / fixed_s
    return own_s + (remaining_s - fixed_s) * weight / weights


@dataclass(frozen=True)
class Workers:
    """Number of worker processes, and of checks that each runs at the same time."""

    processes: int
    threads: int = 1


def workers_for(platform: str, cores: int, *, memory_bytes: int | None, device_bytes: int | None) -> Workers:
    """Chooses workers for the contract checks: one process a core, as far as memory allows.

    A TPU belongs to one process, so threads share the work there.
    """
    if platform == "tpu":
        return Workers(1, max(1, min(cores - 1, _TPU_THREADS)))
    limits = [cores]
    if memory_bytes is not None:
        limits.append(memory_bytes // _HOST_WORKER_BYTES)
    if platform == "gpu" and device_bytes is not None:
        limits.append(device_bytes // _GPU_WORKER_BYTES)
    return Workers(max(1, min(limits)))
