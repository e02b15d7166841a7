"""torchtitan's CheckpointManager with its model, optimizers, schedulers and data loader, FSDP2 on CPUs.

Usage: resume_torchtitan.py RUN OUT.json [STEP]; on other than 2 ranks the data loader is not loaded, for it refuses.
"""

import sys
from pathlib import Path

import no_triton  # noqa: F401  # before torchtitan
import torch
import torch.distributed as dist
import torchtitan.models.llama3 as llama3
from going_on import LAST, N_RANKS, SAVED, numbers, tell
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import FlexAttention

WIDTH, WORDS = 8, 33


def attention(self, *heads, attention_masks=None, **kwargs):
    """As torchtitan's, which compiles kernels."""
    query, key, value = (each.transpose(1, 2) for each in heads)
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)


FlexAttention.forward = attention
run, out, *step = sys.argv[1:]
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(9 if step else 3)
rope = ComplexRoPE.Config(dim=WIDTH // 2, max_seq_len=16, theta=10000, scaling="llama")
config = llama3.Llama3Model.Config(
    dim=WIDTH,
    vocab_size=WORDS,
    tok_embeddings=Embedding.Config(num_embeddings=WORDS, embedding_dim=WIDTH, param_init=llama3._EMBEDDING_INIT),
    norm=RMSNorm.Config(normalized_shape=WIDTH, param_init=llama3._NORM_INIT),
    lm_head=Linear.Config(in_features=WIDTH, out_features=WORDS, param_init=llama3._output_linear_init(WIDTH)),
    layers=llama3._build_llama3_layers(
        fuse_qkv=False,
        n_layers=1,
        dim=WIDTH,
        n_heads=2,
        n_kv_heads=2,
        hidden_dim=12,
        rope=rope,
        attn_backend="flex",
    ),
)
model = config.build()
for parameter in model.parameters():
    torch.nn.init.normal_(parameter, std=0.1)
fully_shard(model, mesh=init_device_mesh("cpu", (N_RANKS,), mesh_dim_names=("fsdp",)))
optimizers = default_adamw(lr=1e-2, implementation="for-loop").build(model_parts=[model])
schedulers = LRSchedulersContainer.Config(warmup_steps=2, decay_ratio=0.5).build(
    optimizers=optimizers, training_steps=8
)


class Words(torch.utils.data.IterableDataset, Stateful):
    n_read = 0

    def __iter__(self):
        while True:
            self.n_read += 1
            words = numbers(self.n_read, 6, high=WORDS)
            yield {"input": words[:-1]}, words[1:]

    def state_dict(self):
        return {"n_read": self.n_read}

    def load_state_dict(self, state):
        self.n_read = state["n_read"]


class Progress(Stateful):
    step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


data = Words()
loader = ParallelAwareDataloader(data, dist.get_rank(), N_RANKS, batch_size=2)
progress = Progress()
folder = Path(step[0]).parent if step else Path(run, "checkpoint")
manager = CheckpointManager.Config(
    enable=True,
    folder=folder.name,
    interval=SAVED,
    keep_latest_k=0,
    last_save_model_only=False,
    exclude_from_loading=[] if N_RANKS == 2 else ["dataloader"],
).build(
    dataloader=loader,
    model_parts=[model],
    optimizers=optimizers,
    lr_schedulers=schedulers,
    states={"train_state": progress},
    sd_adapter=llama3.Llama3StateDictAdapter(config, None),
    base_folder=str(folder.parent),
)
if step and not manager.load(step=int(Path(step[0]).name.removeprefix("step-"))):
    raise SystemExit(f"torchtitan loads nothing from {step[0]}")
if N_RANKS != 2:
    data.n_read = 2 * progress.step
batches = iter(loader)
told = []
for number in range(progress.step, LAST):
    words, labels = next(batches)
    hidden = model(words["input"])
    loss = torch.nn.functional.cross_entropy(hidden.float().flatten(0, 1), labels.flatten())
    loss.backward()
    told.append((number, loss.item(), words["input"][0].tolist(), schedulers.schedulers[0].get_last_lr()[0]))
    optimizers.step()
    schedulers.step()
    optimizers.zero_grad()
    progress.step = number + 1
    if not step and progress.step == SAVED:
        manager.save(progress.step)
tell(out, told)
dist.barrier()
manager.close()
dist.destroy_process_group()
