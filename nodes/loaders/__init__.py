"""The loader nodes: diffusion model, text encoder, LoRA."""
