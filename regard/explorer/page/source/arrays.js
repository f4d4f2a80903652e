// Packed arrays as numbers and levels: {"shape", "f32"} of an answer, little-endian float32 in base64, decoded on arrival;
// those of an exported page, floats or whole numbers of up to four bytes, perhaps compressed, decoded when first asked for.

/** @typedef {{shape: number[], f32: string}} Packed  as it travels */
/** @typedef {{shape: number[], data: Float32Array}} Numbers  as the panes see it; the last axis runs fastest */

/**
 * One packed array as numbers.
 * @param {Packed} packed
 * @returns {Numbers}
 */
function unpack(packed) {
  const bytes = bytesOf(packed.f32);
  const view = new DataView(bytes.buffer);
  const data = new Float32Array(bytes.length >> 2);
  for (let i = 0; i < data.length; i++) data[i] = view.getFloat32(4 * i, true);
  return { shape: packed.shape, data };
}

/** Bytes with a scale per head, the first axis. @typedef {{shape: number[], u8: string, scale: Packed | Numbers}} PackedLevels */
/**
 * A value is its byte times its head's scale, which is NaN for a head with weights that are no numbers.
 * @typedef {{shape: number[], data: Uint8Array, scale: Float32Array}} Levels
 */

/**
 * Levels, decoded.
 * @param {PackedLevels} packed
 * @returns {Levels}
 */
export function unpackLevels({ shape, u8, scale }) {
  return { shape, data: bytesOf(u8), scale: ("f32" in scale ? unpack(scale) : scale).data };
}

/**
 * An answer with every packed array in it decoded, at any depth.
 * @param {any} answer
 * @returns {any}
 */
export function unpackAll(answer) {
  if (Array.isArray(answer)) return answer.map(unpackAll);
  if (answer === null || typeof answer !== "object") return answer;
  if (answer.data instanceof Float32Array || answer.data instanceof Uint8Array) return answer;
  if (typeof answer.u8 === "string") return unpackLevels(answer);
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

// ----------------------------------------------------------------------------------------------------- exported arrays

/**
 * error: the largest rounding error of weights, which are then whole numbers of units.  root: the numbers are their squares.
 * @typedef {{shape: number[], f32?: string, u8?: string, u16?: string, u32?: string, deflate?: boolean, unit?: number,
 *   root?: boolean, error?: number}} Compressed
 */

/** @type {WeakMap<Compressed, Promise<Numbers>>} */
const unpacked = new WeakMap();

/**
 * A packed array as numbers; the same promise for the same array.
 * @param {Compressed} packed
 * @returns {Promise<Numbers>}
 */
export function numbers(packed) {
  let found = unpacked.get(packed);
  if (found === undefined) {
    found = decode(packed);
    unpacked.set(packed, found);
  }
  return found;
}

/**
 * @param {Compressed} packed
 * @returns {Promise<Numbers>}
 */
async function decode(packed) {
  const { f32, u8, u16, u32, unit = 1, root = false } = packed;
  const bytes = bytesOf(f32 ?? u8 ?? u16 ?? u32 ?? "");
  const plain = packed.deflate ? await inflated(bytes) : bytes.buffer;
  const view = new DataView(plain);
  /** @type {[number, (at: number) => number]} */
  const [width, read] =
    f32 !== undefined
      ? [4, (at) => view.getFloat32(at, true)]
      : u8 !== undefined
        ? [1, (at) => view.getUint8(at)]
        : u16 !== undefined
          ? [2, (at) => view.getUint16(at, true)]
          : [4, (at) => view.getUint32(at, true)];
  const data = new Float32Array(plain.byteLength / width); // a key's number is exact there up to 2^24
  for (let i = 0; i < data.length; i++) data[i] = read(i * width) * unit;
  if (root) for (let i = 0; i < data.length; i++) data[i] *= data[i];
  return { shape: packed.shape, data };
}

/**
 * What JSON a compressed text holds.
 * @param {string} text  base64 of zlib
 * @returns {Promise<any>}
 */
export async function inflatedJSON(text) {
  return JSON.parse(new TextDecoder().decode(await inflated(bytesOf(text))));
}

/** @param {string} text */
function bytesOf(text) {
  return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
}

/** @param {Uint8Array<ArrayBuffer>} bytes */
async function inflated(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}
