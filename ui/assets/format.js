// Formats numbers, names and times for people. No function here touches the document.

export const MINUS = '\u2212';
const NAME_LIMIT = 40;
const UNSAFE = /[\u0000-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g;

const withMinus = (text) => text.replaceAll('-', MINUS);

/** Formats a metric with four decimals. A missing value is an en dash. */
export function result(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return '–';
  if (!Number.isFinite(value)) return value > 0 ? '∞' : `${MINUS}∞`;
  const size = Math.abs(value);
  // The server has the same limits.
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return withMinus(value.toExponential(3));
  return withMinus(value.toFixed(digits));
}

export const NONFINITE = 'NaN or infinite';

/** Formats the value of a curve, which is null at NaN and infinity. */
export const point = (value) => (value === null ? NONFINITE : result(value));

/** Formats a hyperparameter: integers as they are, other numbers with three digits. */
export function parameter(value) {
  if (value === null || value === undefined) return 'not set';
  if (typeof value !== 'number') return name(value);
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e7) return withMinus(String(value));
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return withMinus(value.toExponential(2));
  return withMinus(trimZeros(value.toPrecision(3)));
}

const trimZeros = (text) => (/^-?\d+\.0+$/.test(text) ? text.replace(/\.0+$/, '') : text);

/** Formats a count with thousands separators. */
export function count(value) {
  return String(Math.round(value)).replace(/\B(?=(\d{3})+$)/g, ',');
}

/** Returns "1 trial" or "3 trials". */
export function plural(number, word) {
  return `${count(number)} ${word}${number === 1 ? '' : 's'}`;
}

/** Shows control and bidirectional characters as escapes. */
export function escapes(text) {
  return String(text).replace(UNSAFE, (character) => {
    const code = character.charCodeAt(0).toString(16);
    return `\\u{${code}}`;
  });
}

/** Shortens a name in the middle to at most 40 characters. */
export function name(text, limit = NAME_LIMIT) {
  const whole = String(text);
  // Slice before splitting, so that a name of megabytes costs little.
  const head = Array.from(escapes(whole.slice(0, limit * 2)));
  const tail = Array.from(escapes(whole.slice(-limit * 2)));
  if (whole.length <= limit * 2 && head.length <= limit) return head.join('');
  const left = Math.ceil((limit - 1) / 2);
  return `${head.slice(0, left).join('')}…${tail.slice(-(limit - 1 - left)).join('')}`;
}

/** Formats the tick of an axis; `step` is the distance between ticks. */
export function tick(value, step) {
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) {
    return withMinus(value.toExponential(1).replace('.0e', 'e').replace('e+', 'e'));
  }
  if (step >= 1000 && value % 1000 === 0) return withMinus(`${value / 1000}k`);
  if (!step) return withMinus(size >= 1000 ? count(value) : String(+value.toPrecision(4)));
  const digits = Math.max(0, Math.min(6, -Math.floor(Math.log10(step) + 1e-9)));
  const needs = Math.abs(step * 10 ** digits - Math.round(step * 10 ** digits)) > 1e-6;
  const text = value.toFixed(digits + (needs ? 1 : 0));
  return withMinus(size >= 1000 && digits === 0 ? count(value) : text);
}

/** Formats seconds: "45 s", "12 min", "2 h 31 min". */
export function duration(seconds) {
  if (!Number.isFinite(seconds)) return '–';
  if (seconds < 90) return `${Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 90) return `${minutes} min`;
  const rest = minutes % 60;
  return `${Math.floor(minutes / 60)} h${rest ? ` ${rest} min` : ''}`;
}

/** Formats seconds since 1970 as local time of day. */
export function clock(seconds) {
  const date = new Date(seconds * 1000);
  const two = (number) => String(number).padStart(2, '0');
  return `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

/** Formats seconds since 1970 as local time of day, with the date unless it is today. */
export function moment(seconds) {
  const two = (number) => String(number).padStart(2, '0');
  const dateOf = (at) => `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
  const date = dateOf(new Date(seconds * 1000));
  return date === dateOf(new Date()) ? clock(seconds) : `${date} ${clock(seconds)}`;
}
