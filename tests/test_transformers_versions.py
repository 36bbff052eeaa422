"""The text encoder loads and gives the same embeddings with transformers 4.57 and 5.24, where ComfyUI's own fails on 5.24."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from ernie_fast.nodes.model.checkpoint import open_checkpoint
from ernie_fast.nodes.text.encoder import load_text_encoder
from ernie_fast.nodes.text.source import find_tokenizer
from safetensors.torch import load_file
from text_files import embed

ROOT = Path(__file__).resolve().parent.parent
TEXT = "a red apple on a blue background"
# Each with what it needs and the environment has in another version.
VERSIONS = {"4.57.6": ("transformers==4.57.6", "huggingface-hub<1.0,>=0.34")}
if sys.version_info >= (3, 11):
    VERSIONS["5.24.0"] = ("transformers==5.24.0", "tokenizers<0.24,>=0.23.1")
else:  # the newest for Python 3.10; its tokenizer helper is the changed one too
    VERSIONS["5.20.2"] = ("transformers==5.20.2", "tokenizers<0.24,>=0.23.1")
SCRIPT = f"""
import sys
sys.path.insert(0, {str(Path(__file__).resolve().parent)!r})
import conftest
import transformers
assert transformers.__version__ == sys.argv[1], transformers.__file__
from safetensors.torch import save_file
from ernie_fast.nodes.model.checkpoint import open_checkpoint
from ernie_fast.nodes.text import tokenizer
from ernie_fast.nodes.text.encoder import load_text_encoder
from ernie_fast.nodes.text.source import find_tokenizer
from pathlib import Path
tokenizer.CACHE_FOLDER = Path(sys.argv[2]).parent / "cache"
path = conftest.NANO / "ministral-nano.safetensors"
clip = load_text_encoder(path, "nano", find_tokenizer(open_checkpoint(path)), "yarn")
embedding = clip.encode_from_tokens_scheduled(clip.tokenize({TEXT!r}))[0][0]
save_file({{"embedding": embedding.contiguous()}}, sys.argv[2])
"""


def install(version: str) -> Path:
    """Install one version of transformers into a folder of its own, once; return the folder."""
    folder = ROOT / ".cache" / f"transformers-{version}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        target = Path(temporary, "site")
        command = [sys.executable, "-m", "pip", "install", "--no-deps", "--quiet", "--target", str(target), *VERSIONS[version]]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        if done.returncode:
            pytest.fail(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
        target.rename(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_embedding_is_the_same_with_transformers(version, nano, tmp_path):
    result = tmp_path / "result.safetensors"
    environment = {**os.environ, "PYTHONPATH": str(install(version)), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, version, str(result)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    path = nano / "ministral-nano.safetensors"
    clip = load_text_encoder(path, "nano", find_tokenizer(open_checkpoint(path)), "yarn")
    assert torch.equal(load_file(str(result))["embedding"], embed(clip, TEXT))
