//! Bound on the indexes in a record. Each index costs memory, also if the record lacks its trial.

use stoker_api::decisions::{LogEvent, StepRecord};
use stoker_api::validate::TRIALS_MAX;

use crate::experiment::{Record, Unreadable, recorded};

/// Checks that at most [`TRIALS_MAX`] trials can be missing in a record. A search creates no more,
/// except in place of trials that rejected their hyperparameters.
///
/// # Errors
///
/// [`Unreadable`] names the greatest index.
pub(super) fn check_indices(record: Record<'_>) -> Result<(), Unreadable> {
    let (mut num_known, mut greatest) = (record.trials.len(), Mention::CREATED);
    greatest.next = record.trials_created;
    for (index, trial) in record.trials {
        greatest.raise(Some(*index), Some(*index), "spec.index");
        for steps in trial.spec.grants.iter().filter_map(|grant| grant.steps.as_deref()) {
            num_known += steps.len();
            greatest.raise(mentioned(steps), Some(*index), "spec.grants");
        }
    }
    for entry in record.log {
        num_known += entry.steps.len();
        greatest.raise(mentioned(&entry.steps), None, "status.log");
        if let LogEvent::Deleted(event) = &entry.event {
            num_known += event.trials.len();
            let last = event.trials.iter().map(|trial| trial.index).max();
            greatest.raise(last, None, "status.log");
        }
    }
    if u64::from(greatest.next) <= num_known as u64 + u64::from(TRIALS_MAX) {
        return Ok(());
    }
    Err(Unreadable {
        object: greatest
            .trial
            .map_or("the experiment".to_owned(), |trial| format!("trial {trial}")),
        field: greatest.field.to_owned(),
        reason: format!(
            "implies {} trials, of which only {num_known} are recorded, but a search creates at \
             most {TRIALS_MAX}; restore the field",
            greatest.next
        ),
    })
}

/// Returns the greatest index in the steps of a turn.
fn mentioned(steps: &[StepRecord]) -> Option<u32> {
    let created = steps.iter().filter_map(|step| match step {
        StepRecord::Create(create) => Some(create.trial),
        _ => None,
    });
    created.chain(recorded::last_mentioned(steps)).max()
}

/// The greatest index so far, and the field that contains it.
struct Mention {
    /// One more than the index.
    next: u32,
    /// Trial whose field it is; unset for a field of the experiment.
    trial: Option<u32>,
    field: &'static str,
}

impl Mention {
    /// Number of trials of an experiment.
    const CREATED: Self = Self { next: 0, trial: None, field: "status.trialsCreated" };

    fn raise(&mut self, index: Option<u32>, trial: Option<u32>, field: &'static str) {
        let Some(index) = index else { return };
        let next = index.saturating_add(1);
        if next > self.next {
            *self = Self { next, trial, field };
        }
    }
}
