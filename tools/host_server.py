"""Start the real ComfyUI server for a while, talk to it, and stop it.

The name is not `server` because ComfyUI has a module of that name, and the tests have ComfyUI on their path.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from host import COMFYUI as HOST_COMFYUI
from host import ROOT

ADDRESS = "127.0.0.1"
COMFYUI = Path(os.environ.get("COMFYUI_PATH") or HOST_COMFYUI)
CACHE = ROOT / ".cache"
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_START_SECONDS = 240.0
_REQUEST_SECONDS = 60.0
_STOP_SECONDS = 15.0


class ServerError(RuntimeError):
    """The server did not start, stopped, or gave an answer that cannot be used. The message quotes its log."""


@dataclass(frozen=True)
class Server:
    """A running server: its port on this machine, its log, and how long it took to start."""

    port: int
    log: Path
    start_s: float

    @property
    def url(self) -> str:
        """The address, without a slash at the end."""
        return f"http://{ADDRESS}:{self.port}"

    def get(self, path: str) -> bytes:
        """Return the body of a GET request. Raises ServerError unless the answer is 200."""
        status, body = request(self.port, "GET", path)
        if status != 200:
            raise ServerError(f"{path}: the server answered {status}; 200 expected")
        return body

    def get_json(self, path: str) -> Any:
        """Return the parsed body of a GET request. Raises ServerError unless the answer is 200."""
        return json.loads(self.get(path))


def request(
    port: int, method: str, path: str, body: Any = None, timeout_s: float = _REQUEST_SECONDS
) -> tuple[int, bytes]:
    """Send one request to a server on this machine; a proxy from the environment is never used.

    Args: body: sent as JSON unless None.
    Returns: the status and the body.
    Raises: OSError or http.client.HTTPException when there is no server or it hangs up.
    """
    connection = http.client.HTTPConnection(ADDRESS, port, timeout=timeout_s)
    try:
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"Content-Type": "application/json"} if data else {})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def free_port() -> int:
    """Return a port of this machine that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind((ADDRESS, 0))
        return probe.getsockname()[1]


def is_free(port: int) -> bool:
    """Tell whether a server could listen on the port."""
    with socket.socket() as probe:
        if os.name != "nt":
            # Without it, a server that stopped a moment ago counts as still there. On Windows it hides a living one.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((ADDRESS, port))
        except OSError:
            return False
        return True


def command(port: int, arguments: Sequence[str] = ()) -> list[str]:
    """Return the command line of the server. Raises ServerError when ComfyUI is not set up."""
    main = COMFYUI / "main.py"
    if not main.is_file():
        raise ServerError(f"no ComfyUI in {COMFYUI}; set it up: make host")
    return [sys.executable, str(main), "--listen", ADDRESS, "--port", str(port), "--disable-auto-launch", *arguments]


def last_lines(log: Path, count: int = 12) -> str:
    """Return the end of a log, indented, for an error message."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    lines = [line for line in _COLOURS.sub("", text).splitlines() if line.strip()]
    tail = "\n".join("  " + line for line in lines[-count:])
    return f"The last lines of {log}:\n{tail}" if tail else f"Its log {log} is empty."


@contextmanager
def running_server(log: Path, arguments: Sequence[str] = (), start_s: float = _START_SECONDS) -> Iterator[Server]:
    """Run ComfyUI on the CPU, on a free port of this machine, until the block ends.

    Pictures, users' settings and temporary files go into a folder that is removed at the end.

    Args:
        log: the file for everything that the server prints; replaced.
        arguments: more arguments for ComfyUI's main.py.
        start_s: how long to wait for the first answer, in seconds.

    Raises: ServerError when the server does not start, with the end of its log.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="server-", dir=log.parent, ignore_cleanup_errors=True) as folder:
        places = [f"--{name}-directory={Path(folder) / name}" for name in ("output", "temp", "user")]
        for name in ("output", "temp", "user"):
            (Path(folder) / name).mkdir()
        fixed = ["--cpu", "--disable-api-nodes", "--database-url", "sqlite:///:memory:", *places]
        # Threads that wait in a loop for each other make the CPU ten times slower as soon as another program runs.
        environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
        line = command(port, [*fixed, *arguments])
        with log.open("wb") as stream:
            process = subprocess.Popen(
                line, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT, env=environment
            )
        try:
            yield _wait_until_ready(process, port, log, start_s)
        finally:
            stop(process)


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, log: Path, limit_s: float) -> Server:
    start = time.monotonic()
    while True:
        code = process.poll()
        if code is not None:
            raise ServerError(f"ComfyUI ended at its start with code {code}. {last_lines(log)}")
        waited = time.monotonic() - start
        try:
            if request(port, "GET", "/system_stats", timeout_s=5)[0] == 200:
                return Server(port, log, waited)
        except (OSError, http.client.HTTPException):
            pass  # not listening yet
        if waited > limit_s:
            raise ServerError(f"ComfyUI did not answer within {limit_s:.0f} s. {last_lines(log)}")
        time.sleep(0.2)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the server and wait for it, with force when it does not listen."""
    process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
