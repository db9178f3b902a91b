// The page can be used with the keyboard alone.

import { base, browse, check, equal, noFaults, query, until, visit } from './page.mjs';

const focused = (page) => page.evaluate(() => {
  const { activeElement } = document;
  return activeElement.id || Object.keys(activeElement.dataset)[0] || activeElement.tagName;
});

await browse(async (open) => {
  const page = await open(base());
  const press = async (...keys) => {
    for (const key of keys) await page.keyboard.press(key);
  };
  const rows = await page.$$eval('#trials-table tr[data-trial]', (list) =>
    list.map((row) => row.id));

  await press('/');
  equal(await focused(page), 'goto', 'focus after /');
  await press('Escape', 'f');
  equal(await focused(page), 'filter', 'focus after f');
  await page.keyboard.type('xjkc?t');
  equal(await page.inputValue('[data-filter]'), 'xjkc?t', 'letters in a field');
  equal(await page.locator('dialog[open]').count(), 0, 'dialogs after letters in a field');
  await page.fill('[data-filter]', '');
  await press('Escape', 'j');
  equal(await focused(page), rows[0], 'focus after j');
  await press('j', 'j', 'k');
  equal(await focused(page), rows[1], 'focus after j j k');
  await press('x', 'j', 'x');
  const chosen = rows.slice(1, 3).map((id) => id.replace('trial-', ''));
  await until(() => query(page, 'sel') === chosen.join(), `x selects the trials ${chosen}`);
  await press('c');
  await page.waitForURL(/\/compare\?t=/);
  equal(query(page, 't'), chosen.join(), 'compared trials after c');

  await visit(page, base());
  await press('?');
  await page.waitForSelector('dialog[open]');
  await press('Escape');
  await page.waitForSelector('dialog', { state: 'hidden' });
  const theme = () => page.evaluate(() => getComputedStyle(document.documentElement)
    .backgroundColor);
  const light = await theme();
  await press('t');
  check(light !== await theme(), 't does not change the theme');
  await press('t');
  equal(await theme(), light, 'theme after t t');
  await press('j', 'Enter');
  await page.waitForURL(new RegExp(`/trials/${rows[0].replace('trial-', '')}$`));
  await press('4');
  await page.waitForURL(/\/trials\/\d+\/\w+$/);

  // Buttons that hide themselves do not lose the focus.
  await visit(page, `${base()}?brush=learning_rate:0.0001..1&sel=0`);
  const clear = page.locator('#parallel').getByText('Clear brush');
  await clear.focus();
  await press('Enter');
  await clear.waitFor({ state: 'detached' });
  check(await page.evaluate(() => document.activeElement !== document.body
    && document.querySelector('#parallel').contains(document.activeElement)),
  'the focus leaves the parallel coordinates');
  await page.locator('[data-selection-clear]').focus();
  await press('Enter');
  await until(async () => await focused(page) === 'filter', 'Clear passes the focus on');

  await visit(page, '/experiments');
  await press('j', 'x', 'j', 'x', 'c');
  await page.waitForURL(/\/compare\?e=.*&e=/);
  await visit(page, '/experiments');
  await press('j', 'Enter');
  await page.waitForURL(/\/experiments\/default\//);
  noFaults(page);
});
