"""A folder of DeepSpeed's into a `Checkpoint`: a step of ZeRO 1 to 3, one without ZeRO, or a universal one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.findings import Finding
from dcptool.checkpoint.regions import volume
from dcptool.errors import DcptoolError, MetadataError, UnsupportedError
from dcptool.formats.deepspeed import universal
from dcptool.formats.deepspeed.files import ModelFile, OptimizerFile, load_all, model_file, optimizer_file, same_save
from dcptool.formats.deepspeed.format import DEEPSPEED, models, optimizers
from dcptool.formats.deepspeed.naming import Names
from dcptool.formats.deepspeed.partitions import piece_numel
from dcptool.formats.deepspeed.zero import add_trained, cut_piece, steps_of
from dcptool.formats.torch_save.build import Builder, StoredBox
from dcptool.formats.torch_save.files import TorchFile
from dcptool.pickles.tensors import TensorView, tensor_view
from dcptool.storage import Storage
from dcptool.words import listed, plural

_T = TypeVar("_T", ModelFile, OptimizerFile)
_MAX_NAMED = 3
_GATHER = "Copy the files of all nodes here (or name their folders with --also), or resume from another step."
_EXPERTS = ("ds_autoep_layers", "autoep_layers")


def open_deepspeed(storage: Storage, files: Mapping[str, int], name: str = "") -> Checkpoint:
    """Open a folder that DeepSpeed saved: the pickles of all ranks' files are read, no values.

    Args:
        storage: the folder.
        files: name → size in bytes of what is directly in it.
        name: always "".

    Raises:
        MetadataError: what a file says makes no sense.
        UnsupportedError: it holds experts cut in a way that nothing in it tells.
    """
    problems: list[Finding] = []
    params = universal.folders(storage)
    sizes = {**files, **params}
    of_models, of_optimizers = models(files), {} if params else optimizers(files)
    wanted = [*of_models.values(), *of_optimizers.values(), *universal.wanted(params)]
    loaded = {file.name: file for file in load_all(storage, sizes, wanted, problems)}
    model_files = _understood(of_models, loaded, model_file, problems)
    optimizer_files = _understood(of_optimizers, loaded, optimizer_file, problems)
    model = model_files[min(model_files)] if model_files else None
    if model:
        _refuse_experts(model)
    builder = Builder(storage, loaded.values())
    builder.problems += problems
    shared = {a: b for a, b in model.shared.items() if universal.file_of(a) not in params} if model else {}
    names = Names(builder, shared)
    if params:
        flavour = "DeepSpeed universal"
        universal.add_all(names, params, loaded, model)
        settings = universal.settings_of(loaded)
        if settings:
            _add_settings(names, model, settings.groups, settings.rest, settings.file)
    else:
        flavour = _add_zero(names, model_files, optimizer_files, files)
    if model:
        _add_module(names, model)
        names.add_all(model.rest, model.file)
    own = {file: sizes[file] for file in loaded}
    evidence = (plural(len(loaded), "file") + " of torch.save with DeepSpeed's names",)
    return builder.checkpoint("", DEEPSPEED, flavour, evidence, own)


def _understood(
    by_rank: Mapping[int, str],
    loaded: Mapping[str, TorchFile],
    understand: Callable[[TorchFile], _T],
    problems: list[Finding],
) -> dict[int, _T]:
    found = {}
    for rank, name in by_rank.items():
        if name in loaded:
            try:
                found[rank] = understand(loaded[name])
            except DcptoolError as error:
                message = error.message if name in error.message else f"{name}: {error.message}"
                problems.append(Finding.of("bad-file", message, name))
    return found


def _refuse_experts(model: ModelFile) -> None:
    if any(model.rest.get(key) for key in _EXPERTS):
        raise UnsupportedError(
            f"{model.file.name} is of a model with experts that DeepSpeed cut over groups of ranks, which is not read",
            next_step="DeepSpeed's ds_to_universal.py makes a universal checkpoint of it, which dcptool reads.",
        )


def _add_zero(
    names: Names,
    model_files: Mapping[int, ModelFile],
    optimizers: Mapping[int, OptimizerFile],
    files: Mapping[str, int],
) -> str:
    """Add what ranks' files hold together, and return what they are called."""
    model = model_files[min(model_files)] if model_files else None
    first = optimizers[min(optimizers)] if optimizers else None
    stage = first.stage if first else (model.stage if model and model.stage else 0)
    if first:
        world_size = first.world_size or (model.world_size if model else None) or 1 + max(optimizers)
    else:
        world_size = (model.world_size if model else None) or 1
    names.problems += _of_one_save(model_files, optimizers)
    names.problems += _missing(files, world_size, stage, first)
    here = {rank: one for rank, one in optimizers.items() if rank < world_size and one.stage == stage}
    if model and here:
        add_trained(names, model, here, world_size, stage)
    if model:
        _add_frozen(names, model, model_files, world_size, stage)
    if first:
        _add_settings(names, model, first.settings, first.rest, first.file)
    return f"DeepSpeed ZeRO-{stage}" if stage else "DeepSpeed, without ZeRO"


def _of_one_save(model_files: Mapping[int, ModelFile], optimizers: Mapping[int, OptimizerFile]) -> list[Finding]:
    """Return what files say that cannot be of one save."""
    ones, others = list(model_files.values()), list(optimizers.values())
    return [
        *same_save(ones, lambda one: one.step, "the step is"),
        *same_save(ones, lambda one: [list(group.items()) for group in one.groups], "parameters are"),
        *same_save(others, lambda one: one.world_size, "the number of ranks is"),
        *same_save(others, lambda one: one.stage, "the stage of ZeRO is"),
        *same_save(others, lambda one: _step_words(steps_of(one)), "the optimizer's steps are"),
    ]


def _step_words(steps: bytes | int | None) -> int | str | None:
    if isinstance(steps, bytes):
        import struct

        return f"{struct.unpack('<f', steps)[0]:g}" if len(steps) == 4 else steps.hex()
    return steps


def _missing(files: Mapping[str, int], world_size: int, stage: int, first: OptimizerFile | None) -> list[Finding]:
    """Name the files of ranks that are not there."""
    form = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
    if any(name.startswith("bf16_") for name in optimizers(files).values()):
        form = f"bf16_{form}"
    found = []
    if stage or first:
        found += _absent(form, optimizers(files), world_size, "part of the optimizer and of the fp32 parameters")
    if stage >= 3:
        form = "zero_pp_rank_{}_mp_rank_00_model_states.pt"
        found += _absent(form, models(files), world_size, "part of the model")
    elif not models(files):
        message = "mp_rank_00_model_states.pt is missing: it says which parameters there are"
        found.append(Finding.of("missing-file", message, "mp_rank_00_model_states.pt", next_step=_GATHER))
    return found


def _absent(form: str, there: Mapping[int, str], world_size: int, what: str) -> list[Finding]:
    n_absent = world_size - sum(rank < world_size for rank in there)
    if n_absent <= 0:
        return []
    ranks = []
    for rank in range(world_size):
        if rank not in there:
            ranks.append(rank)
        if len(ranks) > _MAX_NAMED:
            break
    named = listed([form.format(rank) for rank in ranks[:_MAX_NAMED]], _MAX_NAMED, counted=False)
    more = f" and {n_absent - _MAX_NAMED:,} more" if n_absent > _MAX_NAMED else ""
    verb = "is" if n_absent == 1 else "are"
    message = f"{named}{more} {verb} missing: each of {plural(world_size, 'rank')} has its {what}"
    return [Finding.of("missing-file", message, form.format(ranks[0]), next_step=_GATHER)]


def _add_frozen(
    names: Names, model: ModelFile, model_files: Mapping[int, ModelFile], world_size: int, stage: int
) -> None:
    """Add parameters that are not trained: whole in stage 2, in equal pieces of all ranks in stage 3."""
    for name, shape in model.frozen.items():
        numel = volume(shape)
        piece = piece_numel(numel, world_size) if stage >= 3 else numel
        pieces: list[StoredBox] = []
        dtype = "float32"
        for rank in sorted(model_files) if stage >= 3 else [min(model_files)]:
            one = model_files[rank]
            count = min(piece, numel - rank * piece)
            if count <= 0:
                continue
            try:
                view = tensor_view(one.fragments.get(name))
                if view is None:
                    raise MetadataError("it is not there")
                dtype = view.dtype if not pieces else dtype
                if view.dtype != dtype or (stage >= 3 and volume(view.shape) != piece):
                    raise MetadataError(f"it is {view.dtype} {list(view.shape)}, not {dtype} [{piece}]")
                pieces += cut_piece(one.file.name, view, shape, 0, rank * piece, count)
            except DcptoolError as error:
                message = f"{one.file.name}: the part of the frozen {name!r}: {error.message}"
                names.problems.append(Finding.of("bad-partition", message, one.file.name, name))
        if pieces or not numel:
            names.add_tensor(name, (name,), dtype, shape, pieces)


def _add_settings(
    names: Names,
    model: ModelFile | None,
    of_groups: Sequence[Mapping[Any, Any]],
    rest: Mapping[Any, Any],
    file: TorchFile,
) -> None:
    """Add torch's parameter groups, with names where they count flat groups, and what else the optimizer has."""
    groups = model.groups if model else []
    for index, settings in enumerate(of_groups):
        counted = settings.get("params")
        numbers = [at for at in counted if type(at) is int] if isinstance(counted, list) else []
        params = [name for at in numbers if 0 <= at < len(groups) for name in groups[at]]
        named = {**settings, "params": params} if groups else dict(settings)
        names.add_all(named, file, ("optim", "param_groups", index))
    names.add_all(rest, file, ("zero",))


def _add_module(names: Names, model: ModelFile) -> None:
    """Add what the model's state dict holds beside the trained parameters: buffers, frozen ones, extra state.

    Of parameters that are there in fp32 the model's own copies are not added, but compared in shape.
    """
    trained = {name: shape for shapes in model.groups for name, shape in shapes.items()}
    copies: list[TensorView] = []
    for name, value in model.module.items():
        name = str(name)
        view = _view(value)
        shape = trained.get(name, model.frozen.get(name))
        if shape is not None and view and view.shape not in (shape, (0,)):
            message = f"{name!r} is {list(view.shape)} in the model, {list(shape)} by its recorded shape"
            names.problems.append(Finding.of("wrong-item", message, model.file.name, name))
        if name in names.taken or shape is not None or model.shared.get(name) in trained:
            copies += [view] if view and volume(view.shape) else []
        else:
            names.add_value(name, (name,), value, model.file)
    if copies:
        kinds = listed(sorted({view.dtype for view in copies}), _MAX_NAMED, counted=False)
        of_module = f"the model's own copies of {plural(len(copies), 'parameter')} in {model.file.name} ({kinds})"
        message = f"{of_module} are left out: the optimizer's in fp32 are read"
        names.problems.append(Finding.of("copies-left-out", message, model.file.name))


def _view(value: Any) -> TensorView | None:
    try:
        return tensor_view(value)
    except DcptoolError:
        return None
