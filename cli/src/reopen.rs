//! `stoker experiment continue`: asks to continue trials that have ended.
//!
//! The request is a field of the experiment's spec. The operator, or the next `stoker run`, takes
//! it in once. This command only checks that the request has an effect, and says which.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::json;
use stoker_api::condition::{self, ConditionStatus};
use stoker_api::experiment::{DesiredState, Experiment, Phase, ReopenRequest, ReopenedTrials};
use stoker_api::trial::{CloseCause, DesiredTrialState, REOPENINGS_MAX};
use stoker_engine::experiment::{Ledger, Record, Refusal, Summary, validate_recorded};
use stoker_engine::search::SearchConfig;
use stoker_engine::search::book::TrialState;
use stoker_engine::trial::config::experiment_seed;
use stoker_engine::trial::{TrialRecord, num_reopenings};

use crate::cluster::connect::Cluster;
use crate::cluster::{self, experiment};
use crate::failure::Failure;
use crate::print::{self, Output};
use crate::run::record::Lock;
use crate::show::{RecordedRun, RunFiles};

/// Number of trials that a message lists.
const LISTED_MAX: usize = 16;
/// Next step of a local run.
const BY_NEXT_RUN: &str = "run `stoker run FILE` again to train them";
/// Next step on a cluster.
const ON_CLUSTER: &str = "the operator continues them";

/// A request, and the trials that it continues.
#[derive(Debug)]
struct Plan {
    name: String,
    request: ReopenRequest,
    trials: Vec<u32>,
    /// Those of `trials` without a checkpoint.
    from_scratch: Vec<u32>,
}

/// Continues trials of a local run. The next `stoker run` trains them.
pub(crate) fn continue_locally(
    root: Option<&str>,
    run: &RecordedRun,
    trials: ReopenedTrials,
    output: Output,
) -> Result<(), Failure> {
    request_locally(root, run, trials)?.print(BY_NEXT_RUN, output);
    Ok(())
}

/// Same as [`continue_locally`]. Returns the effect as a sentence.
pub(crate) fn continue_run(
    root: Option<&str>,
    run: &RecordedRun,
    trials: ReopenedTrials,
) -> Result<String, Failure> {
    Ok(request_locally(root, run, trials)?.lines(BY_NEXT_RUN).join("\n"))
}

/// Records the request to continue trials of a local run.
fn request_locally(
    root: Option<&str>,
    run: &RecordedRun,
    trials: ReopenedTrials,
) -> Result<Plan, Failure> {
    let files = RunFiles::of(root, run, "continue")?;
    let _lock = Lock::take(&files.lock)?;
    if !files.is_current()? {
        return Err(Failure::Input(format!(
            "cannot continue this run of `{}`: a later run with --fresh has replaced it",
            run.paths.name
        )));
    }
    let mut experiment = files.record.experiment()?.unwrap_or_else(|| run.experiment.clone());
    let plan = plan(&experiment, &files.record.trials()?, trials)?;
    experiment.spec.reopen = Some(plan.request);
    files.record.save_experiment(&experiment)?;
    Ok(plan)
}

/// Continues trials of an experiment on a cluster, and prints which.
pub(crate) async fn continue_on_cluster(
    cluster: &Cluster,
    name: &str,
    trials: ReopenedTrials,
    output: Output,
) -> Result<(), Failure> {
    let plan = request(cluster, name, None, trials).await?;
    plan.print(ON_CLUSTER, output);
    Ok(())
}

/// Continues trials of an experiment on a cluster, unless it has another UID. Returns the effect as
/// a sentence.
pub(crate) async fn continue_same(
    cluster: &Cluster,
    name: &str,
    uid: &str,
    trials: ReopenedTrials,
) -> Result<String, Failure> {
    let plan = request(cluster, name, Some(uid), trials).await?;
    Ok(plan.lines(ON_CLUSTER).join("\n"))
}

/// Sends the request to continue trials.
async fn request(
    cluster: &Cluster,
    name: &str,
    uid: Option<&str>,
    trials: ReopenedTrials,
) -> Result<Plan, Failure> {
    let experiment: Experiment = experiment::read_same(cluster, name, uid).await?;
    let records = experiment::trials(cluster, &experiment).await?.into_iter().map(|(trial, _)| {
        let status = trial.status.unwrap_or_default();
        (trial.spec.index, TrialRecord { spec: trial.spec, status })
    });
    let plan = plan(&experiment, &records.collect(), trials)?;
    experiment::patch_spec(cluster, &experiment, json!({ "reopen": plan.request })).await?;
    Ok(plan)
}

fn plan(
    experiment: &Experiment,
    trials: &BTreeMap<u32, TrialRecord>,
    selection: ReopenedTrials,
) -> Result<Plan, Failure> {
    let name = text(experiment.metadata.name.as_ref()).to_owned();
    let cannot =
        |why: String| Failure::Input(format!("cannot continue experiment `{name}`: {why}"));
    check(experiment).map_err(cannot)?;
    let ledger = ledger(experiment, trials).map_err(cannot)?;
    let summary = Summary::new(ledger.config(), trials.values());
    let crossed = ledger.crossed(&summary, cluster::text::now());
    if let Some(limit) = crossed.or_else(|| ledger.limit_reached().copied()) {
        let field = format!("spec.searcher.limits.{}", limit.limit.name());
        return Err(cannot(format!(
            "it has reached {field} ({}); raise or remove the limit, which also continues the \
             trials that it has stopped",
            limit.maximum
        )));
    }
    let reopened = ledger.reopenable(selection, |index| trials.get(&index));
    if reopened.is_empty() {
        return Err(cannot(nothing(&ledger, trials, selection)));
    }
    let has_none =
        |index: &u32| trials.get(index).is_some_and(|record| record.status.checkpoints.is_empty());
    let from_scratch = reopened.iter().copied().filter(has_none).collect();
    let number = experiment.spec.reopen.map_or(0, |request| request.number) + 1;
    let request = ReopenRequest { number, trials: selection };
    Ok(Plan { name, request, trials: reopened, from_scratch })
}

/// Returns the reason why an experiment cannot continue, if its own state prevents it.
fn check(experiment: &Experiment) -> Result<(), String> {
    let state = experiment.spec.state;
    let status = experiment.status.as_ref();
    if matches!(state, DesiredState::Cancelled | DesiredState::Killed) {
        let what = match status.map_or(Phase::Pending, |status| status.phase) {
            Phase::Completed => "it completed while it was being cancelled",
            Phase::Failed => "it failed while it was being cancelled",
            _ => "it was cancelled",
        };
        return Err(format!("{what}; create a new experiment"));
    }
    let refused = status.and_then(|status| condition::find(&status.conditions, "Refused"));
    let refused = refused.filter(|refused| refused.status == ConditionStatus::True);
    let is_failed = status.is_some_and(|status| status.phase == Phase::Failed);
    if let Some(refused) = refused.filter(|_| is_failed) {
        let (reason, message) = (refused.reason.clone(), refused.message.clone());
        let refusal = Refusal { reason, message };
        if refusal.is_final() {
            let Refusal { reason, message } = refusal;
            return Err(format!(
                "its objects are malformed ({reason}: {message}); create a new experiment"
            ));
        }
    }
    Ok(())
}

/// Rebuilds the search, with all facts that its runner has not taken in.
fn ledger(experiment: &Experiment, trials: &BTreeMap<u32, TrialRecord>) -> Result<Ledger, String> {
    let name = text(experiment.metadata.name.as_ref());
    let (spec, status) = (&experiment.spec, experiment.status.as_ref());
    let valid = validate_recorded(name, spec, status).map_err(|errors| {
        let errors: Vec<String> = errors.iter().map(ToString::to_string).collect();
        format!("its spec is invalid: {}", errors.join("; "))
    })?;
    let uid = text(experiment.metadata.uid.as_ref());
    let config = SearchConfig::new(&valid, experiment_seed(&valid, uid));
    let status = experiment.status.clone().unwrap_or_default();
    let by_index = trials.iter().map(|(index, record)| (*index, record)).collect();
    let record =
        Record { log: &status.log, trials: &by_index, trials_created: status.trials_created };
    let (mut ledger, _) = Ledger::rebuild(&config, record)
        .map_err(|error| format!("cannot read the record: {error}"))?;
    for fact in ledger.pending(trials.values()) {
        ledger.advance(&fact);
    }
    Ok(ledger)
}

/// Returns why a request would continue no trial.
fn nothing(
    ledger: &Ledger,
    trials: &BTreeMap<u32, TrialRecord>,
    selection: ReopenedTrials,
) -> String {
    let num = |of| ledger.reopenable(of, |index| trials.get(&index)).len();
    match selection {
        ReopenedTrials::Failed => no_failed(ledger, trials),
        ReopenedTrials::Stopped => {
            let failed = match num(ReopenedTrials::Failed) {
                0 => String::new(),
                num => format!("; add --failed to continue the {num} that failed"),
            };
            format!("no trial ended by itself before its granted length{failed}")
        }
    }
}

/// Returns why no trial that failed can continue.
fn no_failed(ledger: &Ledger, trials: &BTreeMap<u32, TrialRecord>) -> String {
    let has_failed =
        |index: u32| ledger.state(index) == Some(TrialState::Closed(CloseCause::Failed));
    let failed: Vec<u32> = trials.keys().copied().filter(|index| has_failed(*index)).collect();
    if failed.is_empty() {
        return "no trial has failed".to_owned();
    }
    let why = |record: &TrialRecord| match record.spec.desired_state {
        DesiredTrialState::Kill => "killed trials stay ended".to_owned(),
        _ if num_reopenings(record) >= REOPENINGS_MAX => {
            format!("a trial continues at most {REOPENINGS_MAX} times")
        }
        _ => "the search proceeds without them".to_owned(),
    };
    let records = failed.iter().filter_map(|index| trials.get(index));
    let reasons: Vec<String> = records.map(why).collect::<BTreeSet<_>>().into_iter().collect();
    format!(
        "{} failed, but {}; to repeat the training, create a new experiment with the same \
         hyperparameters",
        list(&failed),
        reasons.join(", and ")
    )
}

impl Plan {
    fn print(&self, next: &str, output: Output) {
        if output == Output::Json {
            let Self { name, request, trials, from_scratch } = self;
            return print::out(json!({
                "experiment": name, "request": request.number, "reopened": trials,
                "fromScratch": from_scratch,
            }));
        }
        self.lines(next).into_iter().for_each(print::out);
    }

    /// Returns which trials continue, and which of them from scratch.
    fn lines(&self, next: &str) -> Vec<String> {
        let Self { name, trials, from_scratch, .. } = self;
        let mut lines = vec![format!("experiment {name}: {} reopened; {next}", list(trials))];
        if !from_scratch.is_empty() {
            let listed = list(from_scratch);
            lines.push(format!("training from scratch, without a checkpoint: {listed}"));
        }
        lines
    }
}

fn list(trials: &[u32]) -> String {
    cluster::text::trials(trials, LISTED_MAX)
}

fn text(text: Option<&String>) -> &str {
    text.map_or("", String::as_str)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::explain::tests::record;

    #[test]
    fn cancellation_that_came_too_late_is_named() {
        let (mut experiment, _) = record();
        experiment.spec.state = DesiredState::Cancelled;
        let mut check_phase = |phase: Phase, expected: &str| {
            experiment.status.get_or_insert_default().phase = phase;
            let expected = format!("{expected}; create a new experiment");
            assert_eq!(check(&experiment), Err(expected), "{phase:?}");
        };
        check_phase(Phase::Running, "it was cancelled");
        check_phase(Phase::Cancelled, "it was cancelled");
        check_phase(Phase::Completed, "it completed while it was being cancelled");
        check_phase(Phase::Failed, "it failed while it was being cancelled");
    }

    #[test]
    fn invalid_edit_does_not_prevent_a_request() {
        let (mut experiment, trials) = record();
        let trials: BTreeMap<u32, TrialRecord> =
            trials.into_iter().map(|record| (record.spec.index, record)).collect();
        experiment.spec.searcher.async_halving.as_mut().unwrap().max_trials = 0;
        let ledger = ledger(&experiment, &trials).unwrap();
        assert_eq!(ledger.config().settings().max_trials, Some(5));
    }

    #[test]
    fn killed_trials_that_failed_stay_ended() {
        let (experiment, trials) = record();
        let mut trials: BTreeMap<u32, TrialRecord> =
            trials.into_iter().map(|record| (record.spec.index, record)).collect();
        let trial = trials.get_mut(&1).unwrap();
        let closed = json!({ "closed": { "cause": "Failed" } });
        trial.status.facts.push(serde_json::from_value(closed).unwrap());
        let reopened = plan(&experiment, &trials, ReopenedTrials::Failed).unwrap().trials;
        assert_eq!(reopened, [1]);
        trials.get_mut(&1).unwrap().spec.desired_state = DesiredTrialState::Kill;
        let error = plan(&experiment, &trials, ReopenedTrials::Failed).unwrap_err().to_string();
        let why = "trial 1 failed, but killed trials stay ended; to repeat the training, create \
                   a new experiment with the same hyperparameters";
        assert_eq!(error, format!("cannot continue experiment `mnist`: {why}"));
    }
}
