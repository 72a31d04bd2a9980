"""The one translation of exceptions into answers: each error as its class says, anything else as a logged
`InternalError`. Every error body has the same shape and the request's id."""

from __future__ import annotations

import logging

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from fsd.model.errors import FsdError, InternalError, NoSpace, NotFound, UsageError
from fsd.model.token import redact

log = logging.getLogger(__name__)


class MethodNotAllowed(UsageError):
    """The route exists, but not for this method."""

    code = "method_not_allowed"
    status = 405


def translate(exc: Exception, request_id: str) -> FsdError:
    """The fsd error that stands for `exc`; a defect is logged here with its traceback."""
    if isinstance(exc, FsdError):
        if exc.status >= 500:
            # A full disk is no defect, and mounts try again all the time: one line each, no traceback.
            cause = None if isinstance(exc, NoSpace) else exc.__cause__
            log.warning("%s: %s: %s", request_id, exc.code, redact(exc.message), exc_info=cause)
        return exc
    if isinstance(exc, HTTPException):
        if exc.status_code == 405:
            return MethodNotAllowed("this route has no such method")
        return NotFound("no such route", hint="GET /openapi.json lists the routes")
    log.error("%s: unexpected %s", request_id, type(exc).__name__, exc_info=exc)
    return InternalError(f"unexpected {type(exc).__name__}; the server's log has it under this request id")


def answer(error: FsdError, request_id: str) -> Response:
    """The HTTP answer for `error`. Tokens in messages are redacted."""
    body = error.body(request_id)
    body["error"]["message"] = redact(body["error"]["message"])
    headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
    if error.retryable:
        headers["Retry-After"] = "1"
    return JSONResponse(body, error.status, headers)
