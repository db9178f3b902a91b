// Selection and brush: one state for plots, table, links and URL.

import { base, browse, check, drawn, equal, follow, input, inside, noFaults, query, record,
  reload, until, visit } from './page.mjs';

const PLOTS = ['curves', 'ladder', 'parallel'];

const BOUNDS = [['rate:..0.01', [0]], ['rate:0.01..', [1, 2, 3]], ['rate:..0.0001', [0]],
  ['rate:0.0123456..0.0123456', [1]], ['loss:mse', [0, 2, 3]], ['@loss:4..', [3]],
  ['rate:0.0001..0.01235', [0, 1, 2]]];

const visible = (page) => page.$$eval('#trials-table tr[data-trial]', (rows) =>
  rows.filter((row) => !row.hidden).map((row) => +row.dataset.trial).sort((a, b) => a - b));

const selected = (page) => page.$$eval('#trials-table tr.is-selected', (rows) =>
  rows.map((row) => +row.dataset.trial));

/** Returns what the plots show now. */
async function drawings(page) {
  const all = [];
  for (const name of PLOTS) {
    await drawn(page, name);
    all.push(await page.$$eval(`[data-plot=${name}] canvas`, (list) =>
      list.map((canvas) => canvas.toDataURL()).join()));
  }
  return all;
}

async function select(page) {
  const before = await drawings(page);
  await page.locator(`input[data-select="${input.trial}"]`).click();
  await until(() => query(page, 'sel') === String(input.trial), 'the URL holds the selection');
  equal(await selected(page), [input.trial], 'selected rows');
  await until(async () => {
    const after = await drawings(page);
    return after.every((one, i) => one !== before[i]);
  }, `a selected trial changes the plots ${PLOTS}`);
}

/** Drags along the first axis, and returns the trials of the record that the brush contains. */
async function brush(page) {
  const plot = page.locator('[data-plot=parallel]');
  await plot.scrollIntoViewIfNeeded();
  const { x, y, height } = await plot.boundingBox();
  const [axis, top, length] = [x + 48, y + 46, height - 80];
  await page.mouse.move(axis, top + 0.08 * length);
  await page.mouse.down();
  await page.mouse.move(axis, top + 0.3 * length, { steps: 3 });
  await page.mouse.move(axis, top + 0.55 * length, { steps: 3 });
  await page.mouse.up();
  // The URL follows the brush with a delay. If the mouse moved slowly, it still holds a part.
  await page.evaluate(async () => (await import('/assets/state.js')).state.flush());
  return inside(query(page, 'brush'));
}

/** Runs in the browser: returns the text of brushes, and the trials that each contains. */
async function bounds() {
  const [{ Experiment }, { formatBrush, parseBrush }] = await Promise.all(['data', 'state']
    .map((name) => import(`/assets/${name}.js`)));
  const data = new Experiment({ metric: 'loss', smallerIsBetter: true, hyperparameters: [
    { name: 'rate', scale: 'log', min: 0.0001, max: 0.1 },
    { name: 'loss', scale: 'category', values: ['mse', 'huber'] }],
  trials: { index: [0, 1, 2, 3], value: [0.1, 0.2, 0.3, 9],
    hp: { rate: [0.0001, 0.0123456, 0.0123457, 0.1], loss: ['mse', 'huber', 'mse', 'mse'] } } });
  const [rate] = data.axes;
  const brushes = [{ rate: { ...rate.between(0, 0.5), max: 0.01 } },
    { rate: { ...rate.between(0.5, 1), min: 0.01 } }, { rate: rate.between(0, 0) },
    { rate: { min: 0.0123456, max: 0.0123456 } }, { loss: { values: ['mse'] } },
    { [data.resultAxis.key]: { ...data.resultAxis.between(0.5, 1), min: 4 } }];
  // Links of earlier versions have bounds of four digits.
  const links = ['rate:0.0001..0.01235'];
  return [...brushes.map(formatBrush), ...links].map((text) => {
    const { mask } = data.brushed(parseBrush(text));
    return [text, [...mask.keys()].filter((row) => mask[row])];
  });
}

await browse(async (open) => {
  const page = await open(base());
  const all = await visible(page);
  equal(all.length, record().size, 'rows of the table');
  equal(await page.evaluate(bounds), BOUNDS, 'brushes');
  await select(page);
  const brushed = await brush(page);
  check(brushed.length > 0 && brushed.length < all.length, `the brush contains ${brushed}`);
  await until(async () => String(await visible(page)) === String(brushed),
    `the table shows the brushed trials ${brushed}`);

  await reload(page);
  await until(async () => String(await visible(page)) === String(brushed),
    'a reload keeps the brush');
  equal(await selected(page), [input.trial], 'selected rows after a reload');
  await follow(page, page.locator('a[data-tab]', { hasText: 'Trials' }));
  await page.waitForURL(/\/trials\?/);
  await until(async () => String(await visible(page)) === String(brushed),
    'the tab Trials keeps the brush');
  equal(await selected(page), [input.trial], 'selected rows in the tab Trials');

  await page.keyboard.press('Escape');
  await until(() => query(page, 'sel') === null, 'Esc clears the selection');
  check(query(page, 'brush') !== null, 'the first Esc keeps the brush');
  await page.keyboard.press('Escape');
  await until(() => query(page, 'brush') === null, 'the second Esc clears the brush');
  equal(await visible(page), all, 'rows after Esc');
  equal(await selected(page), [], 'selected rows after Esc');

  await visit(page, `${base()}?sel=0,1`);
  await follow(page, page.locator('[data-compare]'));
  await page.waitForURL(/\/compare\?t=0,1$/);
  noFaults(page);
});
