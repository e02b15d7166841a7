"""Who saves to a run directory: the lease that `training.CheckpointManager` holds there. Reads it; takes none.

A JSON document in the file `_LEASE` beside the steps. Its length does not change when it is renewed, so that it can be
written over in place: a reader finds an old time or a new one, never a part.
"""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from typing import Any, NamedTuple

from dcptool.checkpoint.findings import Finding
from dcptool.errors import DcptoolError, StorageError
from dcptool.storage import Storage
from dcptool.words import shown, span

NAME = "_LEASE"
NBYTES = 1024
"""Of every lease; what is longer is none."""
SCHEMA = 1
_HIDDEN = "?"
"""In place of what tells a process apart: it is there, and nothing of it is shown."""


class Lease(NamedTuple):
    """What a lease says.

    Attributes:
        id: of its owner, one per manager; "" if that cannot be read, as while it is being made.
        host: name of the machine.
        pid: of the process of rank 0.
        machine: tells machines, their boots and their PID namespaces apart; "" where nothing does.
        began: what tells this process from an earlier one with its pid; "" where nothing does.
        since: when it was taken, seconds since the epoch.
        renewed: when it was last renewed, seconds since the epoch, by the clock of its owner.
        seconds: without renewal after which it has lapsed.
        version: what the object store calls this content of it; "" if it does not tell.
    """

    id: str
    host: str = ""
    pid: int = 0
    machine: str = ""
    began: str = ""
    since: float = 0.0
    renewed: float = 0.0
    seconds: float = 60.0
    version: str = ""

    def document(self) -> bytes:
        """Return the bytes of its file, `NBYTES` of them."""
        times = {"since": f"{self.since:.3f}", "renewed": f"{self.renewed:.3f}"}  # of one width, for many years
        fields = {**self._asdict(), **times, "schema": SCHEMA, "host": self.host[:200]}
        del fields["version"]
        return json.dumps(fields).encode().ljust(NBYTES - 1) + b"\n"

    def holder(self) -> str:
        """Say who holds it."""
        if not self.id:
            return "somebody whose lease cannot be read"
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.since))
        return f"process {self.pid} on {shown(self.host)}, since {since}"

    def is_dead(self) -> bool:
        """Tell whether its process is known to have ended: it was on this machine and is not there now."""
        here = machine()
        return bool(self.id and here and self.machine == here) and process(self.pid) not in (self.began, _HIDDEN)

    def is_old(self) -> bool:
        """Tell whether it was not renewed for too long, by two clocks that may differ."""
        return time.time() - self.renewed > self.seconds


def mine(owner: str, seconds: float) -> Lease:
    """Return a lease of this process that begins now."""
    now = time.time()
    pid = os.getpid()
    return Lease(owner, socket.gethostname(), pid, machine(), process(pid), now, now, seconds)


def read_lease(storage: Storage) -> Lease | None:
    """Return the lease in a run directory, None if there is none; one that is no JSON of ours has no owner.

    Raises:
        StorageError: it cannot be read.
    """
    entry = storage.entry(NAME)
    if entry is None:
        return None
    try:
        data = storage.read(NAME, 0, min(entry.nbytes, NBYTES))
    except StorageError as error:
        if error.gone:  # since
            return None
        raise
    return parse(data, entry.mtime or 0.0)._replace(version=entry.version or "")


def parse(data: bytes, written: float) -> Lease:
    """Return what a lease's file says.

    Args:
        data: its bytes.
        written: when, seconds since the epoch; that counts where it says nothing.
    """
    with suppress(ValueError, RecursionError, TypeError):
        fields: dict[str, Any] = dict(json.loads(data))
        known = {name: type(default)(fields[name]) for name, default in Lease("")._asdict().items() if name in fields}
        if fields.get("schema") == SCHEMA and 0 < known["seconds"] < 1e9 and abs(known["since"]) < 1e11:
            return Lease(**known)
    return Lease("", renewed=written)


def held(storage: Storage) -> list[Finding]:
    """Return the note that a job holds a run directory; nothing if none does, or that cannot be told."""
    try:
        lease = read_lease(storage)
    except DcptoolError:
        return []
    if lease is None or not lease.id or lease.is_old() or lease.is_dead():
        return []
    ago = span(max(0.0, time.time() - lease.renewed))
    message = f"a job saves here: {lease.holder()}; it said so last {ago} ago"
    return [Finding.of("run-held", message, NAME)]


def machine() -> str:
    """Return what tells this boot of this machine, and this PID namespace, from others; "" where nothing does."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def process(pid: int) -> str:
    """Return what tells a process from an earlier one with its pid, "" if there is none that lives (Linux only)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return _HIDDEN if _is_of_another_user(pid) else ""
    return "" if fields[0] in (b"Z", b"X") else fields[19].decode()  # its start, in ticks since the machine's


def _is_of_another_user(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except OSError:
        return False
    return False
