"""The gateway's routes: an ASGI application on Starlette that checks requests, forwards them to
Triton and reports errors.

    /v2/…                      Triton's own protocol: health, models, generate, infer
    /v2/repository/…           model control, with a key
    /v1/…                      OpenAI's API (openai_api.py)
    /metrics                   metrics of Triton, the models and the gateway

Paths not listed in `Front.routes` are closed: Triton's shared memory, trace and log settings.
"""

import asyncio
import hmac
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.convertors import Convertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from utils.serving.engine import trace
from utils.serving.engine.trace import Context
from utils.serving.gateway import checks, openai_api
from utils.serving.gateway.refusal import Refusal, json_response
from utils.serving.gateway.stubs import Call, Stubs
from utils.serving.gateway.triton import Triton

MODEL = "gpt"  # the model behind OpenAI's API
CONFIG_SECONDS = 2.0  # that a model's configuration is cached
BODY_SECONDS = 30.0  # within which a request's body must arrive
BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300, 600)  # seconds
PASSED_ON = ("Content-Type", "Inference-Header-Content-Length")
JSON = "application/json"
BINARY = "Inference-Header-Content-Length"  # bytes of the JSON part, if tensors follow it

log = logging.getLogger("gateway")


@dataclass(frozen=True)
class Options:
    """body_bytes       most bytes per request body
    requests         most requests in flight; further ones are answered 429
    seconds          time limit of a request; for a stream, until its end
    repository       the served folder, for the chat template
    control_key      required for model control as `Authorization: Bearer KEY`; None: no control
    api_key          required for everything else; None: no key
    local            whether only this machine can reach the gateway
    """

    body_bytes: int
    requests: int
    seconds: float
    repository: Path | None = None
    control_key: str | None = None
    api_key: str | None = None
    local: bool = False


class Front:
    """The handlers. triton: already open; stubs: run by the caller."""

    def __init__(self, triton: Triton, stubs: Stubs, options: Options):
        self.triton, self.stubs, self.options = triton, stubs, options
        self.chat = openai_api.Chat(options.repository)
        self.under_way = 0
        self.configs: dict[str, tuple[float, dict]] = {}
        self.registry = CollectorRegistry()
        self.answered = Counter(
            "kintsugi_gateway_requests", "Responses, by route and HTTP status.",
            ("route", "status"), registry=self.registry,
        )
        self.took = Histogram(
            "kintsugi_gateway_seconds", "Seconds from a request to the end of its response.",
            ("route",), registry=self.registry, buckets=BOUNDS,
        )
        Gauge(
            "kintsugi_gateway_requests_running", "Requests in flight.", registry=self.registry
        ).set_function(lambda: self.under_way)
        Gauge(
            "kintsugi_gateway_model_loads", "Models loaded again after their process died.",
            registry=self.registry,
        ).set_function(lambda: stubs.loads)

    def application(self) -> ASGIApp:
        handlers = {
            Refusal: self.refused, HTTPException: self.unknown, ClientDisconnect: self.left,
            Exception: self.failed,
        }
        return self.observed(Starlette(routes=self.routes(), exception_handlers=handlers))

    def routes(self) -> list[Route]:
        model = "/v2/models/{model:triton}"
        versions = (model, model + "/versions/{version:int}")

        def get(path: str, handler: Callable) -> Route:
            return Route(path, self._open(path, handler), methods=["GET"])

        def post(path: str, handler: Callable) -> Route:
            return Route(path, self._open(path, handler), methods=["POST"])

        asked = [
            post(f"{of}/{name}", handler)
            for of in versions
            for name, handler in (
                ("generate", self.generate), ("generate_stream", self.generate),
                ("infer", self.infer),
            )
        ]
        told = [
            get(path, self.passed)
            for of in versions
            for path in (of, f"{of}/config", f"{of}/stats")
        ]
        return [
            get("/v2/models/stats", self.passed), *asked, *told,
            *(get(f"{of}/ready", self.model_ready) for of in versions),
            get("/v2", self.passed),
            get("/v2/health/live", self.passed), get("/v2/health/ready", self.ready),
            post("/v2/repository/index", self.index),
            *(
                post(f"/v2/repository/models/{{model:triton}}/{action}", self.control)
                for action in ("load", "unload")
            ),
            get("/v1/models", self.models), get("/v1/models/{model}", self.models),
            post("/v1/completions", self.completions),
            post("/v1/chat/completions", self.completions),
            get("/metrics", self.metrics),
        ]

    # --- around every request -------------------------------------------------------------------

    def observed(self, app: ASGIApp) -> ASGIApp:
        """The application with every request counted, timed and traced."""

        async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                return
            begin, given = time.time_ns(), dict(scope["headers"]).get(trace.HEADER.encode(), b"")
            context = span_of(given.decode("latin-1"))
            scope["state"] = {"context": context, "route": "unknown"}
            status, told = 499, 499  # the client left, unless the response is completed

            async def sending(message: Message) -> None:
                nonlocal status, told
                if message["type"] == "http.response.start":
                    told = message["status"]
                    header = trace.HEADER.encode(), context.header().encode()
                    message["headers"] = [*message["headers"], header]
                elif not message.get("more_body"):
                    status = told
                await send(message)

            try:
                await app(scope, receive, sending)
            finally:
                self.note(scope["state"]["route"], status, begin, context)

        return wrapped

    def note(self, route: str, status: int | str, begin: int, context: Context) -> None:
        """Count and time a request that began at `begin` (time.time_ns) and has ended; write
        its span."""
        end = time.time_ns()
        self.took.labels(route).observe((end - begin) / 1e9)
        self.answered.labels(route, status).inc()
        trace.write("gateway", context, begin, end, route=route, status=status)

    def _open(self, path: str, handler: Callable) -> Callable:
        """A route's handler that first records the route and checks caller and key."""
        route = path.replace(":triton", "").replace(":int", "")

        async def handle(request: Request) -> Response:
            request.state.route = route
            checks.check_caller(request.headers, self.options.local)
            self._check_key(request, route)
            return await handler(request)

        return handle

    async def refused(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, Refusal)
        return error.response(openai=request.url.path.startswith("/v1/"))

    async def unknown(self, request: Request, error: Exception) -> Response:
        """No such path or method."""
        assert isinstance(error, HTTPException)
        kind = "NOT_FOUND" if error.status_code == 404 else "INVALID_ARG"
        why = f"{kind}: {error.detail}: the gateway has no such path or method"
        return await self.refused(request, Refusal(why, error.status_code))

    async def failed(self, request: Request, error: Exception) -> Response:
        log.error("%s %s", request.method, request.url.path, exc_info=error)
        return await self.refused(request, Refusal(f"INTERNAL: {error!r}"))

    async def left(self, request: Request, error: Exception) -> Response:
        """The client has left; no one reads the response."""
        return Response(status_code=499)

    def _check_key(self, request, route):
        """Check the API key; model control has its own key, probes and Prometheus need none."""
        key, open_to_all = self.options.api_key, ("/v2/repository", "/v2/health", "/metrics")
        if key is not None and not route.startswith(open_to_all):
            check_bearer(request.headers.get("Authorization", ""), key)

    async def _body(self, request) -> bytes:
        """The body, if it is not too large and arrives in time. One that is too large is read to
        its end, because a client that is still sending would not see the response."""
        found, size, most = bytearray(), 0, self.options.body_bytes
        if (coding := request.headers.get("Content-Encoding", "identity")) != "identity":
            raise Refusal(f"INVALID_ARG: Content-Encoding {coding:.80}: send it unencoded", 415)
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for piece in request.stream():
                    size += len(piece)
                    if size <= most:
                        found += piece
        except TimeoutError:
            if size <= most:
                why = f"INVALID_ARG: the body did not arrive within {BODY_SECONDS:g} s"
                raise Refusal(why, 408) from None
        if size > most:
            raise Refusal(f"INVALID_ARG: the body is larger than {most} bytes", 413)
        return bytes(found)

    @asynccontextmanager
    async def call(self, model: str) -> AsyncIterator[Call]:
        """Surround a call to a model: its time limit, and its place among those in flight."""
        most = self.options.requests
        if self.under_way >= most:
            raise Refusal(f"UNAVAILABLE: {most} requests are here already, try again later")
        self.under_way += 1
        try:
            async with self.stubs.call(model, self.options.seconds) as call:
                yield call
        finally:
            self.under_way -= 1

    # --- Triton's protocol ----------------------------------------------------------------------

    async def generate(self, request: Request) -> Response:
        """generate and generate_stream."""
        model, body = request.path_params["model"], checks.object_of(await self._body(request))
        stream = request.url.path.endswith("_stream")
        checks.check_generate(body, await self._config(model), stream)
        return await self._forward(request, model, traced(body, request), stream)

    async def infer(self, request: Request) -> Response:
        model, body = request.path_params["model"], await self._body(request)
        header = request.headers.get(BINARY, str(len(body)))
        if not header.isdecimal() or int(header) > len(body):
            raise Refusal(f"INVALID_ARG: {BINARY} {header:.40} is not within the body")
        checks.check_infer(checks.object_of(body[: int(header)]), len(body))
        if (await self._config(model)).get("model_transaction_policy", {}).get("decoupled"):
            why = f"{model} sends any number of responses: use generate, or infer over gRPC"
            raise Refusal(f"UNSUPPORTED: {why}")
        return await self._forward(request, model, body, stream=False)

    async def _forward(self, request, model, body, stream):
        headers = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
        headers[trace.HEADER] = request.state.context.header()
        call = ("POST", request.url.path, body, headers)

        async def whole():
            async with self.call(model), self.triton.ask(*call) as answer:
                kept = {name: answer.headers[name] for name in PASSED_ON if name in answer.headers}
                return Response(await answer.read(), headers=kept)

        if not stream:
            return await unless_left(request, whole())

        async def read():
            async with self.call(model), self.triton.ask(*call) as answer:
                async for piece in answer.content.iter_any():
                    yield piece

        async def pieces():  # in its own task, which the call's time limit cancels
            async with aclosing(openai_api.merged([read()])) as found:
                async for _, piece in found:
                    yield piece

        return await self._streamed(request, pieces())

    async def _streamed(self, request, pieces: AsyncIterator[bytes], openai: bool = False):
        """Server-sent events. An error before the first event becomes the whole response; a later
        one becomes the last event."""
        first = await unless_left(request, anext(pieces, b""))

        async def all_of_them():
            yield first
            try:
                while piece := await unless_left(request, anext(pieces, b"")):
                    yield piece
            except Refusal as refusal:
                yield event(refusal.body(openai))
            except ClientDisconnect:
                return  # no one reads the response
            finally:
                await pieces.aclose()

        return Streamed(
            all_of_them(), headers={"Cache-Control": "no-cache"}, media_type="text/event-stream"
        )

    async def passed(self, request: Request) -> Response:
        """Forward a call that runs no model."""
        body = await self.triton.whole("GET", request.url.path)
        return Response(body, media_type=JSON)

    async def ready(self, request: Request) -> Response:
        """Whether every model that should be served is."""
        if why := await self.stubs.why_not_ready():
            raise Refusal(f"UNAVAILABLE: {why}")
        return Response()

    async def model_ready(self, request: Request) -> Response:
        model = request.path_params["model"]
        if why := self.stubs.down.get(model):
            raise Refusal(f"UNAVAILABLE: {why}")
        try:
            await self.triton.whole("GET", request.url.path)
        except Refusal:
            raise Refusal(f"UNAVAILABLE: {model} is not ready") from None
        return Response()

    async def _config(self, model):
        now = time.monotonic()
        known = self.configs.get(model)
        if known is None or now - known[0] > CONFIG_SECONDS:
            if known is not None:  # one request refreshes it for all: the others use the old one
                self.configs[model] = now, known[1]
            try:
                known = self.configs[model] = now, await self.triton.config(model)
            except Refusal as refusal:
                self.configs.pop(model, None)
                self.stubs.refuse_if_down(model)
                if model in self.stubs.wanted:  # out of service for now
                    raise Refusal(f"UNAVAILABLE: {model} is not served now", 503) from None
                raise refusal
        return known[1]

    # --- model control --------------------------------------------------------------------------

    def _check_control(self, request):
        if self.options.control_key is None:
            why = "model control has no key: start the gateway with KINTSUGI_CONTROL_KEY set"
            raise Refusal(f"UNAUTHENTICATED: {why}", 403)
        check_bearer(request.headers.get("Authorization", ""), self.options.control_key)
        kind = request.headers.get("Content-Type", JSON)
        if kind.partition(";")[0].strip().lower() != JSON:
            raise Refusal(f"INVALID_ARG: Content-Type {kind:.80} is not {JSON}", 415)

    async def index(self, request: Request) -> Response:
        self._check_control(request)
        body = await self._body(request) or b"{}"
        call = ("POST", request.url.path, body, self.triton.control_headers)
        return Response(await self.triton.whole(*call), media_type=JSON)

    async def control(self, request: Request) -> Response:
        """Load or unload a model."""
        self._check_control(request)
        model, action = request.path_params["model"], request.url.path.rpartition("/")[2]
        given = checks.object_of(await self._body(request) or b"{}")
        parameters = checks.control_parameters(given, action)
        if "config" in parameters:  # a complete one could run any file of this machine as code
            served = await self.triton.config(model)
            parameters["config"] = checks.changed_config(parameters["config"], served)
        await getattr(self.stubs, action)(model, json.dumps({"parameters": parameters}).encode())
        self.configs.pop(model, None)
        return Response()

    # --- OpenAI's API ---------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        """The one model, if it is served."""
        name = request.path_params.get("model", MODEL)
        self._check_model(name)
        served = any(
            state == "READY" and model == MODEL
            for (model, _), state in (await self.triton.states()).items()
        )
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "kintsugi"}
        if "model" in request.path_params:
            if not served:
                raise Refusal(f"NOT_FOUND: {MODEL} is not served now")
            return json_response(model)
        return json_response({"object": "list", "data": [model] if served else []})

    def _check_model(self, name):
        if name != MODEL:
            raise Refusal(f"NOT_FOUND: there is no model {name!r:.80}: ask for {MODEL}")

    async def completions(self, request: Request) -> Response:
        """Completions and chat completions."""
        body = checks.object_of(await self._body(request))
        chat = request.url.path.startswith("/v1/chat/")
        kind = openai_api.ChatCompletions if chat else openai_api.Completions
        wanted = openai_api.parsed(kind, body)
        self._check_model(wanted.model)
        config, bodies = await self._config(MODEL), []
        for text in await wanted.texts(self.chat):
            bodies += [wanted.request(text, choice) for choice in range(wanted.n or 1)]
        for one in bodies:
            checks.check_generate(one, config, stream=True)
        streams = [self._answers(request, one) for one in bodies]
        reply = openai_api.Reply(wanted)
        if wanted.stream:
            return await self._streamed(request, self._events(reply, streams), openai=True)
        return json_response(reply.whole(await unless_left(request, whole_answers(streams))))

    async def _answers(self, request, body) -> AsyncIterator[dict]:
        """The responses of `gpt` to one request."""
        call = ("POST", f"/v2/models/{MODEL}/generate_stream", traced(body, request))
        async with self.call(MODEL), self.triton.ask(*call) as answer:
            async for line in answer.content:
                if not line.strip():
                    continue
                said = json.loads(line.removeprefix(b"data:"))
                if "error" in said:
                    raise Refusal(said["error"])
                yield said

    async def _events(self, reply, streams) -> AsyncIterator[bytes]:
        first, ends = set(), [0] * len(streams)
        async for number, said in openai_api.merged(streams):
            answer = openai_api.Answer()
            answer.begin = ends[number]
            answer.add(said)
            ends[number] += len(answer.text)
            yield event(reply.event(number, answer, number not in first))
            first.add(number)
        if (last := reply.last_event()) is not None:
            yield event(last)
        yield b"data: [DONE]\n\n"

    # --- metrics --------------------------------------------------------------------------------

    async def metrics(self, request: Request) -> Response:
        """The metrics of Triton, the models and the gateway."""
        text = generate_latest(self.registry)
        try:
            text = await self.triton.metrics() + text
        except Refusal as refusal:
            log.warning("%s", refusal.message)
        return Response(text, media_type="text/plain")


class Name(Convertor[str]):
    """A model's name in a path: ".." or "/" would lead to other paths of Triton."""

    regex = r"[\w-][\w.-]*"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("triton", Name())


class Streamed(StreamingResponse):
    """A stream that itself checks whether its client has left (`unless_left`)."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.stream_response(send)


async def unless_left(request: Request, work: Awaitable[Any]) -> Any:
    """The result of `work`. If the client leaves first, cancels it and raises ClientDisconnect."""

    async def leaving():
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(leaving())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ClientDisconnect
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def whole_answers(streams: list[AsyncIterator[dict]]) -> list[openai_api.Answer]:
    """Read each stream to its end."""
    answers = [openai_api.Answer() for _ in streams]
    async for number, answer in openai_api.merged(streams):
        answers[number].add(answer)
    return answers


def span_of(traceparent: str | None) -> Context:
    """The gateway's span of a request: a child of the caller's, or the first of a new trace."""
    caller = trace.parse(traceparent)
    return caller.child() if caller else Context(secrets.token_hex(16), secrets.token_hex(8), True)


def check_bearer(authorization: str, key: str) -> None:
    """Refuse a request whose header does not hold the key."""
    scheme, _, given = authorization.partition(" ")
    same = hmac.compare_digest(given.encode(errors="surrogateescape"), key.encode())
    if scheme.lower() != "bearer" or not same:
        raise Refusal("UNAUTHENTICATED: give the key as `Authorization: Bearer KEY`")


def traced(body: dict, request: Request) -> bytes:
    """The body of a generate request with its trace in a field: Triton does not pass that call's
    headers to a model, but it does pass every field that is not an input
    (https://github.com/triton-inference-server/server/issues/8790)."""
    return json.dumps(body | {trace.HEADER: request.state.context.header()}).encode()


def event(body: dict) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(body).encode() + b"\n\n"
