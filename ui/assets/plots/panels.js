// Small multiples of line plots in one element: a title, a legend and a plot per panel.

import { make } from '../dom.js';
import { escapes, name, NONFINITE, point } from '../format.js';
import { LinePlot } from './lines.js';

export class Panels {
  /** `tip(panel, line, index)` returns the lines of the tooltip. */
  constructor(host, tip) {
    this.host = host;
    this.tip = tip;
    this.list = [];
    const least = host.element.classList.contains('four') ? '250px' : '300px';
    host.element.setAttribute('role', 'group');
    Object.assign(host.element.style, { display: 'grid', gap: 'var(--gap, 16px)',
      height: 'auto', gridTemplateColumns: `repeat(auto-fit, minmax(min(100%, ${least}), 1fr))` });
    this.walk = {
      count: () => this.#lines().length,
      points: (i) => this.#lines()[i].line.x.length,
      text: (i, j) => {
        const { panel, line } = this.#lines()[i];
        return [name(panel.title), ...this.tip(panel, line, j)].join(', ');
      },
      mark: (i, j) => this.#mark(i, j),
    };
  }

  #lines() {
    return this.list.flatMap(({ panel, plot }) => panel.scene.lines.filter((line) =>
      !line.behind && line.x.length).map((line) => ({ panel, line, plot })));
  }

  #mark(i, j) {
    for (const { plot } of this.list) plot.mark(null);
    if (i === null) return;
    const { line, plot } = this.#lines()[i];
    plot.mark({ id: line.id, index: j });
  }

  /** Shows panels {key, title, unit, legend, scene}. Panels with the same key keep their zoom. */
  set(panels) {
    const keys = panels.map((panel) => panel.key).join('\n');
    if (keys !== this.keys) {
      this.keys = keys;
      this.list.forEach(({ plot }) => plot.destroy());
      this.host.element.replaceChildren();
      this.list = panels.map((panel) => this.#create(panel));
    }
    panels.forEach((panel, i) => {
      const one = this.list[i];
      one.panel = panel;
      one.legend.replaceChildren(...panel.legend.map((item) => make('span', { style: {
        display: 'inline-flex', alignItems: 'center', gap: '5px' } },
      make('span', { 'aria-hidden': 'true', style: { width: '12px', height: '0',
        borderTop: `2px solid ${item.color}`, display: 'inline-block' } }),
      make('span', { text: name(item.text, 24) }))));
      one.plot.set(panel.scene);
    });
  }

  #create(panel) {
    const legend = make('span', { class: 'panel-legend', style: { display: 'flex', gap: '10px',
      flexWrap: 'wrap', marginInlineStart: 'auto', fontSize: '12px', color: 'var(--text2)' } });
    const head = make('div', { class: 'panel-head', style: { display: 'flex', gap: '8px',
      alignItems: 'baseline', flexWrap: 'wrap' } },
    make('b', { text: name(panel.title), title: escapes(String(panel.title).slice(0, 500)),
      style: { fontSize: '13.5px', fontWeight: '600' } }),
    panel.unit ? make('span', { text: name(panel.unit), style: { fontSize: '12px',
      color: 'var(--text3)' } }) : null, legend);
    const area = make('div', { class: 'panel-plot', style: { position: 'relative',
      height: this.host.options.panelHeight || '190px' } });
    const element = make('div', { class: 'panel', style: { minWidth: '0' } }, head, area);
    this.host.element.append(element);
    const one = { legend, panel };
    one.plot = new LinePlot(area, {
      hover: (line, index, event) => {
        this.host.tooltip(this.tip(one.panel, line, index), event);
        one.plot.mark({ id: line.id, index });
      },
      leave: () => {
        this.host.tooltip(null);
        one.plot.mark(null);
      },
    });
    return one;
  }

  resize() {
    this.list.forEach(({ plot }) => plot.resize());
  }

  destroy() {
    this.list.forEach(({ plot }) => plot.destroy());
    this.host.element.replaceChildren();
  }

  /** Draws all panels, one below the other. */
  paint(ctx) {
    let top = 0;
    let width = 0;
    for (const { panel, plot } of this.list) {
      ctx.save();
      ctx.translate(0, top + 24);
      const size = plot.paint(ctx);
      ctx.font = '600 13px system-ui';
      ctx.textAlign = 'left';
      ctx.fillText(name(panel.title), 8, -8);
      ctx.restore();
      top += size.height + 32;
      width = Math.max(width, size.width);
    }
    return { width, height: top };
  }

  table(xName) {
    const rows = this.#lines().flatMap(({ panel, line }) => {
      const values = line.raw || line.y;
      const points = line.x.map((x, i) => [x, values[i]]).filter(([, value]) => value !== null);
      const marks = (line.nonfinite || []).map((x) => [x, NONFINITE]);
      return [...points, ...marks].map((row) => [panel.title, line.name, ...row]);
    });
    return { columns: ['Plot', 'Series', xName, 'Value'], rows };
  }
}

/** Returns the limits of y over lines: percentiles 1 and 99 if outliers would squeeze the rest. */
export function limitsOf(lines, zero = false) {
  const values = lines.flatMap((line) => line.y.filter((value) => Number.isFinite(value)));
  if (!values.length) return { min: 0, max: 1 };
  values.sort((a, b) => a - b);
  let min = values[0];
  let max = values[values.length - 1];
  const at = (part) => values[Math.round((values.length - 1) * part)];
  const middle = at(0.98) - at(0.02);
  if (middle > 0 && max - min > 4 * middle) [min, max] = [at(0.02), at(0.98)];
  if (zero) min = Math.min(0, min);
  const pad = (max - min || Math.abs(max) || 1) * 0.05;
  return { min: zero && min === 0 ? 0 : min - pad, max: max + pad };
}

export const valueText = (line, i) => point((line.raw || line.y)[i]);
