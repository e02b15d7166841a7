"""Megatron-core's torch_dist checkpoints of its GPT model, tensor-parallel over all ranks, on CPUs.

Usage: resume_megatron.py RUN OUT.json [STEP]. On other than 2 ranks random generators are not loaded, as Megatron-LM
loads none where the tensor-parallel size is another.
"""

import argparse
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import megatron.core.fusions.fused_softmax as fused_softmax
import torch
import torch.distributed as dist
from going_on import IS_FIRST, LAST, N_RANKS, SAVED, numbers, tell
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    optim_state_to_sharding_state,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

WIDTH, WORDS, LENGTH = 24, 48, 8


def main(run, out, *step):
    """Megatron writes from processes that import this module again."""
    torch.cuda.synchronize = lambda *args: None
    torch.cuda.current_device = lambda: torch.device("cpu")
    fused_softmax.get_default_causal_mask = lambda n: torch.ones(n, n).triu(1).bool()  # Megatron makes it on a GPU
    tensor_parallel.get_cuda_rng_tracker = lambda: SimpleNamespace(fork=nullcontext)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=N_RANKS)
    torch.manual_seed(9 if step else 3)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=WIDTH,
        num_attention_heads=12,
        ffn_hidden_size=WIDTH,
        use_cpu_initialization=True,
        tensor_model_parallel_size=N_RANKS,
        gradient_accumulation_fusion=False,
        add_bias_linear=False,
        normalization="RMSNorm",
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=WORDS,
        max_sequence_length=LENGTH,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.8)

    def state(iteration):
        """What Megatron-LM saves, and to load its form: the optimizer's is there after a step that moves nothing."""
        if not optimizer.state:
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            rate, optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"], 0.0
            optimizer.step()
            optimizer.param_groups[0]["lr"] = rate
        weights, moments = model.sharded_state_dict(), optimizer.state_dict()
        parameters = get_param_id_to_sharded_param_map(weights, model.parameters())
        optim_state_to_sharding_state(moments, parameters, exclude_keys=("step",))
        generators = [{"torch_rng_state": torch.get_rng_state()}]
        found = {
            "args": argparse.Namespace(num_layers=2, tensor_model_parallel_size=N_RANKS),
            "checkpoint_version": 3.0,
            "iteration": iteration,
            "model": weights,
            "optimizer": moments,
            "opt_param_scheduler": scheduler.state_dict(),
        }
        rank = parallel_state.get_tensor_model_parallel_rank()
        if not step or N_RANKS == 2:
            found["rng_state"] = ShardedObject("rng_state", generators, (1, N_RANKS), (0, rank), replica_id=0)
        return found

    began = 0
    if step:
        loaded = dist_checkpointing.load(state(0), step[0])
        model.load_state_dict(loaded["model"], strict=False)  # _extra_state of layers that have none
        for moments in loaded["optimizer"]["state"].values():
            moments.setdefault("step", torch.tensor(float(loaded["iteration"])))
        optimizer.load_state_dict(loaded["optimizer"])
        scheduler.load_state_dict(loaded["opt_param_scheduler"])
        began = loaded["iteration"]
    told = []
    for number in range(began, LAST):
        words = numbers(number, 2, LENGTH, high=WORDS)
        loss = model(words, torch.arange(LENGTH).expand(2, LENGTH), None, labels=words).mean()
        loss.backward()
        told.append((number, loss.item(), optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if number + 1 == SAVED and not step:
            target = Path(run, f"iter_{SAVED:07d}")
            if IS_FIRST:
                target.mkdir(parents=True)
            dist.barrier()
            dist_checkpointing.save(state(SAVED), str(target), TorchDistSaveShardedStrategy("torch_dist", 1))
            if IS_FIRST:
                (target.parent / "latest_checkpointed_iteration.txt").write_text(str(SAVED))
    tell(out, told)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
