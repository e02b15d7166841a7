"""Which entries of a checkpoint go where: selected by name, renamed, cast. Decides names and dtypes, copies nothing.

Names change in this order: select, strip, add, rename.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence, Set
from fnmatch import fnmatchcase, translate
from typing import NamedTuple

from dcptool.checkpoint import dtypes
from dcptool.checkpoint.casting import is_optimizer_state, is_small_float, scaled
from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.entries import ObjectEntry, TensorEntry
from dcptool.checkpoint.regions import volume
from dcptool.errors import LayoutError, UnsupportedError
from dcptool.words import closest, did_you_mean, listed, plural

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_forward_module", "module")
"""Parts that torch.compile, activation checkpointing, FSDP1, DeepSpeed and DDP put into names."""
_FLOATS = ("float16", "bfloat16", "float32", "float64")
MAX_LISTED = 12
MAX_GUESSES = 3
"""Names and globs of one option for which it is looked what they may have meant, which takes time."""
_WILD = re.compile(r"[*?[]")


class Renaming(NamedTuple):
    """How names and dtypes change.

    Attributes:
        strip_prefix: taken off names that begin with it.
        add_prefix: put in front of all.
        rename: (old, new) pairs of whole names.
        clean_names: take parts of wrappers out of names.
        dtype: what floating tensors are cast to; None to keep.
        cast_optimizer: cast the state of optimizers, too.
    """

    strip_prefix: str = ""
    add_prefix: str = ""
    rename: tuple[tuple[str, str], ...] = ()
    clean_names: bool = False
    dtype: str | None = None
    cast_optimizer: bool = False


AS_IS = Renaming()


def renaming_of_part(renaming: Renaming, names: Iterable[str]) -> Renaming:
    """Return what of a renaming of several checkpoints is about one of them, which has these names."""
    there = {_affixed(name, renaming) for name in names}
    return renaming._replace(rename=tuple(pair for pair in renaming.rename if pair[0] in there))


Path = tuple[str | int, ...]


class SelectedTensor(NamedTuple):
    """A tensor of the output: its name and nested path there, where it comes from, its dtype there."""

    name: str
    path: Path | None
    entry: TensorEntry
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of its values in the output."""
        return volume(self.entry.shape) * dtypes.lookup(self.dtype).itemsize


class SelectedObject(NamedTuple):
    """An object of the output: its name and nested path there, and where it comes from."""

    name: str
    path: Path | None
    entry: ObjectEntry


class Selection(NamedTuple):
    """What is to be written, in the order of the source, with what is worth knowing about it."""

    in_order: tuple[SelectedTensor | SelectedObject, ...]
    n_cast: int
    notes: tuple[str, ...] = ()

    @property
    def tensors(self) -> tuple[SelectedTensor, ...]:
        """The tensors alone."""
        return tuple(item for item in self.in_order if isinstance(item, SelectedTensor))

    @property
    def objects(self) -> tuple[SelectedObject, ...]:
        """The objects alone."""
        return tuple(item for item in self.in_order if isinstance(item, SelectedObject))

    def without_objects(self) -> Selection:
        """Return the tensors as a selection."""
        return Selection(self.tensors, self.n_cast)


def select(
    checkpoint: Checkpoint,
    keys: Sequence[str] = (),
    exclude: Sequence[str] = (),
    renaming: Renaming = AS_IS,
    without: Set[str] = frozenset(),
) -> Selection:
    """Select, rename and cast.

    Args:
        checkpoint: an open checkpoint.
        keys: names or shell globs on whole fqns, `*` crosses dots; none selects all.
        exclude: names or globs of what to leave out.
        renaming: see `Renaming`.
        without: fqns to leave out too; there may be as many as entries.

    Raises:
        LayoutError: nothing of what is there matches (the message lists that, with sizes), two entries would have one
            name, or a name to rename is not there.
    """
    chosen = [fqn for fqn in checkpoint if fqn not in without and selects(fqn, keys, exclude)]
    if not chosen and (len(checkpoint) or keys or exclude):
        raise LayoutError(_nothing([checkpoint], keys, exclude))
    if not chosen:  # as its save was
        return Selection(
            (), 0, ("nothing was saved: the source holds no tensor and no object, and so does the output",)
        )
    names = {fqn: _affixed(fqn, renaming) for fqn in chosen}
    affixed, renames = set(names.values()), dict(renaming.rename)
    names = {fqn: renames.get(name, name) for fqn, name in names.items()}
    missing = [old for old in renames if old not in affixed]
    if missing:
        changed = renaming.clean_names or renaming.strip_prefix or renaming.add_prefix
        when = ", after prefixes were taken off and added" if changed else ""
        raise LayoutError(
            f"--rename {missing[0]}=…: no selected entry has this name{when}{did_you_mean(missing[0], affixed)}"
        )
    twice = [old for old, count in Counter(old for old, _ in renaming.rename).items() if count > 1]
    if twice:
        raise LayoutError(f"--rename {twice[0]}=… is given more than once")
    sources: dict[str, str] = {}
    for fqn, name in names.items():
        if fqn and not name:
            raise LayoutError(f"{fqn!r} would be left without a name")
        if name in sources:
            raise LayoutError(f"{sources[name]!r} and {fqn!r} would both be named {name!r}")
        sources[name] = fqn
    items: list[SelectedTensor | SelectedObject] = []
    n_cast = 0
    kept: list[str] = []
    made: list[str] = []
    _require_castable(checkpoint, chosen, renaming)
    for fqn in chosen:
        entry, name = checkpoint[fqn], names[fqn]
        path = _path(entry.path, fqn, name, renaming)
        if isinstance(entry, TensorEntry):
            dtype = entry.dtype
            if renaming.dtype and entry.dtype in _FLOATS and entry.dtype != renaming.dtype:
                is_kept = not renaming.cast_optimizer and is_optimizer_state(fqn)
                kept += [fqn] if is_kept else []
                if entry.inner or fqn in checkpoint.subclasses:
                    made.append(fqn)
                    is_kept = True
                dtype = dtype if is_kept else renaming.dtype
            n_cast += dtype != entry.dtype
            items.append(SelectedTensor(name, path, entry, dtype))
        else:
            items.append(SelectedObject(name, path, entry))
    notes = (
        *unmatched(checkpoint, keys, exclude),
        *_prefix_notes(chosen, renaming),
        *_cast_notes(checkpoint, chosen, kept, renaming),
        *_made_notes(made),
    )
    return Selection(tuple(items), n_cast, notes)


def _require_castable(checkpoint: Checkpoint, chosen: Sequence[str], renaming: Renaming) -> None:
    """Refuse a cast where values mean something only together with scales, which would be cast and they not.

    Raises:
        UnsupportedError: names the first.
    """
    if not renaming.dtype:
        return
    tensors = {fqn: entry.dtype for fqn, entry in checkpoint.tensors.items()}
    found = scaled(tensors, [fqn for fqn in chosen if fqn in tensors])
    if found:
        first, scale = next(iter(found.items()))
        raise UnsupportedError(
            f"{plural(len(found), 'tensor')} of {tensors[first]} and their like mean something only with scales, as "
            f"{first!r} with {scale!r}: --dtype {renaming.dtype} would make wrong weights of them",
            next_step="Without --dtype both stay as they are; what quantised the model can undo it first.",
        )


def _cast_notes(checkpoint: Checkpoint, chosen: Sequence[str], kept: Sequence[str], renaming: Renaming) -> list[str]:
    """Say which floating tensors a cast leaves as they are."""
    if not renaming.dtype:
        return []
    small = [fqn for fqn in chosen if fqn in checkpoint.tensors and is_small_float(checkpoint.tensors[fqn].dtype)]
    notes = []
    if kept:
        notes.append(
            f"{plural(len(kept), 'tensor')} of optimizer state keep their dtype, such as {kept[0]!r}; "
            "--cast-optimizer casts them, too"
        )
    if small:
        dtype = checkpoint.tensors[small[0]].dtype
        notes.append(f"{plural(len(small), 'tensor')} keep their dtype, such as {small[0]!r}, which is {dtype}")
    return notes


def _made_notes(made: Sequence[str]) -> list[str]:
    """Say which tensors a cast leaves alone because other tensors are inside them."""
    if not made:
        return []
    return [f"{plural(len(made), 'tensor')} made of tensors, or inside such, keep their dtype, such as {made[0]!r}"]


def _prefix_notes(chosen: Sequence[str], renaming: Renaming) -> tuple[str, ...]:
    """Say how many names do not have the prefix that was to be taken off."""
    if not renaming.strip_prefix:
        return ()
    names = [_cleaned(fqn) if renaming.clean_names else fqn for fqn in chosen]
    without = [name for name in names if not name.startswith(renaming.strip_prefix)]
    if not without:
        return ()
    prefix, first = repr(renaming.strip_prefix), repr(without[0])
    if len(without) == len(names):
        return (f"no name begins with {prefix}: all are kept, such as {first}",)
    return (f"{len(without):,} of {len(names):,} names do not begin with {prefix} and are kept, such as {first}",)


def globs(given: str | Sequence[str]) -> tuple[str, ...]:
    """Return names and globs as a tuple; a single one may be given bare."""
    return (given,) if isinstance(given, str) else tuple(given)


def require_match(checkpoints: Sequence[Checkpoint], keys: Sequence[str], exclude: Sequence[str]) -> None:
    """Refuse `keys` that select nothing in any of the checkpoints; no keys select whatever is there, were it nothing.

    Raises:
        LayoutError: nothing matches; the message lists what there is.
    """
    if keys and not any(selects(fqn, keys, exclude) for checkpoint in checkpoints for fqn in checkpoint):
        raise LayoutError(_nothing(checkpoints, keys, exclude))


def unmatched(names: Collection[str], keys: Sequence[str], exclude: Sequence[str]) -> tuple[str, ...]:
    """Say of each name or glob that it matches nothing, with what it may have meant, one sentence each.

    Args:
        names: of all entries there are; a set, or what finds a name as fast.
        keys, exclude: as in `select`.
    """
    notes: list[str] = []
    for option, given in (("--keys", keys), ("--exclude", exclude)):
        lone = [pattern for pattern in dict.fromkeys(given) if not _is_matched(pattern, names)]
        for index, pattern in enumerate(lone[:MAX_LISTED]):
            meant = _meant(option, pattern, names) if index < MAX_GUESSES else ""
            notes.append(f"{option} {pattern!r} matches nothing{meant}")
        if len(lone) > MAX_LISTED:
            notes.append(f"{len(lone) - MAX_LISTED:,} more {option} match nothing")
    return tuple(notes)


def _is_matched(pattern: str, names: Collection[str]) -> bool:
    if pattern in names:
        return True
    return bool(_WILD.search(pattern)) and any(map(re.compile(translate(pattern)).match, names))


def _meant(option: str, pattern: str, names: Collection[str]) -> str:
    """Return the end of a message on what matches nothing: what may have been meant; "" if nothing is like it."""
    parts = [part.strip() for part in pattern.split(",")]
    if len(parts) > 1 and all(_is_matched(part, names) for part in parts) and not any("," in name for name in names):
        return f"; {option} is repeated, not comma-separated: {' '.join(f'{option} {part!r}' for part in parts)}"
    if not _WILD.search(pattern):
        if any(name.startswith(pattern) for name in names):
            return f"; for those that begin so: {option} {f'{pattern}*'!r}"
        near = closest(pattern, names)
        if near:
            return f"; did you mean {near!r}?"
    head = _WILD.split(pattern, maxsplit=1)[0].rstrip(".")
    tail = re.split(r"[*?\]]", pattern)[-1].lstrip(".") if _WILD.search(pattern) else ""
    guesses = []
    if head:
        count = head.count(".") + 1
        near = closest(head, dict.fromkeys(".".join(name.split(".")[:count]) for name in names))
        guesses.append(f"{near}{pattern[len(head) :] or '.*'}" if near else "")
    if tail:
        count = tail.count(".") + 1
        near = closest(tail, dict.fromkeys(".".join(name.split(".")[-count:]) for name in names))
        guesses += [f"{start.removesuffix(tail)}{near}" for start in (pattern, *guesses) if near and start]
    guess = next((guess for guess in guesses if guess and _is_matched(guess, names)), "")
    return f"; did you mean {guess!r}?" if guess else ""


def selects(fqn: str, keys: Sequence[str], exclude: Sequence[str]) -> bool:
    """Tell whether an entry is selected by names and globs; no keys select all."""
    return (not keys or _matches(fqn, keys)) and not _matches(fqn, exclude)


def with_inner(
    checkpoint: Checkpoint, keys: Sequence[str], exclude: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return names and globs for `checkpoint.flat`, in which what selects a tensor made of tensors selects these."""
    return _with_inner(checkpoint, keys), _with_inner(checkpoint, exclude)


def _with_inner(checkpoint: Checkpoint, given: Sequence[str]) -> tuple[str, ...]:
    found: list[str] = []
    subclasses = [subclass for subclass in checkpoint.subclasses.values() if subclass.inner] if given else []
    for pattern in given:
        chosen = [subclass for subclass in subclasses if _matches(subclass.entry.fqn, (pattern,))]
        inner = [part.fqn for subclass in chosen for part in subclass.inner]
        if not inner or _is_matched(pattern, checkpoint.flat):
            found.append(pattern)
        found += inner
    return tuple(dict.fromkeys(found))


def _matches(fqn: str, globs: Sequence[str]) -> bool:
    return any(fqn == pattern or fnmatchcase(fqn, pattern) for pattern in globs)


def _affixed(fqn: str, renaming: Renaming) -> str:
    if renaming.clean_names:
        fqn = _cleaned(fqn)
    return renaming.add_prefix + fqn.removeprefix(renaming.strip_prefix)


def _path(path: Path | None, fqn: str, name: str, renaming: Renaming) -> Path | None:
    """Return the nested path of an entry under its new name; a path that cannot follow the name becomes the name."""
    if path is None or name == fqn:
        return path
    parts: list[str | int] = list(path)
    if renaming.clean_names:
        parts = [_cleaned(part) if isinstance(part, str) else part for part in parts]
        parts = [part for part in parts if part != ""]
    if renaming.strip_prefix:
        parts = _stripped(parts, renaming.strip_prefix)
    if renaming.add_prefix.endswith("."):
        parts = [*renaming.add_prefix[:-1].split("."), *parts]
    elif renaming.add_prefix and parts:
        parts = [f"{renaming.add_prefix}{parts[0]}", *parts[1:]]
    return tuple(parts) if ".".join(map(str, parts)) == name else (name,)


def _stripped(parts: list[str | int], prefix: str) -> list[str | int]:
    """Take a prefix of the joined name off the parts of a path."""
    while parts and prefix:
        first = str(parts[0])
        if prefix.startswith(f"{first}."):
            prefix = prefix[len(first) + 1 :]
            parts = parts[1:]
        elif first.startswith(prefix):
            return [first[len(prefix) :], *parts[1:]]
        else:
            break
    return parts


def _cleaned(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _nothing(checkpoints: Sequence[Checkpoint], keys: Sequence[str], exclude: Sequence[str]) -> str:
    """Say that nothing is selected, and what there is: the first parts of names with their bytes."""
    place = f"{checkpoints[0].path}: " if len(checkpoints) == 1 else ""
    entries = [item for checkpoint in checkpoints for item in checkpoint.items()]
    if not entries:
        return f"{place}there are no entries"
    if not keys:
        return f"{place}--exclude {' '.join(map(repr, exclude))} leaves nothing"
    n_matching = sum(selects(fqn, keys, ()) for fqn, _ in entries)
    if n_matching:
        which = "the entry that matches" if n_matching == 1 else f"all {n_matching:,} entries that match"
        return f"{place}--exclude leaves out {which} {', '.join(map(repr, keys))}"
    start = next((key for key in keys if any(fqn.startswith(key) for fqn, _ in entries)), None)
    if start:
        return f"{place}no entry is named {start!r}; for those that begin so: --keys {f'{start}*'!r}"
    names = dict(entries)
    meant = next(filter(None, (_meant("--keys", key, names) for key in keys[:MAX_GUESSES])), "")
    groups: dict[str, int] = {}
    for fqn, entry in entries:
        top = fqn.partition(".")[0]
        groups[top] = groups.get(top, 0) + (entry.nbytes if isinstance(entry, TensorEntry) else 0)
    shown = sorted(groups.items(), key=lambda group: -group[1])
    named = listed([f"{name!r} ({plural(nbytes, 'byte')})" for name, nbytes in shown], MAX_LISTED, counted=False)
    begin = f"{meant}\nNames begin with" if meant else "; names begin with"
    return f"{place}no entry matches {', '.join(map(repr, keys))}{begin} {named}"
