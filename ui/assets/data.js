// Fetches JSON, and keeps data.json of the experiment in a form that plots read quickly.

import { parameter, result } from './format.js';

/** Fetches JSON; a failed request throws an error with `status`. */
export async function loadJson(url, signal) {
  const response = await fetch(url, { signal, cache: 'no-cache', credentials: 'same-origin',
    headers: { Accept: 'application/json' } }).catch((cause) => {
    if (cause.name === 'AbortError') throw cause;
    throw Object.assign(new Error('the server does not answer'), { status: 0 });
  });
  if (!response.ok) {
    // The server says the reason, such as the words of the API server.
    const { error } = await response.json().catch(() => ({}));
    const text = String(error || `HTTP ${response.status} ${response.statusText}`)
      .slice(0, 400).replace(/\.$/, '');
    throw Object.assign(new Error(text), { status: response.status });
  }
  return response.json().catch(() => {
    throw Object.assign(new Error(`HTTP ${response.status}, but the answer is not JSON`),
      { status: response.status });
  });
}

/**
 * Returns whether a request that failed may succeed later. Otherwise the experiment is gone, or the
 * session has ended.
 */
export const isTransient = (status) => !(status >= 400 && status < 500);

// Error of positions that are sums.
const ROUNDING = 1e-9;

/** Axis of parallel coordinates and scatter plots: maps values to positions 0 to 1. */
class Axis {
  /** `key` names the axis in the URL. */
  constructor(key, spec, column) {
    Object.assign(this, spec, { key });
    this.isCategory = spec.scale === 'category';
    if (this.isCategory) {
      this.values = (spec.values || []).map(String);
      this.places = new Map(this.values.map((value, i) => [value, i]));
      return;
    }
    let { min, max } = spec;
    if (!Number.isFinite(min) || !Number.isFinite(max)) [min, max] = extent(column);
    this.isLog = spec.scale === 'log' && min > 0;
    if (min === max) {
      min = this.isLog ? min / 2 : min - 0.5;
      max = this.isLog ? max * 2 : max + 0.5;
    }
    Object.assign(this, { min, max });
    this.low = this.isLog ? Math.log(min) : min;
    this.span = (this.isLog ? Math.log(max) : max) - this.low;
  }

  /** Returns the position 0 to 1, or NaN for a value that is not set. */
  position(value) {
    if (value === null || value === undefined) return NaN;
    if (this.isCategory) {
      const place = this.places.get(String(value));
      if (place === undefined) return NaN;
      return this.values.length < 2 ? 0.5 : (place + 0.5) / this.values.length;
    }
    // The bound of a brush that is open below, which has no logarithm.
    if (value === -Infinity) return 0;
    const at = ((this.isLog ? Math.log(value) : value) - this.low) / this.span;
    return Math.max(0, Math.min(1, at));
  }

  /** Returns the value at a position 0 to 1 of a numeric axis. */
  value(position) {
    // The logarithm of an end is rounded.
    if (position <= 0) return this.min;
    if (position >= 1) return this.max;
    const at = this.low + position * this.span;
    return this.isLog ? Math.exp(at) : at;
  }

  /**
   * Returns the part of a brush between two positions of a numeric axis. It is open at the ends,
   * where also the trials beyond the axis are drawn.
   */
  between(low, high) {
    return { min: low < ROUNDING ? -Infinity : this.value(low),
      max: high > 1 - ROUNDING ? Infinity : this.value(high) };
  }

  format(value) {
    if (value === null || value === undefined) return this.isResult ? '–' : 'not set';
    return this.isResult ? result(value) : parameter(value);
  }
}

function extent(column) {
  let min = Infinity;
  let max = -Infinity;
  for (const value of column) {
    if (typeof value !== 'number') continue;
    if (value < min) min = value;
    if (value > max) max = value;
  }
  return min > max ? [0, 1] : [min, max];
}

/** Returns the quantile of sorted numbers. */
export function quantile(sorted, part) {
  if (!sorted.length) return NaN;
  const at = (sorted.length - 1) * part;
  const low = Math.floor(at);
  const next = sorted[Math.min(sorted.length - 1, low + 1)];
  return sorted[low] + (next - sorted[low]) * (at - low);
}

/** data.json of one experiment with lookups. */
export class Experiment {
  constructor(json, base) {
    Object.assign(this, json);
    this.base = base;
    this.size = json.trials.index.length;
    this.rows = new Map(json.trials.index.map((trial, row) => [trial, row]));
    this.lengths = json.lengths || [];
    this.promoted = json.promoted || [];
    this.axes = (json.hyperparameters || []).map((spec) =>
      new Axis(spec.name, spec, json.trials.hp[spec.name] || []));
    this.resultAxis = this.#resultAxis();
    this.byKey = new Map([...this.axes, this.resultAxis].map((axis) => [axis.key, axis]));
  }

  #resultAxis() {
    const values = this.trials.value.filter(Number.isFinite).sort((a, b) => a - b);
    const spec = { name: this.metric || 'result', isResult: true, scale: 'linear', min: 0, max: 1 };
    if (values.length) {
      // Outliers among the worst results do not squeeze the axis.
      spec.min = this.smallerIsBetter ? values[0] : quantile(values, 0.02);
      spec.max = this.smallerIsBetter ? quantile(values, 0.98) : values[values.length - 1];
      const pad = (spec.max - spec.min) * 0.03;
      spec.min -= pad;
      spec.max += pad;
    }
    // A hyperparameter may have the name of the metric.
    let key = spec.name;
    while (this.axes.some((axis) => axis.key === key)) key = `@${key}`;
    return new Axis(key, spec, values);
  }

  /** Returns the column of an axis. */
  column(axis) {
    return axis.isResult ? this.trials.value : this.trials.hp[axis.name] || [];
  }

  /** Returns the row of the best trial, or -1. */
  get bestRow() {
    return this.best === null || this.best === undefined ? -1 : this.rows.get(this.best) ?? -1;
  }

  /** Returns whether `a` is better than `b`. */
  isBetter(a, b) {
    return this.smallerIsBetter ? a < b : a > b;
  }

  /** Returns rows in order of results, the best first; rows without a result come last. */
  get ranked() {
    if (!this.order) {
      const { value } = this.trials;
      const sign = this.smallerIsBetter ? 1 : -1;
      const key = value.map((v) => (Number.isFinite(v) ? v * sign : Infinity));
      this.order = Array.from(value.keys()).sort((a, b) => (key[a] < key[b] ? -1
        : key[a] > key[b] ? 1 : a - b));
    }
    return this.order;
  }

  /** Returns {mask, count}: one byte per row, 1 if the brush contains the trial. */
  brushed(brush) {
    const keys = Object.keys(brush);
    const mask = new Uint8Array(this.size).fill(1);
    for (const key of keys) {
      const axis = this.byKey.get(key);
      if (axis) cut(mask, this.column(axis), brush[key]);
    }
    let count = 0;
    for (let row = 0; row < mask.length; row += 1) count += mask[row];
    return { mask, count };
  }

  /** Returns a short description of a trial: hyperparameters and result. */
  describe(trial) {
    const row = this.rows.get(trial);
    if (row === undefined) return [`Trial ${trial}`];
    const { value, state, units } = this.trials;
    const lines = [`Trial ${trial}, ${state[row]}`,
      `best ${result(value[row])}, ${parameter(units[row])} `
      + `${units[row] === 1 ? this.unit : this.units}`];
    for (const axis of this.axes.slice(0, 8)) {
      lines.push(`${parameter(axis.name)} ${axis.format(this.column(axis)[row])}`);
    }
    return lines;
  }
}

function cut(mask, column, part) {
  if (part.values) {
    const values = new Set(part.values);
    for (let row = 0; row < mask.length; row += 1) {
      if (mask[row] && !values.has(String(column[row]))) mask[row] = 0;
    }
    return;
  }
  const { min, max } = part;
  for (let row = 0; row < mask.length; row += 1) {
    const value = column[row];
    if (typeof value !== 'number' || value < min || value > max) mask[row] = 0;
  }
}

/** Source of data.json with subscriptions. One request serves all plots of the page. */
export class Store {
  #subscribers = new Set();
  #request = null;

  constructor(base) {
    this.base = base;
    this.url = base ? `${base}/data.json` : null;
    this.current = null;
    this.version = 0;
  }

  /** Returns the experiment, or null on pages without one. */
  async load(force = false) {
    if (!this.url) return null;
    if (this.current && !force) return this.current;
    if (!this.#request) {
      this.#request = loadJson(this.url).then((json) => {
        this.current = new Experiment(json, this.base);
        this.version += 1;
        return this.current;
      }).finally(() => {
        this.#request = null;
      });
    }
    return this.#request;
  }

  /**
   * Loads again and informs all plots. Returns the error if the data could not be loaded. A load
   * that is repeated informs them only if it succeeds: they know of the change already.
   */
  async refresh(isRepeated = false) {
    const before = this.current?.best;
    let error = null;
    const data = await this.load(true).catch((cause) => {
      error = cause;
      return null;
    });
    if (error && isRepeated) return error;
    for (const call of [...this.#subscribers]) call(data, before);
    return error;
  }

  subscribe(call) {
    this.#subscribers.add(call);
    return () => this.#subscribers.delete(call);
  }
}

export const store = new Store(document.body.dataset.base || '');
