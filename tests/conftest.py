"""Load the real ComfyUI on the CPU, and this package as ComfyUI would: as a package, never with the root on sys.path."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
COMFYUI = Path(os.environ.get("COMFYUI_PATH") or ROOT / ".host" / "ComfyUI")
NANO = ROOT / "assets" / "nano"

if not (COMFYUI / "comfy" / "sd.py").is_file():
    pytest.exit(f"no ComfyUI in {COMFYUI}; run: make host", returncode=4)

# ComfyUI reads its command line when comfy.cli_args is imported.
_argv, sys.argv = sys.argv, ["main.py", "--cpu", "--disable-api-nodes"]
sys.path.insert(0, str(COMFYUI))
import comfy.options

comfy.options.enable_args_parsing()
import comfy.cli_args
import torch

sys.argv = _argv
torch.set_grad_enabled(False)


def _load_package() -> None:
    """Import the package under the name ernie_fast, which is also the name that pyright and the tests use."""
    spec = importlib.util.spec_from_file_location(
        "ernie_fast", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
    )
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["ernie_fast"] = module
    spec.loader.exec_module(module)


_load_package()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def nano() -> Path:
    """The folder of the bundled tiny checkpoint."""
    return NANO


@pytest.fixture(scope="session")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random ERNIE-Image checkpoint of three layers."""
    from ernie_files import ernie_state_dict, save

    return save(tmp_path_factory.mktemp("small") / "m.safetensors", ernie_state_dict(num_layers=3))


@pytest.fixture
def model(small_file: Path) -> Any:
    """The small checkpoint, loaded anew for each test."""
    from ernie_fast.nodes.model.build import load_model

    return load_model(small_file)


@pytest.fixture
def core_loader(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """ComfyUI's own Load Diffusion Model. It builds the released size only, so the small sizes are put into what its
    detection returns; everything else is its unchanged code."""
    import comfy.model_detection
    from ernie_files import SIZES

    import nodes as core_nodes

    detect = comfy.model_detection.detect_unet_config

    def detect_with_sizes(*args: Any, **kwargs: Any) -> Any:
        config = detect(*args, **kwargs)
        return {**config, **SIZES} if config else config

    monkeypatch.setattr(comfy.model_detection, "detect_unet_config", detect_with_sizes)
    return lambda name: core_nodes.UNETLoader().load_unet(name, "default")[0]


@pytest.fixture
def steady_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free memory that does not change: ComfyUI's attention on the CPU reads it, and compiled code is compiled again for another value."""
    import comfy.model_management

    free = 8 * 1024**3
    monkeypatch.setattr(comfy.model_management, "get_free_memory", lambda _device=None, both=False: (free, free) if both else free)


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A models folder of its own for the test: ComfyUI's folder_paths looks only there."""
    import folder_paths

    for name in ("diffusion_models", "text_encoders", "checkpoints", "diffusers", "loras", "vae", "vae_approx"):
        folder = tmp_path / "models" / name
        folder.mkdir(parents=True)
        extensions = folder_paths.folder_names_and_paths[name][1]
        monkeypatch.setitem(folder_paths.folder_names_and_paths, name, ([str(folder)], extensions))
    monkeypatch.setattr(folder_paths, "filename_list_cache", {})
    return tmp_path / "models"
