"""Examples of stop strings; the general rules are in tests/property/test_text.py."""

from __future__ import annotations

import pytest

from mvllm.core.text.stop import StopStrings, stop_token_ids_for
from mvllm.core.text.tokenizer import Tokenizer
from tests.models.toy_vocabularies import IM_END, byte_level_assets


def streamed(
    stops: tuple[str, ...], deltas: list[str], *, include: bool = False
) -> tuple[list[str], str | None]:
    """What each delta lets out, then what was held back, and the match."""
    watcher = StopStrings(stops, include)
    state = watcher.start()
    emitted, matched = [], None
    for delta in deltas:
        state, text, matched = watcher.advance(state, delta)
        emitted.append(text)
    return [*emitted, watcher.flush(state)], matched


def test_a_stop_string_over_several_deltas_is_found_and_does_not_leak() -> None:
    assert streamed(("beta gamma",), ["al be", "ta", " gam", "ma de"]) == (
        ["al ", "", "", "", ""],
        "beta gamma",
    )


def test_a_stop_string_inside_a_delta_cuts_what_follows() -> None:
    assert streamed(("STOP",), ["one STOP two"]) == (["one ", ""], "STOP")


def test_only_what_can_still_become_a_stop_string_is_held_back() -> None:
    assert streamed(("abc",), ["xa", "b", "d", "ab"]) == (["x", "", "abd", "", "ab"], None)


def test_a_beginning_that_overlaps_itself_is_followed() -> None:
    assert streamed(("aab",), ["aaaa", "b"]) == (["aa", "", ""], "aab")


def test_the_stop_string_completed_first_wins() -> None:
    assert streamed(("abc", "ab"), ["xabc"]) == (["x", ""], "ab")
    assert streamed(("abcd", "bc"), ["a", "b", "c", "d"]) == (["", "", "a", "", ""], "bc")


def test_of_stop_strings_completed_together_the_one_that_begins_first_wins() -> None:
    assert streamed(("c", "abc"), ["xab", "c"]) == (["x", "", ""], "abc")


def test_the_stop_string_is_left_in_when_asked_for_and_nothing_is_held_back_then() -> None:
    assert streamed(("beta",), ["a be", "ta x"], include=True) == (["a be", "ta", ""], "beta")
    assert streamed(("beta",), ["a be"], include=True) == (["a be", ""], None)


def test_after_a_match_nothing_more_comes() -> None:
    assert streamed(("x",), ["ax", "bx", "c"]) == (["a", "", "", ""], "x")


def test_without_stop_strings_all_text_passes() -> None:
    assert streamed((), ["a", "", "b"]) == (["a", "", "b", ""], None)


@pytest.mark.parametrize(
    ("stop", "expected"),
    [("<|im_end|>", {IM_END}), ("<|im_end|> ", set()), ("<tool_call>", set()), ("hello", set())],
)
def test_a_stop_string_that_is_exactly_a_control_token_also_acts_as_its_id(
    stop: str, expected: set[int]
) -> None:
    tokenizer = Tokenizer.from_assets(byte_level_assets())
    assert stop_token_ids_for(tokenizer, (stop,)) == expected
