"""NeMo 2: `<name>--<metric>-<epoch>`, Megatron-core's torch_dist in `weights`, the configuration in `context`."""

from __future__ import annotations

from dcptool.frameworks.profile import Extra, Needed, Profile, SavedStep


def _recognises(step: SavedStep) -> bool:
    weights = step.parts.get("weights")
    known = {"weights/common.pt", "context/io.json", "context/model.yaml"}
    return weights is not None and (weights.variant.stacks_layers or not known.isdisjoint(step.files))


NEMO = Profile(
    "NeMo",
    "nemo_toolkit 2.5.3, lightning/ckpt_utils.py, pytorch/callbacks/model_checkpoint.py and io/pl.py",
    _recognises,
    (
        Needed(("weights/metadata.json",), "Megatron's choice of back end"),
        Needed(
            ("weights/common.pt",), "Megatron's arguments, RNG state and iteration", unless="common_state/shard_0_1"
        ),
    ),
    ("optimizer",),
    (Extra(r"context/.*", "the model's configuration and tokenizer"),),
    taken=(r".*(end|last)", "takes what ends in -last or -end for its newest step"),
)
