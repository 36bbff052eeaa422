"""tools/demo.py and tools/host_server.py without a server: bad input, refusals, and a server that does not start."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

# At the end of the path: ComfyUI's own modules keep their names.
sys.path.append(str(Path(__file__).resolve().parent.parent / "tools"))

import demo
import host_server


@pytest.mark.parametrize("text", ["-1", "1.5", "abc", "18446744073709551616", "٣", "9" * 5000])
def test_a_wrong_seed_is_refused(text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "argv", ["demo.py", f"--seed={text}"])
    assert demo.main() == 1
    assert "a whole number from 0 to 18446744073709551615 is needed" in capsys.readouterr().err


def test_the_largest_seed_is_taken():
    assert demo.seed_number("18446744073709551615") == 2**64 - 1


def test_a_refusal_names_each_node_and_reason():
    answer = {
        "error": {"message": "Prompt outputs failed validation", "details": "said below"},
        "node_errors": {
            "3": {"class_type": "KSampler", "errors": [{"message": "Value too small", "details": "steps"}]}
        },
    }
    assert demo.describe_refusal(answer) == (
        "ComfyUI refused the workflow: Prompt outputs failed validation\n  KSampler: Value too small: steps"
    )


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ({"error": {"message": "No outputs", "details": "none"}, "node_errors": []}, "No outputs\n  none"),
        ({"error": "broken"}, "broken"),
        ({}, "no reason given"),
    ],
)
def test_a_refusal_of_another_form_is_shown_too(answer: dict, text: str):
    assert demo.describe_refusal(answer) == f"ComfyUI refused the workflow: {text}"


def test_a_half_written_picture_replaces_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "output" / "demo.png"
    demo.write_file(file, b"old")

    def full_disk(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full_disk)
    with pytest.raises(OSError, match="No space left"):
        demo.write_file(file, b"new")
    assert file.read_bytes() == b"old"
    assert list(file.parent.iterdir()) == [file]


def test_a_port_in_use_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    with socket.socket() as other:
        other.bind((host_server.ADDRESS, 0))
        other.listen()
        port = other.getsockname()[1]
        monkeypatch.setattr(sys, "argv", ["demo.py", "--serve", "--port", str(port)])
        assert demo.main() == 1
    assert f"port {port} is in use; choose another: make serve PORT={port + 1}" in capsys.readouterr().err


def test_a_missing_host_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host_server, "COMFYUI", tmp_path)
    with pytest.raises(host_server.ServerError, match=r"no ComfyUI in .*; set it up: make host"):
        host_server.command(8188)


def fake_comfyui(folder: Path, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a main.py in place of ComfyUI's."""
    (folder / "main.py").write_text(code)
    monkeypatch.setattr(host_server, "COMFYUI", folder)


def test_a_server_that_ends_at_its_start_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fake_comfyui(tmp_path, "print('\\x1b[31mno module torch\\x1b[0m'); raise SystemExit(3)", monkeypatch)
    with (
        pytest.raises(host_server.ServerError, match=r"ended at its start with code 3\.(.|\n)*\n  no module torch$"),
        host_server.running_server(tmp_path / "logs" / "server.log"),
    ):
        pass
    assert [file.name for file in (tmp_path / "logs").iterdir()] == ["server.log"]


def test_a_server_that_never_answers_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fake_comfyui(tmp_path, "import time; time.sleep(60)", monkeypatch)
    started = []
    popen = host_server.subprocess.Popen
    monkeypatch.setattr(host_server.subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[-1])
    with (
        pytest.raises(host_server.ServerError, match=r"did not answer within 1 s. Its log .* is empty"),
        host_server.running_server(tmp_path / "logs" / "server.log", start_s=1),
    ):
        pass
    assert started[0].returncode is not None
