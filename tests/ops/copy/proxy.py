"""A proxy between a client and an HTTP server that counts what passes, and delays, cuts off or refuses some of it."""

from __future__ import annotations

import random
import socket
import threading
import time
from contextlib import suppress
from typing import NamedTuple

REFUSAL = (
    b"HTTP/1.1 503 Slow Down\r\nContent-Type: application/xml\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s"
)
BODY = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Reduce your request rate</Message></Error>"


class Weather(NamedTuple):
    """How likely it is, for each connection, that it is refused, and for each piece, that it is cut or delayed."""

    refused: float = 0.0
    cut: float = 0.0
    delayed: float = 0.0
    seconds: float = 0.05
    dark: bool = False
    """Nothing passes: connections end at once."""


class Proxy:
    """Listens on loopback; a context manager. `sent` counts the bytes that clients sent through it."""

    def __init__(self, endpoint: str, seed: int = 0) -> None:
        host, _, port = endpoint.removeprefix("http://").partition(":")
        self._server = (host, int(port))
        self.weather = Weather()
        self.sent = self.received = self.spoilt = 0
        self._random = random.Random(seed)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._closed = False

    def __enter__(self) -> Proxy:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _happens(self, chance: float) -> bool:
        happens = self._random.random() < chance
        self.spoilt += happens
        return happens

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client:
            if self.weather.dark:
                return
            if self._happens(self.weather.refused):
                with suppress(OSError):
                    client.recv(1 << 16)
                    client.sendall(REFUSAL % (len(BODY), BODY))
                    client.shutdown(socket.SHUT_WR)
                    while client.recv(1 << 16):
                        pass
                return
            with suppress(OSError), socket.create_connection(self._server) as server:
                back = threading.Thread(target=self._pass, args=(server, client, False), daemon=True)
                back.start()
                self._pass(client, server, True)
                back.join()

    def _pass(self, one: socket.socket, other: socket.socket, is_sent: bool) -> None:
        with suppress(OSError):
            while data := one.recv(1 << 16):
                if self.weather.dark or self._happens(self.weather.cut):
                    break
                if self._happens(self.weather.delayed):
                    time.sleep(self.weather.seconds)
                if is_sent:
                    self.sent += len(data)
                else:
                    self.received += len(data)
                other.sendall(data)
        for end in (one, other):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
