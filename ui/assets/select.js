// Selection and brush in tables and links: checkboxes, ranges, row marks, Compare links.

import { store } from './data.js';
import { settle } from './dom.js';
import { count, plural } from './format.js';
import { state } from './state.js';
import { series } from './theme.js';

let lastTrial = null;

const rowsOf = (table) => [...table.querySelectorAll('tr[data-trial]')];

/** Selects all visible rows between the last chosen row and `row`. */
export function selectRange(row) {
  const table = row.closest('table');
  const rows = rowsOf(table).filter((one) => !one.hidden);
  const from = rows.findIndex((one) => +one.dataset.trial === lastTrial);
  const to = rows.indexOf(row);
  if (from < 0) {
    toggleRow(row);
    return;
  }
  const [a, b] = from < to ? [from, to] : [to, from];
  const added = rows.slice(a, b + 1).map((one) => +one.dataset.trial);
  state.select([...new Set([...state.selection, ...added])]);
  lastTrial = +row.dataset.trial;
}

export function toggleRow(row) {
  lastTrial = +row.dataset.trial;
  state.toggle(lastTrial);
}

/** Esc clears the selection, then the brush. Returns whether there was something to clear. */
export function clearStep() {
  const experiments = document.querySelectorAll('[data-select-experiment]:checked');
  if (experiments.length) {
    experiments.forEach((box) => {
      box.checked = false;
    });
    updateExperiments();
  } else if (state.selection.length) state.select([]);
  else if (state.hasBrush) state.setBrush({});
  else return false;
  return true;
}

/** Marks rows by selection, brush and hover. Called again after rows are replaced. */
export function applyRows() {
  const data = store.current;
  const isBrushed = state.hasBrush && data;
  const brushed = isBrushed ? data.brushed(state.brush) : null;
  holdHeight(Boolean(isBrushed));
  for (const table of document.querySelectorAll('table[data-trials]')) {
    let shown = 0;
    const rows = rowsOf(table);
    for (const row of rows) {
      const trial = +row.dataset.trial;
      const at = brushed ? data.rows.get(trial) : undefined;
      row.hidden = Boolean(brushed && at !== undefined && !brushed.mask[at]);
      if (!row.hidden) shown += 1;
      applyRow(row, trial);
    }
    const note = table.closest('.card')?.querySelector('[data-brush-note]');
    if (note) {
      note.hidden = !brushed;
      note.textContent = brushed ? `${count(shown)} of ${plural(brushed.count, 'brushed trial')} `
        + 'shown.' : '';
    }
    applyAll(table, rows);
  }
  applyCounts();
}

/** Keeps the page as high as before the brush, so that hidden rows do not scroll the page. */
function holdHeight(isBrushed) {
  const main = document.querySelector('main');
  if (!main || isBrushed === Boolean(main.style.minHeight)) return;
  main.style.minHeight = isBrushed ? `${main.offsetHeight}px` : '';
}

function applyRow(row, trial) {
  const number = state.seriesOf(trial);
  row.classList.toggle('is-selected', number > 0);
  if (number) {
    row.dataset.series = number;
    row.style.setProperty('--row-color', series(number));
  } else {
    delete row.dataset.series;
    row.style.removeProperty('--row-color');
  }
  const box = row.querySelector('input[data-select]');
  if (!box) return;
  box.checked = number > 0;
  box.style.accentColor = number ? series(number) : '';
}

function applyAll(table, rows) {
  const box = table.querySelector('input[data-select-all]');
  if (!box) return;
  const visible = rows.filter((row) => !row.hidden);
  const chosen = visible.filter((row) => state.isSelected(+row.dataset.trial)).length;
  box.checked = visible.length > 0 && chosen === visible.length;
  box.indeterminate = chosen > 0 && chosen < visible.length;
}

/** Updates the count and the Compare links: the selection, or the brush if nothing is selected. */
function applyCounts() {
  if (!store.base) return;
  const { selection } = state;
  for (const element of document.querySelectorAll('[data-selection-count]')) {
    element.textContent = count(selection.length);
  }
  const trials = selection.length ? selection : brushedTrials();
  for (const bar of document.querySelectorAll('[data-selection-bar]')) {
    if (!bar.querySelector('[data-compare-experiments]')) bar.hidden = trials.length === 0;
    const label = bar.querySelector('[data-selection-count]')?.parentElement;
    if (label) label.hidden = selection.length === 0;
  }
  for (const link of document.querySelectorAll('[data-compare]')) {
    const isUsable = trials.length >= 2 && trials.length <= 8;
    link.hidden = trials.length === 0;
    setLink(link, isUsable ? `${store.base}/compare?t=${trials.join(',')}` : null,
      'Compare takes 2 to 8 trials');
  }
  for (const button of document.querySelectorAll('[data-selection-clear]')) {
    button.hidden = !selection.length;
  }
  for (const button of document.querySelectorAll('[data-clear-brush]')) {
    button.hidden = !state.hasBrush;
  }
}

function setLink(link, href, reason) {
  if (href) {
    link.setAttribute('href', href);
    link.removeAttribute('aria-disabled');
    link.removeAttribute('title');
  } else {
    link.removeAttribute('href');
    link.setAttribute('aria-disabled', 'true');
    link.title = reason;
  }
}

function brushedTrials() {
  const data = store.current;
  if (!data || !state.hasBrush) return [];
  const { mask, count: inside } = data.brushed(state.brush);
  if (inside > 8) return data.trials.index.slice(0, 9);
  return data.trials.index.filter((_, row) => mask[row]);
}

/** Updates the bar of the list of experiments. */
export function updateExperiments() {
  const boxes = [...document.querySelectorAll('input[data-select-experiment]')];
  if (!boxes.length) return;
  const chosen = boxes.filter((box) => box.checked);
  boxes.forEach((box) => {
    const number = chosen.indexOf(box) + 1;
    const row = box.closest('tr');
    row?.classList.toggle('is-selected', number > 0);
    box.style.accentColor = number ? series(number) : '';
  });
  const ids = chosen.map((box) => box.dataset.selectExperiment);
  for (const bar of document.querySelectorAll('[data-selection-bar]')) {
    bar.hidden = !ids.length;
    const label = bar.querySelector('[data-selection-count]');
    if (label) label.textContent = count(ids.length);
    fillInputs(bar, ids);
  }
  const query = ids.map((id) => `e=${encodeURIComponent(id).replaceAll('%2F', '/')}`).join('&');
  for (const link of document.querySelectorAll('[data-compare-experiments]')) {
    const isUsable = ids.length >= 2;
    if (link.matches('button')) {
      link.disabled = !isUsable;
      link.title = isUsable ? '' : 'Select two experiments or more';
    } else {
      setLink(link, isUsable ? `/compare?${query}` : null, 'Select two experiments or more');
    }
  }
}

/** Forms in the bar get a hidden field `e` for each selected experiment. */
function fillInputs(bar, ids) {
  for (const place of bar.querySelectorAll('[data-selected-inputs]')) {
    place.replaceChildren(...ids.map((id) => {
      const input = document.createElement('input');
      Object.assign(input, { type: 'hidden', name: 'e', value: id });
      return input;
    }));
  }
}

let lastBox = null;

function clickExperiment(box, event) {
  const boxes = [...document.querySelectorAll('input[data-select-experiment]')];
  if (event.shiftKey && lastBox && boxes.includes(lastBox)) {
    const [a, b] = [boxes.indexOf(lastBox), boxes.indexOf(box)].sort((x, y) => x - y);
    for (const one of boxes.slice(a, b + 1)) one.checked = box.checked;
  }
  lastBox = box;
  updateExperiments();
}

function onClick(event) {
  const { target } = event;
  if (!(target instanceof Element)) return;
  const box = target.closest('input[data-select]');
  if (box) {
    const row = box.closest('tr[data-trial]');
    if (row && event.shiftKey) selectRange(row);
    else if (row) toggleRow(row);
    else state.toggle(+box.dataset.select);
    return;
  }
  const experiment = target.closest('input[data-select-experiment]');
  if (experiment) clickExperiment(experiment, event);
  const all = target.closest('input[data-select-all]');
  if (all) selectAll(all);
  if (target.closest('[data-selection-clear]')) {
    if (document.querySelector('[data-select-experiment]:checked')) clearStep();
    else state.select([]);
  }
  if (target.closest('[data-clear-brush]')) state.setBrush({});
  const button = target.closest('[data-clear-brush], [data-selection-clear]');
  // Only keys click without a detail. Others would open the keyboard of a touch screen.
  if (button && event.detail === 0) requestAnimationFrame(() => passFocus(button));
}

/** A button that hides itself passes the focus to the filter of its table. */
function passFocus(button) {
  const { activeElement, body } = document;
  if (button.checkVisibility() || (activeElement !== button && activeElement !== body)) return;
  document.querySelector('[data-filter]')?.focus({ preventScroll: true });
}

function selectAll(all) {
  const table = all.closest('table');
  const experiments = table.querySelectorAll('input[data-select-experiment]');
  if (experiments.length) {
    experiments.forEach((box) => {
      box.checked = all.checked;
    });
    updateExperiments();
    return;
  }
  const trials = rowsOf(table).filter((row) => !row.hidden).map((row) => +row.dataset.trial);
  const set = new Set(trials);
  state.select(all.checked ? [...new Set([...state.selection, ...trials])]
    : state.selection.filter((trial) => !set.has(trial)));
}

function onHover(event) {
  const row = event.target instanceof Element ? event.target.closest('tr[data-trial]') : null;
  if (row) state.setHover(+row.dataset.trial);
  else if (event.target.closest?.('table[data-trials]')) state.setHover(null);
}

function markHover() {
  for (const row of document.querySelectorAll('tr.is-hovered')) row.classList.remove('is-hovered');
  if (state.hover === null) return;
  for (const row of document.querySelectorAll(`tr[data-trial="${Number(state.hover)}"]`)) {
    row.classList.add('is-hovered');
  }
}

/** Opens the trial of a row. */
export function openRow(row) {
  const link = row.querySelector('a[href]');
  if (row.dataset.href) location.assign(row.dataset.href);
  else if (link) link.click();
  else if (store.base) location.assign(`${store.base}/trials/${row.dataset.trial}`);
}

export function startSelection() {
  document.addEventListener('click', onClick);
  document.addEventListener('mouseover', onHover);
  document.addEventListener('dblclick', (event) => {
    const row = event.target.closest?.('table[data-trials] tr[data-trial], tr[data-href]');
    if (row && !event.target.closest('a,button,input,label')) openRow(row);
  });
  document.addEventListener('mouseout', (event) => {
    if (event.target.closest?.('tr[data-trial]')) state.setHover(null);
  });
  const rest = settle(applyRows, 150);
  state.subscribe((changed, moving) => {
    const isHeavy = moving && (store.current?.size || 0) > 500;
    if (changed.has('sel') || (changed.has('brush') && !isHeavy)) applyRows();
    else if (changed.has('brush')) rest();
    if (changed.has('hover')) markHover();
  });
  document.addEventListener('stoker:replaced', () => {
    applyRows();
    updateExperiments();
  });
  store.subscribe(applyRows);
  applyRows();
  updateExperiments();
  // A brush in the URL needs the data before it can hide rows.
  if (state.hasBrush && store.base) store.load().then(applyRows, () => {});
}
