"""What sets the on-disk formats apart, as values: whoever would ask which format it is, asks one of these instead.

A format's own package makes the value; `formats.table` adds how it is recognised, read and written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple


def _no(name: str) -> bool:
    return False


def _unknown(*subjects: object) -> None:
    return None


class Format(NamedTuple):
    """One on-disk format.

    Attributes:
        name: as it is in JSON: "dcp", "torch_save", …
        loader: what else loads it, for messages.
        suffixes: what names of its files end with, and names of folders do not.
        is_metadata: whether a file, by the last part of its name, says where everything is: it is written last,
            deleted first, and what `mark` hashes.
        is_own: whether a file of that name belongs to checkpoints of the format.
        rank_of: rank that wrote a file, by its name; None if it does not tell.
        world_size: ranks that saved a checkpoint, by the names of the files its items are in, there or not, and the
            sizes by name of those that are there; None if they do not tell.
        owns_folder: a folder of the format is one checkpoint, with all that lies in it.
        saved_by_ranks: every rank writes files of its own, all at about one time.
        items_apart: each chunk and each object is an item of its own, with a header; else entries may share bytes.
        paths_apart: nested paths are stored beside names, so that the two can disagree.
        keys_as_text: keys of dicts are text in it, whatever they were.
        holds_objects: it can hold what is no tensor.
        holds_empty_dicts: an empty dict is an entry of its own.
        boxes_in_files: only the data files tell which boxes there are: what a missing one held is not known.
        cuts_flat: tensors are cut as flat arrays, which tells nothing of the dimension that ranks should cut.
        pointer: name of a text file beside several checkpoints of the format that says which of them is meant; "" if
            there is none.
        loads_in_torch: `torch.distributed.checkpoint.load` reads it.
    """

    name: str
    loader: str
    suffixes: tuple[str, ...] = ()
    is_metadata: Callable[[str], bool] = _no
    is_own: Callable[[str], bool] = _no
    rank_of: Callable[[str], int | None] = _unknown
    world_size: Callable[[Iterable[str], Mapping[str, int]], int | None] = _unknown
    owns_folder: bool = False
    saved_by_ranks: bool = False
    items_apart: bool = False
    paths_apart: bool = False
    keys_as_text: bool = False
    holds_objects: bool = True
    holds_empty_dicts: bool = True
    boxes_in_files: bool = False
    cuts_flat: bool = False
    pointer: str = ""
    loads_in_torch: bool = False

    def __str__(self) -> str:
        return self.name


class Variant(NamedTuple):
    """What sets one checkpoint apart from others of its format: the software that wrote it does something of its own.

    Attributes:
        stacks_layers: a tensor named for all layers counts them along dimension 0, as Megatron-core's.
        keeps_containers: whole containers are stored as objects on purpose.
        shares_places: the tensors of a file share one place, a blob whose own header says where each is.
        open_shapes: whole shapes are not recorded: files of further shards may be missing without a trace.
    """

    stacks_layers: bool = False
    keeps_containers: bool = False
    shares_places: bool = False
    open_shapes: bool = False


USUAL = Variant()
"""What nobody does otherwise."""
