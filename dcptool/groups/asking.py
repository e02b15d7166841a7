"""Rank 0 decides something for all, and asks the others for what only they have.

Who is not asked waits for questions. Messages go over the group's own connections: no port is opened for them.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from dcptool.errors import DcptoolError
from dcptool.groups.group import ProcessGroup, connected
from dcptool.groups.sharing import attempt, outcome

T = TypeVar("T")
Ask = Callable[[int, Any], Any]
"""Returns what a rank answers to a question, or raises its error, which names that rank."""

PATIENCE_SECONDS = 60.0
"""How often those who wait are told that it goes on: gloo gives up who waits for longer than the group's timeout."""


def agree_asking(group: ProcessGroup, decide: Callable[[Ask], T], answer: Callable[[Any], Any]) -> T:
    """Do something on rank 0, which may ask the others meanwhile, and return on every member what it gave.

    Args:
        group: of all members, each of which calls this.
        decide: called on rank 0 alone with a function that asks; that may be called on any thread.
        answer: called on the others, with a question; what it returns, or the DcptoolError it raises, is the answer.

    Raises:
        DcptoolError: what `decide` raised, on all members: on the others marked as told by rank 0.
        WorkerError: a member is gone.
    """
    if group.rank:
        with suppress(RuntimeError):  # the connection broke: the next meeting says why
            _answer_all(group, answer)
        return outcome(group, None)
    with _Asking(group).open() as ask:
        found = attempt(group, lambda: decide(ask))
    return outcome(group, found)


class _Asking:
    """Rank 0's side."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._turns = {rank: threading.Lock() for rank in range(1, group.size)}
        self._over = threading.Event()

    @contextmanager
    def open(self) -> Iterator[Ask]:
        """Let the others be asked; at the end they are told that no question comes any more."""
        beating = threading.Thread(target=self._beat, name="patience", daemon=True)
        beating.start()
        try:
            yield self._ask
        finally:
            self._over.set()
            beating.join()
            self._tell_all("end")

    def _ask(self, rank: int, question: Any) -> Any:
        with self._turns[rank], connected():
            _send(rank, ("ask", question))
            answer = _receive(rank)
        if isinstance(answer, DcptoolError):
            raise answer.saying(f"rank {rank} of {self._group.size}: {answer.message}")
        return answer

    def _beat(self) -> None:
        while not self._over.wait(min(PATIENCE_SECONDS, self._group.timeout / 4)):
            self._tell_all("wait")

    def _tell_all(self, word: str) -> None:
        for rank, turn in self._turns.items():
            with turn, suppress(RuntimeError):
                _send(rank, (word, None))


def _answer_all(group: ProcessGroup, answer: Callable[[Any], Any]) -> None:
    while True:
        word, question = _receive(0)
        if word == "end":
            return
        if word == "ask":
            _send(0, attempt(group, lambda question=question: answer(question)))  # type: ignore[misc]


def _send(rank: int, value: Any) -> None:
    import torch
    import torch.distributed as dist

    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    dist.send(torch.tensor([len(data)]), rank)
    dist.send(data, rank)


def _receive(rank: int) -> Any:
    import torch
    import torch.distributed as dist

    length = torch.zeros(1, dtype=torch.int64)
    dist.recv(length, rank)
    data = torch.empty(int(length), dtype=torch.uint8)
    dist.recv(data, rank)
    return pickle.loads(data.numpy().tobytes())  # noqa: S301  (of a member, as what torch gathers is)
