"""Server reflection by the library's own servicer, with bad bytes refused as everywhere else."""

from collections.abc import AsyncIterator, Iterable
from typing import Any

from grpc_reflection.v1alpha import reflection, reflection_pb2

from shared.rpc.raw import parse

REFLECTION_SERVICE = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]


class Reflection:
    """Tells clients of the services and their messages."""

    def __init__(self, services: Iterable[str]) -> None:
        """`services` are full names."""
        self._servicer = reflection.aio.ReflectionServicer(service_names=tuple(services))

    async def ServerReflectionInfo(  # noqa: N802 - gRPC's name
        self, requests: AsyncIterator[bytes], context: Any
    ) -> AsyncIterator[bytes]:
        """Answers one question after another. Raises InvalidRequestError for what is none."""

        async def parsed() -> AsyncIterator[Any]:
            async for data in requests:
                yield parse(reflection_pb2.ServerReflectionRequest, data)

        async for response in self._servicer.ServerReflectionInfo(parsed(), context):
            yield response.SerializeToString()
