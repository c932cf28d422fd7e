"""The layers of the settings, and what a person reads when one is wrong."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from outbox.bounds import Bounds
from outbox.errors import ConfigError
from outbox.event import Limits
from outbox.settings import (
    KEYS,
    Settings,
    describe_changes,
    environment_layers,
    examine,
    load,
    masked,
    resolve,
    shown,
    unknown_variables,
)

CASES = {
    case["case"]: case
    for case in json.loads((Path(__file__).parent.parent / "cases/process/settings.json").read_text("utf-8"))[
        "cases"
    ]
}


def written(folder, text, name="outbox.toml"):
    """A file of configuration; nobody but its owner reads it."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
    return str(path)


def refusal(overrides=None, *, environ=None, config=None):
    """The one line of a refused start."""
    with pytest.raises(ConfigError) as caught:
        load(overrides or {}, environ=environ or {}, config_path=config).require_relay_url()
    assert "\n" not in str(caught.value)
    assert caught.value.exit_status == 2
    return str(caught.value)


def test_without_any_layer_all_defaults_stand():
    """No file, no variable, no flag: the built-in settings, with no origin but themselves."""
    settings = load({}, environ={})
    assert settings == Settings()
    assert settings.origins == {}
    assert settings.limits() == Limits()
    assert settings.bounds() == Bounds()


@pytest.mark.parametrize("case", ["E08", "E09", "E10", "E16"])
@pytest.mark.parametrize("way", ["flag", "variable", "alias", "file"])
def test_an_unusable_relay_address_is_refused_by_name_and_value(case, way, tmp_path):
    """E08 to E10, E16: the line names the setting and shows the value, wherever it came from."""
    url = CASES[case]["relay_url"].replace("PORT", "4850")
    assert CASES[case]["want"] == "refused"
    environ = {"variable": {"OUTBOX_RELAY_URL": url}, "alias": {"AGENT_RELAY_URL": url}}.get(way, {})
    config = written(tmp_path, f'[relay]\nurl = "{url}"\n') if way == "file" else None
    message = refusal({"relay.url": url} if way == "flag" else {}, environ=environ, config=config)
    assert message.startswith(f'relay.url = "{url}" (')
    origins = {
        "flag": "--relay",
        "variable": "OUTBOX_RELAY_URL",
        "alias": "AGENT_RELAY_URL",
        "file": str(tmp_path / "outbox.toml"),
    }
    empty_variable = not url and way in {"variable", "alias"}
    assert ("built-in" if empty_variable else origins[way]) in message


@pytest.mark.parametrize("case", ["E05", "E06", "E07", "E15", "E17"])
def test_a_usable_relay_address_is_taken(case):
    """Trailing slash, path, capitals, IPv6: taken in one spelling."""
    url = CASES[case]["relay_url"].replace("PORT", "4850")
    taken = load({"relay.url": url}, environ={}).require_relay_url()
    assert (
        taken
        == {
            "E05": "http://localhost:4850",
            "E06": "http://127.0.0.1:4850",
            "E07": "http://127.0.0.1:4850/base/path",
            "E15": "http://127.0.0.1:4850",
            "E17": "http://[::1]:4850",
        }[case]
    )


@pytest.mark.parametrize(
    ("text", "shown"),
    [('max_events = "1e3"', '"1e3"'), ("max_events = 1e3", "1e3"), ("max_events = 1.0", "1.0")],
)
def test_a_limit_that_is_no_integer_is_refused_as_it_was_written(text, shown, tmp_path):
    """E18 in a file: also where TOML itself would have read a float."""
    message = refusal(config=written(tmp_path, f"[bounds]\n{text}\n"))
    assert message.startswith(f"bounds.max_events = {shown} (")


def test_a_limit_in_the_environment_that_is_no_integer_is_refused():
    """E18: the variable that stands for the limit of rows."""
    value = CASES["E18"]["env"]["MAX_ROWS"]
    message = refusal(environ={"OUTBOX_BOUNDS_MAX_EVENTS": value})
    assert message.startswith('bounds.max_events = "1e3" (OUTBOX_BOUNDS_MAX_EVENTS)')


def test_later_layers_win_and_each_key_knows_where_it_came_from(tmp_path):
    """Built-in < file < drop-ins in the order of their names < environment < flags."""
    file = written(tmp_path, '[relay]\nurl = "http://file"\nkey_scope = "agent"\n[delivery]\nworkers = 1\n')
    written(tmp_path, "[delivery]\nworkers = 3\nmax_attempts = 3\n", "outbox.toml.d/20-b.toml")
    written(tmp_path, "[delivery]\nworkers = 2\nmax_attempts = 2\n", "outbox.toml.d/10-a.toml")
    written(tmp_path, "[delivery]\nworkers = 9\n", "outbox.toml.d/.hidden.toml")
    written(tmp_path, "not even TOML", "outbox.toml.d/30-c.toml.orig")
    settings = load(
        {"relay.url": "http://flag", "daemon.socket": None},
        environ={"OUTBOX_RELAY_URL": "http://environment", "OUTBOX_DELIVERY_MAX_ATTEMPTS": "4"},
        config_path=file,
    )
    assert settings.relay.url == "http://flag"
    assert settings.relay.key_scope == "agent"
    assert settings.delivery.workers == 3
    assert settings.delivery.max_attempts == 4
    assert settings.origins == {
        "relay.url": "--relay",
        "relay.key_scope": file,
        "delivery.workers": f"{file}.d/20-b.toml",
        "delivery.max_attempts": "OUTBOX_DELIVERY_MAX_ATTEMPTS",
    }


@pytest.mark.parametrize("name", list(KEYS))
def test_every_key_has_a_variable(name):
    """OUTBOX_SECTION_KEY sets it and is cited for it; an empty one is as good as none."""
    key = KEYS[name]
    assert load({}, environ={key.variable: " "}).origins == {}
    value = key.type.write(key.default).strip('"[]') or "some-name"
    if name in {"relay.url", "notify.url", "relay.oauth.token_url"}:
        value = "http://some-name"
    if name == "relay.runtime_token.path":
        value = "/some-name"
    if name == "daemon.http":
        value = "127.0.0.1:4860"
    layers = environment_layers({key.variable: value})
    assert resolve(layers, environ={}).settings.origins == {name: key.variable}


def test_aliases_are_weaker_than_our_own_names():
    """AGENT_RELAY_URL is what a runner set for others; OUTBOX_RELAY_URL was meant for us."""
    aliases = {
        "AGENT_RELAY_URL": "http://alias",
        "AGENT_RELAY_TOKEN": "tok-alias",
        "AGENT_RELAY_MESSAGE_BODY_MAX_CHARS": "100",
        "AGENT_RELAY_RUNNER_OUTBOX_DIR": "/alias",
    }
    settings = load({}, environ=aliases)
    assert (settings.relay.url, settings.relay.token) == ("http://alias", "tok-alias")
    assert settings.limits().message_body_max_chars == 100
    assert settings.configured_state_dir == "/alias"
    own = {"OUTBOX_RELAY_URL": "http://own", "OUTBOX_STATE_DIR": "/own", "OUTBOX_RELAY_TOKEN_FILE": "/t"}
    settings = load({}, environ=aliases | own)
    assert settings.relay.url == "http://own"
    assert settings.configured_state_dir == "/own"
    assert (settings.relay.token, settings.relay.token_file) == (None, "/t")


def test_a_token_and_a_token_file_exclude_each_other(tmp_path):
    """The later layer's one stands; in one layer they are a fault that shows no secret."""
    file = written(tmp_path, '[relay]\ntoken = "tok-secret"\n')
    assert load({"relay.token_file": "/t"}, environ={}, config_path=file).relay.token is None
    written(tmp_path, '[relay]\ntoken_file = "/t"\n', "outbox.toml.d/1.toml")
    settings = load({}, environ={"OUTBOX_RELAY_TOKEN": "tok-mine"}, config_path=file)
    assert (settings.relay.token, settings.relay.token_file) == ("tok-mine", None)
    assert "relay.token_file" not in settings.origins
    message = refusal(environ={"OUTBOX_RELAY_TOKEN": "tok-secret", "OUTBOX_RELAY_TOKEN_FILE": "/t"})
    assert "relay.token" in message
    assert "relay.token_file" in message
    assert "tok-secret" not in message


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('[relay]\nurll = "x"', "relay.url"),
        ('[relayy]\nurl = "x"', "relay.url"),
        ("[delivery]\nmax_events = 5", "bounds.max_events"),
        ("[bounds]\nmax_evnts = 5", "bounds.max_events"),
        ('[kinds.report]\npth = "/x"', None),
        ("relay = 5", "[relay]"),
        ('[relay]\n"paths.mcp" = "/x"', "relay.paths.mcp"),
    ],
)
def test_unknown_keys_are_refused_with_the_nearest_known_one(text, wanted, tmp_path):
    """The line names the file, the key and what was probably meant, and no value, which may be a secret."""
    file = written(tmp_path, text + "\n")
    message = refusal(config=file)
    assert file in message
    assert wanted is None or wanted in message
    assert '"x"' not in message


def test_every_fault_is_told_not_only_the_first(tmp_path):
    """`examine` goes on after a fault, and `load` says how many more there are."""
    file = written(tmp_path, '[relay]\nurl = "ftp://x"\ncolour = 1\n[delivery]\nworkers = 0\n')
    written(tmp_path, "broken", "outbox.toml.d/1.toml")
    report = examine({}, environ={"OUTBOX_BOUNDS_OVERFLOW": "explode"}, config_path=file)
    assert len(report.faults) == 5
    assert report.settings == Settings()
    assert "4 more: outbox config check" in refusal(
        environ={"OUTBOX_BOUNDS_OVERFLOW": "explode"}, config=file
    )


def test_a_wrong_value_is_a_fault_even_where_a_later_layer_overrides_it(tmp_path):
    """Otherwise it would come to light on the day the override goes away."""
    file = written(tmp_path, "[delivery]\nworkers = 0\n")
    assert "delivery.workers = 0" in refusal(environ={"OUTBOX_DELIVERY_WORKERS": "5"}, config=file)


def test_settings_that_contradict_each_other_are_refused():
    """The line cites both, with where they came from."""
    message = refusal(environ={"OUTBOX_DELIVERY_BACKOFF_INITIAL_S": "90"})
    assert "delivery.backoff_initial_s = 90 (OUTBOX_DELIVERY_BACKOFF_INITIAL_S)" in message
    assert "delivery.backoff_max_s = 60 (built-in)" in message
    assert "relay.client_cert" in refusal(environ={"OUTBOX_RELAY_CLIENT_KEY": __file__})


def test_certificates_must_be_there_at_the_start_but_a_token_file_is_waited_for(tmp_path):
    """E13 at this level: a token file that is not there yet is no fault."""
    missing = str(tmp_path / "missing")
    assert "No such file" in refusal(environ={"OUTBOX_RELAY_CA_FILE": missing})
    assert load({"relay.token_file": missing}, environ={}).relay.token_file == missing


def test_kinds_of_ones_own(tmp_path):
    """Each has a path; a name with a dot stands in quotes; the contract's own kinds are no such names."""
    file = written(tmp_path, '[kinds.build-report]\npath = "/api/b"\n[kinds."my.kind"]\npath = "/api/m"\n')
    settings = load({}, environ={}, config_path=file)
    assert settings.kinds == {"build-report": "/api/b", "my.kind": "/api/m"}
    assert settings.limits().custom_kinds == ("build-report", "my.kind")
    assert dict(settings.items())["kinds.build-report.path"] == "/api/b"
    for name in ("insight", "outbox-gap", '"a b"', '""'):
        file = written(tmp_path, f'[kinds.{name}]\npath = "/api/x"\n', "wrong.toml")
        assert "kinds." in refusal(config=file)


def test_relative_paths_start_from_where_they_were_written(tmp_path, monkeypatch):
    """In a file from its folder, in a variable or a flag from the working folder; ~ is HOME."""
    monkeypatch.chdir(tmp_path)
    file = written(tmp_path, '[relay]\ntoken_file = "../token"\n', "etc/outbox.toml")
    assert Path(load({}, environ={}, config_path=file).relay.token_file).resolve() == tmp_path / "token"
    environ = {"OUTBOX_RELAY_TOKEN_FILE": "token", "OUTBOX_STATE_DIR": "~/state", "HOME": "/home/me"}
    settings = load({}, environ=environ)
    assert settings.relay.token_file == str(tmp_path / "token")
    assert settings.configured_state_dir == "/home/me/state"
    assert "HOME is unknown" in refusal(environ={"OUTBOX_STATE_DIR": "~/state"})


def test_what_comes_from_outside_cannot_forge_a_line():
    """A value with line ends or terminal codes is shown escaped, and a long one is cut."""
    message = refusal({"relay.url": "http://x\n\x1b[2JINFO: all is well\u202e"})
    assert message.isprintable()
    assert len(refusal({"relay.url": "ftp://" + "x" * 100_000})) < 500


def test_secrets_never_show():
    """Not in an error, not in a repr, not in the list of changes."""
    secret = "tok-5ecret"
    assert secret not in refusal({"relay.token": secret + " x"})
    assert secret not in refusal({"relay.url": f"http://me:{secret}@relay"})
    assert secret not in refusal({"relay.url": f"me:{secret}@relay"})
    assert secret not in refusal({"relay.url": f"http://relay/?token={secret}"})
    settings = load({"relay.token": secret}, environ={})
    assert secret not in repr(settings)
    assert secret not in " ".join(describe_changes(Settings(), settings))


def test_changes_are_told_a_line_a_key():
    """For SIGHUP: old and new, and whether it takes a restart."""
    old = load({"relay.url": "http://a", "relay.token": "tok-1", "bounds.max_bytes": 1024}, environ={})
    new = load({"relay.url": "http://b", "relay.token": "tok-2", "daemon.socket": "/run/o.sock"}, environ={})
    new = replace(new, kinds={"report": "/r"})
    assert describe_changes(old, new) == [
        'relay.url: "http://a" -> "http://b"',
        "relay.token: ******** -> ********",
        'bounds.max_bytes: "1 KiB" -> "512 MiB"',
        'daemon.socket: not set -> "/run/o.sock" (takes effect at the next start)',
        'kinds.report.path: not set -> "/r"',
    ]
    assert describe_changes(new, new) == []


def test_bounds_and_limits_follow_the_settings():
    """The engine reads milliseconds, and None for what is off."""
    overrides = {
        "bounds.max_age_s": "2 days",
        "bounds.receipt_window_s": 1.5,
        "bounds.overflow": "refuse",
        "events.max_payload_bytes": "1 KiB",
        "relay.key_scope": "agent",
    }
    settings = load(overrides, environ={})
    assert settings.bounds() == Bounds(max_age_ms=172_800_000, receipt_window_ms=1500, overflow="refuse")
    assert settings.limits() == Limits(max_payload_bytes=1024, key_scope="agent")


def test_variables_that_are_no_settings_are_told_with_the_nearest():
    """They are passed over at a start, since other programs may own them."""
    environ = {"OUTBOX_RELAY_URLL": "x", "OUTBOX_CONFIG": "x", "OUTBOX_DAEMON_STATE_DIR": "x", "PATH": "x"}
    assert dict(unknown_variables(environ)) == {
        "OUTBOX_RELAY_URLL": "OUTBOX_RELAY_URL",
        "OUTBOX_DAEMON_STATE_DIR": "OUTBOX_STATE_DIR",
    }


def test_the_bounds_survive_an_outbox_file_of_another_release():
    """What is unknown is passed over, what is missing has its default."""
    bounds = Bounds(max_events=5, max_age_ms=7)
    assert Bounds.from_json(json.loads(json.dumps(bounds.to_json()))) == bounds
    assert Bounds.from_json({"maxEvents": 5, "maxColour": "red"}) == Bounds(max_events=5)


def test_a_bare_name_may_be_a_systemd_credential(tmp_path):
    """Where a credential of this name is; any other name starts from its folder, as ever."""
    (tmp_path / "relay-token").write_text("tok-1")
    environ = {"CREDENTIALS_DIRECTORY": str(tmp_path), "OUTBOX_RELAY_TOKEN_FILE": "relay-token"}
    assert load({}, environ=environ).relay.token_file == str(tmp_path / "relay-token")
    environ["OUTBOX_RELAY_TOKEN_FILE"] = "other-token"
    assert load({}, environ=environ).relay.token_file == str(Path("other-token").absolute())
    file = written(
        tmp_path, '[relay.oauth]\nclient_secret_file = "relay-token"\nrefresh_token_file = "./x"\n'
    )
    oauth = load({}, environ=environ, config_path=file).relay_oauth
    assert oauth.client_secret_file == str(tmp_path / "relay-token")
    assert oauth.refresh_token_file == str(Path(file).parent / "x")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('[relay]\ntoken = "a"\n[relay.oauth]\ntoken_url = "http://l"\nclient_id = "c"', "are both set"),
        ('[relay]\ntoken = "a"\ntoken_file = "b"\ntoken_command = ["c"]', "are all set"),
        ('[relay.oauth]\ntoken_url = "http://l"', "needs relay.oauth.client_id"),
        ('[relay.oauth]\nclient_secret = "a"\nclient_secret_file = "b"', "are both set"),
        ('[relay.oauth]\ntoken_url = "login"', "has no scheme"),
        ('[relay.oauth]\ntoken_url = "http://u:p@l"', "has credentials"),
        ('[relay.runtime_token]\npath = "/api/runtime-tokens"', "needs a bootstrap token"),
        ('[relay.runtime_token]\npath = "mint"', "is no path"),
    ],
)
def test_sources_of_the_token_that_contradict_each_other(tmp_path, text, fault):
    """Each names the settings, and shows no secret."""
    report = examine({}, environ={}, config_path=written(tmp_path, text))
    (said,) = report.faults
    assert fault in said
    assert '"p@' not in said
    assert 'token = "a"' not in said


def test_the_query_of_a_token_endpoint_is_shown_nowhere(tmp_path):
    """It may hold a key: neither in a message, nor in what is shown, nor in what a reload says."""
    text = '[relay.oauth]\ntoken_url = "https://l/token?code=s3cret"\n'
    with pytest.raises(ConfigError) as caught:
        load({}, environ={}, config_path=written(tmp_path, text))
    settings = load({}, environ={}, config_path=written(tmp_path, f'{text}client_id = "c"\n'))
    url = settings.relay_oauth.token_url
    said = (
        str(caught.value),
        shown("relay.oauth.token_url", url),
        masked("relay.oauth.token_url", url),
        *describe_changes(Settings(), settings),
    )
    assert url == "https://l/token?code=s3cret"
    assert not [text for text in said if "s3cret" in text]
    assert "https://l/token?" in shown("relay.oauth.token_url", url)


def test_a_later_layer_names_another_source_of_the_token(tmp_path):
    """A token of the environment is stronger than the OAuth client of a file."""
    file = written(tmp_path, '[relay.oauth]\ntoken_url = "http://l/token?x=1"\nclient_id = "c"\n')
    assert load({}, environ={}, config_path=file).relay_oauth.token_url == "http://l/token?x=1"
    settings = load({}, environ={"OUTBOX_RELAY_TOKEN": "tok-1"}, config_path=file)
    assert (settings.relay.token, settings.relay_oauth.token_url) == ("tok-1", None)
