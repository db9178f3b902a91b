// Compares experiments: results of all trials at a common length, as strips with the median.

import { make } from '../dom.js';
import { name, parameter, plural, result } from '../format.js';
import { quantile } from '../data.js';
import { state } from '../state.js';
import { colors, series as seriesColor } from '../theme.js';
import { axisStyle, Chart } from './chart.js';
import { jitter } from './ladder-parts.js';

export function create(host) {
  return new Strips(host);
}

class Strips {
  constructor(host) {
    this.host = host;
    this.chart = new Chart(host.element);
    this.walk = {
      count: () => this.sets.length,
      points: (i) => this.sets[i].results.length,
      text: (i, j) => {
        const [trial, value] = this.sets[i].results[j] || [];
        return trial === undefined ? `${this.sets[i].name}, no result`
          : `${this.sets[i].name}, trial ${trial}: ${result(value)}`;
      },
    };
  }

  async load() {
    this.json = await this.host.load(this.host.source);
    this.#picker();
    this.#draw();
  }

  refresh() {
    return this.load();
  }

  update(changed) {
    if (changed.has('at')) this.#draw();
  }

  theme() {
    this.#draw();
  }

  resize() {
    this.chart.resize();
  }

  destroy() {
    this.chart.destroy();
  }

  /** Lengths at which all experiments have results, ascending. */
  #lengths() {
    const [first, ...others] = this.json.experiments.map((one) => new Set(
      Object.keys(one.results || {}).filter((key) => one.results[key].length)));
    return [...(first || [])].filter((key) => others.every((set) => set.has(key)))
      .sort((a, b) => a - b);
  }

  /** Fills a list `[data-option=at]` of the template, or adds one to the header. */
  #picker() {
    const lengths = this.#lengths();
    const header = this.host.card.querySelector('header') || this.host.card;
    let select = header.querySelector('select[data-option="at"]');
    if (!select) {
      select = make('select', { 'data-option': 'at', 'aria-label': 'at length' });
      header.append(select);
    }
    const unit = this.json.experiments[0]?.unit || '';
    // The template may give the lengths with its own words.
    if (!select.options.length) {
      select.replaceChildren(...lengths.map((length) => make('option', { value: length,
        text: `at ${parameter(+length)} ${name(unit)}${+length === 1 ? '' : 's'}` })));
    }
    select.value = this.#at(lengths);
  }

  #at(lengths) {
    const wanted = state.get('at');
    if (lengths.includes(wanted)) return wanted;
    const fewest = (key) => Math.min(...this.json.experiments.map((one) =>
      one.results[key].length));
    return lengths.filter((key) => fewest(key) >= 5).at(-1) || lengths.at(-1) || '';
  }

  #draw() {
    const { host, json } = this;
    if (!json) return;
    const at = this.#at(this.#lengths());
    host.empty(at ? '' : 'The experiments have no length with results in common.');
    if (!at) return;
    this.sets = json.experiments.map((one, i) => ({ name: name(one.name), color: seriesColor(i + 1),
      results: one.results[at].filter(([, value]) => value !== null)
        .sort((a, b) => a[1] - b[1]) }));
    const tokens = colors();
    const label = { color: tokens.text3, fontSize: 11.5, formatter: (value) =>
      String(+value.toPrecision(4)).replace('-', '\u2212') };
    const number = this.sets.length;
    this.chart.set({ grid: { left: 52, right: 24, top: 12, bottom: 44 },
      xAxis: axisStyle({ type: 'category', splitLine: { show: false },
        data: this.sets.map((set) => `${set.name}\nn=${set.results.length}`),
        axisLabel: { color: tokens.text3, fontSize: 11.5, lineHeight: 15, interval: 0,
          overflow: 'truncate', width: Math.max(40, (this.chart.size.width - 90) / number) } }),
      yAxis: axisStyle({ type: 'value', scale: true, axisLabel: label }),
      tooltip: { renderMode: 'richText', confine: true, backgroundColor: tokens.surface,
        borderColor: tokens.line2, borderWidth: 1,
        textStyle: { color: tokens.text1, fontSize: 12 },
        formatter: (event) => (event.value?.[2] === undefined ? ''
          : `Trial ${event.value[2]}\n${result(event.value[1])}`) },
      series: [...this.sets.map((set, i) => this.#dots(set, i)), this.#medians()] });
    host.note(`Lines mark medians. ${plural(this.sets.reduce((sum, set) =>
      sum + set.results.length, 0), 'result')}.`);
    host.label(`Results at length ${parameter(+at)}: ${this.sets.map((set) =>
      `${set.name} median ${result(median(set))}`).join(', ')}`);
  }

  #dots(set, i) {
    return { type: 'custom', data: set.results.map(([trial, value]) => [i, value, trial]),
      renderItem: (_, api) => {
        const [x, y] = api.coord([i, api.value(1)]);
        const width = Math.min(90, api.size([1, 0])[0] * 0.55);
        const cx = x + (jitter(api.value(2)) * width) / 2;
        return { type: 'circle', shape: { cx, cy: y, r: 3.6 },
          style: { fill: set.color, opacity: 0.65 } };
      } };
  }

  #medians() {
    return { type: 'custom', silent: true, z: 5,
      data: this.sets.map((set, i) => [i, median(set)]).filter(([, value]) => !Number.isNaN(value)),
      renderItem: (_, api) => {
        const [x, y] = api.coord([api.value(0), api.value(1)]);
        const half = Math.min(62, api.size([1, 0])[0] * 0.36);
        return { type: 'group', children: [{ type: 'rect', shape: { x: x - half, y: y - 1,
          width: 2 * half, height: 2 }, style: { fill: colors().text1 } },
        { type: 'text', style: { text: result(api.value(1), 3), x: x + half + 4, y: y - 6,
          fill: colors().text1, font: '600 11.5px system-ui' } }] };
      } };
  }

  table() {
    return { columns: ['Experiment', 'Trial', this.json.metric],
      rows: this.sets.flatMap((set) => set.results.map(([trial, value]) =>
        [set.name, trial, value])) };
  }
}

const median = (set) => quantile(set.results.map(([, value]) => value), 0.5);
