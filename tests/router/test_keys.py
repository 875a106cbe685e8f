"""API keys: key files, errors in key files, and authorization."""

import asyncio
import contextlib
import hashlib
from pathlib import Path

import pytest

from baton.router.admission import key_counts
from baton.router.admission.keys import (
    ANY_CLIENT,
    ApiKey,
    KeyRing,
    api_keys,
    follow_keys,
    from_json,
    read_key_file,
    to_json,
)
from baton.router.errors import RateLimited, Unauthorized
from tests.within import within

from .conftest import Cluster

FILE = f"""
[alice]
key = "sk-alice"
max-requests = 8
tokens-per-minute = 100000
salt = "team a"

["bob and friends"]
sha256 = "{hashlib.sha256(b"sk-bob").hexdigest()}"
salt = "team a"

[carol]
key = " sk-carol "
"""


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    return str(path)


def test_a_key_file_is_read(tmp_path: Path):
    alice, bob, carol = read_key_file(write(tmp_path, FILE))
    assert (alice.name, alice.max_requests, alice.tokens_per_minute) == ("alice", 8, 100_000)
    assert (bob.name, bob.max_requests, bob.tokens_per_minute) == ("bob and friends", None, None)
    assert alice.cache_salt == bob.cache_salt != carol.cache_salt == b""
    ring = KeyRing([alice, bob, carol])
    assert ring.authorize("Bearer sk-alice") is alice
    assert ring.authorize("bearer  sk-bob ") is bob
    assert ring.authorize("Bearer sk-carol") is carol
    assert "sk-" not in repr(vars(ring))


async def test_keys_change_while_requests_run(cluster: Cluster):
    """A key that stays keeps its account; the requests of one that goes end as usual."""
    alice, bob = (ApiKey.of(name, f"sk-{name}", max_requests=1) for name in ("alice", "bob"))
    frontend = cluster.router.frontend
    frontend.use_keys((alice, bob))
    accounts = {name: frontend.authorize(f"Bearer sk-{name}") for name in ("alice", "bob")}
    for account in accounts.values():
        account.enter()
    assert cluster.router.services.admission.shared
    frontend.use_keys((alice,))
    assert not cluster.router.services.admission.shared
    with pytest.raises(Unauthorized):
        frontend.authorize("Bearer sk-bob")
    with pytest.raises(RateLimited):
        frontend.authorize("Bearer sk-alice").enter()
    for account in accounts.values():
        account.leave()


async def test_too_many_keys_change_nothing(cluster: Cluster, monkeypatch: pytest.MonkeyPatch):
    frontend, (alice, *more) = cluster.router.frontend, [ApiKey.of(f"{n}", f"sk-{n}") for n in range(9)]
    frontend.use_keys((alice,))
    monkeypatch.setattr(key_counts, "MAX_KEYS", 5)
    with pytest.raises(ValueError, match="more than 5 API keys since the router started; restart it"):
        frontend.use_keys(tuple(more))
    with pytest.raises(Unauthorized):
        frontend.authorize("Bearer sk-1")
    assert frontend.authorize("Bearer sk-0").key is alice
    frontend.use_keys((alice, *more[:3]))  # with ANY_CLIENT five
    frontend.use_keys(tuple(more[1:3]))  # keys that go need no room
    with pytest.raises(Unauthorized):
        frontend.authorize("Bearer sk-0")


def test_keys_reach_another_process_unchanged():
    keys = (
        ApiKey.of("ä", "sk-1", max_requests=2, cache_salt=b"\xff"),
        ApiKey.of("b", "sk-2", min_priority=-1),
    )
    assert from_json(to_json(keys)) == keys


@pytest.mark.parametrize(
    "sent", ["", "Bearer", "Bearer ", "Basic sk-alice", "sk-alice", "Bearer sk-alic", "Bearer sk-ülice"]
)
def test_an_unknown_key_is_refused(sent: str):
    with pytest.raises(Unauthorized):
        KeyRing([ApiKey.of("a", "sk-alice")]).authorize(sent)


def test_a_long_header_is_hashed_only_in_part():
    with pytest.raises(Unauthorized):
        KeyRing([ApiKey.of("a", "x" * 8000)]).authorize("Bearer " + "x" * 8000)


def test_without_keys_any_client_is_accepted():
    assert KeyRing([]).authorize("") is ANY_CLIENT


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sk-secret", "not valid TOML"),
        ("", "holds no keys"),
        ("alice = 'sk-secret'", "[alice]: Expected `object`, got `str`"),
        ("[a]", "[a] needs either key or sha256"),
        ("[a]\nkey='sk-secret'\nsha256='00'", "[a] needs either key or sha256"),
        ("[a]\nsha256='sk-secret'", "[a] sha256 must be 64 hexadecimal digits"),
        ("[a]\nkey='  '", "a key cannot be empty"),
        (
            "[a]\nkey='sk-secret'\nmax-request=1",
            "unknown field `max-request`; a table has the fields key, sha256",
        ),
        ("[a]\nkey='sk-secret'\nmax-requests=0", "Expected `int` >= 1 - at `$.max-requests`"),
        (
            "[a]\nkey='sk-secret'\nmax-requests=true",
            "got `bool` - at `$.max-requests`",
        ),
        (
            "[a]\nkey='sk-secret'\ntokens-per-minute='9'",
            "got `str` - at `$.tokens-per-minute`",
        ),
        (
            "[a]\nkey='sk-secret'\nmin-priority=2147483648",
            "<= 2147483647 - at `$.min-priority`",
        ),
        ("[a]\nkey=17", "Expected `str | null`, got `int` - at `$.key`"),
        ("[a]\nkey='x'\nsalt='" + "x" * (1 << 20) + "'", "longer than"),
    ],
)
def test_an_error_in_a_key_file_is_named(tmp_path: Path, text: str, said: str):
    path = write(tmp_path, text)
    with pytest.raises(ValueError) as error:
        read_key_file(path)
    assert said in str(error.value)
    assert path in str(error.value)
    assert "sk-secret" not in str(error.value)


def test_a_missing_key_file_is_reported(tmp_path: Path):
    with pytest.raises(ValueError, match="nothing cannot be read"):
        read_key_file(str(tmp_path / "nothing"))


def test_two_equal_keys_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="same key"):
        KeyRing(api_keys(["sk-alice"], write(tmp_path, FILE)))
    with pytest.raises(ValueError, match="same name"):
        KeyRing([ApiKey.of("a", "one"), ApiKey.of("a", "two")])
    with pytest.raises(ValueError, match="empty"):
        api_keys(["one", ""], None)


async def test_a_cancel_in_the_moment_of_a_signal_ends_the_look_at_keys(tmp_path: Path):
    """In Python 3.11 `asyncio.wait_for` swallows a cancel in the moment in which what it awaits has come."""
    looked = asyncio.Event()

    async def use(keys: tuple[ApiKey, ...]) -> None:
        looked.set()

    for moment in range(4):
        signalled = asyncio.Event()
        following = asyncio.create_task(follow_keys(tuple, write(tmp_path, FILE), use, signalled))
        await within(looked.wait())
        looked.clear()
        await asyncio.sleep(0)  # it waits for the signal
        signalled.set()
        for _ in range(moment):
            await asyncio.sleep(0)
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await within(following)
