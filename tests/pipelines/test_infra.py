"""What stands in infra/ can be read by who is to read it, holds no secret, and names the versions that we use."""

import re
import subprocess
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml", reason="comes with dask")

pytestmark = pytest.mark.unit

INFRA = Path(__file__).parents[2] / "infra"


def documents(path):
    return [each for each in yaml.safe_load_all(path.read_text()) if each]


@pytest.mark.parametrize("path", sorted(INFRA.rglob("*.sh")), ids=lambda path: path.parent.name + "/" + path.name)
def test_scripts_are_shell(path):
    subprocess.run(["bash", "-n", path], check=True)
    assert path.stat().st_mode & 0o100


@pytest.mark.parametrize("path", sorted((INFRA / "kubernetes").glob("*.yaml")), ids=lambda path: path.name)
def test_manifests_are_objects_whose_parts_fit(path):
    for each in documents(path):
        assert {"apiVersion", "kind", "metadata"} <= set(each)
        assert each["kind"] != "Secret"
        if each["kind"] == "Deployment":
            assert each["spec"]["selector"]["matchLabels"] == each["spec"]["template"]["metadata"]["labels"]


def test_credentials_come_from_a_secret_alone():
    for path in INFRA.rglob("*.yaml"):
        text = "\n".join(line.partition("#")[0] for line in path.read_text().splitlines())
        assert "AWS_SECRET_ACCESS_KEY:" not in text
        assert "AWS_SECRET_ACCESS_KEY=" not in text


def test_job_servers_are_of_the_version_of_beam_that_workers_have():
    """Not of the newest: a release of Beam changes nothing here."""
    [workers] = re.findall(r"^ARG BEAM=(\S+)$", (INFRA / "container" / "Dockerfile").read_text(), re.MULTILINE)
    servers = [
        version for path in INFRA.rglob("*.yaml") for version in re.findall(r"apache/beam\S*:(\S+)", path.read_text())
    ]
    assert len(servers) > 1
    assert {*servers, *re.findall(r"cmd/prism@v(\S+)", (INFRA.parent / "Makefile").read_text())} == {workers}


def test_what_is_run_in_manifests_are_commands_and_options_that_exist():
    import click

    from trajlake_cli.main import cli

    found = 0
    for path in (INFRA / "kubernetes").glob("*.yaml"):
        for each in documents(path):
            for container in containers(each):
                if container["image"] == "trajlake" and "args" in container:
                    name, *arguments = container["args"]
                    command = cli.get_command(click.Context(cli), name)
                    known = {option for parameter in command.params for option in parameter.opts}
                    assert {argument for argument in arguments if argument.startswith("--")} <= known
                    found += 1
    assert found >= 2


def containers(node):
    if isinstance(node, dict):
        yield from node.get("containers", [])
        for value in node.values():
            yield from containers(value)
    elif isinstance(node, list):
        for value in node:
            yield from containers(value)
