"""A folder of rank files as one checkpoint: the model by its names, the optimizer under `optim.`, the rest by rank."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.extents import Ints
from dcptool.checkpoint.findings import Finding
from dcptool.errors import DcptoolError
from dcptool.formats.rank_files.format import EXTRA, MODEL, OPTIM, RANK_FILES, RankFile, named
from dcptool.formats.rank_files.optimizer import Parameter, names_of
from dcptool.formats.torch_save.build import Builder
from dcptool.formats.torch_save.files import TorchFile
from dcptool.formats.torch_save.flatten import Path, key_text, leaves, mapping_of
from dcptool.formats.torch_save.ranks import RankValue, add_joined, by_path, load_files
from dcptool.pickles.sharded import Sharded, sharded_tensor
from dcptool.pickles.tensors import TensorView, tensor_view
from dcptool.storage import Storage
from dcptool.words import listed, plural

_STATE, _GROUPS, _PARAMS = "state", "param_groups", "params"
_MAX_NAMED = 3


def open_rank_files(storage: Storage, files: Mapping[str, int], name: str = "") -> Checkpoint:
    """Open the files of all ranks in a folder; of saves of several world sizes the largest counts.

    Args:
        storage: the folder.
        files: name → size in bytes of what is in it.
        name: "", the folder.

    Raises:
        StorageError: the folder cannot be read.
    """
    found = [file for file in map(named, files) if file]
    world_size = max(file.world_size for file in found if file.kind == MODEL)
    ours = [file for file in found if file.world_size == world_size]
    kinds = [kind for kind in (MODEL, OPTIM, EXTRA) if any(file.kind == kind for file in ours)]
    loaded, problems = load_files(storage, files, _expected(kinds, world_size))
    builder = Builder(storage, loaded.values())
    builder.problems += problems
    builder.problems += _others(found, world_size, files)
    by_kind = {kind: [file for file in loaded.values() if _kind(file) == kind] for kind in kinds}
    model, wrong = by_path(by_kind[MODEL])
    builder.problems += wrong
    for path, values in model.items():
        add_joined(builder, ".".join(map(str, path)) or MODEL, path, values)
    if by_kind.get(OPTIM):
        _add_optimizer(builder, by_kind[OPTIM], _parameters(model))
    for file in by_kind.get(EXTRA, ()):
        _add_extra(builder, file)
    evidence = (f"{', '.join(kinds)} of {plural(world_size, 'rank')}",)
    own = {name: nbytes for name, nbytes in files.items() if named(name)}
    return builder.checkpoint("", RANK_FILES, "a file per rank, as verl and SkyRL save", evidence, own)


def _kind(file: TorchFile) -> str:
    known = named(file.name)
    return known.kind if known else ""


def _rank_word(file: TorchFile) -> str:
    known = named(file.name)
    return f"rank{known.rank if known else 0}"


def _expected(kinds: Iterable[str], world_size: int) -> list[str]:
    return [RankFile(kind, world_size, rank).name for kind in kinds for rank in range(world_size)]


def _others(found: Sequence[RankFile], world_size: int, files: Mapping[str, int]) -> list[Finding]:
    """Note files of other world sizes: of another save, or of no save that is whole."""
    left = [file.name for file in found if file.world_size != world_size]
    if not left:
        return []
    message = f"{listed(left, 1)} of another number of ranks than {world_size:,}: not read"
    return [Finding.of("leftover-files", message, left[0])]


def _parameters(model: Mapping[Path, Sequence[RankValue]]) -> list[Parameter]:
    """Return the tensors of a model that may be parameters: those that are cut over ranks, if any is."""
    cut, whole = [], []
    for path, values in model.items():
        fqn = ".".join(map(str, path))
        try:
            view = tensor_view(values[0].value)
            parts = [sharded_tensor(one.value) for one in values] if view is None else []
        except DcptoolError:
            continue
        if view is not None:
            whole.append(Parameter(fqn, view.shape, (values[0].file.name, view) if _holds_values(view) else fqn))
        elif (first := parts[0]) is not None:
            held = [(one.file.name, part.pieces) for one, part in zip(values, parts, strict=True) if part]
            places = [(name, views) for name, views in held if any(_holds_values(view) for _, view in views)]
            cut.append(Parameter(fqn, first.shape, places[0] if places else fqn))
    return cut or whole


def _holds_values(view: TensorView) -> bool:
    return 0 not in view.shape


def _add_optimizer(builder: Builder, files: Sequence[TorchFile], parameters: Sequence[Parameter]) -> None:
    """Add an optimizer's state under the names of parameters, as torch's `get_optimizer_state_dict` flattens it."""
    state: dict[tuple[int, str], list[RankValue]] = {}
    for file in files:
        for number, values in _items(_items(file.root).get(_STATE)).items():
            for key, value in _items(values).items():
                if type(number) is int:
                    state.setdefault((number, key_text(key)), []).append(RankValue(file, value))
    groups = [dict(_items(group)) for group in _list(_items(files[0].root).get(_GROUPS))]
    numbers = [[number for number in _list(group.get(_PARAMS)) if type(number) is int] for group in groups]
    shapes, whole = _shapes(state)
    names = names_of(parameters, numbers, shapes)
    if whole and (names is None or not whole <= set(shapes)):
        builder.problems.append(_unread(files))
        for file in files:
            rank = _rank_word(file)
            builder.add_value(f"{OPTIM}.{rank}", (OPTIM, rank), file.root, file)
        return
    if names is None:
        names = {number: str(number) for group in numbers for number in group}
        builder.problems.append(_unnamed(files))
    for (number, key), values in state.items():
        flat = f"{_STATE}.{names.get(number, number)}.{key}"
        add_joined(builder, f"{OPTIM}.{flat}", (OPTIM, flat), values)
    for group, members in zip(groups, numbers, strict=True):
        for number, (key, value) in itertools.product(members, group.items()):
            if key != _PARAMS:
                flat = f"{_GROUPS}.{names[number]}.{key_text(key)}"
                builder.add_value(f"{OPTIM}.{flat}", (OPTIM, flat), value, files[0])


def _shapes(state: Mapping[tuple[int, str], Sequence[RankValue]]) -> tuple[dict[int, Ints], set[int]]:
    """Return the shapes that state tensors have, by number, where they agree; and whose are not cut over ranks."""
    shapes: dict[int, set[Ints]] = {}
    whole: set[int] = set()
    for (number, _), values in state.items():
        for one in values:
            try:
                found: TensorView | Sharded | None = tensor_view(one.value) or sharded_tensor(one.value)
            except DcptoolError:
                continue
            if found is not None and found.shape:
                shapes.setdefault(number, set()).add(found.shape)
                if isinstance(found, TensorView):
                    whole.add(number)
    return {number: next(iter(found)) for number, found in shapes.items() if len(found) == 1}, whole


def _unread(files: Sequence[TorchFile]) -> Finding:
    message = f"the optimizer in {plural(len(files), 'file')} such as {files[0].name} is not looked into: its state is "
    message += "flat pieces without names, as FSDP1 keeps it; which parameter they are of is written nowhere"
    step = "The model is read, each rank's optimizer is one object. To have its tensors, load it in a job of FSDP1 on "
    step += "as many ranks, and save it with dcp.save."
    return Finding.of("optimizer-not-read", message, files[0].name, next_step=step)


def _unnamed(files: Sequence[TorchFile]) -> Finding:
    message = f"which parameters the numbers in the optimizer's state are cannot be told for certain ({files[0].name})"
    step = "Its entries keep the numbers; parameters of one shape are in several groups, or are not all trained."
    return Finding.of("optimizer-unnamed", message, files[0].name, next_step=step)


def _add_extra(builder: Builder, file: TorchFile) -> None:
    """Add what a rank has of its own, under names that say the rank."""
    rank = _rank_word(file)
    try:
        for path, value in leaves(file.root, file.pickle_nbytes):
            builder.add_value(".".join(map(str, (EXTRA, rank, *path))), (EXTRA, rank, *path), value, file)
    except DcptoolError as error:
        builder.problems.append(Finding.of("bad-file", f"{file.name}: {error}", file.name))


def _items(value: Any) -> Mapping[Any, Any]:
    return mapping_of(value) or {}


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else []
