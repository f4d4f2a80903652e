// Arrays as the answers carry them: {"shape", "f32"} with little-endian float32 in base64, decoded once on arrival.
// It does not know what an array means.

/** @typedef {{shape: number[], f32: string}} Packed  as it travels */
/** @typedef {{shape: number[], data: Float32Array}} Numbers  as the panes see it; the last axis runs fastest */

/**
 * One packed array as numbers.
 * @param {Packed} packed
 * @returns {Numbers}
 */
export function unpack(packed) {
  const bytes = Uint8Array.from(atob(packed.f32), (letter) => letter.charCodeAt(0));
  const view = new DataView(bytes.buffer);
  const data = new Float32Array(bytes.length >> 2);
  for (let i = 0; i < data.length; i++) data[i] = view.getFloat32(4 * i, true);
  return { shape: packed.shape, data };
}

/**
 * An answer with every packed array in it decoded, at any depth.
 * @param {any} answer
 * @returns {any}
 */
export function unpackAll(answer) {
  if (Array.isArray(answer)) return answer.map(unpackAll);
  if (answer === null || typeof answer !== "object") return answer;
  if (answer.data instanceof Float32Array) return answer;
  if (typeof answer.f32 === "string" && Array.isArray(answer.shape)) return unpack(answer);
  return Object.fromEntries(Object.entries(answer).map(([name, value]) => [name, unpackAll(value)]));
}

/**
 * A plain list of numbers, whether it came as a list or packed.
 * @template {number | null} T
 * @param {T[] | Numbers | null | undefined} values
 * @returns {(T | number)[]}
 */
export function list(values) {
  if (!values) return [];
  return Array.isArray(values) ? values : Array.from(values.data);
}
