"""Every kind of finding: how much it matters, what it makes of the state, and what it means in one line.

A kind that is not here cannot be found (`Finding.of` raises KeyError); docs/json.md is made from this table.
"""

from __future__ import annotations

from enum import Enum
from functools import partial
from typing import NamedTuple


class Severity(str, Enum):
    """How much a finding matters."""

    ERROR = "error"
    """Some data is missing, wrong or unreadable."""
    WARNING = "warning"
    """Probably not what was meant; nothing is proven wrong."""
    NOTE = "note"
    """Worth knowing."""


class Effect(str, Enum):
    """What an error makes of the state of a checkpoint; of several the first here counts."""

    UNSAFE = "unsafe"
    """Loading it with torch would run code that is no part of reading values."""
    DAMAGED = "damaged"
    """Something that is there is wrong."""
    INCOMPLETE = "incomplete"
    """Something is not there."""
    UNREADABLE = "unreadable"
    """The file system or object store would not give something out: nothing is known to be wrong."""
    UNREAD = "other"
    """Something cannot be looked into here: nothing is known of it."""
    UNMARKED = "unmarked"
    """It may be whole, but has no valid marker."""
    UNWANTED = "complete"
    """All is there as it was saved, and its values are not what one wants."""


class Kind(NamedTuple):
    """One kind of finding.

    Attributes:
        severity: of most findings of the kind; `Finding.of` can be told another.
        meaning: one line, for docs/json.md.
        effect: of its errors; warnings and notes have none.
        may_be_whole: it was not to be read now, here: what it is about may be whole all the same.
        unfinished: a save in its middle leaves it as well as one that was killed.
        of_file: it is about all a file holds, not about single entries.
    """

    severity: Severity
    meaning: str
    effect: Effect = Effect.DAMAGED
    may_be_whole: bool = False
    unfinished: bool = False
    of_file: bool = False


_error, _warning, _note = (partial(Kind, severity) for severity in Severity)


_MISSING = Effect.INCOMPLETE
KINDS = {
    # The metadata as a whole.
    "no-metadata": _error("there is no metadata: the save never finished", _MISSING, unfinished=True),
    "bad-metadata": _error("the metadata cannot be read", may_be_whole=True),
    "rank-metadata-missing": _error("`__R.metadata` of some rank is not there", _MISSING, unfinished=True),
    "rank-metadata-damaged": _error("`__R.metadata` of some rank cannot be read"),
    "two-metadata": _note("rank-local metadata lies beside `.metadata`, which is used"),
    "unsafe-pickle": _error(
        "a pickle, of metadata, an object, a tensor or a `.pt` file, runs code when loaded", Effect.UNSAFE
    ),
    "unknown-global": _warning("the metadata names something DCP's writers do not use; torch would import it"),
    "unknown-torch-name": _error("the metadata names something inside torch that its writers do not use"),
    "persistent-id": _error("the metadata refers to something outside it"),
    "no-storage-data": _error("the metadata names no files"),
    "bad-storage-meta": _error("the path it was saved to is damaged in the metadata"),
    # What is not there.
    "missing-file": _error("a file is not there", _MISSING, of_file=True),
    "short-file": _error("a file is shorter than its metadata, a marker or a manifest says", _MISSING, of_file=True),
    "one-rank": _error("it is one rank's file: what other ranks hold of its tensors is elsewhere", _MISSING),
    "lfs-pointer": _error("a file is what Git LFS leaves in its place", _MISSING, of_file=True),
    "missing-part": _error("a part that was asked for, or that all other steps have, is not there", _MISSING),
    "missing-side-file": _error(
        "a file beside the checkpoint that a resume needs is not there", _MISSING, unfinished=True
    ),
    "cut-side-file": _error("a file beside the checkpoint is empty or cut short", _MISSING, unfinished=True),
    "damaged-side-file": _error("a file beside the checkpoint is not what it should be"),
    "unlike-siblings": _error(
        "a file is not there that the steps beside it have; a warning where only one has it, or the trainer needs none",
        _MISSING,
        may_be_whole=True,
    ),
    "not-resumable": _warning("it is complete, and lacks what a resume needs, as one saved for its weights alone"),
    "begins-anew": _note(
        "after resharding, ranks that are new have no file of their own; their trainer goes on, and begins that anew"
    ),
    "tensors-not-read": _note("its trainer's files are there and whole, and dcptool reads no tensor of them"),
    "empty": _error("there is nothing in the folder", _MISSING, unfinished=True),
    # No checkpoint dcptool checks.
    "run-directory": _error("it is a run directory, or several", Effect.UNREAD),
    "not-a-checkpoint": _error("it holds no checkpoint; says what it looks like", Effect.UNREAD),
    "unsupported": _error("it is recognised, but nothing dcptool reads", Effect.UNREAD, may_be_whole=True),
    # Whole as far as can be told, but look.
    "nothing-saved": _warning("it holds no tensor and no object"),
    "last-shards-unknown": _note("whether files of further shards are missing, or had nothing in them, cannot be told"),
    # Markers.
    "no-marker": _error("a marker should be there and is not", Effect.UNMARKED),
    "bad-marker": _error("the marker cannot be read", Effect.UNMARKED),
    "stale-marker": _error("the marker is of another save than the metadata", Effect.UNMARKED),
    "changed-file": _error("a file is not what was marked, or not what a manifest lists"),
    "unmarked-file": _note("files were added since the checkpoint was marked"),
    # Manifests of other software.
    "bad-manifest": _error("a manifest cannot be understood: it vouches for nothing", Effect.UNMARKED, unfinished=True),
    "manifest-line": _warning("lines of a manifest cannot be understood"),
    "not-compared": _note("digests of a manifest are of a kind that dcptool does not compute"),
    "being-written": _warning("why it counts as in progress", unfinished=True),
    "unfinished-save": _error(
        "a save of `CheckpointManager` began here and did not finish: `_SAVING` is there and `_COMPLETE` is not",
        _MISSING,
        unfinished=True,
    ),
    # Items, and the places the metadata gives them.
    "misplaced-item": _error("an item is not where the metadata says"),
    "short-item": _error("an item has fewer bytes than its values need"),
    "items-overlap": _error("items lie over one another in a file"),
    "wrong-item": _error("an item has another dtype or shape than the metadata says"),
    "damaged-item": _error("an item cannot be understood, or its bytes were changed"),
    "wrong-crc": _error("the bytes of a record do not have the CRC32 that was stored"),
    "unreadable": _error(
        "something cannot be read: no permission, an I/O error, a store that refuses",
        Effect.UNREADABLE,
        may_be_whole=True,
    ),
    "unsupported-item": _error("an item cannot be looked into here", Effect.UNREAD, may_be_whole=True),
    "not-verifiable": _note("items are stored without checksums"),
    # The chunks of a tensor.
    "hole": _error("no chunk holds some elements of a tensor"),
    "overlap": _error("several chunks hold some elements; a warning where they are equal there"),
    "chunk-out-of-bounds": _error("a chunk lies outside its tensor"),
    "bad-chunk": _error("a chunk is no box inside its tensor"),
    "duplicate-chunk": _error("a chunk is recorded twice"),
    "cover-unknown": _warning("the chunks are too irregular to tell whether they cover the tensor"),
    # Records of the metadata.
    "chunk-without-item": _error("the metadata names no place for a chunk or an object"),
    "item-without-chunk": _warning("the metadata names a place for what it has no chunk of"),
    "bad-item": _error("the record of a place is damaged"),
    "bad-tensor": _error("the record of a tensor is damaged"),
    "bad-name": _error("an entry's name is no text"),
    "unknown-entry": _error("an entry is neither tensor nor object"),
    "bad-properties": _error("layout or memory format of a tensor is not what torch writes"),
    "unknown-dtype": _error("a tensor has a dtype this dcptool does not know"),
    "path-escape": _error("a file's name leads out of the folder; it is never followed; of a manifest a warning"),
    "bad-path": _warning("the nested path of an entry cannot be understood"),
    "path-differs": _warning("nested paths do not give the names of their entries"),
    "path-missing": _warning("entries have no nested path, though others do"),
    # Ranks that do not fit together.
    "replicas-differ": _warning("copies of one chunk or object, of several ranks, hold different values"),
    "ranks-disagree": _error("ranks recorded different things under one name"),
    "family-gap": _warning("an entry that each rank has of its own is missing for some rank"),
    "shard-gap": _error("an object of several shards lacks one"),
    # What else a listing shows.
    "in-copies": _note("data files are in `copy-0/` or its like, where their writer keeps copies"),
    "leftover-files": _note("data files the metadata does not name"),
    "left-behind": _note("a temporary file of dcptool, which was killed as it wrote a marker or metadata"),
    "mixed-times": _note("files were written at two times, as by two saves"),
    # safetensors and `.pt` files.
    "bad-file": _error("the header of one file of several cannot be read"),
    "missing-tensor": _error("the index places a tensor in a file that does not have it"),
    "unlisted-file": _warning("a file of tensors is there that the index does not name"),
    "other-weights": _note("weights are there in files of torch.save too, which are not read"),
    "copies-left-out": _note(
        "copies of parameters, as a model computes with, are not read: the optimizer's own in fp32 are"
    ),
    "unlisted-tensor": _warning("a tensor is not in the index"),
    "parts-disagree": _error("files hold parts of one tensor with different dtypes or ndim"),
    "bad-partition": _error(
        "parts of DeepSpeed's parameters do not have the shapes that are recorded, or do not add up"
    ),
    "duplicate-name": _error("several entries have one name; in `.pt` files a warning: their keys are equal as text"),
    "shared-storage": _note("several tensors are views of one storage"),
    "partial-storage": _note("tensors are views of a part of their storage"),
    "padded-file": _note("bytes follow the end of a `.pt` file's zip; a warning where they are no zeros"),
    "strided-tensors": _note("tensors are not row-major in their storage"),
    # Rank files.
    "optimizer-not-read": _warning("the optimizer's state is flat pieces of no known parameter, as FSDP1's"),
    "optimizer-unnamed": _warning("which parameters the numbers of the optimizer's state are cannot be told"),
    # Of inspect: what names, layouts and values tell before somebody resumes or converts.
    "unreadable-objects": _error("objects of a file cannot be read; a note where their form is unsupported"),
    "wrapper-names": _note("names have parts of wrappers (DDP, FSDP1, torch.compile, …)"),
    "common-prefix": _note("all names begin with one part"),
    "integer-keys": _note("keys look like integers, and are text"),
    "unflattened": _note("an object holds a whole container"),
    "extra-state": _note("entries are TransformerEngine's `_extra_state`"),
    "no-optimizer-state": _note("an optimizer without tensors: saved before its first step"),
    "index-keyed-optimizer": _note("the optimizer's state is named by parameter index"),
    "partial-optimizer": _note("the optimizer has no state for some weights"),
    "per-rank": _note("entries that one rank each has"),
    "stored-once": _note("what each rank has of its own, by its name, is stored once"),
    "whole-tensors": _note("one of many ranks stored tensors whole"),
    "layer-stacks": _note("one tensor holds all layers"),
    "side-files": _note("files of a framework lie beside it"),
    "unmatched-glob": _note("of diff too: a name or glob of `--keys` or `--exclude` matches nothing"),
    # Of inspect --stats, and of --finite.
    "not-finite": _warning(
        "tensors hold NaN or infinities; an error of `--finite`, which the state does not tell", Effect.UNWANTED
    ),
    "finite-unknown": _warning("`--finite` was asked, and no value of a tensor, or not all, could be looked at"),
    "all-zero": _note("tensors hold zeros only"),
    "never-updated": _note("second moments are zero: no gradient has reached these parameters"),
    "constant": _note("tensors hold one value only"),
    "not-computed": _note("there are no statistics of a tensor"),
    # Of verify --load.
    "torch-cannot-load": _error("torch cannot load an entry; a warning of rank-local metadata as a whole"),
    "torch-cannot-read-metadata": _error("torch cannot read the metadata"),
    "unsafe-metadata": _error("torch was not asked: it would execute what the metadata names"),
    "loaded": _note("what torch loaded"),
    "not-loaded": _error(
        "torch would have to run code, or lacks a package, to load it", Effect.UNREAD, may_be_whole=True
    ),
    # Of diff.
    "found-below": _note("the checkpoint is below the folder that was named"),
    "unused-prefix": _note("a prefix that was to be taken off is in no name"),
    "nesting-differs": _note("entries stand at another place of the nested dict"),
    "flattening-differs": _note("what is one object on one side may be in parts on the other"),
    "subset": _note("one side has all the other has, and more"),
    # Of convert --skip-corrupt.
    "lost-entry": _error("an entry has bytes in a file that is missing or cut short"),
    # Of a run directory: how its steps were found.
    "steps-by-pattern": _note("folders are taken as steps because their names differ in one number only"),
    "unreadable-best": _warning("a step's record of which step is the best cannot be read"),
    # Of latest: what pointers say that is not so.
    "stale-pointer": _warning("a pointer names an older step than the newest complete one"),
    "wrong-pointer": _warning("a pointer names a step that is not complete"),
    "dangling-pointer": _warning("a pointer names a step that is not there"),
    "unreadable-pointer": _warning("a pointer cannot be read"),
    # Of a run: who saves to it, and what was saved last.
    "run-held": _note("a job saves to this run now, as its `_LEASE` says"),
    "other-branch": _note("steps are of a branch that was left when the job went back to an older step"),
    "order-unclear": _warning("a step was written long after one with a higher number"),
}
