"""accelerate, FSDP2 on CPUs: saves after steps 2 and 4. Usage: accelerate_job.py RUN FATAL_MOMENT [RESUME_FROM]."""

import os
import sys

os.environ.update(ACCELERATE_USE_CPU="true", ACCELERATE_USE_FSDP="true", FSDP_VERSION="2")

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, ProjectConfiguration
from dying import Moments

run, fatal, *resume = sys.argv[1:]


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(6, 6)

    def forward(self, x):
        return self.layer(x)


class Progress:
    n_steps = 0

    def state_dict(self):
        return {"n_steps": self.n_steps}

    def load_state_dict(self, state):
        self.n_steps = state["n_steps"]


torch.set_num_threads(1)
torch.cuda.synchronize = lambda *args: None
dist.init_process_group("gloo")
plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2,
    state_dict_type="SHARDED_STATE_DICT",
    auto_wrap_policy="transformer_based_wrap",
    transformer_cls_names_to_wrap=["Block"],
)
config = ProjectConfiguration(project_dir=run, automatic_checkpoint_naming=not resume)
accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, project_config=config)
for shared in (PartialState._shared_state, AcceleratorState._shared_state):  # it has no FSDP on CPUs by itself
    shared.update(distributed_type=DistributedType.FSDP, device=torch.device("cpu"))
AcceleratorState._shared_state["fsdp_plugin"] = plugin
model = torch.nn.Sequential(Block(), Block())
optimizer = torch.optim.Adam(model.parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(24, 6)), batch_size=2)
model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)
progress = Progress()
accelerator.register_for_checkpointing(progress)
moments = Moments(f"{run}/checkpoints/checkpoint_1", int(fatal) if dist.get_rank() == 0 else 0)
if resume:
    accelerator.load_state(resume[0])
began = progress.n_steps
for _ in range(4):
    accelerator.backward(model(torch.ones(2, 6)).square().mean())
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    progress.n_steps += 1
    if progress.n_steps in (2, 4) and not resume:
        accelerator.save_state()
if dist.get_rank() == 0:
    print("moments", moments.n_passed, "began at", began)
dist.barrier()
dist.destroy_process_group()
