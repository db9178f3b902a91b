//! Programs of simulated trials.

use stoker_api::contract::Directive;
use stoker_api::trial::AttemptEnd;

use super::{LIMITS, Runner};
use crate::fixture::{LOSS, report, validated};
use crate::trial::{
    ReportEffect, TargetState, TrialRecord, directive, end_attempt, live_attempt, num_reopenings,
    record_report,
};

/// Behavior of a trial's program. It depends only on the trial's seed, so it is the same in every
/// interleaving. A program that was continued after its end trains: its error was removed.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Program {
    Trains,
    StopsItself,
    EndsUntrained,
    RefusesHyperparameters,
    Fails,
}

fn program(record: &TrialRecord) -> Program {
    if num_reopenings(record) > 0 {
        return Program::Trains;
    }
    match record.spec.seed % 16 {
        0 => Program::StopsItself,
        1 => Program::RefusesHyperparameters,
        2 => Program::Fails,
        3 => Program::EndsUntrained,
        _ => Program::Trains,
    }
}

impl Runner {
    pub(super) fn train(&mut self, record: &mut TrialRecord, target: TargetState, die: u8) {
        let attempt = live_attempt(record).unwrap();
        let batches = record.status.batches + 1;
        let end = |record: &mut _, end| end_attempt(record, end, None, &LIMITS);
        match (die % 8, program(record)) {
            (0, _) if die < 128 => end(record, AttemptEnd::Preempted),
            (0, _) => end(record, AttemptEnd::RunnerLost),
            (1, _) if record.status.checkpoints.len() > 1 => {
                end(record, AttemptEnd::Infrastructure);
            }
            (2, _) => self.save_checkpoints(record, attempt, batches),
            (_, Program::StopsItself) => {
                let report = report(attempt, batches, validated("0.5", None));
                record_report(record, &report, &LOSS);
                end(record, AttemptEnd::Completed);
            }
            (_, Program::EndsUntrained) => end(record, AttemptEnd::Completed),
            (_, Program::RefusesHyperparameters) => {
                let message = Some("no batch size".to_owned());
                end_attempt(record, AttemptEnd::InvalidHyperparameters, message, &LIMITS);
            }
            (_, Program::Fails) => end(record, AttemptEnd::UserError),
            (_, Program::Trains) => match directive(record, attempt, target) {
                Directive::Continue { units } => self.complete_length(record, attempt, units, die),
                Directive::Stop => end(record, AttemptEnd::Completed),
                Directive::Preempt => end(record, AttemptEnd::Preempted),
                Directive::Wait => {}
                Directive::Fenced => panic!("a live attempt was fenced"),
            },
        }
        let old = self.last_report.insert(record.spec.index, (attempt, batches));
        if let Some((old, batches)) = old.filter(|(reported_by, _)| *reported_by < attempt) {
            let report = report(old, batches, validated("9", Some(9)));
            assert_eq!(record_report(record, &report, &LOSS), ReportEffect::Fenced);
        }
    }
}
