"""One HTTP request to a server on this machine, with the standard library.

    status, body = call("127.0.0.1:8000", "GET", "/v2/health/ready", timeout=2)

Every call has a connection of its own: Triton waits for open ones before it stops. No proxy is
asked, whatever the environment says.
"""

import http.client
import json

LOST = (OSError, http.client.HTTPException)  # what a call raises when there is no answer


def connect(address: str, timeout: float) -> http.client.HTTPConnection:
    """A connection to "host:port"; no operation on it takes more than `timeout` seconds."""
    host, _, port = address.rpartition(":")
    return http.client.HTTPConnection(host, int(port), timeout=timeout)


def send(connection, method: str, path: str, body=None) -> http.client.HTTPResponse:
    """Sends a request (`body` as JSON) that closes its connection; returns the open response."""
    headers = {"Connection": "close", "Content-Type": "application/json"}
    text = None if body is None else json.dumps(body).encode()
    connection.request(method, path, body=text, headers=headers)
    return connection.getresponse()


def call(address: str, method: str, path: str, body=None, timeout=10.0) -> tuple[int, bytes]:
    """(status, body) of the answer. Raises OSError or http.client.HTTPException without one."""
    connection = connect(address, timeout)
    try:
        response = send(connection, method, path, body)
        return response.status, response.read()
    finally:
        connection.close()


def reason_of(body: bytes) -> str:
    """The text of an error's answer: what {"error": …} says, else the body itself."""
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace").strip()
