"""Paint a picture with the bundled tiny checkpoint through a real ComfyUI server, or leave the server running.

    .venv/bin/python tools/demo.py --prompt "a lemon on a blue background" --seed 3
    .venv/bin/python tools/demo.py --serve --port 8188

The prompt and the seed also come from the environment variables PROMPT and SEED.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.parse
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
from host import ROOT
from host_server import ADDRESS, CACHE, Server, ServerError, command, is_free, last_lines, request, running_server, stop
from workflow import WorkflowError, api_prompt, load_workflow, set_input

WORKFLOW = ROOT / "workflows" / "ernie-nano-demo.json"
PICTURE = ROOT / "output" / "demo.png"
_SEED_MAX = 2**64 - 1
_PLAIN_LINE_EVERY = 5


class RunError(RuntimeError):
    """The server refused a prompt or could not finish it. The message is for the person at the keyboard."""


class Progress:
    """One line that is written again and again; plain lines, and fewer of them, when nobody watches."""

    def __init__(self) -> None:
        self._live = sys.stdout.isatty()

    def step(self, what: str, value: int, total: int) -> None:
        """Show that a node has done `value` of `total`."""
        if self._live or value % _PLAIN_LINE_EVERY == 0 or value == total:
            self._write(f"{what}: {value} of {total}")

    def node(self, what: str) -> None:
        """Show that a node has begun."""
        if self._live:
            self._write(f"{what} ...")

    def end(self) -> None:
        """Clear the line, so that the next text starts on it."""
        if self._live:
            print("\r\x1b[K", end="", flush=True)

    def _write(self, text: str) -> None:
        print(f"\r\x1b[K[demo] {text}" if self._live else f"[demo] {text}", end="" if self._live else "\n", flush=True)


def queue_prompt(server: Server, prompt: dict[str, Any], client_id: str = "") -> str:
    """Hand a prompt to the server. Returns its id; raises RunError with the server's reasons when it is refused."""
    status, body = request(server.port, "POST", "/prompt", {"prompt": prompt, "client_id": client_id})
    try:
        answer = json.loads(body)
    except ValueError as error:
        raise RunError(f"the server answered {status} with no JSON: {body[:200]!r}") from error
    if status != 200:
        raise RunError(describe_refusal(answer))
    return answer["prompt_id"]


def describe_refusal(answer: dict[str, Any]) -> str:
    """Return a refusal's reasons, one line for each input that is wrong."""
    reasons = [
        f"  {node['class_type']}: {error['message']}" + (f": {error['details']}" if error.get("details") else "")
        for node in (answer.get("node_errors") or {}).values()
        for error in node["errors"]
    ]
    error = answer.get("error") or {}
    if not isinstance(error, dict):
        error = {"message": str(error)}
    # ComfyUI puts the first node's reason into 'details' as well; it is said once.
    head = str(error.get("message", "no reason given"))
    if not reasons and error.get("details"):
        reasons = [f"  {error['details']}"]
    return "\n".join([f"ComfyUI refused the workflow: {head}", *reasons])


async def run_prompt(server: Server, prompt: dict[str, Any], progress: Progress | None = None) -> dict[str, Any]:
    """Run a prompt to its end.

    Args: progress: told what happens; None: nobody is told.
    Returns: the outputs, node id -> what the node reports, such as {"images": [...]}.
    Raises: RunError when the prompt is refused, fails or is interrupted; ServerError when the server goes away.
    """
    client_id = uuid.uuid4().hex
    outputs: dict[str, Any] = {}
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(f"{server.url}/ws", params={"clientId": client_id}, max_msg_size=0) as socket,
    ):
        prompt_id = await asyncio.to_thread(queue_prompt, server, prompt, client_id)
        async for message in socket:
            if message.type is not aiohttp.WSMsgType.TEXT:
                continue  # a preview picture
            event = json.loads(message.data)
            if event["data"].get("prompt_id") != prompt_id:
                continue
            kind, data = event["type"], event["data"]
            if kind == "executed":
                # Taken from here and not from /history, which the server writes only after it has said 'success'.
                outputs[data["node"]] = data["output"] or {}
            if _ends(kind, data):
                return outputs
            if progress:
                _tell(progress, kind, data, prompt)
    raise ServerError(f"the server stopped in the middle of the work. {last_lines(server.log)}")


def _ends(kind: str, data: dict[str, Any]) -> bool:
    """Tell whether the event is the good end of a run. Raises RunError when it is a bad one."""
    if kind == "execution_error":
        raise RunError(f"{data['node_type']} failed: {str(data['exception_message']).strip()}")
    if kind == "execution_interrupted":
        raise RunError("the run was interrupted in the server")
    return kind == "execution_success"


def _tell(progress: Progress, kind: str, data: dict[str, Any], prompt: dict[str, Any]) -> None:
    node = prompt.get(str(data.get("node")))
    if node is None:
        return
    if kind == "progress":
        progress.step(node["_meta"]["title"], data["value"], data["max"])
    elif kind == "executing":
        progress.node(node["_meta"]["title"])


def download(server: Server, image: dict[str, str]) -> bytes:
    """Return the file of one saved image, as `run_prompt` lists it."""
    return server.get(f"/view?{urllib.parse.urlencode(image)}")


def demo_prompt(object_info: dict[str, Any], text: str, seed: int | None) -> tuple[dict[str, Any], str, int]:
    """Return the demo's prompt with its text and its seed; an empty text or no seed keeps the workflow's own."""
    prompt = api_prompt(load_workflow(WORKFLOW), object_info)
    if text:
        set_input(prompt, "Positive prompt", "text", text)
    if seed is not None:
        set_input(prompt, "KSampler", "seed", seed)
    inputs = {entry["_meta"]["title"]: entry["inputs"] for entry in prompt.values()}
    return prompt, inputs["Positive prompt"]["text"], inputs["KSampler"]["seed"]


def paint(text: str, seed: int | None) -> None:
    """Start a server, paint one picture, write it to output/demo.png, stop the server."""
    progress = Progress()
    print("[demo] starting ComfyUI ...", flush=True)
    with running_server(CACHE / "demo.log") as server:
        print(f"[demo] ComfyUI is up after {server.start_s:.0f} s", flush=True)
        start = time.monotonic()
        prompt, text_used, seed_used = demo_prompt(server.get_json("/object_info"), text, seed)
        try:
            outputs = asyncio.run(run_prompt(server, prompt, progress))
        finally:
            progress.end()
        images = [image for output in outputs.values() for image in output.get("images", [])]
        if not images:
            raise RunError(f"the run ended without a picture. {last_lines(server.log)}")
        write_file(PICTURE, download(server, images[0]))
        seconds = time.monotonic() - start
    print(f"[demo] {PICTURE.relative_to(ROOT)}: '{text_used}', seed {seed_used}, {seconds:.1f} s", flush=True)
    if text:
        print("[demo] the tiny model knows 90 things on 12 colours; assets/nano/README.md lists them", flush=True)


def write_file(file: Path, data: bytes) -> None:
    """Write a file in one step: a reader sees the old one or the new one, never half of it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        temporary.write_bytes(data)
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def serve(port: int) -> int:
    """Run the server in the foreground until Ctrl-C. Returns its exit code."""
    if not is_free(port):
        raise ServerError(f"port {port} is in use; choose another: make serve PORT={port + 1}")
    # Asked in a process of its own: torch would stay in this one's memory for as long as the server runs.
    probe = [sys.executable, "-c", "import sys, torch; sys.exit(not torch.cuda.is_available())"]
    arguments = ["--cpu"] if subprocess.run(probe, stderr=subprocess.DEVNULL).returncode else []
    print(
        f"[demo] ComfyUI at http://{ADDRESS}:{port}; the workflows are under Templates, ernie-fast. Ctrl-C ends it.",
        flush=True,
    )
    process = subprocess.Popen(command(port, arguments))
    try:
        return process.wait()
    except KeyboardInterrupt:
        # The terminal has told the server as well: it has a moment to end by itself.
        time.sleep(2)
        return 0
    finally:
        stop(process)


def seed_number(text: str) -> int:
    """Return a seed given as text. Raises RunError when it is no whole number from 0 to 2**64 - 1."""
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(_SEED_MAX)) and int(text) <= _SEED_MAX):
        raise RunError(f"SEED is '{text}'; a whole number from 0 to {_SEED_MAX} is needed")
    return int(text)


def guarded(work: Callable[[], int | None]) -> int:
    """Do the work; say in plain words why it could not be done. Returns the exit code."""
    try:
        return work() or 0
    except (RunError, ServerError, WorkflowError) as error:
        print(f"Demo stopped: {error}", file=sys.stderr)
    except OSError as error:
        print(f"Demo stopped: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("Demo stopped by Ctrl-C; the server is off.", file=sys.stderr)
        return 130
    return 1


def main() -> int:
    """Parse the command line and run the demo or the server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", default=os.environ.get("PROMPT", ""), help="what to paint; default: a red apple")
    parser.add_argument("--seed", default=os.environ.get("SEED", ""), help="the same seed paints the same picture")
    parser.add_argument("--serve", action="store_true", help="leave the server running instead")
    parser.add_argument("--port", type=int, default=8188, help="the port for --serve")
    arguments = parser.parse_args()
    # A plain 'kill' must not leave the server behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if arguments.serve:
        return guarded(lambda: serve(arguments.port))
    return guarded(lambda: paint(arguments.prompt, seed_number(arguments.seed) if arguments.seed else None))


if __name__ == "__main__":
    sys.exit(main())
