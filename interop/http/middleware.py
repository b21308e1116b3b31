"""ASGI middleware of the gateway. The middleware decides which requests reach an application, and cancels requests of
clients that disconnect.

Each class wraps one application and keeps no state between requests.
"""

from __future__ import annotations

from collections.abc import Callable

from roundelay.interop.session_pool import SessionPool, read_authorization
from roundelay.network.errors import Forbidden, InvalidFrame, RoundelayError
from roundelay.network.extras import needs

from .public_names import PublicNames
from .requests import make_error_response, read_body, serve_while_connected

with needs("gateway"):
    from starlette.datastructures import Headers
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse
    from starlette.types import ASGIApp, Receive, Scope, Send


_SINGLE_HEADERS = ("authorization", "host", "idempotency-key", "origin", "sec-fetch-site")
"""Headers that may appear only once in a request."""
NO_OAUTH = (
    "Bearer token needed: Roundelay has no OAuth and registers no clients. Set the header `Authorization: Bearer "
    "ID:TOKEN` in the configuration of this MCP server; `roundelay token create ID` makes the token."
)
BEARER_CHALLENGE = (
    'Bearer realm="roundelay", error="invalid_token", error_description="Bearer token needed, no OAuth: set the header '
    'Authorization: Bearer ID:TOKEN for this server. roundelay token create ID makes the token."'
)
"""Authentication challenge for MCP hosts (RFC 6750, section 3). Like the MCP SDK's servers, it includes `error` even
for a request without a token.

The challenge does not include `resource_metadata` (RFC 9728). MCP requires that this document names an authorization
server, and there is none.
"""


class UnambiguousRequestsOnly:
    """Refuses requests that a proxy and this server may interpret differently, and requests from web pages of other
    sites.

    A browser that has stored a name and password (`Basic`) for the gateway sends them with every request. A hostile
    page could therefore make the browser submit a form in the name of that participant.
    """

    def __init__(self, app: ASGIApp, names: PublicNames) -> None:
        self._app = app
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        # A proxy may use the first of two equal headers, while this server uses the last. The proxy would then have
        # checked another value.
        if (name := _find_ambiguity(headers)) is not None:
            response = make_error_response(InvalidFrame(f"The request states its {name} more than once."))
            response.headers["connection"] = "close"  # the end of this request may be ambiguous too
            await response(scope, receive, send)
            return
        if _is_cross_site(headers, self._names):
            error = Forbidden("Pages of other sites may not call this gateway. Programs outside a browser may.")
            await make_error_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _find_ambiguity(headers: Headers) -> str | None:
    """Return the name of a property that the request states more than once although it must be unique, or None."""
    if "transfer-encoding" in headers and "content-length" in headers:
        return "length"  # both headers state a length (RFC 9112, 6.1)
    return next((name for name in _SINGLE_HEADERS if len(headers.getlist(name)) > 1), None)


def _is_cross_site(headers: Headers, names: PublicNames) -> bool:
    """Return whether a browser sent this request for a page of another site."""
    origin, site = headers.get("origin"), headers.get("sec-fetch-site", "none")
    if origin is not None and origin.partition("://")[2] != headers.get("host") and not names.is_own_page(origin):
        return True
    # "none" means that a person typed the address. Use "none" as the default, because programs do not send this header.
    return site not in ("none", "same-origin")


class TokenRequired:
    """Passes a request to an application only after the hub has accepted the token of the request."""

    def __init__(
        self,
        app: ASGIApp,
        pool: SessionPool,
        refuse: Callable[[RoundelayError], JSONResponse] = make_error_response,
    ) -> None:
        self._app = app
        self._pool = pool
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            # Use the session only to check the token. The application uses the session again for the call itself.
            async with self._pool.session(read_authorization(Headers(scope=scope).get("authorization"))):
                pass
        except RoundelayError as error:
            await self._refuse(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)


class KnownHostsOnly:
    """Passes a request to an application only if its ``Host`` header names this gateway."""

    def __init__(self, app: ASGIApp, names: PublicNames) -> None:
        self._app = app
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (reason := self._names.find_wrong_host(Headers(scope=scope))) is not None:
            await JSONResponse({"error": {"code": "forbidden", "message": reason}}, 421)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def make_mcp_error_response(error: RoundelayError) -> JSONResponse:
    """Return an error response for an MCP host. MCP hosts react to a status 401 by starting OAuth. The text of a 401
    therefore explains that a bearer token is needed.
    """
    response = make_error_response(error)
    # Add the hint about tokens only to a 401, because it would mislead readers of other errors.
    if response.status_code != 401:
        return response
    problem = {"code": error.code, "message": f"{error} {NO_OAUTH}"}
    return JSONResponse({"error": problem}, 401, {"WWW-Authenticate": BEARER_CHALLENGE})


class CancelOnDisconnect:
    """Reads the body of a request within limits, and cancels the application when the client disconnects."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            # Read the body first. ``receive`` reports a disconnect only after the body.
            body = await read_body(Request(scope, receive))
        except ClientDisconnect:
            return
        except RoundelayError as error:
            await make_error_response(error)(scope, receive, send)
            return
        # Watch the connection. Without the watch, the call of a disconnected client would continue although nobody
        # reads its result.
        await serve_while_connected(self._app, scope, receive, send, body)
