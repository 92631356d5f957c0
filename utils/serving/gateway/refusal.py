"""A refused request as an HTTP response.

    raise Refusal("UNAVAILABLE: the queue is full")          # 429, Retry-After: 1
    raise Refusal("INVALID_ARG: the body is too large", 413)

The message begins with Triton's name of the error; the status is HTTP's for it, whereas Triton
answers every error of a streaming model with 400.
"""

import json
import re

from starlette.responses import Response

from utils.serving.client import NAME

STATUS = {
    "INVALID_ARG": 400, "UNSUPPORTED": 400, "UNAUTHENTICATED": 401, "NOT_FOUND": 404,
    "ALREADY_EXISTS": 409, "CANCELLED": 499, "INTERNAL": 500, "UNKNOWN": 500, "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
BY_STATUS = {400: "INVALID_ARG", 401: "UNAUTHENTICATED", 404: "NOT_FOUND", 503: "UNAVAILABLE"}
FULL = re.compile(r"UNAVAILABLE: (the queue is full|\d+ requests are here)")
RETRY_SECONDS = {429: 1, 503: 2}
# The kinds of error that OpenAI's clients know; others are the server's fault.
OPENAI = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class Refusal(Exception):
    """message: "KIND: why"; status: HTTP's; None: derived from the kind."""

    def __init__(self, message: str, status: int | None = None):
        if not NAME.match(message):
            message = f"{BY_STATUS.get(status, 'INTERNAL')}: {message}"
        super().__init__(message)
        self.message = message
        self.status = status or (429 if FULL.match(message) else STATUS[NAME.match(message)[1]])

    def body(self, openai: bool = False) -> dict:
        """The JSON body, in Triton's or OpenAI's form."""
        if not openai:
            return {"error": self.message}
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        kind = OPENAI.get(self.status, kind)
        return {"error": {"message": self.message, "type": kind, "param": None, "code": None}}

    def response(self, openai: bool = False) -> Response:
        seconds = RETRY_SECONDS.get(self.status)
        headers = {} if seconds is None else {"Retry-After": str(seconds)}
        return json_response(self.body(openai), self.status, headers)


def json_response(
    body: dict, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """A JSON response."""
    return Response(json.dumps(body), status, headers, "application/json")
