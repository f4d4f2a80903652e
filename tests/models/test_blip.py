import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoTokenizer, BertTokenizer, BlipConfig
from twins import Twin, assert_same, assert_saved, change, pictures, texts, their_names, widened

import regard
from regard.data.tokenizer import Tokenizer
from regard.generation.loop import generate
from regard.layouts import Frame
from regard.models.dual_encoder import DualEncoder
from regard.models.families.blip import FAMILY
from regard.models.family import Config, empty
from regard.models.loading import load
from regard.models.model import Model
from regard.models.outputs import ModelOutput
from regard.testing import assert_rule

# 3 × 3 patches; 7 × 7 with pixels left over at the edges. Towers of unlike width, but where an answer forbids it.
SMALL = {"hidden_size": 28, "num_hidden_layers": 3, "num_attention_heads": 7, "intermediate_size": 29}
SMALL |= {"image_size": 12, "patch_size": 4}
SMALL_TEXT = {"vocab_size": 47, "hidden_size": 20, "num_hidden_layers": 2, "num_attention_heads": 5}
SMALL_TEXT |= {"intermediate_size": 23, "max_position_embeddings": 19}
OTHER = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 17}
OTHER |= {"image_size": 37, "patch_size": 5, "hidden_act": "gelu_new", "layer_norm_eps": 1e-3}
OTHER_TEXT = {"vocab_size": 31, "hidden_size": 18, "num_hidden_layers": 3, "num_attention_heads": 2}
OTHER_TEXT |= {"intermediate_size": 13, "max_position_embeddings": 11, "hidden_act": "relu", "layer_norm_eps": 1e-4}
CONFIGS = {"small": (SMALL, SMALL_TEXT), "other functions": (OTHER, OTHER_TEXT)}
SIZES = {"small": 12, "other functions": 37}
TOKENS = {"bos_token_id": 1, "sep_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}  # a text ends with sep
HEADS = ["Model", "ForConditionalGeneration", "ForQuestionAnswering", "ForImageTextRetrieval"]


def of_theirs(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """What each tower makes: transformers hands out the layers of the picture's alone, and no logits of answers."""
    made: dict[str, Any] = {}
    hooks = [
        part.register_forward_hook(lambda _, __, out, name=name: made.__setitem__(name, out))
        for name, part in model.named_children()
    ]
    out = model(**inputs, output_hidden_states=True)
    for hook in hooks:
        hook.remove()
    question = made.get("text_encoder")
    text = made.get("text_decoder", made.get("text_model", question))
    memory = made["vision_model"] if question in (None, text) else question
    named = {"logits": out.get("itm_score", out.get("logits_per_image", text.get("logits")))}
    named |= {"pooled": text.get("pooler_output"), "text": out.get("text_embeds")}
    named |= {"picture": out.get("image_embeds") if "text_model" in made else None}
    named |= {f"layer {i}": t for i, t in enumerate(text.hidden_states)}
    named |= {f"memory layer {i}": t for i, t in enumerate(memory.hidden_states)}
    return {n: t for n, t in named.items() if t is not None}


def twin_of(head: str, config: str, directory: Path, *, kind: type[Twin] = Twin, **text: Any) -> Twin:
    """text: what is to be otherwise in text_config."""
    vision, values = CONFIGS[config]
    if head == "ForQuestionAnswering":
        values = values | {name: vision[name] for name in ("hidden_size", "num_attention_heads")}
    both = {"vision_config": vision, "text_config": {**values, **TOKENS, **text}}
    config_ = BlipConfig(**both, image_text_hidden_size=11, projection_dim=13, logit_scale_init_value=0.7)
    return kind("Blip" + head, config_, directory, read=of_theirs)


def inputs(head: str, config: str, side: str = "none") -> dict[str, Tensor]:
    """Thirteen texts, a picture for each, but where all are compared with all; answers, padded or not, to questions."""
    given = texts(31, "none" if head == "ForQuestionAnswering" else side)
    given |= pictures(SIZES[config], SIZES[config], 5 if head == "Model" else 13)
    given.pop("position_ids", None)
    if head == "ForQuestionAnswering":
        answers = texts(31, side, length=7)
        given["decoder_input_ids"] = answers["input_ids"].flip(0)
        if side != "none":
            given["decoder_attention_mask"] = answers["attention_mask"].flip(0)
    return given


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("head", HEADS)
def test_every_head_computes_what_transformers_computes(head, config, dtype, tmp_path):
    twin = twin_of(head, config, tmp_path)
    for side in ("none", "right"):
        given = inputs(head, config, side)
        assert_same(twin, dtype, given, real=given.get("decoder_attention_mask", given.get("attention_mask")))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_captions_padded_on_the_left_are_counted_from_their_first_token(dtype, tmp_path):
    twin = twin_of("ForConditionalGeneration", "small", tmp_path)
    positions = texts(31, "left")["position_ids"]
    assert_same(twin, dtype, inputs("ForConditionalGeneration", "small", "left"), {"position_ids": positions})


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("size", [(20, 24), (9, 31)])
@pytest.mark.parametrize("head", HEADS)
def test_pictures_of_other_sizes_are_seen_as_transformers_sees_them(head, size, dtype, tmp_path):
    given = inputs(head, "small") | pictures(*size, 5 if head == "Model" else 13)
    assert_same(twin_of(head, "small", tmp_path), dtype, given, {"interpolate_pos_encoding": True})


class Contrast(Twin):
    """Of a matcher: vectors of each alone, compared."""

    def ours(self, dtype: torch.dtype, **more: Any) -> Model:
        model = super().ours(dtype, **more)

        def forward(
            input_ids: Tensor,
            attention_mask: Tensor | None = None,
            *,
            pixel_values: Tensor,
            output_hidden_states: bool,
        ) -> ModelOutput:
            text = model.encode_text(input_ids, attention_mask)
            return ModelOutput(logits=model.encode_image(pixel_values) @ text.T, last_hidden_state=text)

        model.forward = forward
        return model


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("config", CONFIGS)
def test_a_matcher_compares_vectors_as_transformers_does(config, dtype, tmp_path):
    twin = twin_of("ForImageTextRetrieval", config, tmp_path, kind=Contrast)
    twin.read = lambda model, given: {"logits": model(**given, use_itm_head=False).itm_score}
    given = inputs("ForImageTextRetrieval", config, "right")
    assert_same(twin, dtype, {**given, "pixel_values": given["pixel_values"][:5]})  # as many of either as one likes


def test_vectors_have_length_1(tmp_path):
    for head in ("Model", "ForImageTextRetrieval"):
        model = twin_of(head, "small", tmp_path / head).ours(torch.float64)
        given = inputs(head, "small")
        text, picture = model.encode_text(given["input_ids"]), model.encode_image(given["pixel_values"])
        assert (text.shape[1], picture.shape[1]) == ((13, 13) if head == "Model" else (11, 11))
        for vectors in (text, picture):
            torch.testing.assert_close(vectors.norm(dim=1), torch.ones(len(vectors)).double(), rtol=0, atol=1e-14)


@pytest.mark.parametrize("head", HEADS)
def test_what_we_save_transformers_opens(head, tmp_path):
    twin = twin_of(head, "small", tmp_path / "theirs")
    assert_saved(twin, tmp_path / "ours", inputs(head, "small", "right"))


# -------------------------------------------------------------------------------------------------------------- padding


def test_nobody_looks_at_the_padding_of_a_question(tmp_path):
    """transformers drops the mask before the answer's cross-attention: there a question is read without padding."""
    twin = twin_of("ForQuestionAnswering", "small", tmp_path)
    given = inputs("ForQuestionAnswering", "small")
    for side in ("right", "left"):
        given |= {name: t for name, t in texts(31, side).items() if name != "position_ids"}
        ours = twin.ours(torch.float64)(**given).logits
        for row, length in enumerate(given["attention_mask"].sum(1).tolist()):
            one = {name: t[row : row + 1] for name, t in given.items() if name != "attention_mask"}
            one["input_ids"] = one["input_ids"][:, :length] if side == "right" else one["input_ids"][:, -length:]
            with widened():
                alone = of_theirs(twin.truth, their_names(one))["logits"][0]
            torch.testing.assert_close(ours[row], alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("head", HEADS)
def test_the_side_of_padding_changes_nothing(head, tmp_path):
    model = twin_of(head, "small", tmp_path).ours(torch.float64)
    texts_of = {"right": texts(31, "right"), "left": texts(31, "left")}
    answers = {side: texts(31, side, length=7) for side in texts_of}
    made = {}
    for side, given in texts_of.items():
        ids = torch.zeros_like(given["input_ids"]).masked_scatter(
            given["attention_mask"], texts_of["right"]["input_ids"][texts_of["right"]["attention_mask"]]
        )
        call = {
            "input_ids": ids,
            "attention_mask": given["attention_mask"],
            "pixel_values": pictures(12, 12, 13)["pixel_values"],
        }
        real = given["attention_mask"]
        if head == "ForQuestionAnswering":
            real = answers[side]["attention_mask"]
            read = answers["right"]["input_ids"][answers["right"]["attention_mask"]]
            call |= {
                "decoder_input_ids": torch.zeros_like(answers[side]["input_ids"]).masked_scatter(real, read),
                "decoder_attention_mask": real,
            }
        output = model(**call)
        logits = output.logits_per_image if head == "Model" else output.logits
        made[side] = logits[real] if logits.shape[:2] == real.shape and logits.ndim == 3 else logits
    torch.testing.assert_close(made["left"], made["right"], rtol=0, atol=1e-13)


# -------------------------------------------------------------------------------------------------------------- writing


def test_captions_are_those_of_transformers(tmp_path):
    twin = twin_of("ForConditionalGeneration", "small", tmp_path, max_position_embeddings=40)
    model, theirs = twin.ours(torch.float64), twin.baseline(torch.float64)
    pixels = pictures(12, 12, 13)["pixel_values"]
    started = torch.full((13, 1), model.start)
    for beams in (1, 3):
        made = generate(
            model.read_image(pixels),
            started,
            max_new_tokens=29,
            eos_token_ids=model.end,
            pad_token_id=model.pad,
            num_beams=beams,
        )
        wanted = theirs.generate(pixels, num_beams=beams, max_new_tokens=29, do_sample=False)
        assert wanted[:, 0].tolist() == [model.start] * 13
        assert torch.equal(wanted[:, 1:], made.ids)
        assert {"eos", "length"} >= set(made.reasons)


def test_captions_go_on_from_prompts_as_those_of_transformers(tmp_path):
    """transformers cuts [SEP] off a row's end, which is padding in all but the longest: it reads each one alone."""
    twin = twin_of("ForConditionalGeneration", "small", tmp_path, max_position_embeddings=40)
    model, theirs = twin.ours(torch.float64), twin.baseline(torch.float64)
    pixels, framed = pictures(12, 12, 7)["pixel_values"], {n: t[3:10] for n, t in texts(31, "right").items()}
    prompts = model.prompt(framed["input_ids"], framed["attention_mask"])
    for beams in (1, 3):
        made = generate(
            model.read_image(pixels),
            *prompts,
            max_new_tokens=17,
            eos_token_ids=model.end,
            pad_token_id=model.pad,
            num_beams=beams,
        )
        for row, (ids, mask) in enumerate(zip(framed["input_ids"], framed["attention_mask"], strict=True)):
            wanted = theirs.generate(
                pixels[row : row + 1], ids[mask][None].clone(), num_beams=beams, max_new_tokens=17, do_sample=False
            )[0, int(mask.sum()) - 1 :]
            assert wanted.tolist() == made.ids[row, : len(wanted)].tolist()
            assert made.lengths[row] == len(wanted)


def test_answers_are_those_of_transformers(tmp_path):
    """transformers lets an answer look at the padding of its question: it reads each one alone."""
    twin = twin_of("ForQuestionAnswering", "small", tmp_path, max_position_embeddings=40)
    model, theirs = twin.ours(torch.float64), twin.baseline(torch.float64)
    pixels, asked = pictures(12, 12, 7)["pixel_values"], {n: t[:7] for n, t in texts(31, "right").items()}
    started = torch.full((7, 1), model.start)
    for beams in (1, 3):
        reading = model.read_image(pixels, asked["input_ids"], asked["attention_mask"])
        made = generate(
            reading, started, max_new_tokens=17, eos_token_ids=model.end, pad_token_id=model.pad, num_beams=beams
        )
        for row, (ids, mask) in enumerate(zip(asked["input_ids"], asked["attention_mask"], strict=True)):
            wanted = theirs.generate(
                ids[mask][None], pixels[row : row + 1], num_beams=beams, max_new_tokens=17, do_sample=False
            )[0, 1:]
            assert wanted.tolist() == made.ids[row, : len(wanted)].tolist()
            assert made.lengths[row] == len(wanted)


@pytest.mark.parametrize("head", ["ForConditionalGeneration", "ForQuestionAnswering"])
def test_a_step_gives_what_the_whole_text_gives(head, tmp_path):
    model = twin_of(head, "small", tmp_path).ours(torch.float64)
    given = inputs(head, "small")
    written = given.pop("decoder_input_ids", given["input_ids"])
    whole = model(**given, decoder_input_ids=written) if head == "ForQuestionAnswering" else model(**given)
    pixels = given.pop("pixel_values")
    reading = model.read_image(pixels, **given) if head == "ForQuestionAnswering" else model.read_image(pixels)
    logits, state = reading.begin(written[:, :3], None, length=written.shape[1])
    for n in range(3, written.shape[1]):
        torch.testing.assert_close(logits, whole.logits[:, n - 1], rtol=0, atol=1e-13)
        logits = reading.step(state, written[:, n])
    with pytest.raises(ValueError, match="room"):
        reading.step(state, written[:, 0])


@torch.no_grad()
def test_steps_under_autocast_are_one_pass(tmp_path):
    model = twin_of("ForConditionalGeneration", "small", tmp_path).ours(torch.float32)
    given = inputs("ForConditionalGeneration", "small")
    ids, pixels = given["input_ids"], given["pixel_values"].float()
    with torch.autocast("cpu", torch.bfloat16):
        baseline, reading = model(ids, pixel_values=pixels).logits[:, 2:], model.read_image(pixels)
        logits, state = reading.begin(ids[:, :3], None, length=ids.shape[1])
        made = [logits] + [reading.step(state, column) for column in ids[:, 3:].T]
    assert_rule(torch.stack(made, 1), baseline, model.double()(ids, pixel_values=pixels.double()).logits[:, 2:])


def test_beams_that_change_places_keep_their_picture(tmp_path):
    model = twin_of("ForConditionalGeneration", "small", tmp_path).ours(torch.float64)
    pixels = pictures(12, 12, 3)["pixel_values"]
    _, state = model.read_image(pixels).begin(torch.full((3, 1), model.start), None, length=5)
    keys = state.memory[1].k
    for rows, copies in (([0, 0, 1, 1, 2, 2], True), ([1, 0, 2, 3, 5, 4], False), ([4, 1, 1, 0, 2, 2], True)):
        before = state.memory[0].k
        state.keep(torch.tensor(rows))
        assert (state.memory[0].k is not before) == copies
    assert torch.equal(state.memory[1].k, keys[[2, 0, 0, 0, 1, 1]])


def test_a_prompt_begins_with_the_start_token_and_is_left_open(tmp_path):
    model = twin_of("ForConditionalGeneration", "small", tmp_path).ours(torch.float32)
    ids = torch.tensor([[9, 5, 6, 7, 2], [9, 8, 2, 0, 0], [0, 0, 9, 4, 2], [0, 9, 2, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [0, 1, 1, 0, 0]]).bool()
    begun, real = model.prompt(ids, mask)
    assert begun.tolist() == [[1, 5, 6, 7], [0, 0, 1, 8], [0, 0, 1, 4], [0, 0, 0, 1]]
    assert real.tolist() == [[True] * 4, [False, False, True, True], [False, False, True, True], [False] * 3 + [True]]
    begun, real = model.prompt(ids[:1])
    assert begun.tolist() == [[1, 5, 6, 7]]
    assert real is None
    assert ids[0, 0] == 9  # given ids stay as they are
    with pytest.raises(ValueError, match=r"text.*1"):
        model.prompt(ids[:2], torch.tensor([[True] * 5, [True] + [False] * 4]))


# ---------------------------------------------------------------------------------------------------- what is looked at


def call(model: Model, given: dict[str, Tensor]) -> set[str]:
    """The names of the attentions that a call makes, each as long as the model's layouts say."""
    frame = Frame.whole(60, 80).resized(*given["pixel_values"].shape[-2:])
    lengths = [given[name].shape[1] for name in ("input_ids", "decoder_input_ids") if name in given]
    layouts = model.layouts(frame) if isinstance(model, DualEncoder) else model.layouts(frame, *lengths)
    with regard.watch(model) as seen:
        model(**given)
    for name, sides in layouts.items():
        assert seen[name].lse.shape[-1] == sides.queries.shape[1]
        assert seen[name].received.shape[-1] == sides.keys.shape[1]
    assert set(layouts) <= set(seen.names)
    return set(seen.names) - set(layouts)


@pytest.mark.parametrize("head", HEADS)
def test_layouts_fit_what_is_watched(head, tmp_path):
    model = twin_of(head, "small", tmp_path).ours(torch.float32)
    given = inputs(head, "small") | pictures(21, 17, 13)
    beyond = call(model, given)  # a text alone lies nowhere, and has no layout where it looks at no picture
    assert beyond == ({f"text.blocks.{i}.attention" for i in range(2)} if head == "Model" else set())


def test_words_look_at_patches_where_they_lie(tmp_path):
    frame = Frame.whole(60, 80).resized(21, 17)
    model = twin_of("ForQuestionAnswering", "small", tmp_path).ours(torch.float32)
    layouts = model.layouts(frame, 11, 7)
    assert len(layouts) == 3 + 2 * 2 + 2 * 2
    looks, reads = layouts["encoder.blocks.1.cross"], layouts["decoder.blocks.0.cross"]
    assert (str(looks.queries), str(looks.keys)) == ("Layout(11 text)", "Layout(1 cls, 20 patches of image 0)")
    assert looks.frames == (frame,)
    assert looks.keys.box[0, 1 + 4 + 1].tolist() == [4, 4, 8, 8]  # of 5 rows of 4 patches
    assert (str(reads.queries), str(reads.keys)) == ("Layout(7 text)", "Layout(11 text)")
    assert str(layouts["decoder.blocks.1.attention"].keys) == "Layout(7 text)"
    assert layouts["vision.blocks.2.attention"].queries == looks.keys


def test_a_text_alone_looks_at_no_picture(tmp_path):
    model = twin_of("ForImageTextRetrieval", "small", tmp_path).ours(torch.float32)
    with regard.watch(model) as seen:
        model.encode_text(texts(31)["input_ids"])
    assert seen.names == ["encoder.blocks.0.attention", "encoder.blocks.1.attention"]


# ---------------------------------------------------------------------------------------------------------- checkpoints


def test_settings_of_a_real_checkpoint_are_understood():
    """Of Salesforce/blip-image-captioning-base, saved anew: what is not said is as transformers has it."""
    text = {"initializer_factor": 1.0, "model_type": "blip_text_model", "num_attention_heads": 12}
    vision = {"dropout": 0.0, "initializer_range": 0.02, "model_type": "blip_vision_model", "num_channels": 3}
    values = {"model_type": "blip", "text_config": text, "vision_config": vision, "label_smoothing": 0.0}
    values |= {"image_text_hidden_size": 256, "logit_scale_init_value": 2.6592, "projection_dim": 512}
    for task in FAMILY.tasks:
        settings = Config(values)
        model = empty(FAMILY, settings, task)
        settings.check_unused("BLIP", harmless=FAMILY.harmless)
        assert model.vision.embed.positions.shape == (577, 768)
        assert len(model.vision.blocks) == 12
        tower = model.get_submodule(
            {"zero-shot-image-classification": "text", "image-text-matching": "encoder"}.get(task, "decoder")
        )
        assert (tower.embed.tokens.num_embeddings, tower.embed.max_positions, len(tower.blocks)) == (30524, 512, 12)
        assert (tower.blocks[0].attention.num_heads, tower.blocks[0].cross.num_heads) == (12, 12)
        if task in ("image-to-text", "visual-question-answering"):
            assert (model.start, model.end, model.pad) == (30522, 102, 0)


def test_defaults_are_those_of_transformers():
    theirs = BlipConfig()
    model = empty(FAMILY, Config({"model_type": "blip"}), "image-to-text")
    seen, read = model.vision.blocks[0], model.decoder.blocks[0]
    assert seen.attention.num_heads == theirs.vision_config.num_attention_heads
    assert read.attention.num_heads == theirs.text_config.num_attention_heads
    assert seen.attention_norm.eps == theirs.vision_config.layer_norm_eps
    assert read.cross_norm.eps == theirs.text_config.layer_norm_eps
    assert (seen.feed_forward.w_in.out_features, read.feed_forward.w_in.out_features) == (3072, 3072)
    tokens = theirs.text_config.bos_token_id, theirs.text_config.sep_token_id, theirs.text_config.pad_token_id
    assert (model.start, model.end, model.pad) == tokens
    whole = {
        "zero-shot-image-classification": theirs.projection_dim,
        "image-text-matching": theirs.image_text_hidden_size,
    }
    for task, e in whole.items():
        assert empty(FAMILY, Config({"model_type": "blip"}), task).head.text.out_features == e


@pytest.mark.parametrize(
    ("where", "key", "value", "message"),
    [
        ("text_config", "is_decoder", False, r"text_config.*is_decoder.*False.*True"),
        ("text_config", "tie_word_embeddings", False, r"text_config.*tie_word_embeddings.*False.*True"),
        (None, "tie_word_embeddings", False, r"config.json.*tie_word_embeddings.*False.*True"),
        ("vision_config", "num_channels", 1, r"vision_config.*num_channels.*1.*3"),
        ("vision_config", "qkv_bias", False, r"vision_config.*BLIP.*qkv_bias.*False"),
        ("text_config", "position_embedding_type", "relative", r"text_config.*BLIP"),
        ("text_config", "hidden_act", "mish", "'mish'"),
        ("vision_config", "num_attention_heads", 3, r"d_model.*28.*3"),
    ],
)
def test_a_setting_that_is_not_understood_is_refused(where, key, value, message, tmp_path):
    twin = twin_of("ForConditionalGeneration", "small", tmp_path)
    held = json.loads((tmp_path / "config.json").read_text())
    change(tmp_path, **({key: value} if where is None else {where: held[where] | {key: value}}))
    with pytest.raises(ValueError, match=message):
        twin.ours(torch.float32)


def test_answers_need_towers_of_one_width(tmp_path):
    twin = twin_of("ForConditionalGeneration", "small", tmp_path)
    with pytest.raises(ValueError, match=r"hidden_size.*vision_config.*text_config.*28.*20"):
        twin.ours(torch.float32, task="visual-question-answering")


def test_a_second_table_of_words_must_be_the_first(tmp_path):
    twin = twin_of("ForConditionalGeneration", "small", tmp_path)
    path, words = tmp_path / "model.safetensors", "text_decoder.cls.predictions.decoder.weight"
    tensors = load_file(path)
    tensors[words] = tensors["text_decoder.bert.embeddings.word_embeddings.weight"].clone()
    tensors[words.replace("weight", "bias")] = tensors["text_decoder.cls.predictions.bias"].clone()
    tensors["text_decoder.bert.embeddings.position_ids"] = torch.arange(19)[None]  # as older versions wrote it
    save_file(tensors, path)
    twin.ours(torch.float32)
    tensors[words][3, 1] += 1
    save_file(tensors, path)
    with pytest.raises(ValueError, match=words):
        twin.ours(torch.float32)


def test_dropouts_are_where_blip_has_them(tmp_path):
    lost = {"hidden_dropout_prob": 0.11, "attention_probs_dropout_prob": 0.12}
    twin_of("ForConditionalGeneration", "small", tmp_path, **lost)
    held = json.loads((tmp_path / "config.json").read_text())
    model = load(change(tmp_path, vision_config=held["vision_config"] | {"attention_dropout": 0.13}))
    block, seen = model.decoder.blocks[1], model.vision.blocks[2]
    assert (model.decoder.embed.dropout.p, block.dropout.p, block.feed_forward.dropout.p) == (0.11, 0.11, 0.0)
    assert (block.attention.dropout, block.cross.dropout, seen.attention.dropout, seen.dropout.p) == (
        0.12,
        0.12,
        0.13,
        0,
    )


# ---------------------------------------------------------------------------------------------------------- wrong input

IDS, PIXELS = torch.full((2, 3), 5), torch.zeros(2, 3, 12, 12)


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> list[Model]:
    """Models that take a text and a picture."""
    heads = "ForConditionalGeneration", "ForImageTextRetrieval"
    return [twin_of(head, "small", tmp_path_factory.mktemp(head)).ours(torch.float32) for head in heads]


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        ({"input_ids": [[5]]}, TypeError, "input_ids"),
        ({"input_ids": torch.full((2, 20), 5)}, ValueError, r"20.*19"),
        ({"input_ids": torch.full((2, 3), 47)}, ValueError, r"id.*47"),
        ({"attention_mask": torch.ones(2, 3)}, ValueError, r"mask.*\(2, 3\).*torch.float32"),
        ({"pixel_values": None}, TypeError, r"pixel_values.*\(B, 3, H, W\).*NoneType"),
        ({"pixel_values": torch.zeros(2, 1, 12, 12)}, ValueError, r"pixel_values.*\(B, 3, H, W\)"),
        ({"pixel_values": torch.zeros(2, 3, 3, 12)}, ValueError, "4 × 4"),
        ({"pixel_values": torch.zeros(1, 3, 12, 12)}, ValueError, r"2.*1"),
    ],
)
def test_wrong_input_is_refused(readers, given, kind, said):
    for model in readers:
        with pytest.raises(kind, match=said):
            model(**{"input_ids": IDS, "pixel_values": PIXELS, **given})


def test_wrong_questions_and_answers_are_refused(tmp_path):
    model = twin_of("ForQuestionAnswering", "small", tmp_path).ours(torch.float32)
    with pytest.raises(ValueError, match=r"mask.*\(2, 3\)"):
        model(IDS, pixel_values=PIXELS, decoder_input_ids=IDS, decoder_attention_mask=torch.ones(2, 4).bool())
    with pytest.raises(ValueError, match=r"id.*-1.*47"):
        model(IDS, pixel_values=PIXELS, decoder_input_ids=-IDS // IDS)
    with pytest.raises(ValueError, match=r"2.*1"):
        model.read_image(PIXELS[:1], IDS)
    reading = model.read_image(PIXELS, IDS)
    with pytest.raises(ValueError, match=r"20.*19"):
        reading.begin(IDS[:, :1], None, length=20)


# ------------------------------------------------------------------------------------------------------------ tokenizer


def test_texts_are_cut_as_transformers_cuts_them(tmp_path):
    """BLIP declares BERT's tokenizer, or nothing but itself; its [DEC] is a row of the table beyond the vocabulary."""
    model = twin_of("ForConditionalGeneration", "small", tmp_path).ours(torch.float32)
    said = ["[PAD]", "[UNK]", "[SEP]", "[CLS]", "[MASK]", "a", "photo", "of", "##s", "cat", "!", "A"]
    (tmp_path / "vocab.txt").write_text("\n".join(said), encoding="utf-8")
    asked = ["A photo of cats!", "Cat", "고양이", ""]
    for declared in (True, False):  # without, transformers takes BERT's switches for granted, whatever the file says
        BertTokenizer(str(tmp_path / "vocab.txt"), do_lower_case=False).save_pretrained(tmp_path)
        if not declared:
            (tmp_path / "tokenizer_config.json").unlink()
        theirs = AutoTokenizer.from_pretrained(tmp_path)(asked)["input_ids"]
        assert [Tokenizer.open(tmp_path).encode(text).ids for text in asked] == theirs
    batch = model.tokenizer.batch(asked[:2])
    assert model.prompt(batch.input_ids, batch.attention_mask)[0].tolist() == [
        [1, 5, 6, 7, 9, 8, 10],
        [0, 0, 0, 0, 0, 1, 9],
    ]
