"""The nodes of the package. ComfyUI gets them from the extension below; each node lives in a file of its own name."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io

from .cache.node import ErnieFastCache, ErnieFastCacheReport
from .loaders.lora_loader import ErnieFastLoRALoader
from .loaders.model_loader import ErnieFastModelLoader
from .loaders.save_checkpoint import ErnieFastSaveCheckpoint
from .loaders.text_encoder_loader import ErnieFastTextEncoderLoader


class ErnieFastExtension(ComfyExtension):
    """Lists every node of the package."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        """Return the node classes in the order in which they are documented."""
        return [
            ErnieFastModelLoader, ErnieFastTextEncoderLoader, ErnieFastLoRALoader, ErnieFastSaveCheckpoint, ErnieFastCache,
            ErnieFastCacheReport,
        ]  # fmt: skip
