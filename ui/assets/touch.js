// Touch: which pointer pressed last, touches outside of a plot, and fingers that rest.

// Time in ms after which a resting finger drags. Browsers take 500 ms for a long press.
const HOLD = 350;
// Pixels that a resting finger may move.
const SLACK = 8;
// Radius in CSS pixels within which a finger hits a dot.
const FINGER = 24;

let last = 'mouse';

document.addEventListener('pointerdown', (event) => {
  last = event.pointerType;
}, true);

/** Returns whether the latest press on the page was that of a finger. */
export const isTouch = () => last === 'touch';

/** Returns the radius within which a press hits a dot; `fine` is that of a mouse. */
export const reach = (fine) => (isTouch() ? FINGER : fine);

/** Returns whether the page is used mainly by touch. */
export const isCoarse = () => matchMedia('(pointer: coarse)').matches;

/**
 * Calls `call` when a finger touches the page outside of an element. The result ends this.
 */
export function onTouchOutside(element, call) {
  const listener = (event) => {
    if (event.pointerType === 'touch' && !element.contains(event.target)) call();
  };
  document.addEventListener('pointerdown', listener, true);
  return () => document.removeEventListener('pointerdown', listener, true);
}

/**
 * Calls `start(event)` when a finger rests on an element. If it returns true, the finger drags
 * until it is lifted, and the page does not scroll.
 */
export function onHold(element, start) {
  let timer = 0;
  let from = null;
  let isHeld = false;
  const end = () => {
    clearTimeout(timer);
    from = null;
    isHeld = false;
  };
  element.addEventListener('pointerdown', (event) => {
    end();
    // A second finger zooms the page.
    if (event.pointerType !== 'touch' || !event.isPrimary) return;
    from = event;
    timer = setTimeout(() => {
      isHeld = start(event);
      if (isHeld) navigator.vibrate?.(10);
    }, HOLD);
  });
  element.addEventListener('pointermove', (event) => {
    if (event.pointerId !== from?.pointerId || isHeld) return;
    if (Math.hypot(event.clientX - from.clientX, event.clientY - from.clientY) > SLACK) end();
  });
  element.addEventListener('pointerup', (event) => {
    if (event.pointerId === from?.pointerId) clearTimeout(timer);
  });
  element.addEventListener('pointercancel', (event) => {
    if (event.pointerId === from?.pointerId) end();
  });
  // Browsers scroll unless the first move is prevented, so the listener must not be passive.
  element.addEventListener('touchmove', (event) => {
    if (isHeld && event.cancelable) event.preventDefault();
  }, { passive: false });
  // A finger that has dragged does not click.
  element.addEventListener('touchend', (event) => {
    if (isHeld && event.cancelable) event.preventDefault();
    end();
  }, { passive: false });
  element.addEventListener('contextmenu', (event) => {
    if (from) event.preventDefault();
  });
}

/**
 * Calls `show(event)` where a finger rests and then moves, if there is something to show: the first
 * result says so. Calls `hide()` when the finger is lifted. It selects and zooms nothing.
 */
export function onRest(element, show, hide) {
  let id = null;
  onHold(element, (event) => {
    const isShown = show(event);
    if (isShown) id = event.pointerId;
    return isShown;
  });
  element.addEventListener('pointermove', (event) => {
    if (event.pointerId === id) show(event);
  });
  for (const kind of ['pointerdown', 'pointerup', 'pointercancel']) {
    element.addEventListener(kind, () => {
      if (id !== null) hide();
      id = null;
    });
  }
}
