"""The text encoder: its tokenizer, its rotary positions, and the build from a checkpoint."""
