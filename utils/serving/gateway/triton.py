"""The gateway's client for Triton's HTTP.

    async with Triton("127.0.0.1:8000", key=key) as triton:
        await triton.get("/v2/models/gpt/config")
        async with triton.post("/v2/models/gpt/generate_stream", body) as answer:
            async for piece in answer.content.iter_any(): …

Every error is a Refusal.
"""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from utils.serving.client import ServeError, reason_of
from utils.serving.gateway.refusal import Refusal
from utils.serving.install import CONTROL, SETTLE

SECONDS = 5.0  # time limit of a call that runs no model
UNREADABLE = re.compile(r"Unable to parse|failed to parse the request")
IDLE = 0.5  # seconds that a connection is kept for the next call to a model


class Triton:
    """A server on this machine, at "host:port" or "unix:FILE". metrics: the address of its metrics;
    key: for model control.

    When Triton stops, it accepts no new connections and waits for the end of open ones. So
    connections for model calls are kept, but not for long, and every other call has a connection of
    its own: a model is no longer called once its configuration cannot be read.
    """

    def __init__(self, address: str, metrics: str | None = None, key: str | None = None):
        self.address, self._metrics = address, metrics
        self.control_headers = {CONTROL: key} if key else {}
        self._loaded = -SETTLE

    async def __aenter__(self) -> "Triton":
        self._kept = self._session(keepalive_timeout=IDLE)
        self._single = self._session(force_close=True)
        return self

    async def __aexit__(self, *exception) -> None:
        await self._kept.close()
        await self._single.close()

    def _session(self, **options):
        kind, _, file = self.address.partition(":")
        if kind == "unix":
            host, connector = "triton", aiohttp.UnixConnector(file, limit=0, **options)
        else:
            host, connector = self.address, aiohttp.TCPConnector(limit=0, **options)
        return aiohttp.ClientSession(
            f"http://{host}", connector=connector, timeout=aiohttp.ClientTimeout(None)
        )

    @asynccontextmanager
    async def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        kept: bool = True,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A call's response of status 200, whose body has not been read yet.

        kept   whether the call may reuse a connection and keep it for the next one
        """
        session = self._kept if kept else self._single
        try:
            async with session.request(method, path, data=body, headers=headers) as answer:
                if answer.status != 200:
                    raise refusal_of(await answer.read(), answer.status)
                yield answer
        except (aiohttp.ClientError, OSError) as error:
            why = f"UNAVAILABLE: the server closed the connection: {error!r}"
            raise Refusal(why) from None

    async def whole(self, *call: Any, seconds: float = SECONDS) -> bytes:
        """The body of a response. Raises Refusal, also after `seconds`."""
        try:
            async with asyncio.timeout(seconds), self.ask(*call, kept=False) as answer:
                return await answer.read()
        except TimeoutError:
            why = f"UNAVAILABLE: no answer from the server after {seconds:g} s"
            raise Refusal(why) from None

    async def config(self, model: str) -> dict:
        """A model's configuration, including defaults."""
        return json.loads(await self.whole("GET", f"/v2/models/{model}/config"))

    async def states(self) -> dict[tuple[str, str], str]:
        """{(model, version): state} of the repository; "" for a version that was never loaded."""
        call = ("POST", "/v2/repository/index", b"{}", self.control_headers)
        return {
            (entry["name"], entry.get("version", "")): entry.get("state", "")
            for entry in json.loads(await self.whole(*call))
        }

    async def metrics(self) -> bytes:
        """The metrics as Prometheus reads them."""
        return await self.whole("GET", f"http://{self._metrics}/metrics") if self._metrics else b""

    async def settle(self) -> None:
        """Wait until SETTLE seconds have passed since the last load."""
        await asyncio.sleep(self._loaded + SETTLE - time.monotonic())

    async def control(self, model: str, action: str, seconds: float, body: bytes = b"{}") -> None:
        """Load or unload a model; return when Triton reports that it is done."""
        call = ("POST", f"/v2/repository/models/{model}/{action}", body, self.control_headers)
        await self.settle()
        try:
            await self.whole(*call, seconds=seconds)
        finally:
            if action == "load":
                self._loaded = time.monotonic()


def refusal_of(body: bytes, status: int) -> Refusal:
    """Triton's response of a status other than 200 as a Refusal."""
    why = reason_of(body) or f"the server answers {status}"
    if UNREADABLE.match(why):  # Triton answers 500 to some bodies that it cannot parse
        why = f"INVALID_ARG: {why}"
    error = ServeError(why, http=status)
    return Refusal(f"{error.status}: {error.message.removeprefix(f'{error.status}: ')}")
