// axe finds no serious or critical fault: wide and light, narrow and dark.

import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { NARROW, WIDE, browse, check, drawn, input, scripts, visit } from './page.mjs';
import { views } from './list.mjs';

const source = readFileSync(join(input.tools, 'node_modules/axe-core/axe.min.js'), 'utf8');

/** Returns serious and critical faults, one line for each rule. */
async function faults(page, what) {
  const found = await page.evaluate(async () => {
    const { violations } = await window.axe.run(document, { resultTypes: ['violations'] });
    return violations.map(({ id, impact, nodes }) => ({ id, impact, num: nodes.length,
      html: nodes[0].html.slice(0, 200), why: nodes[0].failureSummary.slice(0, 300) }));
  });
  return found.filter(({ impact }) => impact === 'serious' || impact === 'critical')
    .map(({ id, num, html, why }) => `${what}: ${id} (${num} elements)\n    ${html}\n    ${why}`);
}

await browse(async (open) => {
  const page = await open();
  await scripts(page);
  const all = [];
  for (const view of views()) {
    for (const [size, colorScheme] of [[WIDE, 'light'], [NARROW, 'dark']]) {
      await page.setViewportSize(size);
      await page.emulateMedia({ colorScheme });
      await visit(page, view.path);
      await page.waitForSelector(view.has);
      for (const plot of view.plots) await drawn(page, plot);
      // The content policy allows no script element; `evaluate` needs none.
      await page.evaluate(source);
      all.push(...await faults(page, `${view.name}, ${size.width} px, ${colorScheme}`));
    }
  }
  check(all.length === 0, `axe finds ${all.length} faults:\n  ${all.join('\n  ')}`);
});
