// Timeline: each trial is a bar from its first start to its last end.

import { count, duration, moment, plural } from '../format.js';
import { store } from '../data.js';
import { state } from '../state.js';
import { colors } from '../theme.js';
import { axisStyle, Chart } from './chart.js';
import { durationTicks } from './ticks.js';

const MOST = 2000;

export function create(host) {
  return new Timeline(host);
}

class Timeline {
  constructor(host) {
    this.host = host;
    this.bars = [];
    this.chart = new Chart(host.element, {
      click: (event) => state.toggle(this.bars[event.dataIndex].trial),
      open: (event) => host.open(this.bars[event.dataIndex].trial),
      over: (event) => state.setHover(this.bars[event.dataIndex]?.trial ?? null),
      out: () => state.setHover(null),
    });
    this.walk = {
      count: () => this.bars.length,
      points: () => 1,
      id: (i) => this.bars[i].trial,
      text: (i) => this.#text(this.bars[i]).join(', '),
      mark: (i) => state.setHover(i === null ? null : this.bars[i].trial),
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
    const isSmall = this.bars.length <= 300;
    if (changed.has('brush') || changed.has('sel') || (changed.has('hover') && isSmall)) {
      this.#draw();
    }
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

  #collect() {
    const { data } = this;
    const now = Math.max(Date.now() / 1000, 0);
    this.bars = [];
    for (let row = 0; row < data.size; row += 1) {
      const start = data.times.start[row];
      if (start === null || start === undefined) continue;
      const isOpen = data.times.end[row] === null || data.times.end[row] === undefined;
      this.bars.push({ row, trial: data.trials.index[row], start,
        end: isOpen ? Math.max(now, start) : data.times.end[row], isOpen });
    }
    this.left = Math.max(0, this.bars.length - MOST);
    this.bars = this.bars.slice(-MOST);
    this.from = this.bars.reduce((a, bar) => Math.min(a, bar.start), Infinity);
  }

  #draw() {
    const { host, data } = this;
    if (!data) return;
    this.#collect();
    host.empty(this.bars.length ? '' : 'No trial has started.');
    if (!this.bars.length) return;
    const to = this.bars.reduce((a, bar) => Math.max(a, bar.end), 0) - this.from;
    const label = { color: colors().text3, fontSize: 11.5, hideOverlap: true };
    const every = Math.ceil(this.bars.length / Math.max(4, (this.chart.size.height - 44) / 16));
    const unit = durationTicks(0, to);
    this.chart.set({ grid: { left: 52, right: 16, top: 10, bottom: 34 },
      xAxis: axisStyle({ type: 'value', min: 0, max: to || 1,
        interval: unit.values[1] - unit.values[0] || undefined,
        axisLabel: { ...label, showMaxLabel: false, formatter: (value) => duration(value) } }),
      yAxis: axisStyle({ type: 'category', inverse: true, splitLine: { show: false },
        data: this.bars.map((bar) => `#${bar.trial}`),
        axisLabel: { ...label, interval: every - 1 } }),
      tooltip: { renderMode: 'richText', confine: true, backgroundColor: colors().surface,
        borderColor: colors().line2, borderWidth: 1,
        textStyle: { color: colors().text1, fontSize: 12 },
        formatter: (event) => this.#text(this.bars[event.dataIndex]).join('\n') },
      series: [{ type: 'custom', renderItem: (_, api) => this.#bar(api),
        encode: { x: [0, 1], y: 2 },
        data: this.bars.map((bar, i) => [bar.start - this.from, bar.end - this.from, i]) }] });
    const tokens = colors();
    host.legend({ items: [{ text: 'ended', color: tokens.rung1 },
      { text: 'open', color: tokens.accent }, { text: 'failed', color: tokens.fail }] });
    host.note(`${plural(this.bars.length, 'trial')}, `
      + 'from first start to last end, with the time in between.',
    this.left ? `${count(this.left)} older trials left out.` : null);
    host.label(`Timeline of ${plural(this.bars.length, 'trial')} over ${duration(to)}`);
  }

  #bar(api) {
    const bar = this.bars[api.value(2)];
    const tokens = colors();
    const [x, y] = api.coord([api.value(0), api.value(2)]);
    const [end] = api.coord([api.value(1), api.value(2)]);
    const height = Math.max(1, Math.min(14, api.size([0, 1])[1] * 0.7));
    const series = state.seriesOf(bar.trial);
    const status = this.data.trials.state[bar.row];
    const isFaded = !series && (state.selection.length > 0 || !this.#mask()[bar.row]);
    const fill = series ? tokens[`series${series}`]
      : ['Failed', 'Invalid'].includes(status) ? tokens.fail
        : bar.isOpen || status === 'Running' ? tokens.accent : tokens.rung1;
    const width = Math.max(2, end - x);
    return { type: 'rect', shape: { x, y: y - height / 2, width, height, r: 2 },
      style: { fill, opacity: isFaded ? 0.25 : 1, lineWidth: 1.5,
        stroke: state.hover === bar.trial ? tokens.text1 : undefined } };
  }

  #mask() {
    if (this.maskOf !== state.brush || this.maskData !== this.data) {
      this.maskOf = state.brush;
      this.maskData = this.data;
      this.mask = this.data.brushed(state.brush).mask;
    }
    return this.mask;
  }

  #text(bar) {
    return [`Trial ${bar.trial}, ${this.data.trials.state[bar.row]}`,
      `${moment(bar.start)} to ${bar.isOpen ? 'now' : moment(bar.end)}, `
      + `${duration(bar.end - bar.start)}`,
      `trained for ${duration(this.data.trials.seconds[bar.row])}, `
      + plural(this.data.trials.attempts[bar.row], 'attempt')];
  }

  table() {
    return { columns: ['Trial', 'State', 'Start', 'End', 'Training seconds', 'Attempts'],
      rows: this.bars.map((bar) => [bar.trial, this.data.trials.state[bar.row],
        new Date(bar.start * 1000).toISOString(),
        bar.isOpen ? '' : new Date(bar.end * 1000).toISOString(),
        this.data.trials.seconds[bar.row], this.data.trials.attempts[bar.row]]) };
  }
}
