"""The rewards `math`, `code` and `judge`: their verdicts, and what becomes of what could not be checked."""

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import jax.numpy as jnp
import numpy as np
import pytest

from stack_core.abi.errors import ConfigError, EnvironmentFailed, SandboxError, UnknownName
from stack_rl.contracts import Completion, Score
from stack_rl.rewards import math
from stack_rl.rewards.code import CodeConfig
from stack_rl.rewards.judge import JudgeConfig
from stack_rl.rewards.math import MathConfig
from stack_rl.rewards.sandbox import ProgramResult, SandboxConfig
from stack_rl.rewards.unchecked import Unchecked
from stack_rl.rewards.weighted import as_floats, resolved, total_score


def scored(reward, text, *, finished=True, **record):
    completion = Completion(prompt="?", text=text, tokens=(1,), is_finished=finished, record=record)
    score = asyncio.run(total_score([(*resolved(reward), 1.0)], completion))
    return score.value, score.verdict


def test_math_compares_values_and_tells_what_it_cannot_read():
    assert scored("math", r"thus \boxed{0.50}", answer="1/2") == (1.0, "correct")
    assert scored("math", r"thus \boxed{0.51}", answer="1/2") == (0.0, "wrong")
    assert scored({"name": "math", "tolerance": 0.1}, r"\boxed{0.51}", answer="1/2") == (1.0, "correct")
    assert scored("math", "I do not know what it could be", answer="1/2") == (0.0, "unparsed")
    assert scored("math", r"\boxed{0.5}", answer="1/2", finished=False) == (0.0, "unparsed")
    with pytest.raises(EnvironmentFailed, match="'math' raised KeyError: \"the record has no 'answer'"):
        scored("math", r"\boxed{1}")


PROGRAM = {
    "same": 'import sys; sys.stdin.read(); print("same")',
    "hangs": "while True: pass",
    "raises": "raise RuntimeError('no such module')",
}


def test_a_library_that_hangs_or_fails_is_no_wrong_answer(monkeypatch):
    monkeypatch.setattr(math, "_is_installed", lambda: True)
    quick = SandboxConfig(wall_s=0.5)
    for name, program in PROGRAM.items():
        monkeypatch.setattr(math, "_PROGRAM", program)
        # Only what hangs has little time: on a busy machine Python takes longer than that to begin.
        options = {"sandbox": quick} if name == "hangs" else {}
        if name == "same":
            assert scored(MathConfig(sandbox=SandboxConfig()), r"\sin x", answer=r"\cos y") == (1.0, "correct")
            continue
        verdict = {"hangs": "timeout", "raises": "crash"}[name]
        with pytest.raises(Unchecked, match=verdict):
            scored(MathConfig(**options), r"\sin x", answer=r"\cos y")
        assert scored(MathConfig(unchecked="wrong", **options), r"\sin x", answer=r"\cos y") == (0.0, verdict)
        with pytest.raises(EnvironmentFailed, match=rf"could not be checked \({verdict}\): math-verify on "):
            scored(MathConfig(unchecked="stop", **options), r"\sin x", answer=r"\cos y")


def test_math_verify_decides_what_is_not_read_as_a_whole():
    pytest.importorskip("math_verify", reason="needs the extra `math`")
    assert scored("math", r"\boxed{\log_2 8}", answer="3") == (1.0, "correct")


def test_math_without_its_library_reads_alone_or_is_refused(monkeypatch):
    monkeypatch.setattr(math, "_is_installed", lambda: False)
    assert scored("math", r"\boxed{5-}", answer="5") == (0.0, "unparsed")
    with pytest.raises(ConfigError, match=r"needs math-verify: .*rl.*\[math\]"):
        resolved({"name": "math", "library": "math_verify"})
    monkeypatch.setattr(math, "_is_installed", lambda: True)

    def refuse(self):
        raise SandboxError("cannot read.")

    with monkeypatch.context() as patch:
        patch.setattr(math.Sandbox, "check_libraries", refuse)
        with pytest.raises(SandboxError, match=r"cannot read\. Or compare without math-verify: library: none"):
            MathConfig().build()
    monkeypatch.setattr(math, "_PROGRAM", "raise SystemExit('not to be run')")
    for text in ("5'", r"\sqrt{2x} \approx 5", "$5$ and"):  # of which math-verify reads the 5 alone
        assert scored("math", rf"\boxed{{{text}}}", answer="5") == (0.0, "unparsed")


DOUBLE = "Here:\n```python\nprint(2 * int(input()))\n```"
TESTS = [{"input": "2", "output": "4"}, {"input": "5", "output": "10\n"}]


def test_code_is_worth_the_tests_that_it_passes():
    half = "```\nprint(4)\n```"
    assert scored("code", DOUBLE, tests=TESTS) == (1.0, "correct")
    assert scored("code", half, tests=TESTS) == (0.0, "wrong")
    assert scored({"name": "code", "whole": False}, half, tests=TESTS) == (0.5, "wrong")
    assert scored("code", "```python\nraise SystemExit(1)\n```", tests=TESTS) == (0.0, "wrong")
    assert scored("code", "", tests=TESTS) == (0.0, "unparsed")
    with pytest.raises(EnvironmentFailed, match="the record's 'tests' are 3"):
        scored("code", DOUBLE, tests=3)


RIGHT, WRONG = "print(2 * int(input()))", "print(0)"
BLOCKS = {
    "bash before": f"```bash\npip install x\n```\nThen:\n```python\n{RIGHT}\n```",
    "output behind": f"```python\n{RIGHT}\n```\nIt prints\n```\n4\n```\nor\n```text\n10\n```",
    "the last of two": f"```python\n{WRONG}\n```\nBetter:\n```py\n{RIGHT}\n```",
    "python3": f"```python3\n{RIGHT}\n```\n```bash\nexit\n```",
    "a capital": f"```Python\n{RIGHT}\n```",
    "attributes": f'```python title="a.py" {{.numbered}}\n{RIGHT}\n```',
    "braces": f"``` {{.python #one}}\n{RIGHT}\n```",
    "in a list": f"1. Write\n\n   ```python\n   {RIGHT}\n   ```\n\n2. Run",
    "indented": f"  ```python\n  {RIGHT}\n  ```",
    "tildes": f"~~~python\n{RIGHT}\n~~~",
    "a longer fence": f'````python\ns = """\n```\n"""\n{RIGHT}\n````',
    "no language": f"```\n{RIGHT}\n```",
    "Windows": f"```python\r\n{RIGHT}\r\n```\r\n",
    "not closed": f"```python\n{RIGHT}\n",
    "no block": RIGHT,
}


def test_the_program_is_the_last_python_block():
    for name, answer in BLOCKS.items():
        assert scored("code", answer, tests=TESTS[:1]) == (1.0, "correct"), name
    assert scored("code", f"```bash\n{RIGHT}\n```", tests=TESTS) == (0.0, "unparsed")


def test_any_answer_and_tests_of_any_size_are_run():
    assert scored("code", "print(1)\0", tests=TESTS) == (0.0, "wrong")
    tests = "assert double(2) == 4\n" * 13_000  # 286 kB
    assert scored("code", "def double(x): return 2 * x", tests=tests) == (1.0, "correct")


def test_programs_may_use_what_is_installed():
    program = "import numpy\nprint(numpy.arange(3).sum() + int(input()) - 1)"
    assert scored("code", program, tests=TESTS[:1]) == (1.0, "correct")
    assert scored({"name": "code", "libraries": False}, program, tests=TESTS[:1]) == (0.0, "wrong")


def test_asserts_have_to_be_reached():
    program = "def double(x): return 2 * x"
    assert scored("code", program, tests="assert double(2) == 4") == (1.0, "correct")
    assert scored("code", program, tests="assert double(2) == 5") == (0.0, "wrong")
    assert scored("code", "import os; os._exit(0)", tests="assert double(2) == 4") == (0.0, "wrong")


def test_code_that_does_not_end_is_counted_dropped_or_stops_the_run():
    quick = SandboxConfig(wall_s=0.5)
    assert scored(CodeConfig(sandbox=quick), "while True: pass", tests=TESTS) == (0.0, "timeout")
    patient = SandboxConfig(wall_s=60.0, cpu_s=60)
    assert scored(CodeConfig(sandbox=patient), "while True: print('x' * 9999)", tests=TESTS) == (0.0, "crash")
    with pytest.raises(Unchecked, match="timeout: the program ended by"):
        scored(CodeConfig(sandbox=quick, unchecked="drop"), "while True: pass", tests=TESTS)


class Judge(BaseHTTPRequestHandler):
    answers: tuple = ()
    asked: list = []  # noqa: RUF012  # of the one server that a test has

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status, said = self.answers[min(len(self.asked), len(self.answers) - 1)]
        self.asked.append((self.path, body, self.headers.get("Authorization")))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps({"choices": [{"message": {"content": said}}]}).encode())

    def log_message(self, *_): ...


@pytest.fixture
def judge():
    Judge.asked = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Judge) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


def test_a_judge_grades_and_is_asked_again_while_it_is_busy(judge, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret")
    Judge.answers = ((503, ""), (200, "Well.\nGrade: 2 or rather\nGrade: **7.5**"))
    config = {"name": "judge", "url": judge, "model": "m", "key_variable": "JUDGE_KEY"}
    assert scored(config, "an {answer}", answer="the reference")[0] == 0.75
    (path, body, key), _ = Judge.asked
    assert path == "/v1/chat/completions" and body["model"] == "m" and key == "Bearer secret"
    assert "an {answer}" in body["messages"][0]["content"] and "from 0" in body["messages"][0]["content"]


GRADES = {
    "Grade: 8": 0.8, "Grade (0-10): 8": 0.8, "Grade (out of 10): **7.5**": 0.75, "Grade: .5": 0.05, "grade is 3.": 0.3,
    "Grade: 8/10": 0.8, "Grade: 8 out of 10": 0.8, "Grade: 2\nGrade = `9`": 0.9, "Grade: 10": 1.0, "Grade: +1": 0.1,
    "Grade: -3": None, "Grade: 11": None, "Grade: 4/5": None, "Grade: 7-8": None, "Grade 0-10": None,
    "Grade: 80%": None,
    "Grade: 8,5": None, "Grade: \N{MINUS SIGN}3": None, "Upgrade: 8": None, "Grade: good (8)": None,
}  # fmt: skip


def test_a_grade_is_the_whole_number_behind_the_word(judge):
    for said, expected in GRADES.items():
        Judge.asked, Judge.answers = [], ((200, said),)
        if expected is None:
            assert scored(JudgeConfig(url=judge, model="m", unchecked="wrong"), "x") == (0.0, "unparsed"), said
        else:
            assert scored(JudgeConfig(url=judge, model="m"), "x")[0] == pytest.approx(expected), said


def test_a_judge_sees_the_reference_answer_and_the_policy_s(judge):
    Judge.answers = ((200, "Grade: 1"),)
    config = JudgeConfig(url=judge, model="m", question="{prompt}|{answer}|{response}|{highest:g}|{{}}")
    scored(config, "mine", answer="the right one")
    assert Judge.asked[0][1]["messages"][0]["content"] == "?|the right one|mine|10|{}"
    with pytest.raises(
        EnvironmentFailed, match="cannot be filled in: KeyError: 'answer'; the record's fields: 'other'"
    ):
        scored(config, "mine", other="x")
    with pytest.raises(EnvironmentFailed, match="'response' has a name that the question of 'judge' uses"):
        scored(config, "mine", answer="x", response="y")


def test_a_judge_that_says_no_grade_or_cannot_be_asked_is_no_grade(judge):
    Judge.answers = ((200, "I would rather not."),)
    with pytest.raises(Unchecked, match="unparsed: no grade in the judge's answer 'I would rather not"):
        scored(JudgeConfig(url=judge, model="m"), "x")
    assert scored(JudgeConfig(url=judge, model="m", unchecked="wrong"), "x") == (0.0, "unparsed")
    Judge.asked, Judge.answers = [], ((404, "no such model"),)
    with pytest.raises(EnvironmentFailed, match="did not answer: 404"):
        scored(JudgeConfig(url=judge, model="m"), "x")
    assert len(Judge.asked) == 1  # it would say so again
    with pytest.raises(EnvironmentFailed, match="Connection refused"):
        scored(JudgeConfig(url="http://127.0.0.1:9/v1", model="m", attempts=1), "x")


def test_the_last_failed_attempt_at_a_judge_is_reported_without_a_further_wait(monkeypatch):
    waits_s = []

    async def sleep(delay_s):
        waits_s.append(delay_s)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    with pytest.raises(EnvironmentFailed, match="Connection refused"):
        scored(JudgeConfig(url="http://127.0.0.1:9/v1", model="m", attempts=3), "x")
    assert waits_s == [0.5, 1.0]


def test_a_score_may_be_a_number_of_any_library():
    half = np.float16(60_000)

    def numpy_score(completion):
        return Score(value=half, facts={"length": np.int64(3), "half": half, "jax": jnp.bfloat16(2)})

    completion = Completion(prompt="?", text="", tokens=(1,), is_finished=True, record={})
    rewards = [
        ("a", numpy_score, 1.0),
        ("b", lambda completion: half, 1.0),
        ("c", lambda completion: jnp.float32(1), 2.0),
    ]
    score = asyncio.run(total_score(rewards, completion))
    assert score.value == 2 * float(half) + 2  # half precision ends at 65,504
    assert json.loads(json.dumps(dict(score.facts))) == {
        "a": float(half), "length": 3.0, "half": float(half), "jax": 2.0, "b": float(half), "c": 1.0,
    }  # fmt: skip
    with pytest.raises(ValueError, match="the fact 'why' is 'long'; a number was expected"):
        as_floats({"why": "long"})


@pytest.mark.parametrize(
    ("reward", "error", "message"),
    [
        ("maths", UnknownName, "math"),
        ({"tolerance": 1}, ConfigError, "(has no|without a) name. Give one of: .*math"),
        ({"name": "exact", "case": 1}, ConfigError, "'exact' takes no settings"),
        ({"name": "math", "tolerence": 1}, ConfigError, "Did you mean 'tolerance'"),
        ({"name": "judge", "url": "x", "model": "m"}, ConfigError, "must begin with http://"),
        ({"name": "judge", "url": "http://x", "model": "m", "pattern": "(a)(b)"}, ConfigError, "has 2 groups"),
        (
            {"name": "judge", "url": "http://x", "model": "m", "question": "{answer}"},
            ConfigError,
            "{response} is the pol",
        ),
        ({"name": "judge", "url": "http://x", "model": "m", "question": '{"a": 1'}, ConfigError, "Write braces twice"),
        ({"name": "judge", "url": "http://x", "model": "m", "key_variable": "NO_SUCH"}, ConfigError, "is not set"),
    ],
)
def test_settings_that_do_not_fit_are_refused(reward, error, message):
    with pytest.raises(error, match=message):
        resolved(reward)


def test_how_a_program_ended_says_whether_it_succeeded():
    assert ProgramResult("exit", 0, b"", b"", 0.1).succeeded
    assert (
        not ProgramResult("exit", 1, b"", b"", 0.1).succeeded and not ProgramResult("flood", 0, b"", b"", 0.1).succeeded
    )
