"""The operator's API keys, and whether a caller has one of them. Shared by every public edge; knows no gRPC, no HTTP.

Keys are kept and compared as digests, in constant time, and appear in no log and no error.
"""

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path

from shared.errors import StartupError, UnauthenticatedError

SCHEME = "bearer"


class ApiKeys:
    """Keys that open the public port."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = tuple(_digest(key) for key in keys)

    @classmethod
    def load(cls, path: str) -> "ApiKeys":
        """Reads a file of keys, one a line; empty lines and those that begin with # are skipped.

        Raises StartupError for a file that cannot be read or has none.
        """
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise StartupError(f"--api-key-file {path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise StartupError(f"--api-key-file {path} cannot be read: it is no UTF-8") from error
        keys = [line.strip() for line in lines]
        keys = [key for key in keys if key and not key.startswith("#")]
        if not keys:
            raise StartupError(f"--api-key-file {path} must hold at least one key")
        return cls(keys)

    def check(self, authorization: str | None) -> None:
        """Takes the value of an authorization header. Raises UnauthenticatedError unless it is Bearer and a key."""
        scheme, _, key = (authorization or "").strip().partition(" ")
        digest = _digest(key.strip())
        # Every key is looked at, so that the time tells nothing.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if scheme.lower() != SCHEME or not any(matches):
            got = "none" if not authorization else "another"
            raise UnauthenticatedError(f"authorization must be Bearer and an API key of this service, got {got}")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
