"""Manifests that other software leaves: files with the digests of others beside them. They vouch for what they list.

Three kinds: lines as `sha256sum` and its like write them (`SHA256SUMS`, `model.pt.sha256`); Megatron-core's
`integrity.json`; the signatures of OpenSSF's model-signing, of which only the digests are read: who signed them, and
whether the signature is right, is not looked at. Knows no checkpoint format.

Source: GNU coreutils 9.1, sha256sum with and without --tag; megatron-core 0.19.2, dist_checkpointing/validation.py;
model-signing 1.1.1, _signing/signing.py and manifest.py.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from dcptool.checkpoint.findings import Finding, cannot_be_read
from dcptool.checkpoint.kinds import Severity
from dcptool.errors import StorageError
from dcptool.formats.digests import BLAKE2, NBYTES, WantedDigest, is_computed
from dcptool.storage import Storage, base_name, is_inside
from dcptool.words import listed, plural

INTEGRITY = "integrity.json"
MAX_MANIFEST_NBYTES = 16 << 20
_MAX_NAME_LENGTH = 4096
_HASHES = "|".join(NBYTES)
_SUMS = re.compile(rf"({_HASHES}|b2)(?:sums?)?(?:\.txt)?|checksums?(?:\.txt)?", re.IGNORECASE)
_SIDECAR = re.compile(rf"([^/]+)\.({_HASHES}|b2)(?:sums?)?", re.IGNORECASE)
_SIGNATURE = re.compile(r"[^/]+\.(?:sig|sigstore|sigstore\.json)|model_signature|claims\.jsonl")
_NAMES = re.compile(
    rf"(?:.*/)?(?:{re.escape(INTEGRITY)}|(?i:{_SUMS.pattern}|{_SIDECAR.pattern})|{_SIGNATURE.pattern})", re.DOTALL
)
_HEX = re.compile(r"(?:[0-9a-fA-F]{2}){1,64}")
_PLAIN = re.compile(rf"(\\?)({_HEX.pattern}) [ *]?(.+)", re.DOTALL)
_TAGGED = re.compile(rf"(\\?)([A-Za-z0-9/-]+) ?\((.+)\) ?= ?({_HEX.pattern})", re.DOTALL)
_TAG = re.compile(r"(md5|sha1|blake2b|sha2?-?(?:224|256|384|512))(?:-\d+)?", re.IGNORECASE)
_ESCAPED = {"\\\\": "\\", "\\n": "\n", "\\r": "\r"}
_SIGNED = "https://model_signing/signature/v1.0"
_SIGNED_BEFORE = "https://model_signing/Digests/v0.1"
_NEW = "Write it anew if the files are right, or remove it."


class Digest(NamedTuple):
    """The digest that a manifest gives of a file, or of a part of it.

    Attributes:
        file: name of the file, relative to the manifest's folder.
        value: in hexadecimal digits, lower case.
        wanted: how it is computed; None if it cannot be here.
    """

    file: str
    value: str
    wanted: WantedDigest | None


class Manifest(NamedTuple):
    """What a manifest says.

    Attributes:
        name: of its file.
        algorithm: of its digests, several joined by commas.
        digests: all of files that are inside its folder; those of parts of a file one after another.
        nbytes: sizes of files, of those it tells them of.
    """

    name: str
    algorithm: str
    digests: Sequence[Digest]
    nbytes: Mapping[str, int] = {}

    @property
    def files(self) -> list[str]:
        """The files it lists, each once."""
        return list(dict.fromkeys(digest.file for digest in self.digests))


class _Listed(NamedTuple):
    """One line, or its like: a file's name as it is written there, an algorithm, a digest, and the part it is of."""

    file: str
    algorithm: str
    value: str
    start: int = 0
    end: int | None = None


def is_manifest_name(name: str) -> bool:
    """Tell whether a file is one of digests, by the last part of its name."""
    return _NAMES.fullmatch(name) is not None


def read_manifests(storage: Storage, files: Mapping[str, int]) -> tuple[list[Manifest], list[Finding]]:
    """Find and read the manifests in a folder.

    Args:
        storage: the folder.
        files: name → size in bytes of what is in it, and below it.

    Returns:
        The manifests, and what is wrong with them. Files that are named like one and are of another kind are left out.
    """
    manifests: list[Manifest] = []
    problems: list[Finding] = []
    for name in sorted(name for name in files if "/" not in name and is_manifest_name(name)):
        try:
            manifest, found = _read(storage, name, files)
        except StorageError as error:
            manifest, found = None, [cannot_be_read(error, name)]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            why = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
            message = f"{name} cannot be understood ({why}); it counts for nothing"
            manifest, found = None, [Finding.of("bad-manifest", message, name, next_step=_NEW)]
        manifests += [manifest] if manifest else []
        problems += found
    return manifests, problems


def _read(storage: Storage, name: str, files: Mapping[str, int]) -> tuple[Manifest | None, list[Finding]]:
    if files[name] > MAX_MANIFEST_NBYTES:
        raise ValueError(f"it has {files[name]:,} bytes, more than any manifest needs")
    data = storage.read(name, 0, files[name])
    wrong: list[str] = []
    if name == INTEGRITY:
        found = _integrity(data)
    elif _SIGNATURE.fullmatch(name):
        found = _signed(data)
    else:
        found, wrong = _sums(name, data)
    if found is None:
        return None, []
    placed, outside = _placed(found, files, base_name(storage.root), name)
    manifest = _manifest(name, placed)
    problems = []
    if wrong:
        message = f"{name} has {plural(len(wrong), 'line')} that cannot be understood, the first {wrong[0][:80]!r}"
        problems.append(Finding.of("manifest-line", message, name, next_step=_NEW))
    if outside:
        message = f"{name} lists {plural(len(outside), 'file')} outside its folder, not looked at: {listed(outside, 1)}"
        problems.append(Finding.of("path-escape", message, name, next_step=_NEW, severity=Severity.WARNING))
    return manifest, problems


def _manifest(name: str, found: Iterable[_Listed]) -> Manifest:
    """Return a manifest of what is inside its folder.

    Raises:
        ValueError: a digest is of no possible length, or the parts of a file leave gaps or lie over one another.
    """
    digests = []
    nbytes: dict[str, int] = {}
    for one in sorted(found, key=lambda one: (one.file, one.start)):
        if not _HEX.fullmatch(one.value):
            raise ValueError(f"the digest of {one.file!r} is none: {one.value[:80]!r}")
        length = len(one.value) // 2
        if one.algorithm in NBYTES and length != NBYTES[one.algorithm]:
            raise ValueError(f"the digest of {one.file!r} has {length} bytes, that of {one.algorithm} another number")
        if one.end is not None:
            if one.start != nbytes.get(one.file, 0) or not one.start <= one.end < 1 << 63:
                raise ValueError(f"the parts of {one.file!r} do not follow one another")
            nbytes[one.file] = one.end
        computed = is_computed(one.algorithm, length)
        wanted = WantedDigest(one.algorithm, length, one.start, one.end) if computed else None
        digests.append(Digest(one.file, one.value.lower(), wanted))
    return Manifest(name, ", ".join(sorted({one.algorithm for one in found})), digests, nbytes)


def _placed(
    found: Sequence[_Listed], files: Mapping[str, int], folder: str, own: str
) -> tuple[list[_Listed], list[str]]:
    """Return what a manifest lists, named relative to its folder, and what lies outside; without the manifest itself.

    A shell makes the file that `sha256sum * > SHA256SUMS` writes before it lists it. One that was written from a folder
    above has that path in front of all names; it is taken off where it ends with the name of this folder.

    Raises:
        ValueError: a name is longer than any is.
    """
    if any(len(one.file) > _MAX_NAME_LENGTH for one in found):
        raise ValueError(f"a name in it has more than {_MAX_NAME_LENGTH:,} characters")
    named = [one._replace(file=posixpath.normpath(one.file)) for one in found]
    above = posixpath.commonprefix([posixpath.dirname(one.file) + "/" for one in named])
    above = above[: above.rfind("/") + 1]
    if above.rstrip("/").rpartition("/")[2] == folder and not any(one.file in files for one in named):
        named = [one._replace(file=one.file.removeprefix(above)) for one in named]
    inside = [one for one in named if is_inside(one.file) and one.file not in (own, ".")]
    return inside, sorted({one.file for one in named if not is_inside(one.file)})


def _integrity(data: bytes) -> list[_Listed] | None:
    """Parse Megatron-core's manifest: an algorithm, and a digest for each file at the top of a checkpoint."""
    fields = json.loads(data)
    if not isinstance(fields, dict) or not isinstance(fields.get("files"), dict):
        return None
    algorithm = str(fields.get("algorithm", "sha256")).lower()
    return [_Listed(file, algorithm, _text(value)) for file, value in fields["files"].items()]


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{str(value)[:80]!r} stands where a digest or a name should")
    return value


def _signed(data: bytes) -> list[_Listed] | None:
    """Return what model-signing's signatures list; None if this is none of them."""
    if not data.lstrip().startswith(b"{"):
        return None
    try:
        bundles = [json.loads(data)]
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":
            raise
        bundles = [json.loads(line) for line in data.splitlines() if line.strip()]
    found = [_of_bundle(bundle) for bundle in bundles]
    return list(itertools.chain(*filter(None, found))) if any(one is not None for one in found) else None


def _of_bundle(bundle: Mapping[str, Any]) -> list[_Listed] | None:
    """Return what the statement in one bundle lists; None if it is about anything else than the files of a model."""
    envelope = bundle.get("dsseEnvelope") or {}
    if "payload" not in envelope:
        return None
    statement = json.loads(base64.b64decode(envelope["payload"], validate=True))
    if statement.get("predicateType") == _SIGNED_BEFORE:
        return [_Listed(_text(one["name"]), "sha256", _text(one["digest"]["sha256"])) for one in statement["subject"]]
    if statement.get("predicateType") != _SIGNED:
        return None
    predicate = statement["predicate"]
    in_parts = predicate.get("serialization", {}).get("method") == "shards"
    found = [_resource(one, in_parts) for one in predicate["resources"]]
    every = b"".join(bytes.fromhex(one.value) for one in found)
    if hashlib.sha256(every).hexdigest() != statement["subject"][0]["digest"]["sha256"]:
        raise ValueError("its digests do not add up to the one of all of them")
    return found


def _resource(fields: Mapping[str, Any], in_parts: bool) -> _Listed:
    file, value = _text(fields["name"]), _text(fields["digest"])
    algorithm = _text(fields["algorithm"]).partition("-sharded-")[0]
    if not in_parts:
        return _Listed(file, algorithm, value)
    file, start, end = file.rsplit(":", 2)
    return _Listed(file, algorithm, value, int(start), int(end))


def _sums(name: str, data: bytes) -> tuple[list[_Listed] | None, list[str]]:
    """Parse the lines of `sha256sum` and its like, in each of their forms; return also those that are none.

    Where no line is one: None, if the name of the manifest says no more than that it is of checksums.

    Raises:
        ValueError: no line is one, though the name tells an algorithm.
    """
    text = data.decode("utf-8", "surrogateescape").removeprefix("\ufeff")
    lines = [line.removesuffix("\r") for line in text.split("\0" if "\0" in text else "\n")]
    lines = [line for line in lines if line.strip() and not line.startswith("#")]
    sidecar = _SIDECAR.fullmatch(name)
    plain = _SUMS.fullmatch(name)
    algorithm = (sidecar[2] if sidecar else (plain and plain[1]) or "").lower()
    bare = lines[0].strip() if len(lines) == 1 else ""
    if sidecar and _HEX.fullmatch(bare):
        lines = [f"{bare}  {sidecar[1]}"]
    parsed = [_line(line, algorithm) for line in lines]
    found = [one for one in parsed if one]
    if not found and algorithm:
        raise ValueError("no line of it holds a digest and a name" if lines else "it is empty")
    if sidecar and len(found) == 1 and base_name(found[0].file) == sidecar[1]:  # made in another folder, of this file
        found = [found[0]._replace(file=sidecar[1])]
    return found or None, [line for line, one in zip(lines, parsed, strict=True) if one is None]


def _line(line: str, algorithm: str) -> _Listed | None:
    """Parse one line; `algorithm` is what the manifest's own name says, "" if nothing: then the length tells."""
    if match := _TAGGED.fullmatch(line):
        escaped, tag, file, value = match.groups()
        algorithm = _of_tag(tag)
    elif match := _PLAIN.fullmatch(line):
        escaped, value, file = match.groups()
        by_length = (known for known, nbytes in NBYTES.items() if 2 * nbytes == len(value))
        algorithm = BLAKE2 if algorithm == "b2" else algorithm or next(by_length, "")
    else:
        return None
    if not algorithm or (algorithm in NBYTES and len(value) != 2 * NBYTES[algorithm]):
        return None
    if escaped:
        file = re.sub(r"\\.", lambda pair: _ESCAPED.get(pair[0], pair[0]), file)
    return _Listed(file, algorithm, value)


def _of_tag(tag: str) -> str:
    """Return the algorithm that a tag names: `SHA256`, `SHA2-256`, `BLAKE2b-256`; of an unknown one the tag itself."""
    if not _TAG.fullmatch(tag):
        return tag.lower()
    tag = tag.lower()
    return BLAKE2 if tag.startswith(BLAKE2) else re.sub(r"^sha2?-", "sha", tag)
