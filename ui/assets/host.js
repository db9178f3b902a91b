// Life of one plot: starts when visible, reports errors with a retry button, forwards changes of
// state, data, theme and size, and lets arrow keys walk its lines and points.

import { debounce, fill, make, say, settle, throttle } from './dom.js';
import { count } from './format.js';
import { loadJson, store } from './data.js';
import { Retry } from './retry.js';
import { state } from './state.js';
import { onTheme } from './theme.js';
import { hideTooltip, showTooltip } from './tooltip.js';
import { onTouchOutside } from './touch.js';

const MODULES = {
  curves: () => import('./plots/curves.js'),
  parallel: () => import('./plots/parallel.js'),
  ladder: () => import('./plots/ladder.js'),
  scatter: () => import('./plots/scatter.js'),
  heatmap: () => import('./plots/heatmap.js'),
  history: () => import('./plots/history.js'),
  edf: () => import('./plots/history.js'),
  timeline: () => import('./plots/timeline.js'),
  pareto: () => import('./plots/pareto.js'),
  trial: () => import('./plots/trial.js'),
  profiler: () => import('./plots/profiler.js'),
  compare: () => import('./plots/compare.js'),
  strips: () => import('./plots/strips.js'),
};

// A storage or server that stays away must not be asked forever.
const RETRIES_MAX = 5;

export const hosts = new Map();

/** Everything that a plot needs to know about its place on the page. */
export class Host {
  constructor(element) {
    this.element = element;
    this.kind = element.dataset.plot;
    this.options = element.dataset;
    this.card = element.closest('.card') || element.parentElement;
    this.source = element.dataset.source || store.url;
    this.at = [0, 0];
    this.starting = null;
    this.starts = new Retry(() => {
      this.starting ||= this.#start();
      return this.starting;
    }, RETRIES_MAX);
    this.retry = new Retry(() => this.#run(() => this.plot?.refresh?.()), RETRIES_MAX);
    hosts.set(element, this);
    element.tabIndex = 0;
    if (!element.hasAttribute('role')) element.setAttribute('role', 'img');
    if (getComputedStyle(element).position === 'static') element.style.position = 'relative';
  }

  /**
   * Starts the plot once; later calls wait for the same start. A start whose scripts or data cannot
   * be loaded is repeated.
   */
  start() {
    return this.starts.run();
  }

  /** Returns the error if the start failed. */
  async #start() {
    try {
      const module = await loadModule(this.kind);
      await this.#vendor();
      this.plot = await module.create(this);
      await this.plot.load();
      this.#clearError();
      this.#connect();
      return null;
    } catch (error) {
      this.starting = null;
      this.plot?.destroy?.();
      this.plot = null;
      this.fail(error);
      return error;
    }
  }

  /** Waits for the libraries, which pages load with `defer`. */
  async #vendor() {
    const needs = this.options.needs?.split(' ')
      || (['scatter', 'heatmap', 'timeline', 'pareto', 'strips'].includes(this.kind)
        ? ['echarts'] : ['uPlot']);
    for (const name of needs) {
      if (['parallel', 'ladder'].includes(this.kind) || window[name]) continue;
      const file = name === 'echarts' ? 'echarts.min.js' : 'uPlot.iife.min.js';
      await loadScript(`/assets/vendor/${file}`);
    }
  }

  #connect() {
    if (this.connected) return;
    this.connected = true;
    const refresh = throttle(() => this.retry.run(), 500);
    const rest = settle((changed) => this.#run(() => this.plot?.update?.(changed, false)), 150);
    state.subscribe((changed, moving) => {
      const isHeavy = (store.current?.size || 0) > 500 && this.kind !== 'parallel';
      if (moving && isHeavy && changed.has('brush')) rest(changed);
      else this.#run(() => this.plot?.update?.(changed, moving));
    });
    store.subscribe(refresh);
    onTheme(() => this.#run(() => this.plot?.theme?.()));
    let width = this.element.clientWidth;
    const resized = debounce(() => this.#run(() => this.plot?.resize?.()), 60);
    new ResizeObserver(() => {
      if (Math.abs(this.element.clientWidth - width) < 1) return;
      width = this.element.clientWidth;
      resized();
    }).observe(this.element);
    this.element.addEventListener('keydown', (event) => this.#key(event));
    const leave = () => {
      hideTooltip();
      this.plot?.walk?.mark?.(null);
    };
    this.element.addEventListener('blur', leave);
    onTouchOutside(this.element, leave);
  }

  /** Loads JSON. The error of a load stays on the page until a load succeeds. */
  async load(url, signal) {
    const json = await loadJson(new URL(url, location.href), signal);
    if (this.lacksData) this.#clearError();
    return json;
  }

  /** Returns the error if the call failed. */
  async #run(call) {
    const before = this.failed;
    try {
      await call();
      // The call may have reported an error itself, and what it drew may still lack data.
      if (this.failed === before && !this.lacksData) this.#clearError();
      return null;
    } catch (error) {
      if (error.name !== 'AbortError') this.fail(error);
      return error;
    }
  }

  /** Shows why the plot is missing, with a button to try again. */
  fail(error) {
    const isOfLoad = error.status !== undefined;
    if (!isOfLoad) console.error(error);
    const text = isOfLoad ? `The data could not be loaded: ${error.message}.`
      : `This plot failed: ${error.message}`;
    // Screen readers read a new element aloud, and its button would lose the focus.
    if (this.failed?.firstChild.textContent === text) return;
    this.#clearError();
    this.lacksData = isOfLoad;
    const retry = make('button', { type: 'button', class: 'button', text: 'Try again',
      on: { click: () => {
        if (this.plot) this.retry.run();
        else this.start();
      } } });
    this.failed = make('div', { class: 'plot-error', role: 'alert', style: {
      padding: '12px', color: 'var(--text2)', display: 'flex', gap: '12px',
      alignItems: 'center', flexWrap: 'wrap' } }, make('span', { text }), retry);
    this.element.before(this.failed);
    if (!this.plot) this.label(text);
  }

  #clearError() {
    this.failed?.remove();
    this.failed = null;
    this.lacksData = false;
  }

  /** Shows a sentence instead of the plot, for plots without data yet. */
  empty(text) {
    this.blank?.remove();
    this.blank = null;
    if (!text) return;
    this.blank = make('div', { class: 'plot-empty', text, style: { position: 'absolute',
      inset: '0', display: 'grid', placeItems: 'center', color: 'var(--text3)',
      textAlign: 'center', padding: '16px' } });
    this.element.append(this.blank);
    this.label(text);
  }

  /** Sets the sentence that screen readers read for the plot. */
  label(text) {
    if (this.element.getAttribute('aria-label') !== text) {
      this.element.setAttribute('aria-label', text);
    }
  }

  /** Fills the note in the footer with strings and elements. */
  note(...parts) {
    const next = this.element.nextElementSibling;
    const target = next?.matches('[data-note]') ? next : this.card.querySelector('[data-note]');
    if (!target) return;
    const at = [...target.querySelectorAll('button')].indexOf(document.activeElement);
    fill(target, parts.filter(Boolean).flatMap((part, i) => (i ? [' ', part] : [part])));
    if (at < 0 || target.contains(document.activeElement)) return;
    // The pressed button is gone: another one is in its place, such as that of the way back.
    (target.querySelectorAll('button')[at] || this.element).focus({ preventScroll: true });
  }

  /** Fills the legend: {title, items: [{text, color, mark, dash}]}. */
  legend({ title, items }) {
    const target = this.card.querySelector('[data-legend]');
    if (!target) return;
    const nodes = items.map((item) => make('span', { class: 'legend-item', style: {
      display: 'inline-flex', alignItems: 'center', gap: '6px', marginInlineEnd: '12px' } },
    item.color ? swatch(item) : null, this.#legendText(item)));
    const head = title ? [make('span', { class: 'legend-title', text: title,
      style: { marginInlineEnd: '12px' } })] : [];
    fill(target, [...head, ...nodes]);
  }

  #legendText({ text, trial }) {
    if (trial === undefined || !store.base) return make('span', { text });
    return make('a', { href: `${store.base}/trials/${trial}`, text, 'aria-label':
      `Open trial #${trial}` });
  }

  open(trial) {
    if (!store.base || trial === null || trial === undefined) return;
    state.flush();
    location.assign(`${store.base}/trials/${trial}${state.query(['sel', 'brush'])}`);
  }

  tooltip(lines, event) {
    if (lines && event) showTooltip(lines, event.clientX, event.clientY);
    else hideTooltip();
  }

  #key(event) {
    const { walk } = this.plot || {};
    if (!walk || event.ctrlKey || event.metaKey || event.altKey) return;
    const lines = walk.count();
    if (!lines) return;
    const moves = { ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1] };
    const move = moves[event.key];
    const id = walk.id?.(Math.min(this.at[0], lines - 1));
    if (event.key === 'Enter' && id !== undefined) this.open(id);
    else if ((event.key === 'x' || event.key === ' ') && id !== undefined) state.toggle(id);
    else if (event.key === 'Escape') walk.mark?.(null);
    else if (!move && event.key !== 'Home' && event.key !== 'End') return;
    if (event.key === 'Escape') return;
    event.preventDefault();
    event.stopPropagation();
    this.#walk(walk, lines, event.key, move);
  }

  #walk(walk, lines, key, move) {
    const clamp = (value, length) => Math.max(0, Math.min(length - 1, value));
    if (move && this.walking) {
      this.at = [clamp(this.at[0] + move[0], lines), this.at[1] + move[1]];
    }
    this.walking = true;
    this.at[0] = clamp(this.at[0], lines);
    const points = walk.points(this.at[0]);
    if (key === 'Home') this.at[1] = 0;
    if (key === 'End' || this.at[1] === undefined) this.at[1] = points - 1;
    this.at[1] = clamp(this.at[1], points);
    walk.mark?.(this.at[0], this.at[1]);
    const text = walk.text(this.at[0], this.at[1]);
    say(`${text}. ${count(this.at[0] + 1)} of ${count(lines)}`);
    const box = this.element.getBoundingClientRect();
    showTooltip([text], box.left + 60, box.top + 8);
  }
}

function swatch({ color, mark, dash }) {
  const style = { display: 'inline-block', flex: 'none' };
  if (mark === 'dot' || mark === 'ring') {
    Object.assign(style, { width: '8px', height: '8px', borderRadius: '50%',
      border: `1.5px solid ${color}`, background: mark === 'dot' ? color : 'transparent' });
  } else if (mark === 'cross') {
    return make('span', { text: '×', style: { color, fontWeight: '600' } });
  } else {
    Object.assign(style, { width: '14px', height: '0',
      borderTop: `2.5px ${dash ? 'dashed' : 'solid'} ${color}` });
  }
  return make('span', { 'aria-hidden': 'true', style });
}

/** Error of a script that cannot be loaded, with the status of a request without an answer. */
const lost = (file) => Object.assign(new Error(`cannot load ${file}`), { status: 0 });

/** Loads the script of a kind of plot, with the scripts that it imports. */
async function loadModule(kind) {
  try {
    return await MODULES[kind]();
  } catch (cause) {
    // An import that cannot be loaded has this type.
    throw cause instanceof TypeError ? lost(`the script of the plot (${cause.message})`) : cause;
  }
}

const scripts = new Map();

function loadScript(src) {
  if (!scripts.has(src)) {
    scripts.set(src, new Promise((resolve, reject) => {
      const script = make('script', { src });
      script.onload = resolve;
      script.onerror = () => {
        scripts.delete(src);
        reject(lost(src));
      };
      document.head.append(script);
    }));
  }
  return scripts.get(src);
}

/** Starts the plots again whose start has failed, when the server may answer again. */
export function restartPlots() {
  for (const host of hosts.values()) {
    if (host.failed && !host.plot && !document.hidden) host.start();
  }
}

// No start is repeated while the page is hidden.
document.addEventListener('visibilitychange', restartPlots);

/** Starts each plot of the page when it comes near the viewport. */
export function startPlots(root = document) {
  const observer = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      observer.unobserve(entry.target);
      hosts.get(entry.target)?.start();
    }
  }, { rootMargin: '120px' });
  for (const element of root.querySelectorAll('[data-plot]')) {
    if (hosts.has(element) || !MODULES[element.dataset.plot]) continue;
    observer.observe(new Host(element).element);
  }
}
