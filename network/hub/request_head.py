"""`RequestHead`: the head of an HTTP request as it arrives, before the `websockets` library parses it. Sans-IO: bytes
in, bytes out.

The library accepts only GET, and sets no limit for a request that never ends. `RequestHead` finds the end of the head,
turns HEAD into GET, and reports other methods.
"""

from __future__ import annotations

MAX_REQUEST_BYTES = 32 * 1024
"""Maximum size of the head of a request, in bytes. A thousand pending requests need at most 32 MiB."""
MAX_METHOD_CHARS = 16


class UnsupportedMethodError(Exception):
    """Raised for a request whose method is neither GET nor HEAD."""

    def __init__(self, method: str) -> None:
        super().__init__(f"There is no {method} here; use GET or HEAD.")


class RequestHead:
    """Separates the head of a request from the bytes after it."""

    __slots__ = ("_pending", "_size", "is_complete", "method")

    def __init__(self) -> None:
        self.method = b""
        """Method of the request. Empty until the method is complete."""
        self.is_complete = False
        self._pending = b""
        """Bytes that can be interpreted only together with the next bytes: an incomplete method, or the last three
        bytes, which may begin the blank line at the end of the head."""
        self._size = 0

    @property
    def is_too_large(self) -> bool:
        return self._size > MAX_REQUEST_BYTES

    def feed(self, data: bytes) -> tuple[bytes, bytes]:
        """Return the bytes of the request for the library, and the bytes after the request.

        Raises `UnsupportedMethodError`. The caller must then close the connection.
        """
        given, data = self._pending, self._pending + data
        if not self.method:
            method = data[:MAX_METHOD_CHARS].partition(b" ")[0]
            if len(method) == len(data):  # the method is not complete yet
                self._pending = data
                return b"", b""
            # Pass a head without a valid method to the library, which answers that the request is not HTTP.
            is_method = method.isalpha() and method.isupper() and len(method) < MAX_METHOD_CHARS
            if method not in (b"GET", b"HEAD") and is_method:
                raise UnsupportedMethodError(method.decode())
            given, self.method = b"", method
            # The library accepts only GET. `HubConnection` removes the body of the answer to a HEAD.
            if method == b"HEAD":
                data = b"GET" + data[len(method) :]
        head, blank_line, rest = data.partition(b"\r\n\r\n")
        request = (head + blank_line)[len(given) :]
        self.is_complete = bool(blank_line)
        # The library already has these bytes. They are stored only to find a blank line that arrives in two parts.
        self._pending = b"" if blank_line else data[-3:]
        self._size += len(request)
        return request, rest
