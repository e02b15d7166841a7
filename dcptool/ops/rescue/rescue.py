"""Rebuild the lost metadata of a checkpoint whose data files are whole, from another step of the same run.

Nothing is guessed: item by item, every data file must hold what the sibling's file of that name holds, and every
checksum must be right. What is written is the sibling's metadata with the places of this checkpoint's items.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.findings import errors
from dcptool.checkpoint.items import FileItems
from dcptool.checks.check import check
from dcptool.copying.pool import default_threads
from dcptool.copying.publishing import Target, prepare, require_place
from dcptool.errors import (
    CheckpointNotFoundError,
    DcptoolError,
    ItemError,
    LayoutError,
    MetadataError,
    OutputExistsError,
    StorageError,
    UnsupportedError,
)
from dcptool.formats.dcp.build import build
from dcptool.formats.dcp.format import DCP, METADATA, data_file_rank, is_metadata, metadata_names, rank_metadata
from dcptool.formats.dcp.metadata import read_records
from dcptool.formats.dcp.relocate import relocated
from dcptool.formats.detect import open_checkpoint
from dcptool.formats.marker import FOREIGN, NAME
from dcptool.ops.rescue.matching import ANOTHER, Match, Proof, match_file, prove_file
from dcptool.runs.activity import list_files, negative_sign, remove_left_behind
from dcptool.storage import DirEntry, Location, Progress, Storage, join, locate, write_pieces
from dcptool.words import cut_lines, listed

MAX_LISTED = 20
_PIECE_NBYTES = 1 << 20


class Rescued(NamedTuple):
    """What was rebuilt, or would be.

    Attributes:
        path: of the checkpoint that has its metadata now.
        like: of the sibling it was taken from.
        metadata: names of the files that were rebuilt: `.metadata`, or some `__R.metadata`.
        files: name and bytes of each data file.
        n_items: stored chunks and objects in them.
        n_tensors, n_objects: entries of the checkpoint.
        nbytes: read and checked.
        n_unverifiable: items that are stored without checksums.
        save_id: new identifier of the save; that of the lost metadata is not known.
        seconds: wall time.
        notes: worth knowing, one sentence each.
        published: whether it was written.
    """

    path: str
    like: str
    metadata: tuple[str, ...]
    files: tuple[tuple[str, int], ...]
    n_items: int
    n_tensors: int
    n_objects: int
    nbytes: int
    n_unverifiable: int
    save_id: str
    seconds: float
    notes: tuple[str, ...]
    published: bool


def rescue(
    path: str | os.PathLike[str],
    like: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    threads: int | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Rescued:
    """Rebuild the metadata of a checkpoint that has lost it.

    Args:
        path: folder of the checkpoint: data files, and no `.metadata`.
        like: another step of the same run, whole, saved by as many ranks with the same layout.
        output: folder of a copy that gets the metadata; None to write it beside the data files.
        threads: files read at the same time, None for the number of processors, at most 8.
        dry_run: read and check everything, write nothing.
        progress: told the bytes as they are read.

    Raises:
        LayoutError: the files do not hold the same items in the same order; names the first that differs.
        ItemError: a file is cut short or damaged, or the sibling is.
        OutputExistsError: there is metadata already, or something at `output`.
        CheckpointNotFoundError: there is nothing at a path, or no data file.
        UnsupportedError: it cannot be told where items end, as where they are compressed.
        StorageError: files changed meanwhile, or the result cannot be written.

    Example:
        >>> dcptool.rescue("ckpt/step_500", like="ckpt/step_400").n_items
    """
    began = time.perf_counter()
    location = locate(path)
    if location.file is not None:
        raise CheckpointNotFoundError(f"{location.path} is a file; name the folder with the data files")
    before = list_files(location)
    if os.path.realpath(location.path) == os.path.realpath(locate(like).path):
        raise LayoutError(f"{location.path} is the checkpoint itself", next_step=ANOTHER)
    sibling = _sibling(like)
    lost = _lost(location, before, sibling)
    if os.path.realpath(location.path) == os.path.realpath(sibling.path):
        raise LayoutError(f"{sibling.path} is the checkpoint itself", next_step=ANOTHER)
    names = _same_files(location, before, sibling)
    target = os.fspath(output) if output is not None else location.path
    if output is not None:
        nbytes = sum(before[name].nbytes for name in names)
        target = require_place(target, False, nbytes, None, (location.path, sibling.path))
    placed = _placements(sibling)
    with ThreadPoolExecutor(threads or default_threads()) as pool:
        matches = list(pool.map(lambda name: match_file(sibling, placed.get(name), location.storage, name), names))
        save_id = str(uuid.uuid4())
        written = _metadata(sibling, lost, matches, target, save_id)
        proofs = _proven(pool, location.storage, matches, progress)
        if list_files(location) != before:
            raise StorageError(f"{location.path} changed while it was read: is it still being saved?")
        if not dry_run and output is None:
            remove_left_behind(location)
            for name, data in written.items():
                if location.storage.size(name) is not None:
                    raise OutputExistsError(f"{join(location.path, name)} has appeared meanwhile; nothing was written")
                location.storage.write(name, data)
        elif not dry_run:
            with prepare(target, False, sum(match.nbytes for match in matches), None, location.path) as place:
                _write_copy(pool, location.storage, place, matches, _all_metadata(location, before, written))
    return Rescued(
        target,
        sibling.path,
        tuple(written),
        tuple((match.name, match.nbytes) for match in matches),
        sum(match.n_items for match in matches),
        len(sibling.tensors),
        len(sibling.objects),
        sum(proof.nbytes for proof in proofs),
        sum(proof.n_unverifiable for proof in proofs),
        save_id,
        time.perf_counter() - began,
        tuple(_notes(before, proofs, names, output is not None)),
        not dry_run,
    )


def _sibling(like: str | os.PathLike[str]) -> Checkpoint:
    """Open the sibling, which must be whole as far as its metadata and sizes tell."""
    try:
        sibling = open_checkpoint(like)
    except (CheckpointNotFoundError, MetadataError) as error:  # what else could be done about it is of no use here
        raise error.saying(error.message, next_step=ANOTHER) from error
    if sibling.format is not DCP:
        raise UnsupportedError(f"{sibling.path} is {sibling.flavour}, no DCP directory", next_step=ANOTHER)
    wrong = errors(check(sibling).findings)
    if wrong:
        raise ItemError(f"{sibling.path} is damaged itself: {wrong[0].message}", next_step=ANOTHER)
    return sibling


def _placements(sibling: Checkpoint) -> dict[str, FileItems]:
    """Return the items of the sibling by file, those of each metadata file for themselves: ranks may repeat a name."""
    placements: dict[str, FileItems] = {}
    for name in metadata_names(sibling.files):
        view = build({name: read_records(sibling.storage.read(name, 0, sibling.files[name]))})
        by_file = FileItems(replace(sibling, entries=view.entries, table=view.table))
        for file in by_file.files:
            if file in placements:
                raise LayoutError(
                    f"{sibling.path}: several of its metadata files place items in {file}", next_step=ANOTHER
                )
            placements[file] = by_file
    return placements


def _lost(location: Location, files: Mapping[str, DirEntry], sibling: Checkpoint) -> list[str]:
    """Return the names of the metadata files that the sibling has and the checkpoint has not."""
    sign = negative_sign(location, files, [""])
    if sign:
        raise StorageError(f"{location.path} is being written, as {sign} says; wait until it is done")
    path = join(location.path, METADATA)
    if METADATA in files and not files[METADATA].nbytes:
        raise OutputExistsError(
            f"{path} is there, but empty, and nothing is replaced", next_step="Move it away, then try again."
        )
    if METADATA in files:
        raise OutputExistsError(
            f"{path} is there ({files[METADATA].nbytes:,} bytes): nothing is lost, and nothing is replaced",
            next_step=f"dcptool verify {location.path} tells whether it is whole; if it is not, move it away first.",
        )
    theirs = metadata_names(sibling.files)
    ours = rank_metadata(files)
    if theirs == [METADATA] and ours:
        raise LayoutError(
            f"{location.path} has {ours[0]}: it was saved with use_collectives=False, {sibling.path} was not",
            next_step=ANOTHER,
        )
    extra = [name for name in ours if name not in theirs]
    if extra:
        raise LayoutError(f"{sibling.path} has no {extra[0]}, {location.path} has", next_step=ANOTHER)
    lost = [name for name in theirs if name not in ours]
    if not lost:
        raise OutputExistsError(
            f"{location.path} has all of {theirs[0]} … {theirs[-1]}: nothing is lost",
            next_step=f"dcptool verify {location.path} tells whether it is whole.",
        )
    return lost


def _same_files(location: Location, files: Mapping[str, DirEntry], sibling: Checkpoint) -> list[str]:
    """Return the names of the data files, the empty ones of idle ranks included, which must be the same in both."""
    theirs = {*sibling.usage, *filter(_is_data, sibling.files)}
    ours = {name for name in files if _is_data(name) or name in sibling.usage}
    if not ours:
        raise CheckpointNotFoundError(
            f"{location.path} holds no data files (__R_N.distcp)", next_step="Name the folder that holds them."
        )
    missing, extra = sorted(theirs - ours, key=_order), sorted(ours - theirs, key=_order)
    if missing:
        raise LayoutError(
            f"{location.path} has no {missing[0]}, {sibling.path} has ({len(theirs):,} data files there, "
            f"{len(ours):,} here)",
            next_step="Bring the files of all nodes together; if they are, name a step of the same layout.",
        )
    if extra:
        raise LayoutError(
            f"{location.path} has {extra[0]}, {sibling.path} has not ({len(theirs):,} data files there, "
            f"{len(ours):,} here)",
            next_step=ANOTHER,
        )
    return sorted(ours, key=_order)


def _is_data(name: str) -> bool:
    return "/" not in name and data_file_rank(name) is not None


def _order(name: str) -> tuple[int, int, str]:
    return data_file_rank(name) or 0, len(name), name


def _metadata(
    sibling: Checkpoint, lost: Sequence[str], matches: Iterable[Match], path: str, save_id: str
) -> dict[str, bytes]:
    """Return the metadata files that were lost, by name."""
    moves: dict[tuple[str, int], tuple[int, int | None]] = {}
    for match in matches:
        moves.update(match.moves())
    written = {}
    for name in lost:
        try:
            written[name] = relocated(sibling.storage.read(name, 0, sibling.files[name]), moves, path, save_id)
        except DcptoolError as error:
            raise error.saying(f"{join(sibling.path, name)}: {error.message}", next_step=ANOTHER) from error
    return written


def _proven(
    pool: ThreadPoolExecutor, storage: Storage, matches: Sequence[Match], progress: Progress | None
) -> list[Proof]:
    """Read every record of all files.

    Raises:
        ItemError: some are damaged; lists them.
    """
    proofs = list(pool.map(lambda match: prove_file(storage, match, progress), matches))
    problems = [problem for proof in proofs for problem in proof.problems]
    if problems:
        lines = [f"{storage.root} is damaged, nothing was written:", *cut_lines(problems, MAX_LISTED)]
        step = "Copy these files again from where they were saved, or resume from another step."
        raise ItemError("\n".join(lines), next_step=step)
    return proofs


def _all_metadata(location: Location, files: Mapping[str, DirEntry], written: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the metadata files of a copy: those that were not lost, then those that were rebuilt."""
    kept = rank_metadata(files)
    return {**{name: location.storage.read(name, 0, files[name].nbytes) for name in kept}, **written}


def _write_copy(
    pool: ThreadPoolExecutor, source: Storage, place: Target, matches: Sequence[Match], metadata: Mapping[str, bytes]
) -> None:
    """Copy the data files, read the copies with every checksum, then write the metadata and give it all its name."""
    place.note([*(match.name for match in matches), *metadata])
    list(pool.map(lambda match: _copy(source, place.storage, match), matches))
    _proven(pool, place.storage, matches, None)
    for name, data in metadata.items():
        write_pieces(place.storage, name, [data])
    place.publish(False)


def _copy(source: Storage, target: Storage, match: Match) -> None:
    starts = range(0, match.nbytes, _PIECE_NBYTES)
    pieces = (source.read(match.name, start, min(_PIECE_NBYTES, match.nbytes - start)) for start in starts)
    write_pieces(target, match.name, pieces)


def _notes(files: Mapping[str, DirEntry], proofs: Sequence[Proof], names: Sequence[str], is_copy: bool) -> list[str]:
    found = []
    temporary = next((name for name in files if name.startswith(METADATA) and name != METADATA), None)
    if temporary:
        found.append(
            f"{temporary} is there: torch writes it, then renames it; it may be whole or cut short, and was not used"
        )
    n_unverifiable = sum(proof.n_unverifiable for proof in proofs)
    if n_unverifiable:
        found.append(
            f"{n_unverifiable:,} items are stored without checksums: that their bytes are unchanged is not proven"
        )
    markers = [name for name in (NAME, *FOREIGN) if name in files]
    if markers and not is_copy:
        found.append(f"{markers[0]} is of the lost metadata; dcptool mark writes one for this")
    others = [name for name in files if name not in names and name not in markers and name != temporary]
    others = [name for name in others if not is_metadata(name)]
    if others and is_copy:
        found.append(f"{listed(others, 1)} beside the data files: not copied")
    return found
