// Colors of trials: by rung, result, bracket or one hyperparameter.

import { parameter, result } from '../format.js';
import { alpha, colors, ramp } from '../theme.js';

const STEPS = 16;

/** Returns {palette, bucket(row), legend, title} for an option such as "rung". */
export function colorScale(data, option) {
  const palette = Array.from({ length: STEPS }, (_, i) => ramp(i / (STEPS - 1)));
  const scale = (position, legend, title) => ({ palette, legend, title,
    bucket: (row) => {
      const at = position(row);
      return Number.isNaN(at) ? 0 : Math.round(at * (STEPS - 1));
    } });
  const axis = data.axes.find((one) => one.name === option);
  if (axis) return byAxis(data, axis, scale);
  if (option === 'result') return byResult(data, scale);
  if (option === 'bracket') return byBracket(data, scale);
  return byRung(data, scale);
}

function byRung(data, scale) {
  const lengths = data.lengths.length ? data.lengths : [data.maxLength];
  const top = Math.max(1, lengths.length - 1);
  const place = (i) => (lengths.length < 2 ? 1 : i / top);
  const legend = lengths.map((length, i) => ({ text: parameter(length), color: ramp(place(i)) }));
  return scale((row) => {
    // A trial without a result yet has the color of the lowest rung.
    const units = data.trials.units[row];
    let at = 0;
    while (at + 1 < lengths.length && units >= lengths[at + 1]) at += 1;
    return place(at);
  }, legend, `rung reached, ${data.units}`);
}

function byResult(data, scale) {
  const { ranked } = data;
  const known = data.trials.value.filter(Number.isFinite).length;
  const rank = new Float32Array(data.size).fill(0);
  ranked.slice(0, known).forEach((row, i) => {
    rank[row] = known < 2 ? 1 : 1 - i / (known - 1);
  });
  const legend = known ? [
    { text: `${result(data.trials.value[ranked[known - 1]])} worst`, color: ramp(0) },
    { text: `${result(data.trials.value[ranked[0]])}`, color: ramp(1) }] : [];
  return scale((row) => rank[row], legend, 'result, by rank');
}

function byBracket(data, scale) {
  const list = [...new Set(data.trials.bracket)].sort((a, b) => a - b);
  const place = new Map(list.map((bracket, i) => [bracket, list.length < 2 ? 1
    : i / (list.length - 1)]));
  const legend = list.slice(0, 8).map((bracket) =>
    ({ text: String(bracket), color: ramp(place.get(bracket)) }));
  return scale((row) => place.get(data.trials.bracket[row]), legend, 'bracket');
}

function byAxis(data, axis, scale) {
  const column = data.column(axis);
  const ends = axis.isCategory ? axis.values.slice(0, 8) : [axis.min, axis.max];
  const legend = ends.map((value) =>
    ({ text: axis.format(value), color: ramp(axis.position(value)) }));
  return scale((row) => axis.position(column[row]), legend, parameter(axis.name));
}

/** Fills the legend of a card: swatches with text. */
export function legendOf(scale, state) {
  if (state.selection.length) {
    const items = state.selection.slice(0, 8).map((trial) => ({ text: `#${trial}`, trial,
      color: colors()[`series${state.seriesOf(trial)}`], dash: state.isDashed(trial) }));
    const more = state.selection.length - items.length;
    if (more > 0) items.push({ text: `and ${more} more` });
    return { title: 'Selected', items };
  }
  return { title: `Color: ${scale.title}`,
    items: [...scale.legend, { text: 'best', color: colors().ember }] };
}

/** Returns the color of a faded line. */
export const faded = () => alpha(colors().text3, 0.3);
