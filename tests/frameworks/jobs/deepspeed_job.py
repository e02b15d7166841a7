"""DeepSpeed on CPUs: trains three steps, saves, trains three more and prints their losses.

Usage: deepspeed_job.py RUN KIND. With a third argument it does not train but writes what DeepSpeed's own tools read
from RUN's step to that file.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

KINDS = {
    "zero0": {"zero_optimization": {"stage": 0}},
    "zero1": {"zero_optimization": {"stage": 1}},
    "zero2": {"zero_optimization": {"stage": 2}},
    "zero2_bf16": {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}},
    "bf16_optimizer": {
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
    },
    "zero3": {"zero_optimization": {"stage": 3}},
    "zero3_sub_groups": {"zero_optimization": {"stage": 3, "sub_group_size": 100}},
    "zero3_bf16": {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}},
}


class Model(torch.nn.Module):
    """Uneven sizes, a tied weight, and one of a single element."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(19, 7)
        self.up = torch.nn.Linear(7, 13)
        self.down = torch.nn.Linear(13, 7)
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.head = torch.nn.Linear(7, 19, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        hidden = self.embed(tokens)
        return self.head(hidden + self.scale * self.down(torch.nn.functional.gelu(self.up(hidden))))


def batch(step, rank, n_ranks):
    """A rank's part of a step's tokens, the same altogether for every number of ranks."""
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(0, 19, (8, 6), generator=generator)
    return tokens.chunk(n_ranks)[rank]


def loss_of(model, step, rank, n_ranks):
    tokens = batch(step, rank, n_ranks)
    logits = model(tokens[:, :-1]).float()
    return torch.nn.functional.cross_entropy(logits.reshape(-1, 19), tokens[:, 1:].reshape(-1))


def groups_of(model):
    named = dict(model.named_parameters())
    decayed = [name for name, parameter in named.items() if parameter.ndim > 1]
    return [
        {"params": [named[name] for name in decayed], "weight_decay": 0.1},
        {"params": [named[name] for name in named if name not in decayed], "weight_decay": 0.0},
    ]


def train(run, kind):
    import deepspeed
    import torch.distributed as dist

    torch.set_num_threads(1)
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # nothing is compiled
    deepspeed.init_distributed("gloo")
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    model = Model()
    config = {
        "train_micro_batch_size_per_gpu": 8 // n_ranks,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.9, 0.95], "torch_adam": True}},
        "gradient_clipping": 1.0,
        **KINDS[kind],
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups_of(model), config=config)
    losses = []
    for step in range(6):
        loss = loss_of(engine, step, rank, n_ranks)
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / n_ranks)
        if step == 2:
            engine.save_checkpoint(run, client_state={"epoch": 1, "order": torch.arange(3)})
    if rank == 0:
        print("losses", json.dumps(losses[3:]))
    dist.barrier()
    dist.destroy_process_group()


def told(tensor):
    array = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy() if tensor.numel() else b""
    kind = {"kind": "tensor", "dtype": str(tensor.dtype), "shape": list(tensor.shape)}
    return {**kind, "sha256": hashlib.sha256(bytes(array)).hexdigest()}


def read(run, kind, target):
    """What zero_to_fp32 and ds_to_universal make of a step: parameters, and what the optimizer keeps for each."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    found, universal = {}, Path(run, "universal")
    if kind == "zero0":
        module = torch.load(f"{run}/global_step3/mp_rank_00_model_states.pt", weights_only=False)["module"]
        found = {name: told(value) for name, value in module.items()}
    elif kind != "bf16_optimizer":  # which zero_to_fp32 refuses
        state = get_fp32_state_dict_from_zero_checkpoint(run, "global_step3")
        found = {
            name: told(value if isinstance(value, torch.Tensor) else value.contiguous())
            for name, value in state.items()
        }
    if kind != "zero0":
        tool = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
        tool += [
            "--input_folder",
            f"{run}/global_step3",
            "--output_folder",
            str(universal),
            "--num_extract_workers",
            "1",
        ]
        subprocess.run([*tool, "--num_merge_workers", "1"], check=True)
        for path in sorted(universal.glob("zero/*/*.pt")):
            value = torch.load(path, weights_only=False)
            value = value["param"] if isinstance(value, dict) else value
            name = path.parent.name
            if path.stem == "fp32":
                found.setdefault(name, told(value))
            elif isinstance(value, torch.Tensor):
                found[f"optim.state.{name}.{path.stem}"] = told(value)
    Path(target).write_text(json.dumps(found, indent=1))
    for name in ("zero_to_fp32.py", "zero_to_torch.py"):
        Path(run, name).unlink(missing_ok=True)
    if kind != "zero3":
        shutil.rmtree(universal, ignore_errors=True)


if __name__ == "__main__":
    os.environ.update(DS_ACCELERATOR="cpu", DS_BUILD_OPS="0")
    read(*sys.argv[1:]) if len(sys.argv) > 3 else train(*sys.argv[1:])
