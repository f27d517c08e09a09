"""Start of a run, and its execution to the last step or a stop signal."""

import contextlib
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax

from stack_core import ops
from stack_core.abi.config import is_under, parse_yaml, to_yaml
from stack_core.abi.event_bus import EventBus, ObserverContext, observers_from
from stack_core.abi.events import CheckpointSaved, Event, RunFailed, RunStarted
from stack_core.abi.mesh import check_shardings
from stack_core.abi.plugins import registries
from stack_core.abi.policy import PolicyBatches
from stack_core.chips import count_units, current_chip
from stack_core.runtime.signals import StopRequest, stop_requests
from stack_core.runtime.worker import current_worker
from stack_train.checkpoint import CheckpointDirectory, CheckpointStore, FrozenRecord
from stack_train.checkpoint.reading import CONFIG
from stack_train.data.abilities import VariesShapes
from stack_train.observers.goodput import GoodputObserver
from stack_train.observers.terminal import TerminalObserver
from stack_train.run.checks import fixed_differences
from stack_train.run.config import RunConfig
from stack_train.run.loop import RunSummary, TrainingLoop
from stack_train.run.memory import compile_fitting, out_of_memory
from stack_train.run.policy import policy_of
from stack_train.run.program import model_flops
from stack_train.run.run import Run, build
from stack_train.run.source_files import keep_files
from stack_train.step.state import TrainState
from stack_train.variables.adapters import read_adapters
from stack_train.variables.trained_adapters import with_adapters
from stack_train.variables.weights import init_state, restore_frozen

__all__ = ["start", "train"]


def train(config: RunConfig, *, resume: bool = False, allow: Sequence[str] = (), terminal: bool = False) -> RunSummary:
    """Trains a model and returns a summary of the run.

    Args:
      config: config of the run.
      resume: resume from the newest complete checkpoint, or from step 0 if the killed run had none.
      allow: config keys that may differ from the resumed run, or from the start, `run.init_from`.
      terminal: show progress bars.

    Raises:
      StackError: the config, the data, the directory or a checkpoint is not usable, or training cannot continue.
    """
    with contextlib.ExitStack() as last:  # closed after `start` returned, when the run and its programs are freed
        return start(build(config, resume=resume, allow=allow), terminal=terminal, last=last)


def start(run: Run, *, terminal: bool = False, last: contextlib.ExitStack | None = None) -> RunSummary:
    """Trains to the last step or a stop signal. Writes nothing before checking that the compiled step fits.

    Args:
      run: the run to train.
      terminal: show progress bars.
      last: receives the callbacks that end the session: the goodput report, then the release of the directory lock.
        None ends the session before `start` returns.

    Raises:
      StackError: the step does not fit, the directory or a checkpoint is not usable, or training cannot continue.
    """
    processes, ending = run.processes, run.processes.ending_together
    with contextlib.ExitStack() as own, ending():
        last = own if last is None else last
        stop = last.enter_context(stop_requests(deferred=False))  # in `last`: a signal must not cut off reports
        started_s = time.perf_counter()
        compiled = compile_fitting(run.traced, run.program)
        compile_s = time.perf_counter() - started_s
        processes.from_each("compiled", True)  # a barrier: no process writes before the step fits on all
        last.enter_context(_opened(run))
        if run.remote is not None:
            last.enter_context(run.remote)  # uploads the last files, before the lock is released
        # `ending` and `out_of_memory` again, inside the observers, which then see the converted exception.
        with _observed(run, last, terminal=terminal) as bus, _released(run), ending(), out_of_memory():
            processes.in_turn("files", lambda: _write_files(run))
            if run.remote is not None:
                run.remote.upload_files()
            directory, settings = run.directory.checkpoints, run.config.checkpoint
            tell = partial(_tell, run, bus)
            with _closing(run), CheckpointStore(directory, settings, emit=tell, processes=processes) as store:
                return _train(run, compiled, compile_s, store, bus, stop)


@contextlib.contextmanager
def _closing(run: Run) -> Iterator[None]:
    """Closes the run's data, such as its background threads, after the last checkpoint is durable."""
    try:
        yield
    finally:
        run.data.close()


def _tell(run: Run, bus: EventBus, event: Event) -> None:
    """Emits a checkpoint event to observers, and notifies the run's data of each durable checkpoint."""
    if isinstance(event, CheckpointSaved):
        if run.remote is not None:
            run.remote.checkpoint_saved(event.step)
        run.data.checkpoint_saved(event.step, CheckpointDirectory(run.directory.checkpoints).steps())
    bus.emit(event)


def _opened(run: Run) -> contextlib.AbstractContextManager[None]:
    """Locks the run directory in the first process, on behalf of all processes."""
    return run.directory.open(resume=run.resume) if run.processes.first else contextlib.nullcontext()


def _write_files(run: Run) -> None:
    if run.processes.first:
        run.directory.write(to_yaml(run.config), partial(_write_data_files, run))
        keep_files(run.config.data, run.directory)
        if changes := [*run.changes, *_save_choices(run)]:
            run.directory.note_changes(changes)
    else:
        run.data.write(run.directory.path)  # keeps existing files and gives the data their location


def _save_choices(run: Run) -> list[str]:
    """Writes the op implementations of the run; returns the changes since it was last started."""
    before = run.directory.read_json(run.directory.ops) if run.resume else None
    run.directory.write_json(run.directory.ops, run.choices)
    return ops.changed_choices(before or [], run.choices)


def _train(
    run: Run,
    compiled: jax.stages.Compiled,
    compile_s: float,
    store: CheckpointStore,
    bus: EventBus,
    stop: StopRequest,
) -> RunSummary:
    row_counts = run.data.split_rows(run.program.batch_parts)
    batches = run.data.train_iterator()
    state, records, first_step = _first_state(run, store, batches)
    run.processes.check_alike("data", {"position": batches.get_state()} if run.processes.count > 1 else {})
    if isinstance(run.data, PolicyBatches):
        # `Any`: the checkpoint that it returns is a frozen dataclass, unlike the protocol.
        open_policy: Any = partial(policy_of, run, run.program.step.variables(state))
        run.data.take_policy(open_policy)
    flops, ideal_step_s = _cost(run)
    variants = run.data.batch_shapes if isinstance(run.data, VariesShapes) else ()
    step = run.program.runnable(compiled, run.config.batches.spec(run.config.model), row_counts, variants)
    loop = TrainingLoop(run, step, store, bus, ideal_step_s, records)
    bus.emit(
        RunStarted(
            first_step=first_step,
            steps=run.config.run.steps,
            parameters=run.program.step.model.parameter_count,
            work=run.config.batches.work(),
            flops_per_step=flops,
            ideal_step_s=ideal_step_s,
            compile_s=compile_s,
            directory=run.directory.path,
            setup_s=time.perf_counter() - run.began_s,
            shown_metrics=loop.shown_metrics,
            rate_metrics=tuple(run.program.step.objective.rate_metrics),
            notes=loop.notes,
        )
    )
    # From here on the loop saves before it stops; until now a signal ended the start at once.
    stop.deferred = True
    return loop.run(state, batches, first_step, stop)


def _write_data_files(run: Run, directory: Path) -> None:
    if not run.resume:
        _remove_leftovers(directory)
    run.data.write(directory)
    if run.start is not None:
        run.start.copy_tokenizer(directory)


def _remove_leftovers(directory: Path) -> None:
    """Deletes files left by a failed start, which the data would otherwise reuse."""
    for name in ("tokenizer", "tokenizer.partial"):
        shutil.rmtree(directory / name, ignore_errors=True)
    for name in ("reference_logprobs.npz", "encoders.json"):
        (directory / name).unlink(missing_ok=True)


def _first_state(run: Run, store: CheckpointStore, batches: Any) -> tuple[TrainState, Mapping[str, FrozenRecord], int]:
    """Returns the first state, the sources of frozen variables and the steps done, and advances `batches` to match."""
    steps, program = 0, run.program
    if store.latest() is not None:
        restored = store.restore(program.abstract_state.without_frozen())
        # Compared with the checkpoint's config, too: a session that was killed before its first checkpoint may have
        # changed the data after this checkpoint was saved.
        saved = parse_yaml(restored.config_yaml, str(store.path(restored.step) / CONFIG))
        changes = (*run.changes, *fixed_differences(run.config, saved))
        if not any(is_under(line, ["data"]) for line in changes):  # changed data starts from its beginning
            batches.set_state(restored.data_state)
        steps, records = restored.step, restored.frozen
        state = restore_frozen(restored.state, program, run.config, records)
    else:
        state, records = init_state(program, run.config, run.start)
        state = _with_initial_adapters(state, records, run)
    check_shardings(state, program.state_shardings)
    return state, records, steps


def _with_initial_adapters(state: TrainState, records: Mapping[str, FrozenRecord], run: Run) -> TrainState:
    """Replaces new adapters in the state by the adapters of `run.adapters_from`, if set."""
    address = run.config.run.adapters_from
    if address is None:
        return state
    frozen = records["model"]
    base = {name: (spec, frozen.digests[name]) for name, spec in frozen.specs.items()}
    return with_adapters(state, run.program, run.config, read_adapters(address, run.config.model, lambda: base))


def _cost(run: Run) -> tuple[int, float | None]:
    """Returns the model's FLOPs per step and their duration at peak FLOPs in seconds, or None without a known peak."""
    flops, chip = model_flops(run.config, run.program), current_chip()
    return flops.total, flops.ideal_s(chip, units=count_units(chip, run.program.mesh.devices.flatten().tolist()))


@contextlib.contextmanager
def _observed(run: Run, last: contextlib.ExitStack, *, terminal: bool) -> Iterator[EventBus]:
    """Opens the event bus of the registered observers, reports failures to them, and closes goodput in `last`."""
    context = ObserverContext(run.directory.path, run.config, terminal)
    observers = observers_from(registries.observers, context, first=run.processes.first)
    if (worker := current_worker()) is not None:  # the driver observes every rank and shows progress for all
        observers = [*(each for each in observers if not isinstance(each, TerminalObserver)), worker]
    for observer in observers:
        if isinstance(observer, GoodputObserver):
            last.callback(observer.finish)
    with EventBus(observers) as bus:
        try:
            yield bus
        except BaseException as error:  # Every end is reported, Ctrl-C included; the exception is re-raised.
            bus.emit(RunFailed(error))
            raise


@contextlib.contextmanager
def _released(run: Run) -> Iterator[None]:
    """Releases the directory to other runs if this run fails without a resumable checkpoint."""
    try:
        yield
    except BaseException:  # Ctrl-C, too; re-raised.
        if run.processes.first and not CheckpointDirectory(run.directory.checkpoints).steps():
            run.directory.release()
        raise
