"""Asks a gRPC server for its health, for container health checks: exit code 0 when it serves.

    python -m shared.rpc.healthcheck HOST:PORT [SERVICE]

Without a service it asks for liveness.
"""

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_SECONDS = 3.0


def check(address: str, service: str) -> str:
    """The name of the serving status, or of the status code when the call fails."""
    with grpc.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            response = health_pb2_grpc.HealthStub(channel).Check(request, timeout=TIMEOUT_SECONDS)
        except grpc.RpcError as error:
            return str(error.code().name)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))


def main(arguments: list[str]) -> int:
    """Entry point; returns the exit code."""
    if not 1 <= len(arguments) <= 2:
        print("usage: python -m shared.rpc.healthcheck HOST:PORT [SERVICE]", file=sys.stderr)
        return 2
    status = check(arguments[0], arguments[1] if len(arguments) > 1 else "")
    print(status)
    return 0 if status == "SERVING" else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
