"""CORS: lets the pages of other origins use the API in a browser (https://fetch.spec.whatwg.org)."""

from aiohttp import web


class Cors:
    """Adds the headers for the allowed origins.

    API keys travel in a header of their own, so the browser's credentials are not allowed.
    """

    def __init__(self, origins: tuple[str, ...]) -> None:
        """`origins`: such as https://chat.example; "*" is any."""
        self._origins = origins

    def preflight(self, request: web.Request) -> web.Response | None:
        """Returns the response to the question that a browser asks first. None: it is no such question."""
        asked = request.headers.get("Access-Control-Request-Method")
        if request.method != "OPTIONS" or asked is None or not self._allows(request):
            return None
        headers = {"Access-Control-Allow-Methods": "GET, POST, DELETE", "Access-Control-Max-Age": "600"}
        if wanted := request.headers.get("Access-Control-Request-Headers"):
            headers["Access-Control-Allow-Headers"] = wanted
        return web.Response(status=204, headers=headers)

    async def add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """Handles the signal `on_response_prepare`, so errors and streams have the headers, too."""
        if self._origins and "*" not in self._origins:
            response.headers["Vary"] = "Origin"
        if self._allows(request):
            allowed = "*" if "*" in self._origins else request.headers["Origin"]
            response.headers["Access-Control-Allow-Origin"] = allowed
            response.headers["Access-Control-Expose-Headers"] = "x-request-id, Retry-After"

    def _allows(self, request: web.Request) -> bool:
        origin = request.headers.get("Origin")
        return origin is not None and ("*" in self._origins or origin in self._origins)
