"""Lightning on CPUs. Usage: resume_lightning.py STRATEGY RUN OUT.json [STEP], STRATEGY being fsdp or model_parallel."""

import sys

import lightning.pytorch as pl
import torch
from going_on import LAST, N_RANKS, SAVED, numbers, tell
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

strategy, run, out, *step = sys.argv[1:]
torch.set_num_threads(1)
told = []


class Tiny(pl.LightningModule):
    def __init__(self, width=9):
        super().__init__()
        self.save_hyperparameters()
        self.inner, self.norm = torch.nn.Linear(5, width), torch.nn.LayerNorm(width)
        self.outer = torch.nn.Linear(width, 3, bias=False)
        self.is_sharded = strategy == "fsdp"

    def configure_model(self):
        if not self.is_sharded:
            for module in (self.inner, self.norm, self.outer, self):
                fully_shard(module, mesh=self.device_mesh["data_parallel"])
            self.is_sharded = True

    def training_step(self, batch, _):
        x = numbers(self.trainer.global_step, 8, 5)
        loss = (self.outer(torch.relu(self.norm(self.inner(x)))) - x[:, :3]).square().mean()
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        told.append((self.trainer.global_step, loss.item(), int(batch[0][0]), rate))
        return loss

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(40)), batch_size=2)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def on_cpu(self, *args, _init=FullyShardedDataParallel.__init__, **kwargs):
    _init(self, *args, **{**kwargs, "device_id": torch.device("cpu")})


if strategy == "fsdp":  # Lightning gives it the current GPU, and asks that for its memory
    FullyShardedDataParallel.__init__ = on_cpu
    torch.cuda.synchronize = lambda *args: None
    torch.cuda.memory_summary = lambda *args, **kwargs: ""
    chosen = type("FSDPOnCPU", (FSDPStrategy,), {})(state_dict_type="sharded", process_group_backend="gloo")
else:
    chosen = ModelParallelStrategy(N_RANKS, tensor_parallel_size=1, process_group_backend="gloo")
pl.seed_everything(9 if step else 3)
trainer = pl.Trainer(
    accelerator="cpu",
    devices=N_RANKS,
    strategy=chosen,
    max_steps=LAST,
    logger=False,
    enable_checkpointing=not step,
    callbacks=[] if step else [ModelCheckpoint(run, every_n_train_steps=SAVED, save_top_k=-1)],
    enable_progress_bar=False,
    enable_model_summary=False,
    use_distributed_sampler=False,
)
trainer.fit(Tiny(), ckpt_path=step[0] if step else None)
tell(out, told)
