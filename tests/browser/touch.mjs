// Tablets and phones: taps select and open, fingers zoom and brush, and targets are large enough.

import { NARROW, base, browse, check, drawn, equal, input, inside, noFaults, query, until, visit }
  from './page.mjs';
import { relabel } from './change.mjs';
import { views } from './list.mjs';

const TABLET = { width: 820, height: 1180 };
// Least width and height of a target in CSS pixels (WCAG 2.5.8).
const LEAST = 24;
// Least height of buttons and menus.
const LEAST_BUTTON = 32;
// Time in ms after which a resting finger drags, as in `touch.js`.
const HOLD = 350;

const visible = (page) => page.$$eval('#trials-table tr[data-trial]', (rows) =>
  rows.filter((row) => !row.hidden).map((row) => +row.dataset.trial).sort((a, b) => a - b));

const scrolled = (page) => page.evaluate(() => scrollY);

const tooltip = (page) => page.locator('.plot-tooltip');

/** Writes what the page delays to the URL, and returns a query parameter. */
async function stored(page, name) {
  await page.evaluate(async () => (await import('/assets/state.js')).state.flush());
  return query(page, name);
}

/** Returns a point of the viewport that `find(plot, box)` returns for a plot. */
async function place(page, name, find) {
  await drawn(page, name);
  // Let the plot be where a finger can move it up and down.
  await page.locator(`[data-plot=${name}]`).evaluate((element) =>
    element.scrollIntoView({ block: 'center' }));
  return page.evaluate(async ({ kind, text }) => {
    const { hosts } = await import('/assets/host.js');
    const host = [...hosts.values()].find((one) => one.kind === kind);
    const box = host.element.getBoundingClientRect();
    const [x, y] = window.touchPoints[text](host.plot, box);
    return { x: x + box.left, y: y + box.top };
  }, { kind: name, text: find });
}

/** Defines in the page where its plots have their lines, dots and axes. */
function definePoints() {
  window.touchPoints = {
    curve: ({ lines }) => {
      const line = lines.scene.lines.at(-1);
      const view = lines.view();
      const i = Math.floor(line.x.length / 2);
      return [view.x(line.x[i]), view.y(line.y[i])];
    },
    // A mouse there does not hit the dot.
    besideDot: ({ spots }) => {
      const [first] = [...spots].sort((a, b) => a.x - b.x);
      return [first.x - 16, first.y];
    },
    middle: (_, box) => [box.width / 2, box.height / 2],
    axis: ({ canvas }) => [canvas.xs[0], canvas.top + 0.2 * canvas.height],
    name: ({ canvas }) => [canvas.xs[0], 20],
    scatter: ({ chart: { chart, option } }) =>
      chart.convertToPixel({ xAxisIndex: 0, yAxisIndex: 0 }, option.series[0].data.at(-1).value),
  };
}

/** Runs in the page first: fingers rest long enough when the test says so, not the clock. */
function controlHolds(wait) {
  const { setTimeout: start, clearTimeout: stop } = window;
  const holds = new Map();
  window.setTimeout = (call, after, ...rest) => {
    const id = start(after === wait ? () => {} : call, after, ...rest);
    if (after === wait) holds.set(id, call);
    return id;
  };
  window.clearTimeout = (id) => {
    holds.delete(id);
    stop(id);
  };
  window.endHolds = () => {
    for (const call of holds.values()) call();
    holds.clear();
  };
  window.countHolds = () => holds.size;
}

/** Puts a finger down, and lets it rest. */
async function rest(page, finger, point) {
  await finger.down(point);
  await page.waitForFunction(() => window.countHolds() > 0);
  await page.evaluate(() => window.endHolds());
}

/** A finger of the browser, by the protocol: Playwright can only tap. */
class Finger {
  constructor(session) {
    this.session = session;
    this.time = 0;
  }

  /**
   * Lets time pass between two touches, in seconds, without waiting. Touches in the future do no
   * harm, but the browser crashes if one that seems to be in the past follows a tap.
   */
  #pass(seconds) {
    this.time = Math.max(Date.now() / 1000, this.time + seconds);
  }

  #send(type, points) {
    const touchPoints = points.map(({ x, y }) => ({ x, y }));
    return this.session.send('Input.dispatchTouchEvent', { type, touchPoints,
      timestamp: this.time });
  }

  down(point) {
    this.at = point;
    this.#pass(0);
    return this.#send('touchStart', [point]);
  }

  /** Moves in steps: browsers decide by the first ones whether the page scrolls. */
  async move(x, y, steps = 8) {
    const from = this.at;
    for (let i = 1; i <= steps; i += 1) {
      this.at = { x: from.x + (x * i) / steps, y: from.y + (y * i) / steps };
      this.#pass(0.05);
      await this.#send('touchMove', [this.at]);
    }
  }

  /** Puts a second finger down beside the first. */
  join(x, y) {
    this.#pass(0.05);
    return this.#send('touchStart', [this.at, { x: this.at.x + x, y: this.at.y + y }]);
  }

  /** Lifts the finger after a rest: from a move, the browser would let the page glide. */
  up() {
    this.#pass(0.5);
    return this.#send('touchEnd', []);
  }

  async drag(point, x, y) {
    await this.down(point);
    await this.move(x, y);
    await this.up();
  }
}

/** Runs in the browser: lists targets that are too small, except links in sentences. */
function small([least, leastButton]) {
  const inText = 'p a, .skip, .visually-hidden, td.wide a, .notice a, label input, .card-note a';
  const targets = document.querySelectorAll('a[href], button, input, select, summary, label');
  return [...targets].filter((one) => one.checkVisibility({ visibilityProperty: true })
    && !one.matches(inText) && !one.closest('.axis-sliders:not([style*=flex])'))
    .filter((one) => !(one.matches('label') && !one.querySelector('input, select')))
    .map((one) => [one, one.getBoundingClientRect()])
    .filter(([one, box]) => box.width > 0 && (box.width < least - 0.5
      || box.height < (one.matches('button, summary, select') ? leastButton : least) - 0.5))
    .map(([one, box]) => `${one.outerHTML.slice(0, 120)}: ${box.width} x ${box.height}`);
}

async function targets(page) {
  const found = [];
  for (const size of [TABLET, NARROW]) {
    await page.setViewportSize(size);
    for (const view of views()) {
      await visit(page, view.path);
      await page.waitForSelector(view.has);
      for (const plot of view.plots) await drawn(page, plot);
      const all = await page.evaluate(small, [LEAST, LEAST_BUTTON]);
      found.push(...all.map((one) => `${view.name}, ${size.width} px: ${one}`));
    }
  }
  check(found.length === 0, `targets that are too small:\n  ${found.join('\n  ')}`);
}

/** A tap on a curve selects its trial, shows the tooltip, and offers the trial's page. */
async function taps(page, finger) {
  await visit(page, base());
  const curve = await place(page, 'curves', 'curve');
  await page.touchscreen.tap(curve.x, curve.y);
  const trial = await until(() => stored(page, 'sel'), 'a tap on a curve selects');
  const title = () => tooltip(page).locator('div').first().innerText();
  check((await title()).startsWith(`Trial ${trial}`), `tooltip of a curve: ${await title()}`);

  const dot = await place(page, 'ladder', 'besideDot');
  await page.touchscreen.tap(dot.x, dot.y);
  await until(async () => await stored(page, 'sel') !== trial, 'a tap beside a dot selects');
  check(await tooltip(page).isVisible(), 'a tap beside a dot shows no tooltip');
  check(/^Trial \d+, [A-Z]/.test(await title()), `tooltip of a dot: ${await title()}`);
  const chosen = (await stored(page, 'sel') || '').split(',').filter(Boolean).map(Number);
  const rows = await page.$$eval('#trials-table tr.is-selected', (list) =>
    list.map((row) => +row.dataset.trial));
  equal(rows.sort((a, b) => a - b), chosen.sort((a, b) => a - b), 'selected rows after taps');
  // A touch elsewhere hides the tooltip, also if it only scrolls.
  const { x, y } = await page.locator('#ladder-title').boundingBox();
  await finger.drag({ x: x + 4, y: y + 4 }, 0, -40);
  await tooltip(page).waitFor({ state: 'hidden' });

  await visit(page, `${base()}?sel=${trial}`);
  await drawn(page, 'curves');
  await page.locator('#curves .legend a').tap();
  await page.waitForURL(new RegExp(`/trials/${trial}\\?`));
}

/** A finger that rests on a curve or dot shows its tooltip until it is lifted. */
async function rests(page, finger) {
  await visit(page, base());
  const title = () => tooltip(page).locator('div').first().innerText();
  for (const [plot, find] of [['curves', 'curve'], ['ladder', 'besideDot']]) {
    const point = await place(page, plot, find);
    await rest(page, finger, point);
    check((await title()).startsWith('Trial '), `tooltip of a finger on ${plot}: ${await title()}`);
    const [before, { y }] = [await scrolled(page), await tooltip(page).boundingBox()];
    await finger.move(2, -6);
    await until(async () => (await tooltip(page).boundingBox()).y < y,
      `the tooltip follows the finger on ${plot}`);
    await finger.move(40, -60);
    equal(await scrolled(page), before, `scroll position after a rest on ${plot}`);
    await finger.up();
    await tooltip(page).waitFor({ state: 'hidden' });
    equal([await stored(page, 'sel'), await stored(page, 'zoom')], [null, null],
      `selection and zoom after a rest on ${plot}`);
  }
}

/** Returns the number of boxes that show what a finger zooms. */
const boxes = (page) => page.locator('#curves .u-select').evaluateAll((all) =>
  all.filter((one) => one.getBoundingClientRect().width > 0).length);

/** Sideways, a finger zooms the curves; up and down, it scrolls the page. */
async function zooms(page, finger) {
  await visit(page, base());
  const middle = await place(page, 'curves', 'middle');
  const before = await scrolled(page);
  await finger.drag({ x: middle.x - 150, y: middle.y }, 300, 4);
  const zoom = await until(() => stored(page, 'zoom'), 'a finger that moves sideways zooms');
  equal(await scrolled(page), before, 'scroll position after a zoom');
  const next = await place(page, 'curves', 'middle');
  const start = await scrolled(page);
  await finger.drag(next, 4, -200);
  await until(async () => await scrolled(page) !== start, 'a finger that moves up scrolls');
  equal(await stored(page, 'zoom'), zoom, 'zoom after scrolling');
  await page.locator('[data-reset-zoom]').tap();
  await until(async () => await stored(page, 'zoom') === null, 'a tap ends the zoom');
  equal(await page.locator('[data-reset-zoom]').count(), 0, 'buttons without a zoom');
  equal(await page.evaluate(() => document.activeElement.dataset.plot), 'curves',
    'focus after the zoom');
  equal(await page.locator('[data-say]').textContent(), 'Zoom reset', 'what is read aloud');
  equal(await stored(page, 'sel'), null, 'selection after drags');

  // A finger that taps moves a little, and one that only touches zooms nothing either.
  await finger.drag(await place(page, 'curves', 'curve'), 10, 0);
  await finger.drag(await place(page, 'curves', 'middle'), 20, 0);
  equal(await stored(page, 'zoom'), null, 'zoom after taps');
  equal(await boxes(page), 0, 'boxes after taps');
  // The second finger of a pinch ends the box of the first.
  await finger.down(await place(page, 'curves', 'middle'));
  await finger.move(60, 0);
  equal(await boxes(page), 1, 'boxes during a swipe');
  await finger.join(0, 60);
  equal(await boxes(page), 0, 'boxes during a pinch');
  await finger.up();
  equal(await stored(page, 'zoom'), null, 'zoom after a pinch');

  // Each metric of a trial has its own zoom.
  await visit(page, `${base()}/trials/${input.trial}`);
  await drawn(page, 'trial');
  const { x, y, width, height } = await page.locator('.panel .u-over').first().boundingBox();
  await finger.drag({ x: x + width / 4, y: y + height / 2 }, width / 2, 2);
  await page.locator('.panel-head [data-reset-zoom]').tap();
  await page.locator('[data-reset-zoom]').waitFor({ state: 'detached' });
}

/** A finger that rests on an axis brushes, one that moves at once scrolls. */
async function brushes(page, finger) {
  await visit(page, base());
  const all = await visible(page);
  const start = await place(page, 'parallel', 'axis');
  const before = await scrolled(page);
  await finger.drag(start, 0, -150);
  await until(async () => await scrolled(page) !== before, 'a finger scrolls over an axis');
  equal(await stored(page, 'brush'), null, 'brush after scrolling');

  const axis = await place(page, 'parallel', 'axis');
  await rest(page, finger, axis);
  await tooltip(page).getByText('Drag to brush').waitFor();
  await finger.up();
  await tooltip(page).waitFor({ state: 'hidden' });
  const still = await scrolled(page);
  await rest(page, finger, axis);
  await tooltip(page).getByText('Drag to brush').waitFor();
  await finger.move(0, 80);
  await finger.up();
  equal(await scrolled(page), still, 'scroll position after a brush');
  const brush = await stored(page, 'brush');
  const trials = inside(brush);
  check(trials.length < all.length, `the brush contains ${trials}`);
  await until(async () => String(await visible(page)) === String(trials),
    `the table shows the brushed trials ${trials}`);
  equal(await stored(page, 'sel'), null, 'selection after a brush');
  // A finger that rests without a drag keeps the brush.
  await rest(page, finger, axis);
  await finger.up();
  await tooltip(page).waitFor({ state: 'hidden' });
  equal(await stored(page, 'brush'), brush, 'brush after a rest');
  await page.locator('#parallel').getByText('Clear brush').tap();
  await until(async () => await stored(page, 'brush') === null, 'a tap clears the brush');

  const [first] = await page.evaluate(axes);
  await rest(page, finger, await place(page, 'parallel', 'name'));
  await tooltip(page).getByText('Drag to reorder').waitFor();
  await finger.move(300, 0);
  await finger.up();
  check((await page.evaluate(axes))[0] !== first, 'a finger does not move an axis');
}

/** Runs in the browser: returns the names of the axes. */
async function axes() {
  const { hosts } = await import('/assets/host.js');
  const host = [...hosts.values()].find((one) => one.kind === 'parallel');
  return host.plot.canvas.axes.map((axis) => axis.name);
}

async function sliders(page, finger) {
  await visit(page, base());
  await drawn(page, 'parallel');
  await page.locator('#parallel').getByText('Show sliders').tap();
  const slider = page.locator('.axis-sliders input[type=range]').first();
  await slider.scrollIntoViewIfNeeded();
  const { x, y, width, height } = await slider.boundingBox();
  check(height >= LEAST, `a slider is ${height} px high`);
  await finger.drag({ x: x + 8, y: y + height / 2 }, width / 2, 0);
  const trials = inside(await until(() => stored(page, 'brush'), 'a slider brushes'));
  await until(async () => String(await visible(page)) === String(trials),
    `the table shows the brushed trials ${trials}`);
  await page.locator('#parallel').getByText('Hide sliders').tap();
  await page.waitForFunction((one) => one.getBoundingClientRect().width <= 1,
    await page.$('.axis-sliders'));
}

/** Dots of ECharts, boxes of rows, menus, sort links and links of rows. */
async function others(page) {
  await visit(page, `${base()}/hyperparameters`);
  const dot = await place(page, 'scatter', 'scatter');
  await page.touchscreen.tap(dot.x, dot.y);
  await until(() => stored(page, 'sel'), 'a tap on a dot selects');

  await visit(page, `${base()}/trials`);
  await page.locator('input[data-select="0"]').tap();
  await until(async () => await stored(page, 'sel') === '0', 'a tap on a box selects');
  const menu = page.locator('summary', { hasText: 'Columns' });
  await menu.tap();
  await page.locator('.menu-box.checks').waitFor();
  await page.locator('h1').tap();
  await page.locator('.menu-box.checks').waitFor({ state: 'hidden' });
  await page.locator('[data-selection-clear]').tap();
  await until(async () => await stored(page, 'sel') === null, 'a tap clears the selection');
  await page.locator('#trials-table th a', { hasText: 'validation_loss' }).tap();
  await page.waitForURL(/sort=/);
  await page.locator('#trial-1 .trial-cell a').tap();
  await page.waitForURL(/\/trials\/1\b/);
}

/** A table follows changes after a tap on a row: no finger is there any more. */
async function follows(page) {
  await visit(page, '/experiments');
  await page.locator('#experiments-rows .phase-cell').first().tap();
  relabel('tapped');
  await page.locator('#experiments-rows tr', { hasText: 'tapped' }).waitFor();
}

await browse(async (open, context) => {
  await context.addInitScript(definePoints);
  await context.addInitScript(controlHolds, HOLD);
  const page = await open(base());
  check(await page.evaluate(() => matchMedia('(pointer: coarse)').matches), 'no touch screen');
  const finger = new Finger(await context.newCDPSession(page));
  await taps(page, finger);
  await rests(page, finger);
  await zooms(page, finger);
  await brushes(page, finger);
  await sliders(page, finger);
  await others(page);
  await follows(page);
  await targets(page);
  noFaults(page);
}, { hasTouch: true, viewport: TABLET });
