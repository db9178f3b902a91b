// Compares experiments: best so far by slot hours, wall time or trials.

import { clock, duration, name, parameter, plural, result } from '../format.js';
import { state } from '../state.js';
import { colors, series as seriesColor } from '../theme.js';
import { LinePlot } from './lines.js';
import { limitsOf } from './panels.js';
import { durationTicks } from './ticks.js';

const COLUMNS = { 'slot-hours': 0, wall: 1, trials: 2 };
const LABELS = { 'slot-hours': 'slot hours', wall: 'wall time', trials: 'trials' };

export function create(host) {
  return new Compare(host);
}

class Compare {
  constructor(host) {
    this.host = host;
    this.lines = new LinePlot(host.element, {
      hover: (line, index, event) => {
        host.tooltip(this.#tip(line, index), event);
        this.lines.mark({ id: line.id, index });
      },
      leave: () => {
        host.tooltip(null);
        this.lines.mark(null);
      },
    });
    this.walk = {
      count: () => this.drawn.length,
      points: (i) => this.drawn[i].x.length,
      text: (i, j) => this.#tip(this.drawn[i], j).join(', '),
      mark: (i, j) => this.lines.mark(i === null ? null : { id: this.drawn[i].id, index: j }),
    };
  }

  get x() {
    const x = state.get('x', this.host.options.x || 'slot-hours');
    return x in COLUMNS ? x : 'slot-hours';
  }

  async load() {
    this.json = await this.host.load(this.host.source);
    this.#draw();
  }

  refresh() {
    return this.load();
  }

  update(changed) {
    if (changed.has('x') || changed.has('scale')) this.#draw();
  }

  theme() {
    this.#draw();
  }

  resize() {
    this.lines.resize();
  }

  destroy() {
    this.lines.destroy();
  }

  #tip(line, i) {
    const row = line.rows[i];
    const ending = row[4] === null || row[4] === undefined ? '' : `, trial ${row[4]}`;
    return [line.name, `${result(row[3])}${ending}`,
      `${parameter(+row[0].toPrecision(3))} slot hours, ${duration(row[1])}, `
      + `${plural(row[2], 'trial')} ended`];
  }

  #draw() {
    const { host, json } = this;
    if (!json) return;
    const column = COLUMNS[this.x];
    const words = state.get('scale', host.options.scale || 'linear').split(/[ ,+]/);
    const isLog = words.includes('log');
    this.drawn = json.experiments.map((one, i) => {
      const rows = one.bestSoFar.filter((row) => !isLog || row[column] > 0);
      return { id: i, name: name(one.name), rows, x: rows.map((row) => row[column]),
        y: rows.map((row) => row[3]), step: true, color: seriesColor(i + 1), width: 2,
        dash: i >= 6 ? [6, 4] : null, label: rows.length ? result(rows.at(-1)[3]) : null,
        labelColor: colors().text1, labelWeight: 600, endMark: 'dot', priority: 1 };
    });
    const xs = this.drawn.flatMap((line) => line.x);
    host.empty(xs.length ? '' : 'No experiment has a result.');
    if (!xs.length) return;
    const min = isLog ? Math.min(...xs) : 0;
    const max = Math.max(...xs);
    const goal = host.options.goal ? +host.options.goal : NaN;
    const y = limitsOf(this.drawn);
    this.lines.set({ right: 62, lines: this.drawn,
      horizontals: Number.isFinite(goal) ? [{ y: goal, label: `goal ${parameter(goal)}` }] : [],
      x: { min, max: max > min ? max : min + 1, log: isLog && min > 0, key: this.x,
        label: `${LABELS[this.x]}${isLog ? ', log scale' : ''}`,
        ticks: this.x === 'wall' && !isLog ? durationTicks : null },
      y: { ...y, log: words.includes('logy') && y.min > 0 } });
    host.legend({ items: this.drawn.map((line) => ({ text: line.name, color: line.color })) });
    host.note(`As of ${clock(Date.now() / 1000)}.`);
    const bests = this.drawn.map((line) => `${line.name} ${line.label || 'none'}`).join(', ');
    host.label(`Best ${name(json.metric)} so far of `
      + `${plural(json.experiments.length, 'experiment')}: ${bests}`);
  }

  paint(ctx) {
    return this.lines.paint(ctx);
  }

  table() {
    return { columns: ['Experiment', 'Slot hours', 'Wall seconds', 'Trials ended',
      this.json.metric, 'Trial'],
    rows: this.json.experiments.flatMap((one) => one.bestSoFar.map((row) => [one.name, ...row])) };
  }
}
