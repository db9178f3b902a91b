//! Reports of a custom loop to the runner: progress, metrics, granted length and activity.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use stoker_api::contract::{
    self, ACTIVITY_CHARS_MAX, Directive, ReportEvent, TrialConfig, reported_metrics,
};
use stoker_api::experiment::Unit;

use super::find_searched_metric;
use crate::Result;
use crate::callback::Logs;
use crate::train::Timetable;
use crate::trial_io::TrialIo;

/// Minimum interval between heartbeats, for programs that check for a stop continuously.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(3);
/// Minimum interval between reports of the activity: each changes the trial's object.
const ACTIVITY_INTERVAL: Duration = Duration::from_secs(10);

impl TrialIo {
    /// See [`Session::report_metrics`](super::Session::report_metrics).
    pub(super) fn report_metrics(
        &mut self,
        group: &str,
        batches: u64,
        metrics: impl IntoIterator<Item = (String, f64)>,
    ) -> Result<()> {
        let (named, complete) = self.reported.add(group, batches, metrics)?;
        self.report_start();
        if let Some((batches, metrics)) = complete {
            self.report_validation(batches, &metrics);
        }
        self.batches = self.batches.max(self.base + batches);
        let epoch = self.length.epoch(batches);
        self.write_row(group, batches, epoch, &named)
    }

    pub(super) fn report_progress(&mut self, batches: u64) {
        self.batches = self.batches.max(self.base + batches);
        self.terminal.advance(batches, self.length.batches);
        self.send_progress();
    }

    fn send_progress(&mut self) {
        self.report_start();
        self.report_last_validation();
        let batches_total = match self.length.batches {
            // A training loop of this crate has set the total.
            0 => self.batches_total,
            batches => self.base + batches,
        };
        let activity = self.activity.due();
        self.post_at(self.batches, ReportEvent::Progress { batches_total, activity });
        self.length.reported_at = Some(Instant::now());
    }

    pub(super) fn set_status(&mut self, text: &str) {
        let text: String = text.chars().take(ACTIVITY_CHARS_MAX).collect();
        if self.activity.text.as_ref() == Some(&text) {
            return;
        }
        self.terminal.print_line(&format!("status: {text}"));
        self.activity.text = Some(text);
        self.activity.is_new = true;
        if self.activity.is_due() {
            self.send_progress();
        }
    }

    /// Reports the start of this attempt, unless it was already reported.
    fn report_start(&mut self) {
        if !self.is_started {
            let batches_total = self.length.batches;
            let (resumed_from, refused) = Default::default();
            self.post(0, ReportEvent::Started { resumed_from, batches_total, refused });
        }
    }

    pub(super) fn heartbeat(&mut self) {
        if self.length.reported_at.is_none_or(|at| at.elapsed() >= HEARTBEAT_INTERVAL) {
            self.send_progress();
        }
    }

    pub(super) fn set_length(
        &mut self,
        config: &TrialConfig,
        epoch_batches: u64,
        timetable: Timetable,
        unit: Unit,
    ) -> u64 {
        if config.time_metric.is_some() {
            // The number of batches is not known in advance.
            return self.length.units.max(1);
        }
        self.length.epoch_batches = epoch_batches;
        self.length.batches = timetable.batches(unit, self.length.units.max(1));
        self.length.counted_by = Some((timetable, unit));
        self.length.batches
    }

    /// Checks that the program has trained to the granted length.
    ///
    /// # Errors
    ///
    /// Fails if the length ends later, or if the validation lacks the metric that measures it.
    pub(super) fn check_completed(
        &self,
        config: &TrialConfig,
        batches: u64,
        metrics: &Logs,
    ) -> Result<()> {
        let units = self.length.units.max(1);
        if let Some(name) = &config.time_metric {
            let trained = find_time_metric(name, metrics)?;
            if !is_trained(trained, units) {
                let text = format!(
                    "{name} is {trained} at batch {batches}, but the granted length is {units}: \
                     call `units` again after `should_preempt`, and train to it before \
                     `complete_length`"
                );
                return Err(text.into());
            }
        } else if self.length.batches > batches {
            let text = format!(
                "batch {batches} is not the granted length, which ends at batch {}: call `length` \
                 again after `should_preempt`, and train to it before `complete_length`",
                self.length.batches
            );
            return Err(text.into());
        }
        Ok(())
    }

    /// Returns whether the granted length ends at or before this batch.
    pub(super) fn length_ends_by(&self, config: &TrialConfig, batches: u64) -> bool {
        if let Some(name) = &config.time_metric {
            let trained = self
                .validation_at(batches)
                .and_then(|metrics| find_time_metric(name, &metrics).ok());
            return trained.is_some_and(|trained| is_trained(trained, self.length.units.max(1)));
        }
        let Some((timetable, unit)) = &self.length.counted_by else { return false };
        timetable.batches(*unit, self.length.units.max(1)) <= batches
    }

    /// Returns the length in the runner's last directive, in the experiment's unit, or 0.
    pub(super) fn granted_units_from_directive(&self) -> u64 {
        match self.directive() {
            Some(Directive::Continue { units }) => units,
            _ => 0,
        }
    }

    pub(super) fn grant(&mut self, units: u64) {
        self.length.units = self.length.units.max(units);
    }

    pub(super) fn granted_units(&self) -> u64 {
        self.length.units
    }

    pub(super) fn validation_at(&self, batches: u64) -> Option<Logs> {
        let restored = self.restored_validation.as_ref();
        let restored = restored.filter(|(restored, _)| *restored == batches);
        let reported = self.reported.validation_at(batches).cloned();
        reported.or_else(|| restored.map(|(_, metrics)| metrics.clone()))
    }

    /// Returns the searched metric that was reported at this batch.
    pub(super) fn metric_at(&self, config: &TrialConfig, batches: u64) -> Option<f64> {
        find_searched_metric(config, &self.validation_at(batches)?).ok()
    }

    /// Returns the validation at this batch as it is reported to the runner; empty if there was
    /// none.
    pub(super) fn reported_validation_at(&self, batches: u64) -> BTreeMap<String, String> {
        let metrics = self.validation_at(batches).unwrap_or_default();
        reported_metrics(&metrics, &self.decisive_metrics)
    }

    /// Reports the last validation to the runner, unless it was reported. Call this when the
    /// program can add no more metrics to the validation.
    pub(crate) fn report_last_validation(&mut self) {
        if let Some((batches, metrics)) = self.reported.take_unreported_validation() {
            self.report_validation(batches, &metrics);
        }
    }

    fn report_validation(&mut self, batches: u64, metrics: &Logs) {
        let event = self.validation_event(metrics, None);
        self.post(batches, event);
    }

    /// Returns the event that reports the validation at the end of a granted length.
    pub(super) fn result_event(&mut self, metrics: &Logs, units: u64) -> ReportEvent {
        let _ = self.reported.take_unreported_validation();
        self.validation_event(metrics, Some(units))
    }

    fn validation_event(&self, metrics: &Logs, granted_units: Option<u64>) -> ReportEvent {
        let metrics = reported_metrics(metrics, &self.decisive_metrics);
        ReportEvent::Validated { metrics, granted_units }
    }
}

/// Returns the metric that measures the trained length. Its name may lack the prefix of reports.
///
/// # Errors
///
/// Fails if the metric is missing.
fn find_time_metric(name: &str, metrics: &Logs) -> Result<f64> {
    contract::find_time_metric(metrics, name).copied().ok_or_else(|| {
        format!(
            "the validation lacks {name}, which measures the trained length; report it or change \
             searcher.timeMetric"
        )
        .into()
    })
}

/// Returns whether a count has reached a length; NaN has not.
fn is_trained(count: f64, units: u64) -> bool {
    count >= units as f64
}

/// The granted length, as far as the program has queried it.
#[derive(Debug, Default)]
pub(crate) struct GrantedLength {
    units: u64,
    pub(super) batches: u64,
    epoch_batches: u64,
    counted_by: Option<(Timetable, Unit)>,
    /// When progress was last reported to the runner.
    reported_at: Option<Instant>,
}

impl GrantedLength {
    pub(crate) fn new(units: u64) -> Self {
        Self { units, ..Self::default() }
    }

    /// Returns how many epochs finished before this batch. Batches count from 1.
    fn epoch(&self, batches: u64) -> u64 {
        batches.saturating_sub(1).checked_div(self.epoch_batches).unwrap_or_default()
    }
}

/// The program's activity, from `set_status`.
#[derive(Debug, Default)]
pub(crate) struct Activity {
    text: Option<String>,
    /// Whether the text has not been reported to the runner.
    is_new: bool,
    reported_at: Option<Instant>,
}

impl Activity {
    fn is_due(&self) -> bool {
        self.is_new && self.reported_at.is_none_or(|at| at.elapsed() >= ACTIVITY_INTERVAL)
    }

    /// Returns the activity to send with the next progress report, if one is due.
    pub(crate) fn due(&mut self) -> Option<String> {
        if !self.is_due() {
            return None;
        }
        (self.is_new, self.reported_at) = (false, Some(Instant::now()));
        self.text.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn activity_reports_are_rate_limited() {
        let mut activity = Activity { text: Some("a".into()), is_new: true, reported_at: None };
        assert_eq!(activity.due().as_deref(), Some("a"));
        assert_eq!(activity.due(), None);
        (activity.text, activity.is_new) = (Some("b".into()), true);
        assert_eq!(activity.due(), None);
        activity.reported_at =
            activity.reported_at.and_then(|at| at.checked_sub(ACTIVITY_INTERVAL));
        assert_eq!(activity.due().as_deref(), Some("b"));
    }
}
