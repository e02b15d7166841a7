"""What markers and manifests say of the files of a folder, and whether that is so.

Each file is read once for all digests that anything gives of it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from dcptool.checkpoint.findings import Finding, cannot_be_read, errors, inside
from dcptool.checks.check import Level
from dcptool.copying.pool import Pool
from dcptool.errors import StorageError
from dcptool.formats.digests import SHA256, WantedDigest, digests
from dcptool.formats.manifests import Manifest, is_manifest_name, read_manifests
from dcptool.formats.marker import FOREIGN, NAME, NEGATIVE, SAVING, Marker, marker_problems, read_marker
from dcptool.ops.verify.verdict import ManifestReport, VerifyOptions
from dcptool.runs.activity import folders_of
from dcptool.storage import Location, Storage, base_name
from dcptool.words import listed, plural

_STALE = "If the files are right, remove it or write it anew."


class Vouched(NamedTuple):
    """What a look at the markers and manifests of a folder and its parts shows.

    Attributes:
        marker: of the folder; if it has none, but each of its parts has, that of the first.
        of_markers: what is wrong with markers, or is not as they say.
        manifests: those that could be read.
        of_manifests: the same of manifests.
        files: which files a marker or a manifest has a digest of.
    """

    marker: Marker | None
    of_markers: tuple[Finding, ...]
    manifests: tuple[ManifestReport, ...]
    of_manifests: tuple[Finding, ...]
    files: frozenset[str]

    @property
    def is_valid(self) -> bool:
        """Whether there is a marker, and nothing is otherwise than markers say."""
        return self.marker is not None and not errors(self.of_markers)


class Claim(NamedTuple):
    """That a file has a digest, as the marker or manifest `by` says; names are relative to the folder of all."""

    by: str
    file: str
    value: str
    wanted: WantedDigest


def look_for_vouchers(
    location: Location, files: Mapping[str, int], parts: Sequence[str], options: VerifyOptions
) -> Vouched:
    """Read the markers and manifests of a folder and its parts, and compare them with what is there.

    Args:
        location: the folder, or one file, of which only manifests beside it can tell.
        files: bytes of all files in it and below, by name.
        parts: places of the checkpoints in it.
        options: the digests are compared at level DEEP, before that names and sizes.
    """
    markers: dict[str, Marker] = {}
    manifests: list[Manifest] = []
    of_markers: list[Finding] = []
    of_manifests: list[Finding] = []
    for folder in folders_of(parts):
        prefix = f"{folder}/" if folder else ""
        storage = location.storage.below(folder) if folder else location.storage
        there = {name.removeprefix(prefix): size for name, size in files.items() if name.startswith(prefix)}
        marker, wrong = read_marker(storage, there, options.marker)
        if marker:
            markers[folder] = marker._replace(name=prefix + marker.name)
            wrong += marker_problems(marker, storage, there) + _added(marker, there)
        of_markers += [inside(folder, finding) for finding in wrong]
        found, wrong = _manifests(Location(storage, location.file), there)
        folders = {name.rpartition("/")[0] for name in there} if found else set()
        for manifest in found:
            wrong += _listed_problems(manifest, storage, there, folders) + _not_computed(manifest)
            manifests.append(_below(prefix, manifest))
        of_manifests += [inside(folder, finding) for finding in wrong]
    marked = [claim for folder, marker in markers.items() for claim in _marked(folder, marker)]
    claimed = [claim for manifest in manifests for claim in _claims(manifest)]
    n_compared: Counter[str] = Counter()
    if options.depth >= Level.DEEP:
        wrong_files, unread, n_compared = _compare(location.storage, files, [*marked, *claimed], options)
        of_markers += [_not_as_marked(claim) for claim in marked if claim in wrong_files]
        of_markers += unread
        for manifest in manifests:
            of_manifests += _not_as_listed(manifest, wrong_files, n_compared[manifest.name])
    reports = (ManifestReport(one.name, one.algorithm, len(one.files), n_compared[one.name]) for one in manifests)
    vouched_for = frozenset(claim.file for claim in (*marked, *claimed))
    marker = _of_all(markers, parts)
    return Vouched(marker, tuple(of_markers), tuple(reports), tuple(of_manifests), vouched_for)


def claims_of(location: Location, files: Mapping[str, int], parts: Sequence[str], name: str) -> list[Claim]:
    """Return what markers and manifests of a folder and its parts say of digests; what cannot be read says nothing.

    Args:
        location, files, parts: as of `look_for_vouchers`.
        name: of the markers.
    """
    claims: list[Claim] = []
    for folder in folders_of(parts):
        prefix = f"{folder}/" if folder else ""
        storage = location.storage.below(folder) if folder else location.storage
        there = {file.removeprefix(prefix): size for file, size in files.items() if file.startswith(prefix)}
        marker, _ = read_marker(storage, there, name)
        if marker:
            claims += _marked(folder, marker._replace(name=prefix + marker.name))
        for manifest in _manifests(Location(storage, location.file), there)[0]:
            claims += _claims(_below(prefix, manifest))
    return claims


def _of_all(markers: Mapping[str, Marker], parts: Sequence[str]) -> Marker | None:
    """Return the marker of the folder; if it has none, but each of its parts has, that of the first."""
    if "" in markers:
        return markers[""]
    covered = [next((folder for folder in folders_of([part]) if folder in markers), None) for part in parts]
    first = next((folder for folder in covered if folder is not None), None)
    return markers[first] if first is not None and None not in covered else None


def _added(marker: Marker, files: Mapping[str, int]) -> list[Finding]:
    """Note files that were added since a checkpoint was marked: nobody has vouched for them."""
    ours = {marker.name, NAME, SAVING, *FOREIGN, *NEGATIVE}
    added = sorted(name for name in files if name not in marker.files and base_name(name) not in ours)
    if not added or not marker.files:
        return []
    message = f"{listed(added, 1)} {'was' if len(added) == 1 else 'were'} added since it was marked: "
    message += f"the marker {marker.name} does not vouch for {'it' if len(added) == 1 else 'them'}"
    return [Finding.of("unmarked-file", message, added[0])]


def _manifests(location: Location, files: Mapping[str, int]) -> tuple[list[Manifest], list[Finding]]:
    """Read the manifests of a folder; of one file those beside it, and what they say of it alone."""
    storage, file = location
    if file is None:
        return read_manifests(storage, files)
    beside = {entry.name: entry.nbytes for entry in storage.entries() if not entry.is_dir}
    found, wrong = read_manifests(storage, {name: size for name, size in beside.items() if is_manifest_name(name)})
    about = [one._replace(digests=[digest for digest in one.digests if digest.file == file]) for one in found]
    return [one for one in about if one.digests], [one for one in wrong if str(one.file).startswith(f"{file}.")]


def _below(prefix: str, manifest: Manifest) -> Manifest:
    """Return the manifest of a part with names as the folder that holds the part has them."""
    named = [digest._replace(file=prefix + digest.file) for digest in manifest.digests]
    return manifest._replace(name=prefix + manifest.name, digests=named)


def _listed_problems(
    manifest: Manifest, storage: Storage, files: Mapping[str, int], folders: Collection[str]
) -> list[Finding]:
    """Return which files a manifest lists that are not there, or have another size than it tells."""
    missing = []
    problems = []
    for file in manifest.files:
        try:  # of a folder that is a link there is no listing
            size = files.get(file) if file in files or file.rpartition("/")[0] in folders else storage.size(file)
        except StorageError as error:
            problems.append(cannot_be_read(error, file))
            continue
        told = manifest.nbytes.get(file)
        if size is None:
            missing.append(file)
        elif told is not None and told != size:
            message = f"{file} has {plural(size, 'byte')}, {told:,} by {manifest.name}"
            problems.append(Finding.of("short-file" if size < told else "changed-file", message, file))
    if len(missing) == len(manifest.files) > 1:
        message = f"none of the {len(missing):,} files that {manifest.name} lists is here, such as {missing[0]}"
        return [Finding.of("missing-file", message, missing[0], next_step=_STALE)]
    step = f"If nothing needs it, {manifest.name} is of other files than these: remove it or write it anew."
    return [
        *(
            Finding.of("missing-file", f"{file} is missing: {manifest.name} lists it", file, next_step=step)
            for file in missing
        ),
        *problems,
    ]


def _marked(folder: str, marker: Marker) -> list[Claim]:
    prefix = f"{folder}/" if folder else ""
    return [Claim(marker.name, prefix + file, value.lower(), SHA256) for file, value in marker.sha256.items()]


def _claims(manifest: Manifest) -> list[Claim]:
    return [
        Claim(manifest.name, digest.file, digest.value, digest.wanted) for digest in manifest.digests if digest.wanted
    ]


def _compare(
    storage: Storage, files: Mapping[str, int], claims: Iterable[Claim], options: VerifyOptions
) -> tuple[set[Claim], list[Finding], Counter[str]]:
    """Hash every file that anything claims a digest of, once.

    Returns:
        The claims that are not so, the files that could not be read, and for each `by` how many files were compared.
    """
    by_file: dict[str, list[Claim]] = defaultdict(list)
    for claim in claims:
        by_file[claim.file].append(claim)
    wrong: set[Claim] = set()
    unread: list[Finding] = []
    n_compared: Counter[str] = Counter()

    def look(file: str) -> Mapping[WantedDigest, str] | StorageError | None:
        try:
            size = files[file] if file in files else storage.size(file)
            if size is None:
                return None
            wanted = {claim.wanted for claim in by_file[file] if (claim.wanted.end or 0) <= size}
            return digests(storage, file, size, wanted)
        except StorageError as error:
            return error

    def look_at_all(mine: Sequence[str]) -> list[Mapping[WantedDigest, str] | StorageError | None]:
        with Pool(options.threads) as pool:
            return [found for _, found in pool.run(look, mine)]

    for file, found in zip(by_file, options.split(look_at_all, list(by_file)), strict=True):
        if isinstance(found, StorageError):
            unread.append(cannot_be_read(found, file))
        elif found is not None:
            n_compared.update({claim.by for claim in by_file[file]})
            wrong.update(claim for claim in by_file[file] if found.get(claim.wanted, claim.value) != claim.value)
    return wrong, unread, n_compared


def _not_as_marked(claim: Claim) -> Finding:
    message = f"{claim.file} is not what was marked: its SHA-256 differs from the one in {claim.by}"
    return Finding.of("changed-file", message, claim.file)


def _not_as_listed(manifest: Manifest, wrong: set[Claim], n_compared: int) -> list[Finding]:
    """Return which files are not what a manifest lists; if none of several is, that it is of other files."""
    changed = list(dict.fromkeys(claim.file for claim in _claims(manifest) if claim in wrong))
    if len(changed) == n_compared > 1:
        message = (
            f"{manifest.name} is of other files than these: none of the {n_compared:,} that it lists and that are "
        )
        message += f"here has the {manifest.algorithm} it gives, such as {changed[0]}"
        return [Finding.of("changed-file", message, manifest.name, next_step=_STALE)]
    step = f"Copy it again from where it was saved; if it is right, {manifest.name} is older: write that anew."
    return [
        Finding.of("changed-file", f"{file} is not what {manifest.name} lists: {what}", file, next_step=step)
        for file, what in ((file, f"its {manifest.algorithm} is another") for file in changed)
    ]


def _not_computed(manifest: Manifest) -> list[Finding]:
    """Note what could not be compared because the algorithm is not known here."""
    files = {digest.file for digest in manifest.digests if digest.wanted is None}
    if not files:
        return []
    message = (
        f"{manifest.name} gives {manifest.algorithm} of {plural(len(files), 'file')}: not computed here, not compared"
    )
    return [Finding.of("not-compared", message, manifest.name)]
