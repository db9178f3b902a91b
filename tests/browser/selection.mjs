// Selection and brush: one state for plots, table, links and URL.

import { base, browse, check, drawn, equal, follow, input, noFaults, query, record, reload, until,
  visit } from './page.mjs';

const PLOTS = ['curves', 'ladder', 'parallel'];

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
  const text = query(page, 'brush');
  const [, name, low, high] = (text || '').match(/^(\w+):([^.]+(?:\.\d+)?)\.\.(.+)$/) || [];
  check(name && +low < +high, `the brush in the URL is ${text}`);
  const inside = [...record()].filter(([, { spec }]) =>
    spec.hyperparameters[name] >= +low && spec.hyperparameters[name] <= +high);
  return inside.map(([index]) => index).sort((a, b) => a - b);
}

await browse(async (open) => {
  const page = await open(base());
  const all = await visible(page);
  equal(all.length, record().size, 'rows of the table');
  await select(page);
  const inside = await brush(page);
  check(inside.length > 0 && inside.length < all.length, `the brush contains ${inside}`);
  await until(async () => String(await visible(page)) === String(inside),
    `the table shows the brushed trials ${inside}`);

  await reload(page);
  await until(async () => String(await visible(page)) === String(inside),
    'a reload keeps the brush');
  equal(await selected(page), [input.trial], 'selected rows after a reload');
  await follow(page, page.locator('a[data-tab]', { hasText: 'Trials' }));
  await page.waitForURL(/\/trials\?/);
  await until(async () => String(await visible(page)) === String(inside),
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
