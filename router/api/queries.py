"""What clients write behind the `?` of a URL."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field


class PageQuery(BaseModel):
    """A part of a list."""

    order: Literal["asc", "desc"] = "desc"
    """desc: the newest first."""
    after: str | None = None
    """The id of what is before the page. None: the page is the first."""
    limit: Annotated[int, Field(ge=1, le=100)] = 20


_Limit = Annotated[int, Field(ge=1, le=10_000)]
"""OpenAI's bound. A page has at most 100."""


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
