// Parts of the rung ladder: jitter, histogram strip and the words for the promoted part.

import { alpha, colors } from '../theme.js';

/** Returns -1 to 1, a function of the index, so that a reload draws the same picture. */
export function jitter(index) {
  let hash = Math.imul(index + 1, 0x9e3779b1);
  hash = Math.imul(hash ^ (hash >>> 15), 0x85ebca6b);
  return ((hash ^ (hash >>> 13)) >>> 0) / 2 ** 31 - 1;
}

/** Draws a strip of bars: the distribution of results of a rung with many dots. */
export function drawHistogram(ctx, dots, layout, i) {
  const { range: { min, max }, box, spread } = layout;
  const bins = new Float64Array(48);
  for (const { value } of dots) {
    if (!Number.isFinite(value)) continue;
    const at = Math.floor(((value - min) / (max - min)) * bins.length);
    bins[Math.max(0, Math.min(bins.length - 1, at))] += 1;
  }
  const most = Math.max(1, ...bins);
  const height = box.height / bins.length;
  ctx.fillStyle = alpha(colors().text3, 0.35);
  bins.forEach((number, k) => {
    const half = (spread * number) / most;
    const y = box.top + box.height - (k + 1) * height;
    ctx.fillRect(layout.x(i) - half, y + 0.5, 2 * half, Math.max(1, height - 1));
  });
}

/** Names the promoted part of a rung, such as "best quarter". */
export function partWord(rungs) {
  const factor = rungs.find((rung) => Number.isFinite(rung.factor))?.factor;
  if (!factor) return 'best part';
  const words = { 0.25: 'best quarter', 0.5: 'best half' };
  if (words[factor]) return words[factor];
  return Math.abs(factor - 1 / 3) < 0.01 ? 'best third' : `best ${Math.round(factor * 100)} %`;
}
