"""`stack cluster` over a record that the test writes."""

import json
import os

import pytest

from stack_core.cli import main
from stack_core.runtime.record import ClusterRecord


@pytest.fixture
def run(tmp_path):
    record = ClusterRecord(tmp_path / "cluster")
    with record.driving():
        session = {"address": "127.0.0.1:5", "hosts": 2, "launcher": "processes"}
        record.note("session", **session)
        record.note("agent", on=1, pid=7, name="node1")
        record.note("formation", number=3, coordinator="127.0.0.1:6", hosts=[0, 1])
        record.note("worker", number=3, rank=1, on=1, pid=99)
        record.note("worker", number=3, rank=1, on=1, pid=99)
        failure = {"cause": "signal", "rank": 1, "failed_host": 1, "step": 6, "signal": "SIGKILL"}
        record.note("failure", number=3, evidence="ended by SIGKILL", **failure)
        record.note("ledger", replace=True, seconds={"training": 1.0, "forming": 1.0})
        record.note("ledger", replace=True, seconds={"training": 3.0, "forming": 1.0})
        record.note("end", how="finished", goodput=0.75, seconds={})
    record.log(1, "a line of rank 1\n")
    return tmp_path


def test_status_shows_failures_and_where_the_time_went(run, capsys):
    main(["cluster", "status", str(run)])
    shown = capsys.readouterr().out
    assert "finished, 2 hosts by processes" in shown and "rank 1 on host 1, pid 99" in shown
    assert "ended by rank 1 on host 1: ended by SIGKILL, at step 6" in shown
    assert "goodput 75.0% of 4.0 s" in shown
    main(["cluster", "status", str(run), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (
        found["driver"] is None and len(found["workers"]) == 1 and found["seconds"] == {"training": 3.0, "forming": 1.0}
    )


def test_status_shows_the_numbers_of_hosts_over_time(tmp_path, capsys):
    record = ClusterRecord(tmp_path / "cluster")
    with record.driving():
        record.note("session", address="a:1", hosts="1..3", launcher="processes")
        for number, hosts in enumerate([[0, 1, 2], [0, 1], [0, 1], [1], [0, 1]], 1):
            record.note("formation", number=number, hosts=hosts)
        record.note("unfit", number=1, hosts=3, reason="16 rows")
    main(["cluster", "status", str(tmp_path)])
    shown = capsys.readouterr().out
    assert "1..3 hosts by processes" in shown
    assert [line[22:] for line in shown.splitlines()[1:4]] == [
        "2 hosts, formation 2",
        "1 host, formation 4",
        "2 hosts, formation 5",
    ]


def test_status_does_not_read_the_calendar(tmp_path, monkeypatch, capsys):
    """Notes count by their order: a clock that is set back two hours hides neither an end nor a driver."""
    record, now_s = ClusterRecord(tmp_path / "cluster"), iter([7200.0, 7300.0, 100.0, 50.0, 40.0])
    monkeypatch.setattr("stack_core.runtime.record.time.time", lambda: next(now_s))
    with record.driving():
        record.note("session", address="a:1", hosts=2, launcher="processes")
        record.note("formation", number=1)
        record.note("end", how="finished")
        main(["cluster", "status", str(tmp_path)])
        assert f"driven by the process with pid {os.getpid()}" in capsys.readouterr().out
    main(["cluster", "status", str(tmp_path)])
    assert "finished, 2 hosts" in capsys.readouterr().out
    with record.driving():
        record.note("session", address="a:2", hosts=1, launcher="processes")
    main(["cluster", "status", str(tmp_path), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (found["ended"], found["formation"], found["hosts"]) == (None, None, 1)


def test_events_and_logs(run, capsys):
    main(["cluster", "events", str(run)])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7 and lines[1].endswith("host 1 connected: node1, agent with pid 7")
    main(["cluster", "events", str(run), "--json"])
    kinds = [json.loads(line)["kind"] for line in capsys.readouterr().out.splitlines()]
    assert kinds == ["session", "agent", "formation", "worker", "worker", "failure", "ledger", "end"]
    main(["cluster", "logs", str(run)])
    assert capsys.readouterr().out == "host 1: a line of rank 1\n"


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["status", "nowhere"], "nowhere holds no record of a cluster"),
        (["logs", "RUN", "--host", "0"], "There is no log of host 0"),
        (["join", "somewhere", "--token-file", "none"], "The address is 'somewhere'; expected 'host:port'"),
    ],
)
def test_what_is_not_there_is_named(run, capsys, arguments, part):
    with pytest.raises(SystemExit) as ended:
        main(["cluster", *(str(run) if each == "RUN" else each for each in arguments)])
    assert ended.value.code == 2 and part in capsys.readouterr().err
