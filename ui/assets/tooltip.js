// One tooltip for all plots that draw on a canvas of their own.

import { make } from './dom.js';

let box = null;

function create() {
  box = make('div', { class: 'plot-tooltip', 'aria-hidden': 'true', style: {
    position: 'absolute', zIndex: '50', pointerEvents: 'none', maxWidth: '280px',
    padding: '6px 8px', border: '1px solid var(--line2)', borderRadius: '6px',
    background: 'var(--surface)', color: 'var(--text1)', fontSize: '12px', lineHeight: '17px',
    boxShadow: '0 2px 8px rgba(0,0,0,.14)', overflowWrap: 'anywhere' } });
  box.hidden = true;
  document.body.append(box);
}

/** Shows lines of text near a point of the viewport. The first line is the title. */
export function showTooltip(lines, clientX, clientY) {
  if (!box) create();
  box.replaceChildren(...lines.map((line, i) => make('div', { text: line,
    style: i === 0 ? { fontWeight: '600' } : { color: 'var(--text2)' } })));
  box.hidden = false;
  const width = box.offsetWidth;
  const height = box.offsetHeight;
  const left = clientX + 14 + width > innerWidth - 8 ? clientX - width - 14 : clientX + 14;
  const top = clientY + 14 + height > innerHeight - 8 ? clientY - height - 10 : clientY + 14;
  box.style.left = `${Math.max(4, left) + scrollX}px`;
  box.style.top = `${Math.max(4, top) + scrollY}px`;
}

export function hideTooltip() {
  if (box) box.hidden = true;
}
