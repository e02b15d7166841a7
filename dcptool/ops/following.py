"""What becomes of the files beside a checkpoint when it is written anew: which follow it, which cannot, and why.

By their names, as the profiles in `frameworks` have them. Reads listings and what profiles ask for; copies nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.steps import step_number
from dcptool.checks.steps import rank_in
from dcptool.errors import DcptoolError, UnsupportedError
from dcptool.formats.detect import find_parts, open_part
from dcptool.formats.manifests import is_manifest_name
from dcptool.formats.marker import FOREIGN, NAME, NEGATIVE, SAVING
from dcptool.formats.table import beside, is_metadata
from dcptool.frameworks.profile import Follow, Profile, SavedStep
from dcptool.frameworks.table import holds, is_needed, profile_of
from dcptool.frameworks.values import reader
from dcptool.storage import DirEntry, Location, Storage, base_name, is_url, join, locate
from dcptool.words import listed, plural, shown

MAX_NAMED = 5
MAX_LISTED = 20
MAX_DEPTH = 2
"""Of a part in its step."""
MAX_FOLDERS = 64
"""A step has fewer folders."""
_MARKERS = frozenset({NAME, SAVING, *FOREIGN, *NEGATIVE})
OF_MODEL = "huggingface/"
"""Where verl and SkyRL keep what describes the model, in the folder of its rank files."""
_DESCRIBES = re.compile(
    r"(?:(?:adapter_|generation_|processor_|preprocessor_|video_preprocessor_|quantize_)?config\.json"
    r"|tokenizer.*|special_tokens_map\.json|added_tokens\.json|vocab\..*|merges\.txt|spiece\.model"
    r"|sentencepiece.*\.model|chat_template\..*|(?:LICEN[CS]E|NOTICE|README|USE_POLICY|COPYING)[^/]*"
    r"|(?:configuration|modeling|tokenization|processing|image_processing)_\w+\.py)",
    re.IGNORECASE,
)
_OF_DATA = re.compile(r"data|loader|sampler|(?:^|[._/])dl(?:$|[._/])", re.IGNORECASE)


class Carried(NamedTuple):
    """A file that follows: its name in the source, and in the output; its bytes and time when it was chosen.

    `content` is what is written in place of its bytes, where these would no longer be true.
    """

    name: str
    target: str
    entry: DirEntry
    content: bytes | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of it in the output."""
        return self.entry.nbytes if self.content is None else len(self.content)


class Following(NamedTuple):
    """What becomes of the files beside a checkpoint.

    Attributes:
        storage: of the folder they are in.
        carried: those that follow.
        notes: what is worth knowing of them and of the others, one sentence each.
        last: name of the one that its trainer writes last; "" if none is.
    """

    storage: Storage | None = None
    carried: tuple[Carried, ...] = ()
    notes: tuple[str, ...] = ()
    last: str = ""

    @property
    def sizes(self) -> Mapping[str, int]:
        """Bytes of each in the output, by name."""
        return {file.target: file.nbytes for file in self.carried}

    @property
    def nbytes(self) -> int:
        """Bytes of all."""
        return sum(self.sizes.values())


NOTHING = Following()


class FoundStep(NamedTuple):
    """A folder with its files, the checkpoints in it, and whose step it is.

    Attributes:
        location: of the folder.
        listing: all files in it and below.
        saved: the same as a profile sees it.
        profile: of its trainer; None if no profile knows it.
    """

    location: Location
    listing: Mapping[str, DirEntry]
    saved: SavedStep
    profile: Profile | None

    def follows(self, name: str) -> Follow | None:
        """Return what becomes of a file with another number of ranks; None if nothing is known of it."""
        return self.profile.follows(name) if self.profile else None

    def without(self, name: str) -> FoundStep:
        """Return it as if a file were not there."""
        return self._replace(listing={key: entry for key, entry in self.listing.items() if key != name})


def step_of(location: Location, opened: Mapping[str, Checkpoint], listing: Mapping[str, DirEntry]) -> FoundStep:
    """Return a folder as a step.

    Args:
        location: of it.
        opened: all checkpoints in it, by their place there.
        listing: all files in it.
    """
    files = {name: entry.nbytes for name, entry in listing.items()}
    saved = SavedStep(base_name(location.path), files, opened, reader(location.storage, files))
    return FoundStep(location, listing, saved, profile_of(saved))


def opened_parts(location: Location, listing: Mapping[str, DirEntry]) -> dict[str, Checkpoint]:
    """Open the checkpoints in a folder, by their place there; what one keeps its data files in is none of them."""
    opened: dict[str, Checkpoint] = {}
    used: set[str] = set()
    for part in find_parts(location, below_whole=True):
        name = part.name
        own = any(file.rpartition("/")[0] == name and is_metadata(file) for file in listing)
        if name in used and not own:
            continue
        opened[name] = open_part(location, name)
        used.update(file.rpartition("/")[0] for file in opened[name].usage if not name)
    return opened


def follow(step: FoundStep, resharded: Iterable[str], n_ranks: int | None) -> Following:
    """Decide what becomes of the files of a step on so many ranks.

    Args:
        step: all of it.
        resharded: places of the checkpoints in it that are written anew; all other files are carried or told.
        n_ranks: that will resume from the output; None for as many as before.

    Raises:
        UnsupportedError: files are needed that only as many ranks as saved them can load.
    """
    names = _beside(step, resharded)
    kinds = {name: step.follows(name) for name in names}
    fixed = [name for name, kind in kinds.items() if kind is Follow.FIXED]
    if fixed and n_ranks not in (None, step.saved.n_ranks):
        raise UnsupportedError(fixed_message(step, fixed), next_step="Name one checkpoint in it to reshard that alone.")
    stale = [name for name in names if kinds[name] is Follow.STALE or is_manifest_name(base_name(name))]
    ranks = {name: step.profile.rank_of(name) for name in names if step.profile and kinds[name] is Follow.PER_RANK}
    spare = {name for name, rank in ranks.items() if rank is not None and n_ranks is not None and rank >= n_ranks}
    carried = [name for name in names if name not in spare and name not in stale]
    unknown = [name for name in carried if kinds[name] is None and not (holds(name) or describes(name))]
    notes = [
        *_carried_notes(step, [name for name in carried if name not in unknown and name not in ranks], unknown),
        *_rank_notes(step, ranks, n_ranks),
        *_rank_notes(step, {name: rank for name in unknown if (rank := rank_in(name)) is not None}, n_ranks, False),
        *([f"left out, for it would be wrong: {named(step, stale)}"] if stale else []),
        *_left_over(step, names),
        *_missing(step),
        *_elsewhere(step, n_ranks),
    ]
    found = tuple(Carried(name, _target(step, name, n_ranks, carried), step.listing[name]) for name in carried)
    last = step.profile.last_written if step.profile and step.profile.last_written in carried else ""
    return Following(step.location.storage, found, tuple(notes), last)


def describing(step: FoundStep, written: Collection[str], below: str = "") -> Following:
    """Decide that what describes a model follows it: configuration, tokenizer, licence; all other files are told.

    Args:
        step: all of it.
        written: places of the checkpoints in it that are written anew.
        below: the folder of the checkpoint whose model it is: of two files of one name its own is taken.
    """
    names = _beside(step, written)
    prefix = f"{below}/" if below else ""
    found: dict[str, str] = {}
    for name in sorted(names, key=lambda name: name.startswith(prefix) if prefix else True):
        inside = name.removeprefix(prefix).removeprefix(OF_MODEL)
        if "/" not in inside and describes(inside):
            found[inside] = name
    carried = set(found.values())
    others = [part for part in _other_parts(step, written) if not any(name.startswith(part) for name in carried)]
    left = [name for name in names if name not in carried and not name.startswith(tuple(others))] + others
    notes = [
        *([f"carried as they are: {named(step, sorted(carried))}"] if carried else []),
        *([f"not carried: {named(step, left)}"] if left else []),
        *_data_notes(left),
    ]
    files = tuple(Carried(name, target, step.listing[name]) for target, name in found.items())
    return Following(step.location.storage, files, tuple(notes))


def describes(name: str) -> bool:
    """Tell whether a file describes a model: its configuration, tokenizer, licence."""
    return _DESCRIBES.fullmatch(name) is not None


def is_of_model(files: Iterable[str]) -> bool:
    """Tell whether a folder with these files is a model in safetensors, as transformers loads it."""
    return any(re.fullmatch(r"model(-.*)?\.safetensors", name) for name in files)


def left_notes(step: FoundStep, written: Collection[str]) -> list[str]:
    """Name the files of a step of which only one checkpoint is written anew, and the other checkpoints."""
    names = _beside(step, [*written, *step.saved.parts])
    others = _other_parts(step, written)
    told = named(step, [*others, *(name for name in names if not name.startswith(tuple(others)))])
    return [f"not carried, of the step {step.location.path}: {told}", *_data_notes(names)] if told else []


def _other_parts(step: FoundStep, written: Collection[str]) -> list[str]:
    """Return the folders of a step's other checkpoints."""
    others = [f"{name}/" for name in step.saved.parts if name and name not in written]
    others += [f"{name}/" for name in step.saved.folders if step.follows(f"{name}/") and f"{name}/" not in others]
    return [name for name in others if not any(f"{part}/".startswith(name) for part in written)]


def step_around(checkpoint: Checkpoint) -> tuple[FoundStep, str] | None:
    """Return the step that a checkpoint is a part of, and its place there; None if it is none that a profile knows."""
    path = checkpoint.root.rstrip("/")
    if not is_url(path):
        path = os.path.abspath(path)
    place = ""
    for _ in range(MAX_DEPTH):
        path, _, name = path.rpartition("/")
        if not path or path.endswith((":", "/")):
            return None
        place = join(name, place) if place else name
        found = _step_at(path, place, checkpoint) if step_number(place.partition("/")[0]) is None else None
        if found:
            return found, place
    return None


def _step_at(path: str, place: str, checkpoint: Checkpoint) -> FoundStep | None:
    try:
        location = locate(path)
        entries = location.storage.entries()
        folders = [entry.name for entry in entries if entry.is_dir]
        if len(folders) > MAX_FOLDERS:
            return None
        below = [entry for folder in folders for entry in location.storage.entries(folder)]
    except DcptoolError:
        return None
    listing = {entry.name: entry for entry in (*entries, *below) if not entry.is_dir}
    listing.update({f"{place}/{entry.name}": entry for entry in checkpoint.seen if not entry.is_dir})
    found = step_of(location, {place: checkpoint}, listing)
    return found if found.profile else None


def _beside(step: FoundStep, written: Iterable[str]) -> list[str]:
    """Return the files of a step that are of no checkpoint that is written anew, and no marker."""
    parts = step.saved.parts
    inside = {f"{part}/{name}" if part else name for part in written for name in parts[part].own_files}
    rest = {name for name in step.listing if name not in inside}
    others = [part for part in parts if part not in set(written)]
    of_others = {
        join(part, name) if part else name
        for part in others
        for name in (*parts[part].usage, parts[part].name or "", *parts[part].files)
    }
    names = {*beside(rest), *filter(is_needed, rest), *(rest & of_others)}
    names |= {name for name in rest if is_manifest_name(base_name(name)) and name not in inside}
    steps = {folder for folder in step.saved.folders if step_number(folder) is not None and folder not in written}
    return sorted(name for name in names if base_name(name) not in _MARKERS and name.partition("/")[0] not in steps)


def fixed_message(step: FoundStep, names: Sequence[str]) -> str:
    """Say that files of a step can be loaded only by as many ranks as saved them."""
    trainer = step.profile.name if step.profile else "its trainer"
    are = "is" if len(names) == 1 else "are"
    return (
        f"{step.location.path} is a step of {trainer}: {named(step, names)} {are} of single ranks, and only as many as "
        "saved it can load it"
    )


def named(step: FoundStep | None, names: Sequence[str]) -> str:
    """Return files in a row, those alike but for a number as one, with what they hold.

    >>> named(None, ["a.json", "rng_0.pt", "rng_1.pt"])
    'a.json, rng_*.pt (2 files)'
    """
    families: dict[str, list[str]] = {}
    for name in names:
        families.setdefault(re.sub(r"\d+", "*", name), []).append(name)
    told = []
    for form, members in families.items():
        known = step.profile.holds(members[0]) if step and step.profile else ""
        known = known or holds(members[0])
        count = [plural(len(members), "file")] if len(members) > 1 else []
        more = ", ".join([*count, *([known] if known else [])])
        told.append(shown(members[0] if len(members) == 1 else form) + (f" ({more})" if more else ""))
    return listed(told, MAX_LISTED)


def _carried_notes(step: FoundStep, known: Sequence[str], unknown: Sequence[str]) -> list[str]:
    notes = [f"carried as they are: {named(step, known)}"] if known else []
    return notes + ([f"carried as they are, of no known use: {named(step, unknown)}"] if unknown else [])


def _rank_notes(step: FoundStep, ranks: Mapping[str, int | None], n_ranks: int | None, cut: bool = True) -> list[str]:
    """Say of files that each rank has of its own whose there are, whose a resume misses, and whose are left out."""
    families: dict[str, set[int]] = {}
    first: dict[str, str] = {}
    for name, rank in ranks.items():
        if rank is not None:
            form = re.sub(r"\d+(?=\D*$)", "*", name)
            families.setdefault(form, set()).add(rank)
            first.setdefault(form, name)
    return [_rank_note(step, form, first[form], found, n_ranks, cut) for form, found in families.items()]


def _rank_note(step: FoundStep, form: str, name: str, found: set[int], n_ranks: int | None, cut: bool) -> str:
    known = (step.profile.holds(name) if step.profile else "") or holds(name)
    here = [rank for rank in found if not cut or n_ranks is None or rank < n_ranks]
    told = f"{form} ({known})" if known else form
    told += f": carried for {ranks_named(sorted(here))}" if here else ": not carried"
    if n_ranks is None:
        return told
    missed = [rank for rank in range(n_ranks) if rank not in found]
    spare = sorted(rank for rank in found if rank >= n_ranks)
    told += f"; a resume on {n_ranks} ranks finds none for {ranks_named(missed)}" if missed else ""
    if spare:
        verb = "left out" if cut else "carried, of no rank any more"
        told += f"; {'that' if len(spare) == 1 else 'those'} of {ranks_named(spare)} {verb}"
    return told + (data_order(form) if missed or spare else "")


def data_order(name: str) -> str:
    """Return the end of a sentence on state of single ranks: what its loss means for the data; "" if it is of no data.

    >>> data_order("model.w")
    ''
    """
    return ": data is read again, or left out, and in another order" if _OF_DATA.search(name) else ""


def ranks_named(ranks: Sequence[int]) -> str:
    """Return ranks in words.

    >>> ranks_named([3]), ranks_named([4, 5, 6]), ranks_named([0, 2])
    ('rank 3', 'ranks 4–6 (3)', 'ranks 0, 2')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]}–{ranks[-1]} ({len(ranks):,})"
    return f"ranks {listed(list(map(str, ranks)), MAX_NAMED)}"


def _data_notes(names: Sequence[str]) -> list[str]:
    found = [name for name in names if _OF_DATA.search(base_name(name)) and rank_in(name) is not None]
    return ["without the state of data loaders a job begins its data anew"] if found else []


def _left_over(step: FoundStep, names: Sequence[str]) -> list[str]:
    """Name what is neither part of a checkpoint, nor a file beside one: data files of no checkpoint, other steps."""
    used = {f"{part}/{name}" if part else name for part, one in step.saved.parts.items() for name in one.usage}
    rest = [
        name
        for name, entry in step.listing.items()
        if name not in used and name not in names and base_name(name) not in _MARKERS and entry.nbytes
    ]
    rest = [name for name in rest if not is_metadata(base_name(name))]
    return [f"left out, as no part of the checkpoint: {named(step, rest)}"] if rest else []


def _missing(step: FoundStep) -> list[str]:
    if step.profile is None:
        return []
    lacking = step.profile.missing(step.saved)
    told = listed([f"{name} ({what})" for name, what in lacking], MAX_NAMED)
    verb = "is" if len(lacking) == 1 else "are"
    trainer = step.profile.name
    return [f"the source lacks {told}, and so does the output: {verb} of what {trainer} loads"] if lacking else []


def _elsewhere(step: FoundStep, n_ranks: int | None) -> list[str]:
    told = step.profile.elsewhere if step.profile and n_ranks not in (None, step.saved.n_ranks) else ""
    return [f"on another number of data-parallel ranks {step.profile.name} {told}"] if step.profile and told else []


def _target(step: FoundStep, name: str, n_ranks: int | None, carried: Sequence[str]) -> str:
    if step.profile is None or n_ranks is None:
        return name
    target = step.profile.name_with(n_ranks, name)
    return name if target in carried else target
