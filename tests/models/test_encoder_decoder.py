import pytest
import torch
from torch import Tensor

from regard.models.encoder_decoder import EncoderDecoder, shift_right
from regard.models.family import Config, family_of
from regard.models.model import Model
from regard.nn.attention import MultiHeadAttention
from regard.testing import assert_rule

TWO = {"vocab_size": 31, "d_model": 12, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 2}
TWO |= {"decoder_attention_heads": 3, "encoder_ffn_dim": 17, "decoder_ffn_dim": 13, "decoder_start_token_id": 1}
T5 = {"vocab_size": 31, "d_model": 12, "d_kv": 5, "d_ff": 17, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 2}
T5 |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 5, "decoder_start_token_id": 1}
FAMILIES = {
    "bart": TWO | {"max_position_embeddings": 13},
    "marian": TWO | {"scale_embedding": True},
    "t5": T5,
    "t5, own word table": T5 | {"tie_word_embeddings": False, "feed_forward_proj": "gated-gelu"},
    "transformer": TWO,
}


def made(family: str, task: str = "text2text-generation") -> Model:
    settings = Config({"model_type": family.split(",")[0], **FAMILIES[family]})
    kind = family_of(settings)
    model = kind.build(settings, task).double().eval()
    model.family, model.task = kind, task
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape))
    return model


@pytest.fixture(params=FAMILIES)
def model(request) -> Model:
    return made(request.param)


def texts(count: int, length: int, side: str) -> tuple[Tensor, Tensor]:
    ids, place = torch.randint(2, 31, (count, length)), torch.arange(length)
    lengths = length - torch.arange(count)[:, None] % length
    mask = place < lengths if side == "right" else place >= length - lengths
    return ids.where(mask, 0), mask


# ---------------------------------------------------------------------------------------------- token by token


@pytest.mark.parametrize("side", ["right", "left"])
def test_token_by_token_equals_one_pass(model, side):
    ids, mask = texts(3, 11, side)
    target = shift_right(torch.randint(2, 31, (3, 7)), model.start)
    whole = model(ids, mask, decoder_input_ids=target).logits
    reading = model.read(ids, mask)
    logits, state = reading.begin(target[:, :2], None, length=7)
    steps = [logits] + [reading.step(state, target[:, i]) for i in range(2, 7)]
    torch.testing.assert_close(torch.stack(steps, 1), whole[:, 1:], rtol=0, atol=1e-12)
    assert len(state) == 7


@torch.no_grad()
def test_token_by_token_is_one_pass_under_autocast(model):
    ids, mask = texts(13, 11, "left")
    target = shift_right(torch.randint(2, 31, (13, 7)), model.start)
    truth = model(ids, mask, decoder_input_ids=target).logits
    model.float()
    with torch.autocast("cpu", torch.bfloat16):
        whole = model(ids, mask, decoder_input_ids=target).logits
        reading = model.read(ids, mask)
        logits, state = reading.begin(target[:, :2], None, length=7)
        steps = [logits] + [reading.step(state, target[:, i]) for i in range(2, 7)]
    assert_rule(torch.stack(steps, 1), whole[:, 1:], truth[:, 1:])


def test_start_tokens_padded_on_the_left_count_for_nothing(model):
    ids, mask = texts(3, 11, "right")
    start, seen = texts(3, 5, "left")
    more = torch.randint(2, 31, (3, 2))
    reading = model.read(ids, mask)
    logits, state = reading.begin(start, seen, length=7)
    steps = [logits] + [reading.step(state, more[:, i]) for i in range(2)]
    for row in range(3):
        alone = torch.cat([start[row, seen[row]], more[row]])[None]
        whole = model(ids[row, mask[row]][None], decoder_input_ids=alone).logits[0, -3:]
        torch.testing.assert_close(torch.stack([step[row] for step in steps]), whole, rtol=0, atol=1e-12)


def test_keys_of_the_memory_are_made_once(model, monkeypatch):
    calls = []
    keys = MultiHeadAttention.keys
    monkeypatch.setattr(MultiHeadAttention, "keys", lambda self, *x: calls.append(self) or keys(self, *x))
    ids, mask = texts(3, 11, "right")
    reading = model.read(ids, mask)
    _, state = reading.begin(torch.full((3, 1), model.start), None, length=4)
    for _ in range(3):
        reading.step(state, torch.tensor([5, 6, 7]))
    assert calls == [block.cross for block in model.decoder.blocks]


def test_rows_kept_go_on_as_they_would_have(model):
    ids, mask = texts(3, 11, "left")
    start = torch.tensor([[1, 5], [1, 6], [1, 7]])
    reading = model.read(ids, mask)
    _, state = reading.begin(start, None, length=3)
    rows, more = torch.tensor([2, 0, 0, 1]), torch.tensor([8, 9, 10, 11])
    state.keep(rows)
    found = reading.step(state, more)
    whole = model(ids[rows], mask[rows], decoder_input_ids=torch.cat([start[rows], more[:, None]], 1)).logits[:, -1]
    torch.testing.assert_close(found, whole, rtol=0, atol=1e-12)


@torch.no_grad()
def test_what_is_read_is_what_the_encoder_gives(model):
    ids, mask = texts(3, 11, "right")
    result = model(ids, mask, decoder_input_ids=ids[:, :5], output_hidden_states=True)
    assert torch.equal(model.read(ids, mask).encoder_hidden_states, model.encode(ids, mask))
    assert torch.equal(result.encoder_last_hidden_state, model.encode(ids, mask))
    assert torch.equal(result.encoder_hidden_states[-1], result.encoder_last_hidden_state)
    assert torch.equal(result.hidden_states[-1], result.last_hidden_state)
    assert (len(result.hidden_states), len(result.encoder_hidden_states)) == (4, 3)
    assert model(ids, mask, decoder_input_ids=ids[:, :5]).hidden_states is None


# ----------------------------------------------------------------------------------------------------- shifting


def test_shifted_right_a_text_begins_with_start_and_loses_its_last():
    ids = torch.tensor([[5, 6, 7], [8, 9, 4]])
    assert shift_right(ids, 1).tolist() == [[1, 5, 6], [1, 8, 9]]
    assert ids.tolist() == [[5, 6, 7], [8, 9, 4]]


def test_start_stands_before_the_first_token_wherever_padding_is():
    left, right = torch.tensor([[0, 0, 5, 6, 7]]), torch.tensor([[5, 6, 7, 0, 0]])
    assert shift_right(left, 1, left > 0).tolist() == [[0, 0, 1, 5, 6]]
    assert shift_right(right, 1, right > 0).tolist() == [[1, 5, 6, 0, 0]]


# ------------------------------------------------------------------------------------------------------ refusals


def test_labels_are_shifted_under_a_mask_of_the_decoder_too():
    ids, labels = torch.randint(2, 31, (3, 5)), torch.randint(2, 31, (3, 4))
    model, mask = made("t5"), torch.ones(3, 4, dtype=torch.bool)
    assert torch.equal(model(ids, labels=labels, decoder_attention_mask=mask).loss, model(ids, labels=labels).loss)


def test_a_target_must_be_given_where_the_decoder_does_not_read_the_text_again():
    ids = torch.randint(2, 31, (3, 5))
    for family in ("t5", "marian", "transformer"):
        with pytest.raises(ValueError, match=r"model\.start.*1.*shift_right"):
            made(family)(ids)
    with pytest.raises(ValueError, match="decoder_input_ids"):
        made("bart")(ids, decoder_attention_mask=ids > 4)


def test_what_does_not_fit_is_refused(model):
    ids = torch.randint(2, 31, (3, 5))
    with pytest.raises(ValueError, match=r"id.*31"):
        model(ids, decoder_input_ids=torch.full_like(ids, 31))
    with pytest.raises(ValueError, match=r"mask.*\(3, 5\)"):
        model(ids, decoder_input_ids=ids, decoder_attention_mask=ids[:, :4] > 4)
    with pytest.raises(ValueError, match=r"decoder_input_ids has 2 texts.*3"):
        model(ids, decoder_input_ids=ids[:2])


def test_more_positions_than_there_are_are_refused():
    model, ids = made("bart"), torch.full((1, 14), 5)
    with pytest.raises(ValueError, match=r"14.*13"):
        model(ids, decoder_input_ids=ids[:, :5])
    with pytest.raises(ValueError, match=r"14.*13"):
        model(ids[:, :5], decoder_input_ids=ids)
    with pytest.raises(ValueError, match=r"14.*13"):
        model.read(ids[:, :5]).begin(ids[:, :1], None, length=14)


@pytest.mark.parametrize("task", ["feature-extraction", "question-answering"])
def test_a_model_without_words_writes_nothing(task):
    model = made("bart", task)
    assert isinstance(model, EncoderDecoder)
    with pytest.raises(ValueError, match=rf"'{task}'.*task='text2text-generation'"):
        model.read(torch.full((1, 3), 5))
