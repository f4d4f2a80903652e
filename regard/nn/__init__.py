"""Layers: multi-head attention, Linformer and Performer, caches, and the blocks that models are built from."""

from regard.nn.attention import MultiHeadAttention
from regard.nn.cache import FixedCache, GrowingCache
from regard.nn.linformer import LinformerAttention
from regard.nn.performer import PerformerAttention

__all__ = ["FixedCache", "GrowingCache", "LinformerAttention", "MultiHeadAttention", "PerformerAttention"]
