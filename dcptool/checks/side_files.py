"""Files beside the checkpoints of a step: whether each is whole, as far as its kind can tell.

A zip has its directory at its end and a CRC32 of each record, a pickle ends with a dot, JSON can be parsed; of anything
else only the size is known. By name: what ends as these do must not be empty.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import IO, NamedTuple

from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.findings import Finding, cannot_be_read, errors, how_to_load, inside, unsafe_pickle
from dcptool.checkpoint.kinds import Effect, Severity
from dcptool.checks.check import CheckReport, Level, check
from dcptool.checks.files import GET_LFS_FILES
from dcptool.checks.split import Split, alone
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
from dcptool.words import plural

_KNOWN = (*SUFFIXES, ".npz", ".json")
_OF_STATE = (*SUFFIXES, ".npz")
_NUMBER = re.compile(r"(?<!\d)\d{1,7}(?!\d)")
_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"
_NEVER_ZEROS = (".pt", ".pth", ".ckpt", ".pkl", ".npz")
_NO_PICKLE = (b"<", b"{", b"#", b"/", b"-", b"\n", b" ", b"\xff")
"""First bytes that no pickle, no archive and no compressed file has: of pages, JSON, scripts, logs."""
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
        n_unproven: how many hold nothing that tells whether their bytes are what was written, nor does anything else.
        unproven_nbytes: bytes of these.
        not_finite: "NAME: FQN" of tensors in them with NaN or infinities, if that was asked.
        n_seen: then, how many files were looked into for their values.
    """

    names: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    n_unproven: int = 0
    unproven_nbytes: int = 0
    not_finite: tuple[str, ...] = ()
    n_seen: int = 0


class _FileReport(NamedTuple):
    """What a look at one file shows: whether its checksums cover it, what is wrong, and what is not finite."""

    proven: bool
    problems: Sequence[Finding]
    not_finite: tuple[str, ...] = ()
    seen: bool = False


def look_at(
    storage: Storage,
    files: Mapping[str, int],
    level: Level,
    threads: int | None,
    vouched_for: Collection[str] = (),
    finite: bool = False,
    split: Split = alone,
) -> SideFiles:
    """Look at files beside the checkpoints of a step.

    Args:
        storage: of the step.
        files: bytes of each, by its name there.
        level: METADATA reads a file's beginning and its end, and pickles of small ones, which are read whole by that;
            RECORDS every pickle; DEEP every byte of zips.
        threads: how many read at the same time; None for the number of processors.
        vouched_for: files that a marker or a manifest has a digest of.
        finite: at level DEEP, whether the values of tensors in files of torch.save are looked at.
        split: does the work on files from level RECORDS on, here or in several processes.
    """
    names = sorted(files)
    known = [
        name for name in names
        if name.endswith(_KNOWN) or (is_needed(name) if not files[name] else level >= Level.RECORDS)
    ]  # fmt: skip
    found: dict[str, _FileReport] = {}
    if known:
        from dcptool.copying.pool import Pool

        def look_at_all(mine: Sequence[str]) -> list[_FileReport]:
            with Pool(threads) as pool:
                return [
                    look for _, look in pool.run(lambda name: _look_at(storage, name, files[name], level, finite), mine)
                ]

        found = dict(zip(known, (split if level >= Level.RECORDS else alone)(look_at_all, known), strict=True))
    unproven = [name for name in names if name not in vouched_for and (name not in found or not found[name].proven)]
    findings = tuple(finding for look in found.values() for finding in look.problems)
    not_finite = tuple(name for look in found.values() for name in look.not_finite)
    unproven_nbytes = sum(files[name] for name in unproven)
    n_seen = sum(look.seen for look in found.values())
    return SideFiles(tuple(names), findings, len(unproven), unproven_nbytes, not_finite, n_seen)


class FilePattern(NamedTuple):
    """A name of files beside the checkpoints of a step, to compare with other steps.

    Attributes:
        form: the name with the numbers in it taken out; with them where a trainer gives a file the same in each step.
        n_ranks: that each of so many ranks has such a file; 0 if no number in it is a rank's.
    """

    form: str
    n_ranks: int = 0

    def __str__(self) -> str:
        return f"{self.form} of each of {self.n_ranks} ranks" if self.n_ranks else self.form


def patterns_of(files: Iterable[str], marker: str) -> frozenset[FilePattern]:
    """Return the patterns of files that lie beside the checkpoints of a step.

    Only those of kinds that trainers keep state in: other files may come and go.
    """
    files = list(files)
    names = beside((name for name in files if name.endswith(_OF_STATE)), marker)
    found = {FilePattern(name if is_regular(name) else re.sub(r"\d+", "N", name)) for name in names}
    n_ranks = 1 + max((rank for name in files if (rank := data_file_rank(base_name(name))) is not None), default=0)
    return frozenset(found | _of_each_rank((name for name in names if not is_regular(name)), n_ranks))


def _of_each_rank(names: Iterable[str], n_ranks: int) -> set[FilePattern]:
    """Return a pattern for each number in names that is that of every rank; none of a single rank."""
    numbers: dict[str, set[int]] = {}
    for name in names:
        for match in _NUMBER.finditer(name):
            numbers.setdefault(f"{name[: match.start()]}N{name[match.end() :]}", set()).add(int(match[0]))
    every = set(range(n_ranks))
    return {FilePattern(form, n_ranks) for form, found in numbers.items() if n_ranks > 1 and found >= every}


def _look_at(storage: Storage, name: str, nbytes: int, level: Level, finite: bool) -> _FileReport:
    """Look at a file; of one whose name says nothing it matters only whether it runs code, or is empty and needed."""
    look = _problems(storage, name, nbytes, level, finite)
    if name.endswith(_KNOWN) or not nbytes:
        return look
    return _FileReport(False, [finding for finding in look.problems if finding.traits.effect is Effect.UNSAFE])


def _runs(file: IO[bytes], name: str) -> list[Finding]:
    from dcptool.pickles.files import runs

    return unsafe_pickle(runs(file), name, name)


def _problems(storage: Storage, name: str, nbytes: int, level: Level, finite: bool) -> _FileReport:
    if not nbytes:
        may_be_empty = name.endswith(".json") and not holds(name)
        return _FileReport(False, [_cut(name, "is empty", Severity.WARNING if may_be_empty else None)])
    try:
        start = storage.read(name, 0, min(nbytes, _SMALL_NBYTES))
        file: IO[bytes] = io.BytesIO(start) if nbytes <= _SMALL_NBYTES else stream(storage, name, nbytes)
        if start.startswith(LFS_START):
            message = f"{name} is a Git LFS pointer, not the file itself"
            return _FileReport(False, [Finding.of("lfs-pointer", message, name, next_step=GET_LFS_FILES)])
        if name.endswith(".json"):
            return _FileReport(False, _json_problems(file, name, nbytes))
        if level < Level.RECORDS and nbytes <= _SMALL_NBYTES and (problems := _runs(file, name)):  # it is here already
            return _FileReport(False, problems)
        file.seek(0)
        if start.startswith(_ZIP):
            return _look_at_zip(storage, file, name, nbytes, level, finite)
        if start.startswith(_PICKLE) and not is_legacy(start):
            return _FileReport(False, _pickle_problems(file, name, nbytes, level))
        if level >= Level.RECORDS and (problems := _runs(file, name)):
            return _FileReport(False, problems)
    except StorageError as error:
        return _FileReport(False, [cannot_be_read(error, name)])
    if not any(start[:_START_NBYTES]) and name.endswith(_NEVER_ZEROS):
        zeros = "begins with zero bytes, as after a crash of the machine that wrote it"
        return _FileReport(False, [_wrong(name, zeros)])
    if name.endswith(SUFFIXES) and is_needed(name) and not is_legacy(start):
        wrong = f"is neither a zip nor a pickle, as its trainer writes it: {start[:20]!r}…"
        return _FileReport(False, [_wrong(name, wrong)])
    if start[:1] in _NO_PICKLE and name.endswith(_NEVER_ZEROS):
        wrong = f"is no zip and no pickle: it begins with {start[:20]!r}"
        return _FileReport(False, [_wrong(name, wrong, Severity.WARNING)])
    return _FileReport(False, [_unseen(name, "torch.save before 1.6 wrote it")] if finite and is_legacy(start) else [])


def _unseen(name: str, why: str) -> Finding:
    message = f"{name}: whether its tensors are finite is not known: {why}"
    return Finding.of("finite-unknown", message, name, next_step=how_to_load(""))


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


def _look_at_zip(storage: Storage, file: IO[bytes], name: str, nbytes: int, level: Level, finite: bool) -> _FileReport:
    from dcptool.checks.zips import damaged_record, is_of_torch, opened

    archive = opened(file)
    if archive is None:
        cut = f"is cut short: {nbytes_words(nbytes)} of a zip without the directory at its end"
        return _FileReport(True, [_cut(name, cut)])
    problems: list[Finding] = []
    if level >= Level.RECORDS and is_of_torch(archive):
        checkpoint, problems = _opened(storage, name)
        if finite and checkpoint and len(checkpoint):
            return _look_at_values(checkpoint, name)
        problems += _unsafe(check(checkpoint)) if checkpoint else []
        if finite and not checkpoint and not problems:
            problems.append(_unseen(name, "dcptool reads no tensor of it"))
    elif level >= Level.RECORDS:
        problems = _runs(file, name)
    damage = damaged_record(archive) if level >= Level.DEEP and not errors(problems) else ""
    return _FileReport(True, [*problems, _wrong(name, f"is damaged in its record {damage}")] if damage else problems)


def _opened(storage: Storage, name: str) -> tuple[Checkpoint | None, list[Finding]]:
    """Open a file of torch.save; None if it does not open, with what that means if it means anything."""
    try:
        return open_part(Location(storage, name), ""), []
    except StorageError:
        raise
    except RunsCodeError as error:
        return None, unsafe_pickle(error.names, name, name)
    except MetadataError as error:
        return None, [_wrong(name, f"cannot be read: {error.message.removeprefix(join(storage.root, name) + ': ')}")]
    except DcptoolError:
        return None, []


def _unsafe(report: CheckReport) -> list[Finding]:
    """Return that a file's pickle runs code, if it does; what else its values are is not dcptool's."""
    return [finding for finding in report.findings if finding.is_error and finding.traits.effect is Effect.UNSAFE]


def _look_at_values(checkpoint: Checkpoint, name: str) -> _FileReport:
    """Read every byte of a file of torch.save, check its checksums, and look at the values of its tensors."""
    report = check(checkpoint, finite=True, threads=1)
    problems = _unsafe(report)
    for finding in report.findings:
        if finding.kind in ("wrong-crc", "damaged-item"):
            problems.append(_wrong(name, f"is damaged: {finding.message}"))
        elif finding.kind in ("not-finite", "finite-unknown"):
            problems.append(inside(name, finding))
        elif finding.kind == "unreadable":
            problems.append(finding)
    if (
        report.tally.n_unread
    ):  # others that are not looked into, as DTensors, have plain tensors inside, which were seen
        problems.append(_unseen(name, f"{plural(report.tally.n_unread, 'tensor')} cannot be read"))
    not_finite = tuple(f"{name}: {fqn}" for fqn in report.not_finite)
    return _FileReport(True, problems, not_finite, seen=True)


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
