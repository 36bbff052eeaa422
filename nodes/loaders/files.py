"""The model files that a loader can offer: ComfyUI's folders, sharded folders, and whole repositories."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path, PurePosixPath

import folder_paths

from ..model.checkpoint import SAFETENSORS_SUFFIXES, Checkpoint, CheckpointError, open_checkpoint, shard_set
from ..model.gguf_file import SUFFIX as GGUF_SUFFIX

_DIFFUSERS = "diffusers"
_ALL_IN_ONE = "checkpoints"


def list_models(category: str, subfolder: str) -> list[str]:
    """Return the names that a loader offers.

    Args:
        category: ComfyUI's folder category, such as "diffusion_models".
        subfolder: the part's folder in a Hugging Face repository, such as "transformer".

    Returns: the category's safetensors files, shard sets as one entry each, and its GGUF files; then
    "diffusers/NAME/<subfolder>" for repositories in models/diffusers; then "checkpoints/NAME" for all-in-one files.
    """
    names = sorted([*_collapse_shards(_safetensors(category)), *_gguf(category)], key=str.lower)
    names += [f"{_DIFFUSERS}/{path.parent.name}/{subfolder}" for path in _repository_folders(subfolder)]
    names += [f"{_ALL_IN_ONE}/{name}" for name in _safetensors(_ALL_IN_ONE)]
    return names


def resolve_model(category: str, name: str) -> Path:
    """Return the path of a file or folder that `list_models` named.

    Raises: CheckpointError when it is not inside one of ComfyUI's model folders, or not there.
    """
    first, _, rest = name.replace("\\", "/").partition("/")
    places = [(base, name) for base in folder_paths.get_folder_paths(category)]
    if first in (_DIFFUSERS, _ALL_IN_ONE) and rest:
        places += [(base, rest) for base in folder_paths.get_folder_paths(first)]
    for base, relative in places:
        path = inside(Path(base), relative)
        if path is not None:
            return path
    raise CheckpointError(
        f"{name or '(empty name)'}: not found in ComfyUI's folder '{category}'. Put the file into models/{category} and "
        "press R in ComfyUI to refresh the list, or choose another one."
    )


def open_model(category: str, name: str) -> Checkpoint:
    """Open the checkpoint that `list_models` named. Raises CheckpointError, see `resolve_model`, `open_checkpoint`."""
    return open_checkpoint(resolve_model(category, name), label=name)


def inside(base: Path, relative: str) -> Path | None:
    """Return the file or folder of this name in a folder.

    None when there is none, or when the name is empty, absolute, climbs out of the folder, or cannot be a name at all.
    """
    name = PurePosixPath(relative.replace("\\", "/"))
    if not name.parts or name.is_absolute() or ".." in name.parts or ":" in name.parts[0]:
        return None
    path = base.joinpath(*name.parts)
    try:
        return path if path.exists() else None
    except (OSError, ValueError):  # longer than the system allows, a null byte, half a surrogate pair, no right to look
        return None


def _safetensors(category: str) -> list[str]:
    return [n for n in folder_paths.get_filename_list(category) if n.lower().endswith(SAFETENSORS_SUFFIXES)]


def _gguf(category: str) -> list[str]:
    """Return the GGUF files of a category. ComfyUI's own list leaves them out, and other loaders must not see more than it."""
    found: set[str] = set()
    for base in folder_paths.get_folder_paths(category):
        names = folder_paths.recursive_search(base, excluded_dir_names=[".git"])[0]
        found |= {name for name in names if name.lower().endswith(GGUF_SUFFIX)}
    return sorted(found)


def _collapse_shards(names: list[str]) -> list[str]:
    """Replace the shards of a set by its folder, or by the first shard where other files share the folder."""
    by_folder: dict[str, list[str]] = defaultdict(list)
    for name in names:
        by_folder[name.replace("\\", "/").rpartition("/")[0]].append(name)
    out: list[str] = []
    for folder, members in by_folder.items():
        sets: dict[str | None, list[str]] = defaultdict(list)
        for name in members:
            sets[shard_set(name.replace("\\", "/").rpartition("/")[2])].append(name)
        if folder and len(sets) == 1 and None not in sets:
            out.append(folder)
            continue
        out += sets.pop(None, []) + [min(shards) for shards in sets.values()]
    return sorted(out, key=str.lower)


def _repository_folders(subfolder: str) -> list[Path]:
    found: list[Path] = []
    for base in folder_paths.get_folder_paths(_DIFFUSERS):
        files = [f for f in Path(base).glob(f"*/{subfolder}/*") if f.suffix.lower() in SAFETENSORS_SUFFIXES]
        found += {f.parent for f in files}
    return sorted(found)
