from collections.abc import Iterator

import pytest

from tests.forked import forking


@pytest.fixture(scope="module", autouse=True)
def forked_roles() -> Iterator[None]:
    with forking():
        yield
