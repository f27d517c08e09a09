"""Tokenizes a source into shards, in parallel and resumable.

A source is split into parts, such as files, which do not depend on the number of workers. The shards of a part are
written in sequence, so a killed process loses at most the shards in progress.
"""

import array
import contextlib
import functools
import hashlib
import itertools
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np

from stack_core.abi.config import differences
from stack_core.abi.data import DataSource
from stack_core.abi.errors import DataError
from stack_train.data.abilities import SplitsIntoParts
from stack_train.data.corpus import Encoded, check_eos, encode_documents, token_dtype
from stack_train.data.prepared.manifest import FORMAT, INDEX_FILES, Manifest, Shard, read_manifest, sha256_of
from stack_train.data.settings import TextSettings
from stack_train.data.source import check_unchanged, open_source
from stack_train.data.tokenizer import HuggingFaceTokenizer, write_tokenizer

__all__ = ["Progress", "prepare"]


@dataclass(frozen=True)
class Progress:
    """Progress of a preparation.

    Attributes:
      parts: number of complete parts.
      all_parts: number of parts of the source.
      tokens: number of tokens in complete parts.
    """

    parts: int
    all_parts: int
    tokens: int


@dataclass(frozen=True)
class _Job:
    """Tokenization of one part, in any process."""

    directory: Path
    shard_tokens: int
    part: int


def prepare(
    config: TextSettings,
    tokenizer: HuggingFaceTokenizer,
    directory: Path,
    *,
    workers: int,
    shard_tokens: int,
    report: Callable[[Progress], None] = lambda progress: None,
) -> Manifest:
    """Tokenizes the documents of `config.source` into a directory, or continues an earlier, killed call.

    Documents keep their order, so training on the set gives the same batches as training on the source.

    Args:
      config: source of the documents.
      tokenizer: tokenizer of the set.
      directory: directory of the set.
      workers: number of processes; 1 tokenizes in this process.
      shard_tokens: number of tokens after which a shard ends.
      report: called after each part.

    Raises:
      DataError: a document cannot be read, the directory holds another set, or it cannot be written.
    """
    check_eos(tokenizer)
    source = open_source(config)
    fingerprint = source.fingerprint()
    count = len(_parts(source))
    plan: dict[str, object] = {
        "format": FORMAT,
        "source": config.source,
        "text_field": config.text_field,
        "documents": fingerprint,
        "tokenizer": tokenizer.digest,
        "shard_tokens": shard_tokens,
        "parts": count,
    }
    try:
        _check_files(directory)
        (directory / "shards").mkdir(parents=True, exist_ok=True)
        with _locked(directory):
            _check_plan(directory, plan)
            if (directory / "manifest.json").is_file():
                return read_manifest(directory)
            write_tokenizer(tokenizer, directory)
            jobs = [_Job(directory, shard_tokens, part) for part in range(count)]
            _run(jobs, _parts(source), tokenizer, workers, report)
            check_unchanged(source, fingerprint)
            return _finish(directory, plan, tokenizer)
    except OSError as error:
        raise DataError(
            f"Cannot write the prepared set to {str(directory)!r}: {error.strerror or error}. Free space there, or "
            "choose another --output, and run the command again."
        ) from error


def _run(
    jobs: Sequence[_Job],
    parts: Sequence[DataSource],
    tokenizer: HuggingFaceTokenizer,
    workers: int,
    report: Callable[[Progress], None],
) -> None:
    tokens = 0
    if workers == 1 or len(jobs) == 1:
        for done, (job, part) in enumerate(zip(jobs, parts, strict=True), start=1):
            tokens += _write_part(job, part, tokenizer)
            report(Progress(done, len(jobs), tokens))
        return
    context = multiprocessing.get_context("spawn")  # threads of the tokenizer would not survive a fork
    stop = context.Event()
    with ProcessPoolExecutor(min(workers, len(jobs)), context, _start_worker, (stop,)) as executor:
        try:
            futures = [executor.submit(_run_job, *pair) for pair in zip(jobs, parts, strict=True)]
            for done, future in enumerate(as_completed(futures), start=1):
                tokens += future.result()
                report(Progress(done, len(jobs), tokens))
        except BrokenProcessPool as error:
            raise DataError(
                "A worker of stack data prepare was killed, perhaps for lack of memory. Run the command again to "
                "continue, with fewer --workers."
            ) from error
        except BaseException:  # Ctrl-C, too; re-raised. Without this the workers would finish their parts first.
            stop.set()
            raise


def _start_worker(stop: Event) -> None:
    """Ends the worker with its parent, or once `stop` is set; the parent handles Ctrl-C."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the parts are the parallelism
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    for wait in (parent.join, stop.wait):
        threading.Thread(target=_exit_after, args=(wait,), daemon=True).start()


def _exit_after(wait: Callable[[], object]) -> None:
    wait()
    os._exit(1)


def _run_job(job: _Job, part: DataSource) -> int:
    return _write_part(job, part, _loaded(job.directory))


@functools.cache
def _loaded(directory: Path) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer.load(directory / "tokenizer")


def _parts(source: DataSource) -> Sequence[DataSource]:
    """Returns the parts of a source, or the source itself if it cannot be split."""
    return source.document_parts() if isinstance(source, SplitsIntoParts) else [source]


def _write_part(job: _Job, part: DataSource, tokenizer: HuggingFaceTokenizer) -> int:
    """Tokenizes a part after its last complete shard; returns the number of tokens of all its shards."""
    shards = list(_shards_of_part(job.directory, job.part))
    if shards and shards[-1].is_last:
        return sum(shard.tokens for shard in shards)
    read = shards[-1].documents_read if shards else 0
    documents = itertools.islice(part.documents(), read, None)
    encoded = encode_documents(documents, tokenizer)
    tokens, number = sum(shard.tokens for shard in shards), len(shards)
    while True:
        shard = _write_shard(job, number, encoded, read, token_dtype(tokenizer).itemsize)
        tokens, read, number = tokens + shard.tokens, shard.documents_read, number + 1
        if shard.is_last:
            return tokens


@dataclass(frozen=True)
class _ShardFile:
    """A complete shard of a part, with the index of its documents in an .npz file.

    Attributes:
      path: path of the tokens.
      tokens, documents: numbers of tokens and of documents.
      documents_read: number of documents of the part, empty ones included, that are in this or an earlier shard.
      is_last: True if this is the last shard of the part.
    """

    path: Path
    tokens: int
    documents: int
    documents_read: int
    is_last: bool

    @property
    def index(self) -> Path:
        return self.path.with_suffix(".npz")


def _path(directory: Path, part: int, number: int) -> Path:
    return directory / "shards" / f"{part:06}-{number:05}.tokens"


def _shards_of_part(directory: Path, part: int) -> Iterator[_ShardFile]:
    """Yields the complete shards of a part in order."""
    for number in itertools.count():
        path = _path(directory, part, number)
        index = path.with_suffix(".npz")
        if not index.is_file():
            return
        with np.load(index) as stored:
            tokens, documents, read, last = stored["counts"].tolist()
        yield _ShardFile(path, tokens, documents, read, bool(last))


def _write_shard(job: _Job, number: int, encoded: Iterator[Encoded], read: int, itemsize: int) -> _ShardFile:
    path = _path(job.directory, job.part, number)
    lengths, name_lengths, digests, names = array.array("q"), array.array("q"), array.array("Q"), bytearray()
    tokens, is_last, sha256 = 0, True, hashlib.sha256()
    partial = path.with_suffix(f".{os.getpid()}.partial")
    with partial.open("wb") as file:
        for document in encoded:
            read += 1
            if document.tokens:
                file.write(document.tokens)
                sha256.update(document.tokens)
                lengths.append(len(document.tokens) // itemsize)
                digests.append(document.digest)
                name_lengths.append(len(document.name))
                names += document.name
                tokens += lengths[-1]
            if tokens >= job.shard_tokens:
                is_last = False
                break
        _sync(file.fileno())
    partial.replace(path)
    shard = _ShardFile(path, tokens, len(lengths), read, is_last)
    # Last, since a shard is complete once it has its index.
    index = partial.with_suffix(".npz.partial")
    with index.open("wb") as file:
        np.savez(
            file,
            lengths=np.asarray(lengths, np.int64),
            digests=np.asarray(digests, np.uint64),
            name_lengths=np.asarray(name_lengths, np.int64),
            names=np.frombuffer(bytes(names), np.uint8),
            counts=np.asarray([tokens, len(lengths), read, is_last], np.int64),
            sha256=np.frombuffer(sha256.digest(), np.uint8),
        )
        _sync(file.fileno())
    index.replace(shard.index)
    return shard


def _sync(descriptor: int) -> None:
    os.fsync(descriptor)


def _finish(directory: Path, plan: dict[str, object], tokenizer: HuggingFaceTokenizer) -> Manifest:
    """Joins the indices of all shards, writes the manifest and removes the indices."""
    files = [file for part in range(int(str(plan["parts"]))) for file in _shards_of_part(directory, part)]
    joined: dict[str, list[np.ndarray]] = {"lengths": [], "digests": [], "name_lengths": [], "names": []}
    shards = []
    for file in files:
        with np.load(file.index) as stored:
            for name, arrays in joined.items():
                arrays.append(stored[name])
            sha256 = stored["sha256"].tobytes().hex()
        relative = file.path.relative_to(directory).as_posix()
        shards.append(Shard(relative, file.documents, file.tokens, sha256))
    offsets, name_offsets = (
        np.append(0, np.cumsum(np.concatenate(joined[name]), dtype=np.int64)) for name in ("lengths", "name_lengths")
    )
    digests = np.concatenate(joined["digests"])
    if not digests.size:
        raise DataError("The data source holds no text: every document is empty. Point it at files with text.")
    for name, values in (("offsets", offsets), ("digests", digests), ("name_offsets", name_offsets)):
        np.save(directory / f"{name}.npy", values)
    (directory / "names.bin").write_bytes(np.concatenate(joined["names"]).tobytes())
    content = hashlib.sha256(tokenizer.digest.encode() + offsets.astype("<i8").tobytes())
    content.update(digests.astype("<u8").tobytes())
    manifest = Manifest(
        format=FORMAT,
        source=str(plan["source"]),
        tokenizer=tokenizer.digest,
        dtype=token_dtype(tokenizer).str,
        documents=len(digests),
        tokens=int(offsets[-1]),
        content_digest=content.hexdigest(),
        shards=tuple(shards),
        index={name: sha256_of(directory / name) for name in INDEX_FILES},
    )
    manifest.write(directory)
    for file in files:
        file.index.unlink()
    for partial in (directory / "shards").glob("*.partial"):  # left by killed processes
        partial.unlink()
    return manifest


def _check_files(directory: Path) -> None:
    """Checks that a directory without a set is empty, which prevents other files from becoming part of the set.

    Raises:
      DataError: it has other files.
    """
    if (directory / "plan.json").is_file() or not directory.is_dir():
        return
    # A command that was killed before it wrote the plan leaves these.
    if other := sorted({path.name for path in directory.iterdir()} - {"shards", "prepare.lock", "plan.partial"}):
        raise DataError(
            f"{str(directory)!r} holds other files ({', '.join(other[:5])}). Choose a new or an empty --output."
        )


def _check_plan(directory: Path, plan: dict[str, object]) -> None:
    """Checks that a set in the directory has the same plan; writes the plan of a new set.

    Raises:
      DataError: the directory holds another set.
    """
    path = directory / "plan.json"
    if path.is_file():
        if changed := differences(plan, json.loads(path.read_text(encoding="utf-8"))):
            listing = "\n  ".join(changed)
            raise DataError(
                f"{str(directory)!r} holds a set that was prepared from something else (now, not then):\n  {listing}\n"
                "Restore these, or choose another --output."
            )
        return
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(plan, indent=1), encoding="utf-8")
    partial.replace(path)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Locks a directory; the kernel releases the lock of a killed process."""
    import fcntl  # not on Windows

    with (directory / "prepare.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(
                f"Another process prepares the set in {str(directory)!r}. Wait for it, or choose another --output."
            ) from None
        yield
