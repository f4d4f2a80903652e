// Arrays as an exported page carries them: floats, or whole numbers of two or four bytes, compressed where that pays.
// A head's arrays are unpacked when they are first asked for. Written by `regard.explorer.export`.
// It does not know what an array means.

/** @typedef {import("./arrays.js").Numbers} Numbers */
/**
 * error: the largest rounding error of weights, which are then u16 and 65,535 times as large.
 * @typedef {{shape: number[], f32?: string, u16?: string, u32?: string, deflate?: boolean, error?: number}} Packed
 */

const LEVELS = 65535; // of a rounded weight

/** @type {WeakMap<Packed, Promise<Numbers>>} */
const unpacked = new WeakMap();

/**
 * A packed array as numbers; the same promise for the same array.
 * @param {Packed} packed
 * @returns {Promise<Numbers>}
 */
export function numbers(packed) {
  let found = unpacked.get(packed);
  if (found === undefined) {
    found = unpack(packed);
    unpacked.set(packed, found);
  }
  return found;
}

/**
 * @param {Packed} packed
 * @returns {Promise<Numbers>}
 */
async function unpack(packed) {
  const bytes = Uint8Array.from(atob(packed.f32 ?? packed.u16 ?? packed.u32 ?? ""), (letter) => letter.charCodeAt(0));
  const plain = packed.deflate ? await inflated(bytes) : bytes.buffer;
  const view = new DataView(plain);
  const [width, read] =
    packed.f32 !== undefined
      ? [4, (/** @type {number} */ at) => view.getFloat32(at, true)]
      : packed.u32 !== undefined
        ? [4, (/** @type {number} */ at) => view.getUint32(at, true)]
        : [2, (/** @type {number} */ at) => view.getUint16(at, true)];
  const data = new Float32Array(plain.byteLength / width); // a key's number is exact there up to 2^24
  const unit = packed.error === undefined ? 1 : LEVELS;
  for (let i = 0; i < data.length; i++) data[i] = read(i * width) / unit;
  return { shape: packed.shape, data };
}

/** @param {Uint8Array<ArrayBuffer>} bytes */
async function inflated(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}
