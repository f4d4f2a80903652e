"""Tiny random models that look at pictures: a `transformers` twin on disk with its preprocessor, and a tokenizer where
it reads texts; and the pictures that they are shown.

They know nothing of what is asked of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from speaking_twins import pieces, wordpiece
from tokenizers import Tokenizer
from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.idefics.image_processing_pil_idefics import IdeficsImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil
from twins import build

NAMES = {0: "cat", 1: "dog", 2: "고양이"}
SEEN = {"num_hidden_layers": 3, "num_attention_heads": 5, "hidden_size": 20, "intermediate_size": 29}


def picture(number: int = 0, height: int = 37, width: int = 53) -> np.ndarray:
    """Noise on a slope, (height, width, 3), another one for each number."""
    random = np.random.default_rng(number)
    slope = np.linspace(0, 200, width)[None, :, None] * random.random(3)
    return (slope + random.integers(0, 55, (height, width, 3))).astype(np.uint8)


def put(directory: Path, architecture: str, config: Any, *beside: Any) -> Path:
    """Write a model to a directory, and what transformers writes of its preprocessor and tokenizer beside it."""
    build(architecture, config, torch.float32).save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)
    for part in beside:
        part.save_pretrained(directory)
    return directory


def spoken(made: tuple[Tokenizer, dict[str, str]], *added: str) -> Any:
    rust, names = made
    rust.add_special_tokens(list(added))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=rust, **names)


# --------------------------------------------------------------------------------------------------------- one tower


def vit(directory: Path, head: str = "ForImageClassification", **more: Any) -> Path:
    """5 × 5 patches of 30 × 30 pixels."""
    config = transformers.ViTConfig(**SEEN, image_size=30, patch_size=6, **{"id2label": NAMES} | more)
    return put(directory, f"ViT{head}", config, ViTImageProcessorPil(size={"height": 30, "width": 30}))


def swin(directory: Path, head: str = "Model") -> Path:
    """47 × 57 pixels: 12 × 15 patches, merged to 6 × 8 and 3 × 4."""
    config = transformers.SwinConfig(
        embed_dim=6, depths=[2, 1, 2], num_heads=[2, 3, 4], window_size=3, image_size=32, patch_size=4, id2label=NAMES
    )
    return put(directory, f"Swin{head}", config, ViTImageProcessorPil(size={"height": 47, "width": 57}))


def dinov2(directory: Path, **more: Any) -> Path:
    """Two registers; the shorter side becomes 30, and no crop: pictures keep their shape."""
    values = {key: value for key, value in SEEN.items() if key != "intermediate_size"}
    config = transformers.Dinov2WithRegistersConfig(**values, image_size=30, patch_size=6, num_register_tokens=2)
    resized = CLIPImageProcessorPil(size={"shortest_edge": 30}, do_center_crop=False)
    return put(directory, "Dinov2WithRegistersModel", config, resized)


# ------------------------------------------------------------------------------------------------- pictures and texts


def clip(directory: Path, head: str = "Model") -> Path:
    """Texts end in </s>."""
    tokenizer = spoken(pieces("<pad>", "<s>", "<unk>", "</s>", frame="<s> $A </s>"))
    text = {**SEEN, "num_hidden_layers": 2, "vocab_size": len(tokenizer), "max_position_embeddings": 31}
    text |= {"bos_token_id": 1, "eos_token_id": 3}
    vision = {**SEEN, "image_size": 30, "patch_size": 6}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=11, id2label=NAMES)
    sized = CLIPImageProcessorPil(size={"shortest_edge": 30}, crop_size={"height": 30, "width": 30})
    return put(directory, f"CLIP{head}", config, sized, tokenizer)


def blip(directory: Path, head: str) -> Path:
    """As Salesforce's: BERT's tokens, and one beyond them, with which captions and answers begin."""
    tokenizer = spoken(wordpiece())
    text = {**SEEN, "vocab_size": len(tokenizer) + 2, "max_position_embeddings": 37, "bos_token_id": len(tokenizer)}
    text |= {"sep_token_id": 3, "eos_token_id": 3, "pad_token_id": 0}
    vision = {**SEEN, "image_size": 30, "patch_size": 6}
    config = transformers.BlipConfig(
        text_config=text, vision_config=vision, projection_dim=11, image_text_hidden_size=13, logit_scale_init_value=0.7
    )
    return put(directory, f"Blip{head}", config, BlipImageProcessorPil(size={"height": 30, "width": 30}), tokenizer)


def llava(directory: Path, rows: int = 0) -> Path:
    """3 × 3 patches of a picture among the words. rows: of the table of words, beyond those of the tokenizer."""
    tokenizer = spoken(pieces("<pad>", "<s>", "</s>", "<unk>", frame="<s> $A"), "<image>")
    text = transformers.LlamaConfig(
        **{**SEEN, "num_key_value_heads": 5}, vocab_size=len(tokenizer) + rows, max_position_embeddings=131, head_dim=4
    )
    vision = transformers.CLIPVisionConfig(**SEEN, image_size=18, patch_size=6)
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=tokenizer.convert_tokens_to_ids("<image>")
    )
    sized = CLIPImageProcessorPil(size={"shortest_edge": 18}, crop_size={"height": 18, "width": 18})
    return put(directory, "LlavaForConditionalGeneration", config, sized, tokenizer)


def idefics(directory: Path) -> Path:
    """Two words added to LLaMA's; three latents of a picture."""
    rust, names = pieces("<unk>", "<s>", "</s>", frame="<s> $A")
    count = rust.get_vocab_size()
    tokenizer = spoken((rust, names | {"pad_token": "<unk>"}), "<fake_token_around_image>", "<image>")
    vision = {"embed_dim": 20, "image_size": 18, "patch_size": 6, "intermediate_size": 29, "num_hidden_layers": 2}
    gather = {"resampler_n_latents": 3, "resampler_depth": 1, "resampler_n_heads": 3, "resampler_head_dim": 8}
    config = transformers.IdeficsConfig(
        vocab_size=count, additional_vocab_size=2, hidden_size=20, intermediate_size=29, num_hidden_layers=2,
        num_attention_heads=5, max_position_embeddings=131, use_resampler=True, perceiver_config=gather,
        vision_config=vision | {"num_attention_heads": 5}, alpha_type="vector", pad_token_id=0,
    )  # fmt: skip
    return put(directory, "IdeficsForVisionText2Text", config, IdeficsImageProcessorPil(image_size=18), tokenizer)
