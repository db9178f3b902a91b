// Scatter plots: each hyperparameter against the result, as small multiples.

import { count, name, parameter, plural, result, tick } from '../format.js';
import { store } from '../data.js';
import { state } from '../state.js';
import { colors } from '../theme.js';
import { axisStyle, Chart } from './chart.js';
import { colorScale, legendOf } from './colors.js';
import { jitter } from './ladder-parts.js';

const HEIGHT = 220;

export function create(host) {
  return new Scatter(host);
}

class Scatter {
  constructor(host) {
    this.host = host;
    this.chart = new Chart(host.element, {
      click: (event) => event.value && state.toggle(event.value[2]),
      open: (event) => event.value && host.open(event.value[2]),
      over: (event) => event.value && state.setHover(event.value[2]),
      out: () => state.setHover(null),
    });
    this.walk = {
      count: () => this.shown.length,
      points: () => this.ranked.length,
      id: () => this.data.trials.index[this.ranked[host.at[1]]],
      text: (i, j) => {
        const row = this.ranked[j];
        const axis = this.shown[i];
        return `${parameter(axis.name)} ${axis.format(this.data.column(axis)[row])}: `
          + `${result(this.data.trials.value[row])}, trial ${this.data.trials.index[row]}`;
      },
      mark: (i, j) => state.setHover(i === null ? null : this.data.trials.index[this.ranked[j]]),
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
    if (['brush', 'sel', 'color'].some((key) => changed.has(key))) this.#draw();
    if (changed.has('hover')) this.#mark();
  }

  theme() {
    this.#draw();
  }

  resize() {
    this.#draw();
    this.chart.resize();
  }

  destroy() {
    this.chart.destroy();
  }

  #axes() {
    const one = this.host.options.parameter;
    return one ? this.data.axes.filter((axis) => axis.name === one) : this.data.axes.slice(0, 12);
  }

  #draw() {
    const { host, data } = this;
    if (!data) return;
    this.shown = this.#axes();
    this.ranked = data.ranked.filter((row) => Number.isFinite(data.trials.value[row]));
    host.empty(this.ranked.length ? '' : 'Needs one result, has none.');
    const width = host.element.clientWidth || 600;
    const columns = Math.max(1, Math.min(this.shown.length, Math.floor(width / 250)));
    const lines = Math.ceil(this.shown.length / columns);
    if (!host.options.parameter && this.lines !== lines) {
      this.lines = lines;
      host.element.style.height = `${Math.max(1, lines) * HEIGHT}px`;
      this.chart.resize();
    }
    const scale = colorScale(data, state.get('color', host.options.color || 'rung'));
    this.brushed = data.brushed(state.brush);
    const option = { grid: [], xAxis: [], yAxis: [], series: [], title: [] };
    this.shown.forEach((axis, i) => this.#panel(option, axis, i, columns, width, scale));
    this.chart.set({ ...option, tooltip: { ...this.#tooltip() } });
    host.legend(legendOf(scale, state));
    const brush = state.hasBrush ? `${count(this.brushed.count)} of `
      + `${plural(data.size, 'trial')} in brush. ` : '';
    const left = data.axes.length - this.shown.length;
    host.note(`${brush}${plural(this.ranked.length, 'result')}.`,
      left > 0 && !host.options.parameter ? `${left} more hyperparameters left out.` : null);
    host.label(`${plural(this.shown.length, 'hyperparameter')} against ${name(data.metric)}, `
      + plural(this.ranked.length, 'result'));
  }

  #tooltip() {
    const tokens = colors();
    return { renderMode: 'richText', confine: true, backgroundColor: tokens.surface,
      borderColor: tokens.line2, borderWidth: 1, padding: [6, 8],
      textStyle: { color: tokens.text1, fontSize: 12 },
      formatter: (event) => this.data.describe(event.value[2]).join('\n').replace(/[{}|]/g, ' ') };
  }

  #panel(option, axis, i, columns, width, scale) {
    const cell = width / columns;
    const left = (i % columns) * cell;
    const single = this.host.options.parameter;
    const top = single ? 0 : Math.floor(i / columns) * HEIGHT;
    option.grid.push({ left: left + 48, top: top + 12, width: cell - 64,
      height: (single ? this.chart.size.height : HEIGHT) - 66 });
    const label = { color: colors().text3, fontSize: 11.5, hideOverlap: true };
    option.xAxis.push(axis.isCategory
      ? axisStyle({ gridIndex: i, type: 'value', min: 0, max: axis.values.length, interval: 1,
        name: name(axis.name), nameGap: 26, splitLine: { show: false },
        axisLabel: { show: false } })
      : axisStyle({ gridIndex: i, type: axis.isLog ? 'log' : 'value', min: axis.min,
        max: axis.max, name: name(axis.name), nameGap: 26, splitNumber: 4,
        axisLabel: { ...label, formatter: (value) => tick(value, 0) } }));
    option.yAxis.push(axisStyle({ gridIndex: i, type: 'value', min: this.data.resultAxis.min,
      max: this.data.resultAxis.max, splitNumber: 4,
      axisLabel: { ...label, showMinLabel: false, showMaxLabel: false,
        formatter: (value) => tick(+value.toPrecision(3), 0) } }));
    if (axis.isCategory) this.#categories(option, axis, i, left, top, cell);
    option.series.push({ type: 'scatter', xAxisIndex: i, yAxisIndex: i, id: `s${i}`,
      symbolSize: this.data.size > 2000 ? 4 : 7, data: this.#points(axis, scale), cursor: 'pointer',
      large: false, progressive: 4000, emphasis: { scale: 1.6 } });
  }

  #categories(option, axis, i, left, top, cell) {
    const step = (cell - 64) / axis.values.length;
    const height = this.host.options.parameter ? this.chart.size.height : HEIGHT;
    axis.values.slice(0, 12).forEach((value, k) => option.title.push({
      text: name(value, Math.max(4, Math.floor(step / 7))), textAlign: 'center',
      left: left + 48 + step * (k + 0.5), top: top + height - 52, padding: 0,
      textStyle: { color: colors().text3, fontSize: 11.5, fontWeight: 400 } }));
  }

  #points(axis, scale) {
    const { data } = this;
    const { mask } = this.brushed;
    const column = data.column(axis);
    const tokens = colors();
    const anySelected = state.selection.length > 0;
    const points = [];
    for (let k = this.ranked.length - 1; k >= 0; k -= 1) {
      const row = this.ranked[k];
      const at = axis.position(column[row]);
      if (Number.isNaN(at)) continue;
      const trial = data.trials.index[row];
      const series = state.seriesOf(trial);
      const x = axis.isCategory ? at * axis.values.length + jitter(trial) * 0.28 : column[row];
      const isFaded = !series && (anySelected || !mask[row]);
      const color = series ? tokens[`series${series}`] : isFaded ? tokens.text3
        : trial === data.best ? tokens.ember : scale.palette[scale.bucket(row)];
      points.push({ value: [x, data.trials.value[row], trial],
        itemStyle: { color, opacity: isFaded ? 0.2 : series ? 1 : 0.8 },
        symbolSize: series || trial === data.best ? 9 : undefined });
    }
    return points;
  }

  #mark() {
    const { chart } = this.chart;
    chart.dispatchAction({ type: 'downplay' });
    if (state.hover === null || !this.chart.option || this.data.size > 2000) return;
    this.chart.option.series.forEach((series, seriesIndex) => {
      const dataIndex = series.data.findIndex((point) => point.value[2] === state.hover);
      if (dataIndex >= 0) chart.dispatchAction({ type: 'highlight', seriesIndex, dataIndex });
    });
  }

  table() {
    const { axes } = this.data;
    const rows = this.ranked.map((row) => [this.data.trials.index[row],
      this.data.trials.value[row], ...axes.map((axis) => this.data.column(axis)[row] ?? null)]);
    return { columns: ['Trial', this.data.metric, ...axes.map((axis) => axis.name)], rows };
  }
}
