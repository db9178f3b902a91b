// Small helpers to build elements safely, and the aria-live region.

/** Creates an element. Text is always set as text, never as HTML. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (key === 'style') Object.assign(element.style, value);
    else if (key === 'on') {
      for (const [event, call] of Object.entries(value)) element.addEventListener(event, call);
    } else if (key === 'text') element.textContent = value;
    else if (key === 'class') element.className = value;
    else element.setAttribute(key, value === true ? '' : String(value));
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/**
 * Replaces the content of an element by texts and elements. Elements that are equal stay: one of
 * them may have the focus, or a finger on it.
 */
export function fill(element, parts) {
  const old = [...element.children];
  const next = parts.map((part) => {
    const at = typeof part === 'string' ? -1 : old.findIndex((one) => one.isEqualNode(part));
    return at < 0 ? part : old.splice(0, at + 1)[at];
  });
  const stays = new Set(next);
  for (const node of [...element.childNodes]) if (!stays.has(node)) node.remove();
  let place = element.firstChild;
  for (const node of next) {
    if (node === place) place = place.nextSibling;
    else if (typeof node === 'string') element.insertBefore(document.createTextNode(node), place);
    else element.insertBefore(node, place);
  }
}

export const HIDDEN = { position: 'absolute', width: '1px', height: '1px', margin: '-1px',
  padding: '0', border: '0', overflow: 'hidden', clipPath: 'inset(50%)', whiteSpace: 'nowrap' };

let region = null;

/** Reads a text aloud in screen readers. */
export function say(text) {
  if (!region) {
    region = document.querySelector('[data-say]')
      || document.body.appendChild(make('div', { 'aria-live': 'polite', style: HIDDEN }));
  }
  if (region.textContent !== text) region.textContent = text;
}

let lastNews = 0;

/** Reads news aloud, at most once in 10 s. */
export function sayNews(text) {
  const now = performance.now();
  if (lastNews && now - lastNews < 10000) return;
  lastNews = now;
  say(text);
}

/** Calls `call` at most once per `wait` ms, and always once after the last request. */
export function throttle(call, wait) {
  let last = 0;
  let timer = 0;
  return (...parameters) => {
    clearTimeout(timer);
    const run = () => {
      last = performance.now();
      call(...parameters);
    };
    const rest = last + wait - performance.now();
    if (rest <= 0) run();
    else timer = setTimeout(run, rest);
  };
}

/** Calls `call` after `wait` ms without a further request. */
export function debounce(call, wait) {
  let timer = 0;
  return (...parameters) => {
    clearTimeout(timer);
    timer = setTimeout(() => call(...parameters), wait);
  };
}

/**
 * Calls `call` once no request came for `wait` ms and two frames. On a slow machine, requests
 * wait behind a frame; the two frames let them arrive before the expensive call.
 */
export function settle(call, wait) {
  let timer = 0;
  let version = 0;
  return (...parameters) => {
    clearTimeout(timer);
    version += 1;
    const mine = version;
    timer = setTimeout(() => requestAnimationFrame(() => requestAnimationFrame(() => {
      if (mine === version) call(...parameters);
    })), wait);
  };
}

/** Returns whether letters typed now belong to a field. */
export function isTyping(target) {
  return Boolean(target?.closest?.('input:not([type=checkbox]):not([type=range]):not([type=radio]),'
    + 'textarea, select, [contenteditable=true]'));
}
