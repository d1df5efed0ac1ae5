"""Who may come in.

With a token, whoever shows it. Without one everybody who reaches the door, so it listens on loopback only; but there a
page in somebody's browser reaches it as well. Such a page is known by its Origin, and one whose name was made to point
here by the Host that it asks for.
"""

import hmac
from ipaddress import ip_address
from urllib.parse import urlsplit

from fastapi import Request
from fastapi.responses import JSONResponse

from headrace.serving.openai.refusals import error_body, error_response

_OPEN_TO_ALL = ("/health",)


class Entry:
    """See the module. `is_local` refuses what comes from web pages; for doors without a token."""

    def __init__(self, token: str, *, is_local: bool) -> None:
        self._token, self._is_local = token.encode(), is_local

    def refused(self, request: Request) -> JSONResponse | None:
        """The answer to whoever may not come in, None for who may. Tokens are compared in constant time."""
        if request.scope["path"] in _OPEN_TO_ALL:  # the URL's path could come from a Host header
            return None
        headers = request.headers
        if self._token:
            given = headers.get("authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(errors="surrogateescape"), self._token):
                return error_response(error_body("give the token as `Authorization: Bearer TOKEN`", 401), 401)
        if self._is_local:
            for name, url in (("Host", "//" + headers.get("host", "localhost")), ("Origin", headers.get("origin", ""))):
                if url and not is_loopback(_host_of(url)):
                    told = f"this door is open to programs on its machine only, which the {name} header does not say"
                    return error_response(error_body(told, 403), 403)
        return None


def is_loopback(host: str) -> bool:
    """Whether a name or an address is this machine as it calls itself."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _host_of(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
