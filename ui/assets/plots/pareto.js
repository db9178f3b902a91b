// Pareto front of two objectives: points of the front are marked and joined by a line.

import { name, plural, result } from '../format.js';
import { store } from '../data.js';
import { state } from '../state.js';
import { colors } from '../theme.js';
import { axisStyle, Chart } from './chart.js';

export function create(host) {
  return new Pareto(host);
}

class Pareto {
  constructor(host) {
    this.host = host;
    this.points = [];
    const trialOf = (event) => event.value?.[2];
    this.chart = new Chart(host.element, {
      click: (event) => trialOf(event) !== undefined && state.toggle(trialOf(event)),
      open: (event) => host.open(trialOf(event)),
      over: (event) => state.setHover(trialOf(event) ?? null),
      out: () => state.setHover(null),
    });
    this.walk = {
      count: () => this.points.length,
      points: () => 1,
      id: (i) => this.points[i].trial,
      text: (i) => this.#text(this.points[i].trial, this.points[i].values).join(', '),
      mark: (i) => state.setHover(i === null ? null : this.points[i].trial),
    };
  }

  async load() {
    this.data = await store.load();
    this.#draw();
  }

  refresh() {
    this.data = store.current || this.data;
    this.#draw();
  }

  update(changed) {
    if (['sel', 'brush', 'hover'].some((key) => changed.has(key))) this.#draw();
  }

  theme() {
    this.#draw();
  }

  resize() {
    this.chart.resize();
  }

  destroy() {
    this.chart.destroy();
  }

  #draw() {
    const { host, data } = this;
    if (!data) return;
    const goals = data.objectives || [];
    if (goals.length < 2) {
      host.empty('Needs two objectives, has one.');
      return;
    }
    const [x, y] = goals;
    this.points = [...(data.pareto || [])].filter((point) =>
      point.values.length > 1 && point.values.every(Number.isFinite))
      .sort((a, b) => a.values[0] - b.values[0]);
    host.empty(this.points.length ? '' : 'No trial has results for both objectives.');
    const tokens = colors();
    // A server may give all trials with isFront, or the front alone.
    const front = this.points.filter((point) => point.isFront !== false);
    const side = (goal) => `${name(goal.metric)}, ${goal.smallerIsBetter ? 'smaller' : 'larger'} `
      + 'is better';
    const label = { color: tokens.text3, fontSize: 11.5, hideOverlap: true,
      formatter: (value) => String(+value.toPrecision(3)).replace('-', '\u2212') };
    this.chart.set({ grid: { left: 66, right: 18, top: 12, bottom: 48 },
      xAxis: axisStyle({ type: 'value', scale: true, name: side(x), nameGap: 28,
        axisLabel: label }),
      yAxis: axisStyle({ type: 'value', scale: true, name: side(y), nameGap: 50,
        axisLabel: label }),
      tooltip: { renderMode: 'richText', confine: true, backgroundColor: tokens.surface,
        borderColor: tokens.line2, borderWidth: 1,
        textStyle: { color: tokens.text1, fontSize: 12 },
        formatter: (event) => this.#text(event.value[2], event.value).join('\n')
          .replace(/[{}|]/g, ' ') },
      // Corners lie on the side of the worse first objective, where the front dominates.
      series: [{ type: 'line', step: x.smallerIsBetter ? 'end' : 'start', silent: true, symbol: 'none',
        lineStyle: { color: tokens.ember, width: 1.4 }, data: front.map(({ values }) => values) },
      { type: 'scatter', data: this.points.map((point) => this.#dot(point, tokens)) }] });
    host.legend({ items: [{ text: 'front', color: tokens.ember, mark: 'dot' },
      ...(front.length < this.points.length
        ? [{ text: 'dominated', color: tokens.text3, mark: 'dot' }] : [])] });
    host.note(`${plural(front.length, 'trial')} on the front.`);
    host.label(`Pareto front of ${name(x.metric)} and ${name(y.metric)}, `
      + plural(front.length, 'trial'));
  }

  #dot(point, tokens) {
    const series = state.seriesOf(point.trial);
    const isFront = point.isFront !== false;
    const row = this.data.rows.get(point.trial);
    const isIn = row === undefined || this.data.brushed(state.brush).mask[row];
    const isHover = state.hover === point.trial;
    const color = series ? tokens[`series${series}`] : isFront ? tokens.ember : tokens.text3;
    const isFaded = !series && (state.selection.length > 0 || !isIn);
    return { value: [...point.values.slice(0, 2), point.trial],
      symbolSize: isHover ? 12 : isFront || series ? 9 : 6,
      itemStyle: { color, opacity: isFaded && !isHover ? 0.3 : 1 } };
  }

  #text(trial, values) {
    const goals = this.data.objectives;
    return [`Trial ${trial}`, `${name(goals[0].metric)} ${result(values[0])}`,
      `${name(goals[1].metric)} ${result(values[1])}`];
  }

  table() {
    return { columns: ['Trial', ...this.data.objectives.map((goal) => goal.metric), 'Front'],
      rows: this.points.map((point) => [point.trial, ...point.values,
        point.isFront === false ? 'no' : 'yes']) };
  }
}
