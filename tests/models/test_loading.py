"""Loading and saving: what is refused, with its words, and what is put where. Parity is each family's own test."""

from __future__ import annotations

import json
import pickle
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils import prune
from transformers import BartConfig, BertConfig, CLIPConfig, DeiTConfig, GPT2Config, T5Config, ViTConfig
from twins import Twin, change, texts

import regard
from regard.data.tokenizer import Tokenizer
from regard.models.family import FAMILIES, family_named
from regard.models.loading import load
from regard.nn.vision import ImageLabels

CONFIG = {
    "vocab_size": 31,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 17,
}
CONFIG |= {"max_position_embeddings": 13}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    Twin("BertForMaskedLM", BertConfig(**CONFIG), tmp_path)
    return tmp_path


def rewrite(folder: Path, edit: Callable[[dict[str, Tensor]], Any]) -> Path:
    """The same directory, its tensors edited."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_a_family_that_is_not_there_is_refused_with_those_that_are(folder):
    message = r"model_type.*'gemma2'.*albert.*bart.*bert.*regard\.watch"
    with pytest.raises(ValueError, match=message):
        load(change(folder, model_type="gemma2"))


def test_every_family_is_in_its_file_and_every_file_holds_one():
    for kind in FAMILIES:
        assert family_named(kind).model_type == kind
    files = {path.stem for path in (Path(regard.__file__).parent / "models" / "families").glob("*.py")}
    assert set(FAMILIES.values()) == files - {"__init__"}


def test_a_task_that_the_family_lacks_is_refused(folder):
    with pytest.raises(
        ValueError, match=r"BERT.*task.*'text-generation'.*feature-extraction.*fill-mask.*next-sentence-prediction"
    ):
        load(folder, task="text-generation")


def test_an_architecture_that_the_family_lacks_is_refused(folder):
    message = r"BertForMultipleChoice.*BERT.*BertModel.*task='feature-extraction'"
    with pytest.raises(ValueError, match=message):
        load(change(folder, architectures=["BertForMultipleChoice"]))


def test_keys_that_nobody_knows_are_refused_unless_ignored(folder):
    change(folder, use_rotary=True)
    with pytest.raises(ValueError, match=r"use_rotary.*True"):
        load(folder)
    assert load(folder, ignore=["use_rotary"]).task == "fill-mask"


def test_a_missing_tensor_is_named(folder):
    rewrite(folder, lambda tensors: tensors.pop("bert.encoder.layer.1.attention.self.key.bias"))
    message = r"BERT.*'fill-mask'.*1.*bert\.encoder\.layer\.1\.attention\.self\.key"
    with pytest.raises(ValueError, match=message):
        load(folder)


def test_a_missing_head_says_how_to_read_the_body(folder):
    with pytest.raises(ValueError, match=r"classifier\.weight.*task='feature-extraction'"):
        load(folder, task="text-classification")


def test_a_missing_body_is_not_said_to_be_readable_without_a_head(folder):
    """Neither where all is there but a tensor of the body, nor where a left-over one would be in the way."""
    rewrite(folder, lambda tensors: tensors.pop("bert.encoder.layer.1.attention.self.key.bias"))
    for task in ("fill-mask", "text-classification"):
        with pytest.raises(ValueError, match=r"(?!.*task='feature-extraction').*key\.bias"):
            load(folder, task=task)


def test_a_missing_head_beside_a_tensor_without_a_place_is_not_said_to_be_readable(folder):
    rewrite(folder, lambda tensors: tensors.update(extra=torch.ones(2)))
    with pytest.raises(ValueError, match=r"1.*extra"):
        load(folder, task="text-classification")


def test_a_missing_head_of_a_family_whose_body_is_another_is_not_said_to_be_readable(tmp_path):
    """BLIP's body has projections of its own, which the file of who writes captions lacks."""
    text = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 10, "intermediate_size": 17}
    config = transformers.BlipConfig(text_config=text, vision_config=text | {"image_size": 12, "patch_size": 6})
    Twin("BlipForConditionalGeneration", config, tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.pop("text_decoder.cls.predictions.transform.dense.bias"))
    with pytest.raises(ValueError, match=r"1.*text_decoder\.cls\.predictions\.transform\.dense\.bias"):
        load(tmp_path)


def test_a_tensor_without_a_place_is_named(folder):
    rewrite(folder, lambda tensors: tensors.update({"bert.encoder.gate": torch.ones(2)}))
    with pytest.raises(ValueError, match=r"1.*bert\.encoder\.gate"):
        load(folder)


def test_a_bias_beside_a_weight_that_is_read_has_no_place(folder):
    """It would have been computed with, and would be left out in silence."""
    extra = {"bert.embeddings.word_embeddings.bias": torch.ones(12)}
    rewrite(folder, lambda tensors: tensors.update(extra))
    with pytest.raises(ValueError, match=r"1.*bert\.embeddings\.word_embeddings\.bias"):
        load(folder)


def test_layers_beyond_those_of_the_config_have_no_place(folder):
    with pytest.raises(ValueError, match=r"16.*bert\.encoder\.layer\.1.*8"):
        load(change(folder, num_hidden_layers=1))


def test_all_that_does_not_fit_is_said_at_once(folder):
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors["bert.embeddings.LayerNorm.weight"] = torch.ones(11)
        tensors["extra"] = torch.ones(1)
        del tensors["cls.predictions.bias"]

    with pytest.raises(
        ValueError,
        match=r"1.*bert\.embeddings\.LayerNorm\.weight.*\(11,\).*\(12,\).*1",
    ):
        load(rewrite(folder, edit))


def test_a_head_of_another_task_may_be_left_over(folder):
    rewrite(folder, lambda tensors: tensors.update({"cls.seq_relationship.weight": torch.ones(2, 12)}))
    assert load(folder).task == "fill-mask"


def test_names_of_old_checkpoints_are_read(folder):
    expected = load(folder)(**texts(31)).logits

    def edit(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if "LayerNorm" in n]:
            old = name.replace(".weight", ".gamma").replace(".bias", ".beta")
            tensors[old] = tensors.pop(name)

    assert torch.equal(load(rewrite(folder, edit))(**texts(31)).logits, expected)


def test_pickled_weights_are_refused(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin"):
        load(folder)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_size": 3 * 2**20, "intermediate_size": 2**30}, "shape"),
        ({"vocab_size": 2**31 - 1}, r"word_embeddings\.weight.*\(31, 12\).*\(2147483647, 12\)"),
        ({"max_position_embeddings": 2**31}, r"max_position_embeddings.*1.*2147483647"),
        ({"num_hidden_layers": 10**6}, r"num_hidden_layers.*1000000.*2000"),
        (
            {"vocab_size": 2**31 - 1, "hidden_size": 2**31 - 1, "num_attention_heads": 1},
            "tensor",
        ),
        ({"id2label": None, "num_labels": 2**31 - 1}, r"num_labels.*1.*1000000"),
    ],
    ids=["matrices", "words", "beyond any size", "a million layers", "beyond 64 bits", "names of labels"],
)
def test_a_config_asking_for_terabytes_is_refused_before_memory_is_taken(settings, message, folder):
    change(folder, **settings)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=message):
            load(folder)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 50e6


def test_a_directory_without_a_model_says_what_is_there(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(FileNotFoundError, match=r"config\.json.*notes\.txt"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_attention_heads": 5}, r"d_model.*12.*5"),
        ({"hidden_act": "mish"}, "'mish'"),
        ({"layer_norm_eps": float("nan")}, r"layer_norm_eps.*nan"),
        ({"layer_norm_eps": -1.0}, r"layer_norm_eps.*0.*-1\.0"),
    ],
)
def test_a_config_that_builds_no_model_is_named(settings, message, folder):
    change(folder, **settings)
    with pytest.raises(ValueError, match=rf"{re.escape(str(folder / 'config.json'))}.*{message}"):
        load(folder)


def test_progress_ends_with_all_bytes(folder):
    told: list[tuple[int, int]] = []
    load(folder, progress=lambda done, total: told.append((done, total)))
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1] == (folder / "model.safetensors").stat().st_size - header(folder)


def header(folder: Path) -> int:
    with (folder / "model.safetensors").open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def test_weights_come_in_the_dtype_asked_for_and_ready_to_train(folder):
    model = load(folder, dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert all(p.requires_grad for p in model.parameters())
    assert not model.training


def test_training_a_loaded_model_leaves_the_file_alone(folder):
    before = (folder / "model.safetensors").read_bytes()
    model = load(folder)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    assert (folder / "model.safetensors").read_bytes() == before


def test_what_is_saved_is_loaded_again_bit_for_bit(tmp_path):
    twin = Twin("GPT2LMHeadModel", GPT2Config(vocab_size=31, n_embd=12, n_layer=2, n_head=3, n_positions=13), tmp_path)
    model = twin.ours(torch.float32)
    model.save(tmp_path / "again")
    again = load(tmp_path / "again")
    for (name, ours), (other, theirs) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(ours, theirs)


def test_a_second_save_replaces_the_first(folder, tmp_path):
    model = load(folder)
    model.save(tmp_path / "out")
    with torch.no_grad():
        model.head.bias.add_(1)
    model.save(tmp_path / "out")
    assert torch.equal(load(tmp_path / "out").head.bias, model.head.bias)
    assert not list((tmp_path / "out").glob("*.part"))


def test_a_save_says_what_it_wrote_and_keeps_the_tokenizer(folder, tmp_path):
    (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n")
    load(folder, dtype=torch.float16).save(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == (["BertForMaskedLM"], "float16")
    assert (tmp_path / "out" / "vocab.txt").read_text() == (folder / "vocab.txt").read_text()


def test_a_save_onto_a_file_is_refused(folder, tmp_path):
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(NotADirectoryError):
        load(folder).save(tmp_path / "taken")
    assert (tmp_path / "taken").read_text() == "mine"


def test_a_family_that_is_no_name_is_refused(folder):
    with pytest.raises(ValueError, match=r"model_type.*\['bert'\]"):
        load(change(folder, model_type=["bert"]))


@pytest.mark.parametrize("dtype", ["float16", torch.int8, torch.float8_e4m3fn])
def test_a_dtype_that_nothing_is_computed_in_is_refused(dtype, folder):
    with pytest.raises(TypeError, match=r"dtype.*torch\.float64.*None"):
        load(folder, dtype=dtype)


def test_keys_to_ignore_are_a_list(folder):
    with pytest.raises(TypeError, match=r"ignore.*str.*ignore=\['use_rotary'\]"):
        load(change(folder, use_rotary=True), ignore="use_rotary")


NORM = "bert.encoder.layer.1.output.LayerNorm"


@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn])
def test_weights_that_are_no_plain_floats_are_refused(stored, folder):
    rewrite(folder, lambda tensors: tensors.update({f"{NORM}.bias": tensors[f"{NORM}.bias"].to(stored)}))
    message = rf"1.*dtype.*{NORM}\.bias.*{stored}"
    for dtype in (None, torch.float32):
        with pytest.raises(ValueError, match=message):
            load(folder, dtype=dtype)


def test_weights_of_several_dtypes_need_one_to_compute_in(folder):
    rewrite(folder, lambda tensors: tensors.update({f"{NORM}.bias": tensors[f"{NORM}.bias"].half()}))
    with pytest.raises(ValueError, match=r"torch\.float16.*torch\.float32.*dtype=torch\.float32"):
        load(folder)
    assert {p.dtype for p in load(folder, dtype=torch.float32).parameters()} == {torch.float32}


def test_a_tensor_under_its_old_name_and_its_new_one_is_refused(folder):
    rewrite(folder, lambda tensors: tensors.update({f"{NORM}.beta": tensors[f"{NORM}.bias"] + 1}))
    with pytest.raises(ValueError, match=rf"{NORM}\.bias.*{NORM}\.(bias|beta).*{NORM}\.(bias|beta)"):
        load(folder)


SMALL = {"vocab_size": 31, "d_model": 12, "decoder_start_token_id": 2}
T5_SIZES = {"d_kv": 5, "d_ff": 17, "num_layers": 1, "num_heads": 2}
BART_SIZES = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in (("layers", 1), ("ffn_dim", 17))}
BART_SIZES |= {"encoder_attention_heads": 3, "decoder_attention_heads": 3, "max_position_embeddings": 13}
GPT2 = GPT2Config(vocab_size=31, n_embd=12, n_layer=1, n_head=3)
BERT, WORDS = BertConfig(**CONFIG), "bert.embeddings.word_embeddings.weight"
COPIED = [
    ("BertForMaskedLM", BERT, "cls.predictions.decoder.weight", WORDS),
    ("BertForMaskedLM", BERT, "cls.predictions.decoder.bias", "cls.predictions.bias"),
    ("GPT2LMHeadModel", GPT2, "lm_head.weight", "transformer.wte.weight"),
    ("BartForConditionalGeneration", BartConfig(**SMALL, **BART_SIZES), "lm_head.weight", "model.shared.weight"),
    ("T5ForConditionalGeneration", T5Config(**SMALL, **T5_SIZES), "encoder.embed_tokens.weight", "shared.weight"),
]


@pytest.mark.parametrize(("architecture", "config", "copy", "original"), COPIED, ids=[f"{c[0]} {c[2]}" for c in COPIED])
def test_a_second_table_may_be_a_copy_of_the_shared_one_and_nothing_else(
    architecture, config, copy, original, tmp_path
):
    Twin(architecture, config, tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({copy: tensors[original].clone()}))
    assert load(tmp_path).task in ("fill-mask", "text-generation", "text2text-generation")
    rewrite(tmp_path, lambda tensors: tensors[copy].view(-1)[3].add_(1))
    with pytest.raises(ValueError, match=rf'{copy}.*{original}.*"tie_word_embeddings"'):
        load(tmp_path)


def test_a_second_table_matters_only_to_the_head_that_scores_with_it(folder):
    name = "cls.predictions.decoder.weight"
    rewrite(folder, lambda tensors: tensors.update({name: torch.ones(31, 12)}))
    assert load(folder, task="feature-extraction").head is None


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("BertForMaskedLM", BERT),
        ("GPT2LMHeadModel", GPT2),
        ("BartModel", BartConfig(**SMALL, **BART_SIZES)),
    ],
)
def test_a_model_goes_through_pickle(architecture, config, tmp_path):
    Twin(architecture, config, tmp_path)
    model = load(tmp_path)
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(again(texts(31)["input_ids"]).last_hidden_state, model(texts(31)["input_ids"]).last_hidden_state)
    again.save(tmp_path / "out")
    assert torch.equal(
        load(tmp_path / "out")(texts(31)["input_ids"]).last_hidden_state,
        model(texts(31)["input_ids"]).last_hidden_state,
    )


def test_a_tokenizer_set_by_hand_is_saved_where_the_checkpoint_has_none(folder, tmp_path):
    words = tmp_path / "words"
    words.mkdir()
    (words / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\ncat\n")
    model = load(folder)
    model.tokenizer = Tokenizer.open(words)
    model.save(tmp_path / "out")
    assert load(tmp_path / "out").tokenizer.encode("a cat").ids == [2, 5, 6, 3]


# ---------------------------------------------------------------------------------------------- what load would refuse


SEEN = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 10, "intermediate_size": 17}
SIGHT = SEEN | {"image_size": 12, "patch_size": 6}
THREE = {"id2label": {0: "cat", 1: "dog", 2: "mat"}}
LABELLED = [
    ("BertForSequenceClassification", BertConfig(**CONFIG, **THREE)),
    ("BertForTokenClassification", BertConfig(**CONFIG)),  # names none
    ("GPT2ForSequenceClassification", GPT2Config(vocab_size=31, n_embd=12, n_layer=1, n_head=3, n_positions=13)),
    ("BartForSequenceClassification", BartConfig(**SMALL, **BART_SIZES, **THREE)),
    ("ViTForImageClassification", ViTConfig(**SIGHT, **THREE)),
    ("DeiTForImageClassificationWithTeacher", DeiTConfig(**SIGHT, **THREE)),  # two layers score
    ("CLIPForImageClassification", CLIPConfig(text_config=SEEN, vision_config=SIGHT, **THREE)),
]


@pytest.mark.parametrize(("architecture", "config"), LABELLED)
def test_new_head_is_saved_with_its_number_of_labels(architecture, config, tmp_path):
    Twin(architecture, config, tmp_path)
    model = load(tmp_path)
    for name, layer in model.head.named_children():
        if name in ("score", "taught"):
            setattr(model.head, name, torch.nn.Linear(layer.in_features, 7, layer.bias is not None))
    model.save(tmp_path / "out")
    again = load(tmp_path / "out")
    assert torch.equal(again.head.score.weight, model.head.score.weight)
    assert again.config.labels() == tuple(f"LABEL_{n}" for n in range(7))
    theirs = getattr(transformers, architecture).from_pretrained(tmp_path / "out")
    assert (theirs.config.num_labels, theirs.config.label2id["LABEL_6"]) == (7, 6)
    model.config.values["id2label"] = dict(enumerate("abcdefg"))
    model.save(tmp_path / "named")
    assert load(tmp_path / "named").config.labels() == tuple("abcdefg")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_fresh_head_leaves_the_body_as_stored(folder, dtype):
    stored = dict(load(folder, dtype=dtype).tower.named_parameters())
    model = load(folder, task="text-classification", num_labels=5, dtype=dtype)
    assert all(torch.equal(value, stored[name]) for name, value in model.tower.named_parameters())
    assert model.config.labels() == tuple(f"LABEL_{n}" for n in range(5))
    head = model.head.score
    assert (head.weight.shape, head.weight.dtype) == ((5, 12), dtype)
    assert 0.01 < float(head.weight.detach().std()) < 0.03, "of 60 draws of N(0, 0.02²)"
    assert not head.bias.any()


def test_labels_that_fit_are_saved_as_they_are_named(tmp_path):
    Twin("ViTForImageClassification", ViTConfig(**SIGHT, **THREE), tmp_path)
    model = load(tmp_path)
    model.head = ImageLabels(10, 3)
    model.save(tmp_path / "out")
    assert load(tmp_path / "out").config.labels() == ("cat", "dog", "mat")


def test_numbers_of_labels_follow_their_new_names(tmp_path):
    Twin("ViTForImageClassification", ViTConfig(**SIGHT, **THREE), tmp_path)
    change(tmp_path, label2id={"cat": 0, "dog": 1, "mat": 2})
    model = load(tmp_path)
    model.config.values["id2label"] = {0: "hen", 1: "owl", 2: "emu"}
    model.save(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["id2label"] == {"0": "hen", "1": "owl", "2": "emu"}
    assert config["label2id"] == {"hen": 0, "owl": 1, "emu": 2}


def test_names_whose_numbers_do_not_count_from_0_are_refused_where_they_are_asked_for_and_saved_as_they_came(tmp_path):
    Twin("BertForSequenceClassification", BertConfig(**CONFIG, **THREE), tmp_path)
    given = {"id2label": {"1": "cat", "2": "dog", "3": "mat"}, "label2id": {"cat": 1, "dog": 2, "mat": 3}}
    model = load(change(tmp_path, **given))
    assert model(torch.tensor([[5, 7, 11]])).logits.shape == (1, 3)
    with pytest.raises(ValueError, match=r"id2label.*1.*2.*3.*0.*2"):
        model.config.labels(3)
    model.save(tmp_path / "out")
    saved = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {key: saved[key] for key in given} == given
    model.config.values["id2label"] = {0: "cat", 1: "dog", 2: "mat"}
    assert model.config.labels(3) == ("cat", "dog", "mat")
    model.head.score = torch.nn.Linear(12, 7)
    model.config.values["id2label"] = given["id2label"]
    model.save(tmp_path / "new")
    assert load(tmp_path / "new").config.labels() == tuple(f"LABEL_{n}" for n in range(7))


def test_keys_that_were_ignored_are_not_written_again(tmp_path):
    Twin("BertForMaskedLM", BertConfig(**CONFIG), tmp_path)
    change(tmp_path, use_rotary=True, use_cache=False)
    load(tmp_path, ignore=["use_rotary", "hidden_size", "use_cache"]).save(tmp_path / "out")
    saved = json.loads((tmp_path / "out" / "config.json").read_text())
    assert ("use_rotary" in saved, saved["hidden_size"], saved["use_cache"]) == (False, 12, False)
    assert load(tmp_path / "out").task == "fill-mask"


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("opened", [False, True])
def test_keys_of_the_preprocessor_that_were_ignored_are_not_written_again(nested, opened, tmp_path):
    Twin("ViTForImageClassification", ViTConfig(**SIGHT, **THREE), tmp_path)
    values = {"image_processor_type": "ViTImageProcessor", "size": {"height": 12, "width": 12}, "do_thumbnail": True}
    name, kept = (
        ("processor_config.json", {"image_processor": values}) if nested else ("preprocessor_config.json", values)
    )
    (tmp_path / name).write_text(json.dumps(kept))
    model = load(tmp_path, ignore=["do_thumbnail"])
    assert not opened or model.preprocessor.kind == "ViT"
    model.save(tmp_path / "out")
    saved = json.loads((tmp_path / "out" / name).read_text())
    assert (saved["image_processor"] if nested else saved) == {k: v for k, v in values.items() if k != "do_thumbnail"}
    assert load(tmp_path / "out").preprocessor == model.preprocessor


def test_number_of_labels_in_the_config_follows_the_head(tmp_path):
    Twin("ViTForImageClassification", ViTConfig(**SIGHT), tmp_path)
    change(tmp_path, id2label=None, label2id=None, num_labels=2)
    model = load(tmp_path)
    model.head = ImageLabels(10, 7)
    model.save(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_labels"] == 7
    assert load(tmp_path / "out").head.score.weight.shape == (7, 10)


class Adapted(torch.nn.Module):
    """A layer beside which another one was put, as LoRA does."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.base, self.added = layer, torch.nn.Linear(12, 12)


def prune_it(model: Any) -> None:
    prune.random_unstructured(model.tower.blocks[1].attention.w_q, "weight", 0.5)


def adapt_it(model: Any) -> None:
    model.tower.blocks[0].attention.w_o = Adapted(model.tower.blocks[0].attention.w_o)


def enlarge_it(model: Any) -> None:
    model.tower.embed.tokens = torch.nn.Embedding(37, 12)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (
            prune_it,
            r"1.*tower\.blocks\.1\.attention\.w_q\.weight_orig.*1.*tower\.blocks\.1\.attention\.w_q\.weight",
        ),
        (
            adapt_it,
            r"4.*tower\.blocks\.0\.attention\.w_o\.base\.weight",
        ),
        (enlarge_it, r"1.*tower\.embed\.tokens\.weight.*\(37, 12\).*\(31, 12\)"),
    ],
)
def test_a_model_that_could_not_be_loaded_again_is_not_saved(spoil, said, folder):
    model = load(folder)
    spoil(model)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ValueError, match=said) as refused:
        model.save(folder / "new" / "place")
    text = str(refused.value)
    for named in ("BERT", "torch.nn.utils.prune.remove", "torch.nn.utils.parametrize.remove_parametrizations"):
        assert named in text
    with pytest.raises(ValueError, match=said):
        model.save(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_what_the_refusal_advises_can_be_saved(folder, tmp_path):
    model = load(folder)
    prune_it(model)
    prune.remove(model.tower.blocks[1].attention.w_q, "weight")
    enlarge_it(model)
    model.head.bias = torch.nn.Parameter(torch.zeros(37))
    model.config.values["vocab_size"] = 37
    model.save(tmp_path / "out")
    again = load(tmp_path / "out")
    assert torch.equal(again.tower.blocks[1].attention.w_q.weight, model.tower.blocks[1].attention.w_q.weight)
    assert again.tower.embed.tokens.weight.shape == (37, 12)


def test_a_body_without_its_pooler_is_saved_without_it(folder, tmp_path):
    model = load(folder, task="feature-extraction")  # a masked LM has none
    assert model.pooler is None
    model.save(tmp_path / "out")
    assert load(tmp_path / "out").pooler is None
