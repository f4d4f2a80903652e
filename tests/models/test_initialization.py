"""`regard.build`: initial weights drawn as transformers draws them, and a first loss near ln V."""

import json
import math

import pytest
import torch
import transformers as hf

import regard

TEXT = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 160}
IMAGE = TEXT | {"image_size": 32, "patch_size": 8}
DINO = {name: value for name, value in IMAGE.items() if name != "intermediate_size"}
SIDES = {
    f"{s}_{k}": n for s in ("encoder", "decoder") for k, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 160))
}
T5 = {"vocab_size": 300, "d_model": 96, "d_kv": 24, "d_ff": 160, "num_layers": 2, "num_heads": 4}
LLAMA = hf.LlamaConfig(vocab_size=300, num_key_value_heads=2, **TEXT)
WORDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

CONFIGS = {
    "bert": ("BertForMaskedLM", hf.BertConfig(vocab_size=300, **TEXT)),
    "bert-pretraining": ("BertForPreTraining", hf.BertConfig(vocab_size=300, **TEXT)),
    "roberta": ("RobertaForMaskedLM", hf.RobertaConfig(vocab_size=300, **TEXT)),
    "xlm-roberta": ("XLMRobertaForMaskedLM", hf.XLMRobertaConfig(vocab_size=300, **TEXT)),
    "distilbert": (
        "DistilBertForMaskedLM",
        hf.DistilBertConfig(vocab_size=300, dim=96, n_layers=2, n_heads=4, hidden_dim=160),
    ),
    "albert": ("AlbertForMaskedLM", hf.AlbertConfig(vocab_size=300, embedding_size=48, **TEXT)),
    "electra": ("ElectraForMaskedLM", hf.ElectraConfig(vocab_size=300, embedding_size=48, **TEXT)),
    "longformer": (
        "LongformerForMaskedLM",
        hf.LongformerConfig(vocab_size=300, attention_window=16, max_position_embeddings=130, **TEXT),
    ),
    "big_bird": (
        "BigBirdForMaskedLM",
        hf.BigBirdConfig(vocab_size=300, block_size=8, num_random_blocks=1, max_position_embeddings=256, **TEXT),
    ),
    "gpt2": ("GPT2LMHeadModel", hf.GPT2Config(vocab_size=300, n_embd=96, n_layer=2, n_head=4, n_positions=64)),
    "llama": ("LlamaForCausalLM", LLAMA),
    "t5": ("T5ForConditionalGeneration", hf.T5Config(**T5)),
    "t5-gated": (
        "T5ForConditionalGeneration",
        hf.T5Config(**T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    ),
    "bart": ("BartForConditionalGeneration", hf.BartConfig(vocab_size=300, d_model=96, **SIDES)),
    "marian": (
        "MarianMTModel",
        hf.MarianConfig(
            vocab_size=300, d_model=96, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0, **SIDES
        ),
    ),
    "vit": ("ViTForImageClassification", hf.ViTConfig(num_labels=7, **IMAGE)),
    "deit": ("DeiTForImageClassificationWithTeacher", hf.DeiTConfig(num_labels=7, **IMAGE)),
    "dinov2": ("Dinov2ForImageClassification", hf.Dinov2Config(num_labels=7, **DINO)),
    "dinov2_with_registers": (
        "Dinov2WithRegistersForImageClassification",
        hf.Dinov2WithRegistersConfig(num_labels=7, **DINO),
    ),
    "swin": (
        "SwinForImageClassification",
        hf.SwinConfig(
            num_labels=7, image_size=64, patch_size=4, embed_dim=48, depths=[2, 2], num_heads=[2, 4], window_size=4
        ),
    ),
    "clip": (
        "CLIPModel",
        hf.CLIPConfig(text_config=TEXT | WORDS | {"vocab_size": 300}, vision_config=IMAGE, projection_dim=48),
    ),
    "blip": (  # transformers' default for the vision tower is 1e-10, with which it cannot learn
        "BlipForConditionalGeneration",
        hf.BlipConfig(
            text_config=TEXT | {"vocab_size": 300, "encoder_hidden_size": 96},
            vision_config=IMAGE | {"initializer_range": 0.02},
            projection_dim=48,
        ),
    ),
    "llava": (
        "LlavaForConditionalGeneration",
        hf.LlavaConfig(text_config=LLAMA, vision_config=hf.CLIPVisionConfig(**IMAGE), image_token_id=299),
    ),
    "idefics": (
        "IdeficsForVisionText2Text",
        hf.IdeficsConfig(
            vocab_size=300, additional_vocab_size=2, cross_layer_interval=1, use_resampler=True, **TEXT,
            vision_config={"embed_dim": 96} | {k: v for k, v in IMAGE.items() if k != "hidden_size"},
            perceiver_config={
                "resampler_depth": 1, "resampler_n_heads": 2, "resampler_head_dim": 16, "resampler_n_latents": 4
            },
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_means_and_deviations_are_those_of_transformers(name, tmp_path):
    architecture, config = CONFIGS[name]
    config.architectures = [architecture]
    torch.manual_seed(1)
    model = getattr(hf, architecture)
    theirs = model(config).state_dict()
    regard.build(config).save(tmp_path)
    ours = model.from_pretrained(tmp_path).state_dict()
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        one, other = ours[key].double(), tensor.double()
        count, std = one.numel(), max(float(one.std(correction=0)), float(other.std(correction=0)))
        # Padding rows of 0 and truncated tails change a deviation by less than 6 %.
        assert abs(one.std(correction=0) - other.std(correction=0)) <= (0.06 + 3 / math.sqrt(count)) * std, key
        assert abs(one.mean() - other.mean()) <= 6 * std / math.sqrt(count) + 1e-9, key


LANGUAGE = [
    name for name in CONFIGS if name not in ("clip", "blip", "llava", "idefics", "bert-pretraining", "t5-gated")
]


@pytest.mark.parametrize("name", LANGUAGE)
def test_first_loss_is_near_the_logarithm_of_the_outputs(name):
    architecture, config = CONFIGS[name]
    config.architectures = [architecture]
    model = regard.build(config).eval()
    draws = torch.Generator().manual_seed(0)
    if model.kind == "vision":
        size, outputs = config.image_size, 7
        batch = {"pixel_values": torch.randn(16, 3, size, size, generator=draws)}
        labels = torch.randint(0, 7, (16,), generator=draws)
    else:
        outputs = 300
        batch = {"input_ids": torch.randint(5, 300, (8, 32), generator=draws)}
        labels = torch.randint(5, 300, (8, 32), generator=draws)
    with torch.no_grad():
        loss = float(model(**batch, labels=labels).loss)
    # T5 scores with its embeddings, of deviation 1: the variance of the logits adds to the loss.
    assert abs(loss - math.log(outputs)) < (1.2 if name == "t5" else 0.3)


@pytest.mark.parametrize("way", ["name", "dict", "file", "directory", "transformers"])
def test_all_ways_to_name_a_config_give_the_same_weights(way, tmp_path):
    config = hf.GPT2Config(vocab_size=31, n_embd=8, n_layer=1, n_head=2, n_positions=16)
    config.save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    sizes = {key: value for key, value in values.items() if key != "model_type"}
    built = {
        "name": lambda: regard.build("gpt2", **sizes),
        "dict": lambda: regard.build(values),
        "file": lambda: regard.build(tmp_path / "config.json"),
        "directory": lambda: regard.build(str(tmp_path)),
        "transformers": lambda: regard.build(config),
    }[way]()
    first = regard.build(values)
    assert built.task == "text-generation"
    assert all(torch.equal(a, b) for a, b in zip(built.parameters(), first.parameters(), strict=True))
    other = regard.build(values, seed=1)
    assert not torch.equal(other.tower.embed.tokens.weight, first.tower.embed.tokens.weight)


@pytest.mark.parametrize(
    ("config", "options", "error", "value"),
    [
        ("gpt5", {}, FileNotFoundError, "gpt5"),
        ({"model_type": "gpt5"}, {}, ValueError, "gpt5"),
        ("gpt2", {"n_embd": 7, "n_head": 2, "n_layer": 1, "n_positions": 8, "vocab_size": 9}, ValueError, "7"),
        ("gpt2", {"n_embedding": 8}, ValueError, "n_embd"),
        (17, {}, TypeError, "int"),
        ("gpt2", {"task": "fill-mask"}, ValueError, "fill-mask"),
        ("gpt2", {"dtype": torch.int8}, TypeError, "int8"),
        ("gpt2", {"seed": -1}, ValueError, "-1"),
    ],
)
def test_bad_configs_are_refused_with_what_came(config, options, error, value):
    with pytest.raises(error, match=value):
        regard.build(config, **options)
