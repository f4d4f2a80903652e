# %% [markdown]
# # 작은 모델 학습하기
#
# 작은 GPT를 몇 초 만에 학습시켜 손실의 바닥을 계산하고, 날짜를 번역하는 트랜스포머에서 크로스 어텐션이 단어의 짝을 찾아내는 과정을 봅니다.
#
# 학습은 손실을 줄이는 일입니다. 그런데 처음 손실은 왜 그 값이고, 어디까지 줄 수 있으며, 그동안 어텐션에서는 무슨 일이 일어날까요?
# 이 강의의 모델은 모두 노트북의 CPU에서 몇 초 안에 학습됩니다. 시드를 정해 두었으므로 같은 환경에서는 같은 숫자가 나옵니다.

# %%
# %matplotlib inline
import copy
import json
import math
import warnings
from pathlib import Path

import numpy as np
import torch

import regard
from regard import edits, figures
from regard.training.tokenizers import train_bpe

# %% [markdown]
# ## 1. 텍스트를 직접 만들기
#
# 텍스트를 직접 만들면 정답을 알 수 있습니다. 문장의 틀은 하나이고, 빈칸마다 단어를 무작위로 고릅니다. 동물은 두 번 나오는데 늘 같은
# 동물입니다. 토크나이저도 이 텍스트로 학습합니다. 그러면 단어 하나가 토큰 하나가 됩니다.

# %%
animals = ["cat", "dog", "fox", "owl", "bear"]
verbs = ["ran", "walked", "went", "came"]
places = ["door", "river", "hill", "garden"]
moods = ["tired", "happy", "hungry", "cold"]


def write(count, rng):
    sentences = []
    for _ in range(count):
        animal, verb, place, mood = (str(rng.choice(words)) for words in (animals, verbs, places, moods))
        sentences.append(f"the {animal} {verb} to the {place} because the {animal} was {mood}.")
    return " ".join(sentences)


rng = np.random.default_rng(0)
text, held_out = write(200, rng), write(20, rng)
tokenizer = train_bpe([text], 340)
print(". ".join(text.split(". ")[:2]) + ".")
print(f"글자 {len(text):,}개, 토큰 {len(tokenizer.encode(text, special=False).ids):,}개, 어휘 {tokenizer.size}개")
print(tokenizer.encode(text[: text.index(".") + 1], special=False).tokens)

# %% [markdown]
# ## 2. 학습하기 전
#
# `regard.build`는 논문에 나온 초깃값으로 모델을 만듭니다. 레이어 2개, 헤드 4개짜리 작은 GPT입니다. 아직 아무것도 모르므로 331개 토큰에
# 거의 같은 확률을 줍니다. 확률이 1/V이면 손실은 `−ln(1/V) = ln V`입니다. 새로 만든 모델의 첫 손실이 이 값에서 멀면 어딘가 잘못된 것입니다.


# %%
def small_gpt():
    sizes = {"n_embd": 48, "n_head": 4, "n_layer": 2, "n_positions": 64, "vocab_size": tokenizer.size}
    model = regard.build("gpt2", **sizes, resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.0, seed=0)
    model.tokenizer = tokenizer
    return model


gpt = small_gpt()
stream = torch.tensor(tokenizer.encode(text, special=False).ids)
rows = stream[: 36 * 8].view(8, 36)
with torch.no_grad():
    first = gpt(rows, labels=rows).loss.item()
print(f"첫 손실 {first:.3f}   ln {tokenizer.size} = {math.log(tokenizer.size):.3f}")
print("the cat" + gpt.generate("the cat", max_new_tokens=12).text)

# %% [markdown]
# ## 3. 100스텝
#
# `recipes.CausalLM`은 "다음 토큰 맞히기"이고, `regard.train`은 학습 루프입니다. 실행 디렉터리에 로그와 체크포인트, 학습된 모델이 남습니다.
# `monitor_every=10`은 10스텝마다 어텐션도 재라는 뜻으로, 5절에서 씁니다.

# %%
recipe = regard.recipes.CausalLM.for_model(gpt, length=36)
options = {"steps": 100, "batch_size": 8, "learning_rate": 5e-3, "warmup": 10, "log_every": 1, "monitor_every": 10}
result = regard.train(gpt, recipe, [text], eval_data=[held_out], out="run", progress=False, **options)
log = [json.loads(line) for line in Path("run/log.jsonl").read_text("utf-8").splitlines()]
losses = [line["loss"] for line in log if "loss" in line]
for step in (1, 10, 20, 40, 60, 80, 100):
    print(f"스텝 {step:3}   손실 {losses[step - 1]:.3f}")
print(f"보지 않은 문장의 손실 {result.eval_loss:.3f}")
print("the cat" + gpt.generate("the cat", max_new_tokens=23).text)

# %% [markdown]
# 100스텝 만에 문장의 틀을 거의 배웠습니다. 아직 장소가 올 자리에 동물을 쓰기도 합니다.
#
# ## 4. 손실의 바닥
#
# 더 학습하면 0이 될까요? 아닙니다. 동물을 무엇으로 고를지는 아무도 미리 알 수 없습니다. 다섯 가운데 하나를 맞히는 손실은 아무리 잘해도
# 평균 `ln 5`이고, 나머지 세 빈칸은 `ln 4`씩입니다. 문장 하나가 토큰 12개이므로 바닥은 `(ln 5 + 3 ln 4) / 12`입니다. 다만 두 번째로 나오는
# 동물은 앞을 보면 알 수 있습니다. 그것을 못 하는 모델의 바닥은 `ln 5`가 하나 더 많습니다.

# %%
best = (math.log(5) + 3 * math.log(4)) / 12
no_copy = (2 * math.log(5) + 3 * math.log(4)) / 12
print(f"앞의 동물을 옮겨 쓰는 모델의 바닥 {best:.3f}")
print(f"옮겨 쓰지 못하는 모델의 바닥     {no_copy:.3f}")
print(f"마지막 10스텝의 평균 손실        {np.mean(losses[-10:]):.3f}")
for animal in animals:
    prompt = torch.tensor([tokenizer.encode(f"the {animal} ran to the hill because the", special=False).ids])
    with torch.no_grad():
        chances = gpt(prompt).logits[0, -1].softmax(-1)
    same = chances[tokenizer.encode(f" {animal}", special=False).ids[0]].item()
    print(f"the {animal} … because the → {animal:5} 확률 {same:.2f}")

# %% [markdown]
# 손실만 보면 학습이 끝난 것 같지만, 바닥을 계산해 보면 무엇을 **못** 배웠는지 보입니다. 이 모델은 틀은 외웠지만 앞의 동물을 옮겨 쓰지
# 않습니다. 다섯 동물의 확률이 모두 1/5 근처입니다. 멀리 있는 단어를 보는 헤드가 아직 생기지 않은 것입니다. 조금 더 학습하면 생길까요?

# %% tags=["aside"]
longer = small_gpt()
options = {"steps": 300, "batch_size": 8, "learning_rate": 5e-3, "warmup": 10}
more = regard.train(longer, recipe, [text], eval_data=[held_out], out="longer", progress=False, **options)
print(f"300스텝 뒤 학습 손실 {more.loss:.3f}   보지 않은 문장 {more.eval_loss:.3f}   바닥 {no_copy:.3f}, {best:.3f}")

# %% [markdown]
# 세 배를 학습해도 손실은 첫째 바닥 0.615에 머뭅니다. 손실 곡선이 평평해졌다고 배울 것이 더 없는 것은 아닙니다. 여기서 더 내려가려면
# 앞의 동물을 보는 헤드가 생겨야 하는데, 300스텝으로는 모자랍니다.
#
# ## 5. 어텐션 지켜보기
#
# 학습률이 너무 크면 어텐션이 먼저 망가집니다. 점수가 한없이 커져서 softmax가 토큰 하나로 굳고, 그러면 기울기가 흐르지 않습니다. 이것을
# 엔트로피 붕괴라고 합니다. 엔트로피를 `log(볼 수 있는 키의 수)`로 나누면 고르게 볼 때 1, 하나만 볼 때 0입니다.
#
# `regard.monitor`는 정해 둔 입력 하나로 헤드마다 엔트로피와 가장 큰 점수를 잽니다. 직접 짠 학습 루프에서는 스텝마다 `step`을 부르면 됩니다.
# 3절의 학습률 0.005를 열 배로 올려 봅시다.

# %%
fast = small_gpt().train()
watching = regard.monitor(fast, {"input_ids": rows[:1]}, every=2)
optimizer = torch.optim.AdamW(fast.parameters(), lr=0.05)
order = np.random.default_rng(0)
fast_losses = []
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for step in range(1, 41):
        starts = order.integers(0, len(stream) - 36, 8)
        chunk = torch.stack([stream[start : start + 36] for start in starts.tolist()])
        loss = fast(chunk, labels=chunk).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        fast_losses.append(loss.item())
        watching.step(step)

print(caught[0].message)
print("\n스텝   손실   가장 낮은 엔트로피   가장 큰 점수")
for record in watching.records[:10]:
    low, high = min(map(min, record["entropy"])), max(map(max, record["max_logit"]))
    print(f"{record['step']:4} {fast_losses[record['step'] - 1]:6.2f} {low:20.3f} {high:14.1f}")

# %% [markdown]
# 손실은 크게 튀지도 않고 NaN이 되지도 않습니다. 2.8 근처에서 느리게 내려갈 뿐이라서, 손실만 보면 왜 느린지 알 수 없습니다. 어텐션을 보면
# 이유가 보입니다. 8스텝에 벌써 거의 한 토큰만 보는 헤드가 있고, 점수는 계속 커집니다. 3절의 학습과 나란히 놓아 봅시다.

# %%
calm = [json.loads(line) for line in Path("run/monitor.jsonl").read_text("utf-8").splitlines()]
steps = [10, 20, 30, 40]
lines = {}
for rate, records in (("0.005", calm), ("0.05", watching.records)):
    largest = {record["step"]: max(map(max, record["max_logit"])) for record in records}
    lines[rate] = [largest[step] for step in steps]
print(f"40스텝의 손실   학습률 0.005 {losses[39]:.2f}   학습률 0.05 {fast_losses[39]:.2f}")
figures.growth_curves(steps, [figures.Curves("가장 큰 점수 (n은 스텝)", "", lines)], title="학습률 0.005와 0.05")

# %% [markdown]
# 학습률을 열 배로 올렸더니 40스텝 뒤의 손실이 오히려 훨씬 높습니다. 고치는 방법은 경고에 적혀 있습니다. 학습률을 낮추거나 warmup을 길게
# 잡으세요. 엔트로피가 낮다고 모두 나쁜 것은 아닙니다. 바로 앞 토큰만 보는 헤드도 엔트로피가 낮습니다. 그래서 모니터는 엔트로피가 0.05보다
# 낮고 점수도 50보다 클 때만 경고합니다.
#
# ## 6. 번역: 2017년 트랜스포머
#
# 이번에는 인코더와 디코더가 있는 원래의 트랜스포머로 영어 날짜를 우리말로 옮깁니다. "Friday 14 March 2025"는 "2025년 3월 14일 금요일"이
# 됩니다. 순서가 정확히 거꾸로입니다. 모델은 단어의 짝과 순서를 모두 배워야 합니다. 단어 하나를 토큰 하나로 하고, 날짜는 무작위로
# 만듭니다(2월 31일도 나옵니다).

# %%
weekdays = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
months = ["January", "February", "March", "April", "May", "June", "July"]
months += ["August", "September", "October", "November", "December"]
days, years = [str(n) for n in range(1, 32)], [str(n) for n in range(2015, 2031)]
slots = [weekdays, days, months, years]
english = [word for slot in slots for word in slot]
korean = [f"{day}요일" for day in "월화수목금토일"] + [f"{day}일" for day in days]
korean += [f"{n}월" for n in range(1, 13)] + [f"{year}년" for year in years]
vocabulary = ["<pad>", "<s>", "</s>", *english, *korean]
numbers = [np.array([vocabulary.index(word) for word in slot]) for slot in slots]
END = np.int64(2)


def dates(rng, size):
    picked = [slot[rng.integers(len(slot), size=size)] for slot in numbers]
    end = np.full(size, END)
    source = np.stack([*picked, end], axis=1)
    target = np.stack([*(column + len(english) for column in reversed(picked)), end], axis=1)
    return torch.from_numpy(source), torch.from_numpy(target)


def words_of(ids):
    return [vocabulary[number] for number in ids.tolist()]


source, target = dates(np.random.default_rng(1), 1)
print(" ".join(words_of(source[0])), "→", " ".join(words_of(target[0])))
print(f"어휘 {len(vocabulary)}개, ln V = {math.log(len(vocabulary)):.2f}")

# %%
sizes = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in (("layers", 1), ("ffn_dim", 64))}
sizes |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "d_model": 32, "dropout": 0.0}
ids = {"pad_token_id": 0, "decoder_start_token_id": 1, "eos_token_id": 2}
translator = regard.build("transformer", vocab_size=len(vocabulary), **sizes, **ids, seed=0).train()
optimizer = torch.optim.AdamW(translator.parameters(), lr=1e-2, betas=(0.9, 0.98), weight_decay=0.0)
warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
order = np.random.default_rng(0)
for step in range(1, 81):
    source, target = dates(order, 64)
    loss = translator(source, labels=target).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    warmup.step()
    if step in (1, 20, 40, 60, 80):
        print(f"스텝 {step:3}   손실 {loss.item():.3f}")
translator.eval()

test_source, test_target = dates(np.random.default_rng(7), 128)


def accuracy(output):
    return (output.logits.argmax(-1) == test_target).float().mean().item()


def tested(model):
    with torch.no_grad():
        return model(test_source, labels=test_target)


print(f"새 날짜 128개의 정확도 {accuracy(tested(translator)):.1%}")

# %% [markdown]
# 이번에는 바닥이 0입니다. 원문에 답이 모두 있기 때문입니다. 첫 손실이 `ln V`보다 조금 큰 것은, 이 모델이 임베딩 행렬을 출력층으로도 써서
# 처음부터 점수가 고르지 않기 때문입니다. 이제 한 단어씩 쓰게 해 봅시다. 디코더는 지금까지 쓴 것을 받아서 다음 단어를
# 냅니다. 크로스 어텐션의 가중치도 함께 봅니다.

# %%
sentence = ["Friday", "14", "March", "2025", "</s>"]
source = torch.tensor([[vocabulary.index(word) for word in sentence]])
written = torch.tensor([[1]])
with torch.no_grad():
    while written.shape[1] < 6:
        logits = translator(source, decoder_input_ids=written).logits
        written = torch.cat([written, logits[:, -1:].argmax(-1)], 1)
    with regard.watch(translator, keep="qk") as seen:
        translator(source, decoder_input_ids=written[:, :-1])
answer_words = words_of(written[0, 1:])
print(" ".join(answer_words))
print(list(seen.names))
cross = seen["decoder.blocks.0.cross"].tile(slice(None), slice(None))[0].numpy()
figures.heatmap(cross, answer_words, sentence, title="크로스 어텐션: 쓰는 단어 ↓ 가 읽는 원문 →", lang="ko")

# %% [markdown]
# 행은 지금 쓰는 우리말 단어, 열은 읽는 영어 단어입니다. 2025년을 쓸 때 2025를, 3월을 쓸 때 March를 봅니다. 우리말은 순서가 거꾸로이므로
# 오른쪽 위에서 왼쪽 아래로 가는 대각선이 생깁니다. 아무도 짝을 알려 주지 않았는데 번역만 배우다가 생긴 것입니다. 2014년에 어텐션이
# 처음 나올 때의 목적이 바로 이것이었습니다.
#
# 여기서도 가중치는 읽은 곳일 뿐입니다. 정말 그 단어를 쓰는지는 가려 보면 압니다. 크로스 어텐션에서 March를 가려 봅시다.

# %%
with torch.no_grad(), regard.edit(translator, edits.knock_out("decoder.blocks.0.cross", keys=2)):
    blind = translator(source, decoder_input_ids=written[:, :-1]).logits.argmax(-1)[0]
print("March를 가리면", " ".join(words_of(blind)))

# %% [markdown]
# ## 7. 가지치기: 없어도 되는 헤드
#
# 이 모델의 헤드는 세 곳에 4개씩 모두 12개입니다. 모두 필요할까요? `regard.scan`으로 하나씩 없애며 손실이 얼마나 늘어나는지 잽니다.

# %%
heads = regard.scan(lambda: tested(translator), translator, lambda output: output.loss)
before = tested(translator).loss.item()
ranked = sorted(np.ndindex(3, 4), key=lambda place: float(heads.values[place]))
print(f"원래 손실 {before:.4f}")
for layer, head in ranked:
    print(f"{heads.names[layer]:27} 헤드 {head}   손실 {float(heads.values[layer, head]):+.4f}")

# %%
figures.atlas(
    heads.values.numpy(), layers=list(heads.names), measure=figures.Quantity("손실의 증가", unit=""), lang="ko"
)

# %% [markdown]
# 가장 쓸모없는 헤드와 가장 쓸모 있는 헤드를 실제로 떼어 봅시다. 헤드의 출력은 `W_O`를 지나므로, `W_O`에서 그 헤드에 해당하는 열 8개를
# 0으로 만들면 됩니다. 편집과 달리 가중치가 정말로 바뀌므로 복사본에서 합니다.


# %%
def pruned(places):
    model = copy.deepcopy(translator)
    for layer, head in places:
        with torch.no_grad():
            model.get_submodule(heads.names[layer]).w_o.weight[:, 8 * head : 8 * (head + 1)] = 0.0
    return tested(model)


print(f"원래 모델                  손실 {before:.4f}   정확도 {accuracy(tested(translator)):.1%}")
for name, place in (("가장 쓸모없는 헤드를 떼면 ", ranked[0]), ("가장 쓸모 있는 헤드를 떼면", ranked[-1])):
    output = pruned([place])
    print(f"{name} 손실 {output.loss.item():.4f}   정확도 {accuracy(output):.1%}")

# %% [markdown]
# 하나는 떼어도 정확도가 그대로이고, 다른 하나는 떼면 다섯 단어에 하나꼴로 틀립니다. 쓸모없는 것부터 차례로 더 떼어 봅시다.

# %%
for count in range(1, 12):
    print(f"헤드 {count:2}개를 떼면   정확도 {accuracy(pruned(ranked[:count])):.1%}")

# %% [markdown]
# 몇 개까지는 거의 그대로이고 그 뒤로 빠르게 나빠집니다. 하나씩 잰 순서로 여럿을 뗐다는 점을 기억하세요. 헤드는 서로 돕기 때문에, 혼자
# 없을 때는 괜찮던 헤드가 다른 헤드까지 없으면 중요해지기도 합니다. 실제로 가지치기를 할 때는 떼고, 조금 더 학습하고, 다시 잽니다.
#
# ## 확인 문제
#
# 여섯 문제입니다. 터미널에서 풀려면 `regard learn 8 --question 1 --lang ko`처럼 실행하세요.

# %% [markdown] tags=["question"]
# ### 문제 1. GPT-2의 첫 손실
#
# GPT-2의 어휘는 50,257개입니다. 처음부터 학습하면 첫 손실은 얼마쯤일까요?

# %% tags=["answer"]
answer = math.log(50_257)

# %% [markdown] tags=["why"]
# `ln 50257`은 10.82입니다. 첫 손실이 이보다 훨씬 크면 초깃값이 너무 크거나 레이블이 어긋난 것이고, 훨씬 작으면 정답이 입력에 새어 들어간
# 것입니다. 학습을 시작하기 전에 확인할 수 있는 가장 값싼 검사입니다.

# %% [markdown] tags=["question"]
# ### 문제 2. 바닥 옮기기
#
# 1절의 동물을 5종에서 10종으로 늘립니다. 앞의 동물을 옮겨 쓰지 못하는 모델의 바닥은 얼마가 될까요? (토큰은 여전히 문장마다 12개입니다.)

# %% tags=["answer"]
answer = (2 * math.log(10) + 3 * math.log(4)) / 12

# %% [markdown] tags=["why"]
# `(2 ln 10 + 3 ln 4) / 12`는 0.730입니다. 모델이 나빠진 것이 아니라 텍스트가 더 예측하기 어려워진 것입니다. 그래서 서로 다른 데이터에서
# 잰 손실은 그대로 비교할 수 없습니다.

# %% [markdown] tags=["question"]
# ### 문제 3. 엔트로피
#
# 어떤 쿼리의 가중치가 [0.5, 0.5, 0, 0]입니다. 엔트로피를 `log(키의 수)`로 나누면 얼마일까요?

# %% tags=["answer"]
shares = np.array([0.5, 0.5])
answer = float(-(shares * np.log(shares)).sum() / np.log(4))

# %% [markdown] tags=["why"]
# 두 토큰을 반씩 보므로 엔트로피는 `ln 2`이고, `ln 2 / ln 4 = 0.5`입니다. 네 토큰을 고르게 보면 1, 한 토큰만 보면 0입니다.

# %% [markdown] tags=["question"]
# ### 문제 4. 크로스 어텐션의 모양
#
# 원문이 7토큰, 번역문이 4토큰입니다. 크로스 어텐션 헤드 하나의 가중치 행렬은 어떤 모양일까요? (쿼리, 키) 순서로 쓰세요.

# %% tags=["answer"]
with torch.no_grad(), regard.watch(translator, keep="qk") as shapes:
    translator(torch.full((1, 7), 5), decoder_input_ids=torch.full((1, 4), 70))
answer = tuple(shapes["decoder.blocks.0.cross"].tile(slice(None), slice(None)).shape[2:])

# %% [markdown] tags=["why"]
# 쿼리는 디코더가, 키와 값은 인코더가 만듭니다. 그래서 행은 번역문의 길이, 열은 원문의 길이인 (4, 7)입니다. 정사각형일 필요가 없습니다.

# %% [markdown] tags=["question"]
# ### 문제 5. 원문의 연도를 가리면
#
# 번역기의 크로스 어텐션에서 원문의 2025(위치 3)를 모두 가립니다. "2025년 3월 14일 금요일"의 네 단어 가운데 바뀌는 것은 몇 번째
# 단어일까요? 바뀌는 것의 번호를 모두 쓰세요(첫 단어가 1번).

# %% tags=["answer"]
with torch.no_grad(), regard.edit(translator, edits.knock_out("decoder.blocks.0.cross", keys=3)):
    without_year = translator(source, decoder_input_ids=written[:, :-1]).logits.argmax(-1)[0]
answer = {n for n, (a, b) in enumerate(zip(without_year[:4], written[0, 1:5], strict=True), 1) if a != b}

# %% [markdown] tags=["why"]
# 첫 단어인 연도만 틀립니다. 다른 단어는 자기 짝을 보기 때문에 그대로입니다. 가중치 그림이 말한 것을 원인으로도 확인한 셈입니다.

# %% [markdown] tags=["question"]
# ### 문제 6. 떼어 낸 파라미터
#
# `d_model` 32, 헤드 크기 8인 헤드 하나를 실제로 떼어 내면 `W_Q`, `W_K`, `W_V`, `W_O`에서 가중치가 몇 개 줄어들까요? (편향은 빼고 셉니다.)

# %% tags=["answer"]
projections = translator.get_submodule("encoder.blocks.0.attention")
total = sum(value.numel() for name, value in projections.named_parameters() if name.endswith("weight"))
answer = total // 4

# %% [markdown] tags=["why"]
# 행렬 네 개에서 32 × 8씩이므로 4 × 256 = 1,024개입니다. 헤드가 4개이므로 어텐션 가중치 전체의 4분의 1입니다. 0으로 만드는 것만으로는
# 빨라지지 않습니다. 행과 열을 실제로 잘라 내야 계산이 줄어듭니다.
