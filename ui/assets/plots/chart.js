// Wrapper of ECharts: canvas renderer, tooltips as rich text, no animation, SVG for exports.

import { colors, FONT } from '../theme.js';
import { onTouchOutside } from '../touch.js';

/** Options that all charts share. */
export function baseOption() {
  const tokens = colors();
  return { animation: false, backgroundColor: 'transparent',
    textStyle: { fontFamily: FONT, fontSize: 12, color: tokens.text2 },
    tooltip: { renderMode: 'richText', confine: true, trigger: 'item', borderWidth: 1,
      backgroundColor: tokens.surface, borderColor: tokens.line2, padding: [6, 8],
      textStyle: { color: tokens.text1, fontSize: 12, fontFamily: FONT } },
    aria: { enabled: false } };
}

/** Style of a value axis. */
export function axisStyle(more = {}) {
  const tokens = colors();
  return { axisLine: { show: false }, axisTick: { show: false },
    splitLine: { lineStyle: { color: tokens.line } }, nameLocation: 'middle',
    nameTextStyle: { color: tokens.text2, fontSize: 12 },
    axisLabel: { color: tokens.text3, fontSize: 11.5, hideOverlap: true }, ...more };
}

export class Chart {
  /** `events` may have click(parameters), open(parameters), over(parameters), out(). */
  constructor(element, events = {}) {
    this.holder = document.createElement('div');
    Object.assign(this.holder.style, { position: 'absolute', inset: '0' });
    element.append(this.holder);
    this.element = element;
    this.chart = window.echarts.init(this.holder, null, { renderer: 'canvas' });
    if (events.click) this.chart.on('click', events.click);
    if (events.open) this.chart.on('dblclick', events.open);
    if (events.over) this.chart.on('mouseover', events.over);
    if (events.out) this.chart.on('globalout', events.out).on('mouseout', events.out);
    // ECharts selects what a finger touches, but is not notified of touches elsewhere.
    this.deafen = onTouchOutside(element, () => {
      this.chart.dispatchAction({ type: 'hideTip' });
      events.out?.();
    });
    // The canvas is not in the order of focus; the plot itself is.
    this.holder.setAttribute('aria-hidden', 'true');
  }

  set(option) {
    this.option = { ...baseOption(), ...option };
    this.chart.setOption(this.option, { notMerge: true, lazyUpdate: true });
  }

  resize() {
    this.chart.resize();
  }

  destroy() {
    this.deafen();
    this.chart.dispose();
    this.holder.remove();
  }

  get size() {
    return { width: this.element.clientWidth, height: this.element.clientHeight };
  }

  /** Returns the chart as SVG text. */
  svg() {
    const copy = window.echarts.init(null, null, { renderer: 'svg', ssr: true, ...this.size });
    copy.setOption({ ...this.option, tooltip: { show: false } });
    const text = copy.renderToSVGString();
    copy.dispose();
    return text;
  }

  /** Returns a canvas with the chart, for PNG. */
  canvas(ratio) {
    return this.chart.renderToCanvas({ pixelRatio: ratio,
      backgroundColor: colors().surface });
  }
}
