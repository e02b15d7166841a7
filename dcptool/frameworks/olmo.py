"""OLMo-core: `stepN` with the DCP folder `model_and_optim`, state of each rank, and `.metadata.json` written last."""

from __future__ import annotations

from dcptool.frameworks.profile import Extra, Needed, Profile

OLMO = Profile(
    "OLMo-core",
    "olmo_core 3.0.0, train/checkpoint.py, Checkpointer",
    lambda step: "model_and_optim" in step.folders and ("train" in step.folders or ".metadata.json" in step.files),
    (
        Needed(("model_and_optim/",), "model and optimizer"),
        Needed(("train/rank{rank}.pt", "train/rank0.pt"), "the trainer's state"),
        Needed((".metadata.json",), "the version, written last"),
    ),
    ("optim",),
    (Extra(r"config\.json", "the configuration"), Extra(r"data_paths\.txt", "the paths of the data")),
    last_written=".metadata.json",
)
