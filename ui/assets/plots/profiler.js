// Profiler of one trial: use of GPUs, memory, CPU and parts of a step over wall time.

import { moment, name, parameter, plural } from '../format.js';
import { alpha, series as seriesColor } from '../theme.js';
import { limitsOf, Panels } from './panels.js';
import { agoTicks } from './ticks.js';

// Age in seconds of the last sample up to which it stands for now.
const NOW = 60;
// Half of the width of a date, which may be the label at the end of the axis.
const RIGHT = 36;

/** Returns the label of the end of an axis: the date, or the time of day if that is today. */
export const endLabel = (seconds) => moment(seconds).split(' ')[0];

export function create(host) {
  return new Profiler(host);
}

class Profiler {
  constructor(host) {
    this.host = host;
    this.panels = new Panels(host, (panel, line, i) =>
      [`${name(line.name)} ${parameter(line.own[i])} ${name(panel.unit || '')}`,
        moment(line.x[i])]);
    this.walk = this.panels.walk;
  }

  async load() {
    this.json = await this.host.load(this.host.source);
    this.#draw();
  }

  refresh() {
    return this.load();
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
    const plots = json.plots.filter((plot) => !only || plot.title === only);
    host.empty(plots.length ? '' : 'The profiler of this trial is off or has no samples.');
    if (!plots.length) return;
    const times = plots.flatMap((plot) => plot.series.flatMap(({ x }) =>
      (x.length ? [x[0], x[x.length - 1]] : [])));
    const x = times.length ? { min: Math.min(...times), max: Math.max(...times) }
      : { min: 0, max: 1 };
    this.panels.set(plots.map((plot) => this.#panel(plot, x)));
    host.note(times.length ? `${moment(x.min)} to ${moment(x.max)}` : '');
    host.label(`Profiler, ${plural(plots.length, 'plot')}: `
      + plots.map((plot) => name(plot.title)).join(', '));
  }

  #panel(plot, x) {
    let lines = plot.series.map((one, i) => ({ id: one.name, name: one.name, x: one.x, y: one.y,
      own: one.y, color: seriesColor(i + 1), width: 1.4, dash: i >= 6 ? [6, 4] : null }));
    const all = lines;
    if (plot.stacked) lines = stack(lines);
    const isLive = Date.now() / 1000 - x.max < NOW;
    const ticks = (min, max, target) =>
      agoTicks(min, max, target, isLive && max >= x.max ? 'now' : endLabel(max));
    return { key: `${plot.title}`, title: plot.title, unit: plot.unit,
      legend: lines.length > 1 ? all.slice(0, 8).map((line) =>
        ({ text: line.name.replace(/^rank /, ''), color: line.color })) : [],
      scene: { right: RIGHT, lines, x: { ...x, ticks }, y: limitsOf(lines, true) } };
  }

  paint(ctx) {
    return this.panels.paint(ctx);
  }

  table() {
    return this.panels.table('Seconds since 1970');
  }
}

/** Adds each series to the sum of those before it; the top of each is drawn as an area. */
function stack(lines) {
  const sums = new Map();
  return lines.map((line) => {
    const base = line.x.map((x) => sums.get(x) || 0);
    const y = line.y.map((value, i) => base[i] + (value || 0));
    line.x.forEach((x, i) => sums.set(x, y[i]));
    return { ...line, y, base, fill: true, color: alpha(line.color, 0.75) };
  });
}
