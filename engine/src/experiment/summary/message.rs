//! Messages of ended experiments.

use stoker_api::experiment::Phase;
use stoker_api::trial::CloseCause;

use super::Summary;
use crate::experiment::Ledger;
use crate::trial::TrialRecord;

impl Summary {
    pub(super) fn message(&self, phase: Phase, ledger: &Ledger, has_best: bool) -> Option<String> {
        let num_closed: u32 = self.num_closed.values().sum();
        let num_invalid = ledger.book().num_invalid();
        match phase {
            Phase::Completed | Phase::Failed if !ledger.book().may_replace() => Some(format!(
                "the program rejected the hyperparameters of {num_invalid} of {num_closed} trials, \
                 so no more were created; change spec.hyperparameters or the program's checks"
            )),
            Phase::Completed if let Some(limit) = ledger.limit_reached() => {
                let without = if has_best { "" } else { ", and no trial has a result" };
                Some(format!(
                    "the search reached spec.searcher.limits.{}, {}, with {}{without}",
                    limit.limit.name(),
                    limit.maximum,
                    limit.spent
                ))
            }
            Phase::Failed => Some("no trial completed".to_owned()),
            Phase::Completed if !has_best => Some("no trial has a result".to_owned()),
            _ => None,
        }
    }

    /// Returns why a search ended whose trials failed, or rejected their hyperparameters for the
    /// same reason.
    pub(super) fn failures<'a>(
        &self,
        ledger: &Ledger,
        name: &str,
        trial: impl Fn(u32) -> Option<&'a TrialRecord>,
    ) -> String {
        let is_rejected = ledger.book().has_equal_rejections();
        let cause = match is_rejected {
            true => CloseCause::InvalidHyperparameters,
            false => CloseCause::Failed,
        };
        let ended = self.shares.iter().filter(|(_, of)| of.closed == Some(cause));
        let first = ended.clone().next().and_then(|(index, _)| {
            let message = trial(*index)?.status.message.as_deref()?;
            Some(format!(": trial {index}: {message}"))
        });
        let (num, first) = (ended.count(), first.unwrap_or_default());
        match is_rejected {
            true => format!(
                "the program rejected the hyperparameters of all {num} trials with the same \
                 message, so no more were created{first}; change spec.hyperparameters or the \
                 program's checks"
            ),
            false => format!(
                "the search ended because {num} trials failed and none has a result{first}; fix \
                 the cause, then continue them (`stoker experiment continue {name} --failed`) or \
                 create a new experiment"
            ),
        }
    }
}
