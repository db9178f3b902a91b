// Parallel coordinates: a brush per axis, reordering by dragging names, and flipping.

import { make, settle } from '../dom.js';
import { count, escapes, name, parameter, plural, result } from '../format.js';
import { store } from '../data.js';
import { state } from '../state.js';
import { isCoarse, isTouch, onHold } from '../touch.js';
import { colorScale, legendOf } from './colors.js';
import { ParallelCanvas } from './parallel-canvas.js';
import { AxisSliders } from './parallel-sliders.js';

const GRAB = 18;
const BY_MOUSE = 'Drag along an axis to brush. Drag a name to reorder. Double-click an axis to '
  + 'flip it.';
const BY_TOUCH = 'Hold an axis and drag to brush. Hold a name and drag to reorder. Double-tap an '
  + 'axis to flip it.';

export function create(host) {
  return new Parallel(host);
}

class Parallel {
  constructor(host) {
    this.host = host;
    this.canvas = new ParallelCanvas(host.element);
    this.sliders = new AxisSliders(host.element, (axis, part) => this.#setPart(axis, part));
    this.drag = null;
    this.rest = settle(() => this.#draw(false), 150);
    this.walk = {
      count: () => this.canvas.order.length,
      points: () => this.canvas.axes.length,
      id: (i) => this.data.trials.index[this.canvas.order[i]],
      text: (i, j) => {
        const axis = this.canvas.axes[j];
        const row = this.canvas.order[i];
        return `Trial ${this.data.trials.index[row]}, ${parameter(axis.name)} `
          + axis.format(this.data.column(axis)[row]);
      },
      mark: (i) => this.canvas.mark(i === null ? null : this.canvas.order[i]),
    };
    this.#listen();
  }

  async load() {
    this.data = await store.load();
    this.#axes();
    this.#draw();
  }

  async refresh() {
    this.data = store.current || this.data;
    this.#axes();
    this.#draw();
  }

  /** Takes the order of axes from the query string: `axes=dropout,-learning_rate`. */
  #axes() {
    const all = [...this.data.axes, this.data.resultAxis];
    const wanted = state.get('axes').split(',').filter(Boolean);
    const flipped = new Set(wanted.filter((key) => key.startsWith('-')).map((key) => key.slice(1)));
    const names = wanted.map((key) => key.replace(/^-/, ''));
    const first = names.map((key) => all.find((axis) => encodeURIComponent(axis.key) === key))
      .filter(Boolean);
    // The result stays last unless the user moved it.
    const rest = all.filter((axis) => !first.includes(axis));
    const list = [...first, ...rest];
    const limit = +(this.host.options.axes || 12);
    this.left = Math.max(0, list.length - limit);
    const shown = this.left ? [...list.slice(0, limit - 1), this.data.resultAxis] : list;
    this.canvas.setAxes(this.data, [...new Set(shown)],
      shown.map((axis) => flipped.has(encodeURIComponent(axis.key))));
  }

  #storeAxes() {
    const { axes, flips } = this.canvas;
    state.set('axes', axes.map((axis, i) =>
      `${flips[i] ? '-' : ''}${encodeURIComponent(axis.key)}`).join(','));
  }

  #draw(moving = false) {
    if (!this.data) return;
    const { host, data, canvas } = this;
    const known = data.trials.value.filter(Number.isFinite).length;
    host.empty(data.size && canvas.axes.length > 1 ? '' : 'No trial with hyperparameters yet.');
    if (!moving || !this.scale) {
      this.scale = colorScale(data, state.get('color', host.options.color || 'rung'));
    }
    this.brushed = data.brushed(state.brush);
    canvas.draw(this.scale, this.brushed, state.brush, moving);
    this.#note(known, moving);
    if (moving) return;
    this.sliders.update(data, canvas.axes, state.brush);
    host.legend(legendOf(this.scale, state));
    const best = data.bestRow < 0 ? '' : `, best ${result(data.trials.value[data.bestRow])}`;
    host.label(`Parallel coordinates of ${plural(data.size, 'trial')} on `
      + `${plural(canvas.axes.length, 'axis').replace('axiss', 'axes')}${best}`);
  }

  #note(known) {
    const { host, data, canvas } = this;
    const more = this.left ? `${this.left} more axes left out.` : null;
    if (!state.hasBrush) {
      host.note(`${plural(known, 'trial')} with a result. ${isCoarse() ? BY_TOUCH : BY_MOUSE}`,
        this.#sliderButton(), more);
      return;
    }
    const parts = Object.entries(state.brush).map(([key, part]) => {
      const axis = data.byKey.get(key);
      const label = name(axis ? axis.name : key);
      if (part.values) return `${label} ${part.values.map((v) => name(v)).join(' or ')}`;
      const format = (value) => trim(axis ? axis.format(value) : parameter(value));
      return `${label} ${rangeText(part, format)}`;
    });
    const inside = this.brushed.count;
    const drawn = canvas.drawn < inside
      ? `${count(canvas.drawn)} of ${count(inside)} brushed trials drawn.` : null;
    host.note(`Brush: ${parts.join(', ')}.`, make('b', { text: `${plural(inside, 'trial')}.` }),
      drawn || 'The brush filters every plot and the table.', make('button', { type: 'button',
        class: 'link', text: 'Clear brush', on: { click: () => state.setBrush({}) } }),
      this.#sliderButton(), more);
  }

  #sliderButton() {
    const text = () => (this.sliders.stays ? 'Hide sliders' : 'Show sliders');
    return make('button', { type: 'button', class: 'link', text: text(),
      'aria-expanded': String(Boolean(this.sliders.stays)), on: {
        click: (event) => {
          event.target.setAttribute('aria-expanded', String(this.sliders.toggle()));
          event.target.textContent = text();
        } } });
  }

  update(changed, moving) {
    if (changed.has('axes') && !this.drag) this.#axes();
    if (['brush', 'sel', 'color', 'axes'].some((key) => changed.has(key))) {
      this.#draw(moving);
      // The exact picture follows once the pointer rests.
      if (moving) this.rest();
    }
    if (changed.has('hover') && this.data) {
      this.canvas.mark(state.hover === null ? null : this.data.rows.get(state.hover) ?? null);
    }
  }

  theme() {
    this.#draw();
  }

  resize() {
    this.canvas.resize();
    this.#draw();
  }

  #setPart(axis, part, moving = false) {
    const brush = Object.assign(Object.create(null), state.brush);
    if (part) brush[axis.key] = part;
    else delete brush[axis.key];
    state.setBrush(brush, moving);
  }

  #listen() {
    const { element } = this.host;
    element.addEventListener('pointerdown', (event) => this.#down(event));
    element.addEventListener('pointermove', (event) => this.#move(event));
    element.addEventListener('pointerup', (event) => this.#up(event));
    element.addEventListener('pointercancel', (event) => this.#up(event));
    element.addEventListener('pointerleave', (event) => {
      // A finger leaves with each tap; the tooltip stays until the next.
      if (!this.drag && event.pointerType !== 'touch') this.#hover(null);
    });
    element.addEventListener('dblclick', (event) => this.#double(event));
    // A finger that moves scrolls the page, one that rests on an axis drags.
    onHold(element, (event) => this.#hold(event));
    element.addEventListener('click', (event) => {
      if (!isTouch() || !this.data || event.target.closest?.('button,input')) return;
      this.#pick(event);
      this.#hover(event);
    });
  }

  #point(event) {
    const box = this.host.element.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  }

  #down(event) {
    if (event.button !== 0 || !this.data || event.target.closest?.('button,input')) return;
    if (event.pointerType === 'touch') return;
    const point = this.#point(event);
    if (!this.#grab(point)) this.drag = { kind: 'click', start: point };
    this.drag.pointer = event.pointerId;
    this.host.element.setPointerCapture(event.pointerId);
  }

  /** Starts to drag the name or the axis at a point. Returns whether there is one. */
  #grab(point) {
    const { canvas } = this;
    const i = canvas.axisAt(point.x, 40);
    const isName = point.y < canvas.top - 8;
    if (i >= 0 && isName) this.drag = { kind: 'name', i, x: point.x, start: point };
    else if (canvas.axisAt(point.x, GRAB) >= 0) this.#startBrush(point);
    else return false;
    return true;
  }

  /** Lets a finger drag, and shows what it drags. */
  #hold(event) {
    if (!this.data || !this.#grab(this.#point(event))) return false;
    this.drag.pointer = event.pointerId;
    const axis = this.canvas.axes[this.drag.i];
    this.host.tooltip([escapes(axis.name.slice(0, 500)),
      this.drag.kind === 'name' ? 'Drag to reorder' : 'Drag to brush'], event);
    return true;
  }

  /** Starts a new brush, or moves the whole brush if the pointer is inside of it. */
  #startBrush(point) {
    const { canvas } = this;
    const i = canvas.axisAt(point.x, GRAB);
    const axis = canvas.axes[i];
    const at = canvas.positionAt(i, point.y);
    const part = state.brush[axis.key];
    this.drag = { kind: 'brush', i, axis, start: point, from: at };
    if (!part || part.values || axis.isCategory) return;
    const low = axis.position(part.min);
    const high = axis.position(part.max);
    const near = 7 / canvas.height;
    if (Math.abs(at - low) < near) this.drag.from = high;
    else if (Math.abs(at - high) < near) this.drag.from = low;
    else if (at > low && at < high) Object.assign(this.drag, { kind: 'shift', low, high, at });
  }

  #move(event) {
    if (!this.data) return;
    const point = this.#point(event);
    const { drag, canvas } = this;
    if (!drag) {
      if (event.pointerType !== 'touch') this.#hover(event);
      return;
    }
    if (event.pointerId !== drag.pointer) return;
    if (Math.hypot(point.x - drag.start.x, point.y - drag.start.y) > 4) drag.moved = true;
    if (!drag.moved) return;
    if (drag.kind === 'name') {
      drag.x = point.x;
      const to = canvas.dragAxis(drag.i, point.x);
      if (to !== drag.i) drag.i = to;
      this.#draw(false);
    } else if (drag.kind === 'brush') {
      const at = canvas.positionAt(drag.i, point.y);
      this.#setPart(drag.axis, rangeOf(drag.axis, drag.from, at), true);
    } else if (drag.kind === 'shift') {
      const shift = canvas.positionAt(drag.i, point.y) - drag.at;
      const by = Math.max(-drag.low, Math.min(1 - drag.high, shift));
      this.#setPart(drag.axis, rangeOf(drag.axis, drag.low + by, drag.high + by), true);
    }
  }

  #up(event) {
    const { drag } = this;
    if (event.pointerId !== drag?.pointer) return;
    this.drag = null;
    if (!this.data) return;
    if (event.pointerType === 'touch') this.host.tooltip(null);
    if (drag.kind === 'name') {
      this.canvas.dragAxis(-1);
      this.#storeAxes();
      this.#draw();
    } else if (drag.moved) {
      if (drag.axis) this.#setPart(drag.axis, state.brush[drag.axis.key] || null, false);
    } else if (event.type === 'pointerup' && event.pointerType !== 'touch') {
      // Fingers that rest for too long, or whose drag the browser ends, change nothing.
      if (state.brush[drag.axis?.key]) this.#setPart(drag.axis, null);
      else this.#pick(event);
    }
  }

  #pick(event) {
    const row = this.canvas.nearest(this.#point(event), this.brushed);
    if (row >= 0) state.toggle(this.data.trials.index[row]);
  }

  #hover(event) {
    if (!event) {
      state.setHover(null);
      this.host.tooltip(null);
      return;
    }
    const point = this.#point(event);
    const { canvas } = this;
    const nearAxis = canvas.axisAt(point.x, GRAB) >= 0;
    this.host.element.style.cursor = point.y < canvas.top - 8 ? 'grab'
      : nearAxis ? 'ns-resize' : 'default';
    if (point.y < canvas.top - 8) {
      const i = canvas.axisAt(point.x, 40);
      state.setHover(null);
      this.host.tooltip(i < 0 ? null : [escapes(canvas.axes[i].name.slice(0, 500))], event);
      return;
    }
    const row = canvas.nearest(point, this.brushed);
    const trial = row < 0 ? null : this.data.trials.index[row];
    state.setHover(trial);
    this.host.tooltip(trial === null ? null : this.data.describe(trial), event);
  }

  #double(event) {
    if (!this.data) return;
    const point = this.#point(event);
    const i = this.canvas.axisAt(point.x, GRAB);
    if (i >= 0) {
      this.canvas.flip(i);
      this.#storeAxes();
      this.#draw();
      return;
    }
    const row = this.canvas.nearest(point, this.brushed);
    if (row >= 0) this.host.open(this.data.trials.index[row]);
  }

  paint(ctx) {
    return this.canvas.paint(ctx);
  }

  table() {
    const { axes } = this.canvas;
    const columns = axes.map((axis) => this.data.column(axis));
    const rows = this.canvas.order.map((row) =>
      [this.data.trials.index[row], ...columns.map((column) => column[row] ?? null)]);
    return { columns: ['Trial', ...axes.map((axis) => axis.name)], rows };
  }
}

/** Removes zeros at the end of a decimal, but not of an exponent. */
const trim = (text) => (/^[^e]*\.[^e]*$/.test(text) ? text.replace(/\.?0+$/, '') : text);

function rangeText({ min, max }, format) {
  if (min === -Infinity) return max === Infinity ? 'any value' : `up to ${format(max)}`;
  return max === Infinity ? `from ${format(min)}` : `${format(min)} to ${format(max)}`;
}

/** Returns the part of a brush between two positions of an axis. */
function rangeOf(axis, a, b) {
  const low = Math.max(0, Math.min(a, b));
  const high = Math.min(1, Math.max(a, b));
  if (!axis.isCategory) return axis.between(low, high);
  const values = axis.values.filter((value) => {
    const at = axis.position(value);
    return at >= low && at <= high;
  });
  return values.length ? { values } : null;
}
