"""Models of the hub by name: the real client, in processes of its own, against a small hub on this machine."""

import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

COMMIT, OTHER = "a" * 40, "b" * 40

PROGRAM = """
import sys
from pathlib import Path
from stack_core.abi.errors import ConversionError
from stack_train.huggingface.hub import on_disk
for name in sys.argv[1:]:
    try:
        found = on_disk(Path(name))
        print(found, sorted(each.name for each in found.iterdir()))
    except ConversionError as error:
        print(error)
"""


class Hub(http.server.BaseHTTPRequestHandler):
    """The three requests that a download makes."""

    files = {  # noqa: RUF012 - read alone
        "config.json": b"{}",
        "model.safetensors": b"weights",
        "tokenizer.json": b"[]",
        "pytorch_model.bin": b"not asked for",
    }
    asked: list[str] = []  # noqa: RUF012 - of this test

    def do_GET(self) -> None:
        self.asked.append(self.path)
        path = self.path.partition("?")[0]
        revision = path.rpartition("/revision/")[2]
        if path.startswith("/api/models/tests/gated"):
            self.answer(403, b"{}", **{"X-Error-Code": "GatedRepo"})
        elif not path.startswith(("/api/models/tests/tiny", "/tests/tiny")):
            self.answer(404, b"{}", **{"X-Error-Code": "RepoNotFound"})
        elif "/revision/" in path and revision in ("main", "v1", COMMIT, OTHER):
            commit = {"main": COMMIT, "v1": OTHER}.get(revision, revision)
            siblings = [{"rfilename": name} for name in self.files]
            self.answer(200, json.dumps({"id": "tests/tiny", "sha": commit, "siblings": siblings}).encode())
        elif "/tree/" in path:
            tree = [
                {"type": "file", "path": name, "size": len(content), "oid": "c" * 40}
                for name, content in self.files.items()
            ]
            self.answer(200, json.dumps(tree).encode())
        elif "/resolve/" in path:
            commit, name = path.split("/")[-2:]
            content = self.files[name]
            self.answer(200, content, ETag=f'"{name}"', **{"X-Repo-Commit": commit})
        else:
            self.answer(404, b"{}", **{"X-Error-Code": "RevisionNotFound"})

    do_HEAD = do_GET  # noqa: N815

    def answer(self, status: int, content: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), "Content-Type": "application/json", **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        """Says nothing."""


def found(names: list[str], home: Path, **environment: str) -> list[str]:
    answer = subprocess.run(
        [sys.executable, "-c", PROGRAM, *names],
        capture_output=True,
        text=True,
        check=True,
        cwd=home,
        env={**os.environ, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0", **environment},
    )
    return answer.stdout.splitlines()


@pytest.fixture
def hub():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_models_of_the_hub_are_downloaded_once(tmp_path: Path, hub) -> None:
    address = f"http://127.0.0.1:{hub.server_address[1]}"
    names = ["tests/tiny", "tests/tiny@v1", "tests/tiny@v2", "tests/none", "tests/gated"]
    *downloaded, no_revision, no_model, gated = found(names, tmp_path, HF_ENDPOINT=address)
    listing = "['config.json', 'model.safetensors', 'tokenizer.json']"
    assert [line.partition(" ")[2] for line in downloaded] == [listing] * 2, "no pickled weights"
    assert [Path(line.partition(" ")[0]).name for line in downloaded] == [COMMIT, OTHER]
    assert "has no revision 'v2'" in no_revision
    assert "no such model on the hub, or it is private" in no_model
    assert f"Accept it at {address}/tests/gated" in gated
    (malformed,) = found(["tests/a--b"], tmp_path, HF_ENDPOINT=address)
    assert malformed.startswith("hf:tests/a--b: there is no such directory, and the hub has no such names: ")
    offline = found(["tests/tiny", "tests/unknown"], tmp_path, HF_HUB_OFFLINE="1")
    assert offline[0] == downloaded[0]
    assert offline[1].startswith("hf:tests/unknown: there is no such directory, the model is not in the cache")
    assert "`hf download tests/unknown --local-dir unknown`" in offline[1]
