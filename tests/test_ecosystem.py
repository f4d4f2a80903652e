"""A regard model in the hands of transformers.Trainer, accelerate, PEFT and an evaluation loop, with no wrapper.

Each is compared with a transformers model of the same weights on the same data.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import log_softmax

import regard
from regard.models.model import Model
from regard.models.outputs import ModelOutput

BERT = {
    "vocab_size": 31, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 20,
    "max_position_embeddings": 17, "num_labels": 3, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    "initializer_range": 0.3,
}  # fmt: skip
GPT2 = {
    "vocab_size": 31, "n_embd": 12, "n_layer": 2, "n_head": 3, "n_positions": 17, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "attn_pdrop": 0.0, "initializer_range": 0.3,
}  # fmt: skip
LLAMA = {
    "vocab_size": 31, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 20,
    "max_position_embeddings": 17, "initializer_range": 0.3,
}  # fmt: skip
STEPS, BATCH = 10, 5


def pair(directory: Path, architecture: str, config: Any) -> tuple[Model, Any]:
    """One model twice: ours and transformers'."""
    torch.manual_seed(3)
    theirs = getattr(transformers, architecture)(config)
    theirs.save_pretrained(directory)
    return regard.load(directory, dtype=torch.float32), theirs


def classifiers(directory: Path) -> tuple[Model, Any]:
    ours, theirs = pair(directory, "BertForSequenceClassification", transformers.BertConfig(**BERT))
    assert ours.task in ("classify", "text-classification")
    return ours, theirs


def writers(directory: Path) -> tuple[Model, Any]:
    return pair(directory, "GPT2LMHeadModel", transformers.GPT2Config(**GPT2))


def examples(count: int = STEPS * BATCH) -> list[dict[str, Tensor]]:
    """Texts of three to eleven tokens, padded on the right, with a label each."""
    random = torch.Generator().manual_seed(5)
    rows = []
    for number in range(count):
        mask = (torch.arange(11) < 3 + number % 9).long()
        ids = torch.randint(3, 31, (11,), generator=random) * mask
        segments = (torch.arange(11) > 4).long() * mask
        label = torch.tensor(number % 3)
        rows.append({"input_ids": ids, "attention_mask": mask, "token_type_ids": segments, "labels": label})
    return rows


def batches(rows: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    chunks = [rows[start : start + BATCH] for start in range(0, len(rows), BATCH)]
    return [{name: torch.stack([row[name] for row in chunk]) for name in chunk[0]} for chunk in chunks]


def assert_losses_alike(ours: list[float], theirs: list[float]) -> None:
    assert len(ours) == len(theirs) == STEPS
    assert len({round(loss, 4) for loss in theirs}) > 5, "the losses do not move"
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------------------------- Trainer


def trained(model: nn.Module, directory: Path) -> tuple[list[float], Any]:
    """The loss of each of ten steps of transformers.Trainer, and the predictions afterwards."""
    options = transformers.TrainingArguments(
        output_dir=str(directory),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        seed=7,
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(model=model, args=options, train_dataset=examples(), eval_dataset=examples(BATCH))
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, trainer.predict(examples(BATCH))


def test_trainer_fine_tunes_a_classifier_as_it_does_transformers_own(tmp_path):
    ours, theirs = classifiers(tmp_path / "model")
    mine, yours = trained(ours, tmp_path / "ours"), trained(theirs, tmp_path / "theirs")
    assert_losses_alike(mine[0], yours[0])
    assert mine[1].predictions.shape == yours[1].predictions.shape == (BATCH, 3)
    torch.testing.assert_close(
        torch.tensor(mine[1].predictions), torch.tensor(yours[1].predictions), rtol=1e-3, atol=1e-4
    )
    assert mine[1].metrics["test_loss"] == pytest.approx(yours[1].metrics["test_loss"], rel=1e-4)


def test_trainer_fine_tunes_a_language_model_with_accumulated_gradients(tmp_path):
    """The loss of accumulated batches is the mean over their tokens, which a mean of means is not."""
    losses = []
    config = transformers.LlamaConfig(**LLAMA)  # transformers' GPT-2 has no loss_type, and its tokens are miscounted
    for number, model in enumerate(pair(tmp_path / "model", "LlamaForCausalLM", config)):
        rows = [
            {"input_ids": row["input_ids"], "labels": row["input_ids"].masked_fill(row["attention_mask"] == 0, -100)}
            for row in examples()
        ]
        options = transformers.TrainingArguments(
            output_dir=str(tmp_path / str(number)),
            max_steps=3,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=3,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(model=model, args=options, train_dataset=rows)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-4, atol=1e-5)


def test_a_trained_model_is_saved_and_opened_by_transformers(tmp_path):
    ours, _ = classifiers(tmp_path / "model")
    ours.save_pretrained(tmp_path / "saved")
    again = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "saved").eval()
    batch = batches(examples(BATCH))[0]
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(**batch).loss, again(**batch).loss)


# ---------------------------------------------------------------------------------------------------------- accelerate


def accelerated(model: nn.Module) -> list[float]:
    accelerate = pytest.importorskip("accelerate")
    runner = accelerate.Accelerator(cpu=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(examples(), batch_size=BATCH)
    model, optimizer, loader = runner.prepare(model.train(), optimizer, loader)
    losses = []
    for batch in loader:
        output = model(**batch)
        runner.backward(output.loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(runner.gather(output).loss.detach()))
    return losses


def test_accelerate_trains_a_classifier_as_it_does_transformers_own(tmp_path):
    ours, theirs = classifiers(tmp_path)
    assert_losses_alike(accelerated(ours), accelerated(theirs))


def test_accelerate_widens_an_output_in_place_of_its_kind():
    accelerate = pytest.importorskip("accelerate")
    given = ModelOutput(loss=torch.ones(()), logits=torch.ones(2, 3, dtype=torch.bfloat16))
    wide = accelerate.utils.convert_to_fp32(given)
    assert isinstance(wide, ModelOutput)
    assert list(wide) == ["loss", "logits"]
    assert wide.logits.dtype == torch.float32


# ---------------------------------------------------------------------------------------------------------------- PEFT


def adapted(model: nn.Module, targets: list[str], order: list[str], *, transposed: bool = False) -> list[float]:
    """Ten losses of a LoRA whose matrices are drawn module after module in the given order."""
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, lora_alpha=4, target_modules=targets, task_type="CAUSAL_LM", fan_in_fan_out=transposed)
    adapter = peft.get_peft_model(model, lora)
    random = torch.Generator().manual_seed(11)
    weights = dict(adapter.named_parameters())
    for name in order:
        a = weights[f"base_model.model.{name}.lora_A.default.weight"]
        a.data = torch.randn(a.shape, generator=random)
    trainable = [p for p in adapter.parameters() if p.requires_grad]
    assert len(trainable) == 2 * len(order)
    optimizer = torch.optim.AdamW(trainable, lr=1e-2)
    losses = []
    for batch in batches(examples()):
        ids, mask = batch["input_ids"], batch["attention_mask"]
        output = adapter(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(output.loss.detach()))
    return losses


# PEFT asks transformers' own model by the name that transformers 5.23 deprecates; regard's has no such property.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_a_lora_learns_as_it_does_on_transformers_own(tmp_path):
    ours, theirs = writers(tmp_path)
    mine = [f"tower.blocks.{i}.{part}" for i in range(2) for part in ("attention.w_qkv", "feed_forward.w_in")]
    yours = [f"transformer.h.{i}.{part}" for i in range(2) for part in ("attn.c_attn", "mlp.c_fc")]
    assert_losses_alike(
        adapted(ours.train(), ["w_qkv", "w_in"], mine),
        adapted(theirs.train(), ["c_attn", "c_fc"], yours, transposed=True),  # their matrices are (inputs, outputs)
    )


# ---------------------------------------------------------------------------------------------------------- evaluation


def log_likelihoods(model: Any, texts: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
    """How likely a continuation is after its context, and is it the greedy one: as lm-eval's HFLM asks a model."""
    results = []
    for start in range(0, len(texts), 3):
        chunk = texts[start : start + 3]
        rows = [(context + continuation)[:-1] for context, continuation in chunk]
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        with torch.no_grad():
            logits = log_softmax(model(ids, attention_mask=mask).logits, -1)
        for scores, row, (_, continuation) in zip(logits, rows, chunk, strict=True):
            wanted = torch.tensor(continuation)
            own = scores[len(row) - len(continuation) : len(row)]
            chosen = own.gather(1, wanted.unsqueeze(1))
            results.append((float(chosen.sum()), bool((own.argmax(-1) == wanted).all())))
    return results


def test_an_evaluation_loop_gives_the_numbers_of_transformers(tmp_path):
    ours, theirs = writers(tmp_path)
    random = torch.Generator().manual_seed(13)
    texts = []
    for number in range(8):
        ids = torch.randint(3, 31, (4 + number,), generator=random).tolist()
        texts.append((ids[:2], ids[2:]))
    mine, yours = log_likelihoods(ours.eval(), texts), log_likelihoods(theirs.eval(), texts)
    torch.testing.assert_close(torch.tensor([x for x, _ in mine]), torch.tensor([x for x, _ in yours]))
    assert [greedy for _, greedy in mine] == [greedy for _, greedy in yours]
