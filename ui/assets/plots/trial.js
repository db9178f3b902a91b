// Metrics of one trial: a panel per metric with a line per group; numbered dashed lines mark
// the starts of attempts.

import { count, name, parameter, plural } from '../format.js';
import { state } from '../state.js';
import { colors } from '../theme.js';
import { ema } from './curves.js';
import { limitsOf, Panels, valueText } from './panels.js';
import { durationTicks } from './ticks.js';

export function create(host) {
  return new Trial(host);
}

class Trial {
  constructor(host) {
    this.host = host;
    this.panels = new Panels(host, (panel, line, i) =>
      [`${name(line.name)} ${valueText(line, i)}`, this.#xText(line.x[i])]);
    this.walk = this.panels.walk;
  }

  get x() {
    return state.get('x', this.host.options.x || 'epochs');
  }

  #xText(x) {
    return this.x === 'time' ? `${parameter(x)} s` : `${parameter(x)} ${this.x}`;
  }

  async load() {
    const url = new URL(this.host.source, location.href);
    url.searchParams.set('x', this.x);
    url.searchParams.set('width', Math.max(200, Math.round(this.host.element.clientWidth / 3)));
    this.json = await this.host.load(url);
    this.#draw();
  }

  refresh() {
    return this.load();
  }

  async update(changed) {
    if (changed.has('x')) await this.host.retry.run();
    else if (changed.has('smooth') || changed.has('scale')) this.#draw();
  }

  theme() {
    this.#draw();
  }

  resize() {
    this.panels.resize();
  }

  destroy() {
    this.panels.destroy();
  }

  #draw() {
    const { host, json } = this;
    if (!json) return;
    const only = host.options.name;
    const plots = json.plots.filter((plot) => !only || plot.metric === only);
    host.empty(plots.length ? '' : 'The trial has reported no metrics.');
    if (!plots.length) return;
    const words = state.get('scale', host.options.scale || 'linear').split(/[ ,+]/);
    this.panels.set(plots.map((plot) => this.#panel(plot, words)));
    const lttb = json.drawn < json.total ? ' (LTTB)' : '';
    host.note(`${plural(plots.length, 'metric')}. ${count(json.drawn)} of ${count(json.total)} `
      + `points drawn${lttb}`, this.smooth ? `Smoothed, EMA ${this.smooth}.` : null);
    host.label(`${plural(plots.length, 'metric')}, ${plural(json.attempts.length, 'attempt')}`);
  }

  #panel(plot, words) {
    this.smooth = Math.min(0.99, +state.get('smooth', '0') || 0);
    const lines = [];
    plot.series.forEach((one, i) => {
      const color = this.#color(one.name, i, plot.series.length);
      const line = { id: one.name, name: one.name, x: one.x, y: one.y, color,
        width: one.name === 'training' ? 1.3 : 1.9, nonfinite: one.nonfinite };
      if (this.smooth > 0) {
        lines.push({ ...line, behind: true, alpha: 0.25, nonfinite: [] });
        line.raw = one.y;
        line.y = ema(one.y, this.smooth);
      }
      lines.push(line);
    });
    const isLogX = words.includes('log') || words.includes('logx');
    const x = rangeOf(lines, isLogX, +(this.host.options.maxLength || 0),
      this.x === this.host.options.units);
    const y = limitsOf(lines);
    return { key: plot.metric, title: plot.metric,
      unit: this.smooth > 0 ? `smoothed, EMA ${this.smooth}` : '',
      legend: lines.filter((line) => !line.behind).map((line) =>
        ({ text: line.name, color: line.color })),
      scene: { lines, verticals: this.#attempts(x.max - x.min),
        x: { ...x, log: isLogX && x.min > 0, key: this.x,
          ticks: this.x === 'time' && !isLogX ? durationTicks : null },
        y: { ...y, log: words.includes('logy') && y.min > 0 } } };
  }

  #attempts(span) {
    let last = -Infinity;
    return this.json.attempts.filter((attempt) => attempt.number > 0 || attempt.x > 0)
      .map((attempt) => {
        const hasRoom = attempt.x - last > span * 0.03;
        if (hasRoom) last = attempt.x;
        return { x: attempt.x, label: hasRoom ? String(attempt.number) : '',
          color: colors().control };
      });
  }

  #color(group, i, number) {
    const tokens = colors();
    if (group === 'training') return tokens.rung1;
    if (group === 'validation' || number === 1) return tokens.rung3;
    return tokens[`series${(i % 6) + 1}`];
  }

  paint(ctx) {
    return this.panels.paint(ctx);
  }

  table() {
    return this.panels.table(this.x);
  }
}

function rangeOf(lines, isLog, most, isSameUnit) {
  let min = Infinity;
  let max = -Infinity;
  for (const { x, nonfinite } of lines) {
    for (const value of [...x, ...(nonfinite || [])]) {
      if (isLog && value <= 0) continue;
      min = Math.min(min, value);
      max = Math.max(max, value);
    }
  }
  if (min > max) return { min: isLog ? 0.5 : 0, max: 1 };
  if (isSameUnit && most > max) max = most;
  return { min: isLog ? min : Math.min(0, min), max: max > min ? max : min + 1 };
}
