"""What clients write behind the `?` of a URL."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field

from baton.router.errors import NotFound

T = TypeVar("T")
PAGE = 100
"""Objects of one answer with a list, at most. A client that asks for more gets the rest as further pages."""


class PageQuery(BaseModel):
    """A part of a list."""

    order: Literal["asc", "desc"] = "desc"
    """desc: the newest first."""
    after: str | None = None
    """The id of what is before the page. None: the page is the first."""
    limit: Annotated[int, Field(ge=1, le=PAGE)] = 20


def page_of(
    query: PageQuery, items: Sequence[T], id_of: Callable[[T], str], shown: Callable[[T], Any]
) -> dict[str, Any]:
    """Returns the list that the client asks for. `items`: all, the oldest first. Raises NotFound."""
    ordered = items if query.order == "asc" else items[::-1]
    start = 0
    if query.after is not None:
        start = next((place for place, each in enumerate(ordered, 1) if id_of(each) == query.after), 0)
        if not start:
            raise NotFound.at("after", f"there is no {query.after[:80]!r}")
    stop = start + min(PAGE, query.limit)
    page = ordered[start:stop]
    ends = {"first_id": id_of(page[0]) if page else None, "last_id": id_of(page[-1]) if page else None}
    return {"object": "list", "data": [*map(shown, page)], **ends, "has_more": stop < len(ordered)}


_Limit = Annotated[int, Field(ge=1, le=10_000)]
"""OpenAI's bound. A page has at most `PAGE`."""


class BatchesQuery(PageQuery):
    """GET /v1/batches."""

    limit: _Limit = 20


class FilesQuery(PageQuery):
    """GET /v1/files."""

    limit: _Limit = 100
    purpose: str | None = None


class RetrieveQuery(BaseModel):
    """GET /v1/responses/{id}."""

    stream: bool = False
    starting_after: Annotated[int, Field(ge=-1, lt=2**31)] = -1
    """The sequence number of the event before the first one that is sent."""
