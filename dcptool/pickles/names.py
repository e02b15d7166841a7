"""What a name in a pickle is, by the name alone: reaches the system, is fine to call, is that of a class.

Source: picklescan 1.0, modelscan 0.8, hayward 1.4 and fickling 0.1 for what is to be warned of; CPython's standard
library for classes that act when they are made.
"""

from __future__ import annotations

import functools
import re
import sys
from typing import Any

_NAMES = """
    _aix_support _ctypes _frozen_importlib _frozen_importlib_external _imp _io _operator _osx_support _pickle
    _posixsubprocess _pyrepl _pytest _sqlite3 _thread _winapi aiohttp ast asyncio atexit bdb builtins cPickle cProfile
    cloudpickle code codeop commands compileall concurrent crypt ctypes curses dill dis distutils doctest ensurepip
    fabric faulthandler fcntl fileinput ftplib gc glob grp http httplib httpx idlelib imaplib importlib inspect invoke
    io joblib lib2to3 linecache marshal mmap msvcrt multiprocessing nntplib nose nt ntpath operator os paramiko pdb
    pexpect pickle pickletools pip pkg_resources pkgutil platform popen2 poplib posix posixpath profile psutil pty pwd
    py_compile pydoc pytest readline requests resource rlcompleter runpy select selectors setuptools sh shelve shutil
    site smtplib socket socketserver sqlite3 ssl subprocess symtable sys syslog telnetlib tempfile threading timeit
    trace tracemalloc tty types unittest urllib urllib2 venv webbrowser win32api winreg xmlrpc zipimport
"""
_REACHING = frozenset(_NAMES.split())
"""Modules that reach the system, the interpreter or other pickles, with all below them."""
_ACTING = re.compile(
    r"numpy\.(f2py|distutils|testing|ctypeslib)\..*|numpy\.(load|fromfile|memmap|save\w*)"
    r"|torch\.(load|hub\..*|serialization\.load|package\..*|multiprocessing\.(?!reductions\.)\w+"
    r"|jit\.(load|unsupported_tensor_ops\..*)|distributed\.(elastic|rpc|run|launch)\..*|_inductor\..*|_dynamo\.guards\..*"
    r"|fx\.experimental\..*|utils\.(collect_env|bottleneck|_config_module|cpp_extension|model_zoo|tensorboard"
    r"|data\.datapipes\.utils)\..*)"
    r"|logging\.(\w*FileHandler|handlers\..*|config\..*)|uuid\._\w+|(cgitb|test\.(support|libregrtest))\..*|pandas\.(read_pickle|eval)"
)
"""Names inside packages that are fine otherwise."""
_FINE = re.compile(
    r"builtins\.(set|frozenset|list|dict|tuple|slice|x?range|complex|bytearray|bytes|int|float|str|bool|object|type|long|unicode"
    r"|Ellipsis|NotImplemented|max|min|sum|abs|len|round|sorted|any|all|[A-Z]\w*(Error|Exception|Warning|Iteration))"
    r"|torch\.([A-Za-z]+Storage|Size|device|dtype|Generator|[a-z]+\d\w*|bool|half|float|double|long|short|int|bits\w*"
    r"|strided|sparse_\w+|contiguous_format|channels_last\w*|preserve_format|Tensor|per_(tensor|channel)_\w+)"
    r"|torch\.jit\._pickle\.\w+|torch\.(_utils|_tensor|nested\._internal\.nested_tensor)\._rebuild_\w+"
    r"|torch\.([a-z_]\w*\.)*(_get_layout|_?MEM_FORMAT_ENCODING|_StorageInfo|_remote_device)"
    r"|numpy\.((_core|core|ma\.core)\.(multiarray\.(_reconstruct|scalar)|numeric\._frombuffer|_mareconstruct)|dtype"
    r"|ma\.core\._mareconstruct|ndarray|bool_?|u?int\d+|float\d+"
    r"|([a-z_]\w*\.)*(__randomstate_ctor|__generator_ctor|__bit_generator_ctor|__pyx_unpickle_[A-Z]\w*))"
    r"|_codecs\.encode|copyreg\.(_reconstructor|__newobj__)|functools\.partial|re\._compile|types\.(SimpleNamespace|GenericAlias)|http\.HTTP(Status|Method)"
    r"|inspect\.(_empty|Parameter|Signature|_ParameterKind)"
    r"|(io|_io)\.(BytesIO|StringIO)|array\.(array|_array_reconstructor)|logging\.getLogger|itertools\.count"
    r"|joblib\.numpy_pickle\.NumpyArrayWrapper"
    r"|(collections|argparse|pathlib|datetime|decimal|_decimal|fractions|uuid|enum|signal|zoneinfo|ipaddress|random)"
    r"\.(_?[A-Z]\w*|defaultdict|deque|datetime|date|time|timedelta|timezone)"
)
"""What torch's, DCP's and Megatron-core's own writers make, and values of common packages."""
_WRITTEN_NAMES = """
    torch._utils._rebuild_tensor_v2 torch._utils._rebuild_tensor_v3 torch._utils._rebuild_parameter
    torch._utils._rebuild_parameter_with_state torch._tensor._rebuild_from_type_v2 torch.serialization._get_layout
    torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING torch.Size torch.device collections.OrderedDict
    numpy._core.multiarray._reconstruct numpy.core.multiarray._reconstruct numpy._core.multiarray.scalar
    numpy.core.multiarray.scalar numpy.dtype _codecs.encode builtins.set pathlib.PosixPath
    collections.defaultdict
"""
_WRITTEN = frozenset(_WRITTEN_NAMES.split())
"""What nearly all checkpoints call."""
_WRITTEN_LAST = {name.rpartition(".")[2] for name in _WRITTEN}
_LAUNCHERS = frozenset(
    ("Popen", "CDLL", "PyDLL", "WinDLL", "OleDLL", "FileIO", "CodeType", "FunctionType", "LambdaType", "ModuleType")
)
"""Classes that other modules import from those above."""
_MAKING_CLASSES = re.compile(r"enum\.Enum(Meta|Type)|.*\.(ABCMeta|\w*TypeMeta|_ProtocolMeta|_TensorMeta)")
_TORCH_OF_TEXT = re.compile(
    r"torch\.(torch_version|optim|nn|amp|distributed\.(checkpoint|fsdp|tensor|_shard|_tensor|device_mesh))\..*"
)
"""Parts of torch whose classes are made of text, as enums are; others take paths and addresses."""


def reaches(module: str, name: str) -> bool:
    """Tell whether a name is of what reaches the system, the interpreter or other pickles, called or not.

    Args:
        module: as imported.
        name: in it; with dots it may lead through modules that this one imports: `torch.storage`, `io.FileIO`.
    """
    full = f"{module}.{name}"
    if full.partition(".")[0] in _REACHING:
        return not _FINE.fullmatch(full)
    through = name.split(".")[:-1]
    return any(part.strip("_") in _REACHING for part in through) or _ACTING.fullmatch(full) is not None


@functools.lru_cache(1024)
def is_fine(name: str) -> bool:
    """Tell whether any call of a function or class is fine."""
    return _FINE.fullmatch(name) is not None and not _MAKING_CLASSES.fullmatch(name)


def is_nearly_written(told: str) -> bool:
    """Tell whether what `Calls.unsafe` tells may be what nearly all checkpoints call, but for a changed bit.

    Such a bit changes one character of a name, or makes an opcode do something else with the name.
    """
    words, _, name = told.rpartition(" ")
    if words:
        return not name.rpartition(".")[0] or name.rpartition(".")[2] in _WRITTEN_LAST or name.endswith("Storage")
    same = (known for known in _WRITTEN if len(known) == len(name))
    return name.startswith(".") or any(sum(map(str.__ne__, known, name)) == 1 for known in same)


def may_be_made(name: str, args: Any) -> bool:
    """Tell whether a call that is not `is_fine` may be that of a class whose instances are values.

    Of a class of the job's own no more is known. Those of the standard library and of torch are known: made of one
    number they are members of enums, made of text many open a file, a socket or a process.
    """
    if not is_class(name) or name.rpartition(".")[2] in _LAUNCHERS or _MAKING_CLASSES.fullmatch(name):
        return False
    top = name.partition(".")[0]
    if top in sys.stdlib_module_names:
        is_member = isinstance(args, tuple) and len(args) == 1 and isinstance(args[0], int)
        return is_member or name.endswith(("Error", "Exception", "Warning"))
    if top == "torch" and not _TORCH_OF_TEXT.fullmatch(name):
        return isinstance(args, tuple) and not any(isinstance(arg, str | bytes) for arg in args)
    return True


def is_class(name: str) -> bool:
    """Tell whether a name looks like that of a class, in a module: `pkg.Thing`, not `pkg.Thing.method`."""
    return name.rpartition(".")[2].lstrip("_")[:1].isupper()


def may_be_new(name: str) -> bool:
    """Tell whether an instance made without a call is a value: not of a function-like class as `itertools.starmap`."""
    return is_fine(name) or is_class(name) or name.partition(".")[0] not in sys.stdlib_module_names
