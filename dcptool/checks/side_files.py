"""Files beside the checkpoints of a step: whether each is whole, as far as its kind can tell.

A zip has its directory at its end and a CRC32 of each record, a pickle ends with a dot, JSON can be parsed; of anything
else only the size is known. By name: what ends as these do must not be empty.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, NamedTuple

from dcptool.checkpoint.findings import Finding, cannot_be_read, unsafe_pickle
from dcptool.checkpoint.kinds import Effect, Severity
from dcptool.checks.check import Level, check
from dcptool.checks.files import GET_LFS_FILES
from dcptool.errors import DcptoolError, MetadataError, RunsCodeError, StorageError
from dcptool.formats.dcp.format import data_file_rank
from dcptool.formats.detect import open_part
from dcptool.formats.safetensors.header import LFS_START
from dcptool.formats.table import beside
from dcptool.formats.torch_save.format import SUFFIXES, is_legacy
from dcptool.frameworks.table import holds, is_needed, is_regular
from dcptool.pickles import inert
from dcptool.pickles.calls import Calls
from dcptool.storage import Location, Storage, base_name, join
from dcptool.storage.stream import stream
from dcptool.words import nbytes as nbytes_words

_KNOWN = (*SUFFIXES, ".npz", ".json")
_OF_STATE = (*SUFFIXES, ".npz")
_NUMBER = re.compile(r"(?<!\d)\d{1,7}(?!\d)")
_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"
_NEVER_ZEROS = (".pt", ".pth", ".ckpt", ".pkl", ".npz")
_START_NBYTES = 64
_SMALL_NBYTES = 64 << 10
"""What is read at once of a file: all of most."""
_MAX_PARSED_NBYTES = 1 << 20
_MAX_PICKLE_NBYTES = 64 << 20
_AGAIN = "Copy it again from where it was saved, or resume from another step."


class SideFiles(NamedTuple):
    """What a look at the files beside the checkpoints of a step shows.

    Attributes:
        names: of them, sorted.
        findings: what is wrong with them.
        n_unproven: how many hold nothing that tells whether their bytes are what was written.
        unproven_nbytes: bytes of these.
    """

    names: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    n_unproven: int = 0
    unproven_nbytes: int = 0


def look_at(storage: Storage, files: Mapping[str, int], level: Level, threads: int | None) -> SideFiles:
    """Look at files beside the checkpoints of a step.

    Args:
        storage: of the step.
        files: bytes of each, by its name there.
        level: METADATA reads a file's beginning and its end; RECORDS pickles too; DEEP every byte of zips.
        threads: how many read at the same time; None for the number of processors.
    """
    names = sorted(files)
    known = [
        name for name in names
        if name.endswith(_KNOWN) or (is_needed(name) if not files[name] else level >= Level.RECORDS)
    ]  # fmt: skip
    found: dict[str, tuple[bool, Sequence[Finding]]] = {}
    if known:
        from dcptool.copying.pool import Pool

        with Pool(threads) as pool:
            found = dict(pool.run(lambda name: _look_at(storage, name, files[name], level), known))
    unproven = [name for name in names if not found.get(name, (False,))[0]]
    findings = tuple(finding for _, problems in found.values() for finding in problems)
    return SideFiles(tuple(names), findings, len(unproven), sum(files[name] for name in unproven))


def patterns_of(files: Iterable[str], marker: str) -> frozenset[str]:
    """Return the names of files that lie beside the checkpoints of a step, with the numbers in them taken out.

    Only those of kinds that trainers keep state in: other files may come and go. Numbers stay where a trainer gives a
    file the same one in each step. Where each rank that wrote data has a file, that is a pattern too.
    """
    files = list(files)
    names = [name for name in beside(files, marker) if name.endswith(_OF_STATE)]
    found = {name if is_regular(name) else re.sub(r"\d+", "N", name) for name in names}
    n_ranks = 1 + max((rank for name in files if (rank := data_file_rank(base_name(name))) is not None), default=0)
    return frozenset(found | _of_each_rank((name for name in names if not is_regular(name)), n_ranks))


def _of_each_rank(names: Iterable[str], n_ranks: int) -> set[str]:
    """Return a pattern for each number in names that is that of every rank; none of a single rank."""
    numbers: dict[str, set[int]] = {}
    for name in names:
        for match in _NUMBER.finditer(name):
            numbers.setdefault(f"{name[: match.start()]}N{name[match.end() :]}", set()).add(int(match[0]))
    every = set(range(n_ranks))
    return {f"{form} of each of {n_ranks} ranks" for form, found in numbers.items() if n_ranks > 1 and found >= every}


def may_be_lacking(pattern: str, n_ranks: int | None) -> bool:
    """Tell whether a step of so many ranks, None if unknown, lacks a pattern that others have and it has not."""
    match = re.search(r" of each of (\d+) ranks$", pattern)
    return match is None or int(match[1]) == n_ranks


def _look_at(storage: Storage, name: str, nbytes: int, level: Level) -> tuple[bool, Sequence[Finding]]:
    """Look at a file; of one whose name says nothing it matters only whether it runs code, or is empty and needed."""
    proven, problems = _problems(storage, name, nbytes, level)
    if name.endswith(_KNOWN) or not nbytes:
        return proven, problems
    return False, [finding for finding in problems if finding.traits.effect is Effect.UNSAFE]


def _runs(file: IO[bytes], name: str) -> list[Finding]:
    from dcptool.pickles.files import runs

    return unsafe_pickle(runs(file), name, name)


def _problems(storage: Storage, name: str, nbytes: int, level: Level) -> tuple[bool, Sequence[Finding]]:
    """Return whether its checksums cover a file, and what is wrong with it."""
    if not nbytes:
        may_be_empty = name.endswith(".json") and not holds(name)
        return False, [_cut(name, "is empty", Severity.WARNING if may_be_empty else None)]
    try:
        start = storage.read(name, 0, min(nbytes, _SMALL_NBYTES))
        file: IO[bytes] = io.BytesIO(start) if nbytes <= _SMALL_NBYTES else stream(storage, name, nbytes)
        if start.startswith(LFS_START):
            message = f"{name} is a Git LFS pointer, not the file itself"
            return False, [Finding.of("lfs-pointer", message, name, next_step=GET_LFS_FILES)]
        if name.endswith(".json"):
            return False, _json_problems(file, name, nbytes)
        if start.startswith(_ZIP):
            return True, _zip_problems(storage, file, name, nbytes, level)
        if start.startswith(_PICKLE) and not is_legacy(start):
            return False, _pickle_problems(file, name, nbytes, level)
        if level >= Level.RECORDS and (problems := _runs(file, name)):
            return False, problems
    except StorageError as error:
        return False, [cannot_be_read(error, name)]
    if not any(start[:_START_NBYTES]) and name.endswith(_NEVER_ZEROS):
        return False, [_wrong(name, "begins with zero bytes, as after a crash of the machine that wrote it")]
    if name.endswith(SUFFIXES) and is_needed(name) and not is_legacy(start):
        return False, [_wrong(name, f"is neither a zip nor a pickle, as its trainer writes it: {start[:20]!r}…")]
    return False, []


def _json_problems(file: IO[bytes], name: str, nbytes: int) -> list[Finding]:
    """Parse JSON; an error only in a file some trainer resumes with, for others write what is nearly JSON."""
    if nbytes > _MAX_PARSED_NBYTES:
        return []
    severity = None if holds(name) else Severity.WARNING
    try:
        json.loads(file.read(), parse_int=str)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # a value on each line, as logs have
            return []
        if error.pos >= len(error.doc.rstrip()) or error.msg.startswith("Unterminated"):
            return [_cut(name, f"is cut short: its JSON ends in the middle, after {nbytes_words(nbytes)}", severity)]
        return [_wrong(name, f"is no JSON: {error}", severity)]
    except RecursionError:
        return []
    except ValueError as error:
        return [_wrong(name, f"is no JSON: {error}", severity)]
    return []


def _zip_problems(storage: Storage, file: IO[bytes], name: str, nbytes: int, level: Level) -> list[Finding]:
    from dcptool.checks.zips import damaged_record, is_of_torch, opened

    archive = opened(file)
    if archive is None:
        return [_cut(name, f"is cut short: {nbytes_words(nbytes)} of a zip without the directory at its end")]
    problems: list[Finding] = []
    if level >= Level.RECORDS:
        problems = _of_torch(storage, name) if is_of_torch(archive) else _runs(file, name)
    damage = damaged_record(archive) if level >= Level.DEEP and not problems else ""
    return [*problems, _wrong(name, f"is damaged in its record {damage}")] if damage else problems


def _of_torch(storage: Storage, name: str) -> list[Finding]:
    """Open a file of torch.save, and say whether its pickle runs code; what else its values are is not dcptool's."""
    try:
        found = check(open_part(Location(storage, name), "")).findings
    except StorageError:
        raise
    except RunsCodeError as error:
        return unsafe_pickle(error.names, name, name)
    except MetadataError as error:
        return [_wrong(name, f"cannot be read: {error.message.removeprefix(join(storage.root, name) + ': ')}")]
    except DcptoolError:
        return []
    return [finding for finding in found if finding.is_error and finding.traits.effect is Effect.UNSAFE]


def _pickle_problems(file: IO[bytes], name: str, nbytes: int, level: Level) -> list[Finding]:
    problems = _runs(file, name) if level >= Level.RECORDS else []
    if problems:
        return problems
    file.seek(max(nbytes - 16, 0))
    if not file.read().rstrip().endswith(b".") and name.endswith((".pkl", ".pt", ".pth")):
        return [_cut(name, f"is cut short: {nbytes_words(nbytes)} of a pickle without its end")]
    if level < Level.RECORDS or nbytes > _MAX_PICKLE_NBYTES:
        return []
    calls = Calls()
    try:
        file.seek(0)
        inert.scan(file.read(), calls)
    except MetadataError as error:
        if not any("joblib" in called for called in calls.names):  # which puts arrays between the opcodes
            return [_wrong(name, f"is damaged: {error.message}")]
    return []


def _cut(name: str, what: str, severity: Severity | None = None) -> Finding:
    return Finding.of("cut-side-file", f"{name} {what}", name, next_step=_AGAIN, severity=severity)


def _wrong(name: str, what: str, severity: Severity | None = None) -> Finding:
    return Finding.of("damaged-side-file", f"{name} {what}", name, next_step=_AGAIN, severity=severity)
