// Two sliders or boxes per axis as a brush for keyboard and touch. They are hidden until they have
// the focus, or until a button shows them.

import { HIDDEN, make } from '../dom.js';
import { parameter } from '../format.js';

const STEPS = 100;

export class AxisSliders {
  constructor(element, change) {
    this.change = change;
    this.form = make('div', { class: 'axis-sliders', role: 'group', 'aria-label':
      'Brush by axis' });
    Object.assign(this.form.style, HIDDEN);
    // The form is shown while it has the focus, so that sighted keyboard users see it.
    this.form.addEventListener('focusin', () => this.#show(true));
    this.form.addEventListener('focusout', (event) => {
      if (!this.form.contains(event.relatedTarget)) this.#show(false);
    });
    element.after(this.form);
  }

  /** Shows the sliders until the next call. Returns whether they stay. */
  toggle() {
    this.stays = !this.stays;
    this.#show(this.stays);
    return this.stays;
  }

  #show(isWanted) {
    const isShown = isWanted || this.stays;
    for (const key of Object.keys(HIDDEN)) this.form.style[key] = isShown ? '' : HIDDEN[key];
    if (isShown) {
      Object.assign(this.form.style, { display: 'flex', flexWrap: 'wrap', gap: '12px',
        padding: '8px 16px' });
    }
  }

  update(data, axes, brush) {
    const key = axes.map((axis) => `${axis.key}\n${axis.min}\n${axis.max}\n${axis.values}`)
      .join('\n\n');
    if (key !== this.key) {
      this.key = key;
      this.axes = axes.map((axis) => (axis.isCategory ? this.#boxes(axis) : this.#range(axis)));
      this.form.replaceChildren(...this.axes.map((one) => one.element));
    }
    this.axes.forEach((one, i) => one.set(brush[axes[i].key]));
  }

  #range(axis) {
    const label = parameter(axis.name);
    const slider = (word, start) => make('input', { type: 'range', min: 0, max: STEPS,
      value: start, 'aria-label': `${label}, ${word}`, on: { input: () => send() } });
    const low = slider('from', 0);
    const high = slider('to', STEPS);
    const tell = () => {
      low.setAttribute('aria-valuetext', axis.format(axis.value(low.value / STEPS)));
      high.setAttribute('aria-valuetext', axis.format(axis.value(high.value / STEPS)));
    };
    const send = () => {
      if (+low.value > +high.value) {
        if (document.activeElement === low) high.value = low.value;
        else low.value = high.value;
      }
      tell();
      const isWhole = +low.value === 0 && +high.value === STEPS;
      this.change(axis, isWhole ? null
        : axis.between(low.value / STEPS, high.value / STEPS));
    };
    const set = (part) => {
      const isRange = part && !part.values;
      const place = (input, at) => {
        // The user moves the slider with the focus, perhaps between two steps of the brush.
        if (input !== document.activeElement) input.value = at;
      };
      place(low, isRange ? Math.round(axis.position(part.min) * STEPS) : 0);
      place(high, isRange ? Math.round(axis.position(part.max) * STEPS) : STEPS);
      tell();
    };
    return { element: group(label, low, high), set };
  }

  #boxes(axis) {
    const boxes = axis.values.slice(0, 30).map((value) => ({ value, box: make('input',
      { type: 'checkbox', on: { change: () => send() } }) }));
    const send = () => {
      const values = boxes.filter(({ box }) => box.checked).map(({ value }) => value);
      this.change(axis, values.length ? { values } : null);
    };
    const set = (part) => boxes.forEach(({ value, box }) => {
      box.checked = Boolean(part?.values?.includes(value));
    });
    const labels = boxes.map(({ value, box }) => make('label', {}, box, ` ${parameter(value)}`));
    return { element: group(parameter(axis.name), ...labels), set };
  }
}

function group(label, ...controls) {
  return make('fieldset', { style: { border: '0', padding: '0', margin: '0', display: 'flex',
    gap: '8px', alignItems: 'center' } }, make('legend', { text: label,
    style: { fontSize: '12px', color: 'var(--text2)' } }), ...controls);
}
