"""`stack compile`: ahead-of-time compilation of a run's train step, or of sampling, for a hardware target."""

import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from stack_core.abi.config import apply_overrides, load_yaml, parse, parse_yaml
from stack_core.abi.errors import HardwareError, ShardingError
from stack_core.cli import overrides_from
from stack_core.commands.tables import print_table

if TYPE_CHECKING:
    from stack_train.run.compilation import StepReport

__all__ = ["compile_run"]

_GIB = 2**30
_MOST_ROWS = 12
# JAX takes this share of a GPU's memory unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise.
_GPU_SHARE = 0.75


def compile_run(
    config: Path,
    /,
    *overrides: Annotated[str, Parameter(allow_leading_hyphen=True)],
    target: Annotated[tuple[str, ...], Parameter(negative=())],
    sample: str | None = None,
    check: Annotated[bool, Parameter(negative=())] = False,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Compile a run's train step: stack compile run.yaml --target v5p:8x16x16 --data.batch_size 2048

    The target hardware is not required: the step is compiled but not run, and no parameters are allocated. A step that
    does not fit in memory, or gathers parameters across slices, is an error only with --check. With --sample, the
    program is the loop of a sampler of images or videos: all steps from noise to the latents of a batch.

    Args:
      config: YAML file of the run.
      overrides: any number of --section.key VALUE.
      target: target hardware: v6e:4x4 is a TPU torus, v5p:4x4x4*2 two of them, h100:1x1x8 slices x hosts x
        GPUs; may be repeated.
      sample: settings of the sampler in YAML, such as '{steps: 28, guidance: 5}', or '{}'. The number of images is
        data.batch_size. For runs that train a denoiser.
      check: exit with status 2 if the step exceeds the memory of a target, or gathers parameters across slices.
      json: print machine-readable results, a list with one entry per target.
    """
    mapping = apply_overrides(load_yaml(config), overrides_from(overrides))
    import jax  # Imported late, to report a typo in the file without delay.

    from stack_core.chips.targets import Target
    from stack_core.chips.wheel_compilers import use_wheel_compilers
    from stack_train.diffusion.compilation import compile_sampling
    from stack_train.diffusion.samplers import SamplerConfig
    from stack_train.run.compilation import compile_step
    from stack_train.run.memory import ADVICE
    from stack_train.run.resolve import parse_run

    if not jax.config.values["jax_platforms"]:
        # The only local computation is a random key, for which JAX should not preallocate a GPU's memory.
        jax.config.update("jax_platforms", "cpu")
    run = parse_run(mapping)
    sampler = None if sample is None else parse(SamplerConfig, parse_yaml(sample, "--sample"), path="sample")
    targets = [Target(name) for name in target]
    progress = Console(stderr=True)
    reports = []
    for each in targets:
        with use_wheel_compilers(), progress.status(f"Compiling for {each.name}; minutes for a large model"):
            reports.append(compile_step(run, each) if sampler is None else compile_sampling(run, sampler, each))
        if not json:
            _print(reports[-1])
    if json:
        print(json_format.dumps([report.as_mapping() for report in reports], indent=2))
    if check and (misfits := [report.target for report in reports if report.fits is False]):
        raise HardwareError(f"The {reports[0].program} does not fit {', '.join(misfits)}. {ADVICE}")
    for report in reports if check else ():
        for fault in report.lint.faults if report.lint else ():
            if fault.kind == "gathered across slices":
                raise ShardingError(f"{report.target}: {fault}")


def _print(report: "StepReport") -> None:
    mesh = ", ".join(f"{axis}={size}" for axis, size in report.mesh.items())
    slices = f" in {report.slices} slices" if report.slices > 1 else ""
    devices = f"{report.devices} devices{slices} ({mesh})" if mesh else "one device"
    work = f"{report.work[1]:,} {report.work[0]} a {report.program}"
    print(f"{report.target}: {devices}, {report.parameters:,} parameters, {work}")
    for line in [*_memory(report), *_speed(report)]:
        print(f"  {line}")
    if report.cost is not None and report.cost.collectives:
        columns = {"array_bytes": "of arrays, GiB", "sent_bytes": "sent, GiB"}
        if report.slices > 1:
            columns["sent_between_slices_bytes"] = "of that between slices, GiB"
        table = Table("collectives of a device", f"a {report.program}", *columns.values())
        for kind, sums in report.collectives_by_kind().items():
            table.add_row(kind, f"{sums['count']:,}", *(_gib(sums[key]) for key in columns))
        print_table(table)
    if report.outer_every_steps is not None:
        print(f"  {_outer(report)}")
    _print_lint(report)
    cpu = f"{report.compiler_cpu_s / 60:.1f} CPU-minutes"
    print(f"  traced in {report.trace_s:.0f} s, compiled in {report.compile_s:.0f} s ({cpu})")


def _outer(report: "StepReport") -> str:
    every = report.outer_every_steps or 1
    counted = f"counted: a step with an outer step, as one of {every:,} steps is"
    if report.slices == 1 or report.cost is None:
        return counted
    in_every, in_outer = report.between_slices_bytes()
    mean = in_every + in_outer / every
    sent = f"{_mib(in_every)} MiB in every step and {_mib(in_outer)} MiB in an outer step, {_mib(mean)} MiB on average"
    return f"{counted}; sent between slices: {sent}"


def _print_lint(report: "StepReport") -> None:
    lint = report.lint
    if lint is None:
        return
    table = Table("the largest collective of a parameter", "parameters of that shape", "MiB", "times", "loop")
    rows: dict[tuple[str, int, int, str], int] = {}
    for found in lint.largest.values():
        if found is not None:
            size = max(array.bytes for array in found.arrays)
            key = (found.kind, size, found.times, found.loops[-1] if found.loops else "")
            rows[key] = rows.get(key, 0) + 1
    for (kind, size, times, loop), count in sorted(rows.items(), key=lambda row: -row[0][1])[:_MOST_ROWS]:
        table.add_row(kind, f"{count}", f"{size / 2**20:,.1f}", f"{times:,}", loop)
    print_table(table)
    print(f"  parameters replicated on every device: {lint.replicated_bytes / 2**20:,.1f} MiB")
    for fault in lint.faults[:_MOST_ROWS]:
        print(f"  {fault}")
    if not lint.faults:
        print("  no parameter is gathered, summed or replicated more than necessary")


def _memory(report: "StepReport") -> list[str]:
    if report.cost is None:
        return [f"memory: does not fit; compiler message:\n{report.refusal}"]
    memory = report.cost.memory
    # Outputs that alias donated arguments are counted as arguments.
    parts = (
        f"arguments {_gib(memory.argument_bytes)}, further outputs {_gib(memory.output_bytes - memory.aliased_bytes)}, "
        f"temporaries {_gib(memory.temporary_bytes)}, code {_gib(memory.code_bytes)}"
        + (f"; in the host's memory {_gib(memory.host_bytes)}" if memory.host_bytes else "")
    )
    if report.memory_bytes is None:
        return [f"memory of a device: {_gib(memory.total_bytes)} GiB; its capacity is not known ({parts})"]
    left = report.memory_bytes - memory.total_bytes
    verdict = f"fits, {_gib(left)} GiB left" if left >= 0 else f"does NOT fit, {_gib(-left)} GiB too much"
    lines = [f"memory: {_gib(memory.total_bytes)} of a device's {_gib(report.memory_bytes)} GiB: {verdict} ({parts})"]
    if report.platform == "gpu" and _GPU_SHARE * report.memory_bytes < memory.total_bytes <= report.memory_bytes:
        lines.append(f"JAX takes {_GPU_SHARE:.0%} of a GPU's memory unless XLA_PYTHON_CLIENT_MEM_FRACTION is larger")
    return lines


def _speed(report: "StepReport") -> list[str]:
    lines_of_model = dict.fromkeys(report.model_flops.uncounted)
    uncounted = [f"not counted in the FLOPs for the model: {line}" for line in lines_of_model]
    if report.cost is None:
        return [f"FLOPs of a {report.program}: {report.model_flops.total:.4g} for the model", *uncounted]
    hardware = report.cost.flops.total * report.devices
    ratio = hardware / report.model_flops.total
    roofline = report.cost.roofline
    terms = {"compute": roofline.compute_s, "memory": roofline.memory_s, "network": roofline.network_s}
    seconds = ", ".join(f"{name} {_seconds(term)}" for name, term in terms.items())
    program, needed = report.program, report.model_flops.total
    lines = [
        f"FLOPs of a {program}: {needed:.4g} for the model, {hardware:.4g} done ({ratio:.2f} times)",
        f"time of a {program} at peak rates: {seconds}",
    ]
    if roofline.step_s is None:
        lines.append(f"bound on the {program}: not known, because one of these times is not")
    else:
        mfu = "not known" if report.mfu is None else f"{report.mfu:.1%}"
        time = f"{_seconds(roofline.step_s)} a {program}"
        lines.append(f"bound: at least {time}, by {roofline.binding}; MFU at most {mfu}")
    if report.slices > 1:
        lines.append("not counted in the network time: collectives between slices, whose network is not known")
    lines += [f"not counted beyond one trip: {name}" for name in report.cost.unknown_loops]
    if kernels := report.cost.uncounted_kernels:
        lines.append(f"not counted in the FLOPs done: kernels {', '.join(kernels)}")
    return lines + uncounted


def _gib(size_bytes: int | float) -> str:
    return f"{size_bytes / _GIB:,.2f}"


def _mib(size_bytes: float) -> str:
    return f"{size_bytes / 2**20:,.3f}"


def _seconds(seconds: float | None) -> str:
    return "not known" if seconds is None else f"{seconds:.4g} s"
