// Controls with data-option, links that keep the state, tables that load more rows, copy buttons.

import { say } from './dom.js';
import { state } from './state.js';

const CARRIED = ['sel', 'brush', 'metric', 'color', 'sort', 'filter'];

function onClick(event) {
  const control = event.target.closest?.('[data-option][data-value]');
  if (!control || event.ctrlKey || event.metaKey || event.shiftKey) return;
  const { option, value } = control.dataset;
  event.preventDefault();
  state.set(option, value);
  mark(option, value);
}

/** Marks the chosen control of each group. */
function mark(option, value) {
  for (const control of document.querySelectorAll(`[data-option="${CSS.escape(option)}"]`)) {
    const isChosen = control.dataset.value === value;
    if (control.matches('a')) {
      if (isChosen) control.setAttribute('aria-current', 'true');
      else control.removeAttribute('aria-current');
    } else if (control.matches('button')) {
      control.setAttribute('aria-pressed', String(isChosen));
    } else if (control.matches('select, input') && control.value !== value) {
      control.value = value;
    }
    const output = control.matches('[type=range]') && control.parentElement.querySelector('output');
    if (output) output.textContent = value || '0';
  }
}

function onInput(event) {
  const control = event.target.closest?.('select[data-option], input[data-option]');
  if (!control || control.dataset.value !== undefined) return;
  const { option } = control.dataset;
  const isZero = control.type === 'range' && +control.value === 0;
  state.set(option, isZero ? '' : control.value);
  mark(option, control.value);
}

/** Adds selection and brush to links within the same experiment, before they are followed. */
function carry(event) {
  const link = event.target.closest?.('a[href]');
  const { base } = document.body.dataset;
  if (!link || !base || link.dataset.option) return;
  const url = new URL(link.href, location.href);
  if (url.origin !== location.origin || /\.(json|csv|svg|png)$/.test(url.pathname)) return;
  if (url.pathname !== base && !url.pathname.startsWith(`${base}/`)) return;
  if (url.pathname.endsWith('/compare') || link.hasAttribute('download')) return;
  for (const key of CARRIED) {
    const isLive = key === 'sel' || key === 'brush';
    if (!isLive && url.searchParams.has(key)) continue;
    const value = state.get(key);
    if (value) url.searchParams.set(key, value);
    else if (isLive) url.searchParams.delete(key);
  }
  const query = url.searchParams.toString().replace(/%3A/g, ':').replace(/%3B/g, ';')
    .replace(/%2C/g, ',');
  link.setAttribute('href', url.pathname + (query ? `?${query}` : '') + url.hash);
}

/** Returns the permanent link of this page: the name of the experiment with its UID. */
function linkOf(base) {
  const path = base ? location.pathname.replace(/^\/experiments\/[^/]+\/[^/]+/, base)
    : location.pathname;
  return location.origin + path + state.query() + location.hash;
}

async function copy(button) {
  const { copy: selector, copyLink } = button.dataset;
  const source = selector ? document.querySelector(selector)?.textContent : linkOf(copyLink);
  if (!source) return;
  try {
    await navigator.clipboard.writeText(source);
    say('Copied');
    const before = button.getAttribute('title');
    button.dataset.copied = '';
    button.title = 'Copied';
    setTimeout(() => {
      delete button.dataset.copied;
      button.title = before || '';
    }, 1500);
  } catch {
    say('The browser refused to copy');
  }
}

/** Loads further rows when a link `a[data-more]` below a table comes into view. */
function watchMore() {
  const observer = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) loadMore(entry.target, observer);
  }, { rootMargin: '400px' });
  const watch = () => document.querySelectorAll('a[data-more]').forEach((link) =>
    observer.observe(link));
  watch();
  document.addEventListener('stoker:replaced', watch);
}

async function loadMore(link, observer) {
  if (link.dataset.busy !== undefined) return;
  const table = document.getElementById(link.dataset.more) || link.closest('.card')
    ?.querySelector('table');
  // Rows beyond 1,000 load on a click only, so that scrolling does not fill the page.
  if (!table || table.rows.length > 1000) return;
  link.dataset.busy = '';
  try {
    const response = await fetch(link.href, { headers: { Accept: 'text/html' } });
    if (!response.ok) throw new Error(`HTTP ${response.status}`);
    const page = new DOMParser().parseFromString(await response.text(), 'text/html');
    const rows = page.getElementById(table.id)?.tBodies[0]?.rows || [];
    const known = new Set([...table.rows].map((row) => row.id).filter(Boolean));
    table.tBodies[0].append(...[...rows].filter((row) => !known.has(row.id)));
    const next = page.querySelector(`a[data-more="${CSS.escape(link.dataset.more)}"]`);
    observer.unobserve(link);
    if (next) link.replaceWith(document.adoptNode(next));
    else link.remove();
    document.dispatchEvent(new CustomEvent('stoker:replaced'));
  } catch {
    delete link.dataset.busy;
  }
}

/** Closes open menus when the user presses elsewhere. */
function closeMenus(event) {
  for (const menu of document.querySelectorAll('details.menu[open]')) {
    if (!menu.contains(event.target)) menu.open = false;
  }
}

export function startOptions() {
  document.addEventListener('pointerdown', closeMenus);
  document.addEventListener('click', carry, true);
  document.addEventListener('click', (event) => {
    onClick(event);
    const button = event.target.closest?.('[data-copy], [data-copy-link]');
    if (button) copy(button);
  });
  document.addEventListener('input', onInput);
  document.addEventListener('change', onInput);
  for (const key of ['smooth', 'x', 'scale', 'color', 'bracket', 'at', 'metric']) {
    if (state.get(key)) mark(key, state.get(key));
  }
  watchMore();
}
