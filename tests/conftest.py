"""What every test may use: the foreign checkpoints and their expected contents."""

from __future__ import annotations

import fcntl
import gc
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, settings

# The same examples in every run; HYPOTHESIS_PROFILE=searching looks for new ones. How long one takes says how busy the
# machine is.
UNHURRIED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("repeatable", derandomize=True, **UNHURRIED)
settings.register_profile("searching", **UNHURRIED)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

ROOT = Path(__file__).resolve().parent.parent
FOREIGN = ROOT / "fixtures" / "foreign"
UNREAD = ROOT / "fixtures" / "unread"
RANKS = ROOT / "fixtures" / "ranks"
DEEPSPEED = ROOT / "fixtures" / "deepspeed"
OLD = 1_767_225_600
"""2026-01-01, in seconds since the epoch."""


class Part(NamedTuple):
    """One checkpoint folder of fixtures/foreign with what its producer says is in it."""

    name: str
    path: Path
    expected: dict[str, dict[str, Any]]
    about: dict[str, Any]
    damaged: bool


def foreign_parts() -> list[Part]:
    """Every part of every foreign checkpoint, damaged ones included."""
    parts = []
    for file in sorted(FOREIGN.glob("*.expected.json")):
        about = json.loads(file.read_text())
        for folder, expected in about["parts"].items():
            name = about["name"] if folder == "." else f"{about['name']}/{folder}"
            damaged = folder in about.get("damaged", ())
            parts.append(Part(name, FOREIGN / about["name"] / folder, expected, about, damaged))
    return parts


def foreign_tensors(part: Part) -> set[str]:
    """Names of its tensors that are made of tensors."""
    return {fqn for fqn, entry in part.expected.items() if "inner" in entry}


_ALL = foreign_parts()
MADE_OF_TENSORS = [part for part in _ALL if foreign_tensors(part)]
PARTS = [part for part in _ALL if not foreign_tensors(part)]
WHOLE = [part for part in PARTS if not part.damaged]


def part(name: str) -> Part:
    """The part of that name."""
    return next(found for found in _ALL if found.name == name)


class Done(NamedTuple):
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


def run(*args: object, env: dict[str, str] | None = None, cwd: Path = ROOT) -> Done:
    """Run the command-line tool in this process as the shell would, 120 columns wide, at the root of the repository."""
    from click.testing import CliRunner

    from dcptool.cli import main

    argv, folder, handler = sys.argv, os.getcwd(), signal.getsignal(signal.SIGTERM)
    sys.argv = ["dcptool", *map(str, args)]
    os.chdir(cwd)
    try:
        done = CliRunner().invoke(main, sys.argv[1:], prog_name="dcptool", env={"COLUMNS": "120", **(env or {})})
    finally:
        sys.argv = argv
        os.chdir(folder)
        signal.signal(signal.SIGTERM, handler)
    return Done(done.exit_code, done.stdout, done.stderr)


def run_process(*args: object, env: dict[str, str] | None = None, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    """Run the command-line tool as a process of its own, for what shows only there; as `run` otherwise."""
    command = [sys.executable, "-m", "dcptool", *map(str, args)]
    environment = {**os.environ, "COLUMNS": "120", **(env or {})}
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False, **kwargs)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collect without looking for garbage, and never look through what is there now: a third of the time otherwise."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write tests/golden anew")


@pytest.fixture(scope="session", autouse=True)
def _old_files():
    """Give the foreign checkpoints one time long ago, which a checkout does not keep: they are not being written."""
    for path in (*FOREIGN.rglob("*"), *UNREAD.rglob("*")):
        if path.is_file() and not path.is_symlink():
            os.utime(path, (OLD, OLD))


@pytest.fixture(scope="session", autouse=True)
def _interruptible():
    """Take Ctrl-C as a terminal's job would: what is started in the background ignores it, and so do its children."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def once(tmp_path_factory):
    """Gives `once(name, make)`: what `make(folder)` returned, called in one of all processes of this test run."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def find(name: str, make: Callable[[Path], Any]) -> Any:
        folder, made = shared / name, shared / f"{name}.made"
        with open(shared / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed
            if not made.exists():
                shutil.rmtree(folder, ignore_errors=True)  # of a failure
                folder.mkdir()
                made.write_bytes(pickle.dumps(make(folder)))
        return pickle.loads(made.read_bytes())

    return find


@pytest.fixture
def foreign() -> Path:
    """The folder of checkpoints written by other software."""
    return FOREIGN


@pytest.fixture
def run_of(tmp_path):
    """Gives a run directory with whole steps of these names, without markers, written long ago."""
    from tests.run_steps import steps

    return lambda *names: steps(tmp_path / "run", *names)


@pytest.fixture(scope="session")
def s3_server():
    """A moto S3 server of our own on loopback; gives its endpoint."""
    pytest.importorskip("moto")
    pytest.importorskip("s3fs")
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    server._server.app = _refusing(server._server.app)
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(scope="session")
def commands(tmp_path_factory):
    """Commands that start in a tenth of a second, torch imported already."""
    from tests.commands import Commands

    found = Commands(tmp_path_factory.mktemp("commands"))
    yield found
    found.close()


REFUSED: dict[str, str] = {}
"""Ends of paths the S3 server of the tests answers with this status instead of what it has, such as "503 Slow Down"."""


def _refusing(app: Callable[..., Any]) -> Callable[..., Any]:
    """A WSGI application that refuses what REFUSED says."""

    def refuse(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        path = environ["PATH_INFO"]
        status = next((status for end, status in REFUSED.items() if path.endswith(end)), None)
        if status is None or environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return app(environ, start_response)
        code = status.partition(" ")[2].replace(" ", "")
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>no</Message></Error>".encode()
        start_response(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
        return [body]

    return refuse


@pytest.fixture
def refused():
    """Ends of paths that the S3 server refuses, with the status it answers."""
    yield REFUSED
    REFUSED.clear()


@pytest.fixture
def s3_url(s3_server, monkeypatch):
    """The URL of an empty folder in a bucket; credentials and endpoint are set for s3fs."""
    import uuid

    import fsspec

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    filesystem = fsspec.filesystem("s3")
    bucket = f"bucket-{uuid.uuid4().hex[:8]}"
    filesystem.mkdir(bucket)
    yield f"s3://{bucket}/run"
    filesystem.invalidate_cache()
