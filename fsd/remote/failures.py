"""What a socket's error means for people: the one translation for every transport."""

from __future__ import annotations

import socket
import ssl

from fsd.model.errors import Unavailable
from fsd.model.token import redact


def unavailable(where: str, exc: BaseException) -> Unavailable:
    """The error that `exc`, met while talking to `where`, stands for; the caller raises it `from exc`."""
    if isinstance(exc, TimeoutError):
        return Unavailable(f"no answer from {where} in time")
    if isinstance(exc, ConnectionRefusedError):
        return Unavailable(f"nothing listens at {where} (connection refused)")
    if isinstance(exc, socket.gaierror):
        return Unavailable(f"the host of {where} is not known here", hint="check the endpoint's name")
    if isinstance(exc, ssl.SSLCertVerificationError):
        return Unavailable(
            f"the certificate of {where} is not trusted: {exc.verify_message}",
            hint="give the CA's certificate in SSL_CERT_FILE, or check that the endpoint is the right host",
        )
    if isinstance(exc, ssl.SSLError):
        hint = "does the server speak plain http there? Then the endpoint begins with http://"
        return Unavailable(
            f"{where} does not speak TLS as expected: {exc.reason}",
            hint=hint if exc.reason == "WRONG_VERSION_NUMBER" else None,
        )
    if isinstance(exc, ConnectionError):
        return Unavailable(f"{where} closed the connection without a whole answer")
    if isinstance(exc, OSError) and exc.strerror:
        return Unavailable(f"{where} cannot be reached: {exc.strerror.lower()}")
    return Unavailable(f"{where}: {redact(str(exc))}")
