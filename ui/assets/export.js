// Exports of plots: PNG and SVG with title, date and link, the values as CSV, the JSON of the
// server, and "Show as table".

import { make } from './dom.js';
import { count, escapes, name } from './format.js';
import { hosts } from './host.js';
import { SvgContext } from './plots/svg.js';
import { state } from './state.js';
import { colors, FONT } from './theme.js';

const MOST = 1000;
const HEAD = 34;
const FOOT = 30;
const LINE = 14;

const footOf = (lines) => FOOT + (lines.length - 1) * LINE;

const hostOf = (button) => {
  const wanted = button.dataset.for && document.getElementById(button.dataset.for);
  const element = wanted || button.closest('.card')?.querySelector('[data-plot]');
  return element ? hosts.get(element) : null;
};

function title(host) {
  const heading = host.card.querySelector('h2, h3')?.textContent.trim().replace(/\s+/g, ' ');
  const page = document.querySelector('h1')?.textContent.trim().replace(/\s+/g, ' ');
  return [page, heading || host.kind].filter(Boolean).map((part) => name(part, 60)).join(': ');
}

/** Returns date and link, in lines that fit the width. */
function footer(ctx, width) {
  const date = new Date().toISOString().replace('T', ' ').slice(0, 16);
  const link = escapes(location.origin + location.pathname + state.query()).slice(0, 2000);
  let rest = `${date} UTC  ${link}`;
  const lines = [];
  ctx.font = `11px ${FONT}`;
  while (rest && lines.length < 12) {
    let end = rest.length;
    while (end > 10 && ctx.measureText(rest.slice(0, end)).width > width - 24) {
      end = Math.floor(end * 0.94);
    }
    lines.push(rest.slice(0, end));
    rest = rest.slice(end);
  }
  return lines;
}

/** Draws title, date and link around a picture of the given size. */
function frame(ctx, host, { width, height, lines }) {
  const tokens = colors();
  ctx.fillStyle = tokens.surface;
  ctx.fillRect(0, 0, width, height + HEAD + footOf(lines));
  ctx.fillStyle = tokens.text1;
  ctx.font = `600 14px ${FONT}`;
  ctx.textAlign = 'left';
  ctx.textBaseline = 'middle';
  ctx.fillText(title(host), 12, HEAD / 2);
  ctx.fillStyle = tokens.text3;
  ctx.font = `11px ${FONT}`;
  lines.forEach((line, i) => ctx.fillText(line, 12, height + HEAD + FOOT / 2 + i * LINE));
}

/** Measures a plot by recording it once. */
function sizeOf(plot) {
  const ctx = new SvgContext(1, 1);
  const { width, height } = plot.paint ? plot.paint(ctx) : plot.chart.size;
  return { width: Math.round(width), height: Math.round(height), lines: footer(ctx, width) };
}

async function png(host) {
  const { plot } = host;
  const ratio = Math.max(2, devicePixelRatio || 1);
  const canvas = document.createElement('canvas');
  const size = sizeOf(plot);
  canvas.width = size.width * ratio;
  canvas.height = (size.height + HEAD + footOf(size.lines)) * ratio;
  const ctx = canvas.getContext('2d');
  ctx.scale(ratio, ratio);
  frame(ctx, host, size);
  ctx.translate(0, HEAD);
  if (plot.paint) plot.paint(ctx);
  else ctx.drawImage(plot.chart.canvas(ratio), 0, 0, size.width, size.height);
  return new Promise((resolve) => {
    canvas.toBlob(resolve, 'image/png');
  });
}

function svg(host) {
  const { plot } = host;
  const size = sizeOf(plot);
  const ctx = new SvgContext(size.width, size.height + HEAD + footOf(size.lines));
  frame(ctx, host, size);
  let text = '';
  if (plot.paint) {
    ctx.save();
    ctx.translate(0, HEAD);
    plot.paint(ctx);
    ctx.restore();
    text = ctx.toString();
  } else {
    const inner = plot.chart.svg().replace('<svg ', `<svg y="${HEAD}" `);
    text = ctx.toString().replace(/<\/svg>$/, `${inner}</svg>`);
  }
  return new Blob([text], { type: 'image/svg+xml' });
}

/** Returns the values of a plot as CSV (RFC 4180). */
function csv(host) {
  const cell = (value) => {
    const text = value === null || value === undefined || value !== value ? '' : String(value);
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  const { columns, rows } = host.plot.table();
  const lines = [columns, ...rows].map((row) => row.map(cell).join(','));
  return new Blob([`${lines.join('\n')}\n`], { type: 'text/csv' });
}

/** Saves a blob as a file. */
function save(blob, kind, host) {
  const experiment = (document.body.dataset.base || 'stoker').split('/').pop();
  const link = make('a', { href: URL.createObjectURL(blob),
    download: `${experiment}-${host.kind}.${kind}` });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

/** Opens the data of a plot, which the server has as JSON. */
function openServer(host) {
  const url = new URL(host.source, location.href);
  for (const key of ['metric', 'x']) {
    if (state.get(key)) url.searchParams.set(key, state.get(key));
  }
  const link = make('a', { href: url.href, download: '' });
  document.body.append(link);
  link.click();
  link.remove();
}

async function exportPlot(button) {
  const host = hostOf(button);
  const kind = button.dataset.export;
  if (!host) return;
  if (kind === 'json') {
    openServer(host);
    return;
  }
  await host.start();
  if (!host.plot) return;
  const blobs = { csv, svg, png };
  const blob = await blobs[kind]?.(host);
  if (blob) save(blob, kind, host);
}

/** Shows or hides the table with the values of a plot. */
async function toggleTable(button) {
  const host = hostOf(button);
  if (!host) return;
  if (host.tableBox) {
    host.tableBox.remove();
    host.tableBox = null;
    button.setAttribute('aria-expanded', 'false');
    return;
  }
  await host.start();
  const data = host.plot?.table?.();
  if (!data) return;
  host.tableBox = build(data, title(host));
  host.element.after(host.tableBox);
  button.setAttribute('aria-expanded', 'true');
  host.tableBox.focus();
}

function build({ columns, rows }, caption) {
  const head = make('tr', {}, ...columns.map((column) => make('th', { scope: 'col',
    text: name(column), title: long(column) })));
  const body = rows.slice(0, MOST).map((row) => make('tr', {}, ...row.map((value, i) => {
    const string = value === null || value === undefined || value !== value ? '–' : String(value);
    const isNumber = typeof value === 'number';
    return make(i === 0 ? 'th' : 'td', { scope: i === 0 ? 'row' : null,
      text: isNumber ? string.replace(/^-/, '\u2212') : name(string), title: long(string),
      style: isNumber ? { textAlign: 'end', fontVariantNumeric: 'tabular-nums' } : {} });
  })));
  const left = rows.length - body.length;
  const note = left > 0 ? `. The first ${count(MOST)} of ${count(rows.length)} rows, `
    + `${count(left)} left out` : '';
  return make('div', { class: 'plot-table', tabindex: 0, role: 'region', 'aria-label': caption,
    style: { maxHeight: '360px', overflow: 'auto' } }, make('table', { class: 'table' },
    make('caption', { text: `${caption}${note}`, style: { textAlign: 'start',
      padding: '8px 12px' } }), make('thead', {}, head), make('tbody', {}, ...body)));
}

const long = (text) => (String(text).length > 40 ? escapes(String(text).slice(0, 1000)) : null);

export function startExport() {
  document.addEventListener('click', (event) => {
    const button = event.target.closest?.('[data-export]');
    const table = event.target.closest?.('[data-as-table]');
    if (button && hostOf(button)) {
      event.preventDefault();
      exportPlot(button).catch((error) => hostOf(button).fail(error));
    }
    if (table) toggleTable(table);
  });
}
