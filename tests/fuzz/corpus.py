"""Good files to damage: captures, model directories, tokenizers, arrays and images, the same bytes in every process.

    captures/text.regard   models/bert/…   tokenizers/words/…   arrays/qkv.npz   images/plain.png

Nothing is trained: the trainers of `tokenizers` break ties anew in every process. (Of a capture, the time differs.)
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import tokenizers
import torch
import transformers
from PIL import Image
from seeing_twins import clip, picture, vit
from speaking_twins import SENTENCES, bert, wordpiece
from tokenizers import decoders, models, pre_tokenizers, processors
from twins import build

import regard
from regard.session.session import look_at_image

LETTERS = sorted({letter for sentence in SENTENCES[:3] for letter in sentence})
BYTES = pre_tokenizers.ByteLevel.alphabet()
WORDS = ["the", "animal", "street", "was", "too", "cat", "sat", "on", "mat"]


def write_corpus(folder: Path) -> Path:
    """Write all files; a few seconds, most of which `transformers` takes to be imported."""
    for kind in ("captures", "models", "tokenizers", "arrays", "images"):
        (folder / kind).mkdir(parents=True)
    write_models(folder / "models")
    write_tokenizers(folder / "tokenizers")
    write_captures(folder / "captures", folder / "models")
    write_arrays(folder / "arrays")
    write_images(folder / "images")
    return folder


# --------------------------------------------------------------------------------------------------------------- models


def write_models(folder: Path) -> None:
    bert(folder / "bert", "ForMaskedLM")
    vit(folder / "vit")
    _hand_made_clip(clip(folder / "clip"))
    config = transformers.GPT2Config(
        vocab_size=300, n_positions=41, n_embd=20, n_layer=2, n_head=5, bos_token_id=0, eos_token_id=0
    )
    build("GPT2LMHeadModel", config, torch.float32).save_pretrained(folder / "gpt2", max_shard_size="20KB")
    said = {"max_new_tokens": 5, "do_sample": False, "num_beams": 2, "eos_token_id": 0, "pad_token_id": 0}
    (folder / "gpt2" / "generation_config.json").write_text(json.dumps(said))
    byte_pairs(folder / "gpt2")


def _hand_made_clip(directory: Path) -> None:
    """Its tokenizer is trained: put one of the same size in its place."""
    size = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json")).get_vocab_size()
    words = ["<pad>", "<s>", "<unk>", "</s>", *LETTERS, *WORDS]
    made = tokenizers.Tokenizer(models.WordLevel({word: n for n, word in enumerate(words[:size])}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing("<s> $A </s>", "<s> $A $B </s>", [("<s>", 1), ("</s>", 3)])
    made.save(str(directory / "tokenizer.json"))


# ----------------------------------------------------------------------------------------------------------- tokenizers


def byte_pairs(folder: Path) -> None:
    """vocab.json and merges.txt, as GPT-2's."""
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("a", "t"), ("c", "at"), ("Ġ", "cat"), ("o", "n"), ("Ġ", "on")]
    words = ["<|endoftext|>", *sorted(BYTES), *(a + b for a, b in merges)]
    (folder / "vocab.json").write_text(json.dumps({word: n for n, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))


def sentencepiece(pieces: list[str], algorithm: int) -> bytes:
    """A sentencepiece model, in protobuf's own bytes: pieces, then which algorithm, then how text is normalised."""

    def field(number: int, data: bytes) -> bytes:
        return bytes([number << 3 | 2]) + _varint(len(data)) + data

    message = b""
    for n, text in enumerate(pieces):
        kind = 2 if text == "<unk>" else 3 if text in ("<s>", "</s>", "<pad>") else 1
        score = struct.pack("<f", -float(n))
        message += field(1, field(1, text.encode()) + b"\x15" + score + bytes([0x18, kind]))
    unknown = pieces.index("<unk>")
    message += field(2, bytes([0x18, algorithm]) + b"\xc0\x02" + bytes([unknown]))
    return message + field(3, bytes([0x18, 1, 0x20, 1]))


def _varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + _varint(value >> 7)


def write_tokenizers(folder: Path) -> None:
    def make(name: str, **settings: Any) -> Path:
        (folder / name).mkdir()
        (folder / name / "tokenizer_config.json").write_text(json.dumps(settings))
        return folder / name

    json_of_bert = make("bert_json", tokenizer_class="PreTrainedTokenizerFast", pad_token="[PAD]", unk_token="[UNK]")
    wordpiece()[0].save(str(json_of_bert / "tokenizer.json"))
    words = make("words", tokenizer_class="BertTokenizer", do_lower_case=True, model_max_length=32)
    vocabulary = wordpiece()[0].get_vocab()
    (words / "vocab.txt").write_text("\n".join(sorted(vocabulary, key=vocabulary.__getitem__)), encoding="utf-8")
    (words / "special_tokens_map.json").write_text(json.dumps({"mask_token": "[MASK]", "sep_token": "[SEP]"}))
    byte_pairs(make("byte_pairs"))
    plain = ["▁", *(f"▁{word}" for word in WORDS), *LETTERS[1:]]
    t5 = make("t5", tokenizer_class="T5Tokenizer", extra_ids=7)
    (t5 / "spiece.model").write_bytes(sentencepiece(["<pad>", "</s>", "<unk>", *plain], 1))
    llama = make("llama", tokenizer_class="LlamaTokenizer", add_bos_token=True, legacy=False)
    (llama / "tokenizer.model").write_bytes(
        sentencepiece(["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), *plain], 2)
    )
    marian = make("marian", source_lang="en", target_lang="ko")
    for name in ("source", "target"):
        (marian / f"{name}.spm").write_bytes(sentencepiece(["</s>", "<unk>", *plain], 1))
    every = ["</s>", "<unk>", *plain, "<pad>"]
    (marian / "vocab.json").write_text(json.dumps({word: n for n, word in enumerate(every)}))
    (marian / "config.json").write_text(json.dumps({"model_type": "marian"}))
    unigram = make("unigram_json", tokenizer_class="PreTrainedTokenizerFast", eos_token="</s>", unk_token="<unk>")
    made = tokenizers.Tokenizer(models.Unigram([(text, -float(n)) for n, text in enumerate(every)], 1, False))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    made.add_special_tokens(["</s>", "<unk>", "<pad>"])
    made.enable_padding(pad_id=every.index("<pad>"), pad_token="<pad>")
    made.enable_truncation(17)
    made.save(str(unigram / "tokenizer.json"))


# ------------------------------------------------------------------------------------------------------------- captures


class Written(torch.nn.Module):
    """Attention written by hand, with a sink's column: what a capture keeps of it are the weights themselves."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = torch.cat([x @ x.mT, torch.zeros(*x.shape[:-1], 1)], -1)
        return scores.softmax(-1)[..., :-1] @ x


def write_captures(folder: Path, models_at: Path) -> None:
    torch.manual_seed(14)
    text = regard.load(models_at / "bert")
    batch = text.tokenizer.batch(["the cat sat on the mat.", "a cat"])
    labels = [text.tokenizer.tokens(row) for row in batch.input_ids]
    every = ["entropy", "received", "max_logit", "effective", "map", "top"]
    with torch.no_grad():
        with regard.watch(text, measures=every, keep=["qk", "output"], tokens=labels) as seen:
            text(batch.input_ids, attention_mask=batch.attention_mask)
        seen.save(folder / "text.regard")
        seen.save(folder / "overview.regard", overview=True)
        model = regard.load(models_at / "gpt2")
        with regard.watch(model, keep="qk") as seen:
            model.generate("the cat", max_new_tokens=3, num_beams=1)
        seen.save(folder / "generation.regard")
    layer = torch.nn.TransformerDecoderLayer(12, 3, 16, batch_first=True).eval()
    with torch.no_grad(), regard.watch(layer, measures=every, keep="qk") as seen:
        layer(torch.randn(2, 5, 12), torch.randn(2, 7, 12), tgt_mask=torch.ones(5, 5).triu(1).bool())
    seen.save(folder / "cross.regard")
    written = Written()
    with torch.no_grad(), regard.watch(written, measures=every, keep="qk") as seen:
        written(torch.randn(2, 3, 5, 4))
    seen.save(folder / "written.regard")
    look_at_image(picture(3), regard.load(models_at / "vit")).capture.save(folder / "picture.regard")


# --------------------------------------------------------------------------------------------------- arrays and images


def write_arrays(folder: Path) -> None:
    random = np.random.default_rng(14)
    q, k, v = (random.normal(size=(2, 4, n, 3)) for n in (5, 7, 7))
    np.save(folder / "x.npy", random.normal(size=(6, 4)).astype(np.float32))
    np.savez(folder / "qkv.npz", q=q, k=k, v=v)
    np.savez_compressed(folder / "packed.npz", q=q, k=k, v=v)
    tensors = {name: torch.from_numpy(array) for name, array in zip("qkv", (q, k, v), strict=True)}
    safetensors.torch.save_file(tensors, folder / "qkv.safetensors", {"format": "pt"})


def write_images(folder: Path) -> None:
    image = Image.fromarray(picture(0, 37, 53))
    exif = Image.Exif()
    exif[0x0112] = 6
    for suffix in ("png", "jpg", "bmp", "ppm", "webp", "tiff", "jp2", "avif", "gif"):
        try:
            image.save(folder / f"plain.{suffix}", **({"exif": exif} if suffix in ("png", "jpg", "webp") else {}))
        except (KeyError, OSError):  # a Pillow without this format
            (folder / f"plain.{suffix}").unlink(missing_ok=True)
    image.quantize(17).save(folder / "palette.png", transparency=3)
    image.convert("RGBA").save(folder / "alpha.png")
    Image.fromarray((np.arange(37 * 53).reshape(37, 53) * 30).astype(np.uint16)).save(folder / "sixteen.png")
    image.convert("CMYK").save(folder / "cmyk.jpg")
    pages = [Image.new("L", (5, 3)), Image.new("L", (7, 3), 9)]
    pages[0].save(folder / "pages.tiff", save_all=True, append_images=pages[1:])
    pages[0].save(folder / "moving.gif", save_all=True, append_images=pages[1:])
