"""`stack cluster`: state, history and worker output of the hosts of a run."""

import json as json_format
import time
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from stack_core.abi.errors import ClusterError
from stack_core.runtime.goodput import share_of_training
from stack_core.runtime.record import ClusterRecord

__all__ = ["events", "join", "logs", "status"]


def status(run: Path, /, *, json: Annotated[bool, Parameter(negative=())] = False) -> None:
    """Show the hosts and workers of a run, its failures, and its time by activity.

    Args:
      run: the run's directory.
      json: print JSON.
    """
    found = _status(_record(run))
    if json:
        print(json_format.dumps(found))
        return
    driver = f"driven by the process with pid {found['driver']}" if found["driver"] else found["ended"] or "no driver"
    print(f"{run}: {driver}, {found['hosts']} hosts by {found['launcher']} at {found['address']}")
    if len(found["sizes"]) > 1:
        for size in found["sizes"]:
            print(f"  {_when(size)} {size['hosts']} host{'s' * (size['hosts'] != 1)}, formation {size['formation']}")
    failures = len(found["failures"])
    print(f"formation {found['formation']}, {failures} failure{'s' * (failures != 1)}")
    for worker in found["workers"]:
        print(f"  rank {worker['rank']} on host {worker['on']}, pid {worker['pid']}")
    for failure in found["failures"]:
        print(f"  {_when(failure)} {_sentence(failure)}")
    total_s = sum(found["seconds"].values())
    if total_s:
        print(f"goodput {share_of_training(found['seconds']):.1%} of {total_s:.1f} s")
        for activity, spent_s in sorted(found["seconds"].items(), key=lambda item: -item[1]):
            print(f"  {activity:<16} {spent_s:>10.1f} s  {spent_s / total_s:>6.1%}")


def events(run: Path, /, *, json: Annotated[bool, Parameter(negative=())] = False) -> None:
    """List the events of a run's cluster, oldest first.

    Args:
      run: the run's directory.
      json: print one JSON object per line.
    """
    for note in _record(run).notes():
        if json:
            print(json_format.dumps(note))
        elif note["kind"] != "ledger":
            print(f"{_when(note)} {_sentence(note)}")


def logs(run: Path, /, *, host: int | None = None) -> None:
    """Print the output of a run's workers.

    Args:
      run: the run's directory.
      host: print only the workers of this host.
    """
    record = _record(run)
    known = {int(path.stem.removeprefix("host-")): path for path in sorted(record.directory.glob("host-*.log"))}
    if host is not None and host not in known:
        listing = ", ".join(map(str, sorted(known))) or "none"
        raise ClusterError(f"There is no log of host {host} in {record.directory}. Hosts with logs: {listing}.")
    for number, path in sorted(known.items()):
        if host in (None, number):
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                print(f"host {number}: {line}")


def join(
    address: str,
    /,
    *,
    token_file: Path,
    host: Annotated[int | None, Parameter(validator=Number(gte=0))] = None,
    orphan_s: Annotated[float, Parameter(validator=Number(gt=0))] = 60.0,
) -> None:
    """Join this host to a run that uses the launcher "joined"; returns when the run ends.

    Args:
      address: address of the run's driver, "host:port".
      token_file: file with the token of the cluster, the same as the driver's cluster.token_file.
      host: number of this host. The default is SLURM_NODEID, JOB_COMPLETION_INDEX or TPU_WORKER_ID, or else the lowest
        free number.
      orphan_s: seconds to wait for a driver, before the run and after losing it.
    """
    from stack_core.runtime.launchers.joined import join_cluster

    refusal = join_cluster(address, token_file, host, orphan_s)
    if refusal:
        raise ClusterError(refusal)


def _record(run: Path) -> ClusterRecord:
    record = ClusterRecord(run / "cluster")
    if not record.exists():
        raise ClusterError(
            f"{run} holds no record of a cluster. Pass the output of a run that was started with --hosts."
        )
    return record


def _status(record: ClusterRecord) -> dict[str, Any]:
    notes = record.latest_run()
    last: dict[str, dict[str, Any]] = {note["kind"]: note for note in notes}
    session, formation = last.get("session", {}), last.get("formation", {})
    ended = notes[-1]["how"] if notes and notes[-1]["kind"] == "end" else None
    number = formation.get("number")
    workers = [note for note in notes if note["kind"] == "worker"]
    return {
        "driver": record.driver_pid(),
        "ended": ended,
        "address": session.get("address"),
        "launcher": session.get("launcher"),
        "hosts": session.get("hosts"),
        "formation": number,
        "sizes": _sizes(notes),
        # A driver that attaches records them again.
        "workers": [*{note["rank"]: note for note in workers if note["number"] == number}.values()],
        "failures": record.notes("failure"),
        "seconds": last.get("ledger", {}).get("seconds", {}),
    }


def _sizes(notes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the numbers of hosts over time: the formations with another number than the formation before."""
    unfit = {note["number"] for note in notes if note["kind"] == "unfit"}
    sizes: list[dict[str, Any]] = []
    for note in notes:
        if note["kind"] == "formation" and note["number"] not in unfit:
            hosts = len(note.get("hosts", ()))
            if not sizes or sizes[-1]["hosts"] != hosts:
                sizes.append({"time": note["time"], "hosts": hosts, "formation": note["number"]})
    return sizes


def _when(note: dict[str, Any]) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(note["time"]))


def _sentence(note: dict[str, Any]) -> str:
    who = "no single rank" if note.get("rank") is None else f"rank {note['rank']} on host {note.get('failed_host')}"
    return _SENTENCES.get(note["kind"], note["kind"]).format(**{**note, "who": who})


_SENTENCES = {
    "session": "a driver starts: {hosts} hosts by {launcher}, at {address}",
    "agent": "host {on} connected: {name}, agent with pid {pid}",
    "formation": "formation {number} on hosts {hosts}",
    "worker": "rank {rank} runs on host {on} with pid {pid}",
    "event": "{event} at step {step}",
    "lost": "host {on} is lost: {reason}",
    "failure": "formation {number} ended by {who}: {evidence}, at step {step}",
    "replaced": "agents start again on hosts {hosts}",
    "missing": "the run does without hosts {hosts}",
    "refused": "host {on} is refused: {reason}",
    "unfit": "the run cannot be divided between {hosts} hosts: {reason}",
    "resized": "formation {number} with {hosts} hosts ends after the checkpoint of step {step}: more hosts are ready",
    "attached": "the driver attaches to formation {number}, at step {step}",
    "end": "the driver ends: {how}",
}
