"""`stack profile attach` on a server shows what the engine's thread plans and what its steps compute."""

import itertools
import threading
from pathlib import Path

import pytest

from stack_core.cli import main
from stack_profile.analyses.ops import ops
from stack_profile.traces.trace import load_trace

from .served import Served, write_checkpoint

LISTENING = ("-m", "stack_core", "profile", "run", "--listen")
SIZES = ("--max-sequences", "2", "--step-tokens", "16", "--decode-repeats", "4")


@pytest.mark.slow
def test_a_server_whose_programs_were_kept_shows_plan_prefill_decode_and_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its programs have the numbers of the process that compiled them."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    directory, cache = tmp_path / "model", tmp_path / "cache"
    directory.mkdir()
    write_checkpoint(directory)
    variables = {"XDG_CACHE_HOME": str(cache)}
    Served(directory, *SIZES, variables=variables).stop()
    assert list(cache.rglob("jit_decode-*"))
    served, ended = Served(directory, *SIZES, under=LISTENING, variables=variables), threading.Event()

    def ask() -> None:
        for number in itertools.takewhile(lambda _: not ended.is_set(), itertools.count()):
            served.openai.completions.create(model=served.model, prompt=f"abc {number}", max_tokens=10)

    asking = threading.Thread(target=ask)
    asking.start()
    main(["profile", "attach", str(served.process.pid), "--duration-s", "0.5", "--out", str(tmp_path / "out")])
    ended.set()
    asking.join()
    served.stop()
    trace = load_trace(tmp_path / "out")
    seconds = {row.name: row.self_s for row in ops(trace, by="scope").rows}
    assert {"prefill", "decode", "decode/sample", "sample"} <= seconds.keys() and "plan" in trace.host_events.names
    assert seconds.get("", 0.0) < 0.1 * sum(seconds.values()) and not trace.problems
