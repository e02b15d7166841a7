"""What other software leaves that is no checkpoint of a format here: what it looks like, and what reads it."""

from __future__ import annotations

import re
from collections.abc import Sequence

_OTHER_TOOLS = (
    (
        re.compile(r"metadata\.pkl"),
        "a checkpoint with metadata.pkl, a format after DCP's",
        "the software that wrote it",
    ),
    (
        re.compile(r"(zero_pp_rank|mp_rank|layer|expp_rank)_.*_states\.pt|zero_to_fp32\.py"),
        "a DeepSpeed checkpoint of a model cut by tensor, pipeline or expert parallelism, or the folder of one",
        "DeepSpeed's ds_to_universal.py",
    ),
    (
        re.compile(r"model\.rank_?\d+\.pth?|.*rank_\d+.*\.pth?|.*[-_.](rank|shard)\d+\.pth?"),
        "one torch.save file per rank",
        "the trainer that wrote it",
    ),
    (
        re.compile(r"consolidated\.\d\d\.pth"),
        "Meta's Llama format, one file per model-parallel rank",
        "Meta's llama code",
    ),
    (re.compile(r"_CHECKPOINT_METADATA|_METADATA|manifest\.ocdbt"), "an Orbax checkpoint", "JAX's orbax-checkpoint"),
    (re.compile(r"\.snapshot_metadata"), "a torchsnapshot", "torchsnapshot's Snapshot.restore"),
    (re.compile(r"mp_rank_\d+.*"), "a legacy Megatron checkpoint", "Megatron-LM's checkpoint tools"),
    (re.compile(r".*\.nemo"), "a NeMo archive, which is a tar file", "NeMo's restore_from"),
    (re.compile(r"recipe_state\.pt"), "a torchtune checkpoint", "torchtune's checkpointer"),
    (re.compile(r".*\.data-\d{5}-of-\d{5}"), "a TensorFlow checkpoint", "TensorFlow's tf.train.load_checkpoint"),
)
_MEGATRON_ZARR = (
    "metadata.json",
    "a Megatron checkpoint of the zarr back end",
    "A megatron-core that still has zarr, or NeMo's convert_zarr_to_torch_dist.py,",
)


def looks_like(names: Sequence[str], is_zarr: bool = False) -> tuple[str, str, str]:
    """Return the file or folder that tells, what it looks like and what reads that; empty if none is recognised.

    Args:
        names: of what is in a folder, sorted.
        is_zarr: whether Megatron says so there.
    """
    if is_zarr:
        return _MEGATRON_ZARR
    for pattern, what, tool in _OTHER_TOOLS:
        found = next(filter(pattern.fullmatch, names), None)
        if found:
            return found, what, tool
    return "", "", ""
