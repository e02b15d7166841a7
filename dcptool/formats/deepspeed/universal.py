"""Universal checkpoints: a folder for each parameter, with a file of it and of each thing the optimizer keeps for it.

Source: deepspeed 0.19.8, checkpoint/ds_to_universal.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from dcptool.checkpoint.findings import Finding
from dcptool.checkpoint.regions import volume
from dcptool.errors import CheckpointNotFoundError, DcptoolError, MetadataError
from dcptool.formats.deepspeed.files import ModelFile, Shapes, rest_of
from dcptool.formats.deepspeed.format import ZERO_FOLDER
from dcptool.formats.deepspeed.naming import FP32, Names, named
from dcptool.formats.deepspeed.zero import cut_piece
from dcptool.formats.torch_save.files import TorchFile
from dcptool.formats.torch_save.flatten import mapping_of
from dcptool.pickles.tensors import tensor_view
from dcptool.storage import Storage
from dcptool.words import listed

_SETTINGS = f"{ZERO_FOLDER}/optimizer_state.pt"
_SUFFIX = ".pt"
_STEP = "step"
_MAX_NAMED = 3
_AGAIN = "Make it again with ds_to_universal.py, or copy the files from where it was made."


def folders(storage: Storage) -> dict[str, int]:
    """Return path → size in bytes of the files below the folder of parameters; none if there is no such folder."""
    try:
        entries = storage.entries(ZERO_FOLDER)
        inner = [entry for entry in entries if entry.is_dir]
        found = [*entries, *(file for folder in inner for file in storage.entries(folder.name))]
    except CheckpointNotFoundError:
        return {}
    return {entry.name: entry.nbytes for entry in found if not entry.is_dir}


def file_of(parameter: str, kind: str = FP32) -> str:
    """Return the path of a parameter's file, or of the one of what the optimizer keeps for it."""
    return f"{ZERO_FOLDER}/{parameter}/{kind}{_SUFFIX}"


def wanted(files: Iterable[str]) -> list[str]:
    """Return the files that are read."""
    return sorted(name for name in files if name.endswith(_SUFFIX))


class Settings(NamedTuple):
    """What the optimizer's own file says.

    Attributes:
        file: the file.
        groups: settings of each of torch's parameter groups.
        steps: of each flat group the steps taken; of ZeRO-3 they are nowhere else.
        rest: what else is in it, by key.
    """

    file: TorchFile
    groups: list[Mapping[Any, Any]]
    steps: dict[int, Any]
    rest: dict[Any, Any]


def settings_of(loaded: Mapping[str, TorchFile]) -> Settings | None:
    """Return what the optimizer's own file says, None if there is none."""
    file = loaded.get(_SETTINGS)
    state = mapping_of(file.root) if file else None
    if file is None or state is None:
        return None
    inner = mapping_of(state.get("optimizer_state_dict")) or {}
    groups = state.get("param_groups", inner.get("param_groups"))
    by_group = (mapping_of(inner.get("state")) or {}).items()
    steps = {at: step for at, one in by_group if (step := (mapping_of(one) or {}).get(_STEP)) is not None}
    found = [mapping_of(group) or {} for group in groups] if isinstance(groups, list) else []
    return Settings(file, found, steps, rest_of(state))


def add_all(names: Names, files: Mapping[str, int], loaded: Mapping[str, TorchFile], model: ModelFile | None) -> None:
    """Add what the files hold, and say which are missing.

    Args:
        names: to be added to.
        files: all below the folder of parameters.
        loaded: those that could be loaded, and others.
        model: says which parameters there are.
    """
    trained = {name: shape for shapes in (model.groups if model else []) for name, shape in shapes.items()}
    shapes = {**(model.frozen if model else {}), **trained}
    kinds: dict[str, set[str]] = {}
    for path in wanted(files):
        parameter, kind = _split(path)
        if parameter:
            kinds.setdefault(parameter, set()).add(kind)
    names.problems += _missing(kinds, trained)
    settings = settings_of(loaded)
    for parameter, found in kinds.items():
        for kind in sorted(found, key=lambda kind: (kind != FP32, kind)):
            file = loaded.get(file_of(parameter, kind))
            if file:
                _add(names, parameter, kind, file, shapes)
    for group, of_group in enumerate(model.groups if model and settings else []):
        for parameter in of_group:
            if settings and group in settings.steps and _STEP not in kinds.get(parameter, {_STEP}):
                names.add_value(*named(_STEP, parameter), settings.steps[group], settings.file)


def _split(path: str) -> tuple[str, str]:
    parameter, _, kind = path.removeprefix(f"{ZERO_FOLDER}/").rpartition("/")
    return parameter, kind.removesuffix(_SUFFIX)


def _missing(kinds: Mapping[str, set[str]], trained: Shapes) -> list[Finding]:
    """Name the files that parameters lack: of all the parameter itself, of trained ones what others have."""
    moments = set().union(*kinds.values()) - {FP32, _STEP} if kinds else set()
    absent = []
    for parameter in {**trained, **kinds}:
        has = kinds.get(parameter, set())
        needs = moments if parameter in trained or has - {FP32} else set()
        absent += [file_of(parameter, kind) for kind in sorted({FP32, *needs} - has)]
    if not absent:
        return []
    verb = "is" if len(absent) == 1 else "are"
    message = f"{listed(absent, _MAX_NAMED)} {verb} missing"
    return [Finding.of("missing-file", message, absent[0], next_step=_AGAIN)]


def _add(names: Names, parameter: str, kind: str, file: TorchFile, shapes: Shapes) -> None:
    """Add a tensor, which may be flat; its shape is then that of the parameter."""
    root = mapping_of(file.root)
    value = file.root if root is None else root.get("param")
    fqn, path = named(kind, parameter)
    try:
        view = tensor_view(value)
        if view is None and kind != _STEP:
            raise MetadataError("there is no tensor in it")
        shape = shapes.get(parameter)
        if view is None or not view.shape or shape is None or kind == _STEP:
            names.add_value(fqn, path, value, file)
            return
        if view.shape not in (shape, (volume(shape),)):
            raise MetadataError(f"it is {list(view.shape)}, the parameter {list(shape)}")
        names.add_tensor(fqn, path, view.dtype, shape, cut_piece(file.name, view, shape, 0, 0, volume(shape)))
    except DcptoolError as error:
        names.problems.append(Finding.of("bad-partition", f"{file.name}: {error.message}", file.name, fqn))
