// A pair of hyperparameters: a heat map whose cells show their best result, or every trial as a
// point.

import { make } from '../dom.js';
import { name, parameter, plural, result, tick } from '../format.js';
import { store } from '../data.js';
import { state } from '../state.js';
import { colors, ramp } from '../theme.js';
import { axisStyle, Chart } from './chart.js';
import { colorScale, legendOf } from './colors.js';

const BINS = 10;

export function create(host) {
  return new Heatmap(host);
}

class Heatmap {
  constructor(host) {
    this.host = host;
    this.cells = [];
    this.chart = new Chart(host.element, {
      click: (event) => {
        const cell = this.cells[event.dataIndex];
        if (cell) state.toggle(cell.trial);
      },
      over: (event) => state.setHover(this.cells[event.dataIndex]?.trial ?? null),
      out: () => state.setHover(null),
      open: (event) => host.open(this.cells[event.dataIndex]?.trial),
    });
    this.walk = {
      count: () => this.cells.length,
      points: () => 1,
      id: (i) => this.cells[i]?.trial,
      text: (i) => this.#text(this.cells[i]).join(', '),
      mark: (i) => this.#mark(i),
    };
  }

  async load() {
    this.data = await store.load();
    this.#pickers();
    this.#draw();
  }

  refresh() {
    this.data = store.current || this.data;
    this.#draw();
  }

  update(changed) {
    if (changed.has('brush') || changed.has('sel')) this.#draw();
    if (changed.has('hover')) {
      this.#mark(this.cells.findIndex((cell) => cell.trial === state.hover));
    }
  }

  theme() {
    this.#draw();
  }

  resize() {
    this.chart.resize();
    this.#draw();
  }

  destroy() {
    this.chart.destroy();
  }

  /** Returns the pair: chosen by the user, by the template, or the two most important. */
  #pair() {
    const { axes, importance } = this.data;
    const order = (importance?.hyperparameters || []).map((one) => one.name);
    const ranked = [...axes].sort((a, b) => rankOf(order, a.name) - rankOf(order, b.name));
    const find = (key, otherwise) => axes.find((axis) => axis.name === key) || otherwise;
    const x = find(this.chosen?.x || this.host.options.x, ranked[0]);
    const y = find(this.chosen?.y || this.host.options.y, ranked.find((axis) => axis !== x));
    return [x, y];
  }

  /** Adds lists to the header of the card: the view, and the pair if there is a choice. */
  #pickers() {
    const header = this.host.card.querySelector('header') || this.host.card;
    if (this.pickers || this.data.axes.length < 2) return;
    const pair = this.#pair();
    const axes = (k) => this.data.axes.map((axis) =>
      [axis.name, name(axis.name), axis === pair[k]]);
    this.pickers = [this.#picker('view', 'what the plot of a pair shows',
      [['cells', 'Best of each cell'], ['trials', 'Every trial']])];
    if (this.data.axes.length > 2) {
      this.pickers.push(this.#picker('x', 'x of the pair', axes(0)),
        this.#picker('y', 'y of the pair', axes(1)));
    }
    const place = header.querySelector('[data-pickers]') || header;
    place.append(...this.pickers);
  }

  #picker(key, label, values) {
    const options = values.map(([value, text, selected]) =>
      make('option', { value, text, selected: Boolean(selected) }));
    return make('select', { class: 'select', 'aria-label': label, 'data-pair': key,
      on: { change: (event) => {
        this.chosen = { ...this.chosen, [key]: event.target.value };
        this.#draw();
      } } }, ...options);
  }

  #draw() {
    const { host, data } = this;
    if (!data) return;
    const [x, y] = this.#pair();
    if (!x || !y) {
      host.empty('Needs two hyperparameters that vary.');
      return;
    }
    if (this.chosen?.view === 'trials') this.#drawTrials([x, y]);
    else this.#drawCells([x, y]);
  }

  #drawCells([x, y]) {
    const { host, data } = this;
    const bins = [x, y].map(binsOf);
    this.#collect(x, y, bins);
    host.empty(this.cells.length ? '' : 'Needs one result, has none.');
    host.legend({ items: [] });
    const values = this.cells.map((cell) => cell.value);
    const low = Math.min(...values);
    const high = Math.max(...values);
    const palette = [0, 1, 2, 3].map((i) => ramp(i / 3));
    if (data.smallerIsBetter) palette.reverse();
    const labels = labelStyle();
    this.chart.set({ grid: GRID,
      xAxis: axisStyle({ type: 'category', data: bins[0].labels, name: name(x.name), nameGap: 30,
        splitLine: { show: false }, axisLabel: labels }),
      yAxis: axisStyle({ type: 'category', data: bins[1].labels, name: name(y.name), nameGap: 54,
        splitLine: { show: false }, axisLabel: labels }),
      visualMap: { min: low, max: high > low ? high : low + 1e-9, dimension: 2, right: 8,
        top: 'middle', itemWidth: 10, itemHeight: 120, text: [result(high), result(low)],
        textStyle: { color: colors().text2, fontSize: 11 }, inRange: { color: palette } },
      tooltip: { ...this.#tooltip() },
      series: [{ type: 'heatmap', data: this.#points(),
        emphasis: { itemStyle: { borderColor: colors().text1, borderWidth: 2 } } }] });
    host.note(`Best of each cell. ${plural(this.cells.length, 'cell')} with a result.`,
      state.hasBrush ? 'The brush limits the trials.' : null);
    host.label(`Heat map of ${parameter(x.name)} and ${parameter(y.name)}, best `
      + `${result(data.smallerIsBetter ? low : high)}`);
  }

  /** Draws a point for each trial in the brush, colored by the rank of its result. */
  #drawTrials(pair) {
    const { host, data } = this;
    this.#collectTrials(pair);
    host.empty(this.cells.length ? '' : 'Needs one result, has none.');
    const scale = colorScale(data, 'result');
    const [x, y] = pair;
    this.chart.set({ grid: GRID, xAxis: pointAxis(x, 30), yAxis: pointAxis(y, 54),
      tooltip: { ...this.#tooltip() },
      series: [{ type: 'scatter', symbolSize: data.size > 2000 ? 4 : 9, cursor: 'pointer',
        large: false, progressive: 4000, emphasis: { scale: 1.6 },
        data: this.cells.map((cell) => ({ value: cell.at,
          itemStyle: { color: this.#colorOf(cell, scale), opacity: 0.85 } })) }] });
    host.legend(legendOf(scale, state));
    host.note(`${plural(this.cells.length, 'trial')} with a result.`,
      state.hasBrush ? 'The brush limits the trials.' : null);
    host.label(`${plural(this.cells.length, 'trial')} by ${parameter(x.name)} and `
      + `${parameter(y.name)}`);
  }

  #colorOf(cell, scale) {
    const series = state.seriesOf(cell.trial);
    if (series) return colors()[`series${series}`];
    return cell.trial === this.data.best ? colors().ember : scale.palette[scale.bucket(cell.row)];
  }

  /** Lists the trials in the brush that have a result, the best last, so that it is on top. */
  #collectTrials([x, y]) {
    const { data } = this;
    const { mask } = data.brushed(state.brush);
    const [xs, ys] = [x, y].map((axis) => data.column(axis));
    const place = (axis, value) => (axis.isCategory ? axis.places.get(String(value)) ?? null
      : Number.isFinite(value) ? value : null);
    this.cells = [];
    for (const row of [...data.ranked].reverse()) {
      const value = data.trials.value[row];
      const at = [place(x, xs[row]), place(y, ys[row])];
      if (!mask[row] || !Number.isFinite(value) || at.includes(null)) continue;
      this.cells.push({ row, value, at, trial: data.trials.index[row], trials: 1,
        place: `${x.format(xs[row])}, ${y.format(ys[row])}` });
    }
  }

  #tooltip() {
    return { renderMode: 'richText', confine: true, backgroundColor: colors().surface,
      borderColor: colors().line2, borderWidth: 1,
      textStyle: { color: colors().text1, fontSize: 12 },
      formatter: (event) => this.#text(this.cells[event.dataIndex] || {}).join('\n')
        .replace(/[{}|]/g, ' ') };
  }

  #collect(x, y, bins) {
    const { data } = this;
    const { mask } = data.brushed(state.brush);
    const cells = new Map();
    const xs = data.column(x);
    const ys = data.column(y);
    for (let row = 0; row < data.size; row += 1) {
      const value = data.trials.value[row];
      const i = bins[0].place(xs[row]);
      const j = bins[1].place(ys[row]);
      if (!mask[row] || !Number.isFinite(value) || i < 0 || j < 0) continue;
      const key = i * 1000 + j;
      const cell = cells.get(key);
      if (!cell) cells.set(key, { i, j, value, trial: data.trials.index[row], trials: 1 });
      else {
        cell.trials += 1;
        if (data.isBetter(value, cell.value)) {
          Object.assign(cell, { value, trial: data.trials.index[row] });
        }
      }
    }
    this.cells = [...cells.values()].map((cell) => ({ ...cell,
      place: `${bins[0].labels[cell.i]}, ${bins[1].labels[cell.j]}` }));
  }

  #points() {
    return this.cells.map((cell) => {
      const series = state.seriesOf(cell.trial);
      const border = series ? { borderColor: colors()[`series${series}`], borderWidth: 3 }
        : { borderColor: colors().surface, borderWidth: 1 };
      return { value: [cell.i, cell.j, cell.value], itemStyle: border };
    });
  }

  #text(cell) {
    return [`${result(cell.value)}, trial ${cell.trial}`, cell.place || '',
      plural(cell.trials || 0, 'trial')];
  }

  #mark(i) {
    const { chart } = this.chart;
    chart.dispatchAction({ type: 'downplay', seriesIndex: 0 });
    if (i === null || i < 0) return;
    chart.dispatchAction({ type: 'highlight', seriesIndex: 0, dataIndex: i });
  }

  table() {
    const [x, y] = this.#pair();
    return { columns: [`${x.name}, ${y.name}`, this.data.metric, 'Best trial', 'Trials'],
      rows: this.cells.map((cell) => [cell.place, cell.value, cell.trial, cell.trials]) };
  }
}

const GRID = { left: 70, right: 84, top: 12, bottom: 50 };

const labelStyle = () => ({ color: colors().text3, fontSize: 11.5, hideOverlap: true });

function pointAxis(axis, nameGap) {
  const common = { name: name(axis.name), nameGap };
  if (axis.isCategory) {
    return axisStyle({ ...common, type: 'category', axisLabel: labelStyle(),
      data: axis.values.map((value) => name(value, 14)) });
  }
  return axisStyle({ ...common, type: axis.isLog ? 'log' : 'value', min: axis.min, max: axis.max,
    axisLabel: { ...labelStyle(), formatter: (value) => tick(value, 0) } });
}

const rankOf = (order, key) => (order.includes(key) ? order.indexOf(key) : order.length);

function binsOf(axis) {
  if (axis.isCategory) {
    return { labels: axis.values.map((value) => name(value, 14)),
      place: (value) => axis.places.get(String(value)) ?? -1 };
  }
  const labels = Array.from({ length: BINS }, (_, i) => {
    const middle = axis.value((i + 0.5) / BINS);
    return parameter(axis.isInteger ? Math.round(middle) : +middle.toPrecision(2));
  });
  return { labels, place: (value) => {
    const at = axis.position(value);
    return Number.isNaN(at) ? -1 : Math.min(BINS - 1, Math.floor(at * BINS));
  } };
}
