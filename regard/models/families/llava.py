"""LLaVA (Liu et al. 2023): a LLaMA that reads a picture as words, in the place of a token in its text.

Peculiar: the patches are those of CLIP, without cls, after its last block but one; a projector of two layers makes of
each a vector that LLaMA could have read as a word. Nothing else is new: what follows is LLaMA.
"""

from __future__ import annotations

from regard.models.families import clip, llama
from regard.models.family import Config, Family, Names, Task, nested
from regard.models.vision_language import Projector, VisionFeatures, VisionLanguageModel

NAMES: Names = {
    **nested(clip.VISION, "vision.", "vision_tower.vision_model."),
    "vision_pooler.norm": f"vision_tower.vision_model.{clip.NORM}",
    **nested(llama.NAMES, "text.", "language_model.model."),
    "text.head.words": "language_model.lm_head",
}

USUAL = 32000  # the placeholder where config.json names none: the first id after LLaMA's


def names(config: Config) -> Names:
    """All weights. The projector's are named one by one, so that biases which config.json denies have no place."""
    leaves = ("weight", "bias") if config.bool("multimodal_projector_bias", True) else ("weight",)
    layers = {"w_in": "linear_1", "w_out": "linear_2"}
    projector = {f"projector.{x}.{y}": f"multi_modal_projector.{layers[x]}.{y}" for x in layers for y in leaves}
    return {**NAMES, **projector}


def build(config: Config, task: str) -> VisionLanguageModel:
    """The model for a task."""
    vision, text = config.sub_config("vision_config"), config.sub_config("text_config")
    vision.only("model_type", "clip_vision_model")
    text.only("model_type", "llama")
    config.only("vision_feature_select_strategy", "default", "full")
    tied = config.tie_word_embeddings(False) or text.tie_word_embeddings(False)
    text_task = "text-generation" if task == "image-text-to-text" else task
    reader = llama.decoder(text, text_task, tied=tied)
    reader.family, reader.task = llama.FAMILY, text_task
    tower, layers = clip.vision_tower(vision), feature_layers(config)
    projector = Projector(
        len(layers) * tower.embed.cls.shape[0],
        reader.tower.embed.tokens.embedding_dim,
        config.str("projector_hidden_act", "gelu"),
        bias=config.bool("multimodal_projector_bias", True),
    )
    return VisionLanguageModel(
        config,
        tower,
        projector,
        reader,
        placeholder=placeholder(config, reader.vocabulary),
        features=VisionFeatures(layers, config.str("vision_feature_select_strategy", "default") == "full"),
        vision_pooler=clip.vision_pooler(vision),
    )


def placeholder(config: Config, vocabulary: int) -> int:
    """The token that stands for an image: image_token_index, or image_token_id, as `transformers` 5 also calls it."""
    index, number = config.get("image_token_index"), config.get("image_token_id")
    if index is not None and number is not None:
        config.only("image_token_id", index)
    key = "image_token_id" if index is None and number is not None else "image_token_index"
    usual = USUAL if vocabulary > USUAL else None  # in a smaller vocabulary it is missing
    return config.int(key, usual, minimum=0, maximum=vocabulary - 1)


def feature_layers(config: Config) -> list[int]:
    """After which blocks the image's vectors are taken. Raises ValueError unless it is an integer or a list of them."""
    value = config.get("vision_feature_layer", -2)
    layers = value if isinstance(value, list) else [value]
    if not layers or not all(isinstance(layer, int) and not isinstance(layer, bool) for layer in layers):
        raise ValueError(f"{config.where}: vision_feature_layer must be an integer or a list of them, got {value!r}")
    return layers


FAMILY = Family(
    title="LLaVA",
    model_type="llava",
    prefix="",
    build=build,
    names=names,
    tasks={
        "feature-extraction": Task(architecture="LlavaModel"),
        "image-text-to-text": Task(
            architecture="LlavaForConditionalGeneration",
            copies={"language_model.lm_head.weight": "language_model.model.embed_tokens.weight"},
        ),
    },
    # NAMES are those of the hub's files. transformers 5 has others in memory, and writes some of them.
    moved={
        r"^model\.(?=language_model\.|vision_tower\.|multi_modal_projector\.)": "",
        r"^lm_head\.": "language_model.lm_head.",
        r"^language_model\.(?!model\.|lm_head\.)": "language_model.model.",
        r"^vision_tower\.(?!vision_model\.)": "vision_tower.vision_model.",
    },
    ignored=(r"\.rotary_emb\.inv_freq$", r"\.embeddings\.position_ids$"),
    harmless=("ignore_index", "image_seq_length", "projection_dim", "vocab_size"),
)
