# %% [markdown]
# # Training small models
#
# Train a small GPT in seconds and compute how low its loss can go; then watch cross-attention find word pairs in a model that translates dates.
#
# Training lowers a loss. But why does the loss begin where it does, how far can it fall, and what happens to the attention meanwhile? Every
# model of this lesson trains within seconds on the CPU of a laptop. Seeds are fixed, so the same machine gives the same numbers.

# %%
# %matplotlib inline
import copy
import json
import math
import warnings
from pathlib import Path

import numpy as np
import torch

import regard
from regard import edits, figures
from regard.training.tokenizers import train_bpe

# %% [markdown]
# ## 1. Make a text
#
# If you make the text, you know the answers. There is one frame, and each blank is filled with a random word. The animal comes twice, and
# is the same both times. The tokenizer is trained on the text too, so that each word is one token.

# %%
animals = ["cat", "dog", "fox", "owl", "bear"]
verbs = ["ran", "walked", "went", "came"]
places = ["door", "river", "hill", "garden"]
moods = ["tired", "happy", "hungry", "cold"]


def write(count, rng):
    sentences = []
    for _ in range(count):
        animal, verb, place, mood = (str(rng.choice(words)) for words in (animals, verbs, places, moods))
        sentences.append(f"the {animal} {verb} to the {place} because the {animal} was {mood}.")
    return " ".join(sentences)


rng = np.random.default_rng(0)
text, held_out = write(200, rng), write(20, rng)
tokenizer = train_bpe([text], 340)
print(". ".join(text.split(". ")[:2]) + ".")
print(f"{len(text):,} letters, {len(tokenizer.encode(text, special=False).ids):,} tokens, vocabulary {tokenizer.size}")
print(tokenizer.encode(text[: text.index(".") + 1], special=False).tokens)

# %% [markdown]
# ## 2. Before training
#
# `regard.build` makes a model with the initial weights of its paper: here a small GPT with 2 layers and 4 heads. It knows nothing yet and
# gives the 331 tokens nearly the same probability. If that is 1/V, the loss is `−ln(1/V) = ln V`. If the first loss of a new model is far
# from this, something is wrong.


# %%
def small_gpt():
    sizes = {"n_embd": 48, "n_head": 4, "n_layer": 2, "n_positions": 64, "vocab_size": tokenizer.size}
    model = regard.build("gpt2", **sizes, resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.0, seed=0)
    model.tokenizer = tokenizer
    return model


gpt = small_gpt()
stream = torch.tensor(tokenizer.encode(text, special=False).ids)
rows = stream[: 36 * 8].view(8, 36)
with torch.no_grad():
    first = gpt(rows, labels=rows).loss.item()
print(f"first loss {first:.3f}   ln {tokenizer.size} = {math.log(tokenizer.size):.3f}")
print("the cat" + gpt.generate("the cat", max_new_tokens=12).text)

# %% [markdown]
# ## 3. 100 steps
#
# `recipes.CausalLM` is "predict the next token", and `regard.train` is the training loop. The run's directory gets a log, checkpoints and the
# trained model. `monitor_every=10` measures the attention every 10 steps as well; section 5 uses it.

# %%
recipe = regard.recipes.CausalLM.for_model(gpt, length=36)
options = {"steps": 100, "batch_size": 8, "learning_rate": 5e-3, "warmup": 10, "log_every": 1, "monitor_every": 10}
result = regard.train(gpt, recipe, [text], eval_data=[held_out], out="run", progress=False, **options)
log = [json.loads(line) for line in Path("run/log.jsonl").read_text("utf-8").splitlines()]
losses = [line["loss"] for line in log if "loss" in line]
for step in (1, 10, 20, 40, 60, 80, 100):
    print(f"step {step:3}   loss {losses[step - 1]:.3f}")
print(f"loss on unseen sentences {result.eval_loss:.3f}")
print("the cat" + gpt.generate("the cat", max_new_tokens=23).text)

# %% [markdown]
# 100 steps, and the frame is nearly learned. Sometimes there is still an animal where a place should be.
#
# ## 4. The floor of the loss
#
# Will more training bring the loss to 0? No. Nobody can know which animal will be picked. The best possible loss for one of five is `ln 5`
# on average, and `ln 4` for each of the other three blanks. A sentence has 12 tokens, so the floor is `(ln 5 + 3 ln 4) / 12`. The second
# mention of the animal can be known by looking back. For a model that does not look back, the floor has one more `ln 5`.

# %%
best = (math.log(5) + 3 * math.log(4)) / 12
no_copy = (2 * math.log(5) + 3 * math.log(4)) / 12
print(f"floor of a model that copies the animal  {best:.3f}")
print(f"floor of a model that does not           {no_copy:.3f}")
print(f"mean loss of the last 10 steps           {np.mean(losses[-10:]):.3f}")
for animal in animals:
    prompt = torch.tensor([tokenizer.encode(f"the {animal} ran to the hill because the", special=False).ids])
    with torch.no_grad():
        chances = gpt(prompt).logits[0, -1].softmax(-1)
    same = chances[tokenizer.encode(f" {animal}", special=False).ids[0]].item()
    print(f"the {animal} … because the → {animal:5} probability {same:.2f}")

# %% [markdown]
# From the loss alone, training seems finished. The floor shows what was **not** learned. This model knows the frame, but it does not copy
# the animal: all five probabilities are near 1/5. There is no head yet that looks at the distant word. Will there be one after some more
# training?

# %% tags=["aside"]
longer = small_gpt()
options = {"steps": 300, "batch_size": 8, "learning_rate": 5e-3, "warmup": 10}
more = regard.train(longer, recipe, [text], eval_data=[held_out], out="longer", progress=False, **options)
print(f"after 300 steps: loss {more.loss:.3f}   unseen {more.eval_loss:.3f}   floors {no_copy:.3f}, {best:.3f}")

# %% [markdown]
# After three times as many steps the loss still rests on the first floor, 0.615. A flat curve does not mean that nothing is left to learn.
# To fall further, a head must learn to look at the animal, and 300 steps are not enough for that.
#
# ## 5. Watch the attention
#
# If the learning rate is too high, attention breaks first. Scores grow without limit, the softmax freezes on one token, and gradients no
# longer flow. This is called entropy collapse. Divided by `log(visible keys)`, the entropy is 1 for an even look and 0 for a single token.
#
# `regard.monitor` measures the entropy and the largest score of each head on one fixed input. In a loop of your own, call its `step` after
# each step. Take ten times the learning rate of section 3, 0.005.

# %%
fast = small_gpt().train()
watching = regard.monitor(fast, {"input_ids": rows[:1]}, every=2)
optimizer = torch.optim.AdamW(fast.parameters(), lr=0.05)
order = np.random.default_rng(0)
fast_losses = []
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for step in range(1, 41):
        starts = order.integers(0, len(stream) - 36, 8)
        chunk = torch.stack([stream[start : start + 36] for start in starts.tolist()])
        loss = fast(chunk, labels=chunk).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        fast_losses.append(loss.item())
        watching.step(step)

print(caught[0].message)
print("\nstep   loss       lowest entropy  largest score")
for record in watching.records[:10]:
    low, high = min(map(min, record["entropy"])), max(map(max, record["max_logit"]))
    print(f"{record['step']:4} {fast_losses[record['step'] - 1]:6.2f} {low:20.3f} {high:14.1f}")

# %% [markdown]
# The loss neither jumps far nor becomes NaN. It just falls slowly around 2.8, and does not tell why. The attention does: at step 8 one head
# already looks at almost a single token, and the scores keep growing. Put it beside the run of section 3.

# %%
calm = [json.loads(line) for line in Path("run/monitor.jsonl").read_text("utf-8").splitlines()]
steps = [10, 20, 30, 40]
lines = {}
for rate, records in (("0.005", calm), ("0.05", watching.records)):
    largest = {record["step"]: max(map(max, record["max_logit"])) for record in records}
    lines[rate] = [largest[step] for step in steps]
print(f"loss at step 40   learning rate 0.005: {losses[39]:.2f}   0.05: {fast_losses[39]:.2f}")
figures.growth_curves(
    steps, [figures.Curves("Largest score (n is the step)", "", lines)], title="Learning rates 0.005 and 0.05"
)

# %% [markdown]
# With ten times the learning rate, the loss after 40 steps is much higher. The warning says what to do: lower the learning rate, or warm up
# longer. Low entropy alone is not bad: a head that looks at the previous token has it too. So the monitor warns only where the entropy is
# below 0.05 and the score above 50.
#
# ## 6. Translation: the Transformer of 2017
#
# Now the original Transformer, with encoder and decoder, translates English dates into Korean. "Friday 14 March 2025" becomes
# "2025년 3월 14일 금요일": year, month, day, weekday, exactly the reverse order. The model must learn both the pairs of words and the order.
# One word is one token, and the dates are random (there is a 31 February).

# %%
weekdays = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
months = ["January", "February", "March", "April", "May", "June", "July"]
months += ["August", "September", "October", "November", "December"]
days, years = [str(n) for n in range(1, 32)], [str(n) for n in range(2015, 2031)]
slots = [weekdays, days, months, years]
english = [word for slot in slots for word in slot]
korean = [f"{day}요일" for day in "월화수목금토일"] + [f"{day}일" for day in days]
korean += [f"{n}월" for n in range(1, 13)] + [f"{year}년" for year in years]
vocabulary = ["<pad>", "<s>", "</s>", *english, *korean]
numbers = [np.array([vocabulary.index(word) for word in slot]) for slot in slots]
END = np.int64(2)


def dates(rng, size):
    picked = [slot[rng.integers(len(slot), size=size)] for slot in numbers]
    end = np.full(size, END)
    source = np.stack([*picked, end], axis=1)
    target = np.stack([*(column + len(english) for column in reversed(picked)), end], axis=1)
    return torch.from_numpy(source), torch.from_numpy(target)


def words_of(ids):
    return [vocabulary[number] for number in ids.tolist()]


source, target = dates(np.random.default_rng(1), 1)
print(" ".join(words_of(source[0])), "→", " ".join(words_of(target[0])))
print(f"vocabulary {len(vocabulary)}, ln V = {math.log(len(vocabulary)):.2f}")

# %%
sizes = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in (("layers", 1), ("ffn_dim", 64))}
sizes |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "d_model": 32, "dropout": 0.0}
ids = {"pad_token_id": 0, "decoder_start_token_id": 1, "eos_token_id": 2}
translator = regard.build("transformer", vocab_size=len(vocabulary), **sizes, **ids, seed=0).train()
optimizer = torch.optim.AdamW(translator.parameters(), lr=1e-2, betas=(0.9, 0.98), weight_decay=0.0)
warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
order = np.random.default_rng(0)
for step in range(1, 81):
    source, target = dates(order, 64)
    loss = translator(source, labels=target).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    warmup.step()
    if step in (1, 20, 40, 60, 80):
        print(f"step {step:3}   loss {loss.item():.3f}")
translator.eval()

test_source, test_target = dates(np.random.default_rng(7), 128)


def accuracy(output):
    return (output.logits.argmax(-1) == test_target).float().mean().item()


def tested(model):
    with torch.no_grad():
        return model(test_source, labels=test_target)


print(f"accuracy on 128 new dates {accuracy(tested(translator)):.1%}")

# %% [markdown]
# This time the floor is 0: the source holds the whole answer. The first loss is a little above `ln V` because this model uses its embedding
# matrix as the output layer too, so scores are uneven from the beginning. Now let it write word by word. The decoder takes what it has written
# and gives the next word. Look at the cross-attention weights as well.

# %%
sentence = ["Friday", "14", "March", "2025", "</s>"]
source = torch.tensor([[vocabulary.index(word) for word in sentence]])
written = torch.tensor([[1]])
with torch.no_grad():
    while written.shape[1] < 6:
        logits = translator(source, decoder_input_ids=written).logits
        written = torch.cat([written, logits[:, -1:].argmax(-1)], 1)
    with regard.watch(translator, keep="qk") as seen:
        translator(source, decoder_input_ids=written[:, :-1])
answer_words = words_of(written[0, 1:])
print(" ".join(answer_words))
print(list(seen.names))
cross = seen["decoder.blocks.0.cross"].tile(slice(None), slice(None))[0].numpy()
figures.heatmap(
    cross, answer_words, sentence, title="Cross-attention: the word written ↓ reads the source →", lang="en"
)

# %% [markdown]
# A row is the Korean word being written, a column an English word that it reads. 2025년 (the year) reads 2025, 3월 (March) reads March.
# The order is reversed, so the diagonal runs from the upper right to the lower left. Nobody told the model which words belong together: it
# learned that from translating. This is what attention was invented for in 2014.
#
# Here too, a weight only says where the model read. To see whether it uses the word, hide it. Hide March in the cross-attention:

# %%
with torch.no_grad(), regard.edit(translator, edits.knock_out("decoder.blocks.0.cross", keys=2)):
    blind = translator(source, decoder_input_ids=written[:, :-1]).logits.argmax(-1)[0]
print("with March hidden:", " ".join(words_of(blind)))

# %% [markdown]
# ## 7. Pruning: heads that are not needed
#
# This model has 12 heads, 4 in each of three places. Are all of them needed? `regard.scan` removes one at a time and measures how much the
# loss grows.

# %%
heads = regard.scan(lambda: tested(translator), translator, lambda output: output.loss)
before = tested(translator).loss.item()
ranked = sorted(np.ndindex(3, 4), key=lambda place: float(heads.values[place]))
print(f"loss before {before:.4f}")
for layer, head in ranked:
    print(f"{heads.names[layer]:27} head {head}   loss {float(heads.values[layer, head]):+.4f}")

# %%
figures.atlas(
    heads.values.numpy(), layers=list(heads.names), measure=figures.Quantity("increase of the loss", unit=""), lang="en"
)

# %% [markdown]
# Now really remove the least useful head and the most useful one. A head's output passes through `W_O`, so set its 8 columns of `W_O` to 0.
# Unlike an edit, this changes the weights, so do it on a copy.


# %%
def pruned(places):
    model = copy.deepcopy(translator)
    for layer, head in places:
        with torch.no_grad():
            model.get_submodule(heads.names[layer]).w_o.weight[:, 8 * head : 8 * (head + 1)] = 0.0
    return tested(model)


print(f"the model as it is             loss {before:.4f}   accuracy {accuracy(tested(translator)):.1%}")
for name, place in (("without the least useful head ", ranked[0]), ("without the most useful head  ", ranked[-1])):
    output = pruned([place])
    print(f"{name} loss {output.loss.item():.4f}   accuracy {accuracy(output):.1%}")

# %% [markdown]
# Without one head the accuracy stays; without the other about one word in five is wrong. Go on, the least useful first.

# %%
for count in range(1, 12):
    print(f"{count:2} heads removed   accuracy {accuracy(pruned(ranked[:count])):.1%}")

# %% [markdown]
# The first few cost almost nothing, and then it gets worse quickly. Remember that the order comes from removing one head at a time. Heads
# help each other: one that is not needed alone can matter when others are gone. In practice you prune, train a little more, and measure
# again.
#
# ## Questions
#
# Six questions. In the terminal: `regard learn 8 --question 1`.

# %% [markdown] tags=["question"]
# ### Question 1. The first loss of GPT-2
#
# GPT-2 has a vocabulary of 50,257. Trained from scratch, what is about its first loss?

# %% tags=["answer"]
answer = math.log(50_257)

# %% [markdown] tags=["why"]
# `ln 50257` is 10.82. If the first loss is far above, the initial weights are too large or the labels are off; if it is far below, the answer
# leaks into the input. It is the cheapest check there is before a training run.

# %% [markdown] tags=["question"]
# ### Question 2. Move the floor
#
# Let there be 10 animals instead of 5 in section 1. What is the floor of a model that does not copy the animal? (A sentence still has 12
# tokens.)

# %% tags=["answer"]
answer = (2 * math.log(10) + 3 * math.log(4)) / 12

# %% [markdown] tags=["why"]
# `(2 ln 10 + 3 ln 4) / 12` is 0.730. The model did not become worse; the text became harder to predict. So losses on different data cannot
# be compared as they stand.

# %% [markdown] tags=["question"]
# ### Question 3. Entropy
#
# The weights of a query are [0.5, 0.5, 0, 0]. What is the entropy divided by `log(number of keys)`?

# %% tags=["answer"]
shares = np.array([0.5, 0.5])
answer = float(-(shares * np.log(shares)).sum() / np.log(4))

# %% [markdown] tags=["why"]
# Two tokens get half each, so the entropy is `ln 2`, and `ln 2 / ln 4 = 0.5`. An even look at all four gives 1, a single token 0.

# %% [markdown] tags=["question"]
# ### Question 4. The shape of cross-attention
#
# The source has 7 tokens and the translation 4. What is the shape of the weights of one cross-attention head? Give (queries, keys).

# %% tags=["answer"]
with torch.no_grad(), regard.watch(translator, keep="qk") as shapes:
    translator(torch.full((1, 7), 5), decoder_input_ids=torch.full((1, 4), 70))
answer = tuple(shapes["decoder.blocks.0.cross"].tile(slice(None), slice(None)).shape[2:])

# %% [markdown] tags=["why"]
# The decoder makes the queries, the encoder the keys and values. So there is a row per token of the translation and a column per token of the
# source: (4, 7). It need not be square.

# %% [markdown] tags=["question"]
# ### Question 5. Hide the year
#
# Hide 2025 (position 3) of the source in all cross-attention of the translator. Which of the four words of "2025년 3월 14일 금요일" change?
# Give the numbers of all that do (the first word is 1).

# %% tags=["answer"]
with torch.no_grad(), regard.edit(translator, edits.knock_out("decoder.blocks.0.cross", keys=3)):
    without_year = translator(source, decoder_input_ids=written[:, :-1]).logits.argmax(-1)[0]
answer = {n for n, (a, b) in enumerate(zip(without_year[:4], written[0, 1:5], strict=True), 1) if a != b}

# %% [markdown] tags=["why"]
# Only the first word, the year, is wrong. The others read their own partners and stay. What the picture of the weights suggested is now
# confirmed as a cause.

# %% [markdown] tags=["question"]
# ### Question 6. Parameters removed
#
# With `d_model` 32 and heads of size 8, how many weights of `W_Q`, `W_K`, `W_V` and `W_O` go if one head is really cut out? (Without
# biases.)

# %% tags=["answer"]
projections = translator.get_submodule("encoder.blocks.0.attention")
total = sum(value.numel() for name, value in projections.named_parameters() if name.endswith("weight"))
answer = total // 4

# %% [markdown] tags=["why"]
# Four matrices with 32 × 8 each: 4 × 256 = 1,024, a quarter of the attention's weights, as there are 4 heads. Setting them to 0 makes nothing
# faster; the rows and columns must really be cut out.
