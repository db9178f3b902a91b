// Rung ladder of one bracket: results by rung, promotions as lines, band and cut-off.

import { count, duration, name, parameter, plural, result } from '../format.js';
import { quantile, store } from '../data.js';
import { state } from '../state.js';
import { colors } from '../theme.js';
import { isTouch, onRest, reach } from '../touch.js';
import { drawHistogram, jitter, partWord } from './ladder-parts.js';
import { drawCross, text } from './scene.js';
import { linearTicks } from './ticks.js';

const MANY = 500;
const TOP = 20;
const LEFT = 44;
const FAILED = ['Failed', 'Invalid'];

export function create(host) {
  return new Ladder(host);
}

class Ladder {
  constructor(host) {
    this.host = host;
    [this.ground, this.front] = [0, 1].map(() => {
      const canvas = document.createElement('canvas');
      Object.assign(canvas.style, { position: 'absolute', inset: '0', width: '100%',
        height: '100%' });
      host.element.append(canvas);
      return canvas;
    });
    this.walk = {
      count: () => this.rungs.length,
      points: (i) => this.rungs[i].dots.length,
      text: (i, j) => this.#say(i, j),
      id: (i) => this.rungs[i].dots[Math.min(host.at[1], this.rungs[i].dots.length - 1)]?.trial,
      mark: (i, j) => this.#mark(i === null ? null : this.rungs[i].dots[j]?.trial ?? null),
    };
    this.#listen();
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
    if (!this.data) return;
    if (['bracket', 'brush', 'sel'].some((key) => changed.has(key))) this.#draw();
    if (changed.has('hover')) this.#mark(state.hover);
  }

  theme() {
    this.#draw();
  }

  resize() {
    this.#draw();
  }

  get bracket() {
    const wanted = state.get('bracket', this.host.options.bracket || '');
    const list = this.data.brackets || [];
    return list.find((one) => String(one.bracket) === wanted) || list[0] || null;
  }

  /** Collects dots by rung: {trial, value, kind}. */
  #collect() {
    const { data, bracket } = this;
    const { trials } = data;
    const promoted = new Set(data.promoted.map(([trial, units]) => `${trial} ${units}`));
    this.rungs = bracket.rungs.map((rung) => ({ ...rung, dots: [], training: [] }));
    const place = new Map(this.rungs.map((rung, i) => [rung.units, i]));
    this.paths = new Map();
    this.promotions = 0;
    for (let row = 0; row < data.size; row += 1) {
      if (trials.bracket[row] !== bracket.bracket) continue;
      const [trial, path] = [trials.index[row], []];
      for (const [length, value] of trials.results[row] || []) {
        const i = place.get(length);
        if (i === undefined) continue;
        const kind = value === null ? 'failed' : promoted.has(`${trial} ${length}`)
          ? 'promoted' : 'open';
        const dot = { trial, row, value, kind, i };
        this.rungs[i].dots.push(dot);
        path.push(dot);
      }
      this.#collectEnd(row, trial, path);
      this.paths.set(trial, path);
      if (path.length > 1) this.promotions += 1;
    }
    for (const rung of this.rungs) {
      const worst = data.smallerIsBetter ? Infinity : -Infinity;
      const key = (dot) => dot.value ?? worst;
      rung.dots.sort((a, b) => (data.isBetter(key(a), key(b)) ? -1
        : data.isBetter(key(b), key(a)) ? 1 : a.trial - b.trial));
    }
  }

  /** Adds the ring of a trial in training, or × of a failed one. */
  #collectEnd(row, trial, path) {
    const { trials } = this.data;
    const status = trials.state[row];
    const next = path.length ? path[path.length - 1].i + 1 : this.rungs.findIndex((rung) =>
      rung.units >= trials.granted[row]);
    if (next < 0 || next >= this.rungs.length) return;
    const value = trials.latest[row];
    if (status === 'Running' || status === 'Queued') {
      if (!Number.isFinite(value)) return;
      const dot = { trial, row, value, kind: 'training', i: next };
      this.rungs[next].training.push(dot);
      path.push(dot);
    } else if (FAILED.includes(status)) {
      const dot = { trial, row, value: null, kind: 'failed', i: next };
      this.rungs[next].training.push(dot);
      path.push(dot);
    }
  }

  #range() {
    const values = [];
    for (const rung of this.rungs) {
      for (const dot of [...rung.dots, ...rung.training]) {
        if (Number.isFinite(dot.value)) values.push(dot.value);
      }
    }
    values.sort((a, b) => a - b);
    if (!values.length) return { min: 0, max: 1 };
    const isLow = this.data.smallerIsBetter;
    const min = isLow ? values[0] : quantile(values, 0.04);
    const max = isLow ? quantile(values, 0.96) : values[values.length - 1];
    const pad = (max - min || Math.abs(max) || 1) * 0.08;
    return { min: min - pad, max: max + pad };
  }

  #layout() {
    const { element } = this.host;
    this.width = Math.max(200, element.clientWidth);
    this.height = Math.max(140, element.clientHeight || 240);
    this.box = { left: LEFT, top: 10, width: this.width - LEFT - 12, height: this.height - 56 };
    this.step = this.box.width / Math.max(1, this.rungs.length);
    const { min, max } = this.range;
    this.y = (value) => {
      const at = (value - min) / (max - min);
      const y = this.box.top + this.box.height * (1 - at);
      return Math.max(this.box.top, Math.min(this.box.top + this.box.height, y));
    };
    this.x = (i) => this.box.left + this.step * (i + 0.5);
    this.spread = Math.min(46, this.step * 0.3);
  }

  #draw() {
    const { host, data } = this;
    if (!data) return;
    if (!this.bracket) {
      this.rungs = [];
      host.empty('This search has no rungs.');
      return;
    }
    host.empty('');
    this.#collect();
    this.range = this.#range();
    this.#layout();
    this.#prepare(this.ground);
    this.paint(this.#prepare(this.ground));
    this.#mark(state.hover);
    this.#legend();
  }

  #prepare(canvas) {
    const ratio = devicePixelRatio || 1;
    canvas.width = Math.round(this.width * ratio);
    canvas.height = Math.round(this.height * ratio);
    const ctx = canvas.getContext('2d');
    ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
    return ctx;
  }

  /** Draws the ladder into a context, for screen and exports. */
  paint(ctx) {
    const { mask } = this.data.brushed(state.brush);
    this.mask = mask;
    this.spots = [];
    this.#drawGround(ctx);
    this.#drawPaths(ctx);
    this.rungs.forEach((rung, i) => this.#drawRung(ctx, rung, i));
    return { width: this.width, height: this.height };
  }

  #drawGround(ctx) {
    const { box } = this;
    const tokens = colors();
    const ticks = linearTicks(this.range.min, this.range.max, Math.floor(this.height / 56));
    ctx.lineWidth = 1;
    ticks.values.forEach((value, i) => {
      const y = Math.round(this.y(value)) + 0.5;
      ctx.strokeStyle = tokens.line;
      ctx.beginPath();
      ctx.moveTo(box.left, y);
      ctx.lineTo(box.left + box.width, y);
      ctx.stroke();
      text(ctx, ticks.labels[i], box.left - 8, y, { align: 'right', color: tokens.text3 });
    });
    const bottom = box.top + box.height;
    this.rungs.forEach((rung, i) => {
      const x = this.x(i);
      const half = this.spread + 8;
      if (Number.isFinite(rung.cut)) {
        const y = this.y(rung.cut);
        ctx.fillStyle = tokens.selected;
        if (this.data.smallerIsBetter) ctx.fillRect(x - half, y, 2 * half, bottom - y);
        else ctx.fillRect(x - half, box.top, 2 * half, y - box.top);
        ctx.fillStyle = tokens.accent;
        ctx.fillRect(x - half, y - 1, 2 * half, 2);
      }
      const word = rung.units === 1 ? this.data.unit : this.data.units;
      text(ctx, `${parameter(rung.units)} ${name(word)}`, x, bottom + 16,
        { align: 'center', color: tokens.text2 });
      text(ctx, plural(rung.results ?? rung.dots.length, 'result'), x, bottom + 32,
        { align: 'center', color: tokens.text3 });
    });
  }

  #at(dot) {
    const y = Number.isFinite(dot.value) ? this.y(dot.value)
      : this.data.smallerIsBetter ? this.box.top + 6 : this.box.top + this.box.height;
    return [this.x(dot.i) + jitter(dot.trial) * this.spread, y];
  }

  #drawPaths(ctx) {
    const tokens = colors();
    const anySelected = state.selection.length > 0;
    // Many promotions would otherwise fill the plot with one color.
    const most = Math.max(0.04, 0.45 * Math.min(1, 120 / Math.max(1, this.promotions)));
    for (const [trial, path] of this.paths) {
      const series = state.seriesOf(trial);
      const isFaded = !series && (anySelected || !this.mask[path[0]?.row]);
      for (let k = 1; k < path.length; k += 1) {
        if (path[k].kind === 'failed') continue;
        const [ax, ay] = this.#at(path[k - 1]);
        const [bx, by] = this.#at(path[k]);
        const isTraining = path[k].kind === 'training';
        ctx.strokeStyle = series ? tokens[`series${series}`] : tokens.accent;
        ctx.globalAlpha = series ? 1 : isFaded ? Math.min(0.1, most) : isTraining ? 0.9 : most;
        ctx.lineWidth = series ? 2 : isTraining ? 1.4 : 1;
        ctx.setLineDash(isTraining ? [4, 3] : []);
        ctx.beginPath();
        ctx.moveTo(ax, ay);
        ctx.lineTo(bx, by);
        ctx.stroke();
      }
    }
    ctx.globalAlpha = 1;
    ctx.setLineDash([]);
  }

  #drawRung(ctx, rung, i) {
    let { dots } = rung;
    if (dots.length > MANY) {
      drawHistogram(ctx, dots, this, i);
      const top = new Set(dots.slice(0, TOP));
      dots = dots.filter((dot) => top.has(dot) || state.isSelected(dot.trial)
        || (dot.kind === 'promoted' && dots.length <= 20 * MANY));
    }
    for (const dot of dots) if (dot.kind !== 'promoted') this.#drawDot(ctx, dot);
    for (const dot of dots) if (dot.kind === 'promoted') this.#drawDot(ctx, dot);
    for (const dot of rung.training) this.#drawDot(ctx, dot);
  }

  #drawDot(ctx, dot) {
    const tokens = colors();
    const [x, y] = this.#at(dot);
    const series = state.seriesOf(dot.trial);
    const isFaded = !series && (state.selection.length > 0 || !this.mask[dot.row]);
    this.spots.push({ x, y, trial: dot.trial });
    ctx.globalAlpha = isFaded ? 0.3 : 1;
    if (dot.kind === 'failed') {
      drawCross(ctx, x, y, tokens.fail, 3);
      ctx.globalAlpha = 1;
      return;
    }
    const isPromoted = dot.kind === 'promoted';
    const color = series ? tokens[`series${series}`]
      : dot.kind === 'open' ? tokens.text3 : tokens.accent;
    ctx.beginPath();
    ctx.arc(x, y, dot.kind === 'training' ? 3.8 : 3.2, 0, 2 * Math.PI);
    ctx.fillStyle = isPromoted ? color : tokens.surface;
    ctx.fill();
    ctx.strokeStyle = color;
    ctx.lineWidth = dot.kind === 'training' ? 2 : 1.2;
    ctx.stroke();
    ctx.globalAlpha = 1;
  }

  #mark(trial) {
    const ctx = this.#prepare(this.front);
    const path = trial === null || trial === undefined ? null : this.paths?.get(trial);
    if (!path?.length) return;
    const series = state.seriesOf(trial);
    const color = series ? colors()[`series${series}`] : colors().accent;
    ctx.strokeStyle = color;
    ctx.lineWidth = 2.6;
    ctx.beginPath();
    path.forEach((dot, k) => ctx[k ? 'lineTo' : 'moveTo'](...this.#at(dot)));
    ctx.stroke();
    for (const dot of path) {
      ctx.beginPath();
      ctx.arc(...this.#at(dot), 5, 0, 2 * Math.PI);
      ctx.fillStyle = color;
      ctx.fill();
    }
  }

  #nearest(event) {
    const box = this.host.element.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    let best = null;
    let distance = reach(12);
    for (const spot of this.spots || []) {
      const d = Math.hypot(spot.x - x, spot.y - y);
      if (d < distance) {
        distance = d;
        best = spot.trial;
      }
    }
    return best;
  }

  #listen() {
    const { host } = this;
    const show = (event) => {
      const trial = this.#nearest(event);
      host.element.style.cursor = trial === null ? 'default' : 'pointer';
      state.setHover(trial);
      host.tooltip(trial === null ? null : this.data.describe(trial), event);
      return trial !== null;
    };
    const hide = () => {
      state.setHover(null);
      host.tooltip(null);
    };
    host.element.addEventListener('pointermove', show);
    host.element.addEventListener('pointerleave', hide);
    onRest(host.element, show, hide);
    host.element.addEventListener('click', (event) => {
      const trial = this.#nearest(event);
      if (trial !== null) state.toggle(trial);
      // A finger has left the plot before it clicks.
      if (isTouch()) show(event);
    });
    host.element.addEventListener('dblclick', (event) => host.open(this.#nearest(event)));
  }

  #legend() {
    const { host, data } = this;
    const tokens = colors();
    const items = [{ text: 'promoted', color: tokens.accent, mark: 'dot' },
      { text: 'not promoted', color: tokens.text3, mark: 'ring' }];
    const isTraining = this.rungs.some((rung) =>
      rung.training.some((dot) => dot.kind !== 'failed'));
    const hasFailed = this.rungs.some((rung) => [...rung.dots, ...rung.training].some((dot) =>
      dot.kind === 'failed'));
    if (this.width > 420 && isTraining) {
      items.push({ text: 'in training, dashed to its current value', color: tokens.accent,
        mark: 'ring' });
    }
    const cut = this.width > 420 ? `${partWord(this.rungs)} and cut-off` : 'cut-off';
    items.push({ text: cut, color: tokens.accent });
    if (this.width > 420 && hasFailed) {
      items.push({ text: 'failed', color: tokens.fail, mark: 'cross' });
    }
    host.legend({ items });
    const strips = this.rungs.filter((rung) => rung.dots.length > MANY).length;
    host.note(strips ? `${plural(strips, 'rung')} drawn as a distribution; promoted and top `
      + `${TOP} as dots.` : '');
    const texts = this.rungs.map((rung) => `${parameter(rung.units)}: `
      + `${plural(rung.results ?? rung.dots.length, 'result')}, `
      + `${count(rung.promoted || 0)} promoted`);
    host.label(`Bracket ${this.bracket.bracket}, rungs by ${data.units}. ${texts.join('; ')}`);
  }

  #say(i, j) {
    const rung = this.rungs[i];
    const dot = rung.dots[j];
    const word = rung.units === 1 ? this.data.unit : this.data.units;
    if (!dot) return `Rung ${parameter(rung.units)} ${word}, no result`;
    return `Rung ${parameter(rung.units)} ${word}, trial ${dot.trial}, ${result(dot.value)}, `
      + (dot.kind === 'promoted' ? 'promoted' : dot.kind === 'failed' ? 'failed' : 'not promoted');
  }

  table() {
    const rows = this.rungs.flatMap((rung) => [...rung.dots, ...rung.training].map((dot) =>
      [rung.units, dot.trial, dot.value, dot.kind === 'open' ? 'not promoted' : dot.kind,
        duration(this.data.trials.seconds[dot.row])]));
    return { columns: [`Rung, ${this.data.units}`, 'Trial', this.data.metric, 'Decision',
      'Training time'], rows };
  }
}
