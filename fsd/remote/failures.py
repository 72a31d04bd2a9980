"""What a socket's error means for people: the one translation for every transport."""

from __future__ import annotations

import os
import socket
import sys

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
    if isinstance(exc, ConnectionError):
        return Unavailable(f"{where} closed the connection without a whole answer")
    told = _of_tls(where, exc)
    if told is not None:
        return told
    if isinstance(exc, OSError) and exc.strerror:
        return Unavailable(f"{where} cannot be reached: {exc.strerror.lower()}")
    return Unavailable(f"{where}: {redact(str(exc))}")


def _of_tls(where: str, exc: BaseException) -> Unavailable | None:
    if "ssl" not in sys.modules:  # a mount whose endpoint is plain http does without it
        return None
    import ssl

    if isinstance(exc, ssl.SSLCertVerificationError):
        return Unavailable(
            f"the certificate of {where} is not trusted: {exc.verify_message}",
            hint=_whom_to_trust(),
        )
    if isinstance(exc, ssl.SSLError):
        hint = "does the server speak plain http there? Then the endpoint begins with http://"
        return Unavailable(
            f"{where} does not speak TLS as expected: {exc.reason}",
            hint=hint if exc.reason == "WRONG_VERSION_NUMBER" else None,
        )
    return None


def _whom_to_trust() -> str:
    """What to do about a certificate that is not trusted. OpenSSL reads `SSL_CERT_FILE` by itself and passes
    over one it cannot read without a word; so it is told here."""
    import ssl

    named = os.environ.get("SSL_CERT_FILE")
    if named:
        try:
            ssl.create_default_context(cafile=named)
        except ssl.SSLError:
            return f"SSL_CERT_FILE is {named}, which cannot be used: no certificate in PEM form is in it"
        except OSError as exc:
            return f"SSL_CERT_FILE is {named}, which cannot be used: {str(exc.strerror).lower()}"
    return "give the CA's certificate in SSL_CERT_FILE, or check that the endpoint is the right host"
