// Every word of the page, in English and in Korean. A test of types keeps both complete: `ko` must have what `en` has.
// It does not know which language is chosen: the state does.

const en = {
  title: "regard: what each head looks at",
  skip: "Skip to the heads",
  layer: "layer",
  head: "head",
  head_at: "layer {layer}, head {head}",
  tokens_of: "{count} {count|token|tokens}",
  pixels_of: "{height} × {width} pixels (h × w)",
  heads_of: "{layers} {layers|layer|layers} × {heads} {heads|head|heads}",
  session: "What is looked at",
  new_text: "Read new",
  compare: "Compare",
  compare_end: "End comparison",
  compare_with: "Compare with",
  compare_first: "First",
  compare_second: "Second",
  compare_none: "There is nothing to compare with yet: read a second text first.",
  difference: "Colour by difference (second − first)",
  difference_impossible: "The two have different layers or heads, so there is no difference to colour.",
  language: "Language",
  theme: "Appearance",
  theme_auto: "As the system",
  theme_light: "Light",
  theme_dark: "Dark",
  help: "Help",
  close: "Close",
  drawer: "Head and steps",
  drawer_open: "Show head and steps",
  drawer_close: "Hide head and steps",

  atlas: "Heads",
  map: "Map",
  text: "Text",
  image: "Image",
  measure: "Coloured by",
  view_grid: "Grid",
  view_grid_title: "Grid of layers and heads",
  view_list_title: "List, highest first",
  view_rising_title: "List, lowest first",
  view: "Layout",
  find: "Search heads",
  find_example: "induction > 0.4",
  found: "{count} of {all} {all|head|heads}",
  and_more: "and {count} more",
  sorted_by: "Sorted by {measure}",
  no_head: "No head fits.",
  legend: "Colours from {low} to {high}",
  legend_alike: "{value} in every head",
  atlas_label: "Heads: rows are layers, columns are heads. The arrow keys move.",
  find_unknown: "“{word}” is no measure. There are: {names}.",
  find_number: "A number must come after “{word}”, as in {example}.",
  find_operator: "“{word}” needs a comparison, as in {word} > 0.4.",
  find_label: "“{word}” is no pattern. There are: {names}.",
  find_bracket: "A bracket is open: “)” is missing.",
  find_rest: "“{word}” was not expected here. Join conditions by and, or.",
  find_end: "The condition ends too early: a measure is missing.",
  find_character: "“{word}” cannot stand in a search.",

  entropy: "entropy",
  effective: "effective keys (1/Σw²)",
  received_max: "most received",
  first: "first token (sink)",
  own: "itself",
  previous: "previous token",
  next: "next token",
  neighbours: "neighbours",
  uniform: "spread evenly",
  delimiter: "delimiters",
  "same token": "same token",
  induction: "induction",
  about_entropy: "How spread out a query's attention is, in nats; 0 is one single key.",
  about_effective: "How many keys a query spreads over: 1/Σw² of its weights, the mean over queries.",
  about_received_max: "Share of all attention that the most looked-at key receives.",
  about_first: "Mean weight on the first token, where many heads rest.",
  about_own: "Mean weight on the query's own token.",
  about_previous: "Mean weight on the token before, of tokens that have one.",
  about_next: "Mean weight on the token after, of tokens that have one.",
  about_neighbours: "Weight on the tokens around the query.",
  about_uniform: "How close to looking everywhere alike.",
  about_delimiter: "Weight on full stops, [SEP] and the like; the first token is none.",
  "about_same token": "Weight on the nearest other places of the same token, of tokens that have some.",
  about_induction: "Weight on what came after the same token earlier, of tokens that came before.",
  max_weight: "largest weight",
  no_label: "no single pattern",
  nan_all: "Weights are NaN, all of this head: see regard doctor, or capture.doctor(), which says where NaN came from.",
  nan_some: "Some weights of this head are NaN: see regard doctor, or capture.doctor(), which says where NaN came from.",

  patterns: "Patterns",
  strongest: "Strongest links",
  no_links: "No links are known.",
  photo_beyond: "beyond the image",
  photo_part: "of bare patches this file does not hold the weight",
  looks_at: "looks at",
  steps: "Steps of one query",
  steps_of: "How {token} comes to look where it looks",
  steps_left_out: "This file does not hold the steps of this pair. It holds those of the head's strongest links: choose one of them on the left.",
  step_dot: "q·k",
  step_scaled: "÷ √d",
  step_scaled_other: "× {scale}",
  step_score: "score",
  step_masked: "masked",
  step_softmax: "softmax",
  step_key: "key",
  step_1: "q of {token} has {d} numbers. Times the {d} numbers of each token's k, summed: q·k.",
  step_2: "Divided by √{d} = {root}, so that scores do not grow with the vectors' length.",
  step_2_other: "Multiplied by this model's scale, {scale}.",
  step_2_one: "This model does not divide by √{d}: its scale is 1.",
  step_3: "Softmax makes weights that add up to 1: e^(score − {lse}); {lse} is the log of Σ e^score over all keys.",
  step_3_blind: "Every key is masked for this token: all scores are −∞, and all weights are 0.",
  step_mask: "{masked} {masked|key is|keys are} masked for this token: score −∞, weight 0.",
  step_3_nan: "Softmax divides by the sum over all keys: one NaN among the scores makes every weight of the query NaN.",
  step_4: "The result: every token's value vector v times its weight, summed: Σ w·v.",
  step_4_missing: "The result is Σ w·v; this capture does not hold the values v.",
  step_bias: "The score is what the softmax gets: this model also adds a position bias or caps it.",
  result: "Σ w·v, {d} numbers",
  pair: "Why this one? q ⊙ k of {token} and {key}",
  pair_sum: "The {d} products add up to q·k = {dot}; {scaled}weight {weight}.",
  pair_divided: "divided: {scaled}; ",
  pair_times: "times {scale}: {scaled}; ",
  pair_score: "score with what the model adds: {score}; ",
  pair_masked: "masked, so the score is −∞; ",
  dimension: "dimension {index}: q {q} × k {k} = {product}",
  query_vector: "q of {token}",
  key_vector: "k of {key}",
  product_vector: "q ⊙ k",
  keys_shown: "{count} of {all} {all|key|keys}, the largest weights first",
  keys_seen: "{count} of {all} {all|key|keys} that the token sees, the largest weights first; {masked} masked",
  show_all: "Show all {count}",
  show_fewer: "Show fewer",
  effect: "link effect (%)",
  effect_option: "effect of a link: measure one below",
  effect_about:
    "How far the vector of {token} moves without {token} → {key}, in each head by itself, in %. Exact: the model ran again.",
  effect_title: "What a link does",
  effect_of: "What {token} → {key} does",
  effect_choose: "Choose a link: click a cell of the map, or one of the strongest links.",
  effect_ask: "Hide {key} from {token} and run the model again: how far does the vector of {token} move?",
  effect_link: "Measure in this head",
  effect_heads: "In all {count} heads",
  effect_running: "Measuring …",
  effect_weight: "weight",
  effect_moves: "effect",
  effect_moves_about: "How far the query's vector moves: ‖h − h₀‖ ÷ ‖h₀‖ of its last hidden state, without the link and with it.",
  effect_control: "{count} random {count|key|keys}",
  effect_control_about: "The mean effect of hiding another key from the same query, in the same head.",
  effect_p: "p",
  effect_p_about: "Share of these keys, the chosen one counted, whose effect is as large.",
  effect_caveat: "Exact. It says that the model uses the link as it is, not what it would have learnt without it.",
  effect_sentence:
    "Layer {layer}, head {head} gives {token} → {key} a weight of {weight}; without this link the vector of {token} moves by {effect}{against}.",
  effect_against: " ({count} random other {count|key|keys}: {control} on average, p = {p})",
  effect_none: "No effect of this link was measured before this file was written.",
  effect_carried: "This file holds what was measured of:",
  no_effects_no_model:
    "What the link does cannot be measured: a capture file does not hold the model. Read the text here, or take regard.effect.",
  no_effects_repeated:
    "What the link does cannot be measured: this model runs one layer several times, and an edit would change every run.",
  no_effects_windows:
    "What the link does cannot be measured: this layer reads in windows, so its queries are not the vectors that the model returns.",
  no_effects_other_tokens:
    "What the link does cannot be measured: the queries and keys of this layer are not the tokens of the text.",
  scatter_label: "Weight against effect of the link in {count} {count|head|heads}",
  scatter_x: "weight",
  scatter_y: "effect, %",
  scatter_at: "layer {layer}, head {head}: weight {weight}, effect {effect}",
  scatter_hint: "One dot per head; click one to choose it.",
  scatter_hollow: "Hollow: much weight, little effect.",

  choose_token: "Choose a token in the text (or press j and k) to see how its weights come about.",
  choose_patch: "Choose a patch or a token beside the image (or press j and k) to see how its weights come about.",
  computing: "Computing the steps …",
  no_rows:
    'This capture holds measures only: no exact rows, so no steps. Queries and keys are kept with watch(model, keep="qk").',

  choose: "What shall be read?",
  choose_intro: "Type or drop a text or an image, and see what each head of a model looks at.",
  choose_text: "Text",
  choose_model: "Model",
  choose_model_default: "Default model",
  choose_model_images: "{name} (images)",
  choose_cut: "Cut a text that is longer than the model takes",
  choose_start: "Look",
  choose_example: "Try the example",
  choose_file: "Open an image or a .regard file",
  choose_capture: "Open a text or a .regard file",
  choose_drop_text: "or drop a text or a .regard file anywhere on this page; images need a model that looks at them",
  choose_drop: "or drop a text, an image or a .regard file anywhere on this page",
  choose_image: "Image: {name}",
  choose_image_beside: "The text above is read beside it, by a model that reads both.",
  choose_image_away: "Leave the image out",
  choose_dropping: "Drop it to look at it",
  choose_empty: "Type a text first.",
  choose_kind: "“{name}” is neither a text nor an image nor a .regard file.",
  choose_large: "“{name}” is too large: at most {most} MB.",
  choose_nothing: "This page carries its own data and reads no new texts. Run regard serve for that.",
  state_loading: "Loading the model …",
  state_reading: "Reading the text …",
  state_looking: "Looking at the image …",
  state_opening: "Opening the file …",
  state_seconds: "{seconds} s",
  cancel: "Cancel",
  cancelled: "Cancelled.",
  save: "Save as an image",
  warning: "Weights say where a head reads from, not why the model answers as it does.",
  loading: "Loading …",
  failed: "That did not work: {error}",
  no_server: "the server does not answer: is `regard serve` still running?",
  no_token: "the server was restarted, or this address has no token: open the URL that its terminal shows.",
  again: "Try again",

  help_title: "Keys",
  help_arrows: "move from head to head",
  help_jk: "next and previous token",
  help_patch: "on the image: next patch",
  help_search: "search heads",
  help_new: "read a new text",
  help_drawer: "show or hide head and steps",
  help_compare: "compare with a second session",
  help_help: "this help",
  help_escape: "close",
  help_about:
    "A head is coloured by one number; the map shows how its queries (rows) look at keys (columns); the text shows the chosen token's exact row. The address keeps what you see: copy it to come back.",
};

/** @type {Record<keyof typeof en, string>} */
const ko = {
  title: "regard: 헤드마다 무엇을 보는가",
  skip: "헤드 목록으로 건너뛰기",
  layer: "레이어",
  head: "헤드",
  head_at: "레이어 {layer}, 헤드 {head}",
  tokens_of: "토큰 {count}개",
  pixels_of: "{height} × {width} 픽셀 (세로 × 가로)",
  heads_of: "레이어 {layers} × 헤드 {heads}",
  session: "보고 있는 대상",
  new_text: "새로 읽기",
  compare: "비교",
  compare_end: "비교 끝내기",
  compare_with: "비교 대상",
  compare_first: "첫째",
  compare_second: "둘째",
  compare_none: "비교할 대상이 아직 없습니다. 텍스트를 하나 더 읽어 주세요.",
  difference: "차이로 색칠 (둘째 − 첫째)",
  difference_impossible: "두 대상의 레이어나 헤드 수가 달라서 차이를 색칠할 수 없습니다.",
  language: "언어",
  theme: "화면 밝기",
  theme_auto: "시스템 설정",
  theme_light: "밝게",
  theme_dark: "어둡게",
  help: "도움말",
  close: "닫기",
  drawer: "헤드와 계산 과정",
  drawer_open: "헤드와 계산 과정 펼치기",
  drawer_close: "헤드와 계산 과정 접기",

  atlas: "헤드",
  map: "맵",
  text: "텍스트",
  image: "이미지",
  measure: "색 기준",
  view_grid: "격자",
  view_grid_title: "레이어와 헤드의 격자",
  view_list_title: "목록, 큰 값부터",
  view_rising_title: "목록, 작은 값부터",
  view: "배치",
  find: "헤드 검색",
  find_example: "induction > 0.4",
  found: "헤드 {all}개 중 {count}개",
  and_more: "외 {count}개",
  sorted_by: "{measure} 순",
  no_head: "조건에 맞는 헤드가 없습니다.",
  legend: "색 범위 {low} ~ {high}",
  legend_alike: "모든 헤드에서 {value}",
  atlas_label: "헤드: 행은 레이어, 열은 헤드입니다. 방향키로 이동합니다.",
  find_unknown: "“{word}”: 없는 지표입니다. 쓸 수 있는 이름: {names}.",
  find_number: "“{word}” 뒤에는 숫자가 와야 합니다. 예: {example}.",
  find_operator: "“{word}”에는 비교가 필요합니다. 예: {word} > 0.4.",
  find_label: "“{word}”: 없는 패턴입니다. 쓸 수 있는 이름: {names}.",
  find_bracket: "괄호가 닫히지 않았습니다. “)”가 빠졌습니다.",
  find_rest: "“{word}”: 여기에 올 수 없습니다. 조건은 and, or로 이어 주세요.",
  find_end: "조건이 끝나지 않았습니다. 지표 이름이 빠졌습니다.",
  find_character: "“{word}”: 검색식에 쓸 수 없는 문자입니다.",

  entropy: "엔트로피",
  effective: "유효 키 수(1/Σw²)",
  received_max: "한 키가 받는 최대 비율",
  first: "첫 토큰(싱크)",
  own: "자기 자신",
  previous: "이전 토큰",
  next: "다음 토큰",
  neighbours: "주변 토큰",
  uniform: "고른 분포",
  delimiter: "구분자",
  "same token": "같은 토큰",
  induction: "인덕션",
  about_entropy: "쿼리의 어텐션이 얼마나 퍼져 있는지를 나타냅니다(단위 nat). 0이면 키 하나에만 집중합니다.",
  about_effective: "쿼리 하나가 몇 개의 키에 나누어 보는지: 가중치의 1/Σw², 쿼리에 대한 평균입니다.",
  about_received_max: "전체 어텐션 가운데 가장 많이 받는 키 하나의 비율입니다.",
  about_first: "첫 토큰에 주는 평균 가중치입니다. 많은 헤드가 여기에 머뭅니다.",
  about_own: "쿼리 자신의 토큰에 주는 평균 가중치입니다.",
  about_previous: "바로 앞 토큰에 주는 평균 가중치입니다(앞 토큰이 있는 경우).",
  about_next: "바로 뒤 토큰에 주는 평균 가중치입니다(뒤 토큰이 있는 경우).",
  about_neighbours: "쿼리 주변 토큰에 주는 가중치입니다.",
  about_uniform: "모든 키를 얼마나 고르게 보는지를 나타냅니다.",
  about_delimiter: "마침표나 [SEP] 등에 주는 가중치입니다. 첫 토큰은 빼고 셉니다.",
  "about_same token": "같은 토큰이 나오는 가장 가까운 다른 위치에 주는 가중치입니다(그런 위치가 있는 토큰만).",
  about_induction: "앞서 나온 같은 토큰의 바로 다음 토큰에 주는 가중치입니다(앞서 나온 토큰만).",
  max_weight: "최대 가중치",
  no_label: "뚜렷한 패턴 없음",
  nan_all: "이 헤드의 가중치가 모두 NaN입니다. NaN이 어디서 왔는지는 regard doctor 또는 capture.doctor()로 확인하세요.",
  nan_some: "이 헤드의 가중치 일부가 NaN입니다. NaN이 어디서 왔는지는 regard doctor 또는 capture.doctor()로 확인하세요.",

  patterns: "패턴",
  strongest: "가장 강한 연결",
  no_links: "알려진 연결이 없습니다.",
  photo_beyond: "이미지 밖",
  photo_part: "색이 없는 패치의 가중치는 이 파일에 없습니다",
  looks_at: "에서 보는 토큰:",
  steps: "쿼리 하나의 계산 과정",
  steps_of: "{token}의 가중치가 정해지는 과정",
  steps_left_out: "이 파일에는 이 쌍의 계산 과정이 없습니다. 이 헤드의 가장 강한 연결은 들어 있으니 왼쪽에서 골라 보세요.",
  step_dot: "q·k",
  step_scaled: "÷ √d",
  step_scaled_other: "× {scale}",
  step_score: "점수",
  step_masked: "마스크 후",
  step_softmax: "softmax",
  step_key: "키",
  step_1: "{token}의 q는 숫자 {d}개입니다. 각 토큰의 k와 성분끼리 곱해 모두 더하면 q·k입니다.",
  step_2: "√d로 나눕니다(√{d} = {root}). 벡터가 길어져도 점수가 커지지 않게 하기 위해서입니다.",
  step_2_other: "q·k에 모델의 스케일을 곱합니다(× {scale}).",
  step_2_one: "이 모델은 √d로 나누지 않습니다(d = {d}). 스케일이 1입니다.",
  step_3: "softmax로 합이 1인 가중치를 만듭니다: e^(점수 − {lse}). 여기서 {lse} = log Σ e^점수이고, 합은 모든 키에 대한 것입니다.",
  step_3_blind: "이 토큰에는 모든 키가 가려져 있습니다. 점수는 모두 −∞, 가중치는 모두 0입니다.",
  step_mask: "이 토큰에는 키 {masked}개가 가려져 있습니다. 점수는 −∞, 가중치는 0입니다.",
  step_3_nan: "softmax는 모든 키에 대한 합으로 나누므로, 점수 하나가 NaN이면 이 쿼리의 가중치가 모두 NaN이 됩니다.",
  step_4: "결과는 각 토큰의 값 벡터 v에 가중치를 곱해 모두 더한 Σ w·v입니다.",
  step_4_missing: "결과는 Σ w·v이지만, 이 캡처에는 값 벡터 v가 없습니다.",
  step_bias: "점수는 softmax에 들어가는 값입니다. 이 모델은 여기에 위치 바이어스를 더하거나 상한을 둡니다.",
  result: "Σ w·v, 숫자 {d}개",
  pair: "왜 이 키인가? {token} → {key}: q ⊙ k",
  pair_sum: "곱 {d}개를 모두 더하면 q·k = {dot}, {scaled}가중치는 {weight}입니다.",
  pair_divided: "나누면 {scaled}, ",
  pair_times: "스케일({scale})을 곱하면 {scaled}, ",
  pair_score: "모델이 더하는 값까지 넣은 점수는 {score}, ",
  pair_masked: "마스크에 가려져 점수는 −∞, ",
  dimension: "{index}번 성분: q {q} × k {k} = {product}",
  query_vector: "{token}의 q",
  key_vector: "{key}의 k",
  product_vector: "q ⊙ k",
  keys_shown: "키 {all}개 중 {count}개, 가중치가 큰 순서",
  keys_seen: "보이는 키 {all}개 중 {count}개, 가중치가 큰 순서. 가려진 키 {masked}개",
  show_all: "{count}개 모두 보기",
  show_fewer: "줄여 보기",
  effect: "연결의 효과(%)",
  effect_option: "연결의 효과: 아래에서 측정하세요",
  effect_about:
    "헤드마다 {token} → {key} 연결을 끊었을 때 {token}의 벡터가 움직이는 정도(%)입니다. 모델을 다시 실행해 잰 정확한 값입니다.",
  effect_title: "연결의 효과",
  effect_of: "{token} → {key} 연결의 효과",
  effect_choose: "연결을 골라 주세요. 맵의 칸이나 가장 강한 연결 중 하나를 누르면 됩니다.",
  effect_ask: "{token} → {key} 연결을 끊고 모델을 다시 실행하면 {token}의 벡터가 얼마나 움직일까요?",
  effect_link: "이 헤드에서 측정",
  effect_heads: "헤드 {count}개 모두 측정",
  effect_running: "측정하는 중 …",
  effect_weight: "가중치",
  effect_moves: "효과",
  effect_moves_about: "쿼리 벡터가 움직인 정도: 연결을 끊었을 때와 그대로 둘 때, 마지막 은닉 상태의 ‖h − h₀‖ ÷ ‖h₀‖입니다.",
  effect_control: "무작위 키 {count}개",
  effect_control_about: "같은 헤드, 같은 쿼리에서 다른 키를 가렸을 때의 평균 효과입니다.",
  effect_p: "p",
  effect_p_about: "고른 키까지 포함해, 효과가 이만큼 큰 키의 비율입니다.",
  effect_caveat: "정확한 값입니다. 지금의 모델이 이 연결을 쓴다는 뜻이며, 이 연결 없이 학습했을 때의 결과는 아닙니다.",
  effect_sentence:
    "레이어 {layer}, 헤드 {head}에서 {token} → {key} 가중치: {weight}. 이 연결을 끊으면 {token}의 벡터가 {effect} 움직입니다{against}.",
  effect_against: " (무작위로 고른 다른 키 {count}개: 평균 {control}, p = {p})",
  effect_none: "이 파일을 만들기 전에 이 연결의 효과를 측정하지 않았습니다.",
  effect_carried: "이 파일에 효과가 들어 있는 연결:",
  no_effects_no_model:
    "연결의 효과를 측정할 수 없습니다. 캡처 파일에는 모델이 없습니다. 여기서 텍스트를 읽거나 regard.effect를 쓰세요.",
  no_effects_repeated:
    "연결의 효과를 측정할 수 없습니다. 이 모델은 한 레이어를 여러 번 실행하므로, 연결을 끊으면 모든 실행이 바뀝니다.",
  no_effects_windows:
    "연결의 효과를 측정할 수 없습니다. 이 레이어는 윈도 단위로 읽으므로, 쿼리가 모델이 내놓는 벡터와 대응하지 않습니다.",
  no_effects_other_tokens: "연결의 효과를 측정할 수 없습니다. 이 레이어의 쿼리와 키는 텍스트의 토큰이 아닙니다.",
  scatter_label: "헤드 {count}개에서 연결의 가중치와 효과",
  scatter_x: "가중치",
  scatter_y: "효과(%)",
  scatter_at: "레이어 {layer}, 헤드 {head}: 가중치 {weight}, 효과 {effect}",
  scatter_hint: "점 하나가 헤드 하나입니다. 누르면 그 헤드를 고릅니다.",
  scatter_hollow: "속이 빈 점: 가중치는 크지만 효과가 작은 헤드.",

  choose_token: "텍스트에서 토큰을 고르면(또는 j, k 키) 가중치가 어떻게 정해지는지 보여 줍니다.",
  choose_patch: "패치나 이미지 옆의 토큰을 고르면(또는 j, k 키) 가중치가 어떻게 정해지는지 보여 줍니다.",
  computing: "계산하는 중 …",
  no_rows:
    '이 캡처에는 지표만 있고 정확한 행이 없어 계산 과정을 보여 줄 수 없습니다. watch(model, keep="qk")로 캡처하면 쿼리와 키가 함께 저장됩니다.',

  choose: "무엇을 읽을까요?",
  choose_intro: "텍스트를 입력하거나 텍스트·이미지를 끌어다 놓으면, 모델의 헤드마다 어디를 보는지 보여 줍니다.",
  choose_text: "텍스트",
  choose_model: "모델",
  choose_model_default: "기본 모델",
  choose_model_images: "{name} (이미지)",
  choose_cut: "모델이 받는 길이를 넘는 텍스트는 잘라서 읽기",
  choose_start: "보기",
  choose_example: "예문으로 해 보기",
  choose_file: "이미지나 .regard 파일 열기",
  choose_capture: "텍스트나 .regard 파일 열기",
  choose_drop_text: "텍스트나 .regard 파일을 이 페이지 아무 곳에나 끌어다 놓아도 됩니다. 이미지는 이미지를 보는 모델이 필요합니다",
  choose_drop: "텍스트, 이미지, .regard 파일을 이 페이지 아무 곳에나 끌어다 놓아도 됩니다",
  choose_image: "이미지: {name}",
  choose_image_beside: "텍스트도 함께 읽는 모델이라면 위의 텍스트를 함께 읽습니다.",
  choose_image_away: "이미지 빼기",
  choose_dropping: "여기에 놓으세요",
  choose_empty: "먼저 텍스트를 입력해 주세요.",
  choose_kind: "“{name}”: 텍스트도 이미지도 .regard 파일도 아닙니다.",
  choose_large: "“{name}”: 파일이 너무 큽니다. 최대 {most} MB까지 됩니다.",
  choose_nothing: "이 페이지는 자체 데이터만 담고 있어 새 텍스트를 읽지 않습니다. regard serve를 실행해 주세요.",
  state_loading: "모델을 불러오는 중 …",
  state_reading: "텍스트를 읽는 중 …",
  state_looking: "이미지를 보는 중 …",
  state_opening: "파일을 여는 중 …",
  state_seconds: "{seconds}초",
  cancel: "취소",
  cancelled: "취소했습니다.",
  save: "그림으로 저장",
  warning: "가중치는 헤드가 어디를 읽었는지를 보여 줄 뿐, 모델이 그렇게 답한 이유가 아닙니다.",
  loading: "불러오는 중 …",
  failed: "문제가 생겼습니다: {error}",
  no_server: "서버가 응답하지 않습니다. `regard serve`가 실행 중인지 확인하세요.",
  no_token: "서버가 다시 시작되었거나 주소에 토큰이 없습니다. 터미널에 표시된 URL로 접속하세요.",
  again: "다시 시도",

  help_title: "단축키",
  help_arrows: "헤드 이동",
  help_jk: "다음 / 이전 토큰",
  help_patch: "이미지 위에서: 옆 패치로 이동",
  help_search: "헤드 검색",
  help_new: "새 텍스트 읽기",
  help_drawer: "헤드와 계산 과정 펼치기 / 접기",
  help_compare: "다른 대상과 비교",
  help_help: "이 도움말",
  help_escape: "닫기",
  help_about:
    "헤드 하나는 숫자 하나로 색칠합니다. 맵은 쿼리(행)가 키(열)를 어떻게 보는지, 텍스트는 고른 토큰의 정확한 행을 보여 줍니다. 주소에 지금 상태가 담기므로 복사해 두면 그대로 다시 열 수 있습니다.",
};

const WORDS = { en, ko };

/** @typedef {keyof typeof en} Word */
/** @typedef {keyof typeof WORDS} Lang */

/**
 * A text of the page, with its places filled: say("ko", "found", { count: 3, all: 72 }). {count|key|keys} is "key" for 1.
 * @param {Lang} lang
 * @param {Word} word
 * @param {Record<string, string | number>} [given]
 * @returns {string}
 */
export function say(lang, word, given = {}) {
  return sayAround(lang, word, given).join("");
}

/**
 * The same in parts, so that what fills a place may be an element, as a label in a direction of its own is.
 * @template Part
 * @param {Lang} lang
 * @param {Word} word
 * @param {Record<string, Part | number>} given
 * @returns {(Part | string)[]}
 */
export function sayAround(lang, word, given) {
  return WORDS[lang][word].split(/(\{[^}]+\})/).map((part) => {
    const [, name, one, many] = /^\{(\w+)(?:\|([^|]*)\|([^|]*))?\}$/.exec(part) ?? [];
    if (name === undefined || !(name in given)) return part;
    if (one !== undefined) return String(given[name]) === "1" ? one : many;
    const value = given[name];
    return typeof value === "number" ? String(value) : value;
  });
}

/**
 * A measure's or pattern's name for people; as it is, where the page has no word for it.
 * @param {Lang} lang
 * @param {string} name
 * @returns {string}
 */
export function nameOf(lang, name) {
  const words = /** @type {Record<string, string>} */ (WORDS[lang]);
  return Object.hasOwn(words, name) ? words[name] : name.replaceAll("_", " ");
}

/**
 * What a measure means, "" where the page does not know.
 * @param {Lang} lang
 * @param {string} name
 * @returns {string}
 */
export function aboutMeasure(lang, name) {
  const words = /** @type {Record<string, string>} */ (WORDS[lang]);
  return Object.hasOwn(words, `about_${name}`) ? words[`about_${name}`] : "";
}

/**
 * The language that a browser asks for.
 * @returns {Lang}
 */
export function browserLanguage() {
  const asked = globalThis.navigator?.languages ?? [];
  const known = asked.map((tag) => tag.slice(0, 2)).find((tag) => tag in WORDS);
  return known === "ko" ? "ko" : "en";
}

/**
 * A number for people: few digits, no needless zeros, never "0.00" for what is not zero; "–" where it is not known.
 * @param {number | null | undefined} value
 * @returns {string}
 */
export function figure(value) {
  if (value === null || value === undefined) return "–";
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  const digits = size >= 1e7 ? -1 : size === 0 || size >= 100 ? 0 : size >= 10 ? 1 : size >= 0.01 ? 2 : size >= 0.0001 ? 4 : -1;
  const text = digits < 0 ? value.toExponential(0) : digits < 4 ? value.toFixed(digits) : value.toPrecision(1);
  return text.replaceAll("-", "−");
}

/** The sentence that the documents use. */
export const EXAMPLE = "The animal didn't cross the street because it was too tired.";
