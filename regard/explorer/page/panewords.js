// What the map and the text pane say, in English and Korean, and how they write weights.
// It does not know where the words are put.

/** @typedef {"en" | "ko"} Lang */

const WORDS = {
  en: {
    exact: "exact",
    pooled: "pooled",
    rounded: "rounded",
    strongest: "strongest only",
    exactHint: "exact: each cell is one weight",
    pooledHint: "pooled: a cell is the share of its queries' attention that goes to its keys, together",
    loading: "fetching cells…",
    waiting: "Choose a head to see its map.",
    closer: "Zoom in (+)",
    further: "Zoom out (−)",
    all: "Show everything (0)",
    scale: "Colour scale",
    linear: "linear",
    log: "log",
    rank: "rank",
    sink: "first key",
    sinkHint: "Show the first key, which often takes most of the attention. Off: left out of the colours and hatched.",
    map: (/** @type {any} */ v) =>
      `Attention map, layer ${v.layer}, head ${v.head}: ${v.queries} queries by ${v.keys} keys, ${v.how}.` +
      (v.link ? ` Strongest link: ${v.link}.` : "") +
      " Plus, minus and zero zoom; shift and arrows move; drag moves; shift and drag chooses a part.",
    query: "query",
    key: "key",
    queries: "queries",
    keys: "keys",
    weight: "weight",
    share: "share",
    received: "received",
    entropy: "entropy",
    text: "Words; the colour of each is its weight for the chosen query word",
    ribbon: "All words; the frame is the part that is shown below",
    noRows: "This capture holds no queries and keys, so exact rows cannot be had: capture with keep=\"qk\".",
    choose: "Point at a word to see what it looks at; click to hold it.",
    held: "held: point at other words to read their weight; click again to let go",
    free: "click to hold this word",
    strongestLinks: "Strongest links",
    position: (/** @type {any} */ v) => `words ${v.from}–${v.to} of ${v.all}`,
    word: (/** @type {any} */ v) => `${v.word}, token ${v.index}${v.weight === null ? "" : `, weight ${v.weight}`}`,
    whole: "sum",
    noQueries: "The words are keys only here: choose a query in the map.",
    special: "special token",
    tokens: "Tokens that are no patches; the colour of each is its weight for the chosen query",
    keyTokens: "Keys that are no patches; the colour of each is its weight for the chosen query",
    images: "Image",
    photo: (/** @type {any} */ v) =>
      `Image${v.name ? ` ${v.name}` : ""} in ${v.rows} × ${v.columns} patches, coloured by their weight for the chosen query. ` +
      "The arrow keys move from patch to patch; Enter holds one.",
    patchesOf: (/** @type {any} */ v) => `${v.rows} × ${v.columns} patches`,
    inWindows: (/** @type {any} */ v) => `${v.windows} windows: a patch sees its own window alone`,
    hatched: "hatched: the model did not see it",
    noImage: "the image itself is not in this capture",
    imageLost: (/** @type {any} */ v) => `the image did not come: ${v.why}`,
    noPatches: "no token of this layer is a patch",
    choosePatch: "Point at a patch or a token to see what it looks at; click to hold it.",
    heldPatch: "held: point at the image to read single weights; click again to let go",
    freePatch: "click to hold",
    window: (/** @type {any} */ v) => `window ${v.window} of ${v.windows}`,
    nan: "weights are NaN: see regard doctor",
    stretched: "drawn broader than it is, so that patches can be hit",
    windowHint: "The map shows one window, that of the chosen patch: patches of different windows do not see each other.",
    kinds: {
      text: "text",
      patch: "patches",
      cls: "cls",
      distillation: "distillation",
      register: "registers",
      latent: "latents",
      padding: "padding",
    },
  },
  ko: {
    exact: "정확",
    pooled: "묶음",
    rounded: "반올림",
    strongest: "강한 것만",
    exactHint: "정확: 칸 하나가 가중치 하나입니다",
    pooledHint: "묶음: 칸은 그 쿼리들의 어텐션 가운데 그 키들로 가는 몫입니다",
    loading: "칸을 가져오는 중…",
    waiting: "헤드를 고르면 맵이 보입니다.",
    closer: "확대 (+)",
    further: "축소 (−)",
    all: "전체 보기 (0)",
    scale: "색 눈금",
    linear: "선형",
    log: "로그",
    rank: "순위",
    sink: "첫 키",
    sinkHint: "어텐션을 많이 받곤 하는 첫 키를 보여 줍니다. 끄면 색에서 빼고 빗금으로 그립니다.",
    map: (/** @type {any} */ v) =>
      `어텐션 맵, 레이어 ${v.layer}, 헤드 ${v.head}: 쿼리 ${v.queries}개, 키 ${v.keys}개, ${v.how}.` +
      (v.link ? ` 가장 강한 연결: ${v.link}.` : "") +
      " 더하기, 빼기, 0으로 확대와 축소, Shift와 화살표로 이동, 끌어서 이동, Shift를 누르고 끌면 영역 선택.",
    query: "쿼리",
    key: "키",
    queries: "쿼리",
    keys: "키",
    weight: "가중치",
    share: "몫",
    received: "받은 양",
    entropy: "엔트로피",
    text: "단어들; 색은 고른 쿼리 단어가 주는 가중치",
    ribbon: "모든 단어; 테두리는 아래에 보이는 부분",
    noRows: "이 캡처에는 쿼리와 키가 없어 정확한 행을 볼 수 없습니다: keep=\"qk\"로 캡처하세요.",
    choose: "단어를 가리키면 무엇을 보는지 나타납니다. 누르면 고정됩니다.",
    held: "고정됨: 다른 단어를 가리키면 가중치가 보입니다. 다시 누르면 풀립니다",
    free: "누르면 이 단어를 고정합니다",
    strongestLinks: "가장 강한 연결",
    position: (/** @type {any} */ v) => `단어 ${v.from}–${v.to} / ${v.all}`,
    word: (/** @type {any} */ v) => `${v.word}, 토큰 ${v.index}${v.weight === null ? "" : `, 가중치 ${v.weight}`}`,
    whole: "합",
    noQueries: "여기서 단어는 키입니다. 쿼리는 맵에서 고르세요.",
    special: "특수 토큰",
    tokens: "패치가 아닌 토큰; 색은 고른 쿼리가 주는 가중치",
    keyTokens: "패치가 아닌 키; 색은 고른 쿼리가 주는 가중치",
    images: "이미지",
    photo: (/** @type {any} */ v) =>
      `이미지${v.name ? ` ${v.name}` : ""}, 패치 ${v.rows} × ${v.columns}. 색은 고른 쿼리가 주는 가중치입니다. ` +
      "화살표 키로 패치를 옮기고 Enter로 고정합니다.",
    patchesOf: (/** @type {any} */ v) => `패치 ${v.rows} × ${v.columns}`,
    inWindows: (/** @type {any} */ v) => `윈도 ${v.windows}개: 패치는 자기 윈도 안만 봅니다`,
    hatched: "빗금: 모델이 보지 않은 부분",
    noImage: "이 캡처에는 이미지 자체가 들어 있지 않습니다",
    imageLost: (/** @type {any} */ v) => `이미지를 불러오지 못했습니다: ${v.why}`,
    noPatches: "이 레이어에는 패치인 토큰이 없습니다",
    choosePatch: "패치나 토큰을 가리키면 무엇을 보는지 나타납니다. 누르면 고정됩니다.",
    heldPatch: "고정됨: 이미지를 가리키면 가중치가 하나씩 보입니다. 다시 누르면 풀립니다",
    freePatch: "누르면 고정합니다",
    window: (/** @type {any} */ v) => `윈도 ${v.window} / ${v.windows}`,
    nan: "가중치가 NaN입니다: regard doctor로 확인하세요",
    stretched: "패치를 가리킬 수 있도록 실제보다 넓게 그렸습니다",
    windowHint: "맵은 고른 패치가 속한 윈도 하나를 보여 줍니다. 서로 다른 윈도의 패치는 서로를 보지 않습니다.",
    kinds: {
      text: "텍스트",
      patch: "패치",
      cls: "cls",
      distillation: "증류 토큰",
      register: "레지스터",
      latent: "잠재 토큰",
      padding: "패딩",
    },
  },
};

/**
 * The words of a language.
 * @param {string} lang
 * @returns {typeof WORDS.en}
 */
export function wordsFor(lang) {
  return lang === "ko" ? WORDS.ko : WORDS.en;
}

/**
 * What an answer says of itself, in words: exact, pooled, rounded, strongest only.
 * @param {string} how
 * @param {string} lang
 */
export function howWords(how, lang) {
  const words = wordsFor(lang);
  return how === "exact" || how === "pooled" || how === "rounded" || how === "strongest" ? words[how] : how;
}

/**
 * A kind of token, in words.
 * @param {string} kind
 * @param {string} lang
 */
export function kindWords(kind, lang) {
  const kinds = /** @type {Record<string, string>} */ (wordsFor(lang).kinds);
  return Object.hasOwn(kinds, kind) ? kinds[kind] : kind;
}

/**
 * A weight in four digits; "–" where it is not known.
 * @param {number | null | undefined} weight
 */
export function digits(weight) {
  if (weight === null || weight === undefined) return "–";
  if (Number.isNaN(weight)) return "NaN";
  if (weight === 0) return "0";
  return weight >= 0.001 ? weight.toFixed(4) : weight.toExponential(2).replace("-", "−");
}
