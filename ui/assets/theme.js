// Reads the colors of style.css for plots, and toggles the theme.

const NAMES = ['canvas', 'surface', 'sunken', 'line', 'line2', 'control', 'text1', 'text2',
  'text3', 'accent', 'selected', 'ember', 'ok', 'fail', 'invalid', 'rung1', 'rung2', 'rung3',
  'rung4', 'series1', 'series2', 'series3', 'series4', 'series5', 'series6'];
const FALLBACK = { canvas: '#f8f8f9', surface: '#ffffff', sunken: '#f3f3f5', line: '#e5e5e9',
  line2: '#cfcfd6', control: '#8a8a95', text1: '#17181c', text2: '#4b4d57', text3: '#666874',
  accent: '#1a5fd0', selected: '#eaf1fd', ember: '#c8430b', ok: '#0a7a55', fail: '#bf2d0c',
  invalid: '#8f5a00', rung1: '#8794ab', rung2: '#5b8dd6', rung3: '#2a68c8', rung4: '#0d3a80',
  series1: '#1a5fd0', series2: '#c8430b', series3: '#1fa27a', series4: '#7d287b',
  series5: '#614c29', series6: '#165c54' };
// Single quotes: ECharts writes the value into an attribute with double quotes.
export const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, Inter, 'Noto Sans', sans-serif";

const subscribers = new Set();
let tokens = null;

/** Returns the colors of the current theme by token name. */
export function colors() {
  if (tokens) return tokens;
  const style = getComputedStyle(document.documentElement);
  tokens = {};
  for (const name of NAMES) {
    tokens[name] = style.getPropertyValue(`--${name}`).trim() || FALLBACK[name];
  }
  tokens.ramp = [1, 2, 3, 4].map((number) => parse(tokens[`rung${number}`]));
  return tokens;
}

function parse(color) {
  const hex = color.match(/^#([0-9a-f]{6})$/i);
  if (hex) return [0, 2, 4].map((at) => parseInt(hex[1].slice(at, at + 2), 16));
  const numbers = color.match(/[\d.]+/g);
  return numbers ? numbers.slice(0, 3).map(Number) : [128, 128, 128];
}

/** Returns a color of the rung ramp; `position` is 0 for the lowest and 1 for the highest. */
export function ramp(position) {
  const stops = colors().ramp;
  const at = Math.max(0, Math.min(1, position || 0)) * (stops.length - 1);
  const low = Math.min(stops.length - 2, Math.floor(at));
  const mixed = stops[low].map((value, i) =>
    Math.round(value + (stops[low + 1][i] - value) * (at - low)));
  return `rgb(${mixed.join(',')})`;
}

/** Returns the color with an opacity. */
export function alpha(color, opacity) {
  return `rgba(${parse(color).join(',')},${opacity})`;
}

/** Returns the color of series 1 to 6. */
export const series = (number) => colors()[`series${((number - 1) % 6) + 1}`];

/** Calls `call` after each change of the theme. */
export function onTheme(call) {
  subscribers.add(call);
  return () => subscribers.delete(call);
}

function changed() {
  tokens = null;
  for (const call of [...subscribers]) call();
}

const dark = matchMedia('(prefers-color-scheme: dark)');

/** Returns whether the page is dark now. */
export function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen === 'dark' || (chosen !== 'light' && dark.matches);
}

/** Switches between light and dark, and stores the choice. */
export function toggleTheme() {
  const next = isDark() ? 'light' : 'dark';
  document.documentElement.dataset.theme = next;
  store(next);
}

function store(value) {
  try {
    localStorage.setItem('theme', value);
  } catch {
    // Storage may be off; the choice then lasts until the page is left.
  }
}

/** Applies the stored theme and connects buttons `[data-theme-toggle]`. */
export function startTheme() {
  let stored = null;
  try {
    stored = localStorage.getItem('theme');
  } catch {
    stored = null;
  }
  if (stored === 'light' || stored === 'dark') document.documentElement.dataset.theme = stored;
  new MutationObserver(changed).observe(document.documentElement,
    { attributes: true, attributeFilter: ['data-theme'] });
  dark.addEventListener('change', changed);
  document.addEventListener('click', (event) => {
    if (event.target.closest?.('[data-theme-toggle]')) toggleTheme();
  });
}
