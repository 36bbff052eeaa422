"""What importing the package does and does not do, and which module may import which."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import COMFYUI, ROOT

SHIPPED = [ROOT / "__init__.py", *sorted((ROOT / "nodes").rglob("*.py")), *sorted((ROOT / "kernels").rglob("*.py"))]

PROBE = """
import asyncio, json, os, socket, subprocess, sys, time
sys.argv = ["main.py", "--cpu", "--disable-api-nodes"]
sys.path.insert(0, {comfyui!r})
import comfy.options
comfy.options.enable_args_parsing()
import nodes, torch
import comfy_api.latest, comfy.model_management, comfy_config.config_parser
def refuse(*arguments, **options):
    raise RuntimeError("network or process at import")
socket.socket.connect = refuse
socket.getaddrinfo = refuse
subprocess.Popen.__init__ = refuse
os.system = refuse
before = set(sys.modules)
threads = torch.get_num_threads()
start = time.process_time()
loaded = asyncio.run(nodes.load_custom_node({root!r}, module_parent="custom_nodes"))
seconds = time.process_time() - start
new = sorted({{name.split(".")[0] for name in set(sys.modules) - before}})
print(json.dumps(dict(loaded=loaded, seconds=seconds, new=new, cuda=torch.cuda.is_initialized(), threads=threads == torch.get_num_threads())))
"""


@pytest.fixture(scope="module")
def fresh_import():
    """Import the package into a fresh ComfyUI process that refuses network and processes.

    The time is CPU time, the better of two, so that a busy machine does not fail the test.
    """
    code = PROBE.format(comfyui=str(COMFYUI), root=str(ROOT))
    results = []
    for _ in range(2):
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
        assert run.returncode == 0, run.stderr
        results.append(json.loads(run.stdout.splitlines()[-1]))
    return min(results, key=lambda r: r["seconds"])


def test_import_starts_no_cuda_network_or_process(fresh_import):
    assert fresh_import["loaded"] is True
    assert fresh_import["cuda"] is False
    assert fresh_import["threads"] is True


def test_import_brings_in_no_heavy_module(fresh_import):
    heavy = {"gguf", "transformers", "diffusers", "pandas", "cv2", "triton", "requests", "huggingface_hub", "numba"}
    assert not heavy & set(fresh_import["new"])


def test_import_takes_less_than_three_tenths_of_a_second(fresh_import):
    assert fresh_import["seconds"] < 0.3


def test_root_module_imports_without_comfyui():  # pytest and packaging tools import it alone
    code = f"import importlib.util as u; s=u.spec_from_file_location('p', {str(ROOT / '__init__.py')!r}); m=u.module_from_spec(s); s.loader.exec_module(m); print(m.WEB_DIRECTORY)"
    run = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=60)
    assert run.stdout.strip() == "./web", run.stderr


def imports_of(file: Path) -> set[str]:
    """Absolute names of what a shipped file imports; our own modules begin with 'ernie_fast.'."""
    package = ["ernie_fast", *file.relative_to(ROOT).parts[:-1]]
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            found.add(".".join([*base, *([node.module] if node.module else [])]))
    return found


@pytest.mark.parametrize("file", SHIPPED, ids=lambda f: str(f.relative_to(ROOT)))
def test_shipped_code_has_no_eval_pickle_process_or_print(file):
    banned_modules = {"pickle", "subprocess", "marshal", "shelve", "ctypes", "socket", "urllib.request"}
    assert not banned_modules & imports_of(file)
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            assert name not in {"eval", "exec", "compile", "__import__", "print", "torch.load", "os.system"}, name


@pytest.mark.parametrize("file", SHIPPED, ids=lambda f: str(f.relative_to(ROOT)))
def test_imports_go_one_way(file):
    """node -> feature logic -> nodes/model -> kernels."""
    parts = file.relative_to(ROOT).parts
    for name in imports_of(file):
        own = name.split(".")[1:] if name.startswith("ernie_fast.") else None
        if parts[0] == "kernels":
            assert own is None or own[0] == "kernels", name
            assert not name.startswith(("comfy", "folder_paths", "nodes")), name
        elif parts[:2] == ("nodes", "model") and own:
            assert own[:2] == ["nodes", "model"] or own[0] == "kernels", name
        elif len(parts) > 2 and own and own[0] == "nodes" and own[1] != parts[1]:
            assert not own[-1].endswith(("_loader", "node")), f"{name}: a feature imports another feature's node"


def test_only_the_model_folder_knows_the_transformer():
    for file in SHIPPED:
        if "model" not in file.relative_to(ROOT).parts:
            assert "comfy.ldm.ernie.model" not in imports_of(file), file


def test_requirements_hold_only_what_comfyui_lacks():
    assert (ROOT / "requirements.txt").read_text().split() == ["gguf>=0.13"]
    core = (COMFYUI / "requirements.txt").read_text()
    assert "gguf" not in core
