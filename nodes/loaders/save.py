"""Write a MODEL as one safetensors file that ComfyUI's own loader reads: whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from importlib import metadata as packages
from pathlib import Path
from typing import Any

import comfy.model_base
import comfy.model_management
import comfy.utils
import folder_paths
import safetensors.torch
import torch
from comfy.quant_ops import QuantizedTensor

from ..model.build import SOURCE, ModelSource
from ..model.operations import OWN_FORMATS
from ..model.storage import GGUF, MARKER

FOLDER = "diffusion_models"
SUFFIX = ".safetensors"
_NETWORK = "diffusion_model."
_PART = re.compile(r"^[^<>:\"|?*\\/\x00-\x1f]{1,120}$")
# Names that Windows keeps for devices.
_DEVICES = re.compile(r"^(con|prn|aux|nul|com\d|lpt\d)(\..*)?$", re.IGNORECASE)
_HASH_PIECE_BYTES = 16 * 1024 * 1024
# What a file system needs beside the file itself.
_SPARE_BYTES = 64 * 1024 * 1024


def target_path(filename: str, overwrite: bool) -> Path:
    """Return where a file of this name is written: output/diffusion_models, in which ComfyUI's loaders look too.

    Args:
        filename: a name, or folders and a name, with or without the ending.
        overwrite: whether an existing file may be replaced.

    Raises: ValueError when it is no usable name, or the file is there and may not be replaced.
    """
    name = filename.strip().replace("\\", "/")
    name = name[: -len(SUFFIX)] if name.lower().endswith(SUFFIX) else name
    for part in name.split("/"):
        if not _PART.match(part) or part in (".", "..") or part != part.strip(" .") or _DEVICES.match(part):
            raise ValueError(
                f"filename is '{filename:.80}'; a name such as 'ernie-image-nvfp4', with folders before it if you like, is needed: "
                "no drive, no '..', none of < > : \" | ? *, no space or dot at an end."
            )
    base = Path(folder_paths.get_output_directory(), FOLDER)
    path = base.joinpath(*name.split("/")).with_name(name.split("/")[-1] + SUFFIX)
    if not path.resolve().is_relative_to(base.resolve()):
        raise ValueError(f"filename is '{filename:.80}', which a link leads out of the folder {base}. Choose another name.")
    if path.exists() and not overwrite:
        raise ValueError(f"{path.name} is already in {path.parent}. Turn on overwrite, or choose another filename.")
    return path


def save_model(model: Any, path: Path) -> tuple[int, str]:
    """Write a MODEL, with its LoRAs merged, under ComfyUI's names.

    Args:
        model: a ModelPatcher of an ERNIE-Image model.
        path: where; its folder is made. An existing file is replaced in one step, when the new one is complete.

    Returns: (bytes written, what reads the file).
    Raises:
        ValueError: the model is not ERNIE-Image, or its format has no safetensors form.
        OSError: the disk is full or cannot be written.
        InterruptProcessingException: the user cancelled; nothing is left behind.
    """
    if not isinstance(model.model, comfy.model_base.ErnieImage):
        raise ValueError(
            f"ERNIE Save Checkpoint: the model is {type(model.model).__name__}; an ERNIE-Image model is needed. "
            "Use Save Model for other models."
        )
    stored = model.model.diffusion_model.state_dict()
    formats = {json.loads(bytes(value.tolist()))["format"] for name, value in stored.items() if name.endswith(MARKER)}
    if GGUF in formats:
        raise ValueError(
            "ERNIE Save Checkpoint: the model comes from a GGUF file, which has no safetensors form. "
            "Copy the GGUF file, or load the BF16 file and quantise it with weight_format."
        )
    size = sum(value.nbytes for value in stored.values())
    path.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(path.parent).free
    if free < size + _SPARE_BYTES:
        raise OSError(f"{path.parent} has {free / 1e9:.1f} GB free; the file needs {size / 1e9:.1f} GB. Free some space.")
    tensors = _merged(model)
    with _replacing(path) as temporary:
        safetensors.torch.save_file(tensors, temporary, metadata=_metadata(model))
    own = sorted(formats & set(OWN_FORMATS))
    reader = f"only ERNIE Model Loader reads {', '.join(own)}" if own else "ComfyUI's Load Diffusion Model reads it too"
    return path.stat().st_size, reader


def _merged(model: Any) -> dict[str, torch.Tensor]:
    """Return the network's tensors on the CPU as they are written, each patched weight with its LoRAs.

    ComfyUI's `model_state_dict_for_saving` does the same, but stops at weights that are stored as integers.
    """
    comfy.model_management.load_models_gpu([model])
    network = model.model.diffusion_model
    out = {name: tensor.to("cpu") for name, tensor in network.state_dict().items()}
    patched = [key for key in model.patches if key.startswith(_NETWORK)]
    progress = comfy.utils.ProgressBar(max(1, len(patched)))
    for key in patched:
        comfy.model_management.throw_exception_if_processing_interrupted()
        name = key.removeprefix(_NETWORK)
        module = network.get_submodule(name.rpartition(".")[0])
        if not getattr(module, "comfy_patched_weights", False):  # else ComfyUI has merged it when it loaded the model
            weight = model.patch_weight_to_device(key, device_to=model.load_device, return_weight=True)
            parts = weight.state_dict(name) if isinstance(weight, QuantizedTensor) else {name: weight}
            out |= {part: tensor.to("cpu") for part, tensor in parts.items()}
        progress.update(1)
    return {name: _stored(tensor) for name, tensor in out.items()}


def _stored(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as it is written."""
    tensor = tensor.detach().contiguous()
    # ComfyUI's streaming reader does not know this dtype, and views the bytes back (comfy/ops.py).
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e8m0fnu else tensor


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[str]:
    """Give a temporary file beside `path`; it takes the name when all went well, and is deleted when not."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem[:40]}-", suffix=".tmp")
    os.close(handle)
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def _metadata(model: Any) -> dict[str, str]:
    """Return the header's texts: what the file was made from, how, and by which versions."""
    source: ModelSource | None = model.get_attachment(SOURCE)
    made: dict[str, Any] = {
        "versions": {name: _version(name) for name in ("torch", "comfy-kitchen", "safetensors")},
        "patched_weights": len(model.patches),
    }
    if source is not None:
        made["source"] = {"name": source.label, "sha256": {file.name: _sha256(file) for file in source.files}}
        if source.policy is not None:
            made |= {"weight_format": source.policy.weight_format, "keep_16bit": source.policy.keep}
    layers = str(model.model.model_config.unet_config["num_layers"]) if source is not None else ""
    return {"format": "pt", "ernie_fast": json.dumps(made)} | ({"num_layers": layers} if layers else {})


def _version(package: str) -> str:
    try:
        return packages.version(package)
    except packages.PackageNotFoundError:
        return "unknown"


def _sha256(file: Path) -> str:
    """Return the SHA-256 of a file, or why there is none."""
    digest = hashlib.sha256()
    try:
        with file.open("rb") as stream:
            while piece := stream.read(_HASH_PIECE_BYTES):
                comfy.model_management.throw_exception_if_processing_interrupted()
                digest.update(piece)
    except OSError as error:
        return f"not read: {error.strerror or error}"
    return digest.hexdigest()
