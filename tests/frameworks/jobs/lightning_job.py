"""Lightning, FSDP2 on CPUs: saves at steps 2 and 4. Usage: lightning_job.py RUN FATAL_MOMENT [RESUME_FROM]."""

import os
import sys

import lightning.pytorch as pl
import torch
from dying import Moments
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

run, fatal, *resume = sys.argv[1:]


class Tiny(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(5, 3)
        self.wrapped = False

    def configure_model(self):
        if not self.wrapped:
            fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])
            self.wrapped = True

    def training_step(self, batch, _):
        return self.layer(batch[0]).square().mean()

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(20, 5)), batch_size=2)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


torch.set_num_threads(1)
moments = Moments(f"{run}/epoch=0-step=4.ckpt", int(fatal) if os.environ["RANK"] == "0" else 0)
trainer = pl.Trainer(
    accelerator="cpu",
    devices=int(os.environ["WORLD_SIZE"]),
    strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo"),
    max_steps=6 if resume else 5,
    logger=False,
    enable_checkpointing=not resume,
    callbacks=[] if resume else [ModelCheckpoint(run, every_n_train_steps=2, save_top_k=-1, save_last="link")],
    enable_progress_bar=False,
    enable_model_summary=False,
    use_distributed_sampler=False,
)
if resume:
    began = []
    Tiny.on_train_start = lambda self: began.append(self.trainer.global_step)
trainer.fit(Tiny(), ckpt_path=resume[0] if resume else None)
if os.environ["RANK"] == "0":
    print("moments", moments.n_passed, "began at", began[0] if resume else 0)
