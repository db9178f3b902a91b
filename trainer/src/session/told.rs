//! What the runner is told of a loop of the program's own, and when.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use stoker_api::contract::{ACTIVITY_CHARS_MAX, Directive, ReportEvent, TrialConfig};

use super::searched_among;
use crate::Result;
use crate::callback::Logs;
use crate::outlet::Outlet;

/// Time between two signs of life of a program that asks all the time.
const SIGN_OF_LIFE: Duration = Duration::from_secs(1);

impl Outlet {
    /// See [`Session::report_metrics`](super::Session::report_metrics).
    pub(super) fn report(
        &mut self,
        group: &str,
        batches: u64,
        metrics: impl IntoIterator<Item = (String, f64)>,
    ) -> Result<()> {
        let (named, whole) = self.reported.add(group, batches, metrics)?;
        self.start();
        if let Some((batches, metrics)) = whole {
            self.tell(batches, &metrics);
        }
        self.batches = self.batches.max(self.base + batches);
        let epoch = self.length.epoch(batches);
        self.write_row(group, batches, epoch, &named)
    }

    pub(super) fn report_progress(&mut self, batches: u64) {
        self.batches = self.batches.max(self.base + batches);
        self.terminal.advance(batches, self.length.batches);
        self.say_progress(None);
    }

    fn say_progress(&mut self, activity: Option<String>) {
        self.start();
        self.tell_validation();
        let batches_total = self.base + self.length.batches;
        self.post_at(self.batches, ReportEvent::Progress { batches_total, activity });
        self.length.said_at = Some(Instant::now());
    }

    pub(super) fn set_status(&mut self, text: &str) {
        let text: String = text.chars().take(ACTIVITY_CHARS_MAX).collect();
        self.terminal.say(&format!("status: {text}"));
        self.say_progress(Some(text));
    }

    /// Tells the runner that this attempt trains, if it does not know.
    fn start(&mut self) {
        if !self.is_started {
            let batches_total = self.length.batches;
            let (resumed_from, refused) = Default::default();
            self.post(0, ReportEvent::Started { resumed_from, batches_total, refused });
        }
    }

    pub(super) fn sign_of_life(&mut self) {
        if self.length.said_at.is_none_or(|it| it.elapsed() >= SIGN_OF_LIFE) {
            self.say_progress(None);
        }
    }

    pub(super) fn set_length(
        &mut self,
        epoch_batches: u64,
        batches: impl FnOnce(u64) -> u64,
    ) -> u64 {
        self.length.epoch_batches = epoch_batches;
        self.length.batches = batches(self.length.units.max(1));
        self.length.batches
    }

    /// The length that the runner last told of, in the experiment's unit; 0: none.
    pub(super) fn told_units(&self) -> u64 {
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
        self.reported.validation_at(batches).cloned()
    }

    /// The searched metric that was reported at this batch.
    pub(super) fn metric_at(&self, config: &TrialConfig, batches: u64) -> Option<f64> {
        searched_among(config, self.reported.validation_at(batches)?).ok()
    }

    /// Tells the runner of the last validation: nothing more comes to it.
    pub(crate) fn tell_validation(&mut self) {
        if let Some((batches, metrics)) = self.reported.whole() {
            self.tell(batches, &metrics);
        }
    }

    fn tell(&mut self, batches: u64, metrics: &Logs) {
        let event = ReportEvent::Validated { metrics: formatted(metrics), granted_units: None };
        self.post(batches, event);
    }

    /// What the runner is told of the validation where a length ends.
    pub(super) fn result(&mut self, metrics: &Logs, units: u64) -> ReportEvent {
        let _ = self.reported.whole();
        ReportEvent::Validated { metrics: formatted(metrics), granted_units: Some(units) }
    }
}

fn formatted(metrics: &Logs) -> BTreeMap<String, String> {
    let format =
        |(name, value): (&String, &f64)| (name.clone(), stoker_api::number::format(*value));
    metrics.iter().map(format).collect()
}

/// How long to train, as far as the program has asked.
#[derive(Debug, Default)]
pub(crate) struct GrantedLength {
    units: u64,
    pub(super) batches: u64,
    epoch_batches: u64,
    /// When the runner was last told how far the program is.
    said_at: Option<Instant>,
}

impl GrantedLength {
    pub(crate) fn new(units: u64) -> Self {
        Self { units, ..Self::default() }
    }

    /// Epochs finished before the batch of this number, which counts from 1.
    fn epoch(&self, batches: u64) -> u64 {
        batches.saturating_sub(1).checked_div(self.epoch_batches).unwrap_or_default()
    }
}
