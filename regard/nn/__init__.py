"""Layers: multi-head attention, Linformer and Performer, caches, and the blocks that models are built from."""
