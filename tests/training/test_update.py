"""One optimizer step of `regard.train`, against the same arithmetic written out."""

import json

import torch
from torch.nn.functional import cross_entropy

import regard
from regard.training import loop
from regard.training.data import row_numbers

TEXT = " ".join(f"word{(n * n) % 17}" for n in range(40))
LENGTH, ROWS, SEED = 16, 3, 5


def tiny():
    sizes = {"n_embd": 8, "n_head": 2, "n_layer": 1, "n_positions": LENGTH, "vocab_size": 256}
    return regard.build("gpt2", **sizes, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0).double()


def run(model, out, **options):
    recipe = regard.recipes.CausalLM(length=LENGTH)
    fixed = {"batch_size": ROWS, "learning_rate": 1e-2, "seed": SEED, "log_every": 1, "progress": False}
    regard.train(model, recipe, [TEXT], out=out, **fixed | options)
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def test_gradient_is_that_of_the_mean_loss(tmp_path):
    model, other = tiny(), tiny()
    (line,) = run(model, tmp_path, steps=1)
    recipe = regard.recipes.CausalLM(length=LENGTH)
    blocks = recipe.rows([TEXT], other, training=True)
    numbers, _ = row_numbers(0, ROWS, len(blocks), SEED)
    ids = torch.stack([torch.as_tensor(blocks[int(number)]) for number in numbers]).long()
    loss = cross_entropy(other(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    loss = loss.detach()
    norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in other.parameters() if p.grad is not None]))
    assert abs(line["loss"] - float(loss)) < 1e-5 * float(loss)  # summed in fp32
    assert abs(line["grad_norm"] - float(norm)) < 1e-5 * float(norm)


def test_average_moves_by_one_minus_its_decay(tmp_path, monkeypatch):
    updates = []

    class Recording(loop.Average):
        def update(self, **options):
            before = {name: value.clone() for name, value in self.weights.items()}
            super().update(**options)
            for name, value in self.weights.items():
                updates.append((before[name], self.parameters[name].detach().clone(), value.clone()))

    monkeypatch.setattr(loop, "Average", Recording)
    model = tiny()
    run(model, tmp_path, steps=3, ema=0.75)
    count = len(list(model.parameters()))
    assert len(updates) == 3 * count
    for before, weight, after in updates[count:]:
        torch.testing.assert_close(after, 0.75 * before + 0.25 * weight, rtol=1e-12, atol=1e-14)
    assert all(not torch.equal(before, after) for before, _, after in updates[count:])
