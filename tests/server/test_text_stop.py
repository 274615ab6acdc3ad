from itertools import combinations, pairwise

import pytest

from server.text.stop import StopMatcher


def run(stops: list[str], pieces: list[str], *, include: bool = False) -> tuple[str, str | None, list[str]]:
    matcher = StopMatcher(stops, include)
    shown = [matcher.push(piece) for piece in pieces]
    shown.append(matcher.flush())
    return "".join(shown), matcher.matched, shown


@pytest.mark.parametrize(
    ("stops", "text", "want", "matched"),
    [
        ([], "anything", "anything", None),
        (["DEFGHIJ"], "DEFGHIJKL", "", "DEFGHIJ"),  # at the very first character
        (["LMNO"], "DEFGHIJKLMNOP", "DEFGHIJK", "LMNO"),
        (["NEVER", "GHIJ", "XYZ"], "DEFGHIJK", "DEF", "GHIJ"),
        (["aab"], "aaab", "a", "aab"),  # a false start inside the true one
        (["abcd", "bc"], "xabcd", "xa", "bc"),  # complete first
        (["bc", "abc"], "xabcd", "x", "abc"),  # complete together: the longer
        (["ab", "abc"], "xabcd", "x", "ab"),
        (["\n\n"], "a\n\n\nb", "a", "\n\n"),
        (["🎉"], "a🎉🎉", "a", "🎉"),
        (["é", "e\u0301"], "cafe\u0301é", "caf", "e\u0301"),
        (["</s>"], "1 < 2 </ 3 </s", "1 < 2 </ 3 </s", None),
        (["\U0001f468\u200d\U0001f469"], "\U0001f468\u200d\U0001f468\u200d\U0001f469", "\U0001f468\u200d", "👨‍👩"),
    ],
)
def test_whatever_the_cuts(stops: list[str], text: str, want: str, matched: str | None) -> None:
    for num_cuts in range(min(4, len(text))):
        for cuts in combinations(range(1, len(text)), num_cuts):
            bounds = [0, *cuts, len(text)]
            pieces = [text[a:b] for a, b in pairwise(bounds)]
            shown, found, _ = run(stops, pieces)
            assert (shown, found) == (want, matched)
            shown, found, _ = run(stops, pieces, include=True)
            assert (shown, found) == (want + (matched or ""), matched)


def test_only_the_possible_beginning_of_a_stop_string_is_held_back() -> None:
    _, _, shown = run(["STOP!"], ["a STO", "P", "S", "TO", "x"])
    assert shown == ["a ", "", "STOP", "", "STOx", ""]
    matcher = StopMatcher(["STOP!"], False)
    assert (matcher.push("xxST"), matcher.num_held) == ("xx", 2)
    assert (matcher.flush(), matcher.num_held) == ("ST", 0)


def test_nothing_comes_after_a_match() -> None:
    matcher = StopMatcher(["b"], False)
    assert matcher.push("abc") == "a"
    assert matcher.push("more b") == ""
    assert matcher.flush() == ""
    assert matcher.matched == "b"


def test_a_stop_string_that_is_let_pass_is_text() -> None:
    matcher = StopMatcher(["abab"], False)
    assert matcher.push("xabab", honour=False) == "xab"  # its last two may begin another one
    assert matcher.push("ab") == ""
    assert matcher.matched == "abab"
    matcher = StopMatcher(["xyz"], False)
    assert matcher.push("xyz", honour=False) == "xyz"  # cannot go on, so is not held back
    assert matcher.push("z") == "z"
    assert matcher.matched is None


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""], False)


def test_a_hostile_text_takes_linear_work() -> None:
    matcher = StopMatcher(["a" * 5000 + "b"], False)
    shown = sum(len(matcher.push("a")) for _ in range(200_000))
    assert shown == 195_000
