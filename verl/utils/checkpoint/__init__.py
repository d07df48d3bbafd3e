"""Checkpoints: sharded state to resume from, Hugging Face folders to use elsewhere."""
