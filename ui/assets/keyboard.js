// Keys of the page and the list of them. Letters do nothing in fields and can be switched off.

import { isTyping, make } from './dom.js';
import { store } from './data.js';
import { clearStep, openRow, selectRange, toggleRow, updateExperiments } from './select.js';
import { toggleTheme } from './theme.js';

const HELP = [['/', 'Go to experiment or trial'], ['f', 'Filter'],
  ['j  k', 'Next row, previous row'], ['x', 'Select the row'],
  ['Shift x', 'Select all rows up to this one'], ['Enter', 'Open the row'],
  ['c', 'Compare the selection'], ['[  ]', 'Previous trial, next trial'], ['1 to 8', 'Tabs'],
  ['t', 'Light or dark'], ['?', 'This list'], ['Esc', 'Clear the selection, then the brush'],
  ['Arrow keys', 'In a plot: walk lines and points']];

let dialog = null;

/** Returns whether letters are on. */
function hasLetters() {
  try {
    return localStorage.getItem('letters') !== 'off';
  } catch {
    return true;
  }
}

function setLetters(isOn) {
  try {
    localStorage.setItem('letters', isOn ? 'on' : 'off');
  } catch {
    // Storage may be off; letters then stay on.
  }
}

function help() {
  if (!dialog) {
    const rows = HELP.map(([keys, text]) => make('tr', {}, make('th', { scope: 'row', style: {
      textAlign: 'start', paddingInlineEnd: '24px', fontWeight: '400' } },
    make('kbd', { text: keys })), make('td', { text })));
    const box = make('input', { type: 'checkbox', checked: hasLetters(),
      on: { change: (event) => setLetters(event.target.checked) } });
    const close = make('button', { type: 'button', class: 'button', text: 'Close',
      on: { click: () => dialog.close() } });
    dialog = make('dialog', { class: 'dialog', 'aria-labelledby': 'keys-title' },
      make('h2', { id: 'keys-title', text: 'Keys' }),
      make('table', {}, make('tbody', {}, ...rows)),
      make('p', {}, make('label', {}, box, ' Letters and digits are shortcuts')), close);
    document.body.append(dialog);
  }
  if (!dialog.open) dialog.showModal();
  dialog.querySelector('button').focus();
}

const rows = () => [...document.querySelectorAll(
  'table[data-trials] tr[data-trial], tr[data-href]')]
  .filter((row) => !row.hidden && row.offsetParent !== null);

function currentRow() {
  const focused = document.activeElement?.closest?.('tr');
  const list = rows();
  if (focused && list.includes(focused)) return focused;
  return list.find((row) => row.classList.contains('is-current')) || null;
}

function move(step) {
  const list = rows();
  if (!list.length) return;
  const at = list.indexOf(currentRow());
  const next = list[at < 0 ? (step > 0 ? 0 : list.length - 1)
    : Math.max(0, Math.min(list.length - 1, at + step))];
  list.forEach((row) => row.classList.toggle('is-current', row === next));
  next.tabIndex = -1;
  next.focus({ preventScroll: true });
  next.scrollIntoView({ block: 'nearest' });
}

function select(isRange) {
  const row = currentRow();
  if (!row) return;
  if (row.dataset.trial) {
    if (isRange) selectRange(row);
    else toggleRow(row);
    return;
  }
  const box = row.querySelector('input[data-select-experiment]');
  if (box) {
    box.checked = !box.checked;
    updateExperiments();
  }
}

function compare() {
  const links = document.querySelectorAll('[data-compare][href], [data-compare-experiments]');
  [...links].find((one) => !one.hidden && !one.disabled)?.click();
}

/** Focuses the field that a key names. Returns whether the field exists. */
function focusField(selector) {
  const field = document.querySelector(selector);
  if (!field) return false;
  field.focus();
  field.select?.();
  return true;
}

const follow = (selector) => {
  const link = document.querySelector(selector);
  link?.click();
  return Boolean(link);
};

const LETTERS = {
  '/': () => focusField('[data-goto]'),
  f: () => focusField('[data-filter]'),
  j: () => move(1),
  k: () => move(-1),
  x: () => select(false),
  X: () => select(true),
  c: compare,
  '[': () => follow('a[data-previous], a[rel=prev]'),
  ']': () => follow('a[data-next], a[rel=next]'),
  t: toggleTheme,
  '?': help,
};

function onKey(event) {
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
  if (document.querySelector('dialog[open]')) return;
  if (event.key === 'Escape') {
    if (isTyping(event.target)) event.target.blur();
    else if (clearStep()) event.preventDefault();
    return;
  }
  if (isTyping(event.target)) return;
  if (event.key === 'Enter') {
    const row = document.activeElement?.matches('tr') ? currentRow() : null;
    if (row) openRow(row);
    return;
  }
  if (!hasLetters()) return;
  if (/^[1-8]$/.test(event.key)) {
    const tab = document.querySelectorAll('a[data-tab]')[+event.key - 1];
    tab?.click();
    return;
  }
  const call = LETTERS[event.key];
  if (call && call() !== false) event.preventDefault();
}

export function startKeyboard() {
  document.addEventListener('keydown', onKey);
  document.addEventListener('click', (event) => {
    if (event.target.closest?.('[data-help]')) help();
  });
  // "Go to trial": a number opens the trial of this experiment.
  document.addEventListener('submit', (event) => {
    const field = event.target.querySelector?.('[data-goto]');
    const trial = field?.value.trim().match(/^#?(\d+)$/);
    if (!trial || !store.base) return;
    event.preventDefault();
    location.assign(`${store.base}/trials/${trial[1]}`);
  });
}
