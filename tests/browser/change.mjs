// Changes of a local run's record, as its runner would make them.

import { readFileSync, renameSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';

import { input } from './page.mjs';

/** Replaces the experiment of a record by `edit(experiment)`, in one step. */
export function change(edit, id = input.id) {
  const path = join(input.root, 'local', id, 'record/experiment.json');
  const experiment = JSON.parse(readFileSync(path, 'utf8'));
  edit(experiment);
  writeFileSync(`${path}.new`, JSON.stringify(experiment));
  renameSync(`${path}.new`, path);
}

/** Changes the labels of a run, which the list shows. */
export const relabel = (...labels) => change(({ spec }) => { spec.labels = labels; });
