// Line plot on uPlot: uPlot gives scales, axes, grid and zoom; the scene draws the lines.
// Hover and keyboard marks are drawn on a canvas above, so that they cost no full redraw.

import { make, say } from '../dom.js';
import { colors, FONT } from '../theme.js';
import { isTouch, onRest } from '../touch.js';
import { drawAxes, drawGround, drawLine, drawScene } from './scene.js';
import { linearTicks, logTicks, thin } from './ticks.js';

const HIT = 24;
// Pixels that a finger moves sideways at least to zoom. A tap may move by 15.
const SWIPE = 24;

export class LinePlot {
  /** `events` may have hover(line, index, event), leave(), pick(line), open(line), zoom(range). */
  constructor(element, events = {}) {
    this.element = element;
    this.events = events;
    this.scene = null;
    this.zoom = null;
    this.kind = '';
    this.marked = null;
    this.reset = make('button', { type: 'button', class: 'link', 'data-reset-zoom': true,
      text: 'Reset zoom', on: { click: () => this.#endZoom() } });
  }

  /** Returns whether labels at the ends of lines have little space. */
  get isNarrow() {
    return this.element.clientWidth < 480;
  }

  /** Shows a scene. The zoom stays unless the scale of x changes. */
  set(scene) {
    this.scene = scene;
    const kind = `${Boolean(scene.x.log)},${Boolean(scene.y.log)},${Boolean(scene.x.label)},`
      + `${scene.right || 0},${this.isNarrow},${scene.x.key || ''}`;
    if (kind !== this.kind || !this.plot) {
      if (this.kind && this.kind.split(',')[5] !== kind.split(',')[5]) this.zoom = null;
      this.kind = kind;
      this.#create();
    } else {
      this.#apply();
    }
    this.#offerReset();
  }

  /** Shows the button that ends a zoom, below the plot. */
  #offerReset() {
    const { element, reset } = this;
    const place = element.closest('.panel')?.querySelector('.panel-head')
      || element.closest('.card')?.querySelector('.card-footer');
    if (!this.zoom) reset.remove();
    else if (place && reset.parentElement !== place) place.append(reset);
  }

  get size() {
    const width = Math.max(160, Math.floor(this.element.clientWidth));
    return { width, height: Math.max(120, Math.floor(this.element.clientHeight) || 240) };
  }

  range(key) {
    const { min, max } = (this.zoom && this.zoom[key]) || this.scene[key];
    return min < max ? [min, max] : [min - 0.5, min + 0.5];
  }

  #data() {
    return [this.range('x'), this.range('y')];
  }

  #axis(key) {
    const tokens = () => colors().text3;
    const isX = key === 'x';
    const size = isX ? 26 : 48;
    return { scale: key, stroke: tokens, font: `12px ${FONT}`, size, gap: 6,
      grid: { stroke: () => colors().line, width: 1 }, ticks: { show: false },
      label: isX ? this.scene.x.label : undefined, labelSize: isX && this.scene.x.label ? 18 : 0,
      labelFont: `12px ${FONT}`, labelGap: 0,
      filter: (_, splits) => splits,
      splits: () => this.ticks(key).values, values: () => this.ticks(key).labels };
  }

  ticks(key) {
    const [min, max] = this.range(key);
    const spec = this.scene[key];
    const pixels = key === 'x' ? this.size.width - 60 : this.size.height - 50;
    const target = Math.max(2, Math.floor(pixels / (key === 'x' ? 70 : 36)));
    let ticks = null;
    if (spec.ticks) ticks = spec.ticks(min, max, target);
    if (!ticks || ticks.values.length < 2) {
      ticks = spec.log ? logTicks(min, max, target) : linearTicks(min, max, target);
    }
    return thin(ticks, pixels, key === 'x' ? 38 : 18);
  }

  #create() {
    this.plot?.destroy();
    const { scene } = this;
    const scale = (key) => ({ time: false, auto: true, distr: scene[key].log ? 3 : 1,
      range: () => this.range(key) });
    const right = this.isNarrow ? Math.min(scene.right || 12, 36) : scene.right || 12;
    this.plot = new window.uPlot({ ...this.size, padding: [8, right, 0, 0],
      legend: { show: false },
      cursor: { x: false, y: false, points: { show: false },
        drag: { x: true, y: true, uni: 24, dist: 6, setScale: false } },
      scales: { x: scale('x'), y: scale('y') },
      series: [{}, { scale: 'y', paths: () => null, points: { show: false } }],
      axes: [this.#axis('x'), this.#axis('y')],
      hooks: { draw: [(u) => this.#draw(u)], setSelect: [(u) => this.#select(u)] } },
    this.#data(), this.element);
    this.overlay = document.createElement('canvas');
    Object.assign(this.overlay.style, { position: 'absolute', inset: '0', width: '100%',
      height: '100%', pointerEvents: 'none' });
    this.plot.over.append(this.overlay);
    this.#listen(this.plot.over);
    this.#touch(this.plot);
  }

  #apply() {
    const { width, height } = this.size;
    if (width !== this.plot.width || height !== this.plot.height) {
      this.plot.setSize({ width, height });
    }
    this.plot.setData(this.#data());
    this.plot.redraw(false, true);
    this.mark(this.marked);
  }

  redraw() {
    if (this.plot && this.scene) this.#apply();
  }

  resize() {
    if (this.scene) this.set(this.scene);
  }

  destroy() {
    this.reset.remove();
    this.plot?.destroy();
    this.plot = null;
  }

  /** Maps data to CSS pixels of the whole plot. */
  view() {
    const u = this.plot;
    const ratio = u.ctx.canvas.width / u.width || 1;
    const { left, top, width, height } = u.bbox;
    const box = { left: left / ratio, top: top / ratio, width: width / ratio,
      height: height / ratio };
    const map = (key, start, length) => {
      const isLog = Boolean(this.scene[key].log);
      const [min, max] = this.range(key);
      const low = isLog ? Math.log(min) : min;
      const factor = length / ((isLog ? Math.log(max) : max) - low);
      return isLog ? (value) => (value > 0 ? start + (Math.log(value) - low) * factor : NaN)
        : (value) => start + (value - low) * factor;
    };
    return { box, ratio, width: u.width, height: u.height,
      x: map('x', box.left, box.width), y: map('y', box.top + box.height, -box.height) };
  }

  #draw(u) {
    const view = this.view();
    const { ctx } = u;
    ctx.save();
    ctx.scale(view.ratio, view.ratio);
    drawGround(ctx, this.scene, view);
    drawScene(ctx, this.scene, view);
    ctx.restore();
  }

  /** Draws the whole plot into another context, for exports. */
  paint(ctx) {
    const view = this.view();
    drawAxes(ctx, this.scene, view, { x: this.ticks('x'), y: this.ticks('y') });
    drawGround(ctx, this.scene, view);
    drawScene(ctx, this.scene, view);
    return { width: view.width, height: view.height };
  }

  #select(u) {
    const { left, top, width, height } = u.select;
    if (width < 6 && height < 6) return;
    const whole = { w: u.over.clientWidth, h: u.over.clientHeight };
    const zoom = {};
    if (width >= 6 && width < whole.w - 1) {
      zoom.x = { min: u.posToVal(left, 'x'), max: u.posToVal(left + width, 'x') };
    }
    if (height >= 6 && height < whole.h - 1) {
      zoom.y = { min: u.posToVal(top + height, 'y'), max: u.posToVal(top, 'y') };
    }
    u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    if (zoom.x || zoom.y) this.setZoom({ ...this.zoom, ...zoom });
  }

  setZoom(zoom) {
    this.zoom = zoom;
    this.#apply();
    this.#offerReset();
    this.events.zoom?.(zoom);
  }

  /** Ends the zoom at its button, which goes away: the plot takes the focus. */
  #endZoom() {
    this.setZoom(null);
    this.element.closest('[data-plot]')?.focus({ preventScroll: true });
    say('Zoom reset');
  }

  #listen(over) {
    let down = null;
    over.addEventListener('mousemove', (event) => {
      if (event.buttons) return;
      const hit = this.nearest(event.offsetX, event.offsetY);
      over.style.cursor = hit ? 'pointer' : 'crosshair';
      if (hit) this.events.hover?.(hit.line, hit.index, event);
      else this.events.leave?.();
    });
    over.addEventListener('mouseleave', () => this.events.leave?.());
    over.addEventListener('mousedown', (event) => {
      down = [event.clientX, event.clientY];
    });
    over.addEventListener('click', (event) => {
      if (!down || Math.hypot(event.clientX - down[0], event.clientY - down[1]) > 5) return;
      const hit = this.nearest(event.offsetX, event.offsetY);
      if (hit) this.events.pick?.(hit.line);
      // The focus has moved since the finger's mouse events, and hidden the tooltip.
      if (hit && isTouch()) this.events.hover?.(hit.line, hit.index, event);
    });
    over.addEventListener('dblclick', (event) => {
      const hit = this.zoom ? null : this.nearest(event.offsetX, event.offsetY);
      if (this.zoom) this.setZoom(null);
      else if (hit) this.events.open?.(hit.line);
    }, true);
  }

  /** Zooms x where a finger moves sideways; up and down, the page scrolls. uPlot knows no touch. */
  #touch(u) {
    const { over } = u;
    let from = null;
    const at = (event) => Math.max(0, Math.min(over.clientWidth,
      event.clientX - over.getBoundingClientRect().left));
    const show = (to, isEnd) => u.setSelect({ left: Math.min(from.x, to), top: 0,
      width: Math.abs(to - from.x), height: over.clientHeight }, isEnd);
    const drop = () => {
      if (from) u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
      from = null;
    };
    const isFrom = (event) => from?.id === event.pointerId;
    onRest(over, (event) => {
      const hit = this.nearest(at(event), event.clientY - over.getBoundingClientRect().top);
      if (hit) this.events.hover?.(hit.line, hit.index, event);
      else this.events.leave?.();
      // A finger that rests on a line does not zoom.
      if (hit) drop();
      return Boolean(hit);
    }, () => this.events.leave?.());
    over.addEventListener('pointerdown', (event) => {
      // A second finger zooms the page.
      drop();
      if (event.pointerType !== 'touch' || !event.isPrimary) return;
      from = { x: at(event), id: event.pointerId };
    });
    over.addEventListener('pointermove', (event) => {
      if (isFrom(event)) show(at(event), false);
    });
    over.addEventListener('pointerup', (event) => {
      if (!isFrom(event)) return;
      const to = at(event);
      if (Math.abs(to - from.x) >= SWIPE) show(to, true);
      drop();
    });
    over.addEventListener('pointercancel', (event) => {
      if (isFrom(event)) drop();
    });
  }

  /** Returns {line, index} of the line nearest to a point of the plotting area, or null. */
  nearest(offsetX, offsetY) {
    const view = this.view();
    const px = offsetX + view.box.left;
    const py = offsetY + view.box.top;
    let best = null;
    let distance = HIT;
    for (const line of this.scene.lines) {
      if (line.behind || !line.x.length || line.id === undefined) continue;
      const i = nearIndex(line.x, view.x, px);
      for (let j = Math.max(0, i - 1); j <= Math.min(line.x.length - 1, i + 1); j += 1) {
        const d = segmentDistance(line, j, view, px, py) - (line.priority ? 2 : 0);
        if (d < distance) {
          distance = d;
          best = { line, index: j };
        }
      }
    }
    return best;
  }

  /** Marks lines with an id, and optionally one point: {id, index}. */
  mark(marked) {
    this.marked = marked;
    const canvas = this.overlay;
    if (!canvas || !this.plot) return;
    const ratio = devicePixelRatio || 1;
    const width = Math.round(this.plot.over.clientWidth * ratio);
    const height = Math.round(this.plot.over.clientHeight * ratio);
    if (canvas.width !== width) canvas.width = width;
    if (canvas.height !== height) canvas.height = height;
    const ctx = canvas.getContext('2d');
    ctx.setTransform(1, 0, 0, 1, 0, 0);
    ctx.clearRect(0, 0, width, height);
    if (!marked) return;
    const view = this.view();
    ctx.setTransform(ratio, 0, 0, ratio, -view.box.left * ratio, -view.box.top * ratio);
    for (const line of this.scene.lines) {
      if (line.id !== marked.id || line.behind) continue;
      drawLine(ctx, { ...line, color: line.markColor || line.color, fill: false }, view, 1.5);
      const i = marked.index;
      if (i === undefined || line.y[i] === null || line.y[i] === undefined) continue;
      ctx.beginPath();
      ctx.arc(view.x(line.x[i]), view.y(line.y[i]), 4, 0, 2 * Math.PI);
      ctx.fillStyle = line.markColor || line.color;
      ctx.fill();
    }
  }
}

/** Returns the index of the x nearest to a pixel. The values ascend or descend. */
function nearIndex(x, map, px) {
  let low = 0;
  let high = x.length - 1;
  const isDescending = x[low] > x[high];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (isDescending ? map(x[middle]) > px : !(map(x[middle]) >= px)) low = middle;
    else high = middle;
  }
  return Math.abs(map(x[low]) - px) < Math.abs(map(x[high]) - px) ? low : high;
}

function segmentDistance(line, i, view, px, py) {
  const ax = view.x(line.x[i]);
  const ay = line.y[i] === null ? NaN : view.y(line.y[i]);
  if (Number.isNaN(ay)) return Infinity;
  let best = Math.hypot(ax - px, ay - py);
  if (i > 0 && line.y[i - 1] !== null) {
    const bx = view.x(line.x[i - 1]);
    const by = line.step ? ay : view.y(line.y[i - 1]);
    const length = (bx - ax) ** 2 + (by - ay) ** 2;
    const t = Math.max(0, Math.min(1, ((px - ax) * (bx - ax) + (py - ay) * (by - ay)) / length));
    const d = Math.hypot(ax + t * (bx - ax) - px, ay + t * (by - ay) - py);
    if (d < best) best = d;
  }
  return best;
}
