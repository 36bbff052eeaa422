"""ERNIE-Image Fast: ComfyUI nodes for ERNIE-Image and ERNIE-Image-Turbo.

ComfyUI imports this file at start. It imports nothing itself: the nodes come in when ComfyUI calls the entry point.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from comfy_api.latest import ComfyExtension

__version__ = "0.1.0"
WEB_DIRECTORY = "./web"


async def comfy_entrypoint() -> ComfyExtension:
    """Return the extension that lists our nodes.

    Raises: whatever an import of ours raises; the traceback is logged first, because ComfyUI logs the message alone.
    """
    import logging

    try:
        from .nodes import ErnieFastExtension
    except Exception:
        logging.getLogger("ernie_fast").exception("ERNIE-Image Fast could not be imported")
        raise
    return ErnieFastExtension()
