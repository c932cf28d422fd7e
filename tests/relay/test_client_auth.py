"""Where the token comes from: a setting, a file that changes under our feet, or nowhere."""

import os

import pytest

from relay_client import NoToken, StaticToken, TokenFile, TokenUnavailable, fingerprint


@pytest.fixture
def path(tmp_path):
    """Where the token file of a test is."""
    return tmp_path / "token"


@pytest.mark.parametrize(
    "content", [b"tok-abc123\n", b"tok-abc123\r\n", b" tok-abc123 \n\n", b"\xef\xbb\xbftok-abc123"]
)
def test_a_file_holds_the_token_and_nothing_else(path, content):
    """E11: line ends, blanks around it and a byte order mark are no part of it."""
    path.write_bytes(content)
    assert TokenFile(path).token() == "tok-abc123"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"tok abc", "white space"),
        (b"tok\nabc", "white space"),
        (b"tok-\xc3\xa9", "visible ASCII"),
        (b"x" * 70_000, "too large"),
    ],
)
def test_a_file_without_a_token_says_why(path, content, reason):
    """E12: no usable token, with the file's name and without its content."""
    path.write_bytes(content)
    with pytest.raises(TokenUnavailable, match=reason) as unavailable:
        TokenFile(path).token()
    assert str(path) in str(unavailable.value)
    assert "abc" not in str(unavailable.value)


def test_a_missing_file_is_waited_for(path):
    """E13: as soon as it is there, it is used."""
    source = TokenFile(path)
    with pytest.raises(TokenUnavailable, match="no such file"):
        source.token()
    path.write_text("tok-1")
    assert source.token() == "tok-1"


def test_a_file_that_vanishes_takes_its_token_along(path):
    """A token that was taken away is not used on."""
    path.write_text("tok-1")
    source = TokenFile(path)
    assert source.token() == "tok-1"
    path.unlink()
    with pytest.raises(TokenUnavailable):
        source.token()


def test_what_is_no_file_does_not_block(tmp_path, path):
    """A directory or a pipe that nobody writes to is refused at once."""
    with pytest.raises(TokenUnavailable, match="no regular file"):
        TokenFile(tmp_path).token()
    os.mkfifo(path)
    with pytest.raises(TokenUnavailable, match="no regular file"):
        TokenFile(path).token()


def test_a_changed_file_is_read_again(path):
    """Written over, or replaced as mounted secrets are: the next request has the new token."""
    path.write_text("tok-1")
    source = TokenFile(path)
    assert source.token() == "tok-1"
    path.write_text("tok-longer")
    assert source.token() == "tok-longer"
    other = path.with_name("new")
    other.write_text("tok-3")
    other.replace(path)
    assert source.token() == "tok-3"


def test_an_unchanged_file_is_not_read_again(path, monkeypatch):
    """One stat a request; the file is opened when it changes."""
    path.write_text("tok-1")
    source = TokenFile(path)
    source.token()
    monkeypatch.setattr(os, "open", None)
    assert source.token() == "tok-1"


def test_refresh_reads_a_file_that_looks_unchanged(path, monkeypatch):
    """Same size, same clock tick: a refresh, as after a 401, looks inside all the same."""
    monkeypatch.setattr("relay_client.auth._identity", lambda _status: (0,))
    path.write_text("tok-1")
    source = TokenFile(path)
    assert source.token() == "tok-1"
    path.write_text("tok-2")
    assert source.token() == "tok-1"
    assert source.refresh()
    assert source.token() == "tok-2"
    assert not source.refresh()


def test_refresh_of_an_unusable_file_is_no_new_token(path):
    """Nothing to try again with."""
    path.write_text("tok-1")
    source = TokenFile(path)
    source.token()
    path.write_text("")
    assert not source.refresh()


def test_a_static_token():
    """It is cleaned once more, checked, and never changes."""
    source = StaticToken(" tok-1\n")
    assert source.token() == "tok-1"
    assert not source.refresh()
    with pytest.raises(TokenUnavailable, match="is empty"):
        StaticToken("").token()
    with pytest.raises(TokenUnavailable, match="white space"):
        StaticToken("a b").token()


def test_no_token():
    """For a relay that asks for none."""
    source = NoToken()
    assert source.token() is None
    assert not source.refresh()
    assert source.fingerprint() == "none"


def test_nothing_shows_a_token(path):
    """Neither a description nor a fingerprint nor a repr tells it; the fingerprint tells two apart."""
    path.write_text("tok-secret")
    for source in (StaticToken("tok-secret"), TokenFile(path), NoToken()):
        shown = f"{source!r} {source.describe()} {source.fingerprint()}"
        assert "secret" not in shown
    assert (
        StaticToken("tok-secret").fingerprint() == TokenFile(path).fingerprint() == fingerprint("tok-secret")
    )
    assert len(fingerprint("a")) == 8
    assert fingerprint("a") != fingerprint("b")
    assert TokenFile(path).describe() == f"file {path}"
