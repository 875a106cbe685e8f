"""Detokenization: whole characters only, no part of a stop string, and independent of the pieces."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from baton.router.api.bodies import CompletionOptions
from baton.router.generation.output import Choice, Delta
from baton.router.text.detokenizer import Detokenizer, StopFinder, StopStrings
from baton.router.text.tokenizer import ModelTokenizer

from .work import work

TEXT = "Größe: 🙂🚀 und 漢字 — e\u0301\n\n  end"


def test_pieces_are_whole_characters_and_join_to_the_text(tokenizer: ModelTokenizer):
    detokenizer = Detokenizer(tokenizer)
    ids = tokenizer.encode(TEXT)
    pieces = [detokenizer.push(i) for i in ids]
    assert "".join(pieces) == TEXT
    assert "\ufffd" not in "".join(pieces)
    assert "" in pieces  # a character has more than one token
    assert detokenizer.finish() == ""


def test_an_incomplete_character_becomes_u_fffd(tokenizer: ModelTokenizer):
    detokenizer = Detokenizer(tokenizer)
    ids = tokenizer.encode("a🙂")[:-1]
    assert "".join(detokenizer.push(i) for i in ids) == "a"
    assert detokenizer.finish() == "\ufffd"


@given(ids=st.lists(st.integers(0, 49151), max_size=20), skip=st.booleans())
def test_streamed_text_is_the_decoded_text(tokenizer: ModelTokenizer, ids, skip):
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    streamed = "".join(detokenizer.push(i) for i in ids) + detokenizer.finish()
    assert streamed == tokenizer.decode(ids, skip_special_tokens=skip)


def reference(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition: characters arrive one by one."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            longest = max(ended, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    st.lists(st.text("aé🙂", max_size=5), max_size=12),
    st.lists(st.text("aé🙂", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings_do_not_depend_on_the_pieces_of_the_text(pieces, stops):
    cutter, got, met = StopFinder(StopStrings(stops)), "", None
    for piece in pieces:
        text, met = cutter.push(piece)
        got += text
        if met:
            break
    if not met:
        got += cutter.finish()
    assert (got, met) == reference("".join(pieces), stops)


def test_only_a_possible_stop_string_is_held_back():
    stops = StopFinder(StopStrings(["</end>"]))
    assert stops.push("a</e") == ("a", None)
    assert stops.push("x") == ("</ex", None)
    assert stops.push("</end>more") == ("", "</end>")


def test_a_stop_string_that_no_text_can_have_is_never_found():
    stops = StopFinder(StopStrings(["é\ud800"]))
    assert stops.push("aé") == ("a", None)
    assert stops.push("b") == ("éb", None)


def test_the_work_of_a_token_does_not_depend_on_the_stop_strings():
    """While text of one stop string is held back, each token was compared with every part of all others."""
    held, others = "ab" * 500 + "!", [chr(ord("c") + i % 20) * 1000 + str(i) for i in range(63)]

    def last_of_many(finder: StopFinder) -> int:
        for _ in range(239):
            assert finder.push("abab") == ("", None)
        return work(lambda: finder.push("abab"))

    finder = StopFinder(StopStrings([held, *others]))
    alone = last_of_many(StopFinder(StopStrings([held])))
    assert last_of_many(finder) <= 2 * alone, "a little more, if another thread allocates meanwhile"
    assert finder.push("?") == ("abab" * 240 + "?", None)


def test_text_of_128_choices_that_is_no_stop_string_after_all_is_released_at_once():
    """It was compared with the stop strings from each of its characters, in each choice."""
    stops = StopStrings(["a" * 1000 + f"{i:02}" + "b" * 20 for i in range(64)])
    choices = [StopFinder(stops) for _ in range(128)]
    for choice in choices:
        assert choice.push("a" * 1000) == ("", None)
    released = [choices[0].push("?")]  # makes the states that the others find
    assert work(lambda: released.extend(choice.push("?") for choice in choices[1:])) < 127 * 500
    assert released == [("a" * 1000 + "?", None)] * 128


def make_choice(tokenizer: ModelTokenizer, **options: Any) -> Choice:
    read = CompletionOptions.model_validate(options)
    return Choice(tokenizer, read, StopStrings(read.stop))


def feed(choice: Choice, ids: list[int], last: str) -> tuple[str, Delta]:
    """Returns the text, and the last delta."""
    text = ""
    for position, token_id in enumerate(ids):
        delta = Delta(token_id, None, last if position == len(ids) - 1 else None)
        choice.push(delta)
        text += delta.text
        if delta.finish_reason:
            return text, delta
    raise AssertionError("no delta was the last")


def test_the_token_that_stops_counts_but_adds_no_text(tokenizer: ModelTokenizer):
    ids = tokenizer.encode("One two")
    choice = make_choice(tokenizer, stop_token_ids=[ids[-1]])
    text, last = feed(choice, ids, "stop")
    assert (text, choice.finish_reason, choice.num_tokens) == ("One", "stop", 2)
    assert last.stop_reason == ids[-1]
    for reason, eos in (("stop", ids[-1]), ("length", None)):
        _, last = feed(make_choice(tokenizer), ids, reason)
        assert last.stops == {"stop_reason": None, "matched_stop": eos}


def test_the_stop_is_part_of_the_text_if_asked(tokenizer: ModelTokenizer):
    ids = tokenizer.encode("One two three")
    by_token = make_choice(tokenizer, stop_token_ids=[ids[1]], include_stop_str_in_output=True)
    assert feed(by_token, ids[:2], "stop")[0] == "One two"
    by_eos = make_choice(tokenizer, include_stop_str_in_output=True)
    assert feed(by_eos, [*ids, 2], "stop")[0] == "One two three", "EOS is a special token"
    by_string = make_choice(tokenizer, stop=["tw", "wo"], include_stop_str_in_output=True)
    assert feed(by_string, ids, "length")[0] == "One tw"


def test_held_back_text_is_returned_at_the_end(tokenizer: ModelTokenizer):
    choice = make_choice(tokenizer, stop=["two three"])
    text, _ = feed(choice, tokenizer.encode("One two"), "length")
    assert (text, choice.finish_reason) == ("One two", "length")


def test_stop_strings_wait_for_min_tokens(tokenizer: ModelTokenizer):
    ids = tokenizer.encode("One two One two One two")
    for least, expected in ((1, "One "), (2, "One two One "), (4, "One two One two One ")):
        choice = make_choice(tokenizer, stop=["two"], min_tokens=least)
        text, _ = feed(choice, ids, "length")
        assert (text, choice.finish_reason) == (expected, "stop")
