// Ticks of linear, logarithmic and time axes.

import { tick } from '../format.js';

/** Returns {values, labels} for a linear axis with about `target` ticks. */
export function linearTicks(min, max, target = 6) {
  const rough = (max - min) / Math.max(1, target);
  if (!(rough > 0)) return { values: [min], labels: [tick(min, 0)] };
  const power = 10 ** Math.floor(Math.log10(rough));
  const factor = [1, 2, 2.5, 5, 10].find((one) => one * power >= rough * 0.999);
  const step = factor * power;
  const values = [];
  for (let i = Math.ceil(min / step - 1e-9); i * step <= max + step * 1e-9; i += 1) {
    values.push(+(i * step).toPrecision(12));
    if (values.length > 50) break;
  }
  return { values, labels: values.map((value) => tick(value, step)) };
}

/** Returns ticks of a logarithmic axis: powers of two, powers of ten, or 1, 2 and 5. */
export function logTicks(min, max, target = 6) {
  const isPower = (value) => Math.abs(Math.log2(value) % 1) < 1e-9;
  let values = [];
  if (isPower(min) && isPower(max) && max / min <= 2 ** 10 && max >= 2) {
    for (let value = min; value <= max * 1.0001; value *= 2) values.push(value);
  } else {
    const decades = Math.log10(max / min);
    const factors = decades > 2.5 ? [1] : decades > 1.2 ? [1, 2, 5] : [1, 1.5, 2, 3, 5, 7];
    for (let p = Math.floor(Math.log10(min)); p <= Math.ceil(Math.log10(max)); p += 1) {
      for (const factor of factors) {
        const value = +(factor * 10 ** p).toPrecision(6);
        if (value >= min * 0.9999 && value <= max * 1.0001) values.push(value);
      }
    }
    if (values.length < 2) values = linearTicks(min, max, target).values.filter((v) => v > 0);
  }
  const every = Math.max(1, Math.ceil(values.length / (target + 3)));
  values = values.filter((_, i) => i % every === 0);
  return { values, labels: values.map((value) => tick(value, 0)) };
}

/** Returns ticks at given values, such as lengths of rungs, where they have room. */
export function fixedTicks(candidates, min, max, isLog) {
  const map = isLog ? Math.log : (value) => value;
  const span = map(max) - map(min);
  const values = [];
  for (const value of candidates) {
    if (value < min * (isLog ? 0.9999 : 1) - (isLog ? 0 : 1e-9) || value > max) continue;
    if (values.length && (map(value) - map(values[values.length - 1])) / span < 0.07) continue;
    values.push(value);
  }
  return { values, labels: values.map((value) => tick(value, 0)) };
}

/** Returns ticks of relative time, such as "−10 min" and, at the end, `last`. */
export function agoTicks(min, max, target = 4, last = 'now') {
  const steps = [1, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400];
  const step = steps.find((one) => (max - min) / one <= target) || (max - min) / target;
  const values = [];
  for (let at = max; at >= min - step * 0.02; at -= step) values.unshift(at);
  const labels = values.map((value) => {
    const ago = Math.round(max - value);
    if (ago === 0) return last;
    if (step >= 3600) return `\u2212${+(ago / 3600).toFixed(1)} h`;
    return step >= 60 ? `\u2212${+(ago / 60).toFixed(1)} min` : `\u2212${ago} s`;
  });
  return { values, labels };
}

/** Returns ticks of durations in seconds. */
export function durationTicks(min, max, target = 6) {
  const unit = max > 7200 ? 3600 : max > 180 ? 60 : 1;
  const { values, labels } = linearTicks(min / unit, max / unit, target);
  const word = unit === 3600 ? 'h' : unit === 60 ? 'min' : 's';
  return { values: values.map((value) => value * unit),
    labels: labels.map((label) => `${label} ${word}`) };
}

/** Thins ticks so that labels have at least `space` pixels. */
export function thin(ticks, pixels, space) {
  const most = Math.max(2, Math.floor(pixels / space));
  const every = Math.ceil(ticks.values.length / most);
  const keep = (_, i) => i % every === 0;
  return { values: ticks.values.filter(keep), labels: ticks.labels.filter(keep) };
}
