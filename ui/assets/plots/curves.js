// Learning curves of all trials: color by rung, best in ember, selected trials in series colors.

import { make } from '../dom.js';
import { count, name, NONFINITE, parameter, plural, point, result } from '../format.js';
import { quantile, store } from '../data.js';
import { state } from '../state.js';
import { colors } from '../theme.js';
import { colorScale, faded, legendOf } from './colors.js';
import { LinePlot } from './lines.js';
import { durationTicks, fixedTicks } from './ticks.js';

const RUNNING = ['Running', 'Waiting', 'Queued'];

/** Exponential moving average. It begins again after null. */
export function ema(values, factor) {
  let last = null;
  return values.map((value) => {
    const isFirst = value === null || last === null;
    last = isFirst ? value : last * factor + value * (1 - factor);
    return last;
  });
}

export function create(host) {
  return new Curves(host);
}

class Curves {
  constructor(host) {
    this.host = host;
    this.showAll = false;
    const fixed = new URL(host.source, location.href).searchParams.get('trials');
    this.fixed = fixed ? fixed.split(',').map(Number).slice(0, 8) : null;
    this.lines = new LinePlot(host.element, {
      hover: (line, index, event) => {
        state.setHover(line.id);
        host.tooltip(this.#tip(line, index), event);
      },
      leave: () => {
        state.setHover(null);
        host.tooltip(null);
      },
      pick: (line) => state.toggle(line.id),
      open: (line) => host.open(line.id),
      zoom: (zoom) => this.#zoomed(zoom),
    });
    this.lines.zoom = readZoom(state.get('zoom'));
    this.walk = {
      count: () => this.order.length,
      points: (i) => this.order[i].x.length,
      id: (i) => this.order[i]?.trial,
      text: (i, j) => `Trial ${this.order[i].trial}, ${this.#xText(this.order[i].x[j])}: `
        + point(this.order[i].y[j]),
      mark: (i, j) => {
        state.setHover(i === null ? null : this.order[i].trial);
        this.lines.mark(i === null ? null : { id: this.order[i].trial, index: j });
      },
    };
  }

  get x() {
    return state.get('x', this.host.options.x || 'epochs');
  }

  get scales() {
    const words = state.get('scale', this.host.options.scale || 'linear').split(/[ ,+]/);
    return { logX: words.includes('log') || words.includes('logx'), logY: words.includes('logy') };
  }

  #url() {
    const url = new URL(this.host.source, location.href);
    const { searchParams } = url;
    if (state.get('metric')) searchParams.set('metric', state.get('metric'));
    searchParams.set('x', this.x);
    searchParams.set('width', Math.round(this.lines.size.width));
    if (state.selection.length) searchParams.set('focus', state.selection.join(','));
    const zoom = this.lines.zoom?.x;
    if (zoom) {
      searchParams.set('from', zoom.min);
      searchParams.set('to', zoom.max);
    }
    return url;
  }

  async load() {
    this.abort?.abort();
    this.abort = new AbortController();
    const [json, data] = await Promise.all([this.host.load(this.#url(), this.abort.signal),
      store.load()]);
    this.json = json;
    this.data = data;
    this.#draw();
  }

  refresh() {
    return this.load();
  }

  async update(changed, moving) {
    if (changed.has('hover')) {
      const id = state.hover;
      const isSame = id !== null && this.lines.marked?.id === id;
      if (this.lines.plot && !isSame) this.lines.mark(id === null ? null : { id });
    }
    if (changed.has('metric') || changed.has('x')) {
      this.showAll = false;
      this.whole = null;
      // A zoom holds values of the axes, which change their meaning now.
      this.lines.zoom = null;
      state.set('zoom', '');
      await this.host.retry.run();
      return;
    }
    const missing = state.selection.some((trial) =>
      !this.json?.curves.some((curve) => curve.trial === trial));
    if (changed.has('sel') && missing && !moving) {
      await this.host.retry.run();
      return;
    }
    if (['sel', 'brush', 'scale', 'smooth', 'color'].some((key) => changed.has(key))) {
      this.#draw(moving);
    }
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

  async #zoomed(zoom) {
    const part = (range) => (range ? `${+range.min.toPrecision(5)}..${+range.max.toPrecision(5)}`
      : '');
    state.set('zoom', zoom ? [part(zoom.x), part(zoom.y)].join(',') : '');
    // The points of the visible range come from the server.
    await this.host.retry.run();
  }

  #draw(moving = false) {
    if (!this.json || !this.data) return;
    const { host, json, data } = this;
    host.empty(json.curves.length ? '' : json.tooLarge ? this.#tooLarge()
      : `No trial has reported ${name(json.metric)}.`);
    const scale = colorScale(data, state.get('color', host.options.color || 'rung'));
    const lines = this.#lines(scale);
    const { logX, logY } = this.scales;
    const y = this.#yRange(logY);
    const x = this.#xRange(logX);
    this.lines.set({ lines, right: 62, verticals: this.#verticals(), band: json.band,
      y: { ...y, log: logY && y.min > 0 }, x: { ...x, log: logX && x.min > 0, key: this.x,
        label: this.#xLabel(logX), ticks: this.#ticks(logX) } });
    const isFixed = this.fixed && !state.selection.length;
    host.legend(legendOf(scale, isFixed ? this.#fixedState() : state));
    // A note that wraps would move the plots below while the pointer drags.
    if (!moving) this.#notes(y);
    this.#title();
  }

  #fixedState() {
    return { selection: this.fixed, seriesOf: (trial) => this.#series(trial),
      isDashed: () => false };
  }

  #series(trial) {
    if (state.selection.length || !this.fixed) return state.seriesOf(trial);
    const at = this.fixed.indexOf(trial);
    return at < 0 ? 0 : (at % 6) + 1;
  }

  #lines(scale) {
    const { json, data } = this;
    const tokens = colors();
    const smooth = Math.min(0.99, +state.get('smooth', '0') || 0);
    const { mask } = data.brushed(state.brush);
    const anySelected = state.selection.length > 0 || Boolean(this.fixed);
    const rank = new Map(data.ranked.map((row, i) => [data.trials.index[row], i]));
    const lines = [];
    for (const curve of json.curves) {
      const row = data.rows.get(curve.trial);
      const style = this.#style(curve.trial, row, scale, tokens, anySelected);
      if (row !== undefined && !mask[row] && !this.#series(curve.trial)) {
        Object.assign(style, { color: faded(), label: null, endMark: null, priority: -1 });
      }
      const line = { ...style, id: curve.trial, x: curve.x, y: curve.y,
        nonfinite: curve.nonfinite };
      if (smooth > 0) {
        lines.push({ ...line, behind: true, alpha: 0.25, label: null, endMark: null, width: 1 });
        line.raw = curve.y;
        line.y = ema(curve.y, smooth);
        line.nonfinite = [];
      }
      lines.push(line);
    }
    this.order = [...json.curves].sort((a, b) =>
      (rank.get(a.trial) ?? 1e9) - (rank.get(b.trial) ?? 1e9));
    return lines.sort((a, b) => (a.priority || 0) - (b.priority || 0));
  }

  #style(trial, row, scale, tokens, anySelected) {
    const series = this.#series(trial);
    if (series) {
      return { color: tokens[`series${series}`], width: 2.2, priority: 3, label: `#${trial}`,
        labelColor: tokens.text1, labelWeight: 600, dash: state.isDashed(trial) ? [6, 4] : null,
        endMark: this.#isRunning(row) ? 'ring' : null };
    }
    if (anySelected) return { color: faded(), width: 1.2, priority: -1 };
    if (trial === this.data.best) {
      const label = this.lines.isNarrow ? `#${trial}` : `#${trial} best`;
      return { color: tokens.ember, width: 2, priority: 2, label,
        labelColor: tokens.ember, labelWeight: 600 };
    }
    const color = row === undefined ? tokens.text3 : scale.palette[scale.bucket(row)];
    if (this.#isRunning(row)) {
      return { color, width: 1.7, priority: 1, label: `#${trial}`, endMark: 'ring' };
    }
    return { color, width: this.json.curves.length > 120 ? 1.1 : 1.4, priority: 0 };
  }

  #isRunning(row) {
    return row !== undefined && RUNNING.includes(this.data.trials.state[row]);
  }

  /** Fits y to the 2nd to 98th percentile and the best trial. */
  #yRange(logY) {
    const values = [];
    for (const curve of this.json.curves) {
      for (const value of curve.y) {
        if (value !== null && (!logY || value > 0)) values.push(value);
      }
    }
    values.sort((a, b) => a - b);
    if (!values.length) return { min: logY ? 0.1 : 0, max: 1, below: 0, above: 0 };
    let low = quantile(values, this.showAll ? 0 : 0.02);
    let high = quantile(values, this.showAll ? 1 : 0.98);
    const best = this.json.curves.find((curve) => curve.trial === this.data.best);
    const isLow = this.#smallerIsBetter();
    for (const value of best?.y || []) {
      if (value === null) continue;
      if (isLow && value < low) low = value;
      if (!isLow && value > high) high = value;
    }
    const pad = (high - low || Math.abs(high) || 1) * 0.05;
    const min = logY ? low * 0.92 : low - pad;
    const max = logY ? high * 1.08 : high + pad;
    const last = this.json.curves.map((curve) => curve.y.findLast((value) => value !== null));
    return { min, max, below: last.filter((value) => value < min).length,
      above: last.filter((value) => value > max).length };
  }

  #smallerIsBetter() {
    const { metric, smallerIsBetter } = this.data;
    if (this.json.metric === metric) return smallerIsBetter;
    return /loss|error|perplexity/.test(this.json.metric);
  }

  #xRange(logX) {
    let min = Infinity;
    let max = -Infinity;
    for (const { x, nonfinite } of this.json.curves) {
      for (const value of [...x, ...(nonfinite || [])]) {
        if (logX && !(value > 0)) continue;
        if (value < min) min = value;
        if (value > max) max = value;
      }
    }
    if (min > max) return { min: logX ? 0.5 : 0, max: 1 };
    if (this.lines.zoom?.x && this.whole) return this.whole;
    if (!logX) min = Math.min(min, 0);
    if (this.x === this.data.units) {
      max = Math.max(max, Math.min(this.data.maxLength || 0, max * 4));
    }
    this.whole = { min, max: max > min ? max : min + 1 };
    return this.whole;
  }

  #verticals() {
    if (this.x !== this.data.units || this.data.lengths.length < 2) return [];
    return this.data.lengths.map((x) => ({ x }));
  }

  #ticks(logX) {
    if (this.x === 'time') return logX ? null : durationTicks;
    const { lengths } = this.data;
    if (!logX || this.x !== this.data.units || lengths.length < 3) return null;
    return (min, max) => {
      const inside = lengths.filter((length) => length > min * 1.01 && length <= max);
      if (inside.length < 3) return null;
      return fixedTicks([+min.toPrecision(3), ...inside], min, max, true);
    };
  }

  #xLabel(logX) {
    const label = this.x === 'time' ? 'training time' : this.x;
    return `${label}${logX ? ', log scale' : ''}`;
  }

  #xText(value) {
    return this.x === 'time' ? `${parameter(value)} s` : `${parameter(value)} ${this.x}`;
  }

  #tip(line, index) {
    const value = (line.raw || line.y)[index];
    return [`Trial ${line.id}${line.id === this.data.best ? ', best' : ''}`,
      `${name(this.json.metric)} ${result(value)} at ${this.#xText(line.x[index])}`,
      ...this.data.describe(line.id).slice(1)];
  }

  #tooLarge() {
    return `${plural(this.json.tooLarge, 'trial')} not drawn: too many metrics.`;
  }

  #notes(y) {
    const { host, json, data } = this;
    const parts = [];
    if (state.hasBrush) {
      const { count: inside } = data.brushed(state.brush);
      parts.push(`${count(inside)} of ${plural(data.size, 'trial')} in brush.`);
    }
    const outside = [[y.below, 'below'], [y.above, 'above']].filter(([number]) => number)
      .map(([number, side]) => `${plural(number, 'trial')} ${side}`).join(' and ');
    if (y.below || y.above || this.showAll) {
      const toggle = make('button', { type: 'button', class: 'link',
        text: this.showAll ? 'Fit to most' : 'Show all', on: { click: () => {
          this.showAll = !this.showAll;
          this.#draw();
        } } });
      parts.push(this.showAll ? null : `${outside} the axis.`, toggle);
    }
    if (json.omitted) {
      parts.push(`${count(json.curves.length)} of ${count(json.trials)} trials drawn, the band `
        + 'shows percentiles 5 to 95 of the others.');
    } else {
      parts.push(`${plural(json.trials, 'trial')}.`);
    }
    if (json.tooLarge) parts.push(this.#tooLarge());
    const lttb = json.drawn < json.total ? ' (LTTB)' : '';
    parts.push(`${count(json.drawn)} of ${count(json.total)} points drawn${lttb}`);
    host.note(...parts);
    const best = data.bestRow < 0 ? 'no best yet'
      : `best ${result(data.trials.value[data.bestRow])}, trial ${data.best}`;
    host.label(`${plural(json.curves.length, 'curve')}, ${best}`);
  }

  #title() {
    const heading = this.host.card.querySelector('h2');
    if (!heading) return;
    const smooth = +state.get('smooth', '0') || 0;
    this.smoothed ||= make('span', { class: 'muted', style: { color: 'var(--text3)',
      fontWeight: '400', fontSize: '12px', marginInlineStart: '8px' } });
    this.smoothed.textContent = smooth > 0 ? `smoothed, EMA ${smooth}` : '';
    if (!this.smoothed.isConnected) heading.append(this.smoothed);
  }

  paint(ctx) {
    return this.lines.paint(ctx);
  }

  table() {
    const rows = [];
    for (const curve of this.order) {
      curve.x.forEach((x, i) => {
        if (curve.y[i] !== null) rows.push([curve.trial, x, curve.y[i]]);
      });
      for (const x of curve.nonfinite || []) rows.push([curve.trial, x, NONFINITE]);
    }
    return { columns: ['Trial', this.x, this.json.metric], rows };
  }
}

function readZoom(text) {
  if (!text) return null;
  const zoom = {};
  text.split(',').forEach((part, i) => {
    const [min, max] = part.split('..').map(Number);
    if (part && min < max) zoom[i ? 'y' : 'x'] = { min, max };
  });
  return zoom.x || zoom.y ? zoom : null;
}
