//! Steps and events in the form in which they are recorded.

use stoker_api::decisions::{
    CreateStep, FinishStep, LengthStep, ReopenStep, StepRecord, StopAllStep, StopPausedStep,
    TrialStep,
};
use stoker_api::number;
use stoker_api::trial::{Fact, ResultCheckpoint, ResultFact, TrialSource};

use crate::search::SearchConfig;
use crate::search::rung::Loss;
use crate::search::turn::{Event, Source, Step};

/// Returns the record of the steps of a turn. New trials have the indexes from `next` on. Their
/// hyperparameters are in their own records. `source_of` returns the sources of copies.
pub(super) fn record_all(
    steps: &[Step],
    mut next: u32,
    source_of: impl Fn(u32) -> Option<TrialSource>,
) -> Vec<StepRecord> {
    let mut records = vec![];
    for step in steps {
        records.push(record(step, next, &source_of));
        next += u32::from(matches!(step, Step::Create { .. }));
    }
    records
}

fn record(step: &Step, next: u32, source_of: &impl Fn(u32) -> Option<TrialSource>) -> StepRecord {
    match step {
        Step::Create { group, units, .. } => StepRecord::Create(CreateStep {
            trial: next,
            group: *group,
            units: *units,
            source: source_of(next),
        }),
        Step::Continue { trial, units } => {
            StepRecord::Continue(LengthStep { trial: *trial, units: *units })
        }
        Step::PromoteClosed { trial, units } => {
            StepRecord::PromoteClosed(LengthStep { trial: *trial, units: *units })
        }
        Step::Pause { trial } => StepRecord::Pause(TrialStep { trial: *trial }),
        Step::Stop { trial } => StepRecord::Stop(TrialStep { trial: *trial }),
        Step::StopPaused { group, units, except } => StepRecord::StopPaused(StopPausedStep {
            group: *group,
            units: *units,
            except: except.clone(),
        }),
        Step::StopAll => StepRecord::StopAll(StopAllStep {}),
        Step::Reopen { trials } => StepRecord::Reopen(ReopenStep { trials: trials.clone() }),
        Step::Finish => StepRecord::Finish(FinishStep {}),
    }
}

/// Returns the size of a recorded step in bytes of JSON, without the source of a copy. A new trial
/// has the index `next`.
pub(super) fn num_bytes(of: &Step, next: u32) -> usize {
    let json = serde_json::to_string(&record(of, next, &|_| None));
    // The comma after it counts too.
    json.map_or(0, |json| json.len() + 1)
}

/// Returns a recorded step.
pub(super) fn step(record: &StepRecord) -> Step {
    match record {
        StepRecord::Create(CreateStep { group, units, source, .. }) => {
            create(*group, *units, source.as_ref())
        }
        StepRecord::Continue(LengthStep { trial, units }) => {
            Step::Continue { trial: *trial, units: *units }
        }
        StepRecord::PromoteClosed(LengthStep { trial, units }) => {
            Step::PromoteClosed { trial: *trial, units: *units }
        }
        StepRecord::Pause(TrialStep { trial }) => Step::Pause { trial: *trial },
        StepRecord::Stop(TrialStep { trial }) => Step::Stop { trial: *trial },
        StepRecord::StopPaused(StopPausedStep { group, units, except }) => {
            Step::StopPaused { group: *group, units: *units, except: except.clone() }
        }
        StepRecord::StopAll(StopAllStep {}) => Step::StopAll,
        StepRecord::Reopen(ReopenStep { trials }) => Step::Reopen { trials: trials.clone() },
        StepRecord::Finish(FinishStep {}) => Step::Finish,
    }
}

/// Returns the index of the first trial that the steps create.
pub(super) fn first_created(steps: &[StepRecord]) -> Option<u32> {
    steps.iter().find_map(|step| match step {
        StepRecord::Create(create) => Some(create.trial),
        _ => None,
    })
}

/// Returns the creation of a trial.
pub(super) fn create(group: u32, units: u64, source: Option<&TrialSource>) -> Step {
    let source = source.map(|source| Source { trial: source.trial, units: source.units });
    Step::Create { group, units, source, hyperparameters: None }
}

/// Returns the sources of the copies that the steps create, by copy.
pub(super) fn sources(steps: &[StepRecord]) -> impl Iterator<Item = (u32, TrialSource)> {
    steps.iter().filter_map(|step| match step {
        StepRecord::Create(create) => Some((create.trial, create.source.clone()?)),
        _ => None,
    })
}

/// Returns the checkpoint of a result.
pub(super) fn checkpoint(fact: &Fact) -> Option<&ResultCheckpoint> {
    match fact {
        Fact::Result(result) => result.checkpoint.as_ref(),
        Fact::Closed(_) | Fact::Reopened(_) => None,
    }
}

/// Returns the greatest index of a trial that exists before these steps.
pub(super) fn last_mentioned(steps: &[StepRecord]) -> Option<u32> {
    let mentioned = steps.iter().filter_map(|step| match step {
        StepRecord::Continue(step) | StepRecord::PromoteClosed(step) => Some(step.trial),
        StepRecord::Pause(step) | StepRecord::Stop(step) => Some(step.trial),
        StepRecord::Create(create) => create.trial.checked_sub(1),
        StepRecord::Reopen(reopen) => reopen.trials.iter().copied().max(),
        StepRecord::StopPaused(_) | StepRecord::StopAll(_) | StepRecord::Finish(_) => None,
    });
    let first = first_created(steps).unwrap_or(u32::MAX);
    mentioned.filter(|trial| *trial < first).max()
}

/// Returns the event of a trial's fact; `None` if nothing follows from it: the search itself has
/// reopened the trial.
pub(super) fn event(trial: u32, fact: &Fact, config: &SearchConfig) -> Option<Event> {
    match fact {
        Fact::Result(result) => {
            let losses = losses(result, config);
            let (loss, others) = (losses[0], losses[1..].to_vec());
            Some(Event::Result { trial, units: result.units, loss, others })
        }
        Fact::Closed(closed) => Some(Event::Closed { trial, cause: closed.cause }),
        Fact::Reopened(_) => None,
    }
}

/// Returns the losses of all objectives, the searched metric first.
pub(super) fn losses(result: &ResultFact, config: &SearchConfig) -> Vec<Loss> {
    let loss = |value: Option<&String>, smaller_is_better: bool| {
        let metric = value.and_then(|value| number::parse(value)).unwrap_or(f64::NAN);
        Loss::of_metric(metric, smaller_is_better)
    };
    let first = loss(Some(&result.metric), config.smaller_is_better);
    let others = config.other_objectives.iter().enumerate();
    let others = others.map(|(i, of)| loss(result.values.get(i), of.smaller_is_better));
    std::iter::once(first).chain(others).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn steps_mention_trials_that_existed_before() {
        let check = |steps: Value, expected: Option<u32>| {
            let steps: Vec<StepRecord> = serde_json::from_value(steps).unwrap();
            assert_eq!(last_mentioned(&steps), expected, "{steps:?}");
        };
        let create = |trial: u32| json!({ "create": { "trial": trial, "group": 0, "units": 3 } });
        let step = |name: &str, trial: u32| json!({ name: { "trial": trial } });
        let to = |name: &str, trial: u32| json!({ name: { "trial": trial, "units": 9 } });
        check(json!([{ "finish": {} }]), None);
        check(json!([create(0), create(1)]), None);
        check(json!([step("stop", 1), create(4)]), Some(3));
        check(json!([to("continue", 4), step("pause", 2)]), Some(4));
        check(json!([to("promoteClosed", 6)]), Some(6));
        check(json!([{ "reopen": { "trials": [1, 5] } }]), Some(5));
        // A trial that these steps create does not count.
        check(json!([create(2), create(3), to("continue", 3)]), Some(1));
    }
}
