"""The transformers Trainer, FSDP2 on CPUs, tied embeddings. Usage: resume_trainer.py RUN OUT.json [STEP]."""

import os
import sys

os.environ["ACCELERATE_USE_CPU"] = "true"

import accelerate.state
import torch
import torch.distributed as dist
from accelerate.utils import DistributedType
from going_on import LAST, N_RANKS, SAVED, numbers, tell
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

run, out, *step = sys.argv[1:]
torch.set_num_threads(1)
torch.cuda.synchronize = lambda *args: None
dist.init_process_group("gloo")


def with_fsdp(self, *args, _init=accelerate.state.AcceleratorState.__init__, **kwargs):
    """accelerate has no FSDP on CPUs by itself."""
    _init(self, *args, **kwargs)
    if kwargs.get("fsdp_plugin") is not None:
        for state in (accelerate.state.PartialState, accelerate.state.AcceleratorState):
            state._shared_state.update(distributed_type=DistributedType.FSDP, device=torch.device("cpu"))
        accelerate.state.AcceleratorState._shared_state["fsdp_plugin"] = kwargs["fsdp_plugin"]


accelerate.state.AcceleratorState.__init__ = with_fsdp
torch.manual_seed(9 if step else 3)
shape = LlamaConfig(
    vocab_size=33,
    hidden_size=8,
    intermediate_size=10,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=16,
    tie_word_embeddings=True,
)
words = [(torch.arange(first, first + 5) * 7) % 33 for first in range(96)]
arguments = TrainingArguments(
    output_dir=run,
    max_steps=LAST,
    per_device_train_batch_size=12 // N_RANKS,
    save_strategy="no" if step else "steps",
    save_steps=SAVED,
    logging_steps=1,
    report_to=[],
    use_cpu=True,
    seed=1,
    learning_rate=1e-2,
    max_grad_norm=0.0,
    disable_tqdm=True,
    fsdp=True,
    fsdp_config={
        "version": 2,
        "state_dict_type": "SHARDED_STATE_DICT",
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
    },
)


class Losses(TrainerCallback):
    """Has the loss of the batch that other jobs take next, when a step is saved: the Trainer shuffles its own."""

    found = ()

    def on_save(self, args, state, control, model=None, **kwargs):
        if state.global_step == SAVED:
            batch = numbers(SAVED, 12, 5, high=33)
            with torch.no_grad():
                self.found = (model(input_ids=batch, labels=batch).loss.item(),)


losses = Losses()
data = [{"input_ids": x, "labels": x} for x in words]
trainer = Trainer(LlamaForCausalLM(shape), arguments, train_dataset=data, callbacks=[losses])
trainer.train(resume_from_checkpoint=step[0] if step else None)
logged = [entry for entry in trainer.state.log_history if "loss" in entry and entry["step"] > (SAVED if step else 0)]
tell(out, [(entry["step"] - 1, entry["loss"], entry["learning_rate"]) for entry in logged])
if not step:
    tell(f"{run}/loss.json", losses.found)
    shape.save_pretrained(f"{run}/model")  # a sharded step has no config.json
dist.barrier()
dist.destroy_process_group()
