"""Input built or broken to harm: under a memory limit, a time cap and an audit hook, the outcome is one clear line.

Everything runs in one child whose audit hook, installed after a warm-up, fails on any import, exec, process, socket
or file outside the folder under test.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys

import pytest

from tests.conftest import FOREIGN, ROOT
from tests.damage import copy, flip_byte, truncate
from tests.test_inert import BOMBS, DAMAGED

CHILD = r"""
import json, resource, sys, time
sys.path.insert(0, sys.argv[1])
import dcptool, difflib, shlex, zstandard, numpy, ml_dtypes
from dcptool.errors import DcptoolError
from dcptool.pickles import plain
from dcptool.summary import summarize

def look(path):
    '''Read everything there is at a path; return what was wrong, None if nothing.'''
    summary = summarize(path)
    wrong = [problem.message for found in summary.checkpoints for problem in found.problems]
    wrong += [item.error for found in summary.checkpoints for item in found.objects if item.error]
    wrong += [step.problem for step in summary.steps if step.problem]
    if not summary.steps and len(summary.checkpoints) == 1:
        checkpoint = dcptool.open(path)
        for fqn in checkpoint.tensors:
            try:
                checkpoint.read(fqn)
            except DcptoolError as error:
                wrong.append(str(error))
    return wrong[0] if wrong else None

for path in json.loads(sys.argv[2])["warm"]:
    look(path)
limit = 2 << 30
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
allowed = ""
bad = []
def hook(event, args):
    if event in ("import", "exec", "compile", "os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.fork",
                 "socket.connect", "ctypes.dlopen", "pickle.find_class"):
        bad.append(f"{event} {args!r}"[:200])
    elif event == "open" and isinstance(args[0], str) and not args[0].startswith(allowed):
        bad.append(f"open {args[0]}")
sys.addaudithook(hook)
results = {}
for path in json.loads(sys.argv[2])["paths"]:
    allowed, began = path.rsplit("/", 1)[0], time.monotonic()
    bad.clear()
    try:
        outcome = ["ok", look(path)]
    except DcptoolError as error:
        outcome = ["error", str(error)]
    except BaseException as error:
        outcome = ["BUG", f"{type(error).__name__}: {error}"]
    results[path] = [*outcome, list(bad), time.monotonic() - began]
allowed = ""
print(json.dumps(results))
"""

SMALL = FOREIGN / "w_nodist"


def outcomes(paths):
    """Look at each path in a guarded child; give [kind, message, forbidden events, seconds] by path."""
    warm = [str(FOREIGN / name) for name in ("w_nodist", "w_noflatten", "xver_t222", "w_zstd", "dtypes_keys_t2130")]
    warm += [str(FOREIGN / "hf_sharded"), str(FOREIGN / "run_crashed")]
    given = json.dumps({"warm": warm, "paths": [str(path) for path in paths]})
    command = [sys.executable, "-c", CHILD, str(ROOT), given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def check(results, expect_wrong=True):
    for path, (kind, message, forbidden, seconds) in results.items():
        name = os.path.basename(path)
        assert kind != "BUG", f"{name}: {message}"
        assert not forbidden, f"{name}: {forbidden}"
        assert seconds < 20, f"{name}: {seconds} s"
        if expect_wrong:
            assert message, f"{name} was accepted without a word"
            assert len(message.splitlines()) <= 2 or "holds" in message, message
            assert "Traceback" not in message


def with_metadata(folder, data):
    folder.mkdir()
    (folder / ".metadata").write_bytes(data)
    (folder / "__0_0.distcp").write_bytes((SMALL / "__0_0.distcp").read_bytes())
    return folder


class Evil:
    def __reduce__(self):
        return (os.system, ("touch executed",))


def test_metadata_that_is_none(tmp_path):
    texts = {
        "empty": b"",
        "lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n",
        "html": b"<!DOCTYPE html><html>404</html>",
        "text": b"hello\n" * 100,
        "zeros": bytes(4096),
        "evil": pickle.dumps(Evil()),
        "evil inside": pickle.dumps({"state_dict_metadata": Evil()}),
        "a list": pickle.dumps([1, 2]),
        "one byte": b"\x80",
    }
    texts |= {f"bomb {index}": data for index, data in enumerate(BOMBS.values())}
    texts |= {f"damaged {index}": data for index, data in enumerate(DAMAGED.values())}
    results = outcomes([with_metadata(tmp_path / name, data) for name, data in texts.items()])
    check(results)
    assert {kind for kind, *_ in results.values()} == {"error"}
    says = {name: results[str(tmp_path / name)][1] for name in texts}
    assert "is empty" in says["empty"]
    assert "git lfs pull" in says["lfs"]
    assert "download failed" in says["html"]
    assert "looks like text" in says["text"]
    assert not os.path.exists("executed")


def test_every_cut_of_a_small_metadata(tmp_path):
    data = (SMALL / ".metadata").read_bytes()
    check(outcomes([with_metadata(tmp_path / f"cut {n}", data[:n]) for n in range(0, len(data), 3)]))


def test_items_built_to_harm(tmp_path):
    """Evil objects in place of objects and tensors, and zips that claim too much."""
    import zipfile

    paths = []
    for name, content in {
        "evil": pickle.dumps(Evil(), 2),
        "bomb": BOMBS["tuples that double"],
        "huge": BOMBS["memo index of LONG_BINPUT"],
        "deep": b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b".",
    }.items():
        path = tmp_path / name / "model.pt"
        path.parent.mkdir()
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("model/data.pkl", b"\x80\x02}X\x01\x00\x00\x00k" + content[2:-1] + b"s.")
        paths.append(path)
    for name, method in {"deflated": zipfile.ZIP_DEFLATED, "no pickle": zipfile.ZIP_STORED}.items():
        path = tmp_path / name / "model.pt"
        path.parent.mkdir()
        with zipfile.ZipFile(path, "w", method) as archive:
            archive.writestr("model/data.pkl" if name == "deflated" else "model/other", bytes(100 << 20))
        paths.append(path)
    results = outcomes(paths)
    check(results, expect_wrong=False)
    assert results[str(paths[0])][0] == "ok"  # an opaque object is shown as what it is
    for path in paths[1:]:
        assert results[str(path)][1], path


def test_paths_that_leave_the_folder(tmp_path):
    data = (SMALL / ".metadata").read_bytes()
    name = b"__0_0.distcp"
    for index, escape in enumerate(
        [b"../x.distcp\0"[:12], b"/etc/passwd.", b"a/../../bbbb", b"..\\xxxxxxxx\\"[:12], b"C:/windows/x"]
    ):
        assert len(escape) == len(name)
        folder = with_metadata(tmp_path / str(index), data.replace(name, escape))
        results = outcomes([folder])
        check(results)
        assert "outside the checkpoint's folder; refused" in results[str(folder)][1]


def test_shapes_beyond_memory(tmp_path):
    safe = tmp_path / "st"
    safe.mkdir()
    header = {"x": {"dtype": "F32", "shape": [10**9, 10**6], "data_offsets": [0, 4 * 10**15]}}
    text = json.dumps(header).encode()
    (safe / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    long_header = tmp_path / "long"
    long_header.mkdir()
    (long_header / "model.safetensors").write_bytes((1 << 62).to_bytes(8, "little") + b"{}")
    deep = tmp_path / "deep"
    deep.mkdir()
    text = b'{"x":' * 20 + b"[" * 100_000
    (deep / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    # a tensor of 10**15 elements whose only chunk is one small item
    data = (SMALL / ".metadata").read_bytes()
    big = data.replace(b"K\x03K\x05\x86", b"\x8a\x07" + (10**15).to_bytes(7, "little") + b"\x85", 1)
    assert big != data
    check(outcomes([safe, long_header, deep, with_metadata(tmp_path / "dcp", big)]))


@pytest.mark.parametrize("name", ["w_nodist", "w_zstd", "w_safetensors", "hf_sharded", "w_no_collectives"])
def test_seeded_flips_in_any_file_never_surprise(tmp_path, name):
    """Data files too: what CRCs cover is found; what nothing covers may read, but never crashes."""
    import random

    rng = random.Random(name)
    paths = []
    for index in range(60):
        folder = copy(FOREIGN / name, tmp_path / str(index))
        files = [file for file in sorted(folder.iterdir()) if file.stat().st_size]
        file = rng.choice(files)
        flip_byte(file, rng.randrange(file.stat().st_size), 1 << rng.randrange(8))
        paths.append(folder)
    check(outcomes(paths), expect_wrong=False)


def test_data_files_cut_anywhere_are_noticed(tmp_path):
    size = (SMALL / "__0_0.distcp").stat().st_size
    paths = []
    for nbytes in range(0, size, 97):
        folder = copy(SMALL, tmp_path / str(nbytes))
        truncate(folder / "__0_0.distcp", nbytes)
        paths.append(folder)
    check(outcomes(paths))
