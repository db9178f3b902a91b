// Best so far over time with the results as dots (data-plot="history"), and the distribution
// of results (data-plot="edf").

import { count, duration, moment, name, parameter, plural, result } from '../format.js';
import { quantile, store } from '../data.js';
import { state } from '../state.js';
import { colors, series as seriesColor } from '../theme.js';
import { isTouch, reach } from '../touch.js';
import { LinePlot } from './lines.js';
import { durationTicks } from './ticks.js';

export function create(host) {
  return host.kind === 'edf' ? new Distribution(host) : new History(host);
}

/** Parts that both plots share: loading and redrawing. */
class Base {
  constructor(host) {
    this.host = host;
  }

  async load() {
    this.data = await store.load();
    this.draw();
  }

  refresh() {
    this.data = store.current || this.data;
    this.draw();
  }

  update(changed) {
    if (this.keys.some((key) => changed.has(key))) this.draw();
  }

  theme() {
    this.draw();
  }

  resize() {
    this.lines.resize();
  }

  destroy() {
    this.lines.destroy();
  }

  paint(ctx) {
    return this.lines.paint(ctx);
  }

  /** Limits of results: the best and the 2nd or 98th percentile of the others. */
  limits(values) {
    const sorted = values.filter(Number.isFinite).sort((a, b) => a - b);
    if (!sorted.length) return { min: 0, max: 1 };
    const isLow = this.data.smallerIsBetter;
    const min = isLow ? sorted[0] : quantile(sorted, 0.02);
    const max = isLow ? quantile(sorted, 0.98) : sorted[sorted.length - 1];
    const pad = (max - min || Math.abs(max) || 1) * 0.05;
    return { min: min - pad, max: max + pad };
  }
}

class History extends Base {
  constructor(host) {
    super(host);
    this.keys = ['brush', 'sel', 'hover'];
    this.lines = new LinePlot(host.element, {
      hover: (line, index, event) => host.tooltip(this.#tip(index), event),
      leave: () => host.tooltip(null),
      pick: () => {},
    });
    this.walk = {
      count: () => 1,
      points: () => this.data.bestSoFar.length,
      id: () => this.data.bestSoFar[host.at[1]]?.[2],
      text: (i, j) => this.#tip(j).join(', '),
      mark: (i, j) => this.lines.mark(i === null ? null : { id: 'best', index: j }),
    };
    this.#listen();
  }

  #tip(i) {
    const [time, value, trial] = this.data.bestSoFar[Math.min(i, this.data.bestSoFar.length - 1)];
    return [`Best ${result(value)}, trial ${trial}`, `from ${moment(time)} on, `
      + `${duration(time - this.start)} after the start`];
  }

  draw() {
    const { host, data } = this;
    if (!data) return;
    const tokens = colors();
    const steps = data.bestSoFar || [];
    host.empty(steps.length ? '' : 'Needs one result, has none.');
    if (!steps.length) return;
    const { start, end } = data.times;
    this.start = start.reduce((a, b) => (b === null ? a : Math.min(a, b)), steps[0][0]);
    this.dots = this.#dots(tokens);
    const last = end.reduce((a, b) => (b === null ? a : Math.max(a, b)), steps.at(-1)[0]);
    const x = [...steps.map(([time]) => time - this.start), last - this.start];
    const y = [...steps.map(([, value]) => value), steps.at(-1)[1]];
    this.lines.set({ right: 62, dots: this.dots, lines: [{ id: 'best', x, y, step: true,
      color: tokens.ember, width: 2, label: result(y.at(-1)), labelColor: tokens.text1,
      labelWeight: 600, endMark: 'dot' }],
    x: { min: 0, max: Math.max(1, last - this.start), label: 'time since the first trial',
      ticks: durationTicks },
    y: this.limits([...y, ...data.trials.value]) });
    host.note(`${plural(this.dots.length, 'result')}, ${plural(steps.length, 'new best')}.`);
    host.legend({ items: [{ text: 'best so far', color: tokens.ember },
      { text: 'result of a trial, at its end', color: tokens.text3, mark: 'dot' }] });
    host.label(`Best ${name(data.metric)} so far over time, now ${result(y.at(-1))}, `
      + `trial ${steps.at(-1)[2]}`);
  }

  #dots(tokens) {
    const { data } = this;
    const { mask } = data.brushed(state.brush);
    const dots = [];
    const small = data.size > 2000;
    const normal = small ? 0.35 : 0.6;
    for (let row = 0; row < data.size; row += 1) {
      const value = data.trials.value[row];
      const time = data.times.end[row] ?? data.times.start[row];
      if (!Number.isFinite(value) || time === null) continue;
      const trial = data.trials.index[row];
      const series = state.seriesOf(trial);
      const isHover = state.hover === trial;
      dots.push({ x: time - this.start, y: value, trial, r: series || isHover ? 5 : small ? 1.6 : 3,
        color: series ? seriesColor(series) : isHover ? tokens.accent : tokens.text3,
        alpha: series || isHover ? 1
          : mask[row] && !state.selection.length ? normal : 0.2 });
    }
    return dots;
  }

  #nearest(event) {
    if (!this.lines.plot || !this.dots) return null;
    const view = this.lines.view();
    const box = this.host.element.getBoundingClientRect();
    let best = null;
    let distance = reach(9);
    for (const dot of this.dots) {
      const d = Math.hypot(view.x(dot.x) - event.clientX + box.left,
        view.y(dot.y) - event.clientY + box.top);
      if (d < distance) [best, distance] = [dot, d];
    }
    return best;
  }

  #listen() {
    const { host } = this;
    const show = (event) => {
      const dot = this.#nearest(event);
      state.setHover(dot ? dot.trial : null);
      if (dot) host.tooltip(this.data.describe(dot.trial), event);
    };
    host.element.addEventListener('mousemove', show);
    host.element.addEventListener('mouseleave', () => state.setHover(null));
    host.element.addEventListener('click', (event) => {
      const dot = this.#nearest(event);
      if (dot) state.toggle(dot.trial);
      if (isTouch()) show(event);
    });
  }

  table() {
    return { columns: ['Time', `Best ${this.data.metric}`, 'Trial'],
      rows: this.data.bestSoFar.map(([time, value, trial]) =>
        [new Date(time * 1000).toISOString(), value, trial]) };
  }
}

class Distribution extends Base {
  constructor(host) {
    super(host);
    this.keys = ['brush'];
    this.lines = new LinePlot(host.element, {
      hover: (line, index, event) => host.tooltip(this.#tip(line, index), event),
      leave: () => host.tooltip(null),
    });
    this.walk = {
      count: () => this.sets.length,
      points: (i) => this.sets[i].x.length,
      text: (i, j) => this.#tip(this.sets[i], j).join(', '),
      mark: (i, j) => this.lines.mark(i === null ? null : { id: this.sets[i].id, index: j }),
    };
  }

  #tip(line, i) {
    const word = this.data.smallerIsBetter ? 'at or below' : 'at or above';
    return [line.name, `${Math.round(line.y[i] * 100)} % ${word} ${result(line.x[i])}`];
  }

  /** Returns the values of each rung, because lengths do not compare. */
  #values() {
    const { data } = this;
    const { mask } = data.brushed(state.brush);
    const sets = new Map(data.lengths.map((length) => [length, []]));
    for (let row = 0; row < data.size; row += 1) {
      if (!mask[row]) continue;
      for (const [length, value] of data.trials.results[row] || []) {
        if (value !== null) sets.get(length)?.push(value);
      }
    }
    return [...sets].filter(([, values]) => values.length > 1);
  }

  draw() {
    const { host, data } = this;
    if (!data) return;
    const sets = this.#values();
    host.empty(sets.length ? '' : 'Needs two results at one length.');
    const all = sets.flatMap(([, values]) => values);
    this.sets = sets.map(([length, values], i) => {
      const sorted = values.sort((a, b) => (data.smallerIsBetter ? a - b : b - a));
      const isLast = i === sets.length - 1;
      return { id: length, x: sorted, y: sorted.map((_, k) => (k + 1) / sorted.length),
        step: true, width: isLast ? 2.2 : 1.6, color: rungColor(data, length),
        name: `${parameter(length)} ${length === 1 ? data.unit : data.units}`, values: sorted };
    });
    const x = this.limits(all);
    this.lines.set({ lines: this.sets, x: { ...x, label: `${name(data.metric)}, at each length` },
      y: { min: 0, max: 1.02, ticks: () => ({ values: [0, 0.25, 0.5, 0.75, 1],
        labels: ['0 %', '25 %', '50 %', '75 %', '100 %'] }) } });
    host.legend({ items: this.sets.map((set) => ({ color: set.color,
      text: `${set.name}, ${count(set.values.length)}` })) });
    host.note(`Part of trials with a result ${data.smallerIsBetter ? 'at or below' : 'at or above'}`
      + ` the value.`, state.hasBrush ? 'The brush limits the trials.' : null);
    host.label(`Distribution of ${name(data.metric)} at ${plural(sets.length, 'length')}`);
  }

  table() {
    return { columns: ['Length', this.data.metric, 'Part of trials'],
      rows: this.sets.flatMap((set) => set.x.map((x, i) => [set.id, x, set.y[i]])) };
  }
}

function rungColor(data, length) {
  const tokens = colors();
  const at = data.lengths.indexOf(length);
  const stops = [tokens.rung1, tokens.rung2, tokens.rung3, tokens.rung4];
  const top = Math.max(1, data.lengths.length - 1);
  return stops[Math.round((at / top) * 3)];
}
