// State of the page in the query string: options, brush and selection, with subscriptions.

// The server owns `sort` and `filter`: links and forms change them, and the URL keeps them.
const SERVER_KEYS = ['sort', 'filter'];
const KEYS = ['metric', 'x', 'scale', 'smooth', 'color', 'bracket', 'brush', 'sel', 'zoom', 'axes',
  'at', 'attempt', 'rank', 'level'];
const SERIES = 6;

/**
 * Formats a brush as `key:low..high;key:a|b`. An open bound is empty. Reserved characters are
 * percent-encoded.
 */
export function formatBrush(brush) {
  return Object.entries(brush).map(([key, part]) => {
    const range = part.values
      ? part.values.map(encodePart).join('|')
      : `${bound(part.min)}..${bound(part.max)}`;
    return `${encodePart(key)}:${range}`;
  }).join(';');
}

// Rounded bounds would leave out trials at the bounds.
const bound = (value) => (Number.isFinite(value) ? String(value) : '');

const encodePart = (text) => String(text).replace(/[%:;|&#+]|\.\./g, (match) =>
  [...match].map((c) => `%${c.charCodeAt(0).toString(16).padStart(2, '0')}`).join(''));

function decodePart(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** Parses a brush; malformed parts are ignored. */
export function parseBrush(text) {
  const brush = Object.create(null);
  for (const part of (text || '').split(';')) {
    const colon = part.indexOf(':');
    if (colon <= 0) continue;
    const key = decodePart(part.slice(0, colon));
    const range = part.slice(colon + 1);
    const [, low, high] = range.match(/^([-+.\de]*?)\.\.([-+.\de]*)$/i) || [];
    if (Number.isFinite(+low) && Number.isFinite(+high)) {
      const [a, b] = [low === '' ? -Infinity : +low, high === '' ? Infinity : +high];
      brush[key] = { min: Math.min(a, b), max: Math.max(a, b) };
    } else if (range !== '') {
      brush[key] = { values: range.split('|').map(decodePart) };
    }
  }
  return brush;
}

class State {
  #values = new Map();
  #subscribers = new Set();
  #changed = new Set();
  #slots = new Map();
  #timer = 0;
  #scheduled = false;
  #moving = false;
  hover = null;

  constructor() {
    this.#read();
    window.addEventListener('popstate', () => {
      this.#read();
      KEYS.forEach((key) => this.#notify(key));
    });
  }

  #read() {
    const query = new URLSearchParams(location.search);
    this.#values.clear();
    for (const key of KEYS) if (query.has(key)) this.#values.set(key, query.get(key));
    this.brush = parseBrush(this.#values.get('brush'));
    this.selection = [];
    this.#slots.clear();
    const list = (this.#values.get('sel') || '').split(',').filter((part) => /^\d+$/.test(part));
    for (const trial of new Set(list.map(Number))) this.#add(trial);
  }

  get(key, otherwise = '') {
    if (SERVER_KEYS.includes(key)) {
      return new URLSearchParams(location.search).get(key) || otherwise;
    }
    return this.#values.get(key) || otherwise;
  }

  /** Sets an option. An empty value removes the option from the query string. */
  set(key, value) {
    const text = value === null || value === undefined ? '' : String(value);
    if (text === this.get(key)) return;
    if (text) this.#values.set(key, text);
    else this.#values.delete(key);
    if (key === 'brush') this.brush = parseBrush(text);
    this.#write();
    this.#notify(key);
  }

  /** Sets the brush. `moving` is true while the pointer still drags. */
  setBrush(brush, moving = false) {
    this.brush = brush;
    this.#moving = moving;
    const text = formatBrush(brush);
    if (text) this.#values.set('brush', text);
    else this.#values.delete('brush');
    this.#write();
    this.#notify('brush');
  }

  get hasBrush() {
    return Object.keys(this.brush).length > 0;
  }

  #add(trial) {
    if (this.#slots.has(trial)) return;
    const used = new Set(this.#slots.values());
    let slot = 0;
    while (used.has(slot)) slot += 1;
    this.#slots.set(trial, slot);
    this.selection.push(trial);
  }

  /** Replaces the selection. Trials that stay selected keep their color. */
  select(trials) {
    const keep = new Set(trials);
    for (const trial of this.#slots.keys()) if (!keep.has(trial)) this.#slots.delete(trial);
    this.selection = this.selection.filter((trial) => keep.has(trial));
    for (const trial of trials) this.#add(trial);
    if (this.selection.length) this.#values.set('sel', this.selection.join(','));
    else this.#values.delete('sel');
    this.#write();
    this.#notify('sel');
  }

  toggle(trial) {
    const isSelected = this.#slots.has(trial);
    this.select(isSelected ? this.selection.filter((other) => other !== trial)
      : [...this.selection, trial]);
  }

  isSelected(trial) {
    return this.#slots.has(trial);
  }

  /** Returns the series number 1 to 6 of a selected trial, or 0. */
  seriesOf(trial) {
    const slot = this.#slots.get(trial);
    return slot === undefined ? 0 : (slot % SERIES) + 1;
  }

  /** Returns whether the trial needs dashes because its color is used twice. */
  isDashed(trial) {
    return (this.#slots.get(trial) || 0) >= SERIES;
  }

  setHover(trial) {
    if (trial === this.hover) return;
    this.hover = trial;
    this.#notify('hover');
  }

  subscribe(call) {
    this.#subscribers.add(call);
    return () => this.#subscribers.delete(call);
  }

  /** Returns the query string of the current state, with parameters of others kept. */
  query(keys = KEYS) {
    const others = [...new URLSearchParams(location.search)].filter(([key]) =>
      !KEYS.includes(key));
    const own = keys.filter((key) => this.#values.has(key)).map((key) =>
      [key, this.#values.get(key)]);
    const parts = [...others, ...own].map(([key, value]) =>
      `${encodeURIComponent(key)}=${readable(value)}`);
    return parts.length ? `?${parts.join('&')}` : '';
  }

  #write() {
    // Browsers limit replaceState to about three calls a second.
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => {
      history.replaceState(history.state, '', location.pathname + this.query() + location.hash);
    }, 200);
  }

  /** Writes the state to the query string now. */
  flush() {
    clearTimeout(this.#timer);
    history.replaceState(history.state, '', location.pathname + this.query() + location.hash);
  }

  #notify(key) {
    this.#changed.add(key);
    if (this.#scheduled) return;
    this.#scheduled = true;
    requestAnimationFrame(() => {
      this.#scheduled = false;
      const changed = this.#changed;
      this.#changed = new Set();
      for (const call of [...this.#subscribers]) call(changed, this.#moving);
    });
  }
}

// Keeps the separators of brush and selection readable in the address bar.
const readable = (value) => encodeURIComponent(value)
  .replace(/%3A/g, ':').replace(/%3B/g, ';').replace(/%2C/g, ',').replace(/%2F/g, '/');

export const state = new State();
