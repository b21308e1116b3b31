// SHA-256 as a synchronous function without dependencies. `crypto.subtle` is asynchronous, and is missing on pages that
// were loaded over plain http, except from loopback.

/** Return the first 32 bits of the fraction of a number. For the roots of primes, the result is one of the constants of
 * SHA-256 (FIPS 180-4). */
const fraction = (root) => Math.floor((root - Math.floor(root)) * 2 ** 32) | 0;

const PRIMES = [];
for (let candidate = 2; PRIMES.length < 64; candidate += 1) if (PRIMES.every((prime) => candidate % prime)) PRIMES.push(candidate);
const ROUNDS = PRIMES.map((prime) => fraction(Math.cbrt(prime)));
const START = PRIMES.slice(0, 8).map((prime) => fraction(Math.sqrt(prime)));

const turn = (word, bits) => (word >>> bits) | (word << (32 - bits));

/** Return the SHA-256 of a text or of bytes, in hexadecimal digits. @param {string|Uint8Array} value @returns {string}
 */
export function sha256(value) {
  const bytes = typeof value === "string" ? new TextEncoder().encode(value) : value;
  const blocks = new DataView(new ArrayBuffer((((bytes.length + 8) >> 6) + 1) * 64));
  bytes.forEach((byte, place) => blocks.setUint8(place, byte));
  blocks.setUint8(bytes.length, 0x80);
  blocks.setUint32(blocks.byteLength - 8, Math.floor(bytes.length / 2 ** 29));
  blocks.setUint32(blocks.byteLength - 4, bytes.length << 3);
  let state = START;
  for (let place = 0; place < blocks.byteLength; place += 64) state = mix(state, blocks, place);
  return state.map((word) => (word >>> 0).toString(16).padStart(8, "0")).join("");
}

function mix(state, blocks, start) {
  const words = Array.from({ length: 16 }, (_, place) => blocks.getInt32(start + place * 4));
  for (let at = 16; at < 64; at += 1) {
    const [old, late] = [words[at - 15], words[at - 2]];
    const small = turn(old, 7) ^ turn(old, 18) ^ (old >>> 3);
    const large = turn(late, 17) ^ turn(late, 19) ^ (late >>> 10);
    words.push((words[at - 16] + small + words[at - 7] + large) | 0);
  }
  let [a, b, c, d, e, f, g, h] = state;
  for (let at = 0; at < 64; at += 1) {
    const chosen = (turn(e, 6) ^ turn(e, 11) ^ turn(e, 25)) + ((e & f) ^ (~e & g));
    const one = (h + chosen + ROUNDS[at] + words[at]) | 0;
    const two = ((turn(a, 2) ^ turn(a, 13) ^ turn(a, 22)) + ((a & b) ^ (a & c) ^ (b & c))) | 0;
    [a, b, c, d, e, f, g, h] = [(one + two) | 0, a, b, c, (d + one) | 0, e, f, g];
  }
  return [a, b, c, d, e, f, g, h].map((word, place) => (word + state[place]) | 0);
}
