"""Tiny random models that speak: a `transformers` twin on disk with a tokenizer trained on a few sentences beside it.

They know nothing of what is asked of them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from twins import build

transformers.utils.logging.disable_progress_bar()  # it would stand in the output of what is tested

SENTENCES = [
    "The animal did not cross the street because it was too tired.",
    "The street was too wide, and the animal was small.",
    "Seoul is the capital of Korea; a cat sat on the mat.",
    "서울은 한국의 수도이다. 고양이가 매트 위에 앉았다.",
    "그 동물은 너무 피곤해서 길을 건너지 않았다.",
]
WORDPIECE = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
WORDPIECE |= {"mask_token": "[MASK]"}
FRAMED = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>", "mask_token": "<mask>"}


def wordpiece() -> tuple[Tokenizer, dict[str, str]]:
    """As BERT's: [CLS] text [SEP], small letters."""
    letters = sorted({letter for sentence in SENTENCES[:3] for letter in sentence.lower() if letter != " "})
    words = sorted({word for sentence in SENTENCES for word in re.findall(r"\w{2,}", sentence.lower())})
    # Not trained: its trainer breaks ties anew in every process, and ids would not be the same ones twice.
    every = [*WORDPIECE.values(), *letters, *(f"##{letter}" for letter in [*letters, "이"]), "수도", *words]
    made = Tokenizer(models.WordPiece({word: n for n, word in enumerate(dict.fromkeys(every))}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    frame = [("[CLS]", 2), ("[SEP]", 3)]
    made.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", frame)
    return made, WORDPIECE


def byte_pairs() -> tuple[Tokenizer, dict[str, str]]:
    """As GPT-2's: bytes, nothing around a text."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    _train(made, ["<|endoftext|>"])
    return made, {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}


def framed_byte_pairs() -> tuple[Tokenizer, dict[str, str]]:
    """As BART's: bytes, <s> text </s>."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    _train(made, list(FRAMED.values()))
    made.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    return made, FRAMED


def pieces(*specials: str, frame: str) -> tuple[Tokenizer, dict[str, str]]:
    """As sentencepiece's: ▁ for spaces, bytes for unknown characters; LLaMA's and T5's."""
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=401,
        special_tokens=[*specials, *(f"<0x{n:02X}>" for n in range(256))],
        show_progress=False,
    )
    made.train_from_iterator(SENTENCES[:3], trainer)  # Hangul is left to the bytes
    ids = [(word, specials.index(word)) for word in ("<s>", "</s>") if word in specials]
    made.post_processor = processors.TemplateProcessing(frame, frame.replace("$A", "$A $B"), ids)
    # The bytes are vocabulary, not special: what is special is never decoded.
    state = json.loads(made.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if not token["content"].startswith("<0x")]
    roles = {"<pad>": "pad_token", "<s>": "bos_token", "</s>": "eos_token", "<unk>": "unk_token"}
    return Tokenizer.from_str(json.dumps(state)), {roles[word]: word for word in specials}


def _train(made: Tokenizer, specials: list[str]) -> None:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        SENTENCES,
        trainers.BpeTrainer(vocab_size=307, special_tokens=specials, initial_alphabet=alphabet, show_progress=False),
    )


def speaking(
    directory: Path,
    architecture: str,
    config: Any,
    tokenizer: tuple[Tokenizer, dict[str, str]],
    *,
    generation: dict[str, Any] | None = None,
    also: dict[str, Any] | None = None,
) -> Path:
    """Write model and tokenizer to a directory.

    config: made with the vocabulary's size.  generation: generation_config.json, and none if it is None.
    also: keys put into config.json.
    """
    rust, names = tokenizer
    build(architecture, config(vocab_size=rust.get_vocab_size()), torch.float32).save_pretrained(directory)
    transformers.PreTrainedTokenizerFast(tokenizer_object=rust, **names).save_pretrained(directory)
    file = directory / "generation_config.json"
    file.unlink(missing_ok=True)
    if generation is not None:
        file.write_text(json.dumps(generation))
    if also:
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | also))
    return directory


# ------------------------------------------------------------------------------------------------------------ families


def bert(directory: Path, head: str, **more: Any) -> Path:
    def config(vocab_size: int) -> Any:
        sizes = {"hidden_size": 20, "num_hidden_layers": 2, "num_attention_heads": 5, "intermediate_size": 28}
        return transformers.BertConfig(vocab_size=vocab_size, max_position_embeddings=37, **sizes | more)

    return speaking(directory, f"Bert{head}", config, wordpiece())


def korean_albert(directory: Path) -> Path:
    """As albert-kor-base: one block that runs in every layer, and vocab.txt with whole syllables beside it."""
    words = [word for sentence in SENTENCES[3:] for word in re.findall(r"\w+", sentence)]
    vocabulary = list(dict.fromkeys([*WORDPIECE.values(), ".", *words]))
    config = transformers.AlbertConfig(
        vocab_size=len(vocabulary), embedding_size=12, hidden_size=20, num_hidden_layers=3, num_attention_heads=5,
        intermediate_size=28, max_position_embeddings=37,
    )  # fmt: skip
    build("AlbertForMaskedLM", config, torch.float32).save_pretrained(directory)
    (directory / "vocab.txt").write_text("".join(f"{word}\n" for word in vocabulary), encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": True, "strip_accents": False}))
    return directory


def gpt2(directory: Path, head: str = "LMHeadModel", *, positions: int = 241, **more: Any) -> Path:
    def config(vocab_size: int) -> Any:
        return transformers.GPT2Config(
            vocab_size=vocab_size, n_positions=positions, n_embd=20, n_layer=2, n_head=5, pad_token_id=0,
            bos_token_id=0, eos_token_id=0, **more.pop("config", {}),
        )  # fmt: skip

    return speaking(directory, f"GPT2{head}", config, byte_pairs(), **more)


def llama(directory: Path, **more: Any) -> Path:
    def config(vocab_size: int) -> Any:
        return transformers.LlamaConfig(
            vocab_size=vocab_size, hidden_size=24, intermediate_size=35, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=257, pad_token_id=0,
        )  # fmt: skip

    return speaking(
        directory, "LlamaForCausalLM", config, pieces("<unk>", "<s>", "</s>", frame="<s> $A"), **more
    )  # fmt: skip


def t5(directory: Path, **more: Any) -> Path:
    def config(vocab_size: int) -> Any:
        return transformers.T5Config(
            vocab_size=vocab_size, d_model=20, d_kv=7, d_ff=31, num_layers=2, num_heads=3, decoder_start_token_id=0,
        )  # fmt: skip

    return speaking(
        directory, "T5ForConditionalGeneration", config, pieces("<pad>", "</s>", "<unk>", frame="$A </s>"), **more
    )  # fmt: skip


def bart(directory: Path, head: str = "ForConditionalGeneration", **more: Any) -> Path:
    def config(vocab_size: int) -> Any:
        sides = {"layers": 2, "attention_heads": 5, "ffn_dim": 28}
        sizes = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in sides.items()}
        return transformers.BartConfig(vocab_size=vocab_size, d_model=20, max_position_embeddings=241, **sizes)

    return speaking(directory, f"Bart{head}", config, framed_byte_pairs(), **more)
