"""Attention at a cost that grows linearly: Linformer (fewer keys) and Performer (a feature map instead of softmax).

`linformer.py` and `performer.py` are the two layers; both take the place of `regard.layers.MultiHeadAttention` in a
block, and `regard/models/replacing.py` puts them into whole models. Read `features.py` (the feature map),
`feature_sums.py` (what is kept of the keys) and `feature_attention.py` (both together) before `performer.py`.
`counted_growth.py` and `measured_growth.py` say what each way of attending costs as the sequence grows.
"""
