"""The names of KV: their values never change, and they stand for all that KV depends on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.kv_names import (
    CHUNK_TOKENS,
    ImageSpan,
    content_root,
    extend_names,
    names_of_prefixes,
    prompt_hints,
    salted,
    vocabulary_fingerprint,
)

ROOT = content_root("model", "torch.bfloat16", "torch.bfloat16")
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=4 * CHUNK_TOKENS)


def names(token_ids, root=ROOT) -> list[bytes]:
    found: list[bytes] = []
    extend_names(found, token_ids, len(token_ids), root)
    return found


def name_of_prefix(chunks, token_ids, length, images=()) -> bytes:
    return names_of_prefixes(chunks, token_ids, range(length, length + 1), ROOT, images)[0]


def test_the_values_never_change():
    """They are part of the protocol: routers and workers of different releases compare them."""
    assert ROOT.hex() == "4059e6a4c7bcc5cbe593023c42a3ed8a966bb4b50da95c411748d00c31030887"
    assert [name.hex() for name in names(range(130))] == [
        "caa4e5a024eb2a401be9c76c11aa9a4f",
        "f09865628642d06c31f921ac0c43e17f",
    ]
    assert prompt_hints(range(64), ROOT, b"tenant") == [772574056762341225]


def test_a_vocabulary_has_one_fingerprint_in_any_order():
    tokens = {"a": 0, "b": 1, "c": 2}
    assert vocabulary_fingerprint(tokens) == "eaad3d466530532800bf414e231c17b4"
    assert vocabulary_fingerprint(dict(reversed(tokens.items()))) == vocabulary_fingerprint(tokens)
    assert vocabulary_fingerprint(tokens | {"c": 3}) != vocabulary_fingerprint(tokens)


def test_only_full_chunks_have_names():
    assert names([]) == names([1] * (CHUNK_TOKENS - 1)) == []
    assert len(names([1] * CHUNK_TOKENS)) == 1


@given(tokens, tokens)
def test_equal_names_mean_equal_prefixes(left, right):
    for i, (x, y) in enumerate(zip(names(left), names(right), strict=False), start=1):
        assert (x == y) == (left[: i * CHUNK_TOKENS] == right[: i * CHUNK_TOKENS])


@pytest.mark.parametrize("images", [[], [ImageSpan(2 * CHUNK_TOKENS + 5, 3 * CHUNK_TOKENS, b"i" * 32)]])
def test_names_that_grow_with_a_sequence_are_those_of_all_of_it(images):
    whole, expected = range(4 * CHUNK_TOKENS + 1), list[bytes]()
    extend_names(expected, whole, len(whole), ROOT, images)
    for count in whole[:: CHUNK_TOKENS // 2]:
        grown: list[bytes] = []
        for stop in (count, len(whole)):
            extend_names(grown, whole, stop, ROOT, images)
        assert grown == expected


@given(tokens, st.integers(0, 4 * CHUNK_TOKENS))
def test_the_name_of_a_prefix_is_that_of_its_last_chunk_or_of_no_chunk(token_ids, length):
    length = min(length, len(token_ids))
    chunks = names(token_ids)
    name = name_of_prefix(chunks, token_ids, length)
    assert name == name_of_prefix(names(token_ids[:length]), token_ids[:length], length)
    if length and length % CHUNK_TOKENS == 0:
        assert name == chunks[length // CHUNK_TOKENS - 1]
    else:
        assert name not in chunks


@given(tokens, st.integers(0, 100), st.integers(1, 2 * CHUNK_TOKENS))
def test_names_of_several_prefixes_are_those_of_each(token_ids, first, every):
    lengths = range(first, len(token_ids) + 1, every)
    found = names_of_prefixes(names(token_ids), token_ids, lengths, ROOT)
    assert found == [name_of_prefix(names(token_ids), token_ids, length) for length in lengths]


@pytest.mark.parametrize(
    "other",
    [("another", "f", "k"), ("m", "another", "k"), ("m", "f", "another"), ("mf", "", "k"), ("m", "fk", "")],
)
def test_names_differ_with_model_format_and_dtype(other):
    assert not {*names(range(128), content_root("m", "f", "k"))} & {*names(range(128), content_root(*other))}


def test_tenants_share_no_name():
    roots = [salted(ROOT, salt) for salt in (b"", b"a", b"b")]
    assert len({name for root in roots for name in names(range(128), root)}) == 6


def test_images_name_the_chunks_that_they_reach_into():
    """Equal tokens have other names with another image, at another place, or without one; the chunks before
    it have the same."""
    ids = list(range(3 * CHUNK_TOKENS))
    image = ImageSpan(70, 100, bytes(32))

    def named(*images: ImageSpan) -> list[bytes]:
        found: list[bytes] = []
        extend_names(found, ids, len(ids), ROOT, images)
        return found

    variants = [
        named(),
        named(image),
        named(image._replace(name=bytes(31) + b"1")),
        named(image._replace(start=71)),
        named(image._replace(stop=101)),
        named(image, image._replace(start=101, stop=102)),
    ]
    for chunk, count in enumerate((1, len(variants), len(variants))):
        assert len({each[chunk] for each in variants}) == count
    behind = name_of_prefix(variants[1], ids, 70, [image])
    assert behind == name_of_prefix(variants[0], ids, 70)
    assert name_of_prefix(variants[1], ids, 71, [image]) != name_of_prefix(variants[0], ids, 71)
    assert prompt_hints(ids, ROOT, b"", [image])[0] == prompt_hints(ids, ROOT, b"")[0]
    assert prompt_hints(ids, ROOT, b"", [image])[1] != prompt_hints(ids, ROOT, b"")[1]
