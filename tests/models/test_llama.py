"""LLaMA against transformers: every head, two unlike configurations, every rotary scaling, and trained weights."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from speaking_twins import llama
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from twins import Twin, assert_same, assert_saved, texts, widened

from regard.data.tokenizer import Tokenizer
from regard.models.initialization import build
from regard.models.loading import load
from regard.testing import assert_rule

GROUPED = {
    "vocab_size": 47,
    "hidden_size": 30,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
GROUPED |= {"head_dim": 10, "intermediate_size": 37, "max_position_embeddings": 23, "num_labels": 7, "pad_token_id": 0}
GROUPED |= {"tie_word_embeddings": True}
BIASED = {
    "vocab_size": 31,
    "hidden_size": 21,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
}
BIASED |= {
    "head_dim": 8,
    "intermediate_size": 17,
    "max_position_embeddings": 13,
    "hidden_act": "gelu_new",
    "pad_token_id": 0,
}
BIASED |= {"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-3, "rope_theta": 97.0}
CONFIGS = {"grouped heads, shared words": GROUPED, "biases, own word table, wide heads": BIASED}
HEADS = ["Model", "ForCausalLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"]

# Each with 13 positions trained on, or 5; head size 10, so five pairs.
SCALINGS = {
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 13, "beta_fast": 1.9, "beta_slow": 0.1},
    "yarn, not truncated": {"factor": 4.0, "original_max_position_embeddings": 13, "beta_fast": 1.9, "truncate": False},
    "yarn, mscale": {"factor": 4.0, "original_max_position_embeddings": 13, "mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn, attention_factor": {"factor": 4.0, "original_max_position_embeddings": 13, "attention_factor": 1.7},
    "llama3": {"factor": 8.0, "original_max_position_embeddings": 13, "low_freq_factor": 0.2, "high_freq_factor": 1.5},
    "longrope": {
        "factor": 3.0,
        "original_max_position_embeddings": 5,
        "short_factor": [1.0, 1.1, 1.3, 1.2, 1.7],
        "long_factor": [1.0, 1.5, 2.5, 3.5, 4.5],
    },
}


def twin_of(head: str, config: str, directory: Path) -> Twin:
    values = CONFIGS[config] | ({"num_labels": 2} if head == "ForQuestionAnswering" else {})
    return Twin("Llama" + head, LlamaConfig(**values), directory)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("head", HEADS)
def test_every_head_computes_what_transformers_computes(head, config, dtype, tmp_path):
    twin = twin_of(head, config, tmp_path)
    for side in ("none", "right", "left"):
        assert_same(twin, dtype, texts(31, side))


@pytest.mark.parametrize("head", HEADS)
def test_what_we_save_transformers_opens(head, tmp_path):
    twin = twin_of(head, "grouped heads, shared words", tmp_path / "theirs")
    assert_saved(twin, tmp_path / "ours", texts(31, "right"))


def test_model_built_from_scratch_is_saved_as_servers_open_it(tmp_path):
    """They choose the model by "architectures" and take model and tokenizer as transformers' Auto classes do."""
    tokenizer = Tokenizer.open(llama(tmp_path / "another"))
    sizes = {name: value for name, value in GROUPED.items() if name != "num_labels"}
    model = build("llama", **(sizes | {"vocab_size": tokenizer.size, "max_position_embeddings": 64})).eval()
    model.tokenizer = tokenizer
    model.save(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    batch = AutoTokenizer.from_pretrained(tmp_path / "out")("The cat sat", return_tensors="pt")
    assert torch.equal(batch.input_ids, model.tokenizer.batch(["The cat sat"]).input_ids)
    made = theirs.generate(**batch, max_new_tokens=7, do_sample=False)[0, batch.input_ids.shape[1] :]
    assert torch.equal(made, model.generate("The cat sat", max_new_tokens=7).ids)


def scaled(name: str) -> LlamaConfig:
    kind = name.split(",")[0]
    # Texts here have 17 tokens: more than the 13 of `dynamic`, whose frequencies change beyond them.
    values = GROUPED | {"max_position_embeddings": 13 if kind == "dynamic" else 52}
    return LlamaConfig(**values, rope_parameters={"rope_type": kind, "rope_theta": 53.0, **SCALINGS[name]})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", SCALINGS)
def test_every_rotary_scaling_computes_what_transformers_computes(name, dtype, tmp_path):
    twin = Twin("LlamaForCausalLM", scaled(name), tmp_path)
    for side in ("none", "left"):
        assert_same(twin, dtype, texts(31, side, length=17))


@pytest.mark.parametrize("name", SCALINGS)
def test_every_scaling_changes_the_result(name, tmp_path):
    """Else the test above would hold without them."""
    ids = texts(31, length=17)["input_ids"]
    made = {}
    for which in (name, "plain"):
        config = scaled(name)
        if which == "plain":
            config.rope_parameters = {"rope_type": "default", "rope_theta": 53.0}
            config.max_position_embeddings = 52
        made[which] = Twin("LlamaForCausalLM", config, tmp_path / which).ours(torch.float64)(ids).logits
    assert (made[name] - made["plain"]).abs().max() > 0.01


def test_longrope_is_short_up_to_the_original_length(tmp_path):
    twin = Twin("LlamaForCausalLM", scaled("longrope"), tmp_path)
    for length in (5, 6):
        assert_same(twin, torch.float64, texts(31, length=length))


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_frequencies_that_grow_with_the_text_grow_step_by_step_as_in_transformers(name, tmp_path):
    """There no step can be what one pass computes: keys stay turned as they were."""
    config = scaled(name)
    config.pad_token_id = config.eos_token_id = None
    twin, ids = Twin("LlamaForCausalLM", config, tmp_path), texts(31, length=3)["input_ids"]
    with widened():
        theirs = twin.truth.generate(ids, max_new_tokens=20, do_sample=False)[:, 3:]
    model = twin.ours(torch.float64)
    logits, state = model.begin(ids, None, length=23)
    for place in range(20):
        chosen = logits.argmax(-1)
        assert torch.equal(chosen, theirs[:, place])
        logits = model.step(state, chosen)


@pytest.mark.parametrize("name", ["default", *SCALINGS])
def test_the_truth_is_fp64_all_through(name, tmp_path):
    """What the tests above are judged by: frequencies, angles and norms that never were fp32."""
    config = LlamaConfig(**GROUPED) if name == "default" else scaled(name)
    twin = Twin("LlamaForCausalLM", config, tmp_path)
    truth, seen = twin.truth, []
    truth.model.rotary_emb.register_forward_hook(lambda module, args, made: seen.append(made[0]))
    truth.model.norm.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with widened():
        truth(texts(31, length=17)["input_ids"])
    assert {t.dtype for t in seen} == {torch.float64}
    assert not any(torch.equal(t, t.to(torch.float32).double()) for t in seen)
    frequencies = twin.ours(torch.float64).tower.rotary.frequencies(17, dtype=torch.float64)
    torch.testing.assert_close(truth.model.rotary_emb.inv_freq, frequencies, rtol=1e-14, atol=0)


# ------------------------------------------------------------------------------------------------------- checkpoints


def rewrite(directory: Path, **changes: object) -> Path:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return directory


def test_the_settings_of_transformers_4_give_the_same_model(tmp_path):
    ids = texts(31, length=17)["input_ids"]
    new = Twin("LlamaForCausalLM", scaled("llama3"), tmp_path).ours(torch.float32)(ids).logits
    old = {"type": "llama3", **SCALINGS["llama3"]}
    rewrite(tmp_path, rope_parameters=None, rope_theta=53.0, rope_scaling=old)
    assert torch.equal(load(tmp_path)(ids).logits, new)


def test_old_checkpoints_may_hold_their_frequencies(tmp_path):
    Twin("LlamaForCausalLM", LlamaConfig(**GROUPED), tmp_path)
    file = tmp_path / "model.safetensors"
    more = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(5) for i in range(3)}
    save_file(load_file(file) | more, file, metadata={"format": "pt"})
    assert load(tmp_path).task == "text-generation"


def test_the_body_can_be_read_from_a_checkpoint_with_a_head(tmp_path):
    for head in ("ForCausalLM", "ForQuestionAnswering"):
        whole = twin_of(head, "grouped heads, shared words", tmp_path / head).ours(torch.float32)
        body = load(tmp_path / head, task="feature-extraction")
        ids = texts(31)["input_ids"]
        assert torch.equal(body(ids).last_hidden_state, whole(ids).last_hidden_state)
        assert body(ids).logits is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_interleaved": True}, r"rope_interleaved.*True.*False"),
        ({"rope_parameters": {"rope_type": "mrope"}}, r"rope_type.*'mrope'"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor.*0.5.*1.0"),
        ({"hidden_act": "quick"}, "'quick'"),
        ({"num_key_value_heads": 4}, r"num_heads.*num_kv_heads.*6.*4"),
        ({"head_dim": 9}, "dim"),
        ({"head_dim": None, "num_attention_heads": 31}, r"head_dim.*1"),
        ({"quantization_config": {"bits": 4}}, r"LLaMA.*quantization_config"),
        ({"sliding_window": 5}, r"LLaMA.*sliding_window.*5"),
        ({"attention_bias": True}, r"model\.layers\.0\.self_attn\.k_proj\.bias"),
    ],
)
def test_settings_that_would_change_the_maths_are_refused(changes, message, tmp_path):
    Twin("LlamaForCausalLM", LlamaConfig(**GROUPED), tmp_path)
    rewrite(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def test_each_part_of_a_joined_matrix_must_have_its_own_shape(tmp_path):
    """Though as many rows in all, and as many numbers, would fit."""
    Twin("LlamaForCausalLM", LlamaConfig(**GROUPED), tmp_path)
    file, name = tmp_path / "model.safetensors", "model.layers.1.self_attn.{}_proj.weight"
    tensors = load_file(file)
    tensors |= {name.format("k"): torch.ones(19, 30), name.format("v"): torch.ones(21, 30)}
    save_file(tensors, file, metadata={"format": "pt"})
    message = r"2.*k_proj\.weight.*\(19, 30\).*\(20, 30\).*v_proj\.weight.*\(21, 30\)"
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def test_what_converters_leave_behind_is_let_pass(tmp_path):
    Twin("LlamaForCausalLM", LlamaConfig(**GROUPED), tmp_path)
    rewrite(tmp_path, is_llama_config=True, rope_interleaved=False, **{"transformers.js_config": {"dtype": "q4"}})
    assert load(tmp_path).task == "text-generation"


@pytest.mark.parametrize(("name", "most"), [("linear", 3 * 52), ("dynamic", 26), ("yarn", 52), ("llama3", 52)])
def test_a_text_longer_than_the_positions_is_refused(name, most, tmp_path):
    model = Twin("LlamaForCausalLM", scaled(name), tmp_path).ours(torch.float32)
    assert model(torch.ones(1, most, dtype=torch.int64)).logits.shape == (1, most, 47)
    with pytest.raises(ValueError, match=rf"{most + 1}.*{most}"):
        model(torch.ones(1, most + 1, dtype=torch.int64))


# --------------------------------------------------------------------------------------------------- trained weights


def test_the_trained_stories_model_computes_what_transformers_computes(data):
    folder = data / "weights_stories260k"
    if not folder.is_dir():
        pytest.skip("needs weights_stories260k in the shared data")
    ids = torch.randint(3, 512, (5, 101), generator=torch.Generator().manual_seed(7))
    theirs = LlamaForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad(), widened():
        truth = LlamaForCausalLM(theirs.config).eval()
        truth.load_state_dict(theirs.state_dict())
        expected = truth(ids).logits
    with torch.no_grad():
        assert_rule(load(folder)(ids).logits, theirs(ids).logits, expected)


def test_the_trained_stories_model_tells_a_story(data):
    folder = data / "weights_stories260k"
    if not folder.is_dir():
        pytest.skip("needs weights_stories260k in the shared data")
    pieces = _pieces(folder / "tok512.bin")
    model = load(folder)
    logits, state = model.begin(torch.tensor([[1]]), None, length=64)
    told = []
    for _ in range(60):
        told.append(int(logits.argmax()))
        logits = model.step(state, torch.tensor(told[-1:]))
    text = b"".join(pieces[token] for token in told).decode().strip()
    assert text.startswith(
        "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."
    )


def _pieces(path: Path) -> list[bytes]:
    """llama2.c's vocabulary: the longest length, then of each piece its score, its length and its bytes."""
    raw, at, pieces = path.read_bytes(), 4, []
    while at < len(raw):
        length = int.from_bytes(raw[at + 4 : at + 8], "little")
        pieces.append(raw[at + 8 : at + 8 + length])
        at += 8 + length
    return pieces
