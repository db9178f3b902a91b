// Live updates: one stream of server-sent events per page, replaced parts, "Live" and
// "Reconnecting", and tables that keep their order while they are in use.

import { make, sayNews, throttle } from './dom.js';
import { moment, plural, result } from './format.js';
import { store } from './data.js';
import { hosts, restartPlots } from './host.js';
import { Retry, setConnected } from './retry.js';
import { state } from './state.js';
import { isTouch } from './touch.js';

const SILENCE = 10000;
const RETRY = 3000;
// Plots of metric rows. The others draw data.json, which changes with the record only.
const OF_ROWS = ['curves', 'trial', 'profiler'];
const url = document.body.dataset.live;
const NOUN = location.pathname.startsWith('/jobs/') ? 'job'
  : /\/trials\/\d/.test(location.pathname) ? 'trial' : 'experiment';

let stream = null;
let lastBeat = Date.now();
let dataTime = Date.now() / 1000;
let isLost = false;
// Address of the sign-in, after the end of the session.
let signIn = null;
// Whether the record of the page was deleted, and when its absence was first seen.
let isGone = false;
let missingSince = 0;
let phase = null;
const waiting = new Map();
// IDs of parts that were in use at the last change, and that no line offers to update.
const late = new Set();

function open() {
  if (stream || isGone || document.hidden || !url) return;
  // An attempt to connect is no heartbeat: otherwise repeated ones would hide the silence.
  stream = new EventSource(url);
  const beat = (event) => {
    lastBeat = Date.now();
    if (isLost) recover();
    else show('Live');
    if (event.type === 'heartbeat') {
      dataTime = parse(event.data).time || Date.now() / 1000;
      document.dispatchEvent(new CustomEvent('stoker:beat'));
    }
  };
  stream.addEventListener('open', () => {
    lastBeat = Date.now();
    if (isLost) recover();
    else show('Live');
  });
  for (const kind of ['change', 'metrics', 'heartbeat']) stream.addEventListener(kind, beat);
  stream.addEventListener('change', () => changed());
  stream.addEventListener('metrics', () => metrics());
  stream.addEventListener('error', () => {
    // EventSource connects again by itself, except after an HTTP error.
    if (stream?.readyState !== EventSource.CLOSED) return;
    close();
    setTimeout(open, RETRY);
    // Its status is unknown here. The page itself leads to the sign-in if the session has ended.
    if (!isLost) partsRetry.run();
  });
}

function parse(text) {
  try {
    return JSON.parse(text) || {};
  } catch {
    return {};
  }
}

function close() {
  stream?.close();
  stream = null;
}

const dataRetry = new Retry((isRepeated) => store.refresh(isRepeated));
const partsRetry = new Retry(() => replaceParts());

const metrics = throttle(() => {
  document.dispatchEvent(new CustomEvent('stoker:metrics'));
  for (const host of hosts.values()) {
    // A load that takes longer than the time between two events must be able to end.
    if (host.connected && !host.retry.isOpen && OF_ROWS.includes(host.kind)) host.retry.run();
  }
}, 500);

const changed = throttle(() => {
  dataRetry.run();
  partsRetry.run();
}, 1000);

function setLost(is) {
  const isBack = isLost && !is;
  isLost = is;
  setConnected(!is);
  if (isBack) restartPlots();
}

/** Shows that updates have ended, before the silence is long enough. */
function lose() {
  setLost(true);
  show('Reconnecting');
  // Events of a session that ends would report that all is well.
  if (!stream) return;
  close();
  setTimeout(open, RETRY);
}

/** Returns why the updates have ended. */
function ending() {
  // The server answers alike if a viewer may no longer list the namespace.
  const more = document.querySelector('.viewer') ? ', or you may no longer see it.' : '.';
  return `This ${NOUN} was deleted${more}`;
}

/** Ends the updates of a record that stays missing. After a restart, the server lists it late. */
function miss() {
  if (isGone) return;
  missingSince ||= Date.now();
  if (Date.now() - missingSince < RETRY) {
    setTimeout(() => partsRetry.run(), RETRY);
    return;
  }
  isGone = true;
  close();
  setLost(true);
  show('Deleted');
  sayNews(ending());
}

function recover() {
  setLost(false);
  signIn = null;
  show('Live');
  changed();
}

/** Shows the state of the stream; ended experiments show none. */
function show(word) {
  for (const element of document.querySelectorAll('[data-live-state]')) {
    const label = element.querySelector('[data-live-word]') || element;
    if (label.textContent !== word) label.textContent = word;
    element.dataset.liveState = word.toLowerCase();
    element.hidden = isGone;
  }
  const isDown = word !== 'Live';
  for (const banner of document.querySelectorAll('[data-live-banner]')) {
    banner.hidden = !isDown;
    if (!isDown) continue;
    const place = banner.querySelector('[data-live-banner-text]') || banner;
    place.replaceChildren(...reason());
    if (!banner.querySelector('[data-live-retry]')) {
      banner.append(make('button', { type: 'button', class: 'button small',
        'data-live-retry': true, text: 'Try now' }));
    }
    banner.querySelector('[data-live-retry]').hidden = isGone;
  }
}

/** Returns the texts and links of the banner. */
function reason() {
  if (isGone) {
    return [make('strong', { text: ending() }),
      ' The page shows its last state.'];
  }
  const time = ` The page shows the state of ${moment(dataTime)}. `;
  if (signIn) {
    return [make('strong', { text: 'Your session has ended.' }), time,
      make('a', { href: signIn, text: 'Sign in again' })];
  }
  return [make('strong', { text: 'Live updates stopped.' }), time,
    'If "stoker ui" was started again, open the URL that it printed. '];
}

/** Connects again and loads the data, on request of the user. */
function retry() {
  close();
  open();
  changed();
}

function watch() {
  if (isGone || document.hidden || !url) return;
  if (Date.now() - lastBeat > SILENCE && !isLost) {
    setLost(true);
    show('Reconnecting');
  }
  if (isLost && Date.now() - lastBeat > 4 * SILENCE) {
    // A proxy may hold a dead connection open.
    close();
    open();
    lastBeat = Date.now() - SILENCE - 1;
  }
  if ([...late].some(isIdle)) {
    late.clear();
    partsRetry.run();
  }
}

/** Returns whether a part is in use, so that replacing it would disturb the user. */
function isBusy(part) {
  // Logs are followed, unless the user has scrolled up or searches.
  if (isKeyed(part)) return Boolean(part.querySelector('[data-reading], input:focus, select:focus'));
  const table = part.matches('table') ? part : part.querySelector('table');
  if (!table) return part.contains(document.activeElement) || part.querySelector('dialog[open]');
  // After a tap, `:hover` stays, although no finger is there.
  return (!isTouch() && part.matches(':hover')) || part.contains(document.activeElement)
    || Boolean(part.querySelector('.is-selected'))
    || (table.matches('[data-trials]') && state.selection.length > 0);
}

function isIdle(id) {
  const part = document.getElementById(id);
  return part && !isBusy(part);
}

/** Returns the number of rows of the table of trials, which grows with "Load more rows". */
const rowsShown = () => document.querySelectorAll('#trials-rows > tr').length;

/** Returns the address of the page with the rows that it shows. */
function addressNow() {
  const address = new URL(location.pathname + state.query(), location.href);
  if (rowsShown()) address.searchParams.set('rows', rowsShown());
  return address;
}

/** Replaces the parts of the page that have changed. Returns the error of a failed request. */
async function replaceParts() {
  const parts = [...document.querySelectorAll('[data-live-part][id]')];
  if (!parts.length) return null;
  const rows = rowsShown();
  const wasGone = isGone;
  let page = null;
  try {
    const headers = { Accept: 'text/html' };
    const response = await fetch(addressNow(), { cache: 'no-cache', headers });
    const { status } = response;
    const target = new URL(response.url, location.href);
    if (status === 401 || (response.redirected && target.pathname === '/sign-in')) {
      const here = location.pathname + state.query();
      // With an authenticating proxy, loading the page again leads to the sign-in.
      signIn = status === 401 ? here : `/sign-in?next=${encodeURIComponent(here)}`;
      lose();
      return { status: 401 };
    }
    if (status === 404) miss();
    else missingSince = 0;
    if (!response.ok) return { status };
    if (response.redirected && target.pathname !== location.pathname) {
      // The viewer may no longer see any namespace.
      location.reload();
      return null;
    }
    if (wasGone) {
      // The record exists again, perhaps a new one whose live updates have another address.
      location.reload();
      return null;
    }
    page = new DOMParser().parseFromString(await response.text(), 'text/html');
  } catch {
    // The connection has ended, perhaps within the answer.
    return { status: 0 };
  }
  // More rows were loaded meanwhile.
  if (rowsShown() !== rows) return replaceParts();
  if (page.body.dataset.base !== document.body.dataset.base) {
    // The name belongs to a later run now. Plots and live updates still have the address of the
    // earlier one.
    location.reload();
    return null;
  }
  const layout = (of) => of.querySelector('[data-live-reload]')?.dataset.liveReload;
  if (layout(document) !== layout(page)) {
    // The first experiment has come, or the last one is deleted: the page has other parts.
    location.reload();
    return null;
  }
  const hasLine = Boolean(document.querySelector('[data-live-pending]'));
  let pending = 0;
  late.clear();
  for (const part of parts) {
    const next = page.getElementById(part.id);
    if (!next || !part.isConnected || isSame(part, next)) continue;
    if (part.querySelector('[data-plot]')) continue;
    if (isBusy(part)) {
      const isOffered = hasLine && [part, next].some((one) => one.querySelector('tr[id]'));
      const number = isOffered ? changedRows(part, next) : 0;
      if (number) {
        waiting.set(part.id, next);
        pending += number;
      } else if (!isOffered && !isKeyed(part)) {
        // The server does not report the same change again.
        late.add(part.id);
      }
    } else {
      waiting.delete(part.id);
      const hadFocus = isKeyed(part) && part.contains(document.activeElement);
      part.replaceWith(document.adoptNode(next));
      if (hadFocus) next.querySelector('[tabindex]')?.focus({ preventScroll: true });
    }
  }
  showPending(pending);
  document.dispatchEvent(new CustomEvent('stoker:replaced'));
  readPhase();
  return null;
}

/** Scripts fill parts with a key, so the key says whether the server has something new. */
const isKeyed = (part) => 'liveKey' in part.dataset;

const isSame = (part, next) => (isKeyed(part) ? part.dataset.liveKey === next.dataset.liveKey
  : next.isEqualNode(part));

/** Counts rows that are new or differ. */
function changedRows(part, next) {
  const before = new Map([...part.querySelectorAll('tr[id]')].map((row) =>
    [row.id, row.textContent]));
  const after = [...next.querySelectorAll('tr[id]')];
  // Marks of the selection differ always; only the text of rows counts.
  const number = after.filter((row) => before.get(row.id) !== row.textContent).length;
  const isSameOrder = [...before.keys()].join() === after.map((row) => row.id).join();
  return number || (isSameOrder ? 0 : 1);
}

/** Shows "4 changes. Update" above tables that keep their order. */
function showPending(number) {
  for (const line of document.querySelectorAll('[data-live-pending]')) {
    line.hidden = number === 0;
    if (!number) continue;
    const place = line.querySelector('[data-live-pending-text]') || line;
    place.textContent = `${plural(number, 'change')}.`;
    if (!line.querySelector('[data-live-update]')) {
      line.append(' ', make('button', { type: 'button', class: 'link', 'data-live-update': true,
        text: 'Update' }));
    }
  }
}

function update() {
  for (const [id, next] of waiting) {
    document.getElementById(id)?.replaceWith(document.adoptNode(next));
  }
  waiting.clear();
  showPending(0);
  document.dispatchEvent(new CustomEvent('stoker:replaced'));
}

const phaseNow = () => document.getElementById('phase')?.textContent.trim() || null;

/** Reads phase changes aloud. */
function readPhase() {
  const now = phaseNow();
  if (now && phase && now !== phase) sayNews(`The experiment is now ${now}.`);
  phase = now || phase;
}

export function startLive() {
  phase = phaseNow();
  store.subscribe((data, before) => {
    if (!data || data.best === null || data.best === before || before === undefined) return;
    const row = data.bestRow;
    if (row >= 0) sayNews(`New best ${result(data.trials.value[row])}, trial ${data.best}.`);
  });
  if (!url) return;
  // Rows that wait were asked for with another filter, or before more were loaded.
  for (const event of ['htmx:afterSwap', 'htmx:after:swap']) {
    document.addEventListener(event, () => {
      waiting.clear();
      showPending(0);
      // The URL has the new filter a moment later.
      setTimeout(() => partsRetry.run(), 100);
    });
  }
  document.addEventListener('click', (event) => {
    if (event.target.closest?.('[data-live-update]')) update();
    if (event.target.closest?.('[data-live-retry]')) retry();
  });
  document.addEventListener('visibilitychange', () => {
    if (document.hidden) close();
    // Without live updates, this is the time to check whether the record exists again.
    else if (isGone) partsRetry.run();
    else {
      lastBeat = Date.now();
      open();
      changed();
    }
  });
  window.addEventListener('pagehide', close);
  window.addEventListener('pageshow', (event) => {
    if (!event.persisted) return;
    lastBeat = Date.now();
    open();
  });
  setInterval(watch, 1000);
  open();
}
