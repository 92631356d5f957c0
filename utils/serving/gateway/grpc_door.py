"""The gateway's gRPC: the calls that a client needs, with the same key and limits as HTTP.

Any call not among CALLS is UNIMPLEMENTED and does not reach Triton: model control, shared memory,
traces, log settings.
"""

import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from utils.serving.engine import trace
from utils.serving.gateway.app import Front, check_bearer, span_of
from utils.serving.gateway.refusal import Refusal

CODES = {  # gRPC's status by the name that begins a refusal, if they differ
    "INVALID_ARG": "INVALID_ARGUMENT", "UNSUPPORTED": "UNIMPLEMENTED",
}
WITHOUT_KEY = {"ServerLive", "ServerReady", "ModelReady"}  # probes have no key
CALLS = {
    *WITHOUT_KEY, "ServerMetadata", "ModelMetadata", "ModelConfig", "ModelStatistics", "ModelInfer",
    "ModelStreamInfer",
}
log = logging.getLogger("gateway")
ANY_SIZE = [("grpc.max_receive_message_length", -1)]


def passed(name: str) -> Callable:
    """A handler that forwards a call that runs no model."""

    async def handle(self: "Door", request: Any, context: grpc.aio.ServicerContext) -> Any:
        async with self._observed(name, context) as metadata:
            return await getattr(self.triton, name)(request, metadata=metadata, timeout=60)

    return handle


class Door:
    """The handlers of the calls. triton: a stub on an open channel."""

    def __init__(self, front: Front, triton: GRPCInferenceServiceStub):
        self.front, self.triton = front, triton

    ServerLive = passed("ServerLive")
    ServerMetadata = passed("ServerMetadata")
    ModelMetadata = passed("ModelMetadata")
    ModelConfig = passed("ModelConfig")
    ModelStatistics = passed("ModelStatistics")

    async def ServerReady(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        async with self._observed("ServerReady", context):
            return pb.ServerReadyResponse(ready=await self.front.stubs.why_not_ready() is None)

    async def ModelReady(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        async with self._observed("ModelReady", context) as metadata:
            if request.name in self.front.stubs.down:
                return pb.ModelReadyResponse(ready=False)
            return await self.triton.ModelReady(request, metadata=metadata, timeout=60)

    async def ModelInfer(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        async with (
            self._observed("ModelInfer", context) as metadata,
            self.front.call(request.model_name),
        ):
            return await self.triton.ModelInfer(request, metadata=metadata)

    async def ModelStreamInfer(
        self, requests: AsyncIterator, context: grpc.aio.ServicerContext
    ) -> None:
        """Restart the time limit with each message, so a client may keep its stream open."""
        async with self._observed("ModelStreamInfer", context) as metadata:
            first = await anext(aiter(requests), None)
            if first is None:
                return
            async with self.front.call(first.model_name) as call:

                async def on() -> AsyncIterator:
                    yield first
                    async for request in requests:
                        self.front.stubs.refuse_if_down(request.model_name)
                        call.goes_on(request.model_name)
                        yield request

                answers = self.triton.ModelStreamInfer(on(), metadata=metadata)
                try:
                    async for answer in answers:
                        call.goes_on()
                        await context.write(answer)
                finally:
                    answers.cancel()  # does nothing to a stream that has ended

    @asynccontextmanager
    async def _observed(self, name, context):
        """Counts, times and traces a call; yields the metadata to forward. A refusal, here or by
        Triton, becomes the call's status."""
        given = {key.lower(): value for key, value in context.invocation_metadata()}
        begin, span = time.time_ns(), span_of(given.get(trace.HEADER))
        status = "CANCELLED"
        try:
            if self.front.options.api_key is not None and name not in WITHOUT_KEY:
                check_bearer(given.get("authorization", ""), self.front.options.api_key)
            # nothing else: with triton_grpc_error, a message after an error crashes Triton 24.10
            yield [(trace.HEADER, span.header())]
            status = "OK"
        except Refusal as refusal:
            kind = refusal.message.partition(":")[0]
            status = "RESOURCE_EXHAUSTED" if refusal.status == 429 else CODES.get(kind, kind)
            await context.abort(grpc.StatusCode[status], refusal.message)
        except grpc.aio.AioRpcError as error:
            status = error.code().name
            await context.abort(error.code(), error.details())
        except Exception as error:
            status = "INTERNAL"
            log.error("gRPC %s", name, exc_info=error)
            await context.abort(grpc.StatusCode.INTERNAL, f"INTERNAL: {error!r}")
        finally:
            self.front.note(f"gRPC {name}", status, begin, span)

    def handlers(self) -> grpc.GenericRpcHandler:
        """The handlers of CALLS for a server."""
        service, found = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"], {}
        for name in CALLS:
            method = service.methods_by_name[name]
            asked, answer = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
            kind = (
                grpc.stream_stream_rpc_method_handler if name == "ModelStreamInfer"
                else grpc.unary_unary_rpc_method_handler
            )
            found[name] = kind(getattr(self, name), asked.FromString, answer.SerializeToString)
        return grpc.method_handlers_generic_handler(service.full_name, found)


async def opened(
    front: Front, triton: str, address: str, tls_cert: str | None = None, tls_key: str | None = None
) -> tuple[grpc.aio.Server, int]:
    """A gRPC server that listens on `address`, in front of Triton's at `triton`; and its port.

    tls_cert   certificate file; None: no TLS;  tls_key: key file, if the certificate's has no key
    Raises OSError.
    """
    limits = [
        ("grpc.max_receive_message_length", front.options.body_bytes), ("grpc.so_reuseport", 0),
    ]
    logging.getLogger("grpc").setLevel(logging.CRITICAL)  # clients' mistakes need no log
    stub = GRPCInferenceServiceStub(grpc.aio.insecure_channel(triton, options=ANY_SIZE))
    server = grpc.aio.server(handlers=[Door(front, stub).handlers()], options=limits)
    try:
        if tls_cert is None:
            port = server.add_insecure_port(address)
        else:
            pair = Path(tls_key or tls_cert).read_bytes(), Path(tls_cert).read_bytes()
            port = server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
    except RuntimeError as error:
        raise OSError(f"gRPC cannot listen on {address}: {error}") from None
    await server.start()
    return server, port
