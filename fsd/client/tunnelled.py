"""A connection of `http.client` to a server behind a forward proxy."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from http.client import HTTPSConnection
from typing import Final

from fsd.model.endpoint import Endpoint
from fsd.model.limits import KIB
from fsd.remote.failures import unavailable
from fsd.remote.proxy import Proxy, open_tunnel, within

_BLOCK: Final = 256 * KIB  # bytes of a body sent at once


class Tunnelled(HTTPSConnection):
    """`HTTPSConnection.set_tunnel` has no limit of time in all, and its errors do not tell whose they are."""

    def __init__(
        self,
        endpoint: Endpoint,
        context: ssl.SSLContext,
        proxy: Proxy,
        seconds: float,
        monotonic: Callable[[], float],
    ) -> None:
        super().__init__(endpoint.host, endpoint.port, blocksize=_BLOCK, context=context)
        self._endpoint, self._tls, self._proxy = endpoint, context, proxy
        self._seconds, self._monotonic = seconds, monotonic

    def connect(self) -> None:
        """Within `seconds`, TLS included. Raises `Unavailable` for what the proxy does, `OSError` for the
        server."""
        left = within(self._monotonic, self._seconds)
        try:
            sock = socket.create_connection((self._proxy.host, self._proxy.port), left())
        except OSError as exc:
            raise unavailable(self._proxy.shown, exc) from exc
        try:
            open_tunnel(sock, self._proxy, self._endpoint.authority, left)
            sock.settimeout(left())
            self.sock = self._tls.wrap_socket(sock, server_hostname=self._endpoint.host)
        except BaseException:
            sock.close()
            raise
