"""The parameters of ZeRO's flat partitions by name, and what the optimizer keeps for each.

Names are those of zero_to_fp32; the optimizer's are `optim.state.<parameter>.<name>`, as torch's
`get_optimizer_state_dict` has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dcptool.checkpoint.extents import Ints
from dcptool.checkpoint.findings import Finding
from dcptool.checkpoint.regions import flat_boxes, volume
from dcptool.errors import DcptoolError
from dcptool.formats.deepspeed.files import MAX_NUMEL, ModelFile, OptimizerFile, Shapes
from dcptool.formats.deepspeed.naming import FP32, Names, named
from dcptool.formats.deepspeed.partitions import Cuts, Stretch, cut_each, cut_groups, needed, piece_numel
from dcptool.formats.torch_save.build import StoredBox
from dcptool.pickles.tensors import TensorView, part_of, tensor_view
from dcptool.words import plural

_STEP_NBYTES = 16
_MIXED = "The files are damaged, or of two saves; resume from another step."


def add_trained(
    names: Names, model: ModelFile, optimizers: Mapping[int, OptimizerFile], world_size: int, stage: int
) -> None:
    """Add the parameters that ranks' flat partitions hold, with the optimizer's state of each.

    Args:
        names: to be added to.
        model: a file of the model; all say the same.
        optimizers: by rank, of those that are there.
        world_size: how many ranks saved.
        stage: of ZeRO.
    """
    ranks = sorted(optimizers)
    first = optimizers[ranks[0]]
    groups = model.groups
    n_flat = len(first.flat[FP32])
    if stage < 3 and n_flat != len(groups):
        said = f"{plural(len(groups), 'group')} of parameters, {first.file.name} {n_flat}"
        names.problems.append(_bad(f"{model.file.name} names {said}", first.file.name))
        return
    layout = _layout(names, model, optimizers, world_size, stage)
    if layout is None:
        return
    flats = _sound(names, optimizers, layout, stage)
    for group, shapes in enumerate(groups):
        for name, shape in shapes.items():
            parts = layout.parts[group, name]
            for kind, views in flats.items():
                at = parts[0].group if parts else group
                if kind == FP32 or any(at in one.flat.get(kind, {}) for one in optimizers.values()):
                    _add(names, kind, name, shape, parts, views, optimizers)
            for kind in first.single:
                _add_single(names, kind, name, group, first)
    if stage < 3:
        _compare_slices(names, groups, layout, optimizers)


def _layout(
    names: Names, model: ModelFile, optimizers: Mapping[int, OptimizerFile], world_size: int, stage: int
) -> Cuts | None:
    """Return where everything lies, None if there is more or less in the partitions than the shapes take."""
    ranks, first = sorted(optimizers), optimizers[min(optimizers)]
    if stage >= 3:
        sizes = [volume(view.shape) for _, view in sorted(first.flat[FP32].items())]
        wanted = sum(piece_numel(volume(shape), world_size) for shapes in model.groups for shape in shapes.values())
        if wanted != sum(sizes):
            said = f"{first.file.name} holds {sum(sizes):,} elements of parameters; their shapes take {wanted:,}"
            names.problems.append(_bad(f"{said} of each of {plural(world_size, 'rank')}", first.file.name))
            return None
        return cut_each(model.groups, sizes, world_size, ranks)
    partitions = []
    for group, shapes in enumerate(model.groups):
        sizes = [volume(view.shape) for one in optimizers.values() for views in one.flat.values()
                 if (view := views.get(group))]  # fmt: skip
        partition = max(sizes, default=0)
        free = first.alignments[group] if first.alignments and group < len(first.alignments) else ()
        wanted, unit = needed(shapes, free), 2 * world_size  # to which groups are padded
        if wanted > MAX_NUMEL or -(-wanted // unit) != -(-(partition * world_size) // unit):
            said = f"group {group}: {plural(world_size, 'partition')} of {partition:,} elements do not add up to"
            names.problems.append(_bad(f"{said} the {wanted:,} of its parameters' shapes", first.file.name))
            return None
        partitions.append(partition)
    alignments = first.alignments
    if alignments is not None and [len(free) for free in alignments] != [len(shapes) for shapes in model.groups]:
        names.problems.append(_bad("paddings are recorded for other parameters than there are", first.file.name))
        return None
    return cut_groups(model.groups, partitions, ranks, alignments)


_Flats = dict[str, dict[int, dict[int, TensorView]]]
"""Name → rank → group → flat part."""


def _sound(names: Names, optimizers: Mapping[int, OptimizerFile], layout: Cuts, stage: int) -> _Flats:
    """Return the flat parts that have the length they should: of stages 1 and 2 the padding may be cut off."""
    flats: _Flats = {}
    for rank, one in optimizers.items():
        for kind, views in one.flat.items():
            mine = flats.setdefault(kind, {}).setdefault(rank, {})
            for group, used in enumerate(layout.used):
                view, most = views.get(group), layout.partition[group]
                least = most if stage >= 3 else used[rank]
                if view is not None and len(view.shape) == 1 and least <= view.shape[0] <= most:
                    mine[group] = view
                elif view is not None or kind == FP32:
                    have = list(view.shape) if view else "no tensor"
                    said = f"{one.file.name}: {kind} of group {group} is {have}, it should have {most:,} elements"
                    names.problems.append(_bad(said, one.file.name))
    return flats


def _add(
    names: Names,
    kind: str,
    name: str,
    shape: Ints,
    parts: Sequence[Stretch],
    views: Mapping[int, Mapping[int, TensorView]],
    optimizers: Mapping[int, OptimizerFile],
) -> None:
    """Add one tensor of flat parts: a parameter, or what the optimizer keeps for it."""
    pieces: list[StoredBox] = []
    dtype = next((view.dtype for by_group in views.values() for view in by_group.values()), "float32")
    for part in parts:
        view = views.get(part.rank, {}).get(part.group)
        if view is None:
            continue
        file = optimizers[part.rank].file.name
        if view.dtype != dtype:
            message = f"{kind} of {name!r} is {dtype} in other files and {view.dtype} in {file}; left out"
            names.problems.append(Finding.of("parts-disagree", message, file, name))
            continue
        try:
            pieces += cut_piece(file, view, shape, part.start, part.first, part.numel)
        except DcptoolError as error:
            names.problems.append(_bad(f"{kind} of {name!r} in {file}: {error.message}", file))
    names.add_tensor(*named(kind, name), dtype, shape, pieces)


def cut_piece(file: str, view: TensorView, shape: Ints, start: int, first: int, numel: int) -> list[StoredBox]:
    """Return boxes of a tensor that are elements of a flat view.

    Args:
        file: that holds the view.
        view: contiguous.
        shape: of the tensor.
        start: first element in the view.
        first, numel: first element in the flattened tensor, and how many.

    Raises:
        ItemError: they do not lie in the view, or it is strided.
    """
    pieces = []
    for offsets, sizes in flat_boxes(shape, first, first + numel):
        pieces.append(StoredBox(file, offsets, part_of(view, start, sizes)))
        start += volume(sizes)
    return pieces


def _add_single(names: Names, kind: str, name: str, group: int, one: OptimizerFile) -> None:
    value: Any = one.single[kind].get(group)
    if value is not None:
        names.add_value(*named(kind, name), value, one.file)


def _compare_slices(
    names: Names, groups: Sequence[Shapes], layout: Cuts, optimizers: Mapping[int, OptimizerFile]
) -> None:
    """Compare where parameters lie, by their shapes, with what each rank recorded of it."""
    ours: dict[tuple[int, int], dict[str, tuple[int, int]]] = {}
    for (group, name), parts in layout.parts.items():
        for part in parts:
            ours.setdefault((part.rank, group), {})[name] = part.numel, part.start
    for rank, one in optimizers.items():
        for group in range(min(len(groups), len(one.slices or ()))):
            said, known = (one.slices or [])[group], ours.get((rank, group), {})
            if {name: place for name, place in said.items() if place[0]} != known:
                name = next(iter({*said.items()} ^ {*known.items()}))[0]
                message = f"{one.file.name} has {name!r} of group {group} elsewhere than the shapes of parameters say"
                names.problems.append(_bad(message, one.file.name))
                return


def steps_of(one: OptimizerFile) -> bytes | int | None:
    """Return the steps that a rank's optimizer has taken, as far as its first group tells."""
    for value in one.single.get("step", {}).values():
        view = value if isinstance(value, int) else tensor_view(value)
        if isinstance(view, int):
            return view
        if view is not None and view.storage_nbytes <= _STEP_NBYTES:
            try:
                return one.file.archive.content(f"data/{view.storage}", _STEP_NBYTES)
            except DcptoolError:  # the item's own check says why
                return None
    return None


def _bad(message: str, file: str) -> Finding:
    return Finding.of("bad-partition", message, file, next_step=_MIXED)
