// Faults that axe finds in a page.

import { readFileSync } from 'node:fs';
import { join } from 'node:path';

import { check, input } from './page.mjs';

const source = readFileSync(join(input.tools, 'node_modules/axe-core/axe.min.js'), 'utf8');

/** Returns serious and critical faults, a text for each rule. */
export async function faultsOf(page, what) {
  // The content policy allows no script element; `evaluate` needs none.
  await page.evaluate(source);
  const found = await page.evaluate(async () => {
    const { violations } = await window.axe.run(document, { resultTypes: ['violations'] });
    return violations.map(({ id, impact, nodes }) => ({ id, impact, num: nodes.length,
      html: nodes[0].html.slice(0, 200), why: nodes[0].failureSummary.slice(0, 300) }));
  });
  return found.filter(({ impact }) => impact === 'serious' || impact === 'critical')
    .map(({ id, num, html, why }) => `${what}: ${id} (${num} elements)\n    ${html}\n    ${why}`);
}

export const noneOf = (faults) =>
  check(faults.length === 0, `axe finds ${faults.length} faults:\n  ${faults.join('\n  ')}`);
