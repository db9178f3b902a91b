// All views of a search, with the plots that each must draw.

import { base, input, namespace } from './page.mjs';

/** Views: {path, plots, text}. `text` is a selector of what the view must contain. */
export function views() {
  const of = base();
  const { trial, checkpoint, other } = input;
  const isCluster = 'token' in input;
  const at = `${of}/trials/${trial}`;
  return [
    { name: 'list', path: '/experiments', plots: [], has: '#experiments-rows tr' },
    { name: 'overview', path: of, plots: ['curves', 'ladder', 'parallel'],
      has: '#trials-rows tr' },
    { name: 'trials', path: `${of}/trials`, plots: [], has: '#trials-rows tr' },
    { name: 'rungs', path: `${of}/rungs`, plots: ['ladder'], has: '#all-rungs tbody tr' },
    { name: 'hyperparameters', path: `${of}/hyperparameters`,
      plots: ['parallel', 'scatter', 'heatmap', 'history', 'edf', 'timeline'], has: 'h2' },
    { name: 'checkpoints', path: `${of}/checkpoints`, plots: [], has: 'main tbody tr' },
    { name: 'configuration', path: `${of}/configuration`, plots: [], has: '.card pre' },
    { name: 'events', path: `${of}/events`, plots: [], has: 'main tbody tr' },
    { name: 'logs', path: `${of}/logs?trial=${trial}`, plots: [], has: '[data-logs] *' },
    { name: 'trial', path: at, plots: ['trial'], has: '#attempts tbody tr' },
    { name: 'trial metrics', path: `${at}/metrics`, plots: ['trial'], has: 'h1' },
    { name: 'trial attempts', path: `${at}/attempts`, plots: [], has: '#attempts tbody tr' },
    { name: 'trial logs', path: `${at}/logs`, plots: [], has: '[data-logs] *' },
    { name: 'trial checkpoints', path: `${at}/checkpoints`, plots: [], has: 'main tbody tr' },
    // The example takes no samples, so the view has a sentence instead of plots.
    { name: 'trial profiler', path: `${at}/profiler`, plots: [], has: '.plot-empty' },
    { name: 'trial configuration', path: `${at}/configuration`, plots: [], has: '.card pre' },
    { name: 'checkpoint', path: `${at}/checkpoints/${checkpoint}`, plots: [],
      has: 'main tbody tr a[download]' },
    { name: 'compare', path: `/compare?e=${namespace}/${input.id}&e=${namespace}/${other}`,
      plots: ['compare'], has: '#differences tbody tr' },
    { name: 'compare trials', path: `${of}/compare?t=${trial},0,1`, plots: ['curves'],
      has: '#differences tbody tr' },
    { name: 'jobs', path: '/jobs', plots: [], has: isCluster ? 'h1' : 'main p' },
    { name: 'cluster', path: '/cluster', plots: [], has: isCluster ? '#nodes' : 'main p' },
  ];
}

/** Views of a random search that runs: it has no rungs, and is compared with no other one. */
export const runningViews = () => views()
  .filter(({ name }) => !['rungs', 'compare'].includes(name))
  .map((view) => ({ ...view, plots: view.plots.filter((plot) => plot !== 'ladder') }));
