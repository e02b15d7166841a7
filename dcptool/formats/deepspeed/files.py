"""What DeepSpeed's files of the model and of the optimizer say, as values; tensors stay views of their storages.

Source: deepspeed 0.19.8, runtime/engine.py, _save_checkpoint; runtime/zero/stage_1_and_2.py and stage3.py, state_dict;
runtime/bf16_optimizer.py, state_dict; utils/zero_to_fp32.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from dcptool.checkpoint.extents import Ints
from dcptool.checkpoint.findings import Finding
from dcptool.checkpoint.kinds import Severity
from dcptool.checkpoint.regions import volume
from dcptool.errors import DcptoolError, MetadataError, RunsCodeError, StorageError
from dcptool.formats.torch_save.files import TorchFile, load_file
from dcptool.formats.torch_save.flatten import mapping_of
from dcptool.pickles import plain
from dcptool.pickles.standins import Node
from dcptool.pickles.tensors import TensorView, tensor_view
from dcptool.storage import Storage

MAX_NUMEL = 1 << 59
"""Elements of a parameter or of what ranks hold together; more is no tensor."""
_LAYOUT = {
    "module", "buffer_names", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params",
}  # fmt: skip
_OFTEN_NONE = {"optimizer", "lr_scheduler", "data_sampler", "random_ltd"}
_PARTS = {
    "base_optimizer_state", "optimizer_state_dict", "single_partition_of_fp32_groups", "fp32_flat_groups",
    "param_slice_mappings", "group_paddings", "param_alignment_paddings", "partition_count", "param_groups",
}  # fmt: skip

Shapes = dict[str, Ints]


class ModelFile(NamedTuple):
    """A file of the model.

    Attributes:
        file: the file.
        module: its state dict, whatever is in it.
        buffers: names in it that are no parameters.
        groups: of each flat group of the optimizer the shapes of its parameters, in their order.
        frozen: shapes of parameters that are not trained, where they are recorded.
        fragments: what this rank has of these.
        shared: a parameter's further names → the one it is stored as.
        world_size: data-parallel ranks, None if it does not tell.
        step: steps taken, None if it does not tell.
        stage: of ZeRO, by its configuration, None if that does not tell.
        rest: what else is in it, by key.
    """

    file: TorchFile
    module: Mapping[Any, Any]
    buffers: frozenset[str]
    groups: list[Shapes]
    frozen: Shapes
    fragments: Mapping[Any, Any]
    shared: dict[str, str]
    world_size: int | None
    step: int | None
    stage: int | None
    rest: dict[Any, Any]


class OptimizerFile(NamedTuple):
    """A rank's file of the optimizer.

    Attributes:
        file: the file.
        stage: of ZeRO; 1 where it does not tell, as BF16_Optimizer does not.
        world_size: ranks that hold the parts, None if it does not tell.
        flat: name → for each group this rank's flat part: "fp32" are the parameters, the others the optimizer's.
        single: name → for each group what is no flat part: the steps.
        settings: of each of torch's parameter groups; `params` are its flat groups.
        slices: of each group, parameter → (elements, first of them in the flat part), if recorded.
        alignments: of each group the elements left free behind each parameter, None if not recorded.
        rest: what else is in it, by key: of the loss scaler and the like.
    """

    file: TorchFile
    stage: int
    world_size: int | None
    flat: dict[str, dict[int, TensorView]]
    single: dict[str, dict[int, Any]]
    settings: list[Mapping[Any, Any]]
    slices: list[dict[str, tuple[int, int]]] | None
    alignments: list[list[int]] | None
    rest: dict[Any, Any]


def load_all(
    storage: Storage, sizes: Mapping[str, int], names: Sequence[str], problems: list[Finding]
) -> list[TorchFile]:
    """Load files of torch.save; of those that cannot be loaded say why."""
    loaded = []
    for name in names:
        try:
            loaded.append(load_file(storage, name, sizes[name]))
        except RunsCodeError as error:
            problems.append(Finding.of("unsafe-pickle", str(error), name))
        except StorageError:
            raise
        except DcptoolError as error:
            message = error.message.removeprefix(f"{storage.root}/")
            problems.append(Finding.of(_what(storage, name, sizes[name]), message, name, next_step=_AGAIN))
    return loaded


_ZIP, _END, _END_NBYTES = b"PK\x03\x04", b"PK\x05\x06", 22
_TAIL_NBYTES = 1024
"""Read to find the end of a zip's directory, which zeros may follow."""
_AGAIN = "Copy it again from where it was saved, or resume from another step."


def _what(storage: Storage, name: str, nbytes: int) -> str:
    """Return whether a file that is no whole zip is cut short, or something else."""
    if not nbytes:
        return "short-file"
    is_zip = storage.read(name, 0, min(nbytes, len(_ZIP))) == _ZIP
    tail = storage.read(name, max(0, nbytes - _TAIL_NBYTES), min(nbytes, _TAIL_NBYTES))
    return "short-file" if is_zip and _END not in tail[: len(tail) - _END_NBYTES + len(_END)] else "bad-file"


def model_file(file: TorchFile) -> ModelFile:
    """Return what a file of the model says.

    Raises:
        MetadataError: it is no such file.
    """
    root = mapping_of(file.root)
    if root is None or "module" not in root:
        raise MetadataError(f"{file.name} has no 'module': it is no file of a model that DeepSpeed wrote")
    groups = root.get("param_shapes")
    config = _mapping(_mapping(root.get("ds_config")).get("zero_optimization"))
    counts = _count(config.get("mics_shard_size")) or _count(root.get("dp_world_size"))
    return ModelFile(
        file,
        _mapping(root["module"]),
        frozenset(name for name in _list(root.get("buffer_names")) if isinstance(name, str)),
        [_shapes(group, file.name) for group in _list(groups)],
        _shapes(root.get("frozen_param_shapes"), file.name),
        _mapping(root.get("frozen_param_fragments")),
        {a: b for a, b in _mapping(root.get("shared_params")).items() if isinstance(a, str) and isinstance(b, str)},
        counts,
        _count(root.get("global_steps")),
        _count(config.get("stage")),
        {k: v for k, v in root.items() if k not in _LAYOUT and not (v is None and k in _OFTEN_NONE)},
    )


def optimizer_file(file: TorchFile) -> OptimizerFile:
    """Return what a rank's file of the optimizer says.

    Raises:
        MetadataError: it is no such file.
        ItemError: a tensor in it makes no sense.
    """
    root = _mapping(mapping_of(file.root)).get("optimizer_state_dict")
    state = mapping_of(root)
    if state is None:
        raise MetadataError(f"{file.name} has no 'optimizer_state_dict': it is no file of ZeRO's")
    parts = state.get("fp32_flat_groups", state.get("single_partition_of_fp32_groups"))
    if not isinstance(parts, list):
        raise MetadataError(f"{file.name} has no flat groups of fp32 parameters")
    flat = {"fp32": {at: view for at, part in enumerate(parts) if (view := tensor_view(part))}}
    single: dict[str, dict[int, Any]] = {}
    base = state.get("optimizer_state_dict", state.get("base_optimizer_state"))
    inner = mapping_of(base)
    groups = base if isinstance(base, list) else _mapping((inner or {}).get("state"))
    for at, group in groups.items() if isinstance(groups, Mapping) else enumerate(groups):
        for name, value in _mapping(group).items():
            view = tensor_view(value)
            kept: dict[int, Any] = (flat if view and view.shape else single).setdefault(str(name), {})
            if type(at) is int and name != "fp32":
                kept[at] = view if view and view.shape else value
    counts = state.get("partition_count")
    known = [count for one in (counts if isinstance(counts, list) else [counts]) if (count := _count(one))]
    slices, alignments = state.get("param_slice_mappings"), state.get("param_alignment_paddings")
    return OptimizerFile(
        file,
        enumerated(state.get("zero_stage")) or (3 if "fp32_flat_groups" in state else 1),
        max(known, default=None),
        flat,
        single,
        [_mapping(group) for group in _list((inner or {}).get("param_groups", state.get("param_groups")))],
        [_slices(group) for group in slices] if isinstance(slices, list) else None,
        [[_count(n) or 0 for n in _list(group)] for group in alignments] if isinstance(alignments, list) else None,
        rest_of(state),
    )


def rest_of(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return what an optimizer's state holds beside tensors and their layout, instances as their attributes."""
    return {key: _unwrapped(value) for key, value in state.items() if key not in _PARTS}


def _unwrapped(value: Any) -> Any:
    """Return an instance of a plain class of DeepSpeed's as a dict, one of its enums as its value."""
    if isinstance(value, Node) and not value.called and isinstance(value.state, dict) and value.items is None:
        return value.state
    return value if (number := enumerated(value)) is None else number


def enumerated(value: Any) -> int | None:
    """Return a number, or the number that an enum's member stands for."""
    if isinstance(value, Node) and value.called and len(value.args) == 1:
        value = value.args[0]
    return _count(value)


def _slices(group: Any) -> dict[str, tuple[int, int]]:
    found = {}
    for name, address in _mapping(group).items():
        state = address.state if isinstance(address, Node) and isinstance(address.state, dict) else {}
        found[str(name)] = (_count(state.get("numel")) or 0, _count(state.get("start")) or 0)
    return found


def _shapes(group: Any, file: str) -> Shapes:
    shapes = {}
    for name, size in _mapping(group).items():
        try:
            shape = plain.decode(size)
        except (DcptoolError, ValueError):
            shape = None
        if not isinstance(name, str) or not isinstance(shape, tuple) or not all(map(_is_count, shape)):
            raise MetadataError(f"{file} gives no valid shape for parameter {str(name)[:200]!r}")
        if volume(shape) > MAX_NUMEL:
            raise MetadataError(f"{file} gives {name!r} the shape {list(shape)}, which no tensor has")
        shapes[name] = tuple(shape)
    return shapes


def _mapping(value: Any) -> Mapping[Any, Any]:
    found = mapping_of(value)
    return found if found is not None else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < MAX_NUMEL


def _count(value: Any) -> int | None:
    return value if _is_count(value) else None


def same_save(files: Sequence[Any], what: Callable[[Any], Any], words: str) -> list[Finding]:
    """Return a finding if files do not say the same of something that is one for all; None is no word on it."""
    said = [(file.file.name, value) for file in files if (value := what(file)) is not None]
    for name, value in said[1:]:
        if value != said[0][1]:
            message = f"{words} {_brief(said[0][1])} in {said[0][0]} and {_brief(value)} in {name}"
            step = "Files of two saves lie together; resume from another step."
            return [Finding.of("ranks-disagree", message, name, next_step=step, severity=Severity.ERROR)]
    return []


def _brief(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else "others" if isinstance(value, list | dict) else str(value)
