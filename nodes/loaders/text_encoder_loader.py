"""ErnieFastTextEncoderLoader: a Ministral-3 text encoder in any common form -> CLIP."""

from __future__ import annotations

import logging
from pathlib import Path

import folder_paths
from comfy_api.latest import io

from ..model.checkpoint import Checkpoint, CheckpointError
from ..text.encoder import build_clip
from ..text.probe import probe_text_encoder
from ..text.rope import ROPE, rope_from_config
from ..text.source import FILES, TokenizerSource, file_source, find_tokenizer
from .files import list_models, open_model

logger = logging.getLogger("ernie_fast")

CATEGORY = "text_encoders"
SUBFOLDER = "text_encoder"
AUTO = "auto"


class ErnieFastTextEncoderLoader(io.ComfyNode):
    """Loads ERNIE-Image's text encoder, or the prompt enhancer of the same architecture."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Describe the node to ComfyUI."""
        models = list_models(CATEGORY, SUBFOLDER)
        return io.Schema(
            node_id="ErnieFastTextEncoderLoader",
            display_name="ERNIE Text Encoder Loader",
            category="model/loaders/ernie",
            description=(
                "Loads Ministral-3, the text encoder of ERNIE-Image, or the prompt enhancer: one safetensors or GGUF file, "
                "a Hugging Face folder, or an all-in-one checkpoint. The tokenizer may be in the file or beside it."
            ),
            search_aliases=["ernie", "ministral", "clip loader", "text encoder", "prompt enhancer", "tekken", "yarn", "gguf"],
            inputs=[
                io.Combo.Input(
                    "clip_name",
                    options=models,
                    tooltip="The text encoder: a safetensors or GGUF file or a shard folder in models/text_encoders, a "
                    "repository in models/diffusers, or an all-in-one file in models/checkpoints. A GGUF file needs no "
                    "mmproj.",
                ),
                io.Combo.Input(
                    "tokenizer",
                    options=[AUTO, *_tokenizer_files(), *models],
                    default=AUTO,
                    advanced=True,
                    tooltip="Where the tokenizer comes from. 'auto' takes the one in the file (GGUF files from llama.cpp "
                    "have it), else tekken.json or tokenizer.json beside it; otherwise choose such a file, or a text "
                    "encoder that holds one.",
                ),
                io.Combo.Input(
                    "rope",
                    options=list(ROPE),
                    default=ROPE[0],
                    advanced=True,
                    tooltip="Token positions. 'yarn' is as the model was trained; 'comfyui' gives the same pictures as "
                    "ComfyUI's own loader, which leaves YaRN out and drifts more the longer the prompt is.",
                ),
            ],
            outputs=[
                io.Clip.Output(display_name="clip", tooltip="The text encoder, for CLIP Text Encode or Generate Text."),
                io.String.Output(
                    display_name="summary", tooltip="One line: size, storage format, tokenizer and positions."
                ),
            ],
        )

    @classmethod
    def validate_inputs(
        cls, clip_name: str | None = None, tokenizer: str | None = None, rope: str | None = None
    ) -> bool | str:
        """Read the headers before the run. Returns True or the message that the run would raise."""
        if clip_name is None:  # linked: known only at run time
            return True
        try:
            checkpoint = open_model(CATEGORY, clip_name)
            probe = probe_text_encoder(checkpoint)
            if rope is not None:
                rope_from_config(probe.config, rope, checkpoint.label, probe.config_place)
            if tokenizer is not None:
                _tokenizer_source(tokenizer, checkpoint)
        except CheckpointError as error:
            return str(error)
        return True

    @classmethod
    def fingerprint_inputs(
        cls, clip_name: str | None = None, tokenizer: str | None = None, rope: str | None = None
    ) -> str:
        """Load again when a file was replaced on disk."""
        if clip_name is None or tokenizer is None:  # linked: ComfyUI follows the nodes they come from
            return f"{clip_name}|{tokenizer}|{rope}"
        checkpoint = open_model(CATEGORY, clip_name)
        stat = _tokenizer_source(tokenizer, checkpoint).file.stat()
        return f"{checkpoint.fingerprint}|{stat.st_size}|{stat.st_mtime_ns}|{tokenizer}|{rope}"

    @classmethod
    def execute(cls, clip_name: str, tokenizer: str, rope: str) -> io.NodeOutput:
        """Load the text encoder. Raises CheckpointError with one sentence for the user."""
        checkpoint = open_model(CATEGORY, clip_name)
        probe = probe_text_encoder(checkpoint)
        source = _tokenizer_source(tokenizer, checkpoint)
        clip = build_clip(probe, source, rope)
        tokens = len(clip.tokenizer.ministral3_3b.inv_vocab)
        line = f"{probe.title}, tokenizer {tokens} tokens from {source.place}, rope {rope}"
        logger.info("%s", line)
        return io.NodeOutput(clip, line)


def _tokenizer_files() -> dict[str, Path]:
    """Return name -> path of every tekken.json and tokenizer.json in the text encoder and diffusers folders."""
    found: dict[str, Path] = {}
    for category in (CATEGORY, "diffusers"):
        for base in folder_paths.get_folder_paths(category):
            for relative in sorted(folder_paths.recursive_search(base, excluded_dir_names=[".git"])[0]):
                path = Path(base, relative)
                if path.name in FILES:
                    found.setdefault(f"{category}/{Path(relative).as_posix()}", path)
    return found


def _tokenizer_source(name: str, checkpoint: Checkpoint) -> TokenizerSource:
    """Return the tokenizer that the user chose. Raises CheckpointError when there is none."""
    if name == AUTO:
        return find_tokenizer(checkpoint)
    if name.endswith(FILES):
        path = _tokenizer_files().get(name)
        if path is None:
            raise CheckpointError(
                f"{name}: no such tokenizer file. Press R in ComfyUI to refresh the list, or choose 'auto'."
            )
        return file_source(path, name)
    source = find_tokenizer(open_model(CATEGORY, name))
    return TokenizerSource(source.file, source.tensor, source.label, name)
