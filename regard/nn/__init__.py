"""Layers: multi-head and additive attention, Linformer and Performer, caches, and the blocks of the models."""

from regard.nn.additive import AdditiveAttention
from regard.nn.attention import FixedCache, GrowingCache, MultiHeadAttention
from regard.nn.linformer import LinformerAttention
from regard.nn.performer import PerformerAttention

__all__ = [
    "AdditiveAttention",
    "FixedCache",
    "GrowingCache",
    "LinformerAttention",
    "MultiHeadAttention",
    "PerformerAttention",
]
