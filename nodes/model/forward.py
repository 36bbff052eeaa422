"""The forward of ERNIE-Image with the hooks that ComfyUI's own lacks.

In ComfyUI 0.30.0 the forward calls no DIFFUSION_MODEL wrapper, no block replacement and no attention patch, so EasyCache,
skip-layer guidance, NAG and attention overrides do nothing on ERNIE and do not say so. This forward has them. It is put
in place for one call at a time by an APPLY_MODEL wrapper, so the shared module is never left changed, and it calls the
model's own submodules: with every hook off its result is bit-identical to ComfyUI's.

Before its first use it is compared with ComfyUI's on a tiny model. If a later ComfyUI computes something else, one
warning is logged and ComfyUI's own forward runs.

Symbols: B batch, C latent channels, D hidden size, N image tokens, T text tokens.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import comfy.model_management
import comfy.ops
import torch
from comfy.ldm.ernie.model import ErnieImageModel
from comfy.patcher_extension import WrapperExecutor, WrappersMP, get_all_wrappers

from .architecture import ErnieArchitecture
from .blocks import ATTENTION_HOOK, BLOCK_HOOK, Blocks
from .positions import ROPE_CACHE, TEXT_LENGTHS, RopeCache, rope_table, text_lengths, text_mask
from .text_batch import with_padding

logger = logging.getLogger("ernie_fast")

KEY = "ernie_fast_forward"


def install(patcher: Any) -> None:
    """Make a ModelPatcher of an ERNIE-Image model run this forward; its clones keep it."""
    set_wrappers(patcher, KEY, WRAPPERS)


def set_wrappers(patcher: Any, key: str, wrappers: Mapping[str, Any]) -> None:
    """Give a ModelPatcher these wrappers (kind -> function) in place of those that it had under the key."""
    for kind, wrapper in wrappers.items():
        patcher.remove_wrappers_with_key(kind, key)
        patcher.add_wrapper_with_key(kind, key, wrapper)


@contextmanager
def run_state(guider: Any, key: str, state: Any) -> Iterator[None]:
    """Hold an object in a guider's transformer options for one sampling run, whatever way the run ends.

    The state must not be a dict: ComfyUI copies the dicts in its options at every step.
    """
    original = guider.model_options
    options = {**original.get("transformer_options", {}), key: state}
    guider.model_options = {**original, "transformer_options": options}
    try:
        yield
    finally:
        guider.model_options = original


def require_ernie(patcher: Any) -> int:
    """Return the number of blocks of a MODEL's transformer.

    Raises: ValueError when it is another kind of model.
    """
    module = patcher.model.diffusion_model
    if not isinstance(module, ErnieImageModel):
        raise ValueError(
            f"this model is {type(module).__name__}, not ERNIE-Image. Connect the output of an ERNIE Model Loader, or of any "
            "loader with an ERNIE-Image file."
        )
    return len(module.layers)


def _with_rope_cache(executor: Any, *args: Any, **kwargs: Any) -> Any:
    """Give a sampling run a rope cache, and free it at the run's end, whatever way it ends."""
    cache = RopeCache()
    try:
        with run_state(executor.class_obj, ROPE_CACHE, cache):
            return executor(*args, **kwargs)
    finally:
        cache.tables.clear()


def _with_padding(executor: Any, model: Any, *args: Any) -> Any:
    """Let prompts of different lengths share a forward where a patch compares them: only this forward can."""
    if not _is_ours(model.diffusion_model):
        return executor(model, *args)
    return with_padding(executor, model, *args)


def _with_forward(executor: Any, *args: Any, **kwargs: Any) -> Any:
    """Put the forward onto this device's module for the duration of one call."""
    model = executor.class_obj.diffusion_model
    if not _is_ours(model):
        return executor(*args, **kwargs)
    model.forward = functools.partial(forward, model)
    try:
        return executor(*args, **kwargs)
    finally:
        del model.forward


def _is_ours(module: Any) -> bool:
    return isinstance(module, ErnieImageModel) and not comfy.model_management.in_training and agrees_with_comfyui()


WRAPPERS = {
    WrappersMP.OUTER_SAMPLE: _with_rope_cache, WrappersMP.CALC_COND_BATCH: _with_padding, WrappersMP.APPLY_MODEL: _with_forward,
}  # fmt: skip


@functools.cache
def agrees_with_comfyui() -> bool:
    """Compare this forward with ComfyUI's on a tiny model, once per process; log one warning when they differ."""
    try:
        difference = _difference_on_a_tiny_model()
        if difference <= 1e-5:
            return True
        reason = f"computes something else (relative difference {difference:.1e})"
    except Exception as error:  # whatever a changed ComfyUI raises, its own forward still works
        reason = f"is not the expected one ({type(error).__name__}: {error})"
    logger.warning(
        "this ComfyUI's ERNIE-Image model %s. Its own forward runs; cache, skip-layer guidance, NAG and attention choices "
        "have no effect. Update ERNIE-Image Fast", reason,
    )  # fmt: skip
    return False


def _difference_on_a_tiny_model() -> float:
    """Return the largest relative difference to ComfyUI's forward, over the ways through ours, in fp32 on the CPU."""
    architecture = ErnieArchitecture(
        hidden_size=32, num_layers=2, num_heads=2, ffn_size=48, in_channels=4, out_channels=4, patch_size=1, text_dim=24,
        rope_axes=(4, 6, 6),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    with torch.inference_mode():
        config = {name: value for name, value in architecture.unet_config().items() if name != "image_model"}
        model = ErnieImageModel(**config, device="cpu", dtype=torch.float32, operations=comfy.ops.disable_weight_init)
        # With dynamic VRAM ComfyUI's linear layers have no weights until they get some.
        model.load_state_dict({n: random(*shape) * 0.2 for n, shape in architecture.shapes()}, assign=True, strict=False)
        x, timesteps, context = random(2, 4, 3, 5), torch.tensor([700.0, 20.0]), random(2, 6, 24)
        rope_options = {"rope_options": {"scale_x": 1.5, "shift_y": 2.0}}
        options: tuple[dict[str, Any], ...] = (
            {}, {ATTENTION_HOOK: lambda block, attention: attention()},
            {"patches": {"attn1_patch": [lambda q, k, v, **kwargs: {}]}}, {TEXT_LENGTHS: (6, 4)},
        )  # fmt: skip
        expected = ErnieImageModel.forward(model, x, timesteps, context, transformer_options=rope_options)
        found = [forward(model, x, timesteps, context, transformer_options={**rope_options, **o}) for o in options]
        # A row with a shorter prompt equals that row alone.
        short = ErnieImageModel.forward(model, x[1:], timesteps[1:], context[1:, :4], transformer_options=rope_options)
        wanted = [expected, expected, expected, torch.cat([expected[:1], short])]
        return max(float((a - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True))


def forward(
    model: Any,
    x: torch.Tensor,
    timesteps: torch.Tensor,
    context: torch.Tensor,
    transformer_options: dict[str, Any] | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Run the model through its DIFFUSION_MODEL wrappers.

    Args:
        model: ComfyUI's `ErnieImageModel`.
        x: (B, C, height, width) latent, in the compute dtype.
        timesteps: (B,) sigma * 1000, fp32.
        context: (B, T, text width) hidden states of the text encoder.
        transformer_options: ComfyUI's options of this call.
        kwargs: other conditions; `text_lengths` as in `positions.text_lengths`, the rest is of no use to ERNIE-Image.

    Returns: (B, C, height, width), the predicted velocity.
    Raises: ValueError when the text encoder does not belong to the model.
    """
    options = transformer_options if transformer_options is not None else {}
    wrappers = get_all_wrappers(WrappersMP.DIFFUSION_MODEL, options)
    executor = WrapperExecutor.new_class_executor(functools.partial(_forward, model), model, wrappers)
    return executor.execute(x, timesteps, context, transformer_options=options, **kwargs)


def _forward(
    model: Any, x: torch.Tensor, timesteps: torch.Tensor, context: torch.Tensor, transformer_options: dict[str, Any],
    **kwargs: Any,
) -> torch.Tensor:
    if TEXT_LENGTHS in kwargs:
        transformer_options = {**transformer_options, TEXT_LENGTHS: kwargs[TEXT_LENGTHS]}
    batch, _channels, height, width = x.shape
    patch = model.patch_size
    rows, columns = height // patch, width // patch
    image_tokens = rows * columns

    image = model.x_embedder(x)
    text = _project_text(model, context)
    text_tokens = text.shape[1]
    lengths = text_lengths(transformer_options, batch, text_tokens)
    conditioning = model.time_embedding(model.time_proj(timesteps).to(x.dtype))
    blocks = Blocks(
        layers=model.layers,
        rope=rope_table(model, lengths, rows, columns, text_tokens, x.device, transformer_options),
        modulation=[part.unsqueeze(1).contiguous() for part in model.adaLN_modulation(conditioning).chunk(6, dim=-1)],
        mask=text_mask(lengths, image_tokens, text_tokens, x.device, x.dtype),
        image_tokens=image_tokens,
        options={
            **transformer_options, "img_slice": [0, image_tokens], "total_blocks": len(model.layers), "block_type": "single",
        },
    )  # fmt: skip
    hook = transformer_options.get(BLOCK_HOOK, Blocks.run)
    hidden_states = hook(blocks, torch.cat([image, text], dim=1))

    hidden_states = model.final_norm(hidden_states, conditioning).type_as(hidden_states)
    patches = model.final_linear(hidden_states)[:, :image_tokens]
    patches = patches.view(batch, rows, columns, patch, patch, model.out_channels).permute(0, 5, 1, 3, 2, 4)
    return patches.reshape(batch, model.out_channels, height, width)


def _project_text(model: Any, context: torch.Tensor) -> torch.Tensor:
    """Return (B, T, D). Raises ValueError when the conditions come from another kind of text encoder."""
    wanted = model.hidden_size if model.text_proj is None else model.text_proj.in_features
    if context.shape[-1] != wanted:
        raise ValueError(
            f"the prompt was encoded with width {context.shape[-1]}, but this ERNIE-Image model needs width {wanted}. "
            "Load the text encoder that belongs to the model (ministral-3-3b.safetensors for the released models)."
        )
    return context if model.text_proj is None or context.numel() == 0 else model.text_proj(context)
