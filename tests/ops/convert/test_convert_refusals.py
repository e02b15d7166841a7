"""What `convert` refuses and how it says so: places, names, options, damage, full disks. Nothing is half-written."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import textwrap

import pytest

import dcptool
from dcptool.checkpoint.selection import Renaming
from dcptool.copying.engine import BAND_NBYTES, memory_nbytes
from dcptool.copying.pool import default_threads
from dcptool.errors import (
    DcptoolError,
    ItemError,
    LayoutError,
    MetadataError,
    OutputExistsError,
    StorageError,
    UnsupportedError,
)
from dcptool.ops.convert.convert import ConvertOptions, convert
from tests import damage
from tests.conftest import FOREIGN, ROOT, run

SOURCE = FOREIGN / "w_async"
DAMAGED = DcptoolError, "is damaged, nothing was written"


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("to", "name", "error", "message"),
    [
        ("torch", "", StorageError, "the path of the output is empty"),
        ("torch", "new/", OutputExistsError, "new/ is a folder; the output is one file: name it, such as new/model.pt"),
        ("torch", "m.safetensors", UnsupportedError, "ends as safetensors do, and --to torch writes a torch.save file"),
        ("safetensors", "m.pt", UnsupportedError, "name it m.safetensors, or m for a folder"),
        ("safetensors", "M.Safetensors", UnsupportedError, "would make it a folder"),
        ("dcp", "m.pt", UnsupportedError, "m.pt has a file's name, and --to dcp would make it a folder: name it m"),
        ("torch", "a\0b", StorageError, "cannot be a path: it has a NUL character"),
        ("torch", "s3://", StorageError, "s3:// names no file in an object store"),
        ("torch", "s3://m.pt", StorageError, "s3://m.pt names no file in an object store"),
        ("dcp", "s3://", StorageError, "s3:// names no folder in an object store"),
        ("torch", "file/m.pt", StorageError, "file is no folder: nothing can be written below it"),
        ("dcp", "file", OutputExistsError, "file is a file; the output is a folder"),
        ("torch", "pipe", OutputExistsError, "is a device or a pipe, which nothing may replace"),
        ("dcp", "pipe", OutputExistsError, "is a device or a pipe, which nothing may replace"),
    ],
)
@pytest.mark.parametrize("dry_run", [False, True])
def test_places_that_cannot_be(tmp_path, monkeypatch, to, name, error, message, dry_run):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    (tmp_path / "file").write_text("precious")
    with pytest.raises(error, match=message):
        convert(SOURCE, name, to, ConvertOptions(overwrite=True), dry_run=dry_run)
    assert names(tmp_path) == ["file", "pipe"]
    assert (tmp_path / "file").read_text() == "precious"


def test_a_lightning_step_may_end_in_ckpt(tmp_path):
    convert(SOURCE, tmp_path / "epoch=0-step=5.ckpt", "dcp")
    assert dcptool.verify(tmp_path / "epoch=0-step=5.ckpt").good


def test_a_file_url_is_a_local_path(tmp_path):
    done = convert(f"file://{SOURCE}", f"file://{tmp_path}/m.safetensors", "safetensors")
    assert done.published
    assert names(tmp_path) == ["m.safetensors"]
    with pytest.raises(OutputExistsError):
        convert(SOURCE, f"file://{tmp_path}/m.safetensors", "safetensors")
    folder = damage.copy(SOURCE, tmp_path / "c")
    with pytest.raises(UnsupportedError, match="lies in the source"):
        convert(folder, f"file://{folder}/new", "dcp")


def test_of_a_link_the_link_is_replaced(tmp_path):
    kept = damage.copy(SOURCE, tmp_path / "kept")
    before = {path.name: path.read_bytes() for path in kept.iterdir()}
    (tmp_path / "latest").symlink_to("kept")
    with pytest.raises(OutputExistsError, match="is there already"):
        convert(FOREIGN / "w_threads3", tmp_path / "latest", "dcp")
    convert(FOREIGN / "w_threads3", tmp_path / "latest", "dcp", ConvertOptions(overwrite=True))
    assert not (tmp_path / "latest").is_symlink()
    assert {path.name: path.read_bytes() for path in kept.iterdir()} == before
    (tmp_path / "empty").mkdir()
    (tmp_path / "to_empty").symlink_to("empty")
    convert(SOURCE, tmp_path / "to_empty", "dcp", ConvertOptions(overwrite=True))
    assert names(tmp_path) == ["empty", "kept", "latest", "to_empty"]


def test_no_file_of_the_source_is_replaced(tmp_path):
    folder = damage.copy(FOREIGN / "hf_consolidated", tmp_path / "c")
    index = folder / "model.safetensors.index.json"
    shard = min(folder.glob("*.safetensors"))
    before = shard.read_bytes()
    with pytest.raises(UnsupportedError, match="belongs to the source"):
        convert(index, shard, "safetensors", ConvertOptions(overwrite=True))
    assert shard.read_bytes() == before
    convert(index, folder / "all.safetensors", "safetensors")  # beside a file is no part of it
    assert set(dcptool.open(folder / "all.safetensors")) == set(dcptool.open(index))
    convert(index, folder / "all.safetensors", "safetensors", ConvertOptions(overwrite=True))


def test_no_half_of_the_source_is_replaced(tmp_path):
    halves = [damage.copy(SOURCE, tmp_path / name) for name in ("node0", "node1")]
    (halves[0] / "__1_0.distcp").unlink()
    (halves[1] / "__0_0.distcp").unlink()
    options = ConvertOptions(also=(str(halves[1]),), overwrite=True)
    with pytest.raises(UnsupportedError, match="node1 is the source itself"):
        convert(halves[0], halves[1], "dcp", options)
    assert convert(halves[0], tmp_path / "whole", "dcp", options).n_tensors == 8


def test_a_place_is_refused_before_everything_is_read(tmp_path, monkeypatch):
    import dcptool.ops.convert.corrupt as module

    monkeypatch.setattr(module, "check", None)
    (tmp_path / "m.pt").write_text("")
    with pytest.raises(OutputExistsError):
        convert(SOURCE, tmp_path / "m.pt", "torch", ConvertOptions(skip_corrupt=True))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "dcp", "--nesting", "flat"], "--nesting is about .pt files, not --to dcp"),
        (["--to", "safetensors", "--max-shard-size", "9" * 330 + "GB"], "999' is no size; write 5GB or 500MB"),
        (["--to", "torch", "--max-shard-size", "5GB"], "--max-shard-size is about safetensors in a folder"),
        (
            ["--to", "torch", "--engine", "torch", "--threads", "2", "--objects", "skip"],
            "leave out --objects, --threads",
        ),
        (["--to", "torch", "--engine", "torch", "--also", "x"], "leave out --also"),
        (["--to", "dcp", "--engine", "torch", "--trust"], "torch converts DCP to a .pt or .safetensors file"),
        (["--to", "torch", "--rename", "a"], "'a' must be OLD=NEW"),
    ],
)
def test_options_that_would_do_nothing_are_wrong_usage(tmp_path, arguments, message):
    done = run("convert", *arguments, SOURCE, tmp_path / "out")
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert not names(tmp_path)


def test_each_checkpoint_of_a_folder_gets_its_command(tmp_path):
    for step in (1, 2):
        damage.copy(SOURCE, tmp_path / "run dir" / f"step_{step}")
    target = tmp_path / "m.pt"
    done = run("convert", "--to", "torch", "--keys", "model.*", f"{tmp_path}/run dir/", target)
    assert done.returncode == 3
    first, *commands, last = done.stderr.splitlines()
    assert first == f"error: {tmp_path}/run dir holds 2 checkpoints; name one:"
    assert [shlex.split(command) for command in commands] == [
        ["dcptool", "convert", "--to", "torch", "--keys", "model.*", f"{tmp_path}/run dir/step_{step}", str(target)]
        for step in (1, 2)
    ]
    assert f"dcptool latest '{tmp_path}/run dir'" in last
    assert run(*shlex.split(commands[1])[1:]).returncode == 0
    done = run("diff", tmp_path / "run dir", target)
    assert done.stderr.splitlines()[1] == f"  dcptool diff '{tmp_path}/run dir/step_1' {target}"


def test_the_one_checkpoint_of_a_folder_is_used_and_named(tmp_path):
    folder = damage.copy(SOURCE, tmp_path / "out" / "iter_5")
    expected = f"the one checkpoint in {tmp_path / 'out'} is {folder}"
    for above in (tmp_path / "out", f"{tmp_path}/out/", f"file://{tmp_path}/out"):
        assert expected in convert(above, tmp_path / "m.pt", "torch", dry_run=True).notes
    for itself in (folder, f"{folder}/", folder / ".metadata", os.path.relpath(folder)):
        notes = convert(itself, tmp_path / "m.pt", "torch", dry_run=True).notes
        assert not [note for note in notes if note.startswith("the one")]
    done = run("diff", SOURCE, tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"note: B: {expected}" in done.stdout


def test_of_what_was_cast_check_says_that_it_was_not_compared(tmp_path):
    options = ConvertOptions(check=True, renaming=Renaming(dtype="float16"))
    notes = convert(SOURCE, tmp_path / "m.safetensors", "safetensors", options).notes
    assert any(note.startswith("--check did not compare the values of the ") for note in notes)


class TestDamage:
    @pytest.fixture
    def folder(self, tmp_path):
        return damage.copy(FOREIGN / "xver_t2130", tmp_path / "c")

    def refused(self, folder, name="out.pt", *arguments):
        done = run("convert", "--to", "torch", *arguments, folder, folder.parent / name)
        assert done.returncode == 3, done.stdout
        assert names(folder.parent) == ["c"]
        return done.stderr.splitlines()

    def test_a_missing_file(self, folder):
        (folder / "__1_0.distcp").unlink()
        first, what, step, hint = self.refused(folder)
        assert first == f"error: {folder} is not whole, nothing was written:"
        assert what.startswith("  __1_0.distcp (rank 1) is missing: it held 17% of the bytes")
        assert "--also" in step
        assert hint == "  --skip-corrupt leaves such entries out."

    def test_a_git_lfs_pointer(self, folder):
        damage.leave_lfs_pointer(folder / "__2_0.distcp")
        assert "  Run git lfs pull there." in self.refused(folder)
        damage.leave_lfs_pointer(folder.parent / "m.safetensors")
        with pytest.raises(MetadataError, match=r"m\.safetensors: it is a Git LFS pointer.*git lfs pull"):
            convert(folder.parent / "m.safetensors", folder.parent / "d", "dcp")

    @pytest.mark.parametrize("to", ["torch", "safetensors", "dcp"])
    @pytest.mark.parametrize("kind", ["missing", "cut", "pointer"])
    def test_what_lost_files_held_is_left_out_and_the_rest_taken(self, folder, tmp_path, kind, to):
        whole = dcptool.open(folder)
        file = folder / "__1_0.distcp"
        nbytes = {"missing": 0, "cut": 20_000, "pointer": 0}[kind]
        damage.truncate(file, nbytes)
        if kind == "missing":
            file.unlink()
        elif kind == "pointer":
            damage.leave_lfs_pointer(file)

        def is_lost(item):
            return item is not None and item.file == file.name and item.byte_offset + item.nbytes > nbytes

        lost = {fqn for fqn, entry in whole.tensors.items() if any(is_lost(chunk.item) for chunk in entry.chunks)}
        lost |= {fqn for fqn, entry in whole.objects.items() if is_lost(entry.item)}
        target = tmp_path / ("out.pt" if to == "torch" else "out")
        done = convert(folder, target, to, ConvertOptions(skip_corrupt=True))
        kept = whole.tensors if to == "safetensors" else whole
        written = dcptool.open(target)
        gaps = {fqn for fqn in written if fqn in lost and written.value(fqn) is None}  # of lists, as torch fills them
        assert set(written) - gaps == set(kept) - lost
        assert lost <= {finding.fqn for finding in done.corrupt}
        assert 0 < len(lost) < len(whole)

    def test_several_missing_files_lose_what_each_held(self, folder, tmp_path):
        for rank in (1, 2):
            (folder / f"__{rank}_0.distcp").unlink()
        done = run("convert", "--to", "torch", "--skip-corrupt", folder, tmp_path / "m.pt")
        assert done.returncode == 1, done.stderr
        assert "damaged entries are left out: model.ema, model.emb.weight" in done.stderr
        kept = dcptool.open(tmp_path / "m.pt")
        assert kept.tensors
        assert all(kept.read(fqn).size for fqn in kept.tensors)

    def test_nothing_whole_is_left(self, folder):
        for rank in range(4):
            (folder / f"__{rank}_0.distcp").unlink()
        first, what, *_, hint = self.refused(folder, "out.pt", "--skip-corrupt")
        assert "is not whole, nothing was written" in first
        assert "4 of 4 files (ranks 0–3) are missing" in what
        assert hint == "  Nothing undamaged is left to convert."


class TestNames:
    def test_a_prefix_that_is_not_there_is_said(self, tmp_path):
        notes = convert(SOURCE, tmp_path / "a.pt", "torch", ConvertOptions(renaming=Renaming("modle."))).notes
        assert "no name begins with 'modle.': all are kept, such as 'model.embed.weight'" in notes
        options = ConvertOptions(renaming=Renaming("model."))
        assert any(
            note.startswith("4 of 11 names do not begin with 'model.'") for note in self.notes(tmp_path, options)
        )
        options = ConvertOptions(("model.*",), renaming=Renaming("model."))
        assert not [note for note in self.notes(tmp_path, options) if "begin with" in note]

    def notes(self, tmp_path, options):
        return convert(SOURCE, tmp_path / "b.pt", "torch", options, dry_run=True).notes

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (ConvertOptions(("model.*",), ("*",)), "--exclude leaves out all 7 entries that match 'model"),
            (ConvertOptions(renaming=Renaming(rename=(("zeros", "x"), ("zeros", "y")))), "is given more than once"),
            (ConvertOptions(renaming=Renaming(rename=(("zeroes", "x"),))), "did you mean 'zeros'"),
            (ConvertOptions(renaming=Renaming(add_prefix="a.", rename=(("zeros", "x"),))), "after prefixes were taken"),
            (ConvertOptions(objects="error"), "3 objects are selected, such as 'step'"),
        ],
    )
    def test_each_error_says_what_to_do(self, tmp_path, options, message):
        with pytest.raises(LayoutError, match=message):
            convert(SOURCE, tmp_path / "a.pt", "torch", options)
        assert not names(tmp_path)


def test_a_plan_has_the_memory_that_the_copy_needs(tmp_path):
    done = run("convert", "--to", "safetensors", "--threads", 2, "--dry-run", SOURCE, tmp_path / "hf")
    assert "the copy needs up to 50.3 MB of memory for its buffers" in done.stdout
    assert memory_nbytes(1, 2) == 6 * BAND_NBYTES
    for n_files in (1, 2, 7, 8, 1000):  # 192 MiB, on a machine of any size
        assert memory_nbytes(n_files, 8) <= 24 * BAND_NBYTES
    assert default_threads() <= 8


READ_ONLY = "no permission, or a file system mounted read-only"
SMALL_DISK = textwrap.dedent(
    """
    import json, os, shutil, sys
    sys.path.insert(0, sys.argv[1])
    from dcptool.errors import DcptoolError
    from dcptool.ops.convert.convert import ConvertOptions, convert

    source, disk = sys.argv[2:]
    usage = shutil.disk_usage
    results = []
    for to, name in (("torch", "m.pt"), ("safetensors", "m.safetensors"), ("safetensors", "hf"), ("dcp", "step_1")):
        for lying in (False, True):
            # Quotas and many network file systems say there is room when there is none.
            shutil.disk_usage = (lambda path: usage(path)._replace(free=1 << 40)) if lying else usage
            try:
                convert(source, os.path.join(disk, name), to, ConvertOptions(threads=2))
            except DcptoolError as error:
                results.append([to, lying, type(error).__name__, str(error), os.listdir(disk)])
    os.mkdir(os.path.join(disk, "sub"))
    os.system(f"mount -o remount,ro {disk}")
    shutil.disk_usage = usage
    try:
        convert(source, os.path.join(disk, "sub", "deeper", "m.pt"), "torch")
    except DcptoolError as error:
        results.append(["read-only", False, type(error).__name__, str(error), os.listdir(os.path.join(disk, "sub"))])
    print(json.dumps(results))
    """
)


def test_a_disk_that_is_really_full(tmp_path):
    """A tmpfs of 2 MB in a mount namespace of its own, which ends with the process."""
    import numpy as np
    from safetensors.numpy import save_file

    save_file({f"w{i}": np.full(300_000, i, np.float32) for i in range(4)}, tmp_path / "a.safetensors")
    disk = tmp_path / "disk"
    disk.mkdir()
    unshare = shutil.which("unshare")
    prefix = [unshare or "", "--mount", *([] if os.getuid() == 0 else ["--user", "--map-root-user"]), "sh", "-c"]
    mount = f"mount -t tmpfs -o size=2m none {shlex.quote(str(disk))}"
    if unshare is None or subprocess.run([*prefix, mount], capture_output=True, check=False).returncode:
        pytest.skip("mounting is not permitted here")
    python = shlex.join([sys.executable, "-c", SMALL_DISK, str(ROOT), str(tmp_path / "a.safetensors"), str(disk)])
    done = subprocess.run([*prefix, f"{mount} && exec {python}"], capture_output=True, text=True, check=True)
    *results, read_only = json.loads(done.stdout)
    assert read_only[2:] == ["StorageError", f"{disk}/sub cannot be written to: {READ_ONLY}", []]
    assert len(results) == 8
    for _, lying, error, message, left in results:
        assert error == "StorageError"
        assert ("No space left on device" if lying else "not enough space") in message
        assert not left


def test_one_bad_bit_is_told_with_tensor_file_and_bytes(tmp_path):
    folder = damage.copy(SOURCE, tmp_path / "c")
    checkpoint = dcptool.open(folder)
    chunk = checkpoint.tensors["model.embed.weight"].chunks[1]
    record = checkpoint.payload(checkpoint.tensors["model.embed.weight"], chunk).record
    damage.flip_byte(folder / chunk.item.file, chunk.item.byte_offset + record.byte_offset)
    with pytest.raises(ItemError) as caught:
        convert(folder, tmp_path / "m.pt", "torch")
    first, what, hint = str(caught.value).splitlines()
    assert first == f"{folder} is damaged, nothing was written:"
    span = f"bytes {chunk.item.byte_offset:,}–{chunk.item.byte_offset + chunk.item.nbytes:,}"
    assert what.startswith(f"{chunk.item.file}, {span}: 'model.embed.weight' at [6, 0]: bytes were changed")
    assert hint == "--skip-corrupt leaves such entries out."


@pytest.mark.parametrize("to", ["safetensors", "torch", "dcp"])
def test_objects_alone_that_are_left_out_are_no_output(tmp_path, to):
    path = tmp_path / {"safetensors": "out.safetensors", "torch": "out.pt", "dcp": "out"}[to]
    options = () if to == "safetensors" else ("--objects", "skip")
    done = run("convert", FOREIGN / "xver_t2130", path, "--to", to, "--keys", "lr_*", *options)
    assert done.returncode != 0
    assert "no tensor is selected, only objects, such as 'lr_scheduler." in done.stderr
    assert "--objects keep" in done.stderr
    assert names(tmp_path) == []


def test_objects_alone_are_kept_where_that_is_asked(tmp_path):
    options = ("--to", "safetensors", "--objects", "keep")
    done = run("convert", FOREIGN / "xver_t2130", tmp_path / "out", "--keys", "lr_*", *options)
    assert done.returncode == 0, done.stderr
    assert "objects.json" in names(tmp_path / "out")
