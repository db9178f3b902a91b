// Canvas of the parallel coordinates. All lines are drawn once into an image; above it at most
// 1,000 lines are drawn while a brush moves, and all brushed lines once the pointer rests.

import { state } from '../state.js';
import { alpha, colors } from '../theme.js';
import { fit, ticksOf } from './parallel-text.js';
import { text } from './scene.js';

const MOST = 1000;
const CURVED = 400;

export class ParallelCanvas {
  constructor(element) {
    this.element = element;
    this.top = 46;
    this.axes = [];
    this.flips = [];
    this.order = [];
    this.drawn = 0;
    const style = { position: 'absolute', inset: '0', width: '100%', height: '100%' };
    [this.ground, this.front] = [0, 1].map(() => {
      const canvas = document.createElement('canvas');
      Object.assign(canvas.style, style);
      element.append(canvas);
      return canvas;
    });
    this.image = document.createElement('canvas');
    this.resize();
  }

  resize() {
    const ratio = devicePixelRatio || 1;
    this.ratio = ratio;
    this.width = Math.max(200, this.element.clientWidth);
    this.full = Math.max(160, this.element.clientHeight || 300);
    for (const canvas of [this.ground, this.front, this.image]) {
      canvas.width = Math.round(this.width * ratio);
      canvas.height = Math.round(this.full * ratio);
    }
    this.height = this.full - this.top - 34;
    this.imageKey = '';
    this.#place();
  }

  setAxes(data, axes, flips) {
    this.data = data;
    this.axes = axes;
    this.flips = flips;
    this.order = data.ranked;
    this.imageKey = '';
    this.#place();
    this.#positions();
  }

  #place() {
    const side = this.width < 480 ? 30 : 48;
    const gap = (this.width - 2 * side) / Math.max(1, this.axes.length - 1);
    this.xs = this.axes.map((_, i) => (this.axes.length < 2 ? this.width / 2 : side + i * gap));
    this.gap = gap;
  }

  /** Computes y of each row on each axis; NaN marks a value that is not set. */
  #positions() {
    const { data, axes } = this;
    this.ys = axes.map((axis, i) => {
      const column = data.column(axis);
      const ys = new Float32Array(data.size);
      for (let row = 0; row < data.size; row += 1) {
        ys[row] = this.#y(i, axis.position(column[row]));
      }
      return ys;
    });
  }

  #y(i, position) {
    if (Number.isNaN(position)) return this.top + this.height + 18;
    return this.top + this.height * (this.flips[i] ? position : 1 - position);
  }

  positionAt(i, y) {
    const at = Math.max(0, Math.min(1, (y - this.top) / this.height));
    return this.flips[i] ? at : 1 - at;
  }

  axisAt(x, reach) {
    let best = -1;
    let distance = Math.min(reach, this.gap / 2 || reach);
    this.xs.forEach((at, i) => {
      if (Math.abs(at - x) <= distance) {
        best = i;
        distance = Math.abs(at - x);
      }
    });
    return best;
  }

  flip(i) {
    this.flips[i] = !this.flips[i];
    this.imageKey = '';
    this.#positions();
  }

  /** Moves axis `i` under the pointer and returns its new place; -1 ends dragging. */
  dragAxis(i, x) {
    if (i < 0) {
      this.#place();
      this.imageKey = '';
      return i;
    }
    this.#place();
    const to = Math.max(0, Math.min(this.axes.length - 1,
      Math.round((x - this.xs[0]) / (this.gap || 1))));
    if (to !== i) {
      for (const list of [this.axes, this.flips, this.ys]) {
        list.splice(to, 0, list.splice(i, 1)[0]);
      }
      this.imageKey = '';
    }
    return to;
  }

  /** Draws image and front. `moving` limits the lines above the image to 1,000. */
  draw(scale, brushed, brush, moving) {
    if (!this.axes.length) return;
    this.#checkHeight();
    Object.assign(this, { scale, brushed, brush });
    const isFaded = state.hasBrush || state.selection.length > 0;
    const key = `${isFaded}${scale.title}${colors().surface}${this.width}${this.full}`;
    if (this.imageKey !== key) {
      this.imageKey = key;
      this.#drawImage(isFaded);
    }
    const ctx = this.#clear(this.ground);
    ctx.setTransform(1, 0, 0, 1, 0, 0);
    ctx.drawImage(this.image, 0, 0);
    ctx.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    this.drawn = this.#drawFront(ctx, isFaded, moving ? MOST : Infinity);
    this.#drawAxes(ctx);
    if (!moving) this.mark(this.marked ?? null);
  }

  #checkHeight() {
    if (this.laidOut === this.full) return;
    this.laidOut = this.full;
    this.#positions();
  }

  #clear(canvas) {
    const ctx = canvas.getContext('2d');
    ctx.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    ctx.clearRect(0, 0, this.width, this.full);
    return ctx;
  }

  #drawImage(isFaded) {
    const ctx = this.#clear(this.image);
    this.#drawAll(ctx, isFaded);
  }

  #drawAll(ctx, isFaded) {
    const many = this.data.size > CURVED;
    ctx.lineWidth = many ? 0.7 : 1.1;
    ctx.globalAlpha = this.data.size > 3000 ? 0.25 : many ? 0.5 : 0.75;
    if (isFaded) {
      ctx.globalAlpha = this.data.size > 3000 ? 0.06 : many ? 0.12 : 0.3;
      ctx.strokeStyle = colors().text3;
      this.#strokeRows(ctx, Array.from({ length: this.data.size }, (_, row) => row), many);
    } else {
      this.#strokeBuckets(ctx, this.data.size, (row) => row, many);
    }
    ctx.globalAlpha = 1;
  }

  /** Strokes rows grouped by color, the highest colors last. */
  #strokeBuckets(ctx, length, rowAt, many) {
    const buckets = this.scale.palette.map(() => []);
    for (let i = 0; i < length; i += 1) {
      const row = rowAt(i);
      buckets[this.scale.bucket(row)].push(row);
    }
    buckets.forEach((rows, i) => {
      ctx.strokeStyle = this.scale.palette[i];
      this.#strokeRows(ctx, rows, many);
    });
  }

  #strokeRows(ctx, rows, many) {
    // Short paths: the cost of one stroke grows faster than its number of segments.
    for (let start = 0; start < rows.length; start += 50) {
      ctx.beginPath();
      for (let k = start; k < Math.min(rows.length, start + 50); k += 1) {
        this.#trace(ctx, rows[k], many);
      }
      ctx.stroke();
    }
  }

  #trace(ctx, row, straight) {
    const { xs, ys } = this;
    ctx.moveTo(xs[0], ys[0][row]);
    for (let i = 1; i < xs.length; i += 1) {
      if (straight) {
        ctx.lineTo(xs[i], ys[i][row]);
        continue;
      }
      const third = (xs[i] - xs[i - 1]) / 3;
      ctx.bezierCurveTo(xs[i - 1] + third, ys[i - 1][row] + this.#slope(i - 1, row) * third,
        xs[i] - third, ys[i][row] - this.#slope(i, row) * third, xs[i], ys[i][row]);
    }
  }

  /** Slope of a monotone curve: zero at turns, else the harmonic mean of both sides. */
  #slope(i, row) {
    const { xs, ys } = this;
    if (i === 0 || i === xs.length - 1) {
      const a = i === 0 ? 0 : i - 1;
      return (ys[a + 1][row] - ys[a][row]) / (xs[a + 1] - xs[a]);
    }
    const left = (ys[i][row] - ys[i - 1][row]) / (xs[i] - xs[i - 1]);
    const right = (ys[i + 1][row] - ys[i][row]) / (xs[i + 1] - xs[i]);
    return left * right <= 0 ? 0 : (2 * left * right) / (left + right);
  }

  /** Draws brushed, best and selected lines; returns how many brushed lines it drew. */
  #drawFront(ctx, isFaded, limit) {
    const tokens = colors();
    let drawn = 0;
    if (state.hasBrush) {
      const rows = [];
      const { mask, count } = this.brushed;
      const step = count > limit ? count / limit : 1;
      let next = 0;
      let seen = 0;
      for (let row = 0; row < mask.length; row += 1) {
        if (!mask[row]) continue;
        if (seen >= next) {
          rows.push(row);
          next += step;
        }
        seen += 1;
      }
      drawn = rows.length;
      const many = drawn > CURVED;
      ctx.lineWidth = many ? 0.8 : 1.2;
      ctx.globalAlpha = state.selection.length ? 0.35 : drawn > 2000 ? 0.25 : many ? 0.5 : 0.85;
      this.#strokeBuckets(ctx, rows.length, (i) => rows[i], many);
      ctx.globalAlpha = 1;
    }
    const best = this.data.bestRow;
    if (best >= 0 && !state.selection.length && (!state.hasBrush || this.brushed.mask[best])) {
      this.#strokeOne(ctx, best, tokens.ember, 2.2);
    }
    for (const trial of state.selection) {
      const row = this.data.rows.get(trial);
      if (row === undefined) continue;
      ctx.setLineDash(state.isDashed(trial) ? [6, 4] : []);
      this.#strokeOne(ctx, row, tokens[`series${state.seriesOf(trial)}`], 2.2);
      ctx.setLineDash([]);
    }
    return drawn;
  }

  #strokeOne(ctx, row, color, width) {
    ctx.strokeStyle = color;
    ctx.lineWidth = width;
    ctx.beginPath();
    this.#trace(ctx, row, false);
    ctx.stroke();
  }

  #drawAxes(ctx) {
    const tokens = colors();
    const isNarrow = this.gap < 90;
    this.axes.forEach((axis, i) => {
      const x = Math.round(this.xs[i]) + 0.5;
      ctx.strokeStyle = tokens.control;
      ctx.lineWidth = 1;
      ctx.beginPath();
      ctx.moveTo(x, this.top);
      ctx.lineTo(x, this.top + this.height);
      ctx.stroke();
      const label = fit(ctx, axis.name, Math.max(38, this.gap - 10));
      const half = ctx.measureText(label).width / 2 + 2;
      text(ctx, label, Math.max(half, Math.min(this.width - half, x)), this.top - 22,
        { align: 'center', weight: 550, size: 12, color: tokens.text1 });
      this.#drawTicks(ctx, axis, i, x, isNarrow);
      this.#drawBrush(ctx, axis, i, x);
      if (this.#hasUnset(axis)) this.#drawUnset(ctx, axis, x);
    });
  }

  #drawTicks(ctx, axis, i, x, isNarrow) {
    const { values, labels } = ticksOf(axis, Math.max(2, Math.floor(this.height / 48)));
    const isLast = i === this.axes.length - 1;
    let previous = -100;
    values.forEach((value, k) => {
      const y = this.#y(i, axis.position(value));
      if (Math.abs(y - previous) < 12) return;
      previous = y;
      ctx.strokeStyle = colors().control;
      ctx.lineWidth = 1;
      ctx.beginPath();
      ctx.moveTo(x - 3, Math.round(y) + 0.5);
      ctx.lineTo(x + 3, Math.round(y) + 0.5);
      ctx.stroke();
      const label = isNarrow && labels[k].length > 7 ? `${labels[k].slice(0, 6)}…` : labels[k];
      const left = isLast && this.width - x < 46;
      text(ctx, label, left ? x - 7 : x + 7, y, { halo: true, color: colors().text2,
        align: left ? 'right' : 'left' });
    });
  }

  #hasUnset(axis) {
    if (axis.unsetOf !== this.data) {
      axis.unsetOf = this.data;
      const column = this.data.column(axis);
      axis.hasUnset = column.some((value) => Number.isNaN(axis.position(value)));
    }
    return axis.hasUnset;
  }

  #drawUnset(ctx, axis, x) {
    const y = this.top + this.height + 18;
    ctx.strokeStyle = colors().control;
    ctx.beginPath();
    ctx.moveTo(x - 4, y);
    ctx.lineTo(x + 4, y);
    ctx.stroke();
    text(ctx, axis.isResult ? 'no result' : 'not set', Math.min(x, this.width - 24), y + 11,
      { color: colors().text3, align: 'center', size: 10.5 });
  }

  #drawBrush(ctx, axis, i, x) {
    const part = this.brush[axis.key];
    if (!part) return;
    const { accent } = colors();
    const half = axis.isCategory ? 0.5 / Math.max(1, axis.values.length) : 0;
    const ranges = part.values
      ? part.values.map((value) => axis.position(value)).filter((at) => !Number.isNaN(at))
        .map((at) => [at - half * 0.7, at + half * 0.7])
      : [[axis.position(part.min), axis.position(part.max)]];
    for (const [low, high] of ranges) {
      const a = this.#y(i, low);
      const b = this.#y(i, high);
      ctx.fillStyle = alpha(accent, 0.3);
      ctx.fillRect(x - 6, Math.min(a, b), 12, Math.abs(b - a));
      ctx.fillStyle = accent;
      ctx.fillRect(x - 6, a - 1.5, 12, 3);
      ctx.fillRect(x - 6, b - 1.5, 12, 3);
    }
  }

  /** Draws one line thick on the upper canvas. */
  mark(row) {
    this.marked = row;
    const ctx = this.#clear(this.front);
    if (row === null || row === undefined || !this.scale) return;
    const trial = this.data.trials.index[row];
    const series = state.seriesOf(trial);
    const color = series ? colors()[`series${series}`] : row === this.data.bestRow
      ? colors().ember : this.scale.palette[this.scale.bucket(row)];
    this.#strokeOne(ctx, row, colors().surface, 5);
    this.#strokeOne(ctx, row, color, 3);
  }

  /** Returns the row whose line is nearest to a point, or -1. */
  nearest({ x, y }, brushed) {
    const { xs, ys } = this;
    let i = 0;
    while (i < xs.length - 2 && x > xs[i + 1]) i += 1;
    if (xs.length < 2 || x < xs[0] || x > xs[xs.length - 1]) return -1;
    const part = (x - xs[i]) / (xs[i + 1] - xs[i]);
    let best = -1;
    let distance = 7;
    for (let row = 0; row < this.data.size; row += 1) {
      const at = ys[i][row] + (ys[i + 1][row] - ys[i][row]) * part;
      const d = Math.abs(at - y) + (brushed && !brushed.mask[row] ? 4 : 0);
      if (d < distance) {
        distance = d;
        best = row;
      }
    }
    return best;
  }

  /** Draws the exact picture into another context, for exports. */
  paint(ctx) {
    const isFaded = state.hasBrush || state.selection.length > 0;
    this.#drawAll(ctx, isFaded);
    this.#drawFront(ctx, isFaded, Infinity);
    this.#drawAxes(ctx);
    return { width: this.width, height: this.full };
  }
}
