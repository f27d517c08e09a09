"""Ahead-of-time compilation of a run's programs for a target: memory, FLOPs, collectives and roofline."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
from flax.nnx.traversals import flatten_mapping

from stack_core.abi.errors import HardwareError
from stack_core.chips import count_units
from stack_core.chips.targets import Target, use_target
from stack_core.programs.flops import Flops
from stack_core.programs.hlo import Module, parse_hlo
from stack_core.programs.lint import LintedParameter, ProgramLint, lint_program
from stack_core.programs.roofline import ProgramCost, program_cost
from stack_core.runtime.tree_paths import path_name
from stack_train.run.checks import check_sections
from stack_train.run.config import RunConfig
from stack_train.run.program import build_program, model_flops, traced_step
from stack_train.step.program import Program
from stack_train.step.replicas import OUTER_SCOPE
from stack_train.step.staged import is_in_layers

__all__ = ["StepReport", "compile_step", "outer_instructions", "report_of"]

_SHOWN_PLACES = 3
_SHOWN_CHARACTERS = 300
_BRANCHES = ("branch_computations", "true_computation", "false_computation")


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """Cost of a train step, or of sampling a batch, on a target.

    Attributes:
      program: the compiled program, "step" or "sampling". The attributes below describe a step; for a sampling, read
        "sampling" instead.
      target: name of the target, such as "v5p:2x2x1".
      platform: "tpu" or "gpu".
      devices: number of devices of the target.
      slices: number of slices of the target.
      mesh: sizes of the mesh axes that span more than one device.
      parameters: number of parameters, frozen ones included.
      work: unit and amount of the work of a step, such as ("tokens", 4096).
      model_flops: FLOPs that the model needs per step, over all devices.
      memory_bytes: memory of a device, or None for unknown hardware.
      refusal: the compiler's out-of-memory message; None if the step compiled.
      cost: cost per device; None if the step did not compile.
      mfu: upper bound of the MFU: the model's FLOPs over the peak FLOPs of the devices in the roofline's time.
      lint: lint of the collectives on parameters; None for one device, or a step that did not compile.
      trace_s: seconds to trace and lower the step.
      compile_s: wall-clock seconds to compile the step.
      compiler_cpu_s: CPU seconds of the compiler, over all cores.
      outer_every_steps: number of steps between outer steps of replicas that train apart; None without replicas.
      outer_instructions: names of the instructions of an outer step, for replicas that train apart.
    """

    program: Literal["step", "sampling"] = "step"
    target: str
    platform: str
    devices: int
    slices: int
    mesh: Mapping[str, int]
    parameters: int
    work: tuple[str, int]
    model_flops: Flops
    memory_bytes: int | None
    refusal: str | None
    cost: ProgramCost | None
    mfu: float | None
    lint: ProgramLint | None
    trace_s: float
    compile_s: float
    compiler_cpu_s: float
    outer_every_steps: int | None = None
    outer_instructions: frozenset[str] = frozenset()

    @property
    def fits(self) -> bool | None:
        """True if the step fits the memory of a device; None for unknown hardware."""
        if self.cost is None:
            return False
        return None if self.memory_bytes is None else self.cost.memory.total_bytes <= self.memory_bytes

    def as_mapping(self) -> dict[str, Any]:
        """Converts the report to plain values for JSON; collectives are summed by kind."""
        plain = {name: getattr(self, name) for name in _PLAIN}
        plain |= {
            f"{self.work[0]}_per_{self.program}": self.work[1],
            "fits": self.fits,
            "model_flops": self.model_flops.total,
        }
        cost = self.cost
        if cost is None:
            return plain
        memory = dataclasses.asdict(cost.memory) | {"total_bytes": cost.memory.total_bytes}
        roofline = dataclasses.asdict(cost.roofline)
        if self.outer_every_steps is not None and self.slices > 1:
            every_step, outer_step = self.between_slices_bytes()
            plain |= {"sent_between_slices_bytes": {"every_step": every_step, "outer_step": outer_step}}
        return plain | {
            "memory": memory,
            "hardware_flops": cost.flops.total * self.devices,
            "hardware_flops_per_device": dict(cost.flops.by_dtype),
            "uncounted_loops": list(cost.unknown_loops),
            "uncounted_kernels": list(cost.uncounted_kernels),
            "memory_traffic_bytes_per_device": cost.traffic_bytes,
            "collectives": self.collectives_by_kind(),
            "lint": None if self.lint is None else self.lint.as_mapping(),
            "roofline": roofline | {"step_s": cost.roofline.step_s, "binding": cost.roofline.binding},
        }

    def collectives_by_kind(self) -> dict[str, dict[str, int | float]]:
        """Sums the collectives of one device over a step, by kind: executions, array bytes and bytes sent.

        With several slices, `sent_between_slices_bytes` is the part of `sent_bytes` by collectives that span slices.
        With replicas that train apart, the step is one with an outer step.
        """
        sums: dict[str, dict[str, int | float]] = {}
        for found in self.cost.collectives if self.cost else ():
            sum_ = sums.setdefault(found.kind, {"count": 0, "array_bytes": 0, "sent_bytes": 0})
            sum_["count"] += found.times
            sum_["array_bytes"] += found.times * found.array_bytes
            sum_["sent_bytes"] += found.times * found.sent_bytes
            if self.slices > 1:
                key, sent_bytes = "sent_between_slices_bytes", found.between_slices * found.sent_bytes
                sum_[key] = sum_.get(key, 0) + found.times * sent_bytes
        return dict(sorted(sums.items()))

    def between_slices_bytes(self) -> tuple[float, float]:
        """Returns the bytes that a device sends to other slices in every step, and in an outer step."""
        sent = [0.0, 0.0]
        for found in self.cost.collectives if self.cost else ():
            if found.between_slices:
                sent[found.runner in self.outer_instructions] += found.times * found.sent_bytes
        return sent[0], sent[1]


_PLAIN = (
    "program",
    "target",
    "platform",
    "devices",
    "slices",
    "mesh",
    "parameters",
    "memory_bytes",
    "refusal",
    "mfu",
    "trace_s",
    "compile_s",
    "compiler_cpu_s",
    "outer_every_steps",
)


def compile_step(config: RunConfig, target: Target) -> StepReport:
    """Compiles the train step of a config for a target, from shapes; no arrays are allocated.

    Raises:
      HardwareError: the target's compiler is missing, or fails for another reason than memory.
      StackError: model, batch and mesh do not fit together.
    """
    # As a run does: a config that cannot train should not compile either.
    check_sections(config)
    program = build_program(config, target.devices)
    trips = program.step.schedule.microbatches if program.step.schedule else config.run.accumulation_steps
    report, compiled = report_of(
        config,
        program,
        target,
        traced=lambda: traced_step(config, program),
        needed=lambda: model_flops(config, program),
        outer_trips=2 * trips if program.step.schedule else trips,
    )
    if program.step.outer is None:
        return report
    return dataclasses.replace(
        report,
        outer_every_steps=program.step.outer.every_steps,
        outer_instructions=frozenset() if compiled is None else outer_instructions(parse_hlo(compiled.as_text() or "")),
    )


def report_of(
    config: RunConfig,
    program: Program,
    target: Target,
    *,
    traced: Callable[[], jax.stages.Traced],
    needed: Callable[[], Flops],
    outer_trips: int,
) -> tuple[StepReport, jax.stages.Compiled | None]:
    """Compiles a program of a run for a target; returns its report, and the program unless it does not fit in memory.

    Args:
      program: the run's program, whose mesh consists of the target's devices.
      traced: traces the program to compile.
      needed: counts the FLOPs that the model needs.
      outer_trips: see `lint_program`.
    """
    started_s = time.perf_counter()
    with use_target(target):
        lowered = traced().lower()
        traced_s, traced_cpu_s = time.perf_counter(), time.process_time()
        compiled, refusal = _compiled(lowered)
        # CPU time as well, because the compiler uses all cores and other processes may share these.
        compiled_s, compiler_cpu_s = time.perf_counter(), time.process_time() - traced_cpu_s
        model = needed()
    chip, mesh_devices = target.chip, program.mesh.devices.flatten().tolist()
    cost = None
    if compiled is not None:
        cost = program_cost(compiled, mesh_devices, chip, link_share=target.link_share, slice_of=target.slice_of)
    units = count_units(chip, mesh_devices)
    report = StepReport(
        target=target.name,
        platform=mesh_devices[0].platform,
        devices=len(mesh_devices),
        slices=target.slices,
        mesh={axis: size for axis, size in program.mesh.shape.items() if size > 1},
        parameters=program.step.model.parameter_count,
        work=config.batches.work(),
        model_flops=model,
        # The memory is per chip, and a chip may be several devices.
        memory_bytes=None if chip.hbm_bytes is None else chip.hbm_bytes * units // len(mesh_devices),
        refusal=refusal,
        cost=cost,
        mfu=_mfu(model.ideal_s(chip, units=units), cost),
        lint=None if cost is None or len(mesh_devices) == 1 else _lint(program, cost, outer_trips),
        trace_s=traced_s - started_s,
        compile_s=compiled_s - traced_s,
        compiler_cpu_s=compiler_cpu_s,
    )
    return report, compiled


def outer_instructions(module: Module) -> frozenset[str]:
    """Returns the names of the instructions in the branches of an outer step of replicas that train apart.

    Transfers between TPU slices do not have the names of their scopes, so the branches are searched for them.
    """
    found: set[str] = set()
    to_visit = [
        branch
        for computation in module.computations.values()
        for instruction in computation.instructions.values()
        if instruction.opcode == "conditional" and OUTER_SCOPE in instruction.op_name
        for branch in instruction.called(*_BRANCHES)
    ]
    while to_visit:
        for instruction in module.computations[to_visit.pop()].instructions.values():
            if instruction.name not in found:
                found.add(instruction.name)
                to_visit += instruction.called("calls", "to_apply", "called_computations", "body", *_BRANCHES)
    return frozenset(found)


def _lint(program: Program, cost: ProgramCost, outer_trips: int) -> ProgramLint:
    """Lints a program's collectives on the trained parameters."""
    shapes = flatten_mapping(program.step.model.variables.trained)
    shardings, axes = (
        flatten_mapping(program.state_shardings.params),
        flatten_mapping(program.step.model.variables.logical_axes),
    )
    parameters = [
        LintedParameter(
            name=path_name(path),
            shape=tuple(leaf.shape),
            part=tuple(shardings[path].shard_shape(leaf.shape)),
            layers=is_in_layers(axes[path]),
            bytes=leaf.dtype.itemsize,
        )
        for path, leaf in shapes.items()
        if hasattr(leaf, "shape")
    ]
    return lint_program(cost.collectives, parameters, outer_trips=outer_trips)


def _compiled(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled | None, str | None]:
    """Returns the compiled program, or the compiler's out-of-memory message. The TPU compiler rejects such programs."""
    try:
        return lowered.compile(), None
    except jax.errors.JaxRuntimeError as error:
        message = str(error)
        # JAX raises the same class for all errors of XLA; only the text has the status and the kind of memory. A kernel
        # without enough vector memory fails with any amount of device memory.
        if not message.startswith("RESOURCE_EXHAUSTED") or "memory space vmem" in message:
            raise _compiler_error(message) from error
        return None, message


def _compiler_error(message: str) -> HardwareError:
    """Converts an error of XLA to an error with its first line and the innermost places in our code."""
    lines = message.splitlines()
    first = lines[0].strip() if lines else "no message"
    if first.endswith(":"):  # The line has only the status; the next one names the instruction and its attributes.
        first = f"{first} {''.join(lines[1:2])[:_SHOWN_CHARACTERS]}"
    # The first ones are the same for all ops.
    places = [line.strip() for line in lines if ".py:" in line and "/ops/dispatch/" not in line][:_SHOWN_PLACES]
    traced = f" It was traced at: {'; '.join(places)}." if places else ""
    return HardwareError(
        f"XLA failed to compile the step: {first}{traced} This is a limit of the "
        "compiler or an error in it. Try model.remat, another mesh, other sizes of the named product, another release "
        "of jax, or XLA_FLAGS (--xla_gpu_enable_triton_gemm=false for products of GPUs)."
    )


def _mfu(ideal_s: float | None, cost: ProgramCost | None) -> float | None:
    """Bounds the MFU, at most 1, since custom kernels may hide FLOPs and make the roofline faster than the ideal."""
    step_s = None if cost is None else cost.roofline.step_s
    return ideal_s / max(step_s, ideal_s) if ideal_s and step_s else None
