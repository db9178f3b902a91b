//! Reports of trainers.

use stoker_api::contract::{Directive, Report, ReportEvent};
use stoker_api::validate::Method;
use stoker_engine::search::SearchConfig;
use stoker_engine::trial::{self, ReportEffect, SearchedMetric};

use super::{Happening, State};
use crate::cluster::text::now;
use crate::failure::Failure;

impl State {
    /// Records a report and returns the directive for its trainer.
    ///
    /// # Errors
    ///
    /// [`Failure::Input`] for a report that cannot be true. Otherwise the record could not be
    /// written, and the trainer repeats the report.
    pub(crate) fn report(&mut self, index: u32, report: &Report) -> Result<Directive, Failure> {
        self.recover()?;
        let Some(mut record) = self.trials.get(&index).cloned() else {
            return Ok(Directive::Fenced);
        };
        let num_facts = record.status.facts.len();
        let SearchConfig { smaller_is_better, other_objectives, method, .. } = self.ledger.config();
        let searched = SearchedMetric {
            name: &self.metric,
            smaller_is_better: *smaller_is_better,
            others: other_objectives,
            is_copied: matches!(method, Method::Pbt { .. }),
        };
        let effect = trial::record_report(&mut record, report, &searched);
        if let ReportEffect::Refused { why } = effect {
            self.note(format!("trial {index}: a report was refused: {why}"));
            return Err(Failure::Input(why));
        }
        trial::stamp_facts(&mut record, num_facts, now());
        let has_new_fact = record.status.facts.len() > num_facts;
        if effect == ReportEffect::New {
            match report.event {
                // Nothing is decided by progress, so it is not written.
                ReportEvent::Progress { .. } => self.replace(record),
                _ if has_new_fact => {
                    self.save_with_turn(record).map_err(|error| self.fail(error))?;
                }
                _ => self.save(record).map_err(|error| self.fail(error))?,
            }
        }
        let settled = if has_new_fact { self.settle() } else { Ok(()) };
        // A report that is not recorded is sent again.
        if effect == ReportEffect::New && !self.is_fact_waiting(index) {
            self.announce(index, report);
        }
        settled?;
        let Some(record) = self.trials.get(&index) else { return Ok(Directive::Fenced) };
        Ok(trial::directive(record, report.attempt, self.target(index)))
    }

    fn announce(&mut self, index: u32, report: &Report) {
        let happening = match &report.event {
            ReportEvent::Started { resumed_from, refused, .. } => Happening::Started {
                attempt: report.attempt,
                from: resumed_from.clone(),
                refused: refused.clone(),
            },
            ReportEvent::Validated { metrics, .. } => {
                Happening::Validated { batches: report.batches, metrics: metrics.clone() }
            }
            ReportEvent::Checkpointed { name, .. } => {
                self.prunable.insert(index);
                Happening::Checkpointed { batches: report.batches, name: name.clone() }
            }
            ReportEvent::Progress { .. } | ReportEvent::Exiting { .. } => return,
        };
        self.happenings.push((index, happening));
    }
}
