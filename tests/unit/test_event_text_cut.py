"""Where a text that is too long is cut."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outbox.text_cut import cut_characters, cut_utf8, utf8_pieces

UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
ANY_TEXT = st.text(st.characters(exclude_categories=()))
FAMILY = "👩\u200d👩\u200d👧"


@pytest.mark.parametrize(
    "character",
    [
        "e\u0301",
        "a\u0300\u0301\u0302\u0303",
        "☎\ufe0f",
        "葛\U000e0100",
        "👍🏽",
        FAMILY,
        "🏳️\u200d🌈",
        "🇩🇪",
        "🏴\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f",
        "\u1112\u1161\u11ab",
        "กำ",
        "कि",
        "ｶﾞ",
        "\r\n",
        "\ud83d\ude00",
    ],
)
def test_no_character_is_parted_wherever_the_limit_falls(character):
    """Whatever belongs together stays or goes together."""
    text = "ab" + character * 3 + "yz"
    for limit in range(1, len(text)):
        kept = cut_characters(text, limit).removesuffix("…")
        assert kept in {
            "",
            "a",
            "ab",
            "ab" + character,
            "ab" + character * 2,
            "ab" + character * 3,
            text[:-1],
        }
        assert len(kept) < limit


def test_flags_are_counted_from_where_they_begin():
    """In a row of flags every second letter begins one."""
    assert cut_characters("🇩🇪🇫🇷🇮🇹", 4) == "🇩🇪…"
    assert cut_characters("a🇩🇪🇫🇷🇮🇹", 4) == "a🇩🇪…"


@pytest.mark.parametrize(("limit", "kept"), [(200, 154), (92, 46), (91, 90), (5, 4), (1, 0), (0, 0)])
def test_the_marker_is_a_sentence_where_there_is_room(limit, kept):
    """It never takes more than half of what is left; below that an ellipsis stands for it."""
    text = cut_characters("x" * 1234, limit)
    sentence = "… [cut by the outbox: 1,234 characters in all]"
    assert text == "x" * kept + (sentence if limit >= 92 else "…")


@UNHURRIED
@given(ANY_TEXT, st.integers(1, 300))
def test_a_cut_text_is_a_beginning_and_within_its_limit(text, limit):
    """Nothing is changed before the cut, and the marker counts."""
    cut = cut_characters(text + "x" * 400, limit)
    assert len(cut) <= limit
    assert (text + "x" * 400).startswith(cut[: cut.rindex("…")])


@UNHURRIED
@given(ANY_TEXT, st.integers(0, 200))
def test_a_text_cut_by_bytes_says_what_is_gone(text, more):
    """What was kept and what is gone are the whole, in bytes of UTF-8."""
    data = (text + "é" * 300).encode("utf-8", "surrogatepass")
    cut, lost_bytes = cut_utf8(text + "é" * 300, 100 + more)
    kept, _, marker = cut.rpartition("…")
    assert marker == f" [cut by the outbox: {len(data):,} bytes in all]"
    assert len(cut.encode("utf-8", "surrogatepass")) <= 100 + more
    assert data.startswith(kept.encode("utf-8", "surrogatepass"))
    assert len(kept.encode("utf-8", "surrogatepass")) + lost_bytes == len(data)


@UNHURRIED
@given(ANY_TEXT, st.integers(4, 20))
def test_pieces_are_full_and_join_to_the_text(text, max_bytes):
    """No piece is too large, none is needlessly small, none is missing."""
    pieces = list(utf8_pieces(text, max_bytes))
    sizes = [len(piece.encode("utf-8", "surrogatepass")) for piece in pieces]
    assert "".join(pieces) == text
    assert all(max_bytes - 3 <= size <= max_bytes for size in sizes[:-1])
    assert sizes[-1] <= max_bytes
