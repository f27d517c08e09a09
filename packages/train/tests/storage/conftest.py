"""Object storage on this machine: moto's S3 server on loopback, or a directory behind the same interface."""

import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

READ_ONLY, BUCKET = "read-only", "bucket"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """Starts moto's S3 server, which refuses to write to the bucket `READ_ONLY`; yields its address."""
    pytest.importorskip("s3fs", reason="needs s3fs: nox -s storage")
    server = pytest.importorskip("moto.server", reason="needs moto: nox -s storage")
    serving = pytest.importorskip("werkzeug.serving")
    moto = server.DomainDispatcherApplication(server.create_backend_app)

    def refusing(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        # Creating the bucket itself is allowed.
        is_write = environ["REQUEST_METHOD"] in ("PUT", "POST", "DELETE")
        if is_write and environ["PATH_INFO"].startswith(f"/{READ_ONLY}/"):
            start_response("403 Forbidden", [("Content-Type", "application/xml")])
            return [b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"]
        return moto(environ, start_response)

    made = serving.make_server("127.0.0.1", 0, refusing, threaded=True)
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{made.server_port}"
    made.shutdown()
    thread.join()


@pytest.fixture
def s3(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of an empty bucket in moto's server."""
    import s3fs

    for name, value in {
        "AWS_ENDPOINT_URL": s3_server,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    files = s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False)
    for bucket in (BUCKET, READ_ONLY):
        if not files.exists(bucket):
            files.mkdir(bucket)
    if found := files.find(BUCKET):
        files.rm(found)
    return f"s3://{BUCKET}"


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of a bucket that is a directory."""
    import fsspec

    (tmp_path / "storage" / BUCKET).mkdir(parents=True)
    (tmp_path / "storage" / READ_ONLY).touch()  # a file, in which nothing can be written
    local = fsspec.filesystem("file", auto_mkdir=True)
    found = fsspec.filesystem("dir", path=str(tmp_path / "storage"), fs=local)
    monkeypatch.setattr("fsspec.filesystem", lambda scheme, **options: found)
    return f"s3://{BUCKET}"


@pytest.fixture(params=["directory", "s3"])
def bucket(request: pytest.FixtureRequest) -> str:
    return request.getfixturevalue(request.param)
