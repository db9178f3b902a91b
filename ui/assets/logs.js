// Logs: loads lines, follows while the page is live, filters by rank and level, marks matches.

import { make, debounce, throttle } from './dom.js';
import { count, escapes, plural } from './format.js';
import { loadJson } from './data.js';
import { state } from './state.js';

const MOST = 5000;
const FILTERS = ['rank', 'level', 'attempt'];

class Logs {
  constructor(element) {
    this.element = element;
    this.card = element.closest('.card') || element.parentElement;
    this.cursor = null;
    this.follow = true;
    this.#clear();
    this.search = '';
    this.touched = new Set(FILTERS.filter((key) => state.get(key)));
    element.tabIndex = 0;
    element.setAttribute('role', 'log');
    element.setAttribute('aria-live', 'off');
    if (!element.hasAttribute('aria-label')) element.setAttribute('aria-label', 'Logs');
    this.body = element.querySelector('[data-log-lines]') || element;
    this.#controls();
    // The card of another attempt may take the place of this one, and then ends its listeners.
    this.ended = new AbortController();
    const { signal } = this.ended;
    const poll = throttle(() => this.poll(), 800);
    for (const event of 'logLive' in element.dataset ? ['metrics', 'beat'] : []) {
      document.addEventListener(`stoker:${event}`, () => poll(), { signal });
    }
    document.addEventListener('stoker:replaced', () => this.#endIfReplaced(), { signal });
    element.addEventListener('scroll', () => this.#scrolled());
  }

  #controls() {
    const find = (selector) => this.card.querySelector(selector);
    const search = find('[data-log-search]');
    const again = debounce(() => this.reload(), 250);
    search?.addEventListener('input', () => {
      this.search = search.value;
      this.#setReading();
      if (search.dataset.logSearch === 'filter') again();
      this.#markAll();
    });
    search?.addEventListener('keydown', (event) => {
      if (event.key !== 'Enter') return;
      event.preventDefault();
      this.#nextMatch(event.shiftKey ? -1 : 1);
    });
    this.search = search?.value || '';
    this.card.addEventListener('click', (event) => this.#click(event));
    search?.form?.addEventListener('submit', (event) => event.preventDefault());
    // Rank, level and attempt are options in the query string.
    this.unsubscribe = state.subscribe((changed) => {
      if (!FILTERS.some((key) => changed.has(key))) return;
      for (const key of FILTERS) if (changed.has(key)) this.touched.add(key);
      this.reload();
    });
  }

  /** Ends the subscriptions of a replaced card, which would keep its rows in memory. */
  #endIfReplaced() {
    if (this.element.isConnected) return;
    this.ended.abort();
    this.unsubscribe();
    this.abort?.abort();
  }

  #click(event) {
    const wrap = event.target.closest('[data-log-wrap]');
    if (wrap) {
      const isWrapped = this.element.classList.toggle('wrap');
      wrap.setAttribute('aria-pressed', String(isWrapped));
    }
    const follow = event.target.closest('[data-log-follow]');
    if (follow) this.#setFollow(!this.follow);
  }

  #setFollow(isOn) {
    this.follow = isOn;
    this.#setReading();
    for (const button of this.card.querySelectorAll('[data-log-follow]')) {
      button.setAttribute('aria-pressed', String(isOn));
      const word = button.querySelector('[data-log-word]') || button;
      const text = [...word.childNodes].find((node) => node.nodeType === 3 && node.data.trim());
      if (text) text.data = isOn ? 'Following' : 'Follow';
    }
    if (isOn) this.element.scrollTop = this.element.scrollHeight;
  }

  /** Whoever reads or searches lines keeps them, although another attempt has started. */
  #setReading() {
    this.element.toggleAttribute('data-reading', !this.follow || this.search.trim() !== '');
  }

  #scrolled() {
    const { scrollTop, scrollHeight, clientHeight } = this.element;
    const isAtEnd = scrollHeight - scrollTop - clientHeight < 24;
    if (isAtEnd !== this.follow && !this.adding) this.#setFollow(isAtEnd);
  }

  #url(after) {
    const url = new URL(this.element.dataset.source, location.href);
    for (const key of this.touched) {
      const value = state.get(key);
      if (value) url.searchParams.set(key, value);
      else url.searchParams.delete(key);
    }
    const search = this.card.querySelector('[data-log-search="filter"]');
    if (search) url.searchParams.set('q', this.search);
    if (after !== null) url.searchParams.set('after', after);
    return url.href;
  }

  async reload() {
    this.cursor = null;
    this.abort?.abort();
    await this.poll(true);
  }

  async poll(force = false) {
    // The card of another attempt may have taken the place of this one.
    if ((this.busy && !force) || document.hidden || !this.element.isConnected) {
      if (document.hidden && this.cursor === null) this.#loadLater();
      return;
    }
    this.busy = true;
    this.abort = new AbortController();
    try {
      const isFirst = this.cursor === null;
      const json = await loadJson(this.#url(this.cursor), this.abort.signal);
      // After many new lines, the answer does not continue the lines shown.
      if (isFirst || !json.beginning) this.#clear();
      if (!this.lines) this.body.replaceChildren();
      this.cursor = json.next;
      this.total += json.total;
      this.matches += json.matches;
      this.isCut ||= !json.beginning;
      this.#append(json.lines);
      this.#note(json);
    } catch (error) {
      if (error.name === 'AbortError') return;
      this.#fail(error);
    } finally {
      this.busy = false;
    }
  }

  /** Forgets the lines shown, which the next ones replace. */
  #clear() {
    Object.assign(this, { lines: 0, total: 0, matches: 0, isCut: false });
  }

  /** Loads the first lines once the page is visible: a tab in the background reads nothing. */
  #loadLater() {
    document.addEventListener('visibilitychange', () => this.reload(), { once: true });
  }

  #fail(error) {
    if (this.lines) return;
    const text = `The logs could not be loaded: ${error.message}. `;
    this.body.replaceChildren(make('p', { text }),
      make('button', { type: 'button', class: 'button', text: 'Try again',
        on: { click: () => this.reload() } }));
  }

  #append(lines) {
    const block = document.createDocumentFragment();
    for (const line of lines.slice(-MOST)) block.append(this.#line(line));
    this.adding = true;
    this.body.append(block);
    this.lines = this.body.childElementCount;
    while (this.lines > MOST) {
      this.body.firstElementChild.remove();
      this.lines -= 1;
    }
    if (this.follow) this.element.scrollTop = this.element.scrollHeight;
    requestAnimationFrame(() => {
      this.adding = false;
    });
    this.#countMatches();
  }

  #line(line) {
    const level = ['info', 'warn', 'error'].includes(line.level) ? line.level : '';
    const time = line.time ? new Date(line.time) : null;
    const isValid = time && !Number.isNaN(time.getTime());
    const stamp = isValid ? `${time.toLocaleTimeString('en-GB')}.`
      + `${String(time.getMilliseconds()).padStart(3, '0')}` : '';
    const string = escapes(line.text.replaceAll('\t', '    '))
      + (line.cut ? ` … ${plural(line.cut, 'more character')}` : '');
    const content = make('span', { class: 'log-text' });
    this.#fill(content, string);
    const row = make('div', { class: `log-line ${level}`.trim() },
      make('span', { class: 'log-time', text: stamp, title: isValid ? time.toISOString() : null }),
      make('span', { class: 'log-rank', text: line.rank === null || line.rank === undefined ? ''
        : `r${line.rank}` }),
      make('span', { class: 'log-level', text: level }), content);
    content.plain = string;
    return row;
  }

  /** Fills an element with text, with matches in <mark>. */
  #fill(element, string) {
    const wanted = this.search.trim().toLowerCase();
    if (!wanted) {
      element.textContent = string;
      return;
    }
    const low = string.toLowerCase();
    const parts = [];
    let from = 0;
    // Lower case may change the length of a text; then nothing is marked.
    let at = low.length === string.length ? low.indexOf(wanted) : -1;
    while (at >= 0 && parts.length < 200) {
      parts.push(string.slice(from, at), make('mark', {
        text: string.slice(at, at + wanted.length) }));
      from = at + wanted.length;
      at = low.indexOf(wanted, from);
    }
    element.replaceChildren(...parts, string.slice(from));
  }

  #markAll() {
    for (const element of this.body.querySelectorAll('.log-text')) {
      if (element.plain !== undefined && (this.search || element.childElementCount)) {
        this.#fill(element, element.plain);
      }
    }
    this.match = -1;
    this.#countMatches();
  }

  #countMatches() {
    const target = this.card.querySelector('[data-log-matches]');
    if (!target) return;
    const number = this.search.trim() ? this.body.querySelectorAll('mark').length : 0;
    const found = number === 1 ? '1 match' : `${count(number)} matches`;
    target.textContent = !this.search.trim() ? '' : this.match >= 0
      ? `${this.match + 1} of ${count(number)}` : found;
  }

  #nextMatch(step) {
    const marks = [...this.body.querySelectorAll('mark')];
    if (!marks.length) return;
    marks[this.match]?.classList.remove('is-current');
    this.match = ((this.match ?? -1) + step + marks.length) % marks.length;
    marks[this.match].classList.add('is-current');
    this.#setFollow(false);
    marks[this.match].scrollIntoView({ block: 'center' });
    this.#countMatches();
  }

  #note(json) {
    if (!this.lines) this.body.replaceChildren(make('p', { text: 'No lines.' }));
    const title = this.card.querySelector('[data-log-title]');
    if (title && json.around === 'end') title.textContent = 'Last lines';
    if (title && json.around === 'error' && this.isCut) {
      title.textContent = 'First error in the latest lines';
    }
    const isShort = this.matches > this.lines;
    const cut = this.card.querySelector('[data-log-cut]');
    if (cut) cut.hidden = !this.isCut && !isShort;
    for (const link of this.card.querySelectorAll('a[download]')) {
      link.search = `?attempt=${json.attempt ?? 0}`;
    }
    const target = this.card.querySelector('[data-log-count]');
    if (!target) return;
    const of = this.matches < this.total ? `${count(this.matches)} of ` : '';
    const parts = [of + plural(this.total, 'line')];
    if (isShort) parts.push(`the last ${count(this.lines)} shown`);
    target.textContent = parts.join(', ');
  }
}

const started = new WeakSet();

/** Starts the logs of the page, and those of an attempt that begins later. */
export function startLogs() {
  for (const element of document.querySelectorAll('[data-logs]')) {
    if (!element.dataset.source || started.has(element)) continue;
    started.add(element);
    new Logs(element).reload();
  }
}

document.addEventListener('stoker:replaced', startLogs);
