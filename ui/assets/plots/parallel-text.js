// Ticks and shortened names of the parallel coordinates.

import { parameter } from '../format.js';
import { FONT } from '../theme.js';
import { linearTicks, logTicks } from './ticks.js';

/** Returns ticks of an axis, from top to bottom. */
export function ticksOf(axis, target) {
  if (axis.isCategory) {
    return { values: axis.values, labels: axis.values.map((value) => parameter(value)) };
  }
  const ticks = axis.isLog ? logTicks(axis.min, axis.max, target)
    : linearTicks(axis.min, axis.max, target);
  return { values: ticks.values.reverse(), labels: ticks.labels.reverse() };
}

/** Shortens a name until it fits a width. */
export function fit(ctx, label, width) {
  let string = parameter(label);
  ctx.font = `550 12px ${FONT}`;
  while (string.length > 3 && ctx.measureText(string).width > width) {
    string = `${string.replace('…', '').slice(0, -1)}…`;
    if (string.length <= 4) break;
  }
  return string;
}
