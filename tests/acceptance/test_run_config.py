"""The files to copy for `outbox run` and for Kubernetes: they can be read, and what they name is there."""

import argparse
from pathlib import Path

import pytest
import yaml
from command_line import environment

from outbox import cli
from outbox.settings import examine, unknown_variables

CONFIG = Path(__file__).parent.parent.parent / "config"
PODS = sorted((CONFIG / "kubernetes").glob("*.yaml"))


def containers(pod):
    """Every container of a pod, those that start first too."""
    return [*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]]


def commands(pod):
    """Each `outbox …` that a pod runs."""
    for container in containers(pod):
        hooks = [hook["exec"]["command"] for hook in container.get("lifecycle", {}).values()]
        for words in [container.get("command", []) + container.get("args", []), *hooks]:
            if words[:1] == ["outbox"]:
                yield words[1:]


def parsed(words):
    """What the command line makes of it; raises UsageError."""
    everywhere, (name, *own) = cli.hoist(words)
    return name, cli.parser_of(name, cli.load(name)).parse_args([*everywhere, *own])


@pytest.mark.parametrize("path", PODS, ids=lambda path: path.name)
def test_a_pod_can_be_copied(path):
    """Its commands are taken, its variables are settings, its volumes are there."""
    (pod,) = yaml.safe_load_all(path.read_text("utf-8"))
    assert (pod["apiVersion"], pod["kind"]) == ("v1", "Pod")
    assert [isinstance(parsed(words)[1], argparse.Namespace) for words in commands(pod)] == [True]
    volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
    for container in containers(pod):
        named = {variable["name"]: variable["value"] for variable in container.get("env", ())}
        assert list(unknown_variables(named)) == []
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        assert all(isinstance(value, str) for value in named.values())


def test_the_times_of_the_pod_fit():
    """What `outbox run` may take is less than what the pod is given."""
    (pod,) = yaml.safe_load_all((CONFIG / "kubernetes" / "run.yaml").read_text("utf-8"))
    (words,) = commands(pod)
    name, args = parsed(words)
    assert (name, args.command[0]) == ("run", "claude")
    assert args.kill_after + args.flush_timeout < pod["spec"]["terminationGracePeriodSeconds"]


def test_what_a_command_finds_is_not_taken_for_slips():
    """`config check` and `doctor` say nothing of the variables that `outbox run` sets."""
    names = ("OUTBOX_AGENT", "OUTBOX_SOCKET", "OUTBOX_STATE_DIR", "OUTBOX_SIDECAR")
    assert list(unknown_variables(dict.fromkeys(names, "x"))) == []


def test_there_are_pods():
    """A folder that was moved is missed."""
    assert [path.name for path in PODS] == ["pre-stop.yaml", "run.yaml", "sidecar-container.yaml"]


def test_the_configuration_for_a_sidecar(tmp_path):
    """It has no fault, and the state directory that the pods mount."""
    report = examine({}, environ=environment(tmp_path), config_path=str(CONFIG / "sidecar.toml"))
    assert report.faults == ()
    assert report.settings.relay.token_file == "/etc/relay-outbox/token"
    assert report.settings.sidecar.kill_after_s == 20
