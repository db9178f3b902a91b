//! Trials of earlier experiments from which a search learns.

use stoker_api::decisions::PriorTrial;
use stoker_api::validate::ValidExperiment;
use stoker_engine::experiment::{PriorExperiment, Refusal};

use super::apply::trials_of;
use crate::cache::Key;
use crate::context::Context;

/// Returns the trials of the experiments that `spec.searcher.priorTrials` names, from the cache.
///
/// # Errors
///
/// An experiment does not exist, has not ended, or has another metric. The search does not begin
/// until this changes.
pub(super) fn prior_trials(
    context: &Context,
    namespace: &str,
    valid: &ValidExperiment,
) -> Result<Vec<PriorTrial>, Refusal> {
    let Some(spec) = &valid.spec.searcher.prior_trials else { return Ok(vec![]) };
    let refusal = |message| Refusal { reason: "PriorTrials".to_owned(), message };
    let mut found = vec![];
    for (i, name) in spec.experiments.iter().enumerate() {
        let key = Key::new(namespace, name);
        let cached = context.experiments.get(&key);
        let Some(experiment) = cached.as_ref().and_then(|cached| cached.experiment()) else {
            return Err(refusal(format!(
                "spec.searcher.priorTrials.experiments[{i}] is `{name}`: namespace {namespace} has \
                 no such experiment; create it, or create this experiment without the name"
            )));
        };
        let phase = experiment.status.as_ref().map(|status| status.phase).unwrap_or_default();
        if !phase.is_terminal() {
            return Err(refusal(format!(
                "spec.searcher.priorTrials.experiments[{i}] is `{name}`, which is {phase:?}; the \
                 search begins when it has ended"
            )));
        }
        let uid = experiment.metadata.uid.as_deref().unwrap_or_default();
        found.push((experiment.spec.searcher.clone(), trials_of(context, &key, uid)));
    }
    let experiments = spec.experiments.iter().zip(&found).map(|(name, (searcher, trials))| {
        let readable = trials.iter().filter(|trial| trial.unreadable.is_none());
        PriorExperiment { name, searcher, trials: readable.map(|trial| &trial.record).collect() }
    });
    let experiments: Vec<_> = experiments.collect();
    stoker_engine::experiment::prior_trials(valid, &experiments).map_err(refusal)
}
