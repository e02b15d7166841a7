"""What failed for a reason that may pass is tried again, after longer and longer, and said."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from dcptool.errors import StorageError

WAITS = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds to wait before each further attempt; libraries of stores have tried a few times by then."""
_MAX_REASON = 200

_PASSING = {
    errno.EAGAIN, errno.EBUSY, errno.ESTALE, errno.ETIMEDOUT, errno.ECONNRESET, errno.ECONNABORTED, errno.ECONNREFUSED,
    errno.ENOTCONN, errno.EPIPE, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETRESET, errno.ENETDOWN,
}  # fmt: skip
_PASSING_CLASSES = {
    "ClientConnectionError", "ClientOSError", "ClientPayloadError", "ConnectTimeoutError", "ConnectionClosedError",
    "EOFError", "EndpointConnectionError", "FSTimeoutError", "HTTPClientError", "IncompleteRead", "ReadTimeoutError",
    "ResponseParserError", "ResponseStreamingError", "ServerDisconnectedError",
}  # fmt: skip
"""What libraries of stores raise for a connection that broke or was silent; by name, for none of them is imported."""
_THROTTLED = {408, 429}
_PASSING_CODES = {"BadDigest", "IncompleteBody", "RequestTimeout", "XAmzContentSHA256Mismatch"}
"""What S3 answers with status 400 to a body that did not arrive as it was sent."""

Result = TypeVar("Result")


def may_pass(error: BaseException) -> bool:
    """Tell whether what failed may succeed in a while: a time-out, a connection that broke, a server's own failure."""
    return any(map(_is_passing, _causes(error)))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__


def _is_passing(error: BaseException) -> bool:
    response = getattr(error, "response", None)
    told = None
    if isinstance(response, dict):
        told = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        if response.get("Error", {}).get("Code") in _PASSING_CODES:
            return True
    status = told or getattr(error, "status", None) or getattr(error, "code", None)
    if isinstance(status, int):
        return status >= 500 or status in _THROTTLED
    if isinstance(error, TimeoutError | ConnectionError) or getattr(error, "errno", None) in _PASSING:
        return True
    return any(kind.__name__ in _PASSING_CLASSES for kind in type(error).__mro__)


class Retrying:
    """Tries again what may pass.

    Args:
        say: told in a sentence what failed and when it is tried again, on any thread.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._stopped = threading.Event()
        self.count = 0

    def stop(self) -> None:
        """Have nobody wait or try any more."""
        self._stopped.set()

    def __call__(self, name: str, act: Callable[[], Result]) -> Result:
        """Return what an action on a file returns.

        Raises:
            StorageError: it failed for good, or once too often; names the file.
        """
        for wait in WAITS:
            try:
                return act()
            except StorageError as error:
                if self._stopped.is_set() or not may_pass(error):
                    raise
                self.count += 1
                self._say(f"{name}: {_short(error)}; trying again in {wait:g} s")
            self._stopped.wait(wait)
        try:
            return act()
        except StorageError as error:
            if not may_pass(error):
                raise
            told = f"{_short(error)}; given up after {len(WAITS) + 1} attempts"
            step = "Run it again when that has passed: what has been copied stays, and is not moved again."
            raise StorageError(f"{name}: {told}", next_step=step) from error


def _short(error: StorageError) -> str:
    text = " ".join(error.message.split())
    return text if len(text) <= _MAX_REASON else f"{text[:_MAX_REASON]}…"
