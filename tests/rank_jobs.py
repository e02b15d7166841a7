"""Real jobs under gloo that leave a file per rank, as verl does, and what torch itself says of what they hold."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

SHAPES = ((35, 12), (4,), (1, 3), (7, 5, 2), (2, 0))
PLACEMENTS = [
    (first, second) for first in (Replicate(), Shard(0), Shard(-1)) for second in (Replicate(), Shard(0), Shard(1))
]


class Model(torch.nn.Module):
    """An uneven embedding, a bias, buffers, and two layers of which one may be cut in columns, the other in rows."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(rows, 6)
        self.norm = torch.nn.BatchNorm1d(6)
        self.up = torch.nn.Linear(6, 8)
        self.down = torch.nn.Linear(8, 6, bias=False)


def model_of(tensor_parallel: Any = None, rows: int = 35) -> Model:
    """Return the model with its first weights."""
    torch.manual_seed(0)
    model = Model(rows)
    if tensor_parallel is not None:
        parallelize_module(model, tensor_parallel, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Take one step with gradients that depend on the number and the parameter alone."""
    for index, parameter in enumerate(model.parameters()):
        torch.manual_seed(1000 * number + index)
        gradient = torch.randn(parameter.shape)
        if isinstance(parameter, DTensor):
            gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
        parameter.grad = gradient
    optimizer.step()


def save_verl(folder: Path, rank: int, world: int, model: Any, optimizer: Any) -> None:
    """Write the three files of a rank."""
    tail = f"world_size_{world}_rank_{rank}.pt"
    torch.save(model.state_dict(), folder / f"model_{tail}")
    torch.save(optimizer.state_dict(), folder / f"optim_{tail}")
    torch.save(
        {"lr_scheduler": {"last_epoch": 3}, "rng": {"cpu": torch.get_rng_state()}}, folder / f"extra_state_{tail}"
    )


def whole(value: Any) -> Any:
    """A tensor as all ranks together have it."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def save_layouts(rank: int, folder: Path) -> dict[str, Any]:
    """Save DTensors of every placement on a 2 × 2 mesh; return whole tensors and this rank's boxes, as torch says."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    state, wholes, boxes = {}, {}, {}
    for shape in SHAPES:
        for first, second in PLACEMENTS:
            placements = [p if not isinstance(p, Shard) or p.dim < len(shape) else Replicate() for p in (first, second)]
            torch.manual_seed(len(state))
            full = torch.randn(shape)
            name = f"{list(shape)} {first} {second}"
            state[name] = distribute_tensor(full, mesh, placements)
            local, offset = compute_local_shape_and_global_offset(torch.Size(shape), mesh, state[name].placements)
            boxes[name] = (tuple(offset), tuple(local))
            wholes[name] = full
    torch.save(state, folder / f"model_world_size_4_rank_{rank}.pt")
    return {"boxes": boxes, "wholes": {name: full.numpy() for name, full in wholes.items()}}


def save_partial(rank: int, folder: Path) -> None:
    """Save a tensor of which each rank has a summand, and one that is none."""
    mesh = init_device_mesh("cpu", (2,))
    summand = DTensor.from_local(torch.ones(3), mesh, [Partial()], run_check=False)
    torch.save(
        {"sum": summand, "w": distribute_tensor(torch.ones(4), mesh, [Shard(0)])},
        folder / f"model_world_size_2_rank_{rank}.pt",
    )


def train_and_save(rank: int, folder: Path, kind: str, rows: int = 35) -> dict[str, Any]:
    """Train on four ranks, save verl's files; return all tensors, whole, and the tensors after two steps more.

    Args:
        rank: of this process.
        folder: to save to.
        kind: "fsdp", "hsdp" or "2d", which is FSDP2 over tensor parallelism.
        rows: of the embedding.
    """
    world = dist.get_world_size()
    if kind == "fsdp":
        mesh, model = init_device_mesh("cpu", (world,)), model_of(rows=rows)
    else:
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("outer", "inner"))
        model = model_of(mesh["inner"] if kind == "2d" else None, rows=rows)
        mesh = mesh["outer"] if kind == "2d" else mesh
    for layer in (model.embed, model.up, model.down):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for number in range(3):
        step(model, optimizer, number)
    save_verl(folder, rank, world, model, optimizer)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    tensors = {name: whole(value).clone() for name, value in get_model_state_dict(model).items()}
    for name, value in get_optimizer_state_dict(model, optimizer, options=flat).items():
        tensors[f"optim.{name}"] = whole(value).clone() if torch.is_tensor(value) else value
    for number in (3, 4):
        step(model, optimizer, number)
    after = {name: whole(value).clone().numpy() for name, value in get_model_state_dict(model).items()}
    saved = {name: value.numpy() if torch.is_tensor(value) else value for name, value in tensors.items()}
    return {"saved": saved, "after": after}


def save_llama(rank: int, folder: Path) -> None:
    """Save the model of a tiny Llama on every rank, cut by FSDP2, with what describes it beside, as verl does."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=12, intermediate_size=22, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1,
        vocab_size=35, max_position_embeddings=32, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    if rank == 0:
        config.save_pretrained(folder / "huggingface")
        torch.save(model(torch.arange(9)[None]).logits.detach(), folder / "logits.pt")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    save_verl(folder, rank, dist.get_world_size(), model, torch.optim.AdamW(model.parameters()))


def logits_of(_: int, folder: str) -> Any:
    """What the model in a folder makes of some tokens, as transformers loads it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)(torch.arange(9)[None]).logits.detach().numpy()


def resume(rank: int, folder: str) -> dict[str, Any]:
    """Load a DCP folder with stock torch into FSDP2 on two ranks, take two steps more; return the weights."""
    import torch.distributed.checkpoint as dcp

    mesh, model = init_device_mesh("cpu", (dist.get_world_size(),)), model_of()
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    state = {**get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer, options=flat)}
    dcp.load(state, checkpoint_id=folder)
    optim = state.pop("optim")
    set_model_state_dict(model, state)
    set_optimizer_state_dict(model, optimizer, optim, options=flat)
    for number in (3, 4):
        step(model, optimizer, number)
    return {name: whole(value).numpy() for name, value in get_model_state_dict(model).items()}


def warm(rank: int, path: str, run: str) -> dict[str, Any]:
    """Take the weights of a checkpoint as a training job of dcptool does, on two ranks."""
    from dcptool.training import CheckpointManager, TrainState

    mesh, model = init_device_mesh("cpu", (dist.get_world_size(),)), model_of()
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    fully_shard(model, mesh=mesh)
    state = TrainState(model, torch.optim.AdamW(model.parameters()))
    manager = CheckpointManager(run)
    try:
        manager.warm_start(state, path)
    finally:
        manager.close()
    return {name: whole(value).numpy() for name, value in get_model_state_dict(model).items()}


os.environ.setdefault("OMP_NUM_THREADS", "1")
