"""accelerate, FSDP2 on CPUs, a model of transformers. Usage: resume_accelerate.py RUN OUT.json [STEP]."""

import os
import sys

os.environ.update(ACCELERATE_USE_CPU="true", ACCELERATE_USE_FSDP="true", FSDP_VERSION="2")

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, ProjectConfiguration
from going_on import LAST, N_RANKS, SAVED, numbers, tell
from transformers import LlamaConfig, LlamaForCausalLM

run, out, *step = sys.argv[1:]


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
    transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
)
config = ProjectConfiguration(project_dir=run, automatic_checkpoint_naming=not step)
accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, project_config=config)
for shared in (PartialState._shared_state, AcceleratorState._shared_state):  # it has no FSDP on CPUs by itself
    shared.update(distributed_type=DistributedType.FSDP, device=torch.device("cpu"))
AcceleratorState._shared_state["fsdp_plugin"] = plugin
torch.manual_seed(9 if step else 3)
shape = LlamaConfig(
    vocab_size=33,
    hidden_size=8,
    intermediate_size=10,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=16,
    tie_word_embeddings=False,
)
model = LlamaForCausalLM(shape)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.8)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(24, 5)), batch_size=2)
model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)
progress = Progress()
accelerator.register_for_checkpointing(progress)
if step:
    accelerator.load_state(step[0])
told = []
for number in range(progress.n_steps, LAST):
    words = numbers(number, 12, 5, high=33).chunk(N_RANKS)[dist.get_rank()]
    loss = model(input_ids=words, labels=words).loss
    accelerator.backward(loss)
    rate = scheduler.get_last_lr()[0]
    optimizer.step()
    scheduler.scheduler.step()
    optimizer.zero_grad()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    told.append((number, mean.item() / N_RANKS, rate))
    progress.n_steps = number + 1
    if progress.n_steps == SAVED and not step:
        accelerator.save_state()
        if dist.get_rank() == 0:
            shape.save_pretrained(f"{run}/checkpoints/checkpoint_0")  # as a job puts it there for its users
tell(out, told)
dist.barrier()
dist.destroy_process_group()
