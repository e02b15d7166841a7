"""Input built or broken to harm: under a memory limit, a time cap and an audit hook, the outcome is one clear line.

Everything runs in a child whose audit hook, installed after a warm-up, fails on any import, exec, process, socket or
file outside the folder under test. It is forked from a process that has done the warm-up.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from functools import cache

import pytest

from tests.conftest import FOREIGN, ROOT
from tests.damage import copy, flip_byte, truncate
from tests.pickles.test_inert import BOMBS, DAMAGED

CHILD = r"""
import json, os, resource, signal, sys, time
sys.path.insert(0, sys.argv[1])
import dcptool, difflib, shlex, zstandard, numpy, ml_dtypes
from dcptool.errors import DcptoolError
from dcptool.pickles import files, plain
from dcptool.render.inspect import to_text
from dcptool.render.inspect_json import to_json
from dcptool.ops.inspect.inspect import summarize

def look(path):
    '''Read everything there is at a path; return what was wrong, None if nothing.'''
    summary = summarize(path)
    to_text(summary, 80)
    json.dumps(to_json(summary), allow_nan=False)
    wrong = [problem.message for found in summary.checkpoints for problem in found.problems]
    wrong += [item.error for found in summary.checkpoints for item in found.objects if item.error]
    wrong += [step.reason for step in summary.steps if step.reason]
    if not summary.steps and len(summary.checkpoints) == 1:
        checkpoint = dcptool.open(path)
        for fqn in checkpoint.tensors:
            try:
                checkpoint.read(fqn)
            except DcptoolError as error:
                wrong.append(str(error))
    return wrong[0] if wrong else None

FORBIDDEN = {"import", "exec", "compile", "os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.fork",
             "socket.connect", "ctypes.dlopen", "pickle.find_class"}
def guarded(paths):
    '''Look at each path with little memory and time, and under the hook; print what came of it.'''
    signal.alarm(120)
    limit = 2 << 30
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    allowed = ""
    bad = []
    def hook(event, args):
        if event in FORBIDDEN:
            bad.append(f"{event} {args!r}"[:200])
        elif event == "open" and isinstance(args[0], str) and not args[0].startswith(allowed):
            bad.append(f"open {args[0]}")
    sys.addaudithook(hook)
    results = {}
    for path in paths:
        # A file may look at its folder, a folder at nothing outside it.
        allowed, began = path if os.path.isdir(path) else path.rsplit("/", 1)[0], time.monotonic()
        bad.clear()
        try:
            outcome = ["ok", look(path)]
        except DcptoolError as error:
            outcome = ["error", str(error)]
        except BaseException as error:
            outcome = ["BUG", f"{type(error).__name__}: {error}"]
        results[path] = [*outcome, list(bad), time.monotonic() - began]
    allowed = ""
    print(json.dumps(results), flush=True)

for path in json.loads(sys.argv[2]):
    look(path)
for line in sys.stdin:
    child = os.fork()
    if not child:
        guarded(json.loads(line))
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""

SMALL = FOREIGN / "w_nodist"


@cache
def warm_process():
    """The process that forks the guarded ones: it takes paths and answers with their outcomes and an exit code."""
    warm = ["w_nodist", "w_noflatten", "xver_t222", "w_zstd", "dtypes_keys_t2130", "hf_sharded", "run_crashed"]
    command = [sys.executable, "-c", CHILD, str(ROOT), json.dumps([str(FOREIGN / name) for name in warm])]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.fixture(scope="module", autouse=True)
def _end_of_the_warm_process():
    yield
    if warm_process.cache_info().currsize:
        process = warm_process()
        process.communicate()
        warm_process.cache_clear()


def outcomes(paths):
    """Look at each path in a guarded child; give [kind, message, forbidden events, seconds] by path."""
    process = warm_process()
    process.stdin.write(json.dumps([str(path) for path in paths]) + "\n")
    process.stdin.flush()
    found = json.loads(process.stdout.readline())
    assert isinstance(found, dict), f"the child ended with {found}"
    assert json.loads(process.stdout.readline()) == 0
    return found


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
    check(outcomes([with_metadata(tmp_path / f"cut {n}", data[:n]) for n in range(len(data))]))


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
            archive.writestr("model/version", b"3\n")
        paths.append(path)
    for name, method in {"deflated": zipfile.ZIP_DEFLATED, "no pickle": zipfile.ZIP_STORED}.items():
        path = tmp_path / name / "model.pt"
        path.parent.mkdir()
        with zipfile.ZipFile(path, "w", method) as archive:
            archive.writestr("model/data.pkl" if name == "deflated" else "model/other", bytes(100 << 20))
            archive.writestr("model/version", b"3\n")
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


def torch_zip(path, pickled, **records):
    """A `.pt` file with a pickle and storages of our own making."""
    import zipfile

    path.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model/data.pkl", pickled)
        for name, data in records.items():
            archive.writestr(f"model/data/{name}", data)
    return path


def doubled_lists(levels):
    """Opcodes of a list that holds a list twice, and so on: small to write, endless to print."""
    body = b"]\x94"
    for level in range(levels):
        body += b"]\x94(" + b"h" + bytes([level]) + b"h" + bytes([level]) + b"e"
    return body


def test_graphs_that_are_endless_to_print_in_every_field(tmp_path):
    doubled, deep = doubled_lists(40), b"]" * 5000 + b"a" * 4999
    paths = []
    for name, value in {
        "doubled": doubled,
        "deep": deep,
        "huge number": b"\x8b\xa0\x86\x01\x00" + b"\x01" * 100_000,
    }.items():
        for field in ("version", "state_dict_metadata", "planner_data", "storage_data", "storage_meta"):
            fields = {"state_dict_metadata": b"}", "storage_data": b"}", field: value}
            state = b"".join(b"\x8c" + bytes([len(key)]) + key.encode() + item for key, item in fields.items())
            start = b"\x80\x04" + value if name == "doubled" else b"\x80\x04"
            head = b"0" if name == "doubled" else b""  # the memo must number the lists from 0
            body = start + head + b"\x8c\x25torch.distributed.checkpoint.metadata\x8c\x08Metadata\x93)\x81}("
            if name == "doubled":
                state = state.replace(value, b"h\x28")
            paths.append(with_metadata(tmp_path / f"{name} {field}", body + state + b"ub."))
        size = b"\x80\x04" + doubled + b"0\x8c\x05torch\x8c\x04Size\x93h\x28\x85R."
    paths.append(with_metadata(tmp_path / "size", size))
    check(outcomes(paths), expect_wrong=False)


def test_pt_files_that_multiply(tmp_path):
    body = b"\x80\x02}q\x00"
    for level in range(40):
        body += (
            b"}q" + bytes([level + 1]) + b"(K\x00h" + bytes([level]) + b"X\x01\x00\x00\x000h" + bytes([level]) + b"u"
        )
    colliding = b"\x80\x02}(" + b"".join(
        b"\x8a\x0a" + (index * (2**61 - 1)).to_bytes(10, "little") + b"N" for index in range(1, 40_000)
    ) + b"u."  # fmt: skip
    calls = b"\x80\x02cm\nn\n" + b")R" * 40_000 + b"q\x00" + b"(" + b"h\x00" * 20_000 + b"l."
    list_key = b"\x80\x02ccollections\nOrderedDict\n)R(]Nu."
    odd_set = b"\x80\x02c__builtin__\nset\n](ccollections\nOrderedDict\n)Re\x85R."
    long_int = b"\x80\x02}X\x01\x00\x00\x00k\x8b\x00\x10\x00\x00" + b"\x01" * 4096 + b"s."
    named = {
        "dicts": body + b".",
        "colliding": colliding,
        "calls": calls,
        "key": list_key,
        "set": odd_set,
        "int": long_int,
    }
    paths = [torch_zip(tmp_path / name / "model.pt", pickled) for name, pickled in named.items()]
    results = outcomes(paths)
    check(results, expect_wrong=False)
    assert results[str(paths[0])][0] == results[str(paths[1])][0] == "error"


def test_names_of_files_that_count_too_far(tmp_path):
    folder = copy(FOREIGN / "w_no_collectives", tmp_path / "ranks")
    (folder / "__0.metadata").rename(folder / "__2000000000.metadata")
    shards = copy(FOREIGN / "hf_sharded", tmp_path / "shards")
    (shards / "shard-00002-model-00001-of-00001.safetensors").rename(
        shards / "shard-99999-model-00001-of-00001.safetensors"
    )
    with open(tmp_path / "sparse.metadata", "wb") as sparse:
        sparse.truncate(3 << 30)
    hole = with_metadata(tmp_path / "hole", b"")
    (tmp_path / "sparse.metadata").rename(hole / ".metadata")
    check(outcomes([folder, shards, hole]))


def test_safetensors_headers_that_lie(tmp_path):
    def stored(header, data):
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + data

    def tensor(start, end):
        return {"dtype": "U8", "shape": [end - start], "data_offsets": [start, end]}

    sharding = {"DCP_SHARDING_INFO": json.dumps({"a": {"saved_offsets": [(1 << 62) - 1]}})}
    deep = {"DCP_SHARDING_INFO": "[1," * 100_000}
    files = {
        "overlap": stored({"a": tensor(0, 4), "b": tensor(2, 6)}, bytes(6)),
        "trailing": stored({"a": tensor(0, 4)}, bytes(9)),
        "gap": stored({"a": tensor(2, 4)}, bytes(4)),
        "far": stored({"__metadata__": sharding, "a": tensor(0, 4)}, bytes(4)),
        "deep": stored({"__metadata__": deep, "a": tensor(0, 4)}, bytes(4)),
    }
    paths = []
    for name, data in files.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(data)
        paths.append(tmp_path / name)
    check(outcomes(paths))
