"""The two gRPC servers of a frontend: the public port for applications, the admin port for operators."""

from frontend_svc.api_keys import ApiKeys
from frontend_svc.service.admin_servicer import AdminServicer
from frontend_svc.service.authorization import ApiKeyInterceptor
from frontend_svc.service.servicer import InferenceServicer
from shared.rpc.options import public_server_options
from shared.rpc.raw import raw_handlers
from shared.rpc.server import RpcServer, start_server
from takt.v1 import admin_pb2, inference_pb2

_INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]
_ADMIN = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]
INFERENCE_SERVICE = _INFERENCE.full_name
ADMIN_SERVICE = _ADMIN.full_name


async def start_inference(host: str, port: int, servicer: InferenceServicer, keys: ApiKeys | None = None) -> RpcServer:
    """Serves applications, with `keys` only those that have one. Raises StartupError when the port cannot be had."""
    return await start_server(
        host,
        port,
        handlers=[raw_handlers(_INFERENCE, servicer)],
        services=[INFERENCE_SERVICE],
        options=public_server_options(),
        interceptors=[] if keys is None else [ApiKeyInterceptor(keys)],
    )


async def start_admin(host: str, port: int, servicer: AdminServicer) -> RpcServer:
    """Serves operators. Raises StartupError when the port cannot be had."""
    return await start_server(
        host,
        port,
        handlers=[raw_handlers(_ADMIN, servicer)],
        services=[ADMIN_SERVICE],
        options=public_server_options(),
    )
