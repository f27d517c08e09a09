import re
from pathlib import Path

import pytest

from stack_core.abi.errors import BenchmarkError, StackError
from stack_serve.bench.results import Results
from stack_serve.commands.bench_serve import bench_serve

from ..openai_server import Server


def test_it_prints_writes_and_compares(
    openai_server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, address = openai_server
    earlier, page = tmp_path / "earlier.json", tmp_path / "report.html"
    sizes = {"requests": 4, "prompt_tokens": "8", "answer_tokens": "4", "warm_up": 1}
    bench_serve(address, rate=(100.0,), concurrency=(1, 2), slo="ttft_ms:60000", json=earlier, **sizes)  # type: ignore[arg-type]
    capsys.readouterr()
    bench_serve(address, concurrency=(2,), compare=earlier, html=page, ignore_eos=True, **sizes)  # type: ignore[arg-type]
    said = capsys.readouterr()
    assert [point.key for point in Results.read(earlier).points] == [
        ("rate", 100.0), ("concurrency", 1.0), ("concurrency", 2.0)
    ]  # fmt: skip
    assert all(point.goodput_per_s == point.requests_per_s for point in Results.read(earlier).points)
    assert re.search(r"2 at once: 4 of 4 completed in .* answer tokens/s", said.out)
    assert re.search(r"time per output token +p50 +\d+\.\d ms", said.out)
    assert re.search(r"change from the earlier run: answer tokens/s [+-]\d+\.\d%", said.out)
    assert "2 at once: 4 of 4 requests" in said.err
    assert openai_server[0].bodies[-1]["ignore_eos"] is True
    html = page.read_text()
    assert html.count("<svg") == 1 and "Load on plain" in html
    assert not re.search(r"(src|href)=\"http|@import|url\(http", html)


def test_tokens_that_the_server_does_not_count_are_not_known(
    openai_server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = tmp_path / "found.json"
    options = {"model": "uncounted", "requests": 2, "concurrency": (1,), "warm_up": 0, "answer_tokens": "4"}
    bench_serve(openai_server[1], json=found, **options)  # type: ignore[arg-type]
    bench_serve(openai_server[1], compare=found, html=tmp_path / "page.html", **options)  # type: ignore[arg-type]
    said = capsys.readouterr().out
    assert "token counts are not known: the streams lack `usage`" in said and "answer tokens/s" not in said


def test_loads_without_options(openai_server: Server, tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    bench_serve(openai_server[1], json=found, prompt_tokens="2", answer_tokens="2", warm_up=0)
    assert [(point.kind, point.value, point.requests) for point in Results.read(found).points] == [
        ("concurrency", 1.0, 16), ("concurrency", 8.0, 32), ("concurrency", 32.0, 128)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": (1.0, 0.0)}, "--rate is 0; expected a number above 0"),
        ({"rate": (-1.0,)}, "--rate is -1; expected a number above 0"),
        ({"concurrency": (1, 0)}, "--concurrency is 0; expected 1 to 65,535"),
        ({"requests": 0}, "--requests is 0; expected 1 to 10,000,000"),
        ({"requests": 10**9}, "--requests is 1,000,000,000; expected 1 to 10,000,000"),
        ({"rate": (1e300,)}, r"--rate is 1e\+300"),
        ({"rate": (float("nan"),)}, "--rate is nan"),
        ({"concurrency": (10**6,)}, "--concurrency is 1,000,000; expected 1 to 65,535"),
        ({"timeout_s": 0.0}, "--timeout-s is 0; expected a number above 0"),
        ({"timeout_s": -1.0}, "--timeout-s is -1; expected a number above 0"),
        ({"timeout_s": float("nan")}, "--timeout-s is nan"),
        ({"answer_tokens": "1" * 24}, "not a distribution of lengths from 1 to"),
        ({"answer_tokens": "lognormal:8,1e9"}, "not a distribution of lengths from 1 to"),
        ({"prompt_tokens": "some"}, "not a distribution of lengths"),
        ({"extra": "{"}, "--extra is not valid JSON"),
        ({"extra": '{"top_p": NaN}'}, "--extra is not valid JSON"),
        ({"extra": "[]"}, "expected a JSON object"),
        ({"slo": "ttft_ms:x"}, "expected ttft_ms"),
        ({"vocab_size": 0}, "--vocab-size is 0; expected 1 to"),
        ({"warm_up": -1}, "--warm-up is -1; expected 0 to"),
        ({"json": Path("/no/such/folder/x.json")}, "there is no directory"),
        ({"compare": Path("/no/such/file.json")}, "cannot be read"),
    ],
)
def test_options_that_make_no_sense_are_refused_before_anything_is_sent(options: dict, message: str) -> None:
    with pytest.raises(BenchmarkError, match=message):
        bench_serve("http://127.0.0.1:9", **options)


def test_a_server_that_is_not_there() -> None:
    with pytest.raises(StackError, match="cannot be reached"):
        bench_serve("http://127.0.0.1:9")
