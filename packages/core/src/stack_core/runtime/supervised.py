"""The driver of one run over a cluster: forms, watches, attributes failures, and forms again until the run ends."""

import contextlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stack_core.abi import errors
from stack_core.abi.config import differences, to_mapping
from stack_core.abi.errors import ClusterError, RunAbandoned, StackError
from stack_core.abi.events import CheckpointSaved, Event, FormationFormed, RunStarted, WorkerDied
from stack_core.abi.launchers import Launcher
from stack_core.abi.plugins import registries
from stack_core.runtime.attribution import Failure, attributed
from stack_core.runtime.config import ClusterConfig
from stack_core.runtime.event_frames import from_frame
from stack_core.runtime.formation import Formation, Member, formed, updated
from stack_core.runtime.goodput import Goodput, share_of_training
from stack_core.runtime.hosts import Hosts
from stack_core.runtime.record import ClusterRecord, read_token
from stack_core.runtime.signals import StopRequest
from stack_core.runtime.supervisor import GiveUp, after

__all__ = ["Job", "supervise"]

_TURN_S = 0.2
_GATHER_S = 0.15  # a cause may be observed after its consequences
_ATTACH_S = 5.0
_NOTE_S = 5.0
_ENDED_S = 10.0
_LAUNCH_S = 5.0  # interval between attempts to start the agents of missing hosts


@dataclass(frozen=True)
class Job:
    """The function that every worker of a run calls.

    Attributes:
      target: "module:attribute" of a function that resumes interrupted work and returns a JSON value.
      arguments: keyword arguments, JSON values.
      preload: modules that agents import once, before they fork.
    """

    target: str
    arguments: Mapping[str, Any]
    preload: tuple[str, ...] = ()


def supervise(
    job: Job, config: ClusterConfig, output: Path, *, observe: Callable[[Event], None], stop: StopRequest
) -> Any:
    """Runs a job until all ranks are done and returns rank 0's result; attaches to a run that a killed driver left.

    With a range of hosts, a formation may have fewer hosts than the one before. It has more again after the next
    checkpoint, once more are connected. A number of hosts that the job refuses by a `ShardingError` is not tried again.

    Args:
      output: the run's directory; the record is in `output / "cluster"`.
      observe: receives the events of rank 0, `FormationFormed` and `WorkerDied`.
      stop: once it is set, the workers receive its signal, and the run ends with them.

    Raises:
      RunAbandoned: the run fails repeatedly; names the step and the cause.
      StackError: an error of a worker that the user must fix, or hosts that do not connect or are incompatible.
    """
    assert config.hosts is not None, "the caller sets hosts"
    record = ClusterRecord(output / "cluster")
    launcher: Launcher = registries.launchers[config.launcher](config)
    if config.token_file is not None:
        read_token(Path(config.token_file))
    # Check first: `driving` kills a driver that a signal has stopped.
    _check_same_job(job, config, record, record.unfinished())
    with record.driving():
        return _Driver(job, config, record, launcher, observe, stop).run()


@dataclass
class _Driver:
    job: Job
    config: ClusterConfig
    record: ClusterRecord
    launcher: Launcher
    tell_observers: Callable[[Event], None]
    stop: StopRequest
    failures: list[Failure] = field(default_factory=list)
    goodput: Goodput = field(default_factory=lambda: Goodput(time.monotonic(), "starting agents"))
    lost: set[int] = field(default_factory=set)
    unfit: dict[int, str] = field(default_factory=dict)  # numbers of hosts that do not divide the run, with reasons
    _trained: set[int] = field(default_factory=set)  # numbers of hosts with which the run has started
    _steps: int | None = None
    _saved_step: int | None = None  # step of a checkpoint that became durable during this turn
    _launch_s: float = 0.0
    _progress_s: float = 0.0
    _noted_s: float = 0.0
    _started: bool = False
    _stop_sent: bool = False
    _noted_ranks: set[int] = field(default_factory=set)

    def run(self) -> Any:
        left = self.record.unfinished()
        _check_same_job(self.job, self.config, self.record, left)
        # The check above is repeated under the lock, since another driver may have ended in between.
        token = self.record.token(self.config.token_file)
        self.range = self.config.host_range
        address = left["address"] if left else None
        count, preload = self.range.maximum, self.job.preload
        self.hosts = Hosts(self.config, self.launcher, token, count=count, address=address, preload=preload)
        exit_agents = True
        try:
            formation = self._attached(left) if left else self._fresh()
            result = self._watch(formation)
            self._close_record("finished")
            return result
        except (StackError, KeyboardInterrupt) as error:
            self._close_record(f"{type(error).__name__}: {error}")
            raise
        except BaseException:  # a bug in the driver is treated like its death: another driver may attach
            exit_agents = False
            raise
        finally:
            self.hosts.close(exit_agents=exit_agents)

    def _fresh(self) -> Formation:
        self._note_session()
        self._bring(range(self.hosts.count))
        return self._form(1)

    def _attached(self, left: Mapping[str, Any]) -> Formation:
        """Returns the formation that survived without a driver, or a new one if it is incomplete."""
        notes = self.record.latest_run()
        if saved := [each for each in notes if each["kind"] == "ledger"]:
            now_s = time.monotonic()
            self.goodput = Goodput.restored({**saved[-1], "at_s": now_s - _since_s(saved[-1])}, now_s)
        everyone = range(self.hosts.count)
        with contextlib.suppress(ClusterError):
            self.hosts.wait_for(everyone, _ATTACH_S)
        self._note_session()
        numbers = [each["number"] for each in notes if each["kind"] == "formation"]
        if not self.hosts.present:
            self._bring(everyone)
            return self._form(max(numbers, default=0) + 1)
        # A formation of a range may be complete without the missing hosts, and needs its driver now.
        self._bring([number for number in everyone if number not in self.hosts.present] if self.range.is_fixed else ())
        last = next((each for each in reversed(self.record.notes("formation"))), None)
        if last is None:
            return self._form(1)
        members = [Member(rank, host) for rank, host in enumerate(last["hosts"])]
        formation = Formation(last["number"], last["coordinator"], members)
        held = [facts for host in self.hosts.present.values() for facts in host.workers]
        ours = [facts for facts in held if facts["formation"] == formation.number]
        if len(ours) < len(members):
            self._end(formation)
            return self._form(formation.number + 1)
        for facts in ours:
            self._update(formation, facts)
        self._progress_s = time.monotonic()
        self._started = formation.step is not None
        if self._started:
            self._trained.add(len(members))
        self.record.note("attached", number=formation.number, step=formation.step)
        return formation

    def _form(self, number: int) -> Formation:
        """Forks a worker on every host, or on as many as the run may use."""
        for _ in range(3):  # retries, as a host may be lost meanwhile
            self._switch("forming")
            try:
                formation = self._place(number)
                break
            except ClusterError:
                self._replace_lost(Formation(number, ""))
        else:
            raise ClusterError(f"No formation of {self.range} hosts comes together. See `stack cluster logs`.")
        count = len(formation.members)
        facts = {"number": number, "coordinator": formation.coordinator, "hosts": list(formation.hosts)}
        self.record.note("formation", **facts)
        order = {"formation": number, "count": count, "coordinator": formation.coordinator}
        for member in formation.members:
            arguments = dict(self.job.arguments)
            self.hosts.tell(
                member.host, fork={**order, "rank": member.rank, "target": self.job.target, "arguments": arguments}
            )
        self._progress_s = time.monotonic()
        self._started = self._stop_sent = False
        self._noted_ranks.clear()
        self.tell_observers(FormationFormed(number, formation.hosts))
        return formation

    def _place(self, number: int) -> Formation:
        """Returns a formation on the hosts that are ready.

        Raises:
          ClusterError: too few hosts are ready, or the first one is lost.
        """
        ready = self.hosts.ready
        places = formed(number, "", ready, self.range.choose(len(ready), self.unfit) or self.range.minimum).hosts
        at = self.config.interface or self.hosts.present[places[0]].at
        return formed(number, f"{at}:{self.hosts.ask(places[0], 'port')}", places, len(places))

    def _watch(self, formation: Formation) -> Any:
        while True:
            self._saved_step = None
            self._turn(formation, _TURN_S)
            self._pass_stop_on(formation)
            self._launch_missing()
            if formation.is_finished:
                return formation.members[0].result
            if self._can_grow(formation):
                formation = self._resized(formation)
                continue
            hangs_for_s = self._hangs_for_s()
            if not (self._is_broken(formation) or hangs_for_s):
                continue
            until_s = time.monotonic() + _GATHER_S
            while time.monotonic() < until_s:
                self._turn(formation, 0.02)
            if formation.is_finished:
                return formation.members[0].result
            failure = attributed(formation, lost_hosts=self.lost, hangs_for_s=hangs_for_s)
            formation = self._after(formation, failure)

    def _after(self, formation: Formation, failure: Failure) -> Formation:
        """Returns the formation that follows a failed one.

        Raises:
          RunAbandoned: another formation would fail as well.
          StackError: the error of a worker, which the user must fix.
        """
        error = formation.members[failure.rank].error if failure.rank is not None else None
        if error is not None and error["type"] == "Interrupted":  # a requested stop, with the state saved
            raise errors.Interrupted(error["message"])
        if error is not None and self._is_unfit(formation, failure, error["type"]):
            return self._without(formation, error["message"])
        self.failures.append(failure)
        self._failed(formation, failure)
        self._end(formation)
        self._replace_lost(formation)
        verdict = after(self.failures, max_failures=self.config.max_failures)
        if isinstance(verdict, GiveUp):
            raise self._reason(formation, failure, verdict)
        self.tell_observers(WorkerDied(failure.rank, failure.host, failure.step, str(failure)))
        if self.stop:
            raise errors.Interrupted(
                f"Stopped by {self.stop.received!r} while a worker failed: {failure}. Use --resume."
            )
        return self._form(formation.number + 1)

    def _is_unfit(self, formation: Formation, failure: Failure, error_type: str) -> bool:
        """Returns whether the number of hosts is the reason of an error.

        Sizes that a mesh does not divide raise a `ShardingError`. Once another number of hosts has trained the same
        config, errors of the config or of the memory before the first step also have this reason.
        """
        if self.range.is_fixed or self._started or not failure.mendable:
            return False
        has_trained = bool(self._trained - {len(formation.members)})
        return error_type == "ShardingError" or (has_trained and error_type in ("ConfigError", "HardwareError"))

    def _without(self, formation: Formation, reason: str) -> Formation:
        """Returns a formation with another number of hosts, after the run refused this number."""
        size = len(formation.members)
        self.unfit[size] = reason
        self.record.note("unfit", number=formation.number, hosts=size, reason=reason)
        self.goodput.failed(time.monotonic())
        self._end(formation)
        if self.range.choose(self.range.maximum, self.unfit) is None:
            raise ClusterError(f"No number of hosts in cluster.hosts {self.range} fits the run.{self._reasons()}")
        self._replace_lost(formation)
        return self._form(formation.number + 1)

    def _reasons(self) -> str:
        return "".join(f"\n{size} {'host' if size == 1 else 'hosts'}: {why}" for size, why in self.unfit.items())

    def _can_grow(self, formation: Formation) -> bool:
        """Returns whether a checkpoint has just become durable and more hosts are ready than the formation has."""
        if self._saved_step in (None, self._steps) or self.stop or self._is_broken(formation):
            return False
        return (self.range.choose(len(self.hosts.ready), self.unfit) or 0) > len(formation.members)

    def _resized(self, formation: Formation) -> Formation:
        """Ends a formation after a checkpoint, and returns a larger one that resumes from it."""
        self.record.note("resized", number=formation.number, step=self._saved_step, hosts=len(formation.members))
        self.goodput.failed(time.monotonic())
        self._end(formation)
        self._replace_lost(formation)
        return self._form(formation.number + 1)

    def _failed(self, formation: Formation, failure: Failure) -> None:
        self.goodput.failed(time.monotonic())
        self.record.note(
            "failure",
            number=formation.number,
            cause=failure.kind,
            rank=failure.rank,
            failed_host=failure.host,
            step=failure.step,
            signal=failure.signal,
            evidence=failure.evidence,
        )

    def _reason(self, formation: Formation, failure: Failure, decision: GiveUp) -> StackError:
        if failure.mendable and failure.rank is not None:
            error = formation.members[failure.rank].error or {}
            kind = getattr(errors, str(error.get("type")), None)
            if isinstance(kind, type) and issubclass(kind, StackError):
                with contextlib.suppress(TypeError):
                    return kind(str(error.get("message")))
            return StackError(str(error.get("message")))
        return RunAbandoned(
            f"{decision.reason}\nIts last checkpoint is kept. Read "
            f"`stack cluster logs {self.record.directory.parent}`, fix the cause, and continue with --resume."
        )

    def _turn(self, formation: Formation, timeout_s: float) -> None:
        for message in self.hosts.poll(timeout_s):
            self._hear(formation, message)
        # A killed driver loses at most this part of the account.
        if time.monotonic() - self._noted_s > _NOTE_S:
            self._switch(self.goodput.activity)

    def _hear(self, formation: Formation, message: dict[str, Any]) -> None:
        host = message["host"]
        if "log" in message:
            self.record.log(host, message["log"])
        elif "lost" in message:
            self.lost.add(host)
            self.record.note("lost", on=host, reason=message["lost"])
        elif "refused" in message:
            self.record.note("refused", on=host, reason=message["refused"])
        elif "came" in message:
            self._greet(formation, host, message["workers"])
        elif message.get("formation") not in (None, formation.number):
            return
        elif "worker" in message:
            self._update(formation, message["worker"])
        elif "event" in message:
            self._observe(formation, from_frame(message["event"]), message["rank"])
        elif "pong" in message:
            self._progress(formation, message["steps"])

    def _greet(self, formation: Formation, number: int, workers: Sequence[Mapping[str, Any]]) -> None:
        """Records an agent, and ends its workers of outdated formations."""
        if number in self.hosts.present:
            host = self.hosts.present[number]
            self.record.note("agent", on=number, pid=host.pid, name=host.name)
        for facts in workers:
            if facts["formation"] != formation.number and facts["status"] == "running":
                self.hosts.tell(number, end=facts["formation"])

    def _observe(self, formation: Formation, event: Event, rank: int) -> None:
        self._progress_s = time.monotonic()
        step = getattr(event, "step", getattr(event, "first_step", None))
        member = formation.members[rank]
        if step is not None:
            member.step = max(step, member.step or 0)
        if isinstance(event, RunStarted):
            self._started, self._steps = True, event.steps
            self._trained.add(len(formation.members))
        elif isinstance(event, CheckpointSaved):
            self._saved_step = event.step
        self.goodput.observe(event, time.monotonic())
        if isinstance(event, (RunStarted, CheckpointSaved)):
            self.record.note("event", event=type(event).__name__, step=step)
        self.tell_observers(event)

    def _progress(self, formation: Formation, steps: Mapping[str, int | None]) -> None:
        for member in formation.members:
            step = steps.get(str(member.pid))
            if step is not None:
                member.step = max(step, member.step or 0)

    def _update(self, formation: Formation, report: Mapping[str, Any]) -> None:
        member = updated(formation, report, self.config.stopped_s)
        if member is not None and member.rank not in self._noted_ranks:
            self._noted_ranks.add(member.rank)
            self.record.note("worker", number=formation.number, rank=member.rank, on=member.host, pid=member.pid)

    def _is_broken(self, formation: Formation) -> bool:
        return formation.broken or bool(self.lost.intersection(formation.hosts))

    def _hangs_for_s(self) -> float | None:
        limit_s = self.config.deadline_s if self._started else self.config.first_deadline_s
        spent_s = time.monotonic() - self._progress_s
        return spent_s if spent_s > limit_s else None

    def _pass_stop_on(self, formation: Formation) -> None:
        if self.stop.received is not None and not self._stop_sent:
            self._stop_sent = True
            # One process suffices: all processes agree on the last step.
            first = formation.members[0].host
            self.hosts.tell(first, signal={"formation": formation.number, "number": int(self.stop.received)})

    def _end(self, formation: Formation) -> None:
        """Ends the remains of a formation; returns when none of its workers is alive."""
        waiting = {host for host in formation.hosts if host in self.hosts.present}
        for host in waiting:
            self.hosts.tell(host, end=formation.number)
        until_s = time.monotonic() + _ENDED_S
        while waiting and time.monotonic() < until_s:
            for message in self.hosts.poll(_TURN_S):
                if message.get("ended") == formation.number:
                    waiting.discard(message["host"])
                self._hear(formation, message)
            waiting -= self.lost
        for host in waiting:
            # A host that does not answer might still compute.
            self.hosts.end(host)
            self.lost.add(host)

    def _replace_lost(self, formation: Formation) -> None:
        """Starts the agents of missing hosts; hears what happened meanwhile to the hosts of an ended formation."""
        if self.range.is_fixed:
            gone = [number for number in range(self.hosts.count) if number not in self.hosts.present]
            if gone:
                self.record.note("replaced", hosts=gone)
            self._bring(gone)
        else:
            self._launch_missing(after_s=0.0)
            self._bring(self.lost)
        # A host that was lost and came back meanwhile must not count as lost in the next formation.
        for message in self.hosts.poll(0.0):
            self._hear(formation, message)
        self.lost.clear()

    def _bring(self, numbers: Collection[int]) -> None:
        """Starts agents and waits for them; a range waits for these hosts up to `missing_s` if others are enough."""
        if self.range.is_fixed:
            self.hosts.start(numbers)
            return
        self._switch("starting agents")
        self.hosts.launch_missing()
        is_enough = lambda ready: self.range.choose(ready, self.unfit) is not None
        try:
            missing = self.hosts.gather(is_enough, numbers, self.config.missing_s)
        except ClusterError as error:
            raise ClusterError(f"{error}{self._reasons()}") from error
        if missing:
            self.record.note("missing", hosts=missing)

    def _launch_missing(self, after_s: float = _LAUNCH_S) -> None:
        """Starts the agents of missing hosts of a range, at intervals."""
        now_s = time.monotonic()
        if not self.range.is_fixed and now_s - self._launch_s >= after_s:
            self._launch_s = now_s
            if launched := self.hosts.launch_missing():
                self.record.note("replaced", hosts=launched)

    def _switch(self, activity: str) -> None:
        self._noted_s = time.monotonic()
        self.goodput.switch(activity, self._noted_s)
        self.record.note("ledger", replace=True, boot=_boot_id(), **self.goodput.saved())

    def _note_session(self) -> None:
        self.record.note(
            "session",
            address=self.hosts.address,
            hosts=self.config.hosts,
            launcher=self.config.launcher,
            target=self.job.target,
            arguments=dict(self.job.arguments),
            settings=to_mapping(self.config),
        )

    def _close_record(self, ending: str) -> None:
        self._switch(self.goodput.activity)
        self.record.note(
            "end", how=ending, goodput=share_of_training(self.goodput.seconds), seconds=self.goodput.seconds
        )
        self.record.finish()


def _check_same_job(job: Job, config: ClusterConfig, record: ClusterRecord, left: Mapping[str, Any] | None) -> None:
    """Raises a ClusterError if agents may still run another config, to which a new driver cannot attach."""
    if left is None:
        return
    requested, running = (
        {name: value for name, value in each.items() if name != "resume"}
        for each in ({**job.arguments, "hosts": config.hosts}, {**left["arguments"], "hosts": left["hosts"]})
    )
    if lines := differences(requested, running):
        listing = "\n  ".join(lines)
        raise ClusterError(
            f"An unfinished run in {record.directory.parent} has another config (this run's value, not that run's):"
            f"\n  {listing}\nStart that run with its own config, or wait until its agents have ended."
        )


def _since_s(ledger: Mapping[str, Any]) -> float:
    """Returns the seconds since a ledger entry.

    The monotonic clock is used within one boot of a machine, otherwise the wall clock.
    """
    passed_s = time.monotonic() - ledger["at_s"] if ledger.get("boot") == _boot_id() else time.time() - ledger["time"]
    return max(0.0, passed_s)


def _boot_id() -> str:
    """Returns the id of the machine's current boot, whose processes share the monotonic clock."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
