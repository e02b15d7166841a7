"""Every foreign checkpoint is named as what its producer is, with what that is concluded from."""

from __future__ import annotations

import pytest

import dcptool
from dcptool.errors import DcptoolError
from tests.conftest import FOREIGN, NOT_LOOKED_INTO, PARTS, part

pytestmark = pytest.mark.torchfree

VERSION = ".metadata version 1.0.0"
BEFORE_VERSIONS = ("fsdp1_t241_orig", "fsspec_t260", "dtypes_keys_t241", "xver_t241", "xver_t260")
OLDEST = ("fsdp1_t222_flat", "fsdp1_t222_orig", "fsspec_t222", "xver_t222")
"""Folders of torch up to 2.6, and up to 2.2, whose metadata has no version, and no storage_meta."""
MEGATRON = ("Megatron torch_dist", ('metadata.json says "torch_dist"', "all_local_plans in .metadata", VERSION))
SHARDS = "DCP_SHARDING_INFO in the headers: HuggingFaceStorageWriter"
INDEX = "model.safetensors.index.json"
SPECIAL = {
    "megatron_tp2/iter_0000010": ("dcp", *MEGATRON),
    "megatron_dp2_fpar/iter_0000010": ("dcp", *MEGATRON),
    "lightning_modelparallel/step=3.ckpt": ("dcp", "Lightning", ("meta.pt beside .metadata", VERSION)),
    "w_no_collectives": (
        "dcp",
        "torch DCP, rank-local metadata",
        ("2 × __R.metadata, no .metadata: saved with use_collectives=False", VERSION),
    ),
    "w_safetensors": (
        "dcp",
        "torch DCP, SAFETENSORS serialization",
        ("items are as long as their values", VERSION),
    ),
    "w_zstd": ("dcp", "torch DCP", ("items went through stream.zstd/1", VERSION)),
    "hf_consolidated": ("safetensors", "safetensors", ("2 files with safetensors headers", INDEX)),
    "hf_rank0_race": (
        "safetensors",
        "safetensors, HuggingFace DCP shards",
        ("2 files with safetensors headers", SHARDS, INDEX),
    ),
    "hf_sharded": (
        "safetensors",
        "safetensors, HuggingFace DCP shards",
        ("3 files with safetensors headers", SHARDS),
    ),
    "hf_idle_absent_w4": (
        "safetensors",
        "safetensors, HuggingFace DCP shards",
        ("2 files with safetensors headers", SHARDS),
    ),
    "hf_sharded_multi": (
        "safetensors",
        "safetensors, HuggingFace DCP shards",
        ("6 files with safetensors headers", SHARDS),
    ),
}
STREAM = ("torch_save", "torch.save", ("a torch.save stream, as before torch 1.6",))
SPECIAL |= {f"legacy_stream/{name}": STREAM for name in ("bare_tensor.pt", "linear.pth", "old.pt")}
NAMED = "{} named as of one model"
SPECIAL["hf_bin_single_bf16"] = ("bin_set", "transformers .bin", (NAMED.format("1 torch.save file"),))
SPECIAL["hf_bin_sharded_tied"] = (
    "bin_set",
    "transformers .bin",
    (NAMED.format("4 torch.save files"), "pytorch_model.bin.index.json"),
)
UNFINISHED = ("run_crashed/ckpt/step_400", "run_crashed/ckpt/step_500")


def expected(name: str) -> tuple[str, str, tuple[str, ...]]:
    if name in SPECIAL:
        return SPECIAL[name]
    if name in OLDEST:
        return "dcp", "torch DCP", ("no storage_meta: torch 2.2 or older",)
    return "dcp", "torch DCP", () if name in BEFORE_VERSIONS else (VERSION,)


# R10
@pytest.mark.parametrize("part", [p for p in PARTS if p.name not in UNFINISHED], ids=lambda part: part.name)
def test_flavour_and_evidence(part):
    (checkpoint,) = dcptool.summarize(part.path).checkpoints
    assert (checkpoint.format, checkpoint.flavour, checkpoint.evidence) == expected(part.name)
    ranks = part.about.get("world_size", 0)
    # Names of files of one process tell no ranks.
    known = part.name not in ("hf_consolidated", "hf_rank0_race") and not part.name.startswith(("hf_bin", "legacy"))
    idle = part.name == "hf_idle_absent_w4"  # whose last rank left no file
    assert checkpoint.world_size == (ranks - idle if known else None)


@pytest.mark.parametrize("name", UNFINISHED)
def test_an_unfinished_save_has_no_flavour(name):
    with pytest.raises(DcptoolError, match="the save never finished"):
        dcptool.open(part(name).path)


def test_the_table_has_every_folder():
    names = {part.name.partition("/")[0] for part in (*PARTS, *NOT_LOOKED_INTO)}
    assert names == {folder.name for folder in FOREIGN.iterdir() if folder.is_dir()}
    assert {*SPECIAL, *BEFORE_VERSIONS, *OLDEST, *UNFINISHED} <= {part.name for part in PARTS}
