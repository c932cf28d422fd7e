"""What a value of a setting may be, and how it is written again."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outbox.setting_types import (
    Choice,
    Flag,
    Names,
    RelayPath,
    RelayUrl,
    Seconds,
    SecretUrl,
    Size,
    Text,
    Token,
    Unfit,
    Whole,
    Words,
    WrittenFloat,
    relay_url,
)

MIB = 2**20
ANY_SIZE = Size(0, 2**60)
ANY_TIME = Seconds(0, 10**9)


@pytest.mark.parametrize(
    ("raw", "size_bytes"),
    [
        (0, 0),
        (1048576, MIB),
        ("1048576", MIB),
        ("1 MiB", MIB),
        ("1MiB", MIB),
        (" 1 mib ", MIB),
        ("1 MB", 10**6),
        ("1.5 KiB", 1536),
        ("2 GiB", 2 * 2**30),
        ("7 B", 7),
        ("0.5 TiB", 2**39),
    ],
)
def test_sizes(raw, size_bytes):
    """Bytes, or text with a unit."""
    assert ANY_SIZE.read(raw) == size_bytes


@pytest.mark.parametrize(
    "raw",
    [
        "",
        "512M",
        "1.5",
        "-1",
        "1e3",
        "MiB",
        "1 MiB 2",
        "٣ MiB",
        True,
        [1],
        None,
        WrittenFloat("1.0"),
        "9" * 400,
    ],
)
def test_no_sizes(raw):
    """Letters that could mean two things, parts of a byte, and what is no number."""
    with pytest.raises(Unfit):
        ANY_SIZE.read(raw)


@pytest.mark.parametrize(
    ("raw", "seconds"),
    [
        (5, 5),
        (WrittenFloat("0.5"), 0.5),
        ("0.5", 0.5),
        ("250 ms", 0.25),
        ("10 min", 600),
        ("24h", 86_400),
        ("7 days", 604_800),
        ("1 d", 86_400),
        ("2 m", 120),
        ("90 s", 90),
        (0, 0),
    ],
)
def test_times(raw, seconds):
    """Seconds, or text with a unit."""
    assert ANY_TIME.read(raw) == seconds


@pytest.mark.parametrize(
    "raw", ["", "soon", "-1", "1e3", WrittenFloat("1e3"), WrittenFloat("nan"), "inf", "1:30", False]
)
def test_no_times(raw):
    """Words, negative ones, exponents, and what TOML calls a number."""
    with pytest.raises(Unfit):
        ANY_TIME.read(raw)


@given(st.integers(0, 2**60))
@settings(deadline=None)
def test_a_size_reads_back_as_it_was_written(size_bytes):
    """Writing and reading is the identity."""
    assert ANY_SIZE.read(ANY_SIZE.write(size_bytes).strip('"')) == size_bytes


@given(st.integers(0, 10**12))
@settings(deadline=None)
def test_a_time_reads_back_as_it_was_written(ms):
    """Writing and reading is the identity, to the millisecond."""
    assert ANY_TIME.read(ANY_TIME.write(ms / 1000).strip('"')) == ms / 1000


@pytest.mark.parametrize(
    "raw", ["1e3", "1.0", "", "ten", "0x10", "1,000", "1_000", "٣", True, None, [1], "9" * 5000]
)
def test_no_whole_numbers(raw):
    """Only digits are; a number without end is out of range and not an error of its own."""
    with pytest.raises(Unfit):
        Whole(0, 10**9).read(raw)


def test_numbers_out_of_range_say_what_the_range_is():
    """A person can mend it without looking it up."""
    with pytest.raises(Unfit, match=r"from 1 to 1,000$"):
        Whole(1, 1000).read(1001)
    with pytest.raises(Unfit, match=r'from "1 KiB" to "1 MiB"$'):
        Size(1024, MIB).read("2 MiB")
    with pytest.raises(Unfit, match=r'from 0.001 to "1 h"$'):
        Seconds(0.001, 3600).read("2 h")


@pytest.mark.parametrize(
    ("raw", "flag"), [(True, True), ("yes", True), ("0", False), ("FALSE", False), (1, True)]
)
def test_flags(raw, flag):
    """TOML's own, and the words people write into variables."""
    assert Flag().read(raw) is flag


def test_what_is_neither_true_nor_false():
    """Anything else would be a guess."""
    for raw in ("maybe", 2, None, []):
        with pytest.raises(Unfit):
            Flag().read(raw)


def test_words_names_text_and_paths():
    """Each takes what it should and nothing else."""
    assert Choice(("drop-oldest", "refuse")).read(" Refuse ") == "refuse"
    assert (
        Names().read("search, read_file,,search")
        == ("search", "read_file")
        == Names().read(["search", "read_file"])
    )
    assert Text().read("  ") is None
    assert RelayPath().read("/api/x?v=1") == "/api/x?v=1"
    for of, raw in [
        (Choice(("a",)), "b"),
        (Names(), [1]),
        (Names(), 5),
        (Text(), 5),
        (Text(), "a\x00b"),
        (RelayPath(), "api"),
        (RelayPath(), "//evil.example/x"),
        (RelayPath(), "/a b"),
        (RelayPath(), "/a#b"),
        (RelayPath(), ""),
        (RelayPath(), 5),
        (RelayUrl(), 5),
        (Token(), "a b"),
        (Token(), "tök"),
    ]:
        with pytest.raises(Unfit):
            of.read(raw)


@pytest.mark.parametrize(
    "text",
    [
        "relay",
        "relay:4850",
        "://relay",
        "http://",
        "http:///x",
        "http://:80",
        "http://[::1",
        "http://[zz]",
        "http://h:0",
        "http://h:65536",
        "http://h:x",
        "http://h:1:2",
        "http://h:-1",
        "http://h:٣",
        "ftp://h",
        "unix:///x",
        "http://u@h",
        "http://u:p@h",
        "http://h?x",
        "http://h#x",
        "http://a\\b",
        "http://a,b",
        "http://a b",
        "http://h\t",
        "http://h\x00",
        "http://h:" + "9" * 5000,
    ],
)
def test_no_relay_address(text):
    """Nothing that a client would stumble over later is taken now."""
    with pytest.raises(Unfit):
        relay_url(text)


@given(st.text())
@settings(deadline=None)
def test_whatever_is_given_as_an_address_is_an_address_or_unfit(text):
    """No other error comes out, and what is taken is taken again in the same spelling."""
    try:
        url = relay_url("http://" + text)
    except Unfit:
        return
    assert relay_url(url) == url


@given(
    st.one_of(
        st.text(),
        st.integers(),
        st.booleans(),
        st.none(),
        st.lists(st.text()),
        st.dictionaries(st.text(), st.text()),
    )
)
@settings(deadline=None)
def test_whatever_is_given_is_shown_on_one_line(raw):
    """A message stays one line, whatever stands in the file."""
    for of in (Text(), Whole(0, 5), RelayUrl(), Names(), Token(), Words(), SecretUrl()):
        shown = of.show(raw)
        assert "\n" not in shown
        assert "\x1b" not in shown
        assert len(shown) <= 201


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (["mail", "-s", "two words"], ("mail", "-s", "two words")),
        ("mail -s 'two words' root", ("mail", "-s", "two words", "root")),
        ("", ()),
        ([], ()),
    ],
)
def test_commands(raw, words):
    """A list as it is, or text split as a shell would."""
    assert Words().read(raw) == words


@pytest.mark.parametrize("raw", ["one 'two", ["a", 1], 5, True, {"a": "b"}, ["", "x"], ["a\0b"]])
def test_no_commands(raw):
    """What cannot be run is refused when it is read, not when it is needed."""
    with pytest.raises(Unfit):
        Words().read(raw)


def test_a_secret_address_is_taken_as_it_is_and_never_shown():
    """Its path and query may be what opens the door."""
    url = "https://hooks.example/T0/s3cret?key=s3cret"
    assert SecretUrl().read(f" {url} ") == url
    assert SecretUrl().read("") is None
    assert "s3cret" not in SecretUrl().show(url)


@pytest.mark.parametrize(
    "raw", ["hooks.example/s3cret", "ftp://h/s3cret", "https:///s3cret", "http://h:0/", 7]
)
def test_no_secret_addresses(raw):
    """The reason is told, without what was given."""
    with pytest.raises(Unfit) as refused:
        SecretUrl().read(raw)
    assert "s3cret" not in str(refused.value)
