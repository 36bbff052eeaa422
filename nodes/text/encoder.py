"""Build the CLIP that ComfyUI's text nodes use from a probed Ministral-3 text encoder.

Layers, quantised weights, offloading, LoRA patching and generation are ComfyUI's; the sizes, the rotary positions and
the tokenizer are ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import comfy.ops
import comfy.sd
import comfy.text_encoders.ernie as ernie
import comfy.text_encoders.llama as llama
import folder_paths
import torch
from comfy import sd1_clip

from ..model.checkpoint import CheckpointError, open_checkpoint
from ..model.operations import with_own_formats
from ..model.state_dict import add_markers, read_tensors, require_formats
from ..model.storage import MARKER
from .gguf_names import is_permuted, unpermute
from .probe import EncoderProbe, EncoderSizes, probe_text_encoder
from .rope import Rope, RopeLlama, rope_from_config
from .source import TENSOR, TokenizerSource
from .tokenizer import TextTokenizer

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

NAME = "ministral3_3b"


class Ministral3(llama.Ministral3_3B):
    """ComfyUI's Ministral-3 language model, of any size and with any rotary positions.

    Args:
        config_dict: {"sizes": EncoderSizes, "rope": Rope, "lm_head": bool, "label": the file, for messages}.
        dtype, device, operations: as in ComfyUI's class.
    """

    def __init__(self, config_dict: Mapping[str, Any], dtype: Any, device: Any, operations: Any) -> None:
        # The parent's own constructor would build a transformer of fixed head size and plain positions.
        torch.nn.Module.__init__(self)
        sizes: EncoderSizes = config_dict["sizes"]
        config = llama.Ministral3_3BConfig(
            vocab_size=sizes.vocab,
            hidden_size=sizes.hidden,
            intermediate_size=sizes.intermediate,
            num_hidden_layers=sizes.layers,
            num_attention_heads=sizes.heads,
            num_key_value_heads=sizes.kv_heads,
            rms_norm_eps=sizes.rms_eps,
            lm_head=config_dict["lm_head"],
        )
        config.head_dim = sizes.head_dim  # no constructor argument in ComfyUI
        self.num_layers = sizes.layers
        self.model = RopeLlama(config, config_dict["rope"], device=device, dtype=dtype, ops=operations)
        self.dtype = dtype


class _MinistralModel(sd1_clip.SDClipModel):
    """The condition is the output of the last layer but one, without the final norm, as in the reference."""

    def __init__(
        self,
        config: dict[str, Any],
        device: Any = "cpu",
        dtype: Any = None,
        model_options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(
            device=device,
            dtype=dtype,
            layer="hidden",
            layer_idx=-2,
            layer_norm_hidden_state=False,
            textmodel_json_config=dict(config),
            special_tokens={"start": 1, "pad": 0},
            model_class=Ministral3,
            enable_attention_masks=True,
            return_attention_masks=True,
            model_options=model_options or {},
        )


class ErnieTextEncoder(ernie.ErnieTEModel):
    """ComfyUI's ERNIE text encoder around `Ministral3`; module names, and so LoRA keys, are ComfyUI's.

    Args:
        config: see `Ministral3`.
        device, dtype, model_options: given by `comfy.sd.CLIP`.
    """

    def __init__(
        self,
        config: dict[str, Any],
        device: Any = "cpu",
        dtype: Any = None,
        model_options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(
            device=device,
            dtype=dtype,
            model_options=model_options or {},
            name=NAME,
            clip_model=partial(_MinistralModel, config),
        )
        self.label: str = config["label"]

    def encode_token_weights(self, token_weight_pairs: Any) -> Any:
        """Return what ComfyUI's class does. Raises CheckpointError when the condition holds no usable numbers."""
        out = super().encode_token_weights(token_weight_pairs)
        if not torch.isfinite(out[0]).all():
            # A picture of it would be black, without a word.
            raise CheckpointError(
                f"{self.label}: the text encoder's output is not finite (NaN or infinite), so its weights are damaged or "
                "were rounded too coarsely. Use another file of it, such as BF16 or Q8_0; with a LoRA, lower its strength."
            )
        return out


class _MinistralTokenizer(sd1_clip.SDTokenizer):
    """ComfyUI's prompt tokenizer (embeddings, no weights) over a TextTokenizer.

    Args:
        embedding_directory: folders of textual-inversion files.
        tokenizer_data: {"tokenizer": TextTokenizer, "hidden_size": D}.
    """

    def __init__(self, embedding_directory: Any = None, tokenizer_data: Mapping[str, Any] | None = None) -> None:
        data = tokenizer_data or {}
        self.source: TextTokenizer = data["tokenizer"]
        super().__init__(
            "",
            # The base class asks a class for its tokenizer.
            tokenizer_class=SimpleNamespace(from_pretrained=lambda _path: self.source),
            embedding_directory=embedding_directory,
            embedding_size=data["hidden_size"],
            embedding_key=NAME,
            start_token=self.source.bos_id,
            pad_token=self.source.pad_id,
            has_end_token=False,
            pad_with_end=False,
            pad_to_max_length=False,
            pad_left=True,
            min_length=1,
            max_length=99999999,
            disable_weights=True,
            tokenizer_data=data,
        )

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return what ComfyUI writes into a saved file: the tekken data, where the tokenizer came from some."""
        if self.source.tekken is None:
            return {}
        return {TENSOR: torch.frombuffer(bytearray(self.source.tekken), dtype=torch.uint8)}


class ErnieTokenizer(ernie.ErnieTokenizer):
    """ComfyUI's ERNIE tokenizer with ours inside."""

    def __init__(self, embedding_directory: Any = None, tokenizer_data: Mapping[str, Any] | None = None) -> None:
        sd1_clip.SD1Tokenizer.__init__(
            self, embedding_directory, dict(tokenizer_data or {}), name=NAME, tokenizer=_MinistralTokenizer
        )


def load_text_encoder(
    path: Path, label: str, source: TokenizerSource, rope: str, disable_dynamic: bool = False
) -> comfy.sd.CLIP:
    """Load a text encoder and its tokenizer.

    Args:
        path: a safetensors or GGUF file, or a folder.
        label: the name for messages.
        source: the tokenizer.
        rope: "yarn" or "comfyui", see `rope.py`.
        disable_dynamic: build the patcher without dynamic VRAM, as ComfyUI asks for in its own loaders.

    Raises: CheckpointError, see `probe_text_encoder`, `TokenizerSource.load` and `build_clip`.
    """
    return build_clip(probe_text_encoder(open_checkpoint(path, label)), source, rope, disable_dynamic)


def load_patcher(
    path: Path, label: str, source: TokenizerSource, rope: str, disable_dynamic: bool = False
) -> ModelPatcher:
    """Load the patcher alone: ComfyUI calls this to rebuild the model for hooks and several GPUs."""
    return load_text_encoder(path, label, source, rope, disable_dynamic).patcher


def build_clip(
    probe: EncoderProbe, source: TokenizerSource, rope: str, disable_dynamic: bool = False
) -> comfy.sd.CLIP:
    """Build the CLIP of a probed text encoder. Arguments as in `load_text_encoder`.

    Raises: CheckpointError when tokenizer and encoder do not fit, or ComfyUI lacks the file's storage format.
    """
    label, sizes = probe.checkpoint.label, probe.sizes
    positions = rope_from_config(probe.config, rope, label, probe.config_place)
    tokenizer = source.load()
    if tokenizer.size > sizes.vocab:
        raise CheckpointError(
            f"{source.label}: the tokenizer has {tokenizer.size} tokens, but the text encoder {label} has rows for "
            f"{sizes.vocab}. Use the tokenizer that belongs to this text encoder."
        )
    sd = _state_dict(probe)
    dtype = _dtype(probe, sd)
    options: dict[str, Any] = {"dtype": dtype}
    if any(name.endswith(MARKER) for name in sd):
        # As ComfyUI makes them for a text encoder, and able to hold the formats of ours.
        base = comfy.ops.mixed_precision_ops({"mixed_ops": True}, dtype, full_precision_mm=True)
        options["custom_operations"] = with_own_formats(base)
    target = SimpleNamespace(
        clip=ErnieTextEncoder, tokenizer=ErnieTokenizer, params={"config": _config(probe, positions, sd)}
    )
    clip = comfy.sd.CLIP(
        target,
        embedding_directory=folder_paths.get_folder_paths("embeddings"),
        tokenizer_data={"tokenizer": tokenizer, "hidden_size": sizes.hidden},
        parameters=probe.storage.parameters,
        state_dict=[sd],
        model_options=options,
        disable_dynamic=disable_dynamic,
    )
    clip.patcher.cached_patcher_init = (load_patcher, (probe.checkpoint.path, label, source, rope))
    return clip


def _config(probe: EncoderProbe, rope: Rope, sd: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    head = "model.lm_head.weight" in sd
    return {"sizes": probe.sizes, "rope": rope, "lm_head": head, "label": probe.checkpoint.label}


def _dtype(probe: EncoderProbe, sd: Mapping[str, torch.Tensor]) -> torch.dtype:
    """Return the dtype of the weights that are not quantised."""
    # A GGUF file has its norms in FP32 whatever the rest is; embeddings in FP32 would double a BF16 file in memory.
    deciding = "model.embed_tokens.weight" if probe.checkpoint.gguf is not None else "model.norm.weight"
    return sd[deciding].dtype if sd[deciding].is_floating_point() else torch.float32


def _state_dict(probe: EncoderProbe) -> dict[str, torch.Tensor]:
    """Read the encoder's tensors under ComfyUI's names, each quantised layer with its marker."""
    storages = [storage for storage in (probe.storage, probe.head_storage) if storage is not None]
    for storage in storages:
        require_formats(probe.checkpoint.label, storage.format_counts())
    names = {name: f"model.{new}" for name, new in probe.names.items()}
    quantised = {f"model.{layer}.weight" for storage in storages for layer in storage.layers}
    sd = read_tensors(probe.checkpoint, names.get, quantised)
    if probe.permuted:
        sd.update({name: unpermute(rows, probe.sizes.head_dim) for name, rows in sd.items() if is_permuted(name)})
    for storage in storages:
        add_markers(sd, storage, "model.")
    # A head equal to the embeddings is the same tensor written twice (tied); ComfyUI then uses the embeddings.
    head = probe.head_storage
    if head is not None and not head.layers and _same(sd["model.lm_head.weight"], sd["model.embed_tokens.weight"]):
        del sd["model.lm_head.weight"]
    return sd


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True when two tensors of one shape hold the same bytes (comparing bytes works for FP8 too)."""
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))

