"""What a pickle would run, were it loaded: every name it imports and every call, whether its result is used or not.

Decides by name alone. A pickle may name and make what torch's and DCP's own writers do, and what values of common
packages need. A class of the job's own is foreign: its package is imported, no more is known. Any other function, and
whatever belongs to modules that reach the system, the interpreter or other pickles, is unsafe.

Source: CPython's pickle, for how REDUCE, INST, OBJ, NEWOBJ and names with dots are resolved; picklescan and fickling,
for what is to be warned of.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from dcptool.pickles.standins import Global, Node, qualified_name

_NAMES = """
    _io _operator _pickle _pytest _thread _winapi aiohttp ast asyncio atexit bdb builtins cPickle cProfile
    cloudpickle code codeop commands concurrent crypt ctypes curses dill dis distutils doctest ensurepip fabric
    faulthandler fcntl fileinput ftplib gc glob grp http httplib httpx idlelib imaplib importlib inspect invoke io
    joblib lib2to3 linecache marshal mmap msvcrt multiprocessing nntplib nose nt ntpath operator os paramiko pdb
    pickle pickletools pip pkg_resources pkgutil popen2 poplib posix posixpath profile psutil pty pwd pytest
    readline requests resource rlcompleter runpy setuptools sh shelve shutil smtplib socket socketserver ssl
    subprocess symtable sys syslog telnetlib tempfile threading timeit trace tracemalloc tty types unittest urllib
    urllib2 venv webbrowser win32api winreg xmlrpc zipimport
"""
_REACHING = frozenset(_NAMES.split())
"""Modules that reach the system, the interpreter or other pickles, with all below them."""
_FINE = re.compile(
    r"builtins\.(set|frozenset|list|dict|tuple|slice|x?range|complex|bytearray|bytes|int|float|str|bool|object|type"
    r"|Ellipsis|NotImplemented|max|min|sum|abs|len|round|sorted|any|all|[A-Z]\w*(Error|Exception|Warning|Iteration))"
    r"|torch\.([A-Za-z]+Storage|Size|device|dtype|Generator|[a-z]+\d\w*|bool|half|float|double|long|short|int|bits\w*"
    r"|strided|sparse_\w+|contiguous_format|channels_last\w*|preserve_format|Tensor|per_(tensor|channel)_\w+)"
    r"|torch\.([a-z_]\w*\.)*(_rebuild_\w+|_get_layout|_?MEM_FORMAT_ENCODING|_StorageInfo|_remote_device)"
    r"|torch\.([a-z_]\w*\.)+_?[A-Z]\w*"
    r"|numpy\.(_?core\.(multiarray\.(_reconstruct|scalar)|numeric\._frombuffer)|dtype|ndarray"
    r"|([a-z_]\w*\.)*(__randomstate_ctor|__generator_ctor|__bit_generator_ctor|__pyx_unpickle_[A-Z]\w*|_?[A-Z]\w*"
    r"|bool_?|u?int\d+|float\d+))"
    r"|_codecs\.encode|copyreg\.(_reconstructor|__newobj__)|functools\.partial|re\._compile|types\.SimpleNamespace"
    r"|(io|_io)\.(BytesIO|StringIO)"
    r"|(collections|argparse|pathlib|datetime|decimal|_decimal|fractions|uuid|enum|signal|zoneinfo|ipaddress|random)"
    r"\.(_?[A-Z]\w*|defaultdict|deque|datetime|date|time|timedelta|timezone)"
)
"""What torch's, DCP's and Megatron-core's own writers make, and values of common packages."""
_GETATTR = "builtins.getattr"
_NESTING = "torch.storage._load_from_bytes"


class Calls:
    """What one pickle imports and calls; filled while it is read.

    Attributes:
        names: `module.name` of all it imports.
        n_persistent: persistent ids in it, which stand for what is outside.
        nested: what torch.save wrote before torch 1.6, as `pickle` stores tensors: more pickles, to be looked into.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.n_persistent = 0
        self._called: set[Global] = set()
        self._results: list[Node] = []
        self._attributes: list[Any] = []
        self.nested: list[bytes] = []

    def call(self, function: Any, args: Any) -> None:
        """Note a call, by REDUCE, INST or OBJ."""
        if isinstance(function, Node):
            self._results.append(function)
        elif isinstance(function, Global):
            if qualified_name(function) == _NESTING and _is_bytes(args):
                self.nested += args
                return
            self._called.add(function)
            if function.name == "getattr":
                self._attributes.append(args)

    @property
    def unsafe(self) -> tuple[str, ...]:
        """What runs code, by name, sorted."""
        return tuple(sorted({*filter(_reaches, self.names - self._enum_getattr()), *self._unsafe_calls()}))

    def _enum_getattr(self) -> set[str]:
        """Return the name of getattr if it only gets members of classes, as enums are pickled in some Pythons."""
        return {_GETATTR} if self._attributes and all(map(_is_member, self._attributes)) else set()

    def _unsafe_calls(self) -> Iterator[str]:
        for function in self._called:
            name = qualified_name(function)
            if name != _GETATTR and not _FINE.fullmatch(name) and not _is_class(name):
                yield name
        for node in self._results:  # what a call gave is called: an attribute of something, a partial
            yield f"the result of {qualified_name(node)}"


def _reaches(name: str) -> bool:
    return name.partition(".")[0] in _REACHING and not _FINE.fullmatch(name)


def _is_class(name: str) -> bool:
    """Tell whether a name looks like that of a class, in a module: `pkg.Thing`, not `pkg.Thing.method`."""
    return name.rpartition(".")[2].lstrip("_")[:1].isupper()


def _is_bytes(args: Any) -> bool:
    return isinstance(args, tuple) and len(args) == 1 and isinstance(args[0], bytes)


def _is_member(args: Any) -> bool:
    """Tell whether arguments of getattr name a member of a class: (class, "NAME")."""
    if not (isinstance(args, tuple) and len(args) == 2 and isinstance(args[1], str)):
        return False
    owner = qualified_name(args[0]) if isinstance(args[0], Global) else ""
    return _is_class(owner) and not _reaches(owner) and not args[1].startswith("__")
