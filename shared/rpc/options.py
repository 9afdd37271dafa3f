"""Channel and server options, each chosen for an effect that a test asserts.

gRPC ignores unknown keys silently, so the spelling here proves nothing. The names are those of gRPC core: the wait for
a ping's answer is bounded by `grpc.http2.ping_timeout_ms`, not by the keepalive timeout alone.
"""

from typing import Any

Options = list[tuple[str, Any]]

# The receiver enforces its limit, and one message over it ends the whole stream: senders check sizes themselves.
PUBLIC_MAX_RECEIVE_BYTES = 8 * 1024 * 1024
PUBLIC_MAX_SEND_BYTES = 16 * 1024 * 1024
ENGINE_MAX_MESSAGE_BYTES = 64 * 1024 * 1024

_SERVER: Options = [
    # A second process that binds the same port would silently take a share of its connections.
    ("grpc.so_reuseport", 0),
    # Clients may ping every 10 s; half of that leaves room for jitter.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Frees the requests of vanished clients within 30 s; gRPC's own default is two hours.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
]


def public_server_options() -> Options:
    """Options of a port that any client reaches: the public and the admin port."""
    return [
        *_SERVER,
        ("grpc.max_receive_message_length", PUBLIC_MAX_RECEIVE_BYTES),
        ("grpc.max_send_message_length", PUBLIC_MAX_SEND_BYTES),
        # Calls over the limit wait inside the client; admission proper is the service's own.
        ("grpc.max_concurrent_streams", 1_024),
    ]


def engine_server_options() -> Options:
    """Options of the port that only frontends reach."""
    return [
        *_SERVER,
        ("grpc.max_receive_message_length", ENGINE_MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", ENGINE_MAX_MESSAGE_BYTES),
        # Frontends are ours: their pings never count as a flood.
        ("grpc.http2.max_ping_strikes", 0),
    ]


def engine_channel_options() -> Options:
    """Options of a frontend's channel to an engine."""
    return [
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.http2.ping_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        ("grpc.max_receive_message_length", ENGINE_MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", ENGINE_MAX_MESSAGE_BYTES),
        # A request is sent on by the frontend's own rules only.
        ("grpc.enable_retries", 0),
    ]
