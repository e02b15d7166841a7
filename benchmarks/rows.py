"""What is compared with what: one function per row, returning both commands."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks import checkpoints

READ_METADATA = (
    "import sys; from torch.distributed.checkpoint import FileSystemReader; "
    "FileSystemReader(sys.argv[1]).read_metadata()"
)


class Row(NamedTuple):
    """One comparison.

    Attributes:
        what, against: in words.
        goal_seconds, goal_nbytes: the ratio ours/theirs to reach, None where there is no goal.
        commands: makes the checkpoint in a cache folder, returns our command and theirs.
        measures: of a row of training, the names of what both jobs measure of themselves.
    """

    what: str
    against: str
    goal_seconds: float | None
    goal_nbytes: float | None
    commands: Callable[[Path], tuple[list[str], list[str]]]
    measures: tuple[str, str] | None = None


def _inspect(path: Path, *options: str) -> tuple[list[str], list[str]]:
    ours = [sys.executable, "-m", "dcptool", "inspect", str(path), *options]
    return ours, [sys.executable, "-c", READ_METADATA, str(path)]


def _inspect_chunks(n_tensors: int, n_ranks: int) -> Callable[[Path], tuple[list[str], list[str]]]:
    return lambda cache: _inspect(checkpoints.make("chunks", cache, n_tensors, n_ranks))


def _verify_deep(mib: int) -> Callable[[Path], tuple[list[str], list[str]]]:
    def commands(cache: Path) -> tuple[list[str], list[str]]:
        path = checkpoints.make("model", cache, mib, 0)
        ours = [sys.executable, "-m", "dcptool", "verify", "--deep", str(path)]
        return ours, ["sh", "-c", f"cat {path}/*.distcp > /dev/null"]

    return commands


def _diff(mib: int) -> Callable[[Path], tuple[list[str], list[str]]]:
    """Our comparison of a checkpoint with a copy of it against `cmp`, file by file."""

    def commands(cache: Path) -> tuple[list[str], list[str]]:
        path = checkpoints.make("model", cache, mib, 0)
        copy = path.with_name(f"{path.name}_copy")
        if not copy.exists():
            shutil.copytree(path, copy)
        ours = [sys.executable, "-m", "dcptool", "diff", str(path), str(copy)]
        return ours, ["sh", "-c", f"for file in {path}/*.distcp; do cmp $file {copy}/${{file##*/}} || exit 1; done"]

    return commands


def _convert(to: str, mib: int, on_mesh: int, against: str) -> Callable[[Path], tuple[list[str], list[str]]]:
    """Our conversion against `cp -r` and sync, or against torch's own converter in a fresh process."""

    def commands(cache: Path) -> tuple[list[str], list[str]]:
        source = checkpoints.make("model", cache, mib, on_mesh)
        if to == "dcp":
            source = checkpoints.make("pt", cache, mib)
        out, other = cache / f"out.{to}", cache / "out.other"
        ours = f"rm -rf {out}; {sys.executable} -m dcptool convert --quiet --to {to} {source} {out}"
        theirs = f"rm -rf {other}; cp -r {source} {other} && sync {other}/*"
        if against == "torch":
            script = f"import torch.distributed.checkpoint.format_utils as f; f.{TORCH[to]}"
            theirs = f"rm -rf {other}; {sys.executable} -c '{script}' {source} {other} && sync {other}"
        return ["sh", "-c", ours], ["sh", "-c", theirs]

    return commands


def _copy(mib: int) -> Callable[[Path], tuple[list[str], list[str]]]:
    """Our copy of a step against `cp -r` and sync."""

    def commands(cache: Path) -> tuple[list[str], list[str]]:
        source = checkpoints.make("model", cache, mib, 0)
        out, other = cache / "out.copy", cache / "out.other"
        ours = f"rm -rf {out}; {sys.executable} -m dcptool copy --quiet {source} {out}"
        return ["sh", "-c", ours], ["sh", "-c", f"rm -rf {other}; cp -r {source} {other} && sync {other}/*"]

    return commands


def _reshard(mib: int, n_ranks: int, against: str, *options: str) -> Callable[[Path], tuple[list[str], list[str]]]:
    """Our reshard of four ranks' checkpoint, against N processes of torch that load and save, or against `cp -r`."""

    def commands(cache: Path) -> tuple[list[str], list[str]]:
        source = checkpoints.make("model", cache, mib, int(bool(options)))
        out, other = cache / "out.ranks", cache / "out.other"
        layout = " ".join(options) or f"--world-size {n_ranks}"
        ours = f"rm -rf {out}; {sys.executable} -m dcptool reshard --quiet {layout} {source} {out}"
        theirs = f"rm -rf {other}; cp -r {source} {other} && sync {other}/*"
        if against == "torch":
            launch = f"-m torch.distributed.run --standalone --nproc-per-node {n_ranks} -m benchmarks.reshard_torch"
            theirs = f"rm -rf {other}; OMP_NUM_THREADS=1 {sys.executable} {launch} {source} {other}"
        return ["sh", "-c", ours], ["sh", "-c", theirs]

    return commands


TORCH = {
    "torch": 'dcp_to_torch_save(*__import__("sys").argv[1:])',
    "dcp": 'torch_save_to_dcp(*__import__("sys").argv[1:])',
    "safetensors": 'dcp_to_torch_save(*__import__("sys").argv[1:]); import torch, sys, safetensors.torch as s; '
    "flat = lambda v, p: sum((flat(x, p + (k,)) for k, x in v.items()), []) if isinstance(v, dict) else "
    '[(".".join(p), v)] if isinstance(v, torch.Tensor) else []; '
    's.save_file(dict(flat(torch.load(sys.argv[2]), ())), sys.argv[2] + ".st")',
}
"""What torch offers for each of our formats, as a script of its arguments."""

READER = "torch `read_metadata()`"
COPY = "`cp -r`, sync"
MIB = (256, 1024, 4096)

ROWS = {
    "inspect-small": Row(
        "`inspect`, 4 ranks, 100 entries",
        READER,
        1 / 15,
        None,
        lambda cache: _inspect(checkpoints.make("small", cache)),
    ),
    "inspect-10k": Row("`inspect`, 10,000 chunks", READER, None, None, _inspect_chunks(100, 100)),
    "inspect-100k": Row("`inspect`, 100,000 chunks", READER, None, None, _inspect_chunks(400, 250)),
    "inspect-1m": Row("`inspect`, 1,000,000 chunks", READER, 0.4, 0.55, _inspect_chunks(1000, 1000)),
    "inspect-10k-tensors": Row("`inspect`, 10,000 tensors", READER, None, None, _inspect_chunks(10_000, 2)),
    **{
        f"verify-deep-{mib}m": Row(f"`verify --deep`, {mib:,} MiB", "`cat`", 2.0, None, _verify_deep(mib))
        for mib in MIB
    },
    **{
        f"safetensors-{mib}m": Row(
            f"`convert --to safetensors`, {mib:,} MiB", COPY, 1.5, None, _convert("safetensors", mib, 0, "cp")
        )
        for mib in MIB
    },
    "safetensors-mesh": Row(
        "`convert --to safetensors`, 1,024 MiB of a 2×2 mesh", COPY, 1.5, None, _convert("safetensors", 1024, 1, "cp")
    ),
    "safetensors-torch": Row(
        "`convert --to safetensors`, 1,024 MiB",
        "`dcp_to_torch_save`, `save_file`",
        1 / 15,
        None,
        _convert("safetensors", 1024, 0, "torch"),
    ),
    "torch-torch": Row(
        "`convert --to torch`, 1,024 MiB", "`dcp_to_torch_save`", 1 / 10, 1 / 5, _convert("torch", 1024, 0, "torch")
    ),
    "dcp-torch": Row(
        "`convert --to dcp`, 1,024 MiB", "`torch_save_to_dcp`", 1 / 5, 1 / 3, _convert("dcp", 1024, 0, "torch")
    ),
    "copy-1024m": Row("`copy`, 1,024 MiB", COPY, 1.2, None, _copy(1024)),
    "diff-1024m": Row("`diff` with a copy, 1,024 MiB", "`cmp`", None, None, _diff(1024)),
    "reshard-8": Row(
        "`reshard` 4 → 8 ranks, 1,024 MiB",
        "torchrun 8 × `dcp.load`, `dcp.save`",
        1 / 6,
        1 / 4,
        _reshard(1024, 8, "torch"),
    ),
    "reshard-48": Row("`reshard` 4 → 48 ranks, 1,024 MiB", COPY, None, None, _reshard(1024, 48, "cp")),
    "reshard-48-columns": Row(
        "`reshard` 2×2 mesh → 48 ranks by columns, 1,024 MiB",
        COPY,
        None,
        None,
        _reshard(1024, 48, "cp", "--mesh r=48", "--placement '*=r:1'"),
    ),
    **{
        f"reshard-{n_ranks}-{mib}m": Row(
            f"`reshard` 4 → {n_ranks} ranks, {mib:,} MiB", COPY, None, None, _reshard(mib, n_ranks, "cp")
        )
        for n_ranks, mib in (*((8, mib) for mib in MIB), (64, 1024), (512, 1024))
    },
}

TRAINING = {"train-1-rank": 1, "train-4-ranks": 4}
"""Jobs of training, each of which measures several rows: how many ranks they have."""
N_ROUNDS = 3
"""How often a job of training does each thing it measures, in one run."""


def training_commands(cache: Path, n_ranks: int) -> tuple[list[str], list[str]]:
    """Return the commands that run a job of training with our saves and loads, and with torch's."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n_ranks)]
    job = ["env", "OMP_NUM_THREADS=1", *launch, "-m", "benchmarks.training_job"]
    rest = [str(cache / "job"), str(N_ROUNDS)]
    return [*job, "dcptool", *rest], [*job, "torch", *rest]


_MEASURED = (
    ("save", "`save`", "`dcp.save`", 1.05, "save", "save"),
    ("return", "`async_save` returns", "`dcp.async_save`", 0.15, "return", "return"),
    ("next", "the step after `async_save`", "`dcp.async_save`", None, "next", "next"),
    ("stall", "`async_save`, training stalls", "`dcp.async_save`", 0.3, "stall", "stall"),
    ("total", "`async_save` until saved", "`dcp.async_save`", None, "total", "total"),
    ("return-stager", "`async_save` returns", "`async_save`, `DefaultStager`", None, "return", "return-stager"),
    ("stall-stager", "`async_save`, training stalls", "`async_save`, `DefaultStager`", None, "stall", "stall-stager"),
    ("total-stager", "`async_save` until saved", "`async_save`, `DefaultStager`", None, "total", "total-stager"),
    ("load", "`dcp.load`, `Reader`", "`FileSystemReader`", 0.25, "load", "load"),
    ("restore", "`restore`", "`dcp.load`, `set_state_dict`", None, "restore", "restore"),
)

for group, n_ranks in TRAINING.items():
    ranks = f"604 MB, {n_ranks} rank{'s'[: n_ranks > 1]}"
    for key, what, against, goal, *both in _MEASURED:
        commands = partial(training_commands, n_ranks=n_ranks)
        ROWS[f"{group}-{key}"] = Row(f"{what}, {ranks}", against, goal, None, commands, (both[0], both[1]))

TRAINING_OF = {row: group for group in TRAINING for row in ROWS if row.startswith(f"{group}-")}
"""Which job measures a row of training."""

MAIN = (
    "inspect-small",
    "inspect-1m",
    "verify-deep-1024m",
    "safetensors-1024m",
    "safetensors-torch",
    "torch-torch",
    "dcp-torch",
    "reshard-8",
    "reshard-48",
    "train-1-rank-save",
    "train-1-rank-return",
    "train-1-rank-stall",
    "train-1-rank-load",
    "train-4-ranks-save",
    "train-4-ranks-load",
)
"""The rows whose goals the project has set itself."""

GROWTH = {
    "bytes (MiB)": {
        "verify --deep": [(mib, f"verify-deep-{mib}m") for mib in MIB],
        "convert --to safetensors": [(mib, f"safetensors-{mib}m") for mib in MIB],
        "reshard to 8 ranks": [(mib, f"reshard-8-{mib}m") for mib in MIB],
    },
    "chunks": {"inspect": [(10_000, "inspect-10k"), (100_000, "inspect-100k"), (1_000_000, "inspect-1m")]},
    "target ranks": {
        "reshard, 1,024 MiB": [(8, "reshard-8-1024m"), (64, "reshard-64-1024m"), (512, "reshard-512-1024m")]
    },
}
"""What grows → the work → at which size which row was measured."""
